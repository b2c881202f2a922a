"""The latency of a well-behaved client's appends during each attack, compared with idle load of equal CPU time.

Method: three nodes as processes of their own, with security unless the attack is one without. A process of its own runs
an attack of ``tests.server.attacks.attackers`` with its full count, again and again; this process appends one entry of
100 bytes each 5 ms on average on an open connection, and measures until the acknowledgement. The control is a process
that burns as much CPU time as the attacker's own process did, and sends nothing. Reported: p50 and p99 in ms for both,
and their ratios; the target is at most 2. Attack and control alternate for ``--rounds`` rounds, and the median counts.
The processors that nodes spend on the attack are no part of the control. Not included: a network; nodes, attack and
measurement share one machine's processors.

Run: ``python -m tests.benchmarks.bench_attacks [--seconds 5] [--rounds 3] [--attack NAME]``. Prints one JSON object per
attack; ``--attack`` may be repeated. All attacks take about six minutes by default.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import uvloop

from dledger_core import AsyncClient
from dledger_core.config import parse_peer
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.tls import TlsOptions
from tests.server.attacks.attacked_cluster import AttackedCluster, attacked_cluster
from tests.server.attacks.attackers import ATTACKS, Attack, Enemy, Target

HOLD_S = 2.0
SLICE_S = 0.01


def name_of(attack: Attack) -> str:
    """Return the name of a row."""
    return f"{attack.run.__name__}{'' if attack.secure else '-plaintext'}"


async def attack_until_stopped(attack: Attack, target: Target) -> None:
    """Run an attack again and again; print the CPU share of this process once standard input ends."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: stopped.set())
    begun, used = time.perf_counter(), time.process_time()
    sys.stdout.write("begun\n")
    sys.stdout.flush()

    async def repeat() -> None:
        while True:
            async with Enemy(target) as enemy:
                await attack.run(enemy, attack.full)
                await asyncio.sleep(HOLD_S)

    repeating = asyncio.ensure_future(repeat())
    await asyncio.wait([repeating, asyncio.ensure_future(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
    if repeating.done():
        repeating.result()
    sys.stdout.write(f"{(time.process_time() - used) / (time.perf_counter() - begun)}\n")
    sys.stdout.flush()
    repeating.cancel()
    await asyncio.gather(repeating, return_exceptions=True)


def burn(share: float) -> None:
    """Use a share of one processor until standard input ends; this process is killed then."""
    sys.stdout.write("begun\n")
    sys.stdout.flush()
    while True:
        ends = time.perf_counter() + SLICE_S * min(share, 1.0)
        while time.perf_counter() < ends:
            pass
        time.sleep(SLICE_S * max(0.0, 1.0 - share))


async def latencies(client: AsyncClient, seconds: float) -> list[float]:
    """Append for a time, one entry each 5 ms on average; return the latencies in ms."""
    found: list[float] = []

    async def one() -> None:
        begun = time.perf_counter()
        await client.append([bytes(100)])
        found.append(1000 * (time.perf_counter() - begun))

    ends, running = time.perf_counter() + seconds, set()
    while time.perf_counter() < ends:
        await asyncio.sleep(random.expovariate(200))
        running.add(asyncio.ensure_future(one()))
    await asyncio.gather(*running)
    return found


@dataclass
class Measured:
    """p50 and p99 of one measurement in ms."""

    p50: float
    p99: float

    @classmethod
    def of(cls, found: list[float]) -> Measured:
        """Return the quantiles."""
        ordered = sorted(found)
        return cls(statistics.median(ordered), ordered[int(len(ordered) * 0.99)])


def beside(cluster: AttackedCluster, arguments: list[str], seconds: float) -> tuple[Measured, str]:
    """Measure next to a process of this module; return the latencies and its last line."""
    token = None if cluster.nodes.tls is None else "good"

    async def measure() -> list[float]:
        async with AsyncClient(cluster.nodes.peers, tls=cluster.nodes.tls, token=token, timeout_ms=60_000) as client:
            await client.append([b"connect"])
            await asyncio.to_thread(process.stdout.readline)
            return await latencies(client, seconds)

    command = [sys.executable, "-m", "tests.benchmarks.bench_attacks", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            measured = Measured.of(uvloop.run(measure()))
            process.stdin.close()
            line = "" if arguments[0] == "--burn" else process.stdout.readline()
        finally:
            process.kill()
    return measured, line


def case(cluster: AttackedCluster, attack: Attack, seconds: float, rounds: int) -> dict[str, object]:
    """Return the result of one attack."""
    found: dict[str, list[Measured]] = {"attack": [], "control": []}
    shares = []
    for _ in range(rounds):
        target, tls = cluster.target(), cluster.nodes.tls
        node = f"{target.node.node_id}-{target.node.address}"
        measured, line = beside(cluster, ["--run", name_of(attack), node, "" if tls is None else str(tls.ca)], seconds)
        found["attack"].append(measured)
        if not line:
            raise RuntimeError(f"the attack {name_of(attack)} failed")
        shares.append(float(line))
        found["control"].append(beside(cluster, ["--burn", line.strip()], seconds)[0])
    medians = {
        kind: {each: statistics.median(getattr(row, each) for row in rows) for each in ("p50", "p99")}
        for kind, rows in found.items()
    }
    return {
        "attack": name_of(attack),
        "count": attack.full,
        "attacker_cpu": round(statistics.median(shares), 2),
        **{f"{each}_ratio": round(medians["attack"][each] / medians["control"][each], 2) for each in ("p50", "p99")},
        **{f"{kind}_{each}_ms": round(value, 1) for kind, values in medians.items() for each, value in values.items()},
    }


def main() -> None:
    """Run the attacks and print the results."""
    names = [name_of(attack) for attack in ATTACKS]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attack", choices=names, action="append", metavar="NAME", help=", ".join(names))
    parser.add_argument("--run", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--burn", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.burn is not None:
        burn(options.burn)
    elif options.run:
        name, node, authority = options.run
        [attack] = [attack for attack in ATTACKS if name_of(attack) == name]
        credentials = Credentials(TlsOptions(ca=Path(authority)), "bad") if authority else PLAINTEXT
        uvloop.run(attack_until_stopped(attack, Target(node=parse_peer(node), credentials=credentials)))
    else:
        for secure in (False, True):
            chosen = [attack for attack in ATTACKS if attack.secure is secure]
            chosen = [attack for attack in chosen if not options.attack or name_of(attack) in options.attack]
            if not chosen:
                continue
            with tempfile.TemporaryDirectory() as directory, attacked_cluster(Path(directory), secure=secure) as found:
                for attack in chosen:
                    sys.stdout.write(json.dumps(case(found, attack, options.seconds, options.rounds)) + "\n")
                    sys.stdout.flush()


if __name__ == "__main__":
    main()

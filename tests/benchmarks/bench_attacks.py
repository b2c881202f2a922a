"""The latency of a well-behaved client's appends during each attack, compared with idle load of equal CPU time.

Method: three nodes as processes of their own, with security unless the attack is one without. A process of its own runs
an attack of ``tests.server.attacks.attackers`` with its full count; this process appends one entry of 100 bytes each
5 ms on average on an open connection, and measures until the acknowledgement. An attack that lasts is built up once and
then held for ``--seconds``; another one is repeated for ``--seconds``. The control is a process that burns as much CPU
time as the attacker's own process did, and sends nothing. Reported: p50 and p99 in ms while the attack is built up, if
it lasts, and then while it is held or repeated; next to the control; and the ratios to it, with a target of at most 2.
Attack and control alternate for ``--rounds`` rounds, and the median counts. The processors that nodes spend on the
attack are no part of the control. Not included: a network; nodes, attack and measurement share one machine.

Run: ``python -m tests.benchmarks.bench_attacks [--seconds 5] [--rounds 3] [--attack NAME]``. Prints one JSON object per
attack; ``--attack`` may be repeated. All attacks take some fifteen minutes by default.
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
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import uvloop

from dledger_core import AsyncClient
from dledger_core.config import parse_peer
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.tls import TlsOptions
from tests.server.attacks.attacked_cluster import AttackedCluster, attacked_cluster
from tests.server.attacks.attackers import ATTACKS, Attack, Enemy, Target

SLICE_S = 0.01
SAMPLES_MIN = 20


def name_of(attack: Attack) -> str:
    """Return the name of a row."""
    return f"{attack.run.__name__}{'' if attack.secure else '-plaintext'}"


async def attack_until_stopped(attack: Attack, target: Target) -> None:
    """Run an attack until standard input ends; say when it is built up, and at the end this process' CPU share."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: stopped.set())
    begun, used = time.perf_counter(), time.process_time()
    say("begun")

    async def go() -> None:
        if not attack.lasts:
            say("built")
        while True:
            async with Enemy(target) as enemy:
                await attack.run(enemy, attack.full)
                if attack.lasts:
                    say("built")
                    await stopped.wait()

    running = asyncio.ensure_future(go())
    await asyncio.wait([running, asyncio.ensure_future(stopped.wait())], return_when=asyncio.FIRST_COMPLETED)
    if running.done():
        running.result()
    say(str((time.process_time() - used) / (time.perf_counter() - begun)))
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def burn(share: float) -> None:
    """Use a share of one processor until standard input ends; this process is killed then."""
    say("begun")
    say("built")
    while True:
        ends = time.perf_counter() + SLICE_S * min(share, 1.0)
        while time.perf_counter() < ends:
            pass
        time.sleep(SLICE_S * max(0.0, 1.0 - share))


Times = list[tuple[float, float]]
"""When each append was sent, and its latency in ms."""


async def latencies(client: AsyncClient, ends: Callable[[], bool]) -> Times:
    """Append one entry each 5 ms on average until ``ends``."""
    found: Times = []

    async def one() -> None:
        begun = time.perf_counter()
        await client.append([bytes(100)])
        found.append((begun, 1000 * (time.perf_counter() - begun)))

    running = set()
    while not ends():
        await asyncio.sleep(random.expovariate(200))
        running.add(asyncio.ensure_future(one()))
    await asyncio.gather(*running)
    return found


def quantiles(found: Times) -> dict[str, float]:
    """Return p50 and p99; nothing if there are too few."""
    if len(found) < SAMPLES_MIN:
        return {}
    ordered = sorted(latency for _, latency in found)
    return {"p50": statistics.median(ordered), "p99": ordered[int(len(ordered) * 0.99)]}


@dataclass
class Measured:
    """p50 and p99 in ms until the attack was built up, and then; and the CPU share of the attacker."""

    build_up: dict[str, float]
    built: dict[str, float]
    share: float


def measure_next_to(cluster: AttackedCluster, arguments: list[str], seconds: float) -> Measured:
    """Measure next to a process of this module."""
    token = None if cluster.nodes.tls is None else "good"
    command = [sys.executable, "-m", "tests.benchmarks.bench_attacks", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines = process.stdout
        built = [float("inf")]

        def wait_built() -> None:
            lines.readline()
            built[0] = time.perf_counter()

        async def measure() -> Times:
            async with AsyncClient(
                cluster.nodes.peers, tls=cluster.nodes.tls, token=token, timeout_ms=60_000
            ) as client:
                await client.append([b"connect"])
                await asyncio.to_thread(lines.readline)
                waiting = asyncio.ensure_future(asyncio.to_thread(wait_built))
                found = await latencies(client, lambda: time.perf_counter() > built[0] + seconds)
                await waiting
                return found

        try:
            found = uvloop.run(measure())
            process.stdin.close()
            line = "0" if arguments[0] == "--burn" else lines.readline()
        finally:
            process.kill()
    if not line:
        raise RuntimeError(f"the attack failed: {' '.join(arguments)}")
    before, after = ([row for row in found if (row[0] < built[0]) is early] for early in (True, False))
    return Measured(quantiles(before), quantiles(after), float(line))


def median_of(rows: list[dict[str, float]], key: str) -> float | None:
    """Return the median of the rows that have a figure, rounded."""
    found = [row[key] for row in rows if key in row]
    return round(statistics.median(found), 1) if found else None


def case(cluster: AttackedCluster, attack: Attack, seconds: float, rounds: int) -> dict[str, object]:
    """Return the result of one attack."""
    attacked, controls = [], []
    for _ in range(rounds):
        target, tls = cluster.target(), cluster.nodes.tls
        node = f"{target.node.node_id}-{target.node.address}"
        authority = "" if tls is None else str(tls.ca)
        attacked.append(measure_next_to(cluster, ["--run", name_of(attack), node, authority], seconds))
        controls.append(measure_next_to(cluster, ["--burn", str(attacked[-1].share)], seconds))
    share = round(statistics.median(row.share for row in attacked), 2)
    result: dict[str, object] = {"attack": name_of(attack), "count": attack.full, "attacker_cpu": share}
    for quantile in ("p50", "p99"):
        control = median_of([row.built for row in controls], quantile)
        result[f"control_{quantile}_ms"] = control
        for phase, rows in (
            ("held" if attack.lasts else "repeated", [row.built for row in attacked]),
            ("build_up", [row.build_up for row in attacked]),
        ):
            value = median_of(rows, quantile)
            if value is not None and control:
                result |= {f"{phase}_{quantile}_ms": value, f"{phase}_{quantile}_ratio": round(value / control, 2)}
    return result


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

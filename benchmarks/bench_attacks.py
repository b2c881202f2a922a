"""The latency of a well-behaved client's appends during each attack, compared with idle load of equal CPU time.

Method: three nodes as processes of their own, with security unless the attack is one without. A process of its own runs
an attack of ``tests.server.attacks.attackers`` with its full count; this process appends one entry of 100 bytes each
5 ms on average on an open connection, and measures until the acknowledgement. An attack that lasts is built up once and
then held for ``--seconds``; another one is repeated for ``--seconds``.

Each phase has a control: processes that burn as much CPU time as the attack cost in it, one for the attacker's own
process and one for each node, of which the time without an attack is subtracted. They send nothing. So a ratio of one
says that the attack delays others by the processors that it takes on this one machine, and no more. ``calm`` is the
latency with neither. Reported: p50 and p99 in ms of attack and control, and the ratios, with a target of at most 2.
Attack and controls alternate for ``--rounds`` rounds, and the median counts. Not included: a network.

Run: ``python -m benchmarks.bench_attacks [--seconds 5] [--rounds 3] [--attack NAME]``. Prints one JSON object per
attack; ``--attack`` may be repeated. A round of an attack measures three or four times ``--seconds``.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import psutil
import uvloop

from dledger_core import AsyncClient
from dledger_core.config import parse_peer
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.tls import TlsOptions
from tests.server.attacks.attacked_cluster import AttackedCluster, attacked_cluster
from tests.server.attacks.attackers import ATTACKS, Attack, Enemy, Target

SLICE_S = 0.01
SAMPLES_MIN = 20
START_S = 0.5
"""Time in which an interpreter has started."""
KEYS = ("p50", "p99")


def name_of(attack: Attack) -> str:
    """Return the name of a row."""
    return f"{attack.run.__name__}{'' if attack.secure else '-plaintext'}"


async def attack_until_stopped(attack: Attack, target: Target) -> None:
    """Run an attack until standard input ends; say when it begins and when it is built up."""
    stopped = asyncio.Event()
    asyncio.get_running_loop().run_in_executor(None, sys.stdin.read).add_done_callback(lambda _: stopped.set())
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
    say("ended")
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


def say(line: str) -> None:
    """Print a line at once."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def burn(share: float) -> None:
    """Use a share of one processor until this process is killed."""
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


class CpuClock:
    """CPU time of processes, as shares of one processor since the last sample."""

    def __init__(self, pids: Iterable[int]) -> None:
        self._processes = [psutil.Process(pid) for pid in pids]
        self._at, self._used = time.perf_counter(), self._cpu_s()

    def _cpu_s(self) -> list[float]:
        times = (each.cpu_times() for each in self._processes)
        return [found.user + found.system for found in times]

    def shares(self) -> list[float]:
        """Return the shares since the last call, in the order of the processes."""
        at, used = time.perf_counter(), self._cpu_s()
        found = [(new - old) / (at - self._at) for new, old in zip(used, self._used, strict=True)]
        self._at, self._used = at, used
        return found


@dataclass(frozen=True)
class Phase:
    """p50 and p99 in ms, and the CPU share of each process that was watched."""

    quantiles: dict[str, float]
    shares: list[float]


@contextlib.asynccontextmanager
async def connected(cluster: AttackedCluster) -> AsyncIterator[AsyncClient]:
    """Open the connection of the well-behaved client."""
    token = None if cluster.nodes.tls is None else "good"
    async with AsyncClient(cluster.nodes.peers, tls=cluster.nodes.tls, token=token, timeout_ms=60_000) as client:
        await client.append([b"connect"])
        yield client


def measure_calm(cluster: AttackedCluster, seconds: float) -> Phase:
    """Measure next to what runs already."""

    async def measure() -> Phase:
        async with connected(cluster) as client:
            clock, ends = CpuClock(cluster.pids()), time.perf_counter() + seconds
            found = await latencies(client, lambda: time.perf_counter() > ends)
            return Phase(quantiles(found), clock.shares())

    return uvloop.run(measure())


def measure_control(cluster: AttackedCluster, shares: list[float], seconds: float) -> Phase:
    """Measure next to processes that burn CPU time."""
    with contextlib.ExitStack() as stack:
        for share in shares:
            command = [sys.executable, "-m", "benchmarks.bench_attacks", "--burn", str(share)]
            stack.callback(stack.enter_context(subprocess.Popen(command)).kill)
        time.sleep(START_S)
        return measure_calm(cluster, seconds)


def measure_attack(cluster: AttackedCluster, attack: Attack, seconds: float) -> dict[str, Phase]:
    """Return the phases of an attack; the first process is the attacker's."""
    target, tls = cluster.target(), cluster.nodes.tls
    arguments = [name_of(attack), f"{target.node.node_id}-{target.node.address}", "" if tls is None else str(tls.ca)]
    command = [sys.executable, "-m", "benchmarks.bench_attacks", "--run", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        lines, built, phases = process.stdout, [float("inf")], {}

        async def measure() -> None:
            async with connected(cluster) as client:
                await asyncio.to_thread(lines.readline)
                clock = CpuClock([process.pid, *cluster.pids()])

                def wait_built() -> list[float]:
                    lines.readline()
                    built[0] = time.perf_counter()
                    return clock.shares()

                waiting = asyncio.ensure_future(asyncio.to_thread(wait_built))
                found = await latencies(client, lambda: time.perf_counter() > built[0] + seconds)
                shares = await waiting, clock.shares()
                for name, early, used in (("build_up", True, shares[0]), (phase_of(attack), False, shares[1])):
                    chosen = quantiles([row for row in found if (row[0] < built[0]) is early])
                    if chosen:
                        phases[name] = Phase(chosen, used)

        try:
            uvloop.run(measure())
            process.stdin.close()
            if not lines.readline():
                raise RuntimeError(f"the attack failed: {' '.join(arguments)}")
        finally:
            process.kill()
    return phases


def phase_of(attack: Attack) -> str:
    """Return the name of the phase after the build-up, or of the only one."""
    return "held" if attack.lasts else "repeated"


def median_of(rows: list[Phase], key: str) -> float:
    """Return the median of a figure, rounded."""
    return round(statistics.median(row.quantiles[key] for row in rows), 1)


def case(cluster: AttackedCluster, attack: Attack, seconds: float, rounds: int) -> dict[str, object]:
    """Return the result of one attack."""
    calm: list[Phase] = []
    attacked: dict[str, list[Phase]] = defaultdict(list)
    controls: dict[str, list[Phase]] = defaultdict(list)
    for _ in range(rounds):
        calm.append(measure_calm(cluster, seconds))
        for name, phase in measure_attack(cluster, attack, seconds).items():
            attacker, *nodes = phase.shares
            more = [max(0.0, share - before) for share, before in zip(nodes, calm[-1].shares, strict=True)]
            attacked[name].append(phase)
            controls[name].append(measure_control(cluster, [attacker, *more], seconds))
    result: dict[str, object] = {"attack": name_of(attack), "count": attack.full}
    result |= {f"calm_{key}_ms": median_of(calm, key) for key in KEYS}
    for name, rows in attacked.items():
        shares = [[row.shares[0], sum(row.shares[1:])] for row in rows]
        cpu = [round(statistics.median(column), 2) for column in zip(*shares, strict=True)]
        result |= {f"{name}_attacker_cpu": cpu[0], f"{name}_nodes_cpu": cpu[1]}
        for key in KEYS:
            value, control = median_of(rows, key), median_of(controls[name], key)
            result |= {f"{name}_{key}_ms": value, f"{name}_{key}_control_ms": control}
            result[f"{name}_{key}_ratio"] = round(value / control, 2)
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

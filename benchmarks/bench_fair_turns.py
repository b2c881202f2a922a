"""The cost of busy producers for a client next to them, compared with as many busy clients without producer ids.

Method: three nodes as processes of their own with default settings. A process with 16, 64 or 256 clients, each with a
connection of its own and one append before, appends entries of 100 bytes without a pause, one request at a time per
client: as idempotent producers, or plainly (the control). This process appends one plain entry each 5 ms on average
and measures until the acknowledgement. Reported: p50 and p99 in ms of the measured client, and the appends per second
of the others. The ratio compares the p99 next to producers with the p99 next to as many plain clients. Cases alternate
for ``--rounds`` rounds, and the median counts. Not included: a network; nodes, load and measurement share one
machine's processors.

Run: ``python -m benchmarks.bench_fair_turns [--seconds 5] [--rounds 3]``. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import subprocess
import sys
import time
from collections import defaultdict

import uvloop

from dledger_core import AsyncClient, AsyncProducer
from dledger_core.cluster import LocalCluster

CLIENTS = (16, 64, 256)
WARM_UP_S = 1.0


async def load(peers: str, count: int, seconds: float, *, produces: bool) -> int:
    """Append on ``count`` connections for a time; return the number of appends."""
    done, ready, ends = 0, asyncio.Barrier(count), 0.0

    async def run(number: int) -> None:
        nonlocal done, ends
        async with AsyncClient(peers, timeout_ms=30_000) as client:
            producer = AsyncProducer(client, f"{time.time_ns()}-{number}")
            await (producer if produces else client).append([b"first"])
            if await ready.wait() == 0:
                ends = time.monotonic() + seconds
                sys.stdout.write("ready\n")
                sys.stdout.flush()
            await ready.wait()
            while time.monotonic() < ends:
                await (producer if produces else client).append([b"x" * 100])
                done += 1

    await asyncio.gather(*(run(number) for number in range(count)))
    return done


async def measure(peers: str, seconds: float) -> dict[str, float]:
    """Return how long a plain append takes, in ms."""
    times = []
    async with AsyncClient(peers, timeout_ms=30_000) as client:
        await client.append([b"first"])
        ends = time.monotonic() + seconds
        while time.monotonic() < ends:
            began = time.perf_counter()
            await client.append([b"x" * 100])
            times.append(1000 * (time.perf_counter() - began))
            await asyncio.sleep(random.uniform(0, 0.01))
    times.sort()
    return {"p50_ms": statistics.median(times), "p99_ms": times[int(0.99 * len(times))]}


def case(peers: str, count: int, seconds: float, *, produces: bool) -> dict[str, float]:
    """Measure next to this load."""
    kind = "producers" if produces else "plain"
    command = [sys.executable, "-m", __spec__.name, "--load", kind, str(count), str(seconds + 2 * WARM_UP_S), peers]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as others:
        assert others.stdout is not None
        others.stdout.readline()  # all clients are connected
        time.sleep(WARM_UP_S)
        found = uvloop.run(measure(peers, seconds))
        return found | {"appends_per_s": int(others.stdout.read()) / (seconds + 2 * WARM_UP_S)}


def main() -> None:
    """Run the rounds and print the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.load:
        kind, count, seconds, peers = options.load
        sys.stdout.write(str(uvloop.run(load(peers, int(count), float(seconds), produces=kind == "producers"))))
        return
    found: dict[tuple[int, bool], dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    with LocalCluster(data_segment_bytes=64 << 20) as cluster:
        for _ in range(options.rounds):
            for count in CLIENTS:
                for produces in (False, True):
                    for name, value in case(cluster.peers, count, options.seconds, produces=produces).items():
                        found[count, produces][name].append(value)
    result = []
    for count in CLIENTS:
        row = {
            kind: {name: round(statistics.median(values), 1) for name, values in found[count, produces].items()}
            for kind, produces in (("plain", False), ("producers", True))
        }
        result.append({"clients": count, "p99_ratio": row["producers"]["p99_ms"] / row["plain"]["p99_ms"]} | row)
    sys.stdout.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()

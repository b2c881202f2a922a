"""How much a follower that catches up slows down the appends of others.

Method: three node processes on loopback, all stores on one disk (``TMPDIR`` names it). One client appends 100 bytes at
a time; its latencies over ``--seconds`` are "before". Then a follower is stopped, ``--mib`` MiB are appended in
requests of 1 MiB, and the follower starts again. The latencies until it has everything are "during", and its time is
given. The ratio of the two p99 is the result: the three nodes share the disk and the processors, which real ones do
not, so it is an upper limit.

Run: ``python -m benchmarks.bench_catch_up [--mib 1500] [--seconds 5]``. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable

from dledger_core import Client
from dledger_core.cluster import LocalCluster
from tests.support.soon import soon


def after(seconds: float) -> Callable[[], bool]:
    """Return a function that is true after some seconds."""
    end = time.monotonic() + seconds
    return lambda: time.monotonic() > end


def latencies_ms(client: Client, is_over: Callable[[], bool]) -> list[float]:
    """Append one small entry after another; return the latency of each, sorted."""
    found = []
    while not is_over():
        began = time.monotonic()
        client.append([bytes(100)])
        found.append((time.monotonic() - began) * 1000)
    return sorted(found)


def summary(latencies: list[float]) -> dict[str, float]:
    """Return the percentiles of sorted latencies."""
    last = len(latencies) - 1
    shares = {"p50_ms": 0.5, "p99_ms": 0.99, "max_ms": 1.0}
    return {"appends": len(latencies)} | {name: round(latencies[int(last * s)], 2) for name, s in shares.items()}


def measure(cluster: LocalCluster, mib: int, seconds: float) -> dict[str, object]:
    """Return the result of one run."""
    with Client(cluster.peers, timeout_ms=60_000) as client:
        leader = cluster.leader()
        follower = next(node for node in cluster.node_ids if node != leader)
        latencies_ms(client, after(1))
        before = latencies_ms(client, after(seconds))
        cluster.stop(follower)
        for _ in range(mib):
            end = client.append([bytes(1 << 20)]).last_index
        began, caught_up = time.monotonic(), threading.Event()

        def watch() -> None:
            with Client(cluster.peers) as watching:

                def has_all() -> bool:
                    node = next(each for each in watching.metadata().nodes if each.node_id == follower)
                    return node.reachable and node.last_index >= end

                soon(has_all, 600.0, every_s=0.05)
                caught_up.set()

        cluster.restart(follower)
        threading.Thread(target=watch, daemon=True).start()
        during = latencies_ms(client, caught_up.is_set)
        took = time.monotonic() - began
    first, second = summary(before), summary(during)
    ratio = round(second["p99_ms"] / first["p99_ms"], 1)
    return {"before": first, "during": second, "catch_up_s": round(took, 1), "p99_ratio": ratio}


def main() -> None:
    """Runs the measurement and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=1500)
    parser.add_argument("--seconds", type=float, default=5.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory, LocalCluster(3, directory) as cluster:
        sys.stdout.write(json.dumps(measure(cluster, options.mib, options.seconds)) + "\n")


if __name__ == "__main__":
    main()

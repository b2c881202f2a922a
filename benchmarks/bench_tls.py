"""The cost of TLS: throughput and latency of appends with it and without, and the time of a handshake.

Method: ``dledger perf append`` with three nodes of its own and default settings, with and without ``--tls``, once with
requests of 1 MiB (throughput) and once with one request of one entry at a time (latency). Cases alternate for
``--rounds`` rounds, and the median counts. A handshake is a connection with hello to a node, one at a time. Not
included: a network; nodes, load and measurement share one machine's processors.

Run: ``python -m benchmarks.bench_tls [--seconds 5] [--rounds 3]``. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import subprocess
import sys
import time
from collections import defaultdict

from dledger_core import LocalCluster
from dledger_core.client.routing.channel import Channel
from dledger_core.config import parse_peers
from dledger_core.net.credentials import Credentials

SHAPES = {"throughput": (), "latency": ("--request-bytes", "100", "--in-flight", "1")}
CONNECTIONS = 60


def append(seconds: float, shape: str, *, tls: bool) -> dict[str, float]:
    """Return the result of one measurement."""
    command = [sys.executable, "-m", "dledger_core.cli", "perf", "append", "--format", "json"]
    command += ["--seconds", str(seconds), *SHAPES[shape], *(["--tls"] if tls else [])]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout)


async def connect(peers: str, credentials: Credentials) -> list[float]:
    """Return the durations of connections that are opened in sequence, in ms."""
    times = []
    for _ in range(CONNECTIONS):
        channel = Channel(parse_peers(peers)[0], credentials=credentials)
        begun = time.perf_counter()
        await channel.open(20)
        times.append(1000 * (time.perf_counter() - begun))
        await channel.close()
    return times


def main() -> None:
    """Run the rounds and print the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = defaultdict(list)
    for number in range(options.rounds):
        for shape in SHAPES:
            for tls in (True, False) if number % 2 else (False, True):
                found[f"{shape}{'_tls' if tls else ''}"].append(append(options.seconds, shape, tls=tls))
    medians = {
        case: {key: statistics.median(each[key] for each in results) for key in results[0]}
        for case, results in found.items()
    }
    handshakes = {}
    for tls in (False, True):
        with LocalCluster(1, tls=tls) as cluster:
            credentials = Credentials(cluster.tls, cluster.token)
            handshakes["tls" if tls else "plaintext"] = statistics.median(
                asyncio.run(connect(cluster.peers, credentials))
            )
    rate = "entries_per_s"
    result = {
        "medians": medians,
        "throughput_ratio": round(medians["throughput_tls"][rate] / medians["throughput"][rate], 3),
        "connect_ms": handshakes,
    }
    sys.stdout.write(f"{json.dumps(result)}\n")


if __name__ == "__main__":
    main()

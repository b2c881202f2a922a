"""The cost of a majority's acknowledgement, compared with weaker guarantees on the same machine.

Method: clusters of real processes on loopback, all stores on one disk (``TMPDIR`` names it), measured with
``dledger perf append``: requests of one entry, one at a time, for the time until an acknowledgement (p50); requests
of 1 MiB, six at a time, for throughput. Four clusters: three nodes and one node, each with ``durability`` fsync and
page-cache (Java DLedger's). All run at the same time and are loaded in turns; each number is the median of
``--rounds`` rounds, so that a busy moment of the machine affects all of them. The ratios compare with three nodes and
fsync: the gain of page-cache is the cost of the flush, the gain of one node is the cost of the majority. Not included:
a network, three disks instead of one, and the processors of three machines, all of which three real nodes have.

Run: ``python -m benchmarks.bench_majority [--seconds 5] [--rounds 3]``. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from dledger_core.cluster import LocalCluster

CLUSTERS = {
    "3 nodes, fsync": (3, "fsync"),
    "3 nodes, page-cache": (3, "page-cache"),
    "1 node, fsync": (1, "fsync"),
    "1 node, page-cache": (1, "page-cache"),
}
LOADS = {
    "p50_ms": ["--size", "100", "--request-bytes", "100", "--in-flight", "1"],
    "entries_per_s": ["--size", "100", "--in-flight", "6"],
}
BASE = "3 nodes, fsync"


def measure(peers: str, load: list[str], seconds: float) -> dict[str, Any]:
    """Return the results of ``dledger perf append``."""
    command = [sys.executable, "-m", "dledger_core.cli", "perf", "append", "--peers", peers, "--group", "default"]
    done = subprocess.run(
        [*command, "--format", "json", "--seconds", str(seconds), *load],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    )
    return dict(json.loads(done.stdout))


def main() -> None:
    """Runs the rounds and prints the figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {name: {figure: [] for figure in LOADS} for name in CLUSTERS}
    with ExitStack() as stack:
        root = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        peers = {
            name: stack.enter_context(LocalCluster(nodes, root / name, durability=durability)).peers
            for name, (nodes, durability) in CLUSTERS.items()
        }
        for _ in range(options.rounds):
            for figure, load in LOADS.items():
                for name in CLUSTERS:
                    found[name][figure].append(measure(peers[name], load, options.seconds)[figure])
    middle = {name: {figure: statistics.median(taken) for figure, taken in row.items()} for name, row in found.items()}
    base = middle[BASE]
    ratios = {
        name: {
            "latency": round(base["p50_ms"] / row["p50_ms"], 2),
            "throughput": round(row["entries_per_s"] / base["entries_per_s"], 2),
        }
        for name, row in middle.items()
        if name != BASE
    }
    sys.stdout.write(json.dumps({"median": middle, f"times better than {BASE}": ratios}) + "\n")


if __name__ == "__main__":
    main()

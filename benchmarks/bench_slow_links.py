"""One append of 7 MiB, the largest legal one but for a few bytes, over links of several rates and latencies.

Method: three nodes in this process with default settings; each pair is connected by a link with the given rate and
one-way latency in each direction, with a queue of 256 KiB before it (``tests/support/slow_link.py``). A client next to
the leader appends 7 MiB with ``timeout_ms`` 60,000. Reported: seconds until the acknowledgement, the time in which the
link alone carries the bytes, and the elections meanwhile, by the leader's term. Not included: a real network, and a
link of the client.

Run: ``python -m benchmarks.bench_slow_links``. Prints one JSON object; the exit code is 1 after an election.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from dledger_core.config import RaftConfig, StorageConfig
from dledger_core.record import Columns
from tests.support.server_group import eventually, run
from tests.support.slow_link import SlowGroup

APPEND_BYTES = 7 << 20
CASES = ((100, 0.0), (50, 0.0), (20, 0.0), (5, 0.0), (20, 0.1), (5, 0.1))
"""Mbit/s, and seconds of latency each way."""


async def measure(directory: Path, mbits: int, latency_s: float) -> dict[str, Any]:
    """Append once over such links."""
    bytes_per_s = mbits * 125_000
    link = {"bytes_per_s": bytes_per_s, "latency_s": latency_s, "queue_bytes": 256 << 10}
    options = {"raft": RaftConfig(), "storage": StorageConfig(), "tick_ms": 20}
    async with SlowGroup(directory, link, **options) as group:
        leader, before = await group.leader(), group.term()
        acks: list[object] = []
        began = time.perf_counter()
        group.hosted(leader).appends.append(Columns.from_bodies([b"x" * (1 << 20)] * 7), acks.append)
        await eventually(lambda: acks)
        return {
            "mbit_per_s": mbits,
            "latency_ms": int(1000 * latency_s),
            "seconds": round(time.perf_counter() - began, 2),
            "link_seconds": round(APPEND_BYTES / bytes_per_s + latency_s, 2),
            "acknowledged": not isinstance(acks[0], Exception),
            "elections": group.term() - before,
        }


def main() -> None:
    """Measure all cases and print them."""
    found = []
    for mbits, latency_s in CASES:
        with tempfile.TemporaryDirectory() as directory:
            found.append(run(measure(Path(directory), mbits, latency_s)))
        sys.stderr.write(f"{found[-1]}\n")
    sys.stdout.write(json.dumps({"appends": found}) + "\n")
    if any(each["elections"] or not each["acknowledged"] for each in found):
        sys.exit(1)


if __name__ == "__main__":
    main()

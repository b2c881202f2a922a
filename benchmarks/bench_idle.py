"""Processor time of idle nodes that host many groups: heartbeats are all that they do.

Run: ``python -m benchmarks.bench_idle [--groups 256] [--seconds 20]``. Prints one JSON object: the processor time
of each node as a share of one processor, and the bytes of a frame of heartbeats of all groups and of its responses.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

from dledger_core import LocalCluster
from dledger_core.ids import Index, MemberId, Term
from dledger_core.net import codec
from dledger_core.raft import Heartbeat, HeartbeatResponse

SETTLE_S = 10.0


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def frame_bytes(groups: int) -> tuple[int, int]:
    """Return the bytes of one frame of heartbeats, and of its responses."""
    ends = {"sender": MemberId("n0"), "target": MemberId("n1"), "term": Term(12), "round": 500_000}
    beats = [
        (n, Heartbeat(**ends, commit_index=Index(1_000_000), log_time_ms=86_400_000)) for n in range(1, groups + 1)
    ]
    responses = [(n, HeartbeatResponse(**ends, last_index=Index(1_000_000))) for n in range(1, groups + 1)]
    wall_ms = 1_700_000_000_000
    sent, received = codec.heartbeats_frames(beats, wall_ms), codec.heartbeat_responses_frames(responses)
    return sum(map(len, sent)), sum(map(len, received))


def main() -> None:
    """Measure, and print the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    names = tuple(f"group-{number:03}" for number in range(options.groups))
    with LocalCluster(3, groups=names) as cluster:
        for name in names:
            cluster.leader(name)
        time.sleep(SETTLE_S)
        pids = {node: cluster.pid(node) for node in ("n0", "n1", "n2")}
        before, start = {node: processor_s(pid) for node, pid in pids.items()}, time.monotonic()
        time.sleep(options.seconds)
        seconds = time.monotonic() - start
        shares = {node: round((processor_s(pid) - before[node]) / seconds, 3) for node, pid in pids.items()}
    heartbeats, responses = frame_bytes(options.groups)
    result: dict[str, object] = {"groups": options.groups, "processor_share": shares}
    result |= {"heartbeat_frame_bytes": heartbeats, "response_frame_bytes": responses}
    sys.stdout.write(f"{json.dumps(result)}\n")


if __name__ == "__main__":
    main()

"""How long a client cannot append when the leader is killed with SIGKILL."""

from __future__ import annotations

import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

from dledger_core import Client
from dledger_core.cluster import LocalCluster
from dledger_core.errors import DLedgerError
from tests.support.soon import soon

PAUSE_S = 0.002
SETTLE_S = 60.0


def run_failover(kills: int, limit_ms: float, directory: Path) -> int:
    """Measure, per kill, the time from the last acknowledgement before it to the next one; return the exit code."""
    acks: list[float] = []
    gaps: list[float] = []
    stopping = threading.Event()

    def append() -> None:
        with Client(cluster.peers) as client:
            while not stopping.wait(PAUSE_S):
                try:
                    client.append([b"x" * 100], producer_id="appender", sequence=len(acks))
                except DLedgerError:
                    continue  # the log recognizes the retry
                acks.append(time.monotonic())

    with (
        LocalCluster(directory=directory, data_segment_bytes=64 << 20, index_segment_bytes=1 << 20) as cluster,
        Client(cluster.peers, timeout_ms=2000) as client,
    ):

        def caught_up() -> bool:
            nodes = client.metadata().nodes
            commits = [node.commit_index for node in nodes]
            return all(node.reachable for node in nodes) and max(commits) - min(commits) < 200

        appender = threading.Thread(target=append)
        appender.start()
        try:
            for _ in range(kills):
                soon(lambda: acks and caught_up(), SETTLE_S, every_s=0.1)
                leader = cluster.leader()
                cluster.kill(leader)
                # An acknowledgement that was in flight when the leader was killed counts as one before.
                killed = time.monotonic() + 0.02
                soon(lambda killed=killed: acks[-1] > killed, SETTLE_S, every_s=0.005)
                first = next(at for at, ack in enumerate(acks) if ack > killed)
                gaps.append(1000 * (acks[first] - acks[first - 1]))
                cluster.restart(leader)
        finally:
            stopping.set()
            appender.join()
    sys.stdout.write(
        f"leader killed {len(gaps)} times; ms from the last ack before to the first ack after: "
        f"p50 {statistics.median(gaps):.0f}, p90 {sorted(gaps)[int(len(gaps) * 0.9)]:.0f}, max {max(gaps):.0f}\n"
    )
    if max(gaps) > limit_ms:
        sys.stdout.write(f"above {limit_ms:g} ms; stores and logs: {directory}\n")
        return 1
    shutil.rmtree(directory)
    return 0

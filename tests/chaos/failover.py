"""How long a client cannot append when the leader is killed with SIGKILL."""

from __future__ import annotations

import asyncio
import shutil
import statistics
import sys
import threading
import time
from pathlib import Path

from dledger_core import AsyncClient
from dledger_core.cluster import LocalCluster
from dledger_core.errors import DLedgerError
from tests.chaos.proxy import LoopThread

PAUSE_S = 0.002
SETTLE_S = 60.0


class Appender:
    """Appends one small entry after the other and notes when each was acknowledged."""

    def __init__(self, peers: str) -> None:
        self.peers = peers
        self.acks: list[float] = []
        self.stopping = threading.Event()

    async def run(self) -> None:
        async with AsyncClient(self.peers, timeout_ms=10_000) as client:
            number, sequence = 0, 0
            while not self.stopping.is_set():
                try:
                    await client.append([b"x" * 100], producer_id=f"failover-{number}", sequence=sequence)
                except DLedgerError:
                    continue  # repeated: the log recognises it
                self.acks.append(time.monotonic())
                sequence += 1
                await asyncio.sleep(PAUSE_S)

    def wait_beyond(self, moment: float) -> float:
        """Returns when the first append after a moment was acknowledged."""
        deadline = time.monotonic() + SETTLE_S
        while not self.acks or self.acks[-1] <= moment:
            if time.monotonic() > deadline:
                raise TimeoutError("no append was acknowledged for a minute")
            time.sleep(0.005)
        return next(ack for ack in self.acks if ack > moment)


def _wait_caught_up(cluster: LocalCluster) -> None:
    from dledger_core import Client

    deadline = time.monotonic() + SETTLE_S
    with Client(cluster.peers, timeout_ms=2000) as client:
        while time.monotonic() < deadline:
            nodes = client.metadata().nodes
            commits = [node.commit_index for node in nodes]
            if all(node.reachable for node in nodes) and max(commits) - min(commits) < 200:
                return
            time.sleep(0.1)
    raise TimeoutError("a restarted node has not caught up within a minute")


def measure(kills: int, directory: Path) -> list[float]:
    """Returns, per kill, the seconds from the last ack before it to the first ack behind it."""
    gaps: list[float] = []
    thread = LoopThread("appender")
    with LocalCluster(directory=directory, data_segment_bytes=64 << 20, index_segment_bytes=1 << 20) as cluster:
        appender = Appender(cluster.peers)
        running = asyncio.run_coroutine_threadsafe(appender.run(), thread.loop)
        try:
            appender.wait_beyond(0.0)
            for _ in range(kills):
                leader = cluster.leader()
                cluster.kill(leader)
                killed = time.monotonic()
                # An ack that was on its way when the leader died still counts as one before.
                first = appender.wait_beyond(killed + 0.02)
                gaps.append(first - max(ack for ack in appender.acks if ack < first))
                cluster.restart(leader)
                _wait_caught_up(cluster)
        finally:
            appender.stopping.set()
            running.result(30)
            thread.close()
    return gaps


def run_failover(kills: int, limit_ms: float, directory: Path) -> int:
    """Measures and prints; returns the exit code."""
    gaps = [gap * 1000 for gap in measure(kills, directory)]
    worst = max(gaps)
    sys.stdout.write(
        f"leader killed {len(gaps)} times; ms from the last ack before to the first ack after: "
        f"p50 {statistics.median(gaps):.0f}, p90 {sorted(gaps)[int(len(gaps) * 0.9)]:.0f}, max {worst:.0f}\n"
    )
    if worst > limit_ms:
        sys.stdout.write(f"above {limit_ms:g} ms; stores and logs: {directory}\n")
        return 1
    shutil.rmtree(directory)
    return 0

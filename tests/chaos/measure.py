"""Two measurements against real processes: appends while the leader is killed, and elections under full load.

``run_failover``: how long a client cannot append when the leader is killed with SIGKILL.

``run_saturated``: whether a leader stays while other work takes all cores. Two processes per core count as fast as they
can, at the nodes' own priority, and a client appends one entry at a time. A higher term is an election: heartbeats or
their responses came later than an election timeout. At the same time a thread on each core sleeps and measures how late
it wakes up: a core that gave it no time for an election timeout explains an election; otherwise the nodes caused it.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

from dledger_core import AsyncClient, Client
from dledger_core.cluster import LocalCluster
from dledger_core.errors import DLedgerError
from tests.chaos.proxy import LoopThread
from tests.support.soon import soon

PAUSE_S = 0.002
SETTLE_S = 60.0
HOGS_PER_CORE = 2
LOOK_S = 5.0
NAP_S = 0.01


class Appender:
    """Appends one small entry at a time and records the time of each acknowledgement."""

    def __init__(self, peers: str) -> None:
        self.peers = peers
        self.acks: list[float] = []
        self.stopping = threading.Event()

    async def run(self) -> None:
        async with AsyncClient(self.peers, timeout_ms=10_000) as client:
            sequence = 0
            while not self.stopping.is_set():
                try:
                    await client.append([b"x" * 100], producer_id="appender", sequence=sequence)
                except DLedgerError:
                    continue  # the log recognizes the retry
                self.acks.append(time.monotonic())
                sequence += 1
                await asyncio.sleep(PAUSE_S)

    def first_after(self, moment: float) -> float:
        """Wait for the first acknowledgement after a moment, and return its time."""
        soon(lambda: self.acks and self.acks[-1] > moment, SETTLE_S, every_s=0.005)
        return next(ack for ack in self.acks if ack > moment)


@contextmanager
def _appending(directory: Path) -> Iterator[tuple[LocalCluster, Appender]]:
    thread = LoopThread("appender")
    with LocalCluster(directory=directory, data_segment_bytes=64 << 20, index_segment_bytes=1 << 20) as cluster:
        appender = Appender(cluster.peers)
        running = asyncio.run_coroutine_threadsafe(appender.run(), thread.loop)
        try:
            appender.first_after(0.0)
            yield cluster, appender
        finally:
            appender.stopping.set()
            running.result(60)
            thread.close()


def run_failover(kills: int, limit_ms: float, directory: Path) -> int:
    """Measure, per kill, the time from the last acknowledgement before it to the next one; return the exit code."""
    gaps: list[float] = []
    with _appending(directory) as (cluster, appender), Client(cluster.peers, timeout_ms=2000) as client:

        def caught_up() -> bool:
            nodes = client.metadata().nodes
            commits = [node.commit_index for node in nodes]
            return all(node.reachable for node in nodes) and max(commits) - min(commits) < 200

        for _ in range(kills):
            leader = cluster.leader()
            cluster.kill(leader)
            killed = time.monotonic()
            # An acknowledgement that was in flight when the leader was killed counts as one before.
            first = appender.first_after(killed + 0.02)
            gaps.append(1000 * (first - max(ack for ack in appender.acks if ack < first)))
            cluster.restart(leader)
            soon(caught_up, SETTLE_S, every_s=0.1)
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


@contextmanager
def _hogs() -> Iterator[int]:
    """Keep every core busy."""
    count = HOGS_PER_CORE * (os.cpu_count() or 1)
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield count
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


@contextmanager
def _watched_cores() -> Iterator[dict[int, float]]:
    """Yield, per core, the most seconds that a sleeping thread was late to wake up; grows in the block."""
    late = dict.fromkeys(sorted(os.sched_getaffinity(0)), 0.0)
    stop = threading.Event()

    def watch(core: int) -> None:
        os.sched_setaffinity(0, {core})  # of this thread
        while not stop.is_set():
            began = time.monotonic()
            time.sleep(NAP_S)
            late[core] = max(late[core], time.monotonic() - began - NAP_S)

    watchers = [threading.Thread(target=watch, args=(core,)) for core in late]
    for watcher in watchers:
        watcher.start()
    try:
        yield late
    finally:
        stop.set()
        for watcher in watchers:
            watcher.join()


def _term(peers: str) -> int:
    with Client(peers, timeout_ms=30_000) as client:
        return int(client.metadata().term)


def run_saturated(minutes: float, directory: Path) -> int:
    """Print elections, load and times of appends; return the exit code: 1 if there was an election."""
    with _appending(directory) as (cluster, appender):
        before = _term(cluster.peers)
        with _hogs() as hogs, _watched_cores() as late:
            began, first_ack = time.monotonic(), len(appender.acks)
            while (left := began + minutes * 60 - time.monotonic()) > 0:
                load, term = os.getloadavg()[0], _term(cluster.peers)
                sys.stderr.write(f"\r{left:5.0f} s left, load {load:.1f}, term {term} ")
                time.sleep(min(LOOK_S, left))
            load, after = os.getloadavg()[0], _term(cluster.peers)
        sys.stderr.write("\n")
        acks = appender.acks[first_ack:]
    gaps = sorted((late - early) * 1000 for early, late in pairwise(acks))
    sys.stdout.write(
        f"{minutes:g} minutes with {hogs} busy processes on {os.cpu_count()} cores, load {load:.1f}: "
        f"{after - before} elections; {len(acks)} appends, ms from one to the next: p50 {statistics.median(gaps):.1f}, "
        f"p99 {gaps[int(len(gaps) * 0.99)]:.0f}, max {gaps[-1]:.0f}; "
        f"ms that a core let a sleeper wait at most: {', '.join(f'{1000 * most:.0f}' for most in late.values())}\n"
    )
    if after != before:
        sys.stdout.write(f"the nodes' logs: {directory}\n")
        return 1
    shutil.rmtree(directory)
    return 0

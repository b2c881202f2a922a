"""Whether a leader keeps its place while other work takes both cores.

Two processes per core count as fast as they can, at the nodes' own priority; a client appends one entry after the
other. An election shows as a higher term: heartbeats, or their answers, came later than an election timeout. Beside
them a thread on each core sleeps and looks how late it wakes up: a core that stood still for an election timeout, or
that others had for so long, explains an election; if there was none, it was the nodes.
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

from dledger_core import Client
from dledger_core.cluster import LocalCluster
from tests.chaos.failover import Appender
from tests.chaos.proxy import LoopThread

HOGS_PER_CORE = 2
LOOK_S = 5.0
NAP_S = 0.01


@contextmanager
def _hogs() -> Iterator[int]:
    """Takes every core from whoever wants it."""
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
    """Yields, per core, by how many seconds a sleeping thread was woken too late at most; grows in the block."""
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
    """Prints elections, load and how appends fared; returns the exit code: 1 if there was an election."""
    thread = LoopThread("appender")
    with LocalCluster(directory=directory, data_segment_bytes=64 << 20, index_segment_bytes=1 << 20) as cluster:
        appender = Appender(cluster.peers)
        running = asyncio.run_coroutine_threadsafe(appender.run(), thread.loop)
        try:
            appender.wait_beyond(0.0)
            before = _term(cluster.peers)
            with _hogs() as hogs, _watched_cores() as late:
                began, first_ack = time.monotonic(), len(appender.acks)
                while (left := began + minutes * 60 - time.monotonic()) > 0:
                    sys.stderr.write(
                        f"\r{left:5.0f} s left, load {os.getloadavg()[0]:.1f}, term {_term(cluster.peers)} "
                    )
                    time.sleep(min(LOOK_S, left))
                load, after = os.getloadavg()[0], _term(cluster.peers)
        finally:
            sys.stderr.write("\n")
            appender.stopping.set()
            running.result(60)
            thread.close()
    acks = appender.acks[first_ack:]
    gaps = sorted((late - early) * 1000 for early, late in pairwise(acks))
    sys.stdout.write(
        f"{minutes:g} minutes beside {hogs} busy processes on {os.cpu_count()} cores, load {load:.1f}: "
        f"{after - before} elections; {len(acks)} appends, ms from one to the next: p50 {statistics.median(gaps):.1f}, "
        f"p99 {gaps[int(len(gaps) * 0.99)]:.0f}, max {gaps[-1]:.0f}; "
        f"ms that a core let a sleeper wait at most: {', '.join(f'{1000 * most:.0f}' for most in late.values())}\n"
    )
    if after != before:
        sys.stdout.write(f"the nodes' logs: {directory}\n")
        return 1
    shutil.rmtree(directory)
    return 0

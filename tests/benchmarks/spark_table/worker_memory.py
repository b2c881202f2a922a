"""The memory of Spark's Python workers while they read a log, whatever the backlog.

A thread looks at every Python process of the session's JVM, every 20 ms. RSS counts the pages that a worker shares with
the process it was forked from; PSS counts them in part.
"""

from __future__ import annotations

import threading
from typing import Any

import psutil

from tests.benchmarks.spark_table.measures import Bench
from tests.benchmarks.spark_table.report import DLEDGER, Line, Run, Target
from tests.benchmarks.spark_table.systems import System
from tests.support.spark_jvm import jvm_pid

EVERY_S = 0.02
MIB = 1 << 20


def memory_line(bench: Bench, system: System, size: int) -> Line:
    """Returns the peak RSS of a worker that streams the whole log -> noop, and as a note its PSS."""
    runs, shared = [], []
    for _ in range(bench.rounds):
        with _Watch(bench.spark) as watch:
            bench.available_now(system.stream(size), delta=False)
        runs.append(Run(watch.rss / MIB))
        shared.append(watch.pss / MIB)
    note = f"peak RSS of the largest worker; its PSS {max(shared):.0f} MiB; backlog {bench.rows[size]:,} rows"
    target = Target(300, most=True)
    return Line(f"memory of a reader's Python worker, {size} B bodies", "MiB", {DLEDGER: runs}, (target,), note)


class _Watch:
    """Remembers the largest sizes while it is open."""

    def __init__(self, spark: Any) -> None:
        self.rss = self.pss = 0
        self._jvm = psutil.Process(jvm_pid(spark))
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(EVERY_S):
            for process in self._jvm.children(recursive=True):
                try:
                    if "worker" in " ".join(process.cmdline()):
                        memory = process.memory_full_info()
                        self.rss, self.pss = max(self.rss, memory.rss), max(self.pss, memory.pss)
                except psutil.Error:
                    continue

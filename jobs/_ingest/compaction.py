"""Delta's OPTIMIZE of the table at an interval, next to the query that appends to it.

OPTIMIZE moves rows into fewer files and changes none. Delta commits it and an append in either order, because neither
reads files of the other one, and the table keeps the recorded micro-batches. Files are compacted, not sorted: a log
is appended in the order of its indexes, so a file has few ranges of them, and Z-ordering would rewrite the complete
table each time. Delta clusters a table that has clustering columns of its own.
"""

from __future__ import annotations

import time
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from typing import TYPE_CHECKING, Final
from uuid import uuid4

from .._cli import find_failure, progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["Compaction"]

_POLL_S: Final = 0.1


class Compaction:
    """Runs OPTIMIZE in a thread of its own, once per interval. A failure is a warning, and the query continues.

    Args:
        spark: the session.
        table: directory of the table.
        every_s: the interval.
        since_s: time since the last OPTIMIZE, also of an earlier run.

    Attributes:
        removed: files that were replaced.
        added: files that replaced them.
    """

    def __init__(self, spark: SparkSession, table: str, every_s: float, since_s: float) -> None:
        self._spark = spark
        self._table = table
        self._every_s = every_s
        self._due = time.monotonic() + every_s - since_s
        self._jobs = f"optimize-{uuid4()}"
        self._pool = ThreadPoolExecutor(1, "optimize")
        self._running: Future[tuple[int, int]] | None = None
        self.removed = 0
        self.added = 0

    def run_if_due(self) -> None:
        """Start an OPTIMIZE if the interval has passed; report one that has ended."""
        if self._running is not None and self._running.done():
            self._report(self._running)
            self._running = None
        if self._running is None and time.monotonic() >= self._due:
            self._due = time.monotonic() + self._every_s
            self._running = self._pool.submit(self._optimize)

    def end(self, stop: Event) -> None:
        """Wait for a running OPTIMIZE; ``stop`` cancels it, and the table stays as it is."""
        while self._running is not None and not wait([self._running], _POLL_S).done:
            if stop.is_set():  # a Spark job that starts after the first call is cancelled by a later one
                self._spark.sparkContext.cancelJobGroup(self._jobs)
        if self._running is not None and not stop.is_set():
            self._report(self._running)
        self._pool.shutdown()

    def _optimize(self) -> tuple[int, int]:
        from delta.tables import DeltaTable

        if not DeltaTable.isDeltaTable(self._spark, self._table):  # before the first micro-batch of a new one
            return 0, 0
        self._spark.sparkContext.setJobGroup(self._jobs, f"OPTIMIZE {self._table}")
        done = DeltaTable.forPath(self._spark, self._table).optimize().executeCompaction()
        counts = done.select("metrics.numFilesRemoved", "metrics.numFilesAdded").first()
        return (counts[0], counts[1]) if counts is not None else (0, 0)

    def _report(self, running: Future[tuple[int, int]]) -> None:
        error = running.exception()
        if error is not None:
            failure = find_failure(error)
            progress(f"warning: OPTIMIZE failed, and is repeated later: {failure.text if failure else error}")
            return
        removed, added = running.result()
        self.removed += removed
        self.added += added
        if removed:
            progress(f"OPTIMIZE replaced {removed} files by {added}")

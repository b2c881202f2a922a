"""The lines of rows per second: batch reads, streams, the sink, messages, and the fixed start of a stream.

Every line runs its systems in turn, round after round, forth and back, after a warm-up that does not count; so what
else happens on the machine meets all of them. Rates of batches are rows by the wall time of the action, those of
streams rows by the time in ``addBatch``.
"""

from __future__ import annotations

import contextlib
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import psutil

from benchmarks.spark_table.report import DLEDGER, MEMORY, Line
from benchmarks.spark_table.systems import Ledger, System
from benchmarks.timing import seconds
from tests.support.spark_jvm import collect_garbage, jvm_pid

Work = Callable[[], float]
LOOK_S = 0.02
PUSHDOWN = "spark.sql.python.filterPushdown.enabled"


class Bench:
    """One session and the systems it compares."""

    def __init__(self, spark: Any, systems: Sequence[System], rows: Mapping[int, int], rounds: int) -> None:
        self.spark, self.systems, self.rows, self.rounds = spark, systems, rows, rounds

    def batch_read(self, size: int, to_reach: str) -> Line:
        """Whole log -> noop."""
        rows = self.rows[size]
        runs = self._compare(lambda system: rows / seconds(lambda: _to_noop(system.read(size))))
        return Line(f"batch read → noop, {_bytes(size)}", "rows/s", runs, to_reach)

    def plan(self, partitions: int) -> Line:
        """Divide the log of 100 B into partitions, without reading it."""

        def plan(system: System) -> None:
            system.read(100, minPartitions=str(partitions)).rdd.getNumPartitions()

        works = {
            system.name: partial(seconds, partial(plan, system)) for system in self.systems if system.name != MEMORY
        }
        return Line(f"plan of {partitions:,} partitions", "s", self._rounds(works), "≤ 1 s")

    def filtered(self, ledger: Ledger, wanted: int) -> Line:
        """Rows in the middle of the log of 100 B, found by ``where`` on the index, or Kafka's offset.

        DLedger: with ``filterPushdown``. Next to it without, and the range given as options.
        """
        low = self.rows[100] // 2
        high = low + wanted

        def where(system: System, **options: str) -> float:
            frame = system.read(100, **options)
            return seconds(lambda: _to_noop(frame.where(f"{system.stored[0]} between {low} and {high - 1}")))

        def by_options() -> float:
            ends = {"startingOffsets": f'{{"full100": {low}}}', "endingOffsets": f'{{"full100": {high}}}'}
            return seconds(lambda: _to_noop(ledger.read(100, **ends)))

        works: dict[str, Work] = {system.name: partial(where, system) for system in self.systems}
        works["without the option"] = works[DLEDGER]
        works[DLEDGER] = partial(where, ledger, filterPushdown="one_query")
        works["the range as options"] = by_options
        self.spark.conf.set(PUSHDOWN, "true")
        try:
            runs = self._rounds(works)
        finally:
            self.spark.conf.unset(PUSHDOWN)
        return Line(f"batch read, where index between, {wanted:,} of {self.rows[100]:,} rows", "s", runs)

    def stream_to_delta(self, size: int, to_reach: str) -> Line:
        """Whole log -> Delta with AvailableNow, in one micro-batch."""
        runs = self._compare(
            lambda system: self.available_now(system.stream(size).select(*system.stored), delta=True)[0]
        )
        return Line(f"stream, AvailableNow → Delta, {_bytes(size)}", "rows/s", runs, to_reach)

    def stream_to_noop(self, size: int) -> Line:
        """Whole log -> noop with AvailableNow, in one micro-batch."""
        runs = self._compare(lambda system: self.available_now(system.stream(size), delta=False)[0])
        return Line(f"stream, AvailableNow → noop, {_bytes(size)}", "rows/s", runs)

    def whole_stream(self, size: int) -> Line:
        """Whole log -> noop with AvailableNow, by the wall time of the query."""
        rows = self.rows[size]
        runs = self._compare(lambda system: rows / self.available_now(system.stream(size), delta=False)[1])
        return Line(f"whole query, AvailableNow → noop, {_bytes(size)}", "rows/s", runs)

    def fixed_start(self) -> Line:
        """Wall time of a whole query with AvailableNow over a log of one row -> noop."""
        runs = self._compare(lambda system: self.available_now(system.one_row(), delta=False)[1])
        return Line("fixed start of a stream, first batch of 1 row", "s", runs, "≤ 1.5 s")

    def sink(self, rows: int, ledger: Ledger) -> Line:
        """A frame of bodies of 100 B, cached in the JVM in two partitions -> a log, by default options.

        Next to it the same rows appended by a Python client without Spark: the sink cannot be faster than the log.
        """
        for system in self.systems:
            system.prepare_sink()
        source = self.spark.read.format("memory").options(rows=rows, bytes=100).load()
        frame = source.select("body").cache()
        frame.count()

        works: dict[str, Work] = {
            system.name: lambda system=system: rows / seconds(lambda: system.write(frame)) for system in self.systems
        }
        works["a client without Spark"] = lambda: rows / seconds(lambda: ledger.append("sink", rows, 100))
        try:
            runs = self._rounds(works)
        finally:
            frame.unpersist(blocking=True)
        return Line("sink, 100 B", "rows/s", runs, "≥ 0.8 M/s")

    def decode(self, ledger: Ledger, rows: int, size: int) -> Line:
        """The same messages read raw and decoded: all 25 columns, and six that are chosen.

        In memory: those 25 columns without a log and without decoding, so what Spark alone takes for them.
        """
        six = "index bigint, body binary, topic string, queue_id int, keys string, store_timestamp timestamp"
        frames = {DLEDGER: ("message", None), "raw": ("none", None), "six columns": ("message", six)}
        works: dict[str, Work] = {
            name: lambda how=how: rows / seconds(lambda: _to_noop(ledger.read_messages(size, *how)))
            for name, how in frames.items()
        }
        ready = self.spark.read.format("memory").options(rows=rows, bytes=size, messages="yes")
        works[MEMORY] = lambda: rows / seconds(lambda: _to_noop(ready.load()))
        return Line(f"batch read, decode = message, {_bytes(size)}", "rows/s", self._rounds(works), "≥ 0.5 x raw")

    def worker_memory(self, system: System, size: int) -> Line:
        """Peak RSS of a Python worker that streams the whole log -> noop, whatever the backlog.

        RSS counts the pages that a worker shares with the process it was forked from.
        """
        peaks = []
        for _ in range(self.rounds):
            with _PeakRss(psutil.Process(jvm_pid(self.spark))) as watch:
                self.available_now(system.stream(size), delta=False)
            peaks.append(watch.nbytes / (1 << 20))
        return Line(f"memory of a reader's Python worker, {size} B bodies", "MiB", {DLEDGER: peaks}, "≤ 300 MiB")

    def available_now(self, frame: Any, *, delta: bool) -> tuple[float, float]:
        """Runs a stream to its end; returns rows by seconds in ``addBatch``, and the wall time.

        A Delta table is there before. Its first commit is a second shorter than all others, and of the systems only
        those would gain by it that read something in their first micro-batch.
        """
        folder = tempfile.mkdtemp(prefix="dledger-bench-")
        try:
            if delta:
                self.spark.createDataFrame([], frame.schema).write.format("delta").save(f"{folder}/table")
            writer = frame.writeStream.trigger(availableNow=True).option("checkpointLocation", f"{folder}/checkpoint")
            writer = writer.format("delta").option("path", f"{folder}/table") if delta else writer.format("noop")
            queries: list[Any] = []

            def run() -> None:
                queries.append(writer.start())
                queries[0].awaitTermination()

            took = seconds(run)
            busy = [progress for progress in queries[0].recentProgress if progress["numInputRows"]]
            rows = sum(progress["numInputRows"] for progress in busy)
            added_ms = sum(progress["durationMs"]["addBatch"] for progress in busy)
            return (
                rows / added_ms * 1000 if added_ms else 0.0,
                took,
            )  # over Spark Connect a query that has ended has none
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _compare(self, work: Callable[[System], float]) -> dict[str, list[float]]:
        return self._rounds({system.name: lambda system=system: work(system) for system in self.systems})

    def _rounds(self, works: Mapping[str, Work]) -> dict[str, list[float]]:
        runs: dict[str, list[float]] = {name: [] for name in works}
        for number in range(self.rounds + 1):
            for name in list(works)[:: 1 if number % 2 else -1]:
                value = works[name]()
                if number:
                    runs[name].append(value)
                collect_garbage(self.spark)
            sys.stderr.write(".")
            sys.stderr.flush()
        return runs


class _PeakRss:
    """Remembers the RSS of the largest Python worker below a JVM, which a thread looks at while this is open."""

    def __init__(self, jvm: psutil.Process) -> None:
        self.nbytes = 0
        self._jvm = jvm
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> _PeakRss:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(LOOK_S):
            for process in self._jvm.children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    if "worker" in " ".join(process.cmdline()):
                        self.nbytes = max(self.nbytes, process.memory_info().rss)


def _to_noop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _bytes(size: int) -> str:
    return f"{size // 1024} KB" if size >= 1024 else f"{size} B"


TO_REACH = {
    "read": {100: "≥ 2 x Kafka; ≥ 0.7 x in memory", 1024: "≥ 1.4 x Kafka; ≥ 0.7 x in memory"},
    "stream": {100: "≥ 1.3 x Kafka; ≥ 0.8 x in memory", 1024: "≥ 1 x Kafka; ≥ 0.8 x in memory"},
}
"""Per kind and size of the bodies: the goals of our figures."""

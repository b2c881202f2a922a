"""The lines of rows per second: batch reads, streams, the sink, messages, and the fixed start of a stream.

Every line runs its systems in turn, round after round, forth and back, after a warm-up that does not count; so what
else happens on the machine meets all of them. Rates of batches are rows by the wall time of the action, those of
streams rows by the time in ``addBatch``. Next to each rate is the CPU time per row of Spark's JVM, of its Python
processes and of the servers, which is steadier than the rate and says where the time goes.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import psutil

from tests.benchmarks.spark_table.report import DLEDGER, KAFKA, MEMORY, Line, Run, Target
from tests.benchmarks.spark_table.systems import Ledger, System
from tests.support.spark_jvm import collect_garbage, jvm_pid

Work = Callable[[], float]


class Bench:
    """One session and the systems it compares."""

    def __init__(self, spark: Any, systems: Sequence[System], rows: Mapping[int, int], rounds: int) -> None:
        self.spark, self.systems, self.rows, self.rounds = spark, systems, rows, rounds

    def batch_read(self, size: int, targets: tuple[Target, ...]) -> Line:
        """Whole log -> noop."""
        rows = self.rows[size]

        def work(system: System) -> Work:
            return lambda: rows / _seconds(lambda: _to_noop(system.read(size)))

        runs = self._rounds({system.name: work(system) for system in self.systems}, rows)
        return Line(f"batch read → noop, {_bytes(size)}", "rows/s", runs, targets)

    def stream_to_delta(self, size: int, targets: tuple[Target, ...]) -> Line:
        """Whole log -> Delta with AvailableNow, in one micro-batch."""

        def work(system: System) -> Work:
            return lambda: self.available_now(system.stream(size).select(*system.stored), delta=True)[0]

        runs = self._rounds({system.name: work(system) for system in self.systems}, self.rows[size])
        return Line(f"stream, AvailableNow → Delta, {_bytes(size)}", "rows/s", runs, targets)

    def stream_to_noop(self, size: int) -> Line:
        """Whole log -> noop with AvailableNow, in one micro-batch."""

        def work(system: System) -> Work:
            return lambda: self.available_now(system.stream(size), delta=False)[0]

        runs = self._rounds({system.name: work(system) for system in self.systems}, self.rows[size])
        return Line(f"stream, AvailableNow → noop, {_bytes(size)}", "rows/s", runs)

    def fixed_start(self) -> Line:
        """Wall time of a whole query with AvailableNow over a log of one row -> noop."""

        def work(system: System) -> Work:
            return lambda: self.available_now(system.one_row(), delta=False)[1]

        runs = self._rounds({system.name: work(system) for system in self.systems}, 0)
        return Line("fixed start of a stream, first batch of 1 row", "s", runs, (Target(1.5, most=True),))

    def sink(self, rows: int, ledger: Ledger) -> Line:
        """A frame of bodies of 100 B, cached in the JVM in two partitions -> a log, by default options.

        Next to it the same rows appended by a Python client without Spark: the sink cannot be faster than the log.
        """
        for system in self.systems:
            system.prepare_sink()
        source = self.spark.read.format("memory").options(rows=rows, bytes=100).load()
        frame = source.select("body").cache()
        frame.count()

        def work(system: System) -> Work:
            return lambda: rows / _seconds(lambda: system.write(frame))

        works = {system.name: work(system) for system in self.systems}
        works["a client without Spark"] = lambda: rows / _seconds(lambda: ledger.append("sink", rows, 100))
        try:
            runs = self._rounds(works, rows)
        finally:
            frame.unpersist(blocking=True)
        return Line("sink, 100 B", "rows/s", runs, (Target(800_000),))

    def decode(self, ledger: Ledger, rows: int, size: int) -> Line:
        """The same messages read raw and decoded: all 25 columns, and six that are chosen.

        In memory: those 25 columns without a log and without decoding, so what Spark alone takes for them.
        """
        six = "index bigint, body binary, topic string, queue_id int, keys string, store_timestamp timestamp"
        frames = {DLEDGER: ("message", None), "raw": ("none", None), "six columns": ("message", six)}
        works: dict[str, Work] = {
            name: lambda how=how: rows / _seconds(lambda: _to_noop(ledger.read_messages(size, *how)))
            for name, how in frames.items()
        }
        ready = self.spark.read.format("memory").options(rows=rows, bytes=size, messages="yes")
        works[MEMORY] = lambda: rows / _seconds(lambda: _to_noop(ready.load()))
        runs = self._rounds(works, rows)
        return Line(f"batch read, decode = message, {_bytes(size)}", "rows/s", runs, (Target(0.5, "raw"),))

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
            began = time.perf_counter()
            query = writer.format("delta").start(f"{folder}/table") if delta else writer.format("noop").start()
            query.awaitTermination()
            took = time.perf_counter() - began
            busy = [progress for progress in query.recentProgress if progress["numInputRows"]]
            rows = sum(progress["numInputRows"] for progress in busy)
            return rows / sum(progress["durationMs"]["addBatch"] for progress in busy) * 1000, took
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def _rounds(self, works: Mapping[str, Work], rows: int) -> dict[str, list[Run]]:
        runs: dict[str, list[Run]] = {name: [] for name in works}
        for number in range(self.rounds + 1):
            for name in list(works)[:: 1 if number % 2 else -1]:
                before = self._cpu()
                value = works[name]()
                after = self._cpu()
                cost = {kind: (after[kind] - before[kind]) / rows * 1e9 for kind in after} if rows else {}
                if number:
                    runs[name].append(Run(value, cost))
                collect_garbage(self.spark)
            sys.stderr.write(".")
            sys.stderr.flush()
        return runs

    def _cpu(self) -> dict[str, float]:
        """Seconds of CPU time so far, by kind of process."""
        jvm = psutil.Process(jvm_pid(self.spark))
        servers = [psutil.Process(pid) for system in self.systems for pid in system.pids()]
        python = sum(_cpu_of(child) for child in jvm.children(recursive=True))
        return {"spark": _cpu_of(jvm, own=True), "python": python, "servers": sum(map(_cpu_of, servers))}


def _cpu_of(process: psutil.Process, *, own: bool = False) -> float:
    try:
        times = process.cpu_times()
    except psutil.Error:
        return 0.0
    return times.user + times.system + (0 if own else times.children_user + times.children_system)


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _to_noop(frame: Any) -> None:
    frame.write.format("noop").mode("overwrite").save()


def _bytes(size: int) -> str:
    return f"{size // 1024} KB" if size >= 1024 else f"{size} B"


BATCH_TARGETS = {
    100: (Target(2.0, KAFKA), Target(0.7, MEMORY)),
    1024: (Target(1.4, KAFKA), Target(0.7, MEMORY)),
}
STREAM_TARGETS = {
    100: (Target(1.3, KAFKA), Target(0.8, MEMORY)),
    1024: (Target(1.0, KAFKA), Target(0.8, MEMORY)),
}

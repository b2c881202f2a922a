"""The audit on Spark: plan, digests, compare, judge, report; and the Delta tables of all runs.

The work of a pass is a list that travels with the function, and each task does its share. Only digests and findings
leave the tasks, never log data.
"""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from importlib.metadata import version
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import ConfigError
from dledger_core.cli import Progress
from spark_connector import ddl_of

from .._cli import (
    progress,
)
from .archived import (
    Part,
    compare_recorded,
    compare_rows,
    compared_rows,
    copies_of,
    parts_to_compare,
    plan_recorded,
    rows_snapshot,
    trust_recorded,
)
from .archives import Archives
from .compare import compare_entries, index_findings
from .digests import (
    bytes_read,
    compare_digests,
    compared_by_replica,
    covered_ranges,
    digest_rows,
    of_ranges,
    proven_by_replica,
)
from .model import DIGESTS, KEY, RESULTS, AuditedReplica, AuditFinding, Options, ReadTask, Snapshot, result
from .plan import bundles, chain_of, of_replicas, plan_ranges, reading_tasks, sections, steps, trust_proven
from .report import Report, findings_table, page, report_groups, runs_table, summarize
from .source import RateLimiter

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

STEP_BYTES: Final = 16 << 30
STEP_S: Final = 30
"""With a byte rate: the approximate time that a step reads."""
_ROWS_PER_BATCH: Final = 256
_TASKS_MAX: Final = 256
_POLL_S: Final = 0.5
_REPORT_EVERY_S: Final = 5.0

_Work = TypeVar("_Work")
_Rows = Iterator[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Audit:
    """One run of the audit: ``execute`` goes through its steps.

    Attributes:
        snapshot: the replicas by group.
        options: the job's options.
        archives: the archives of the logs, without ``--archive`` none.
        run_id: identifies the run in the tables, and for ``--resume``.
        started_at: time of its start.
        started: the same on the monotonic clock.
    """

    snapshot: Snapshot
    options: Options
    archives: Archives = field(default_factory=dict)
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    started: float = field(default_factory=time.monotonic)

    def execute(self, spark: SparkSession) -> tuple[dict[str, Any], str]:
        """Plan, read digests, compare, judge and report; return the JSON summary and the report page."""
        progress(f"run {self.run_id}")
        for group, replicas in self.snapshot.items():
            for part in sections(replicas, holders_min=1):
                names = ", ".join(replica.name for replica in part.replicas)
                progress(f"group {group}: [{part.start}, {part.end}) on {names}")
        for group, archive in self.archives.items():
            progress(f"group {group}: [{archive.first_index}, {archive.end}) in {archive.table}")
        options = self.options
        seed, rate = options.resume or self.run_id, options.max_bytes_per_second
        ranges = self._trust_proven(spark, plan_ranges(self.snapshot, mode=options.mode, seed=seed, rate=rate))
        digests = self._read_digests(spark, ranges, self.snapshot)
        results = self._compare_entries(spark, ranges, compare_digests(digests))
        compared = pa.concat_tables([compared_by_replica(digests), proven_by_replica(ranges)])
        covered = covered_ranges(digests, ranges)
        snapshot = self.snapshot
        if self.archives:
            recorded = plan_recorded(snapshot, self.archives, mode=options.mode, seed=seed)
            recorded = self._trust_recorded(spark, recorded)
            of_rows = self._read_digests(spark, recorded, rows_snapshot(snapshot, self.archives))
            results = pa.concat_tables(
                [results, self._compare_recorded(spark, compare_recorded(of_rows, self.archives))]
            )
            more = compared_rows(of_rows, recorded, covered)
            compared, covered = (pa.concat_tables(both) for both in zip((compared, covered), more, strict=True))
            digests = pa.concat_tables([digests, of_rows])
            snapshot = {group: (*found, self.archives[group]) for group, found in snapshot.items()}
        reports, findings = report_groups(snapshot, results, compared, covered, self.run_id)
        if options.table is not None:
            self._write(spark, options.table, reports, findings)
        cost = self._cost(digests, results)
        summary = summarize(snapshot, reports, findings) | {
            "run_id": self.run_id,
            "mode": options.mode,
            "started_at": self.started_at.isoformat(),
            "duration_s": round(time.monotonic() - self.started, 3),
            "table": options.table,
            "resumed": options.resume,
            "cost": cost,
        }
        shown = page(summary, self._frame(), options.archive_storage) if options.report is not None else ""
        return summary, shown

    def _earlier_digests(self, spark: SparkSession, age: timedelta | None) -> pa.Table | None:
        """Return the digests that earlier runs read within ``age``; None if there is no table of them."""
        if age is None or self.options.table is None:
            return None
        earlier = earlier_digests(spark, self.options.table)
        return None if earlier is None else earlier.where(earlier["read_at"] >= self.started_at - age).toArrow()

    def _trust_proven(self, spark: SparkSession, ranges: pa.Table) -> pa.Table:
        """Mark the ranges that need not be read, with --skip-proven."""
        age = self.options.skip_proven
        digests = self._earlier_digests(spark, age)
        if age is None or digests is None:
            return ranges
        percent = self.options.reread_share
        ranges = trust_proven(ranges, digests, self.snapshot, age=age, now=self.started_at, percent=percent)
        proven = ranges.num_rows - ranges["proven_at"].null_count
        progress(f"{proven} ranges were proven before, {ranges.num_rows - proven} are read")
        return ranges

    def _trust_recorded(self, spark: SparkSession, ranges: pa.Table) -> pa.Table:
        """Mark the ranges of archives that need not be read, with --skip-proven."""
        age = self.options.skip_proven
        digests = self._earlier_digests(spark, age)
        if age is None or digests is None:
            return ranges
        replicas = [each for found in rows_snapshot(self.snapshot, self.archives).values() for each in found]
        percent = self.options.reread_share
        return trust_recorded(ranges, digests, replicas, self.archives, age=age, now=self.started_at, percent=percent)

    def _read_digests(self, spark: SparkSession, ranges: pa.Table, snapshot: Snapshot) -> pa.Table:
        """First pass: read the digests of all ranges that are not proven, in steps that survive a kill."""
        recorded = self._recorded_digests(spark, ranges, snapshot)
        keys = set(zip(*(recorded[name].to_pylist() for name in ("group", "replica", "start", "end")), strict=True))
        if keys:
            progress(f"{len(keys)} digests were read by run {self.options.resume}")
        rate, resumes = self.options.max_bytes_per_second, self.options.resume or ""
        cores = spark.sparkContext.defaultParallelism
        tasks = reading_tasks(ranges, snapshot, cores=cores, rate=rate, recorded=keys)
        nodes = len({task.replica.name for task in tasks})
        work = list(steps(tasks, rate * STEP_S * nodes if rate else STEP_BYTES))
        found = [recorded]
        for number, step in enumerate(work):
            if len(work) > 1:
                progress(f"step {number + 1} of {len(work)}")
            found.append(digest_pass(spark, step, self.run_id, resumes=resumes, rate=rate))
            if self.options.table is not None:
                append(spark, found[-1], f"{self.options.table}/audit_ranges")
        return pa.concat_tables(found)

    def _recorded_digests(self, spark: SparkSession, ranges: pa.Table, snapshot: Snapshot) -> pa.Table:
        """Return the digests of these ranges that the resumed run has read, and the runs that it resumed."""
        if self.options.table is None or self.options.resume is None:
            return DIGESTS.empty_table()
        earlier = earlier_digests(spark, self.options.table)
        if earlier is None:
            raise ConfigError(f"--table {self.options.table} records no run to resume", "", "leave --resume out")
        runs = earlier.select("run_id", "resumes").distinct().toArrow()
        resumed = dict(zip(*(runs[name].to_pylist() for name in ("run_id", "resumes")), strict=True))
        chain = chain_of(resumed, self.options.resume)
        replicas = [replica for found in snapshot.values() for replica in found]
        digests = of_replicas(earlier.where(earlier["run_id"].isin(chain)).toArrow(), replicas)
        digests = digests.filter(pc.is_in(digests["problem"], pa.array(["", "damaged"])))
        unproven = ranges.filter(pc.is_null(ranges["proven_at"]))
        return of_ranges(digests, unproven).select(DIGESTS.names).cast(DIGESTS)

    def _compare_entries(self, spark: SparkSession, ranges: pa.Table, results: pa.Table) -> pa.Table:
        """Second pass: compare ranges that differ entry by entry, in mode ``full`` all; return all results."""
        options, full = self.options, self.options.mode == "full"
        chosen = ranges.filter(pc.is_null(ranges["proven_at"]))
        wanted = chosen if full else of_ranges(chosen, results.filter(results["drill"]))
        found = [results]
        if wanted.num_rows:
            progress(f"{wanted.num_rows} of {chosen.num_rows} ranges are read entry by entry")
            by_name = {(r.group, r.name): r for replicas in self.snapshot.values() for r in replicas}
            differ = {tuple(row.values()) for row in results.filter(results["drill"]).select(KEY).to_pylist()}
            parts = [
                (
                    (
                        *(by_name[row["group"], name] for name in row["replicas"]),
                        *(copies_of(self.archives, **key) if tuple(key.values()) in differ else ()),
                    ),
                    row["start"],
                    row["end"],
                )
                for row in wanted.to_pylist()
                for key in [{name: row[name] for name in KEY}]
            ]
            found.append(entry_pass(spark, parts, options.max_bytes_per_second))
        if full and not options.max_bytes_per_second:
            replicas = [replica for replicas in self.snapshot.values() for replica in replicas]
            stores = [r for r in replicas if r.reachable and not r.live and not r.block_bytes]
            found.append(index_pass(spark, stores))
        return pa.concat_tables(found)

    def _compare_recorded(self, spark: SparkSession, results: pa.Table) -> pa.Table:
        """Second pass: compare ranges that are not those of the log's record row by row; return all results."""
        parts = parts_to_compare(results, self.snapshot, self.archives)
        if not parts:
            return results
        progress(f"{len(parts)} proven ranges are read again, row by row")
        return pa.concat_tables([results, rows_pass(spark, parts, self.options.max_bytes_per_second)])

    def _write(
        self, spark: SparkSession, table: str, reports: Sequence[Report], findings: Sequence[AuditFinding]
    ) -> None:
        progress(f"writing {table}")
        append(spark, findings_table(findings, self.run_id, self.started_at), f"{table}/audit_findings")
        run = {"run_id": self.run_id, "started_at": self.started_at, "mode": self.options.mode}
        run["duration_s"] = time.monotonic() - self.started
        # Written last, so that every run in audit_runs is complete.
        append(spark, runs_table(reports, findings, **run), f"{table}/audit_runs")

    def _cost(self, digests: pa.Table, results: pa.Table) -> dict[str, Any]:
        read, duration = bytes_read(digests, self.run_id), time.monotonic() - self.started
        return {
            "bytes_read": read,
            "bytes_read_second_pass": pc.sum(results["read_bytes"]).as_py() or 0,
            "bytes_per_second": round(sum(read.values()) / duration) if duration else None,
            "max_bytes_per_second": self.options.max_bytes_per_second,
            "bytes_written_to_replicas": 0,
        }

    def _frame(self) -> dict[str, Any]:
        """Return the options and versions for the report page."""
        logs = {replica.log_uuid for replicas in self.snapshot.values() for replica in replicas if replica.log_uuid}
        versions = ", ".join(f"{name} {version(name)}" for name in ("dledger", "pyspark", "delta-spark"))
        return self.options.shown() | {"versions": versions, "log": ", ".join(sorted(logs)) or "not recorded"}


# --- passes -------------------------------------------------------------------------------------------------------


def digest_pass(
    spark: SparkSession, tasks: Sequence[ReadTask], run_id: str, *, resumes: str = "", rate: int | None = None
) -> pa.Table:
    """Return the digests of all ranges, one row per replica and range (DIGESTS).

    Args:
        spark: the session.
        tasks: the work.
        run_id: this run.
        resumes: the run that it resumes.
        rate: limit of bytes per second read from one node; with it one task reads each node.
    """

    def rows(bundle: tuple[ReadTask, ...]) -> _Rows:
        limiter = RateLimiter(rate)
        return chain.from_iterable(digest_rows(task, run_id, resumes, limiter) for task in bundle)

    return spread(spark, "digests", bundles(tasks, one_per_node=rate is not None), rows, DIGESTS)


def entry_pass(
    spark: SparkSession, ranges: Sequence[tuple[tuple[AuditedReplica, ...], int, int]], rate: int | None = None
) -> pa.Table:
    """Compare ranges entry by entry, a row each (RESULTS); with a rate one range at a time.

    Args:
        spark: the session.
        ranges: replicas, start and end.
        rate: limit of bytes per second read from one node.
    """

    def rows(work: Sequence[tuple[tuple[AuditedReplica, ...], int, int]]) -> _Rows:
        limiters = {replica.name: RateLimiter(rate) for replicas, _, _ in work for replica in replicas}
        return (compare_entries(*part, limiters=limiters) for part in work)

    bundled = [tuple(ranges)] if rate else [(part,) for part in ranges]
    return spread(spark, "entry by entry", bundled, rows, RESULTS)


def rows_pass(spark: SparkSession, parts: Sequence[Part], rate: int | None = None) -> pa.Table:
    """Compare proven ranges row by row, a row each (RESULTS); with a rate one range at a time.

    Args:
        spark: the session.
        parts: archives with replicas of their logs, and ranges.
        rate: limit of bytes per second read from one node.
    """

    def rows(work: Sequence[Part]) -> _Rows:
        limiters = {replica.name: RateLimiter(rate) for replicas, _ in work for replica in replicas}
        return (compare_rows(*part, limiters) for part in work)

    bundled = [tuple(parts)] if rate else [(part,) for part in parts]
    return spread(spark, "row by row", bundled, rows, RESULTS)


def index_pass(spark: SparkSession, stores: Sequence[AuditedReplica]) -> pa.Table:
    """Compare the index files of stores with their data (RESULTS)."""

    def rows(replica: AuditedReplica) -> _Rows:
        yield result((replica.group, replica.first_index, replica.end), index_findings(replica))

    return spread(spark, "index files", stores, rows, RESULTS)


def spread(
    spark: SparkSession, title: str, work: Sequence[_Work], rows: Callable[[_Work], _Rows], schema: pa.Schema
) -> pa.Table:
    """Run ``rows`` for each item in its own task, or for several in one task if there are very many."""
    items = list(work)
    if not items:
        return schema.empty_table()

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = (row for batch in batches for number in batch.column(0).to_pylist() for row in rows(items[number]))
        while part := list(islice(found, _ROWS_PER_BATCH)):
            yield pa.RecordBatch.from_pylist(part, schema)

    numbers = spark.range(0, len(items), 1, min(len(items), _TASKS_MAX))
    with _watched(spark, title):
        return numbers.mapInArrow(run, ddl_of(schema)).toArrow().cast(schema)


@contextmanager
def _watched(spark: SparkSession, title: str) -> Iterator[None]:
    """Show the progress of the tasks started inside."""
    tracker = spark.sparkContext.statusTracker()
    done = threading.Event()

    def report(shown: Progress) -> None:
        while not done.wait(_POLL_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            active = [stage for stage in stages if stage is not None]
            if active:
                shown.update(sum(s.numCompletedTasks for s in active), total=sum(s.numTasks for s in active))

    with Progress(title, unit="tasks", every_s=_REPORT_EVERY_S) as shown:
        thread = threading.Thread(target=report, args=(shown,), name="audit-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


# --- tables -------------------------------------------------------------------------------------------------------


def append(spark: SparkSession, rows: pa.Table, path: str) -> None:
    """Append rows to a Delta table in one commit; create a missing one, even without rows."""
    from delta.tables import DeltaTable

    if not rows.num_rows and DeltaTable.isDeltaTable(spark, path):
        return
    spark.createDataFrame(rows).coalesce(1).write.format("delta").mode("append").save(path)


def earlier_digests(spark: SparkSession, directory: str) -> DataFrame | None:
    """Return the digests of all runs (DIGESTS), or None if there are none."""
    from delta.tables import DeltaTable

    path = f"{directory}/audit_ranges"
    return spark.read.format("delta").load(path) if DeltaTable.isDeltaTable(spark, path) else None

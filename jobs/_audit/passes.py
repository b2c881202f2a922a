"""Everything of an audit that runs on Spark: the passes over the replicas, and the Delta tables of all runs.

Each task of a pass gets its share of a list of work that travels with the function; log data never leaves the tasks,
only digests and findings do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import chain, islice
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa

from dledger_core import DLedgerError, open_store
from dledger_core.cli import Progress
from jobs._audit.entries import compare_entries
from jobs._audit.model import DIGESTS, RESULTS, Class, Finding, Replica, result
from jobs._audit.plan import ReadTask, aligned, bundles
from jobs._audit.sources import Gap, RangeSeen, RateLimiter, open_source
from spark_connector import ddl_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["append", "digest_pass", "digest_rows", "earlier_digests", "entry_pass", "index_findings", "index_pass"]

_ROWS_PER_BATCH: Final = 256
_TASKS_MAX: Final = 256
_POLL_S: Final = 0.5
_REPORT_EVERY_S: Final = 5.0

_Work = TypeVar("_Work")
_Rows = Iterator[dict[str, Any]]


# --- passes -------------------------------------------------------------------------------------------------------


def digest_pass(
    spark: SparkSession, tasks: Sequence[ReadTask], run_id: str, *, resumes: str = "", rate: int | None = None
) -> pa.Table:
    """Returns the digests of all ranges, a row per replica and range (DIGESTS).

    Args:
        spark: the session.
        tasks: the work.
        run_id: this run.
        resumes: the run that it resumes.
        rate: bytes per second that may be read from one node; then each node is read by one task.
    """

    def rows(bundle: tuple[ReadTask, ...]) -> _Rows:
        limiter = RateLimiter(rate)
        return chain.from_iterable(digest_rows(task, run_id, resumes, limiter) for task in bundle)

    return _spread(spark, "digests", bundles(tasks, one_per_node=rate is not None), rows, DIGESTS)


def digest_rows(task: ReadTask, run_id: str, resumes: str = "", limiter: RateLimiter | None = None) -> _Rows:
    """Yields the rows of DIGESTS of one task; needs no Spark."""
    replica = task.replica
    constant = {"run_id": run_id, "group": replica.group, "replica": replica.name}
    constant |= {"log_uuid": replica.log_uuid or "", "source": replica.source, "resumes": resumes}
    for seen in _digests(task, limiter):
        read_at = datetime.now(UTC)
        if isinstance(seen, Gap):
            why = {"problem": seen.kind, "reason": seen.reason, "read_at": read_at}
            nothing = {"bytes": 0, "content": b"", "layout": b"", "damaged": [], "index_wrong": []}
            for start, end in aligned(seen.start, seen.end, task.span):
                yield constant | nothing | why | {"start": start, "end": end}
            continue
        digest = seen.digest
        yield constant | {
            "start": digest.start,
            "end": digest.end,
            "bytes": digest.nbytes,
            "content": digest.content,
            "layout": digest.layout,
            "damaged": list(seen.damaged),
            "index_wrong": list(chain.from_iterable(seen.index_wrong)),
            "problem": "",
            "reason": "",
            "read_at": read_at,
        }


def _digests(task: ReadTask, limiter: RateLimiter | None) -> Iterator[RangeSeen | Gap]:
    done = task.start
    try:
        with open_source(task.replica, limiter) as source:
            for seen in source.digests(task.start, task.end, task.span):
                yield seen
                done = seen.end if isinstance(seen, Gap) else seen.digest.end
    except DLedgerError as error:
        yield Gap(done, task.end, "unread", str(error))


def entry_pass(
    spark: SparkSession, ranges: Sequence[tuple[tuple[Replica, ...], int, int]], rate: int | None = None
) -> pa.Table:
    """Compares ranges entry by entry, a row each (RESULTS); with a rate one range after the other.

    Args:
        spark: the session.
        ranges: holders, start and end.
        rate: bytes per second that may be read from one node.
    """

    def rows(work: Sequence[tuple[tuple[Replica, ...], int, int]]) -> _Rows:
        limiters = {replica.name: RateLimiter(rate) for replicas, _, _ in work for replica in replicas}
        return (compare_entries(*part, limiters=limiters) for part in work)

    bundled = [tuple(ranges)] if rate else [(part,) for part in ranges]
    return _spread(spark, "entry by entry", bundled, rows, RESULTS)


def index_pass(spark: SparkSession, stores: Sequence[Replica]) -> pa.Table:
    """Compares the index files of stores with their data (RESULTS)."""

    def rows(replica: Replica) -> _Rows:
        yield result((replica.group, replica.first_index, replica.end), index_findings(replica))

    return _spread(spark, "index files", stores, rows, RESULTS)


def index_findings(replica: Replica) -> list[Finding]:
    """Returns the ranges of a store whose index rows do not match the data; needs no Spark."""
    with open_store(replica.path) as reader:
        return [
            Finding.of(Class.INDEX_MISMATCH, replica.group, replica.name, found.start, found.end)
            for found in reader.verify().findings
            if found.kind == "INDEX_MISMATCH"
        ]


def _spread(
    spark: SparkSession, what: str, work: Sequence[_Work], rows: Callable[[_Work], _Rows], schema: pa.Schema
) -> pa.Table:
    """Runs ``rows`` for each item in a task of its own, or for neighbours in one task if there are very many."""
    items = list(work)
    if not items:
        return schema.empty_table()

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        found = (row for batch in batches for number in batch.column(0).to_pylist() for row in rows(items[number]))
        while part := list(islice(found, _ROWS_PER_BATCH)):
            yield pa.RecordBatch.from_pylist(part, schema)

    numbers = spark.range(0, len(items), 1, min(len(items), _TASKS_MAX))
    with _watched(spark, what):
        return numbers.mapInArrow(run, ddl_of(schema)).toArrow().cast(schema)


@contextmanager
def _watched(spark: SparkSession, what: str) -> Iterator[None]:
    """Shows how many tasks of the jobs started inside are done."""
    tracker = spark.sparkContext.statusTracker()
    done = threading.Event()

    def report(shown: Progress) -> None:
        while not done.wait(_POLL_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            active = [stage for stage in stages if stage is not None]
            if active:
                shown.update(sum(s.numCompletedTasks for s in active), total=sum(s.numTasks for s in active))

    with Progress(what, unit="tasks", every_s=_REPORT_EVERY_S) as shown:
        thread = threading.Thread(target=report, args=(shown,), name="audit-progress", daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


# --- tables -------------------------------------------------------------------------------------------------------


def append(spark: SparkSession, rows: pa.Table, path: str) -> None:
    """Appends rows to a Delta table in one commit, and creates it, even without rows, if it is absent."""
    from delta.tables import DeltaTable

    if not rows.num_rows and DeltaTable.isDeltaTable(spark, path):
        return
    spark.createDataFrame(rows).coalesce(1).write.format("delta").mode("append").save(path)


def earlier_digests(spark: SparkSession, directory: str) -> DataFrame | None:
    """Returns the digests of all runs (DIGESTS), or None if there are none."""
    from delta.tables import DeltaTable

    path = f"{directory}/audit_ranges"
    return spark.read.format("delta").load(path) if DeltaTable.isDeltaTable(spark, path) else None

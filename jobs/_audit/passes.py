"""The two passes on Spark: digests of ranges by (replica, range), then the ranges that differ, entry by entry.

Each task gets its share of a list of work that travels with the function; log data never leaves the tasks, only digests
and findings do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa

from dledger_core.errors import DLedgerError
from jobs._audit.drill import Drilled, drill
from jobs._audit.model import Class, Finding, Replica
from jobs._audit.plan import DigestTask, Section, aligned
from jobs._audit.ranges import RangeRow
from jobs._audit.sources import Gap, RangeSeen, open_source
from jobs._cli import progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "Compared",
    "RangeKey",
    "compared_by_replica",
    "digest_pass",
    "drill_pass",
    "index_pass",
    "suspect_ranges",
    "watched",
]

RANGES_SCHEMA: Final = (
    "run_id string, group string, replica string, start long, end long, bytes long, content binary, layout binary,"
    " damaged array<long>, problem string, reason string, read_at timestamp"
)
_ARROW_SCHEMA: Final = pa.schema(
    [
        ("run_id", pa.string()),
        ("group", pa.string()),
        ("replica", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("bytes", pa.int64()),
        ("content", pa.binary()),
        ("layout", pa.binary()),
        ("damaged", pa.list_(pa.int64())),
        ("problem", pa.string()),
        ("reason", pa.string()),
        ("read_at", pa.timestamp("us", tz="UTC")),
    ]
)
_FOUND_SCHEMA: Final = pa.schema([("found", pa.string())])
_ROWS_PER_BATCH: Final = 256
_TASKS_MAX: Final = 256
_REPORT_EVERY_S: Final = 5.0

_Work = TypeVar("_Work")
RangeKey = tuple[str, int, int]
"""(group, start, end)."""


@dataclass(frozen=True, slots=True)
class Compared:
    """How much of a replica was compared with another one."""

    group: str
    replica: str
    entries: int
    nbytes: int


def digest_pass(spark: SparkSession, tasks: Sequence[DigestTask], run_id: str) -> DataFrame:
    """Returns the digests of all ranges, a row per replica and range (RANGES_SCHEMA); nothing has run yet."""

    def rows(task: DigestTask) -> Iterator[pa.RecordBatch]:
        pending: list[dict[str, Any]] = []
        for row in _digest_rows(task, run_id):
            pending.append(row)
            if len(pending) >= _ROWS_PER_BATCH:
                yield pa.RecordBatch.from_pylist(pending, _ARROW_SCHEMA)
                pending = []
        if pending:
            yield pa.RecordBatch.from_pylist(pending, _ARROW_SCHEMA)

    return _spread(spark, tuple(tasks), rows, RANGES_SCHEMA)


def _digest_rows(task: DigestTask, run_id: str) -> Iterator[dict[str, Any]]:
    replica = task.replica
    whose = {"run_id": run_id, "group": replica.group, "replica": replica.name}
    for seen in _digests(task):
        now = datetime.now(UTC)
        if isinstance(seen, RangeSeen):
            digest = seen.digest
            yield whose | {
                "start": digest.start,
                "end": digest.end,
                "bytes": digest.nbytes,
                "content": digest.content,
                "layout": digest.layout,
                "damaged": list(seen.damaged),
                "problem": "",
                "reason": "",
                "read_at": now,
            }
            continue
        for start, end in aligned(seen.start, seen.end, task.span):
            gap = {"start": start, "end": end, "problem": seen.kind, "reason": seen.reason, "read_at": now}
            yield whose | gap | {"bytes": 0, "content": b"", "layout": b"", "damaged": []}


def _digests(task: DigestTask) -> Iterator[RangeSeen | Gap]:
    done = task.start
    try:
        with open_source(task.replica) as source:
            for seen in source.digests(task.start, task.end, task.span):
                yield seen
                done = seen.end if isinstance(seen, Gap) else seen.digest.end
    except DLedgerError as error:
        yield Gap(done, task.end, "unread", str(error))


def suspect_ranges(ranges: DataFrame) -> dict[RangeKey, list[RangeRow]]:
    """Returns the rows of those ranges that are not simply equal on all replicas."""
    from pyspark.sql import functions as F  # noqa: N812

    problem = (F.col("problem") != "") | (F.size("damaged") > 0)
    grouped = ranges.groupBy("group", "start", "end").agg(
        F.count_distinct("content", "layout").alias("kinds"),
        F.max(problem).alias("problem"),
        F.collect_list(
            F.struct("replica", "content", "layout", F.size("damaged").alias("damaged"), "problem", "reason")
        ).alias("rows"),
    )
    found = {}
    for row in grouped.where((F.col("kinds") > 1) | F.col("problem")).collect():
        rows = [
            RangeRow(
                replica=one.replica,
                content=bytes(one.content),
                layout=bytes(one.layout),
                damaged=one.damaged,
                problem=one.problem,
                reason=one.reason,
            )
            for one in row.rows
        ]
        found[row.group, row.start, row.end] = sorted(rows, key=lambda one: one.replica)
    return found


def compared_by_replica(ranges: DataFrame) -> list[Compared]:
    """Returns how much of each replica was compared: ranges that at least two could read."""
    from pyspark.sql import Window
    from pyspark.sql import functions as F  # noqa: N812

    readable = ranges.where(F.col("problem").isin("", "damaged"))
    together = Window.partitionBy("group", "start", "end")
    rows = (
        readable.withColumn("holders", F.count("*").over(together))
        .where("holders > 1")
        .groupBy("group", "replica")
        .agg(F.sum(F.col("end") - F.col("start")).alias("entries"), F.sum("bytes").alias("nbytes"))
        .collect()
    )
    return [Compared(row.group, row.replica, row.entries, row.nbytes) for row in rows]


def drill_pass(spark: SparkSession, parts: Sequence[Section]) -> list[Drilled]:
    """Compares ranges entry by entry and returns what was found."""

    def rows(part: Section) -> Iterator[pa.RecordBatch]:
        yield pa.RecordBatch.from_pylist([{"found": json.dumps(asdict(_drilled(part)))}], _FOUND_SCHEMA)

    with watched(spark, "entry by entry"):
        found = _spread(spark, tuple(parts), rows, "found string").collect()
    return [_from_json(json.loads(row.found)) for row in found]


def index_pass(spark: SparkSession, stores: Sequence[Replica]) -> list[Finding]:
    """Compares the index files of stores with their data."""

    def rows(replica: Replica) -> Iterator[pa.RecordBatch]:
        found = [{"found": json.dumps(asdict(finding))} for finding in _index_findings(replica)]
        yield pa.RecordBatch.from_pylist(found, _FOUND_SCHEMA)

    with watched(spark, "index files"):
        found = _spread(spark, tuple(stores), rows, "found string").collect()
    return [_finding(json.loads(row.found)) for row in found]


def _index_findings(replica: Replica) -> Iterator[Finding]:
    from dledger_core import open_store

    with open_store(replica.path) as reader:
        for found in reader.verify().findings:
            if found.kind == "INDEX_MISMATCH":
                yield Finding(
                    kind=Class.INDEX_MISMATCH,
                    group=replica.group,
                    replica=replica.name,
                    start=found.start,
                    end=found.end,
                    count=found.end - found.start,
                    evidence={"path": found.path, "position": found.position, "reason": found.message},
                )


def _drilled(part: Section) -> Drilled:
    try:
        return drill(part)
    except DLedgerError as error:
        return Drilled((), 0, (f"[{part.start}, {part.end}): {error}",), 0)


def _from_json(fields: dict[str, Any]) -> Drilled:
    findings = tuple(_finding(finding) for finding in fields["findings"])
    return Drilled(findings, fields["cleared"], tuple(fields["unread"]), fields["read_bytes"])


def _finding(fields: dict[str, Any]) -> Finding:
    return Finding(**fields | {"kind": Class(fields["kind"])})


def _spread(
    spark: SparkSession, work: tuple[_Work, ...], rows: Callable[[_Work], Iterator[pa.RecordBatch]], schema: str
) -> DataFrame:
    """Runs ``rows`` for each item, neighbours in one task if there are very many."""

    def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from rows(work[number])

    return spark.range(0, len(work), 1, max(1, min(len(work), _TASKS_MAX))).mapInArrow(run, schema)


@contextmanager
def watched(spark: SparkSession, what: str) -> Iterator[None]:
    """Reports on stderr, every few seconds, how many tasks of the jobs started inside are done."""
    tracker = spark.sparkContext.statusTracker()
    over = threading.Event()

    def report() -> None:
        said = ""
        while not over.wait(_REPORT_EVERY_S):
            stages = [tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds()]
            active = [stage for stage in stages if stage is not None]
            if active:
                done, total = (sum(getattr(s, name) for s in active) for name in ("numCompletedTasks", "numTasks"))
                text = f"{what}: {done} of {total} tasks"
                if text != said:
                    progress(text)
                    said = text

    thread = threading.Thread(target=report, name="audit-progress", daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()

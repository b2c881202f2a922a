"""The two passes on Spark: digests of ranges by (replica, range), then the ranges that differ, entry by entry.

Each task gets its share of a list of work that travels with the function; log data never leaves the tasks, only digests
and findings do.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from itertools import chain
from typing import TYPE_CHECKING, Any, Final, TypeVar

import pyarrow as pa

from dledger_core.errors import DLedgerError
from jobs._audit.drill import Drilled, drill
from jobs._audit.limiter import RateLimiter
from jobs._audit.model import Class, Finding, Replica
from jobs._audit.plan import DigestTask, Section, aligned, bundles, shares
from jobs._audit.sources import Gap, RangeSeen, open_source
from jobs._cli import StoppedError, progress

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "digest_pass",
    "digests_here",
    "drill_pass",
    "index_pass",
    "watched",
]

RANGES_SCHEMA: Final = (
    "run_id string, group string, replica string, start long, end long, bytes long, content binary, layout binary,"
    " damaged array<long>, problem string, reason string, read_at timestamp,"
    " index_wrong array<long>, log_uuid string, source string, resumes string"
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
        ("index_wrong", pa.list_(pa.int64())),
        ("log_uuid", pa.string()),
        ("source", pa.string()),
        ("resumes", pa.string()),
    ]
)
_FOUND_SCHEMA: Final = pa.schema([("found", pa.string())])
_ROWS_PER_BATCH: Final = 256
_TASKS_MAX: Final = 256
_REPORT_EVERY_S: Final = 5.0

_Work = TypeVar("_Work")


def digest_pass(
    spark: SparkSession, tasks: Sequence[DigestTask], run_id: str, *, resumes: str = "", rate: int | None = None
) -> DataFrame:
    """Returns the digests of all ranges, a row per replica and range (RANGES_SCHEMA); nothing has run yet.

    Args:
        spark: the session.
        tasks: what to read.
        run_id: this run.
        resumes: the run that it goes on with.
        rate: bytes per second that may be read from one node; then each node is read by one task.
    """

    def rows(bundle: tuple[DigestTask, ...]) -> Iterator[pa.RecordBatch]:
        limiter = RateLimiter(rate) if rate else None
        pending: list[dict[str, Any]] = []
        for row in chain.from_iterable(_digest_rows(task, run_id, resumes, limiter) for task in bundle):
            pending.append(row)
            if len(pending) >= _ROWS_PER_BATCH:
                yield pa.RecordBatch.from_pylist(pending, _ARROW_SCHEMA)
                pending = []
        if pending:
            yield pa.RecordBatch.from_pylist(pending, _ARROW_SCHEMA)

    return _spread(spark, tuple(bundles(tasks, one_per_node=rate is not None)), rows, RANGES_SCHEMA)


def digests_here(
    tasks: Sequence[DigestTask], run_id: str, stopping: threading.Event, *, resumes: str = "", threads: int = 2
) -> pa.Table:
    """Returns what ``digest_pass`` does, read by threads of this process: of little work a Spark job is the most.

    Args:
        tasks: what to read.
        run_id: this run.
        stopping: ends it.
        resumes: the run that it goes on with.
        threads: how many read at once; hashing and reading leave Python's lock alone.

    Raises:
        StoppedError: ``stopping`` was set.
    """

    def rows(task: DigestTask) -> list[dict[str, Any]]:
        found = []
        for row in _digest_rows(task, run_id, resumes):
            if stopping.is_set():
                raise StoppedError("stopped by a signal")
            found.append(row)
        return found

    with ThreadPoolExecutor(threads, "audit-digests") as pool:
        found = list(chain.from_iterable(pool.map(rows, shares(tasks, threads))))
    return pa.Table.from_pylist(found, _ARROW_SCHEMA)


def _digest_rows(
    task: DigestTask, run_id: str, resumes: str = "", limiter: RateLimiter | None = None
) -> Iterator[dict[str, Any]]:
    replica = task.replica
    whose = {"run_id": run_id, "group": replica.group, "replica": replica.name}
    whose |= {"log_uuid": replica.log_uuid or "", "source": replica.source, "resumes": resumes}
    for seen in _digests(task, limiter):
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
                "index_wrong": list(chain.from_iterable(seen.index_wrong)),
                "problem": "",
                "reason": "",
                "read_at": now,
            }
            continue
        for start, end in aligned(seen.start, seen.end, task.span):
            gap = {"start": start, "end": end, "problem": seen.kind, "reason": seen.reason, "read_at": now}
            yield whose | gap | {"bytes": 0, "content": b"", "layout": b"", "damaged": [], "index_wrong": []}


def _digests(task: DigestTask, limiter: RateLimiter | None) -> Iterator[RangeSeen | Gap]:
    done = task.start
    try:
        with open_source(task.replica, limiter) as source:
            for seen in source.digests(task.start, task.end, task.span):
                yield seen
                done = seen.end if isinstance(seen, Gap) else seen.digest.end
    except DLedgerError as error:
        yield Gap(done, task.end, "unread", str(error))


def drill_pass(spark: SparkSession, parts: Sequence[Section], rate: int | None = None) -> list[Drilled]:
    """Compares ranges entry by entry and returns what was found; with a rate one range after the other."""

    def rows(work: tuple[Section, ...]) -> Iterator[pa.RecordBatch]:
        names = {replica.name for part in work for replica in part.replicas}
        limiters = {name: RateLimiter(rate) for name in names} if rate else {}
        for part in work:
            found = json.dumps(asdict(_drilled(part, limiters)))
            yield pa.RecordBatch.from_pylist([{"found": found}], _FOUND_SCHEMA)

    bundled = [tuple(parts)] if rate else [(part,) for part in parts]
    with watched(spark, "entry by entry"):
        found = _spread(spark, tuple(bundled), rows, "found string").collect()
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


def _drilled(part: Section, limiters: Mapping[str, RateLimiter]) -> Drilled:
    try:
        return drill(part, limiters=limiters)
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

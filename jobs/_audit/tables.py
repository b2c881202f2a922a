"""The Delta tables of all audits: ``audit_runs``, ``audit_ranges``, ``audit_findings``."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from jobs._audit.model import Finding
from jobs._audit.report import GroupReport

if TYPE_CHECKING:
    from pyarrow.dataset import Dataset
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["Ranges", "RunFacts", "append", "read_ranges", "write_findings", "write_ranges", "write_runs"]

_WHOSE: Final = [("run_id", pa.string()), ("group", pa.string())]
_RUNS_SCHEMA: Final = pa.schema(
    [
        *_WHOSE,
        ("started_at", pa.timestamp("us", tz="UTC")),
        ("duration_s", pa.float64()),
        ("mode", pa.string()),
        ("verdict", pa.string()),
        ("compared_start", pa.int64()),
        ("compared_end", pa.int64()),
        ("entries_compared", pa.int64()),
        ("bytes_compared", pa.int64()),
        ("findings", pa.int64()),
        ("report", pa.string()),
    ]
)
_FINDINGS_SCHEMA: Final = pa.schema(
    [
        *_WHOSE,
        ("found_at", pa.timestamp("us", tz="UTC")),
        ("class", pa.string()),
        ("severity", pa.string()),
        ("replica", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("count", pa.int64()),
        ("evidence", pa.string()),
    ]
)


Condition = tuple[str, datetime | list[str]]
"""A column, and the least value or all the values that it may have."""

_SIMPLE: Final = re.compile(r"[\w/ .,:@+=~-]*")
"""Delta-rs takes a path for a URL where it has ``%``, ``[`` or others."""
_WRITER: Final = 2
_EVERYWHERE: Final = {"appendOnly", "invariants"}
"""Delta's protocol: the version of a writer that a new table asks for, and what that stands for."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What belongs to the run as a whole."""

    run_id: str
    mode: str
    started_at: datetime
    duration_s: float


def write_ranges(spark: SparkSession, digests: pa.Table, directory: str) -> None:
    """Appends digests; each call is one commit, so what a killed run had finished is there."""
    append(spark, digests, f"{directory}/audit_ranges")


@dataclass(frozen=True, slots=True)
class Ranges:
    """The digests of all runs, as they were when this was made; the columns are ``passes.RANGES_SCHEMA``'s.

    Attributes:
        select: returns the columns (all of them: None) of the rows in which one column is at least a value, or among
            several (None: of all rows).
    """

    select: Callable[[list[str] | None, Condition | None], pa.Table]

    def resumed(self) -> dict[str, str]:
        """Returns which run each run went on with; an empty string for none."""
        rows = self.select(["run_id", "resumes"], None).group_by(["run_id", "resumes"]).aggregate([])
        return dict(zip(rows["run_id"].to_pylist(), rows["resumes"].to_pylist(), strict=True))

    def of_runs(self, run_ids: Sequence[str]) -> pa.Table:
        """Returns what some runs read."""
        return self.select(None, ("run_id", list(run_ids)))

    def since(self, oldest: datetime) -> pa.Table:
        """Returns what was read since then."""
        return self.select(None, ("read_at", oldest))


def read_ranges(spark: SparkSession, directory: str) -> Ranges | None:
    """Returns the digests of all runs; None if there are none, or only those of a version that recorded less."""
    path = f"{directory}/audit_ranges"
    if not _is_there(spark, path):
        return None
    here = _open_here(_place(spark, path))
    if here is not None:
        names, select = here.schema.names, partial(_select_here, here)
    else:
        frame = spark.read.format("delta").load(path)
        names, select = frame.columns, partial(_select_by_spark, frame)
    return Ranges(select) if "resumes" in names else None


def _select_here(rows: Dataset, columns: list[str] | None, where: Condition | None) -> pa.Table:
    if where is None:
        return rows.to_table(columns)
    column, value = where
    given = pc.field(column)
    if isinstance(value, datetime):
        return rows.to_table(columns, filter=given >= pa.scalar(value, pa.timestamp("us", tz="UTC")))
    return rows.to_table(columns, filter=given.isin(pa.array(value, pa.string())))


def _select_by_spark(rows: DataFrame, columns: list[str] | None, where: Condition | None) -> pa.Table:
    if where is not None:
        column, value = where
        rows = rows.where(rows[column] >= value if isinstance(value, datetime) else rows[column].isin(value))
    return (rows if columns is None else rows.select(columns)).toArrow()


def write_findings(spark: SparkSession, directory: str, facts: RunFacts, findings: Sequence[Finding]) -> None:
    """Appends the findings of a run; the table is there even if there are none."""
    path = f"{directory}/audit_findings"
    if not findings and _is_there(spark, path):
        return
    rows = [
        (facts.run_id, f.group, facts.started_at, f.kind.value, f.severity.value, f.replica, f.start, f.end, f.count,
         json.dumps(f.evidence))
        for f in findings
    ]  # fmt: skip
    append(spark, _table(rows, _FINDINGS_SCHEMA), path)


def write_runs(spark: SparkSession, directory: str, facts: RunFacts, reports: Sequence[GroupReport]) -> None:
    """Appends a row per group; written last, so a run that is listed is complete."""
    rows = [
        (facts.run_id, r.group, facts.started_at, facts.duration_s, facts.mode, r.verdict.value, *r.compared,
         sum(c.entries_compared for c in r.coverage.values()), sum(c.bytes_compared for c in r.coverage.values()),
         len(r.findings), json.dumps(r.to_json()))
        for r in reports
    ]  # fmt: skip
    append(spark, _table(rows, _RUNS_SCHEMA), f"{directory}/audit_runs")


def append(spark: SparkSession, rows: pa.Table, path: str) -> None:
    """Appends a few rows in one commit, and makes the table if it is absent.

    In a file system of this machine without Spark, which takes half a second for it, and ten where it has not written
    to Delta before. Spark writes elsewhere, and where a table asks more of its writers than others know of.

    Raises:
        OSError: it cannot be written.
    """
    place = _place(spark, path)
    if place is None or not _append_here(rows, place):
        frame = spark.createDataFrame(rows).coalesce(1)
        frame.write.format("delta").option("mergeSchema", "true").mode("append").save(path)


def _append_here(rows: pa.Table, place: Path) -> bool:
    """Returns False, with nothing written, where only Spark may write."""
    try:
        from deltalake import DeltaTable, write_deltalake
        from deltalake.exceptions import DeltaError
    except ModuleNotFoundError:
        return False
    try:
        table = DeltaTable(place) if DeltaTable.is_deltatable(str(place)) else None
        if table is not None and not _is_plain(table.protocol()):
            return False
        write_deltalake(place if table is None else table, rows, mode="append", schema_mode="merge")
    except DeltaError as error:
        raise OSError(f"{place} cannot be written: {error}") from error
    return True


def _open_here(place: Path | None) -> Dataset | None:
    """Returns a table's rows; None where only Spark may read them."""
    try:
        from deltalake import DeltaTable
        from deltalake.exceptions import DeltaError
    except ModuleNotFoundError:
        return None
    try:
        table = None if place is None else DeltaTable(place)
        return table.to_pyarrow_dataset() if table is not None and _is_plain(table.protocol()) else None
    except DeltaError as error:
        raise OSError(f"{place} cannot be read: {error}") from error


def _is_plain(protocol: Any) -> bool:
    """Whether a table asks no more of its readers and writers than Delta does of all."""
    asked = protocol.writer_features
    plain = protocol.min_writer_version <= _WRITER if asked is None else set(asked) <= _EVERYWHERE
    return bool(plain and protocol.min_reader_version == 1)


def _is_there(spark: SparkSession, path: str) -> bool:
    from delta.tables import DeltaTable

    place = _place(spark, path)
    return DeltaTable.isDeltaTable(spark, path) if place is None else any(place.glob("_delta_log/0*"))


@lru_cache(maxsize=64)  # each of its calls into the JVM takes as long as writing a small file
def _place(spark: SparkSession, table: str) -> Path | None:
    """Where Spark would write, if that is in a file system of this machine and has a simple name."""
    jvm: Any = spark._jvm
    given = jvm.org.apache.hadoop.fs.Path(table)
    found = given.getFileSystem(spark._jsc.hadoopConfiguration()).makeQualified(given).toUri()
    path = str(found.getPath())
    return Path(path) if found.getScheme() == "file" and _SIMPLE.fullmatch(path) else None


def _table(rows: list[tuple[Any, ...]], schema: pa.Schema) -> pa.Table:
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    return pa.table([pa.array(column, field.type) for column, field in zip(columns, schema, strict=True)], schema)

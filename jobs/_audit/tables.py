"""The Delta tables of all audits: ``audit_runs``, ``audit_ranges``, ``audit_findings``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING, Any, Final

from jobs._audit.model import Finding
from jobs._audit.report import GroupReport

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["RunFacts", "read_ranges", "write_findings", "write_ranges", "write_runs"]

_RUNS_SCHEMA: Final = (
    "run_id string, group string, started_at timestamp, duration_s double, mode string, verdict string,"
    " compared_start long, compared_end long, entries_compared long, bytes_compared long, findings long, report string"
)
_FINDINGS_SCHEMA: Final = (
    "run_id string, group string, found_at timestamp, class string, severity string, replica string, start long,"
    " end long, count long, evidence string"
)


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What belongs to the run as a whole."""

    run_id: str
    mode: str
    started_at: datetime
    duration_s: float


def write_ranges(spark: SparkSession, digests: pa.Table, directory: str) -> None:
    """Appends digests; each call is one commit, so what a killed run had finished is there."""
    rows = spark.createDataFrame(digests).coalesce(1)
    rows.write.format("delta").option("mergeSchema", "true").mode("append").save(f"{directory}/audit_ranges")


def read_ranges(spark: SparkSession, directory: str) -> DataFrame | None:
    """Returns the digests of all runs; None if there are none, or only those of a version that recorded less."""
    from delta.tables import DeltaTable

    path = f"{directory}/audit_ranges"
    if not DeltaTable.isDeltaTable(spark, path):
        return None
    rows = spark.read.format("delta").load(path)
    return rows if "resumes" in rows.columns else None


def write_findings(spark: SparkSession, directory: str, facts: RunFacts, findings: Sequence[Finding]) -> None:
    """Appends the findings of a run; the table is there even if there are none."""
    from delta.tables import DeltaTable

    path = f"{directory}/audit_findings"
    if not findings and DeltaTable.isDeltaTable(spark, path):
        return
    rows = [
        (facts.run_id, f.group, facts.started_at, f.kind.value, f.severity.value, f.replica, f.start, f.end, f.count,
         json.dumps(f.evidence))
        for f in findings
    ]  # fmt: skip
    _append(spark, rows, _FINDINGS_SCHEMA, path)


def write_runs(spark: SparkSession, directory: str, facts: RunFacts, reports: Sequence[GroupReport]) -> None:
    """Appends a row per group; written last, so a run that is listed is complete."""
    rows = [
        (facts.run_id, r.group, facts.started_at, facts.duration_s, facts.mode, r.verdict.value, *r.compared,
         sum(c.entries_compared for c in r.coverage.values()), sum(c.bytes_compared for c in r.coverage.values()),
         len(r.findings), json.dumps(r.to_json()))
        for r in reports
    ]  # fmt: skip
    _append(spark, rows, _RUNS_SCHEMA, f"{directory}/audit_runs")


def _append(spark: SparkSession, rows: list[tuple[Any, ...]], schema: str, path: str) -> None:
    spark.createDataFrame(rows, schema).coalesce(1).write.format("delta").mode("append").save(path)

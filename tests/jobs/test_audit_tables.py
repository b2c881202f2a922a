"""An audit's tables are written without Spark where they lie on this machine; readers cannot tell the difference."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from jobs._audit import tables
from jobs._audit.model import Class, Finding

pytestmark = [
    pytest.mark.spark,
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"),
]

NOW = datetime(2026, 11, 22, 10, 30, 59, 123456, UTC)
FACTS = tables.RunFacts("run", "digest", NOW, 1.5)
ROWS = pa.table(
    {
        "run_id": pa.array(["a", "ü", None]),
        "start": pa.array([0, 1 << 62, None]),
        "content": pa.array([b"\x00\xff", b"", None]),
        "damaged": pa.array([[1, 2], [], None], pa.list_(pa.int64())),
        "read_at": pa.array([NOW, NOW, None], pa.timestamp("us", tz="UTC")),
        "duration_s": pa.array([0.5, -1.0, None]),
    }
)


@pytest.fixture
def by_spark(spark: Any) -> Callable[[pa.Table, str], None]:
    """How the tables were written before, and are where Spark must."""

    def write(rows: pa.Table, path: str) -> None:
        spark.createDataFrame(rows).coalesce(1).write.format("delta").mode("append").save(path)

    return write


def read(spark: Any, path: str) -> tuple[Any, list[Any]]:
    frame = spark.read.format("delta").load(path)
    return frame.schema, sorted(map(repr, frame.collect()))


def engines(path: str) -> list[str]:
    """Who has made each commit."""
    found = []
    for commit in sorted(Path(path, "_delta_log").glob("*.json")):
        lines = [json.loads(line) for line in commit.read_text().splitlines()]
        found += [line["commitInfo"]["engineInfo"].partition(":")[0] for line in lines if "commitInfo" in line]
    return [engine.partition("/")[0] for engine in found]


def test_rows_are_what_spark_would_write_and_both_go_on(
    spark: Any, by_spark: Callable[[pa.Table, str], None], tmp_path: Path
) -> None:
    here, there = str(tmp_path / "written here ü"), str(tmp_path / "there")
    tables.append(spark, ROWS, here)
    by_spark(ROWS, there)
    assert read(spark, here) == read(spark, there)
    by_spark(ROWS, here)
    tables.append(spark, ROWS, f"file://{there}")
    assert read(spark, here) == read(spark, there)
    assert len(read(spark, here)[1]) == 2 * ROWS.num_rows
    assert (engines(here), engines(there)) == (["delta-rs", "Apache-Spark"], ["Apache-Spark", "delta-rs"])


def test_a_table_of_an_older_version_gets_the_new_columns(spark: Any, tmp_path: Path) -> None:
    path = str(tmp_path / "table")
    tables.append(spark, ROWS.drop_columns(["damaged", "read_at"]), path)
    tables.append(spark, ROWS, path)
    frame = spark.read.format("delta").load(path)
    assert set(frame.columns) == set(ROWS.column_names)
    assert frame.where("size(damaged) = 2").count() == 1
    assert frame.count() == 2 * ROWS.num_rows


def test_spark_writes_where_a_table_asks_more_of_its_writers(
    spark: Any, by_spark: Callable[[pa.Table, str], None], tmp_path: Path
) -> None:
    path = str(tmp_path / "table")
    by_spark(ROWS, path)
    spark.sql(f"ALTER TABLE delta.`{path}` SET TBLPROPERTIES ('delta.enableRowTracking' = 'true')")
    before = len(engines(path))
    tables.append(spark, ROWS, path)
    assert engines(path)[before:] == ["Apache-Spark"]
    assert len(read(spark, path)[1]) == 2 * ROWS.num_rows


def test_spark_writes_where_nothing_else_can(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "deltalake", None)
    tables.append(spark, ROWS, str(tmp_path / "table"))
    assert engines(str(tmp_path / "table")) == ["Apache-Spark"]


@pytest.mark.parametrize("name", ["a%20b", "[x]", "a|b"])
def test_spark_writes_where_others_would_write_elsewhere(spark: Any, name: str, tmp_path: Path) -> None:
    tables.write_findings(spark, str(tmp_path / name), FACTS, [])
    tables.write_findings(spark, str(tmp_path / name), FACTS, [])
    assert engines(str(tmp_path / name / "audit_findings")) == ["Apache-Spark"]
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_what_cannot_be_written_says_so(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file/table cannot be written"):
        tables.append(spark, ROWS, str(tmp_path / "file" / "table"))


def test_ranges_are_the_same_whoever_reads_them(
    spark: Any, by_spark: Callable[[pa.Table, str], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = NOW + timedelta(hours=1)
    first = ROWS.slice(0, 2).append_column("resumes", pa.array(["", "a"]))
    second = first.set_column(4, "read_at", pa.array([later, later], pa.timestamp("us", tz="UTC")))
    for rows in (first, second.set_column(0, "run_id", pa.array(["b", "b"]))):
        tables.write_ranges(spark, rows, str(tmp_path))

    def seen() -> list[Any]:
        ranges = tables.read_ranges(spark, str(tmp_path))
        assert ranges is not None
        found = [ranges.of_runs(["a", "b"]), ranges.of_runs([]), ranges.since(later), ranges.since(NOW)]
        return [ranges.resumed(), *(sorted(map(repr, rows.to_pylist())) for rows in found)]

    here = seen()
    assert (here[0], [len(rows) for rows in here[1:]]) == ({"a": "", "ü": "a", "b": "a"}, [3, 0, 2, 4])
    monkeypatch.setitem(sys.modules, "deltalake", None)
    assert seen() == here


def test_there_may_be_no_ranges_to_go_on_from(spark: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert tables.read_ranges(spark, str(tmp_path)) is None
    tables.write_ranges(spark, ROWS, str(tmp_path))  # of a version that did not record which run a run goes on with
    assert tables.read_ranges(spark, str(tmp_path)) is None
    monkeypatch.setitem(sys.modules, "deltalake", None)
    assert tables.read_ranges(spark, str(tmp_path)) is None


def test_findings_have_a_table_even_if_there_are_none(spark: Any, tmp_path: Path) -> None:
    path = tmp_path / "audit_findings"
    for _ in range(2):
        tables.write_findings(spark, str(tmp_path), FACTS, [])
        assert (read(spark, str(path))[1], len(engines(str(path)))) == ([], 1)
    finding = Finding(kind=Class.CORRUPT, group="g", replica="n0", start=5, end=6, count=1, evidence={"stored": "00"})
    tables.write_findings(spark, str(tmp_path), FACTS, [finding])
    (row,) = spark.read.format("delta").load(str(path)).collect()
    found = row["class"], row["replica"], row["start"], row["found_at"].timestamp()
    assert found == ("CORRUPT", "n0", 5, NOW.timestamp())

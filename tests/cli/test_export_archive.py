"""``dledger export --archive``: deleted entries come from the archive, verified, and one dataset has all of the log."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable, write_deltalake
from pyarrow import parquet

from dledger_core import open_store
from tests.cli.command import error_of, last_error, result_of, run
from tests.rocketmq import golden
from tests.spark_connector.store_writer import StoreWriter
from tests.support.archived_store import archive, shown_rows

CUTS = (0, 60, 100, 300)
OPAQUE = ("--opaque", "--archive", "true")


@pytest.fixture
def made(tmp_path: Path) -> Path:
    """A directory with a store that has deleted its first entries, the archive of its log, and the rows of the log."""
    with StoreWriter(tmp_path / "n0", segment_bytes=1 << 13) as writer:
        writer.append_numbers(50)
        writer.append_attempt(10, batch=1, run="lost")
        writer.commit(writer.append_attempt(20, batch=1), batch=1)
        writer.append([], noop=True)
        for _ in range(23):
            writer.append_numbers(10)
        archive(writer, tmp_path / "table", CUTS)
        with open_store(writer.path) as store:
            parquet.write_table(shown_rows(store, 0, store.last_index + 1), tmp_path / "rows.parquet")
        assert 260 < writer.trim() < 300  # the seam is inside of a range
    (tmp_path / "store").symlink_to(writer.path)
    return tmp_path


def exported(directory: Path) -> pa.Table:
    return pa.concat_tables([parquet.read_table(file) for file in sorted(directory.glob("*.parquet"))])


def first_index(made: Path) -> int:
    with open_store(made / "store") as store:
        return int(store.first_index)


@pytest.mark.parametrize("part_bytes", [1 << 20, 300])
def test_export_has_archive_and_log_as_one_log(made: Path, part_bytes: int) -> None:
    found = result_of("export", made / "store", made / "out", *OPAQUE, "--part-bytes", part_bytes)
    assert (found["first_index"], found["files"] > 3) == (0, part_bytes == 300)
    assert exported(made / "out") == parquet.read_table(made / "rows.parquet")
    below = result_of("export", made / "store", made / "log", "--opaque")
    assert below["first_index"] == first_index(made)


@pytest.mark.parametrize(("start", "end"), [(30, 70), (61, 99), (55, 58), (100, 101), (150, 220), (250, 310)])
def test_bounds_inside_of_archive_are_exact(made: Path, start: int, end: int) -> None:
    run("export", made / "store", made / "out", *OPAQUE, "--from", start, "--until", end, "--to", "parquet")
    rows = parquet.read_table(made / "rows.parquet")
    expected = rows.filter(pc.and_(pc.greater_equal(rows["index"], start), pc.less(rows["index"], end)))
    found = list((made / "out").glob("*.parquet"))
    assert expected.num_rows > 0 or (start, end) == (55, 58)
    assert (exported(made / "out").to_pylist() if found else []) == expected.to_pylist()


def test_times_select_entries_of_archive(made: Path) -> None:
    rows = parquet.read_table(made / "rows.parquet").to_pylist()
    start, end = rows[20], next(row for row in rows if row["index"] > first_index(made) + 5)
    moments = [row["timestamp"].strftime("%Y-%m-%dT%H:%M:%S.%f") for row in (start, end)]
    run("export", made / "store", made / "out", *OPAQUE, "--from", moments[0], "--until", moments[1])
    expected = [row["index"] for row in rows if start["timestamp"] <= row["timestamp"] < end["timestamp"]]
    assert exported(made / "out")["index"].to_pylist() == expected


@pytest.mark.parametrize("end", [55, 60, 75, 83, 150, 302])
def test_dataset_continues_where_it_ended_and_notices_another_log(made: Path, end: int) -> None:
    out = made / "out"
    run("export", made / "store", out, *OPAQUE, "--until", end)
    assert result_of("export", made / "store", out, *OPAQUE)["continued_from"] == end
    assert exported(out) == parquet.read_table(made / "rows.parquet")
    with StoreWriter(made / "other", uuid="log-2") as writer:
        writer.append_numbers(300)
        archive(writer, made / "other table", (0, 200))
    assert error_of("export", writer.path, out, *OPAQUE).code == "STORE_MISMATCH"


def copied(made: Path, change: Callable[[pa.Table], pa.Table]) -> Path:
    write_deltalake(made / "copy", change(DeltaTable(made / "table").to_pyarrow_table()))
    return made / "copy"


def of_another_log(rows: pa.Table) -> pa.Table:
    return rows.set_column(rows.schema.get_field_index("term"), "term", pc.add(rows["term"], 7))


@pytest.mark.parametrize(
    ("change", "kept"),
    [
        (lambda rows: rows.filter(pc.not_equal(rows["index"], 90)), 60),
        (lambda rows: pa.concat_tables([rows, rows.filter(pc.equal(rows["index"], 70))]), 60),
        (of_another_log, 0),
    ],
    ids=["a row deleted", "a row twice", "another log"],
)
def test_damaged_range_is_an_error_and_files_before_it_are_complete(
    made: Path, change: Callable[[pa.Table], pa.Table], kept: int
) -> None:
    out, location = made / "out", copied(made, change)
    failed = run("export", made / "store", out, "--opaque", "--archive", location, code=4)
    error = last_error(failed.stderr)
    assert (error.code, str(location) in error) == ("DLEDGER_ARCHIVE_DAMAGED", True)
    rows = parquet.read_table(made / "rows.parquet")
    files = list(out.glob("*.parquet"))
    found: list[dict[str, Any]] = exported(out).to_pylist() if files else []
    assert found == rows.filter(pc.less(rows["index"], kept)).to_pylist()
    assert not list(out.glob("*.part"))
    run("export", made / "store", out, *OPAQUE)  # with an intact table it continues
    assert exported(out) == rows


def test_logs_without_archive_are_refused(made: Path, tmp_path: Path) -> None:
    java = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path / "java")
    with StoreWriter(tmp_path / "other") as plain:
        plain.append_numbers(5)
    for source, more, name in (
        (java, (), "Java"),
        (plain.path, (), "no archive"),
        (made / "store", ("--isolation", "read-uncommitted"), "--archive"),
    ):
        error = error_of("export", source, made / "out", "--archive", "true", *more)
        assert (error.code, name in error) == ("CONFIG", True), error
    error = error_of("export", made / "store", made / "out", "--archive", made / "nothing")
    assert error.code == "DLEDGER_ARCHIVE_TABLE"
    assert "--archive" in error_of("export", made / "store", made / "out", "--archive-storage", made / "rows.parquet")

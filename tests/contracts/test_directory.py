"""Contract of the directories that ``open_log_directory`` reads: every store, a CommitLog, and a log after one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pyarrow as pa
import pytest

from dledger_core.errors import CorruptRecordError
from dledger_core.rocketmq.store.directory import (
    COMMITLOG_ONLY,
    Damaged,
    Deleted,
    LogDirectory,
    Span,
    open_log_directory,
)
from tests.contracts import stores
from tests.contracts.stores import Made, Stored, copy_of, sha256
from tests.support.damage import flip
from tests.support.only_reading import only_reading

END = 1 << 62


def rows_of(directory: LogDirectory, span: Span | None = None, **options: Any) -> list[dict[str, Any]]:
    """Return the entries of a span without damage."""
    rows: list[dict[str, Any]] = []
    for found in directory.batches(span, **options):
        assert isinstance(found, pa.RecordBatch)
        rows += found.to_pylist()
    return rows


def stored(rows: list[dict[str, Any]]) -> list[Stored]:
    return [Stored(row["index"], row["term"], row["magic"], sha256(row["body"])) for row in rows]


def data_files(made: Made) -> list[Path]:
    files = [file for file in made.path.rglob("0*") if file.parent.name != "index"]
    return sorted(files, key=lambda file: int(file.name))


class DirectoryContract:
    kind: ClassVar[type[stores.Store]]

    @pytest.fixture
    def made(self, tmp_path: Path) -> Made:
        return copy_of(self.kind, tmp_path)

    @pytest.fixture
    def directory(self, made: Made) -> Any:
        with open_log_directory(made.path) as directory:
            yield directory

    def test_entries_are_those_written_in_order(self, made: Made, directory: LogDirectory) -> None:
        rows = rows_of(directory)
        assert stored(rows) == made.entries
        positions = [row["position"] for row in rows]
        assert positions == sorted(set(positions))
        assert (directory.damage, directory.gap, directory.gaps) == ([], None, [])
        directory.check_read()
        assert directory.check_end() is None

    def test_record_contains_body(self, directory: LogDirectory) -> None:
        for row in rows_of(directory, records=True):
            header = 0 if row["index"] is None else 48
            assert row["record"][header:] == row["body"]

    def test_spans_are_parts_of_all_entries(self, directory: LogDirectory) -> None:
        rows = rows_of(directory)
        classic, log = [row for row in rows if row["index"] is None], [row for row in rows if row["index"] is not None]
        assert rows_of(directory, COMMITLOG_ONLY) == classic
        assert rows_of(directory, Span((0, 0), directory.indexes)) == log
        assert rows_of(directory, Span((5, 5), (5, 5))) == rows_of(directory, Span((END, END + 1), (0, 0))) == []
        for part in filter(None, (classic[3:9], classic[-2:])):
            start, last = part[0]["position"], part[-1]["position"]
            for span in ((start, last + 1), (start + 1, last + 1)):  # inside a message: the message
                assert rows_of(directory, Span(span, (0, 0))) == part
        for part in filter(None, (log[3:9], log[-2:])):
            assert rows_of(directory, Span((0, 0), (part[0]["index"], part[-1]["index"] + 1))) == part

    def test_shown_entries_are_committed_data(self, made: Made, directory: LogDirectory) -> None:
        log = [entry for entry in made.entries if entry.index is not None]
        shown = rows_of(directory, Span((0, 0), directory.indexes), shown=directory.shown)
        assert stored(shown) == [entry for entry in log[: made.committed] if entry.magic == 1]
        assert directory.unknown_outcomes is None
        for batch in directory.batches():
            assert isinstance(batch, pa.RecordBatch)
            for row, reason in zip(batch.to_pylist(), directory.hidden(batch).to_pylist(), strict=True):
                assert (reason is None) == (row["index"] is None or row in shown)

    def test_damaged_entry_is_named_and_hides_no_other(self, made: Made) -> None:
        with open_log_directory(made.path) as intact:
            rows = rows_of(intact)
        at = 20
        position = rows[at]["position"]
        file = next(file for file in reversed(data_files(made)) if int(file.name) <= position)
        flip(file, position - int(file.name) + 4)  # the size of a record, the magic number of a message
        with open_log_directory(made.path) as directory:
            found = list(directory.batches())
            damaged = [each for each in found if isinstance(each, Damaged)]
            read = [row for each in found if isinstance(each, pa.RecordBatch) for row in each.to_pylist()]
            assert [each.error.where for each in damaged] == [str(file)]
            assert directory.damage == [damaged[0].error]
            assert damaged[0].start == (position if rows[at]["index"] is None else rows[at]["index"])
            assert not damaged[0].missing
            key = "index" if rows[at]["index"] is not None else "position"
            assert read == rows[:at] + [row for row in rows if row[key] is None or row[key] >= damaged[0].end]
            with pytest.raises(CorruptRecordError):
                directory.check_read()

    def test_file_deleted_meanwhile_is_no_damage(self, made: Made) -> None:
        with open_log_directory(made.path) as directory:
            first = data_files(made)[0]
            size = first.stat().st_size
            first.unlink()
            found = list(directory.batches())
            read = [row for each in found if isinstance(each, pa.RecordBatch) for row in each.to_pylist()]
            others = [each for each in found if not isinstance(each, pa.RecordBatch)]
            assert stored(read) == made.entries[-len(read) :]
            assert all(isinstance(each, Deleted) for each in others)
            assert others or read[0]["position"] < size
            directory.check_read()

    def test_reads_change_no_file_and_directory_is_closed_twice(self, made: Made) -> None:
        with only_reading(made.path):
            directory = open_log_directory(made.path)
            rows_of(directory)
            directory.times()
            directory.close()
            directory.close()


class TestNative(DirectoryContract):
    kind = stores.Native


class TestOldLeader(DirectoryContract):
    kind = stores.OldLeader


class TestJavaA(DirectoryContract):
    kind = stores.JavaA


class TestJavaB(DirectoryContract):
    kind = stores.JavaB


class TestBroker(DirectoryContract):
    kind = stores.Broker


class TestClassic(DirectoryContract):
    kind = stores.Classic


class TestMixed(DirectoryContract):
    kind = stores.Mixed

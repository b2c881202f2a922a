"""The table of archived ranges: which entries count, ended archives, and continued logs."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core import control
from dledger_core.control import ArchivedRange
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index
from dledger_core.storage.tables.tables import LogTables

TABLE = "s3://bucket/archive"


def range_of(start: int, end: int) -> ArchivedRange:
    return ArchivedRange(
        start=start, end=end, rows=end - start, digest=b"d" * 32, position=start * 100, nbytes=(end - start) * 100,
        last_time_ms=1000 + end, term=3, check=end,
    )  # fmt: skip


def apply(
    tables: LogTables, index: int, found: ArchivedRange | None, *, begins: bool = False, uri: str = TABLE
) -> None:
    fields: dict[str, Any] = {"k": "archive-end"}
    if found is not None:
        fields = {"k": "archived", "r": found.row(), "u": uri} | ({"b": True} if begins else {})
    tables.apply(Index(index), 0, control.pack(fields))


def proved(*ranges: tuple[int, int]) -> LogTables:
    """Tables after these ranges, of which the first one begins an archive, at the indexes 1000, 1001, ..."""
    tables = LogTables()
    for at, (start, end) in enumerate(ranges):
        apply(tables, 1000 + at, range_of(start, end), begins=not at)
    return tables


def bounds(tables: LogTables) -> list[tuple[int, int]]:
    return [(found.start, found.end) for found in tables.archive.containing(0)]


@pytest.mark.parametrize(
    ("start", "end", "begins", "counts"),
    [
        (20, 30, False, True),
        (20, 30, True, True),
        (21, 30, False, False),
        (19, 30, False, False),
        (5, 10, True, False),
        (20, 1003, False, False),
    ],
    ids=["next", "next of a job that begins", "gap", "overlap", "second beginning", "not written yet"],
)
def test_range_counts_only_where_the_archive_ends_when_it_is_applied(
    start: int, end: int, begins: bool, counts: bool
) -> None:
    tables = proved((5, 10), (10, 20))
    apply(tables, 1002, range_of(start, end), begins=begins)
    assert bounds(tables) == [(5, 10), (10, 20)] + [(start, end)] * counts
    assert (tables.archive.start, tables.archive.end, tables.archive.table) == (5, end if counts else 20, TABLE)


def test_range_of_an_earlier_leader_counts_nowhere_after_the_end_of_its_archive() -> None:
    tables = proved((5, 10))
    apply(tables, 1001, None)
    apply(tables, 1002, range_of(10, 20))
    assert not tables.archive.is_active
    assert bounds(tables) == []
    apply(tables, 1003, range_of(8, 20), begins=True, uri="file:///other")
    assert (bounds(tables), tables.archive.table) == ([(8, 20)], "file:///other")


@pytest.mark.parametrize(
    ("cut", "expected"),
    [
        (1005, [(100, 110), (110, 120)]),
        (1004, [(100, 110)]),
        (1003, []),
        (1002, []),
        (1001, [(5, 10), (10, 20)]),
        (1000, [(5, 10)]),
        (999, []),
    ],
)
def test_log_that_is_continued_has_the_archive_as_of_its_end(cut: int, expected: list[tuple[int, int]]) -> None:
    tables = proved((5, 10), (10, 20))
    apply(tables, 1002, None)
    apply(tables, 1004, range_of(100, 110), begins=True, uri="file:///other")
    apply(tables, 1005, range_of(110, 120), uri="file:///other")
    tables.forget_after(Index(cut))
    assert bounds(tables) == expected
    assert tables.archive.table == ("" if not expected else TABLE if cut < 1002 else "file:///other")
    assert tables.take_changes().rows == dict(tables.rows())
    assert LogTables.from_rows(tables.rows()).rows() == tables.rows()


def test_archive_that_ended_before_the_log_begins_is_forgotten() -> None:
    tables = proved((5, 10))
    apply(tables, 1001, None)
    apply(tables, 1002, range_of(10, 20), begins=True)
    tables.trim(1001)
    assert tables.archive.row_count == 3
    tables.trim(1002)
    assert tables.archive.row_count == 1
    assert bounds(tables) == [(10, 20)]
    apply(tables, 1003, None)
    changes = tables.take_changes()
    assert len([key for key in changes.rows if key.startswith(b"A")]) == 4
    assert LogTables.from_rows(tables.rows()).rows() == tables.rows()


def test_ranges_are_found_by_index() -> None:
    tables = proved((5, 10), (10, 20), (20, 30))
    found = tables.archive.containing
    assert [each.start for each in found(9)] == [5, 10, 20]
    assert [each.start for each in found(10, 20)] == [10]
    assert [each.start for each in found(10, 21)] == [10, 20]
    assert [each.start for each in found(0, most=1)] == [5]
    assert found(30) == []


@pytest.mark.parametrize("change", [{"r": []}, {"r": [1] * 9}, {"r": None}, {"u": ...}])
def test_malformed_range_is_damage(change: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"k": "archived", "r": range_of(5, 10).row(), "u": TABLE, "b": True} | change
    fields = {key: value for key, value in fields.items() if value is not ...}
    with pytest.raises(CorruptRecordError):
        LogTables().apply(Index(1000), 0, control.pack(fields))


def test_tables_without_an_archive_have_the_rows_of_earlier_versions() -> None:
    assert [key for key, _ in LogTables().rows()] == [b"m"]
    tables = proved((5, 10))
    assert len(tables.archive.rows().__next__()[1]) < 140


@given(
    steps=st.lists(st.tuples(st.integers(0, 5), st.integers(1, 5), st.booleans()), max_size=12), cut=st.integers(0, 40)
)
def test_tables_ahead_of_the_log_become_those_of_a_log_that_ends_there(
    steps: list[tuple[int, int, bool]], cut: int
) -> None:
    ahead, behind = LogTables(), LogTables()
    for at, (start, length, begins) in enumerate(steps):
        found = None if length == 5 else range_of(start, start + length)
        for tables in (ahead, *([behind] if 20 + at <= 20 + cut else [])):
            apply(tables, 20 + at, found, begins=begins)
    ahead.forget_after(Index(20 + cut))
    assert list(ahead.archive.rows()) == list(behind.archive.rows())
    assert bounds(ahead) == bounds(behind)

"""Filters that a batch reader takes: fewer entries are read, and no row that Spark's own filter leaves is missing."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    IsNull,
    LessThan,
    LessThanOrEqual,
    Not,
    StringStartsWith,
)

from dledger_core.rocketmq import encode_messages
from spark_connector.errors import OffsetBeyondEndError
from spark_connector.reading.readers import FilteredBatchReader
from tests.spark_connector.engine import indexes, make_batch_reader, options_of
from tests.spark_connector.store_writer import StoreWriter

COMPARED: Any = {
    EqualTo: operator.eq,
    EqualNullSafe: operator.eq,
    GreaterThan: operator.gt,
    GreaterThanOrEqual: operator.ge,
    LessThan: operator.lt,
    LessThanOrEqual: operator.le,
    In: lambda found, values: found in values,
    StringStartsWith: lambda found, start: found.startswith(start),
}


def passes(row: dict[str, Any], given: Any) -> bool:
    """Whether a row passes a filter, as Spark decides it."""
    if isinstance(given, Not):
        return not passes(row, given.child)
    found = row[given.attribute[0].lower()]
    if isinstance(given, (IsNull, IsNotNull)):
        return (found is None) == isinstance(given, IsNull)
    return found is not None and COMPARED[type(given)](found, given.value)


def rows_of(reader: Any) -> list[dict[str, Any]]:
    partitions = reader.partitions()
    return [row for partition in partitions for batch in reader.read(partition) for row in batch.to_pylist()]


def filtered(store: StoreWriter, *filters: Filter, **options: Any) -> list[dict[str, Any]]:
    """Return the rows that are read for filters."""
    reader = FilteredBatchReader(options_of(store, **options))
    assert list(reader.pushFilters(list(filters))) == list(filters), "Spark applies them again"
    return rows_of(reader)


@pytest.fixture
def terms(tmp_path: Path) -> Iterator[StoreWriter]:
    """Entries 0 to 59: ten of each of the terms 1, 2, 4, 5, 7 and 8, those of one term appended at the same time."""
    with StoreWriter(tmp_path, term=1) as writer:
        for term in (1, 2, 4, 5, 7, 8):
            writer.term = term
            writer.append_numbers(10)
        yield writer


@pytest.mark.parametrize(
    ("filters", "expected"),
    [
        ([GreaterThanOrEqual(("index",), 20), LessThanOrEqual(("index",), 22), IsNotNull(("index",))], range(20, 23)),
        ([GreaterThan(("INDEX",), 20), LessThan(("index",), 22)], [21]),
        ([EqualTo(("index",), 7)], [7]),
        ([EqualNullSafe(("index",), 7), GreaterThan(("index",), 7)], []),
        ([LessThan(("index",), -3)], []),
        ([GreaterThan(("index",), 1000)], []),
        ([EqualTo(("term",), 4)], range(20, 30)),
        ([EqualTo(("term",), 3)], []),
        ([GreaterThan(("term",), 2), LessThan(("term",), 8), IsNotNull(("term",))], range(20, 50)),
        ([GreaterThanOrEqual(("term",), 8)], range(50, 60)),
        ([LessThanOrEqual(("term",), 0)], []),
        ([EqualTo(("group",), "default"), EqualTo(("index",), 7)], [7]),
        ([In(("group",), ("default", "other")), In(("group",), ("other",))], []),
        ([In(("index",), (40, 12, 14))], range(12, 41)),
        ([In(("term",), (4, 7))], range(20, 50)),
    ],
)
def test_filters_limit_planned_range(terms: StoreWriter, filters: list[Filter], expected: Any) -> None:
    assert [row["index"] for row in filtered(terms, *filters)] == list(expected)


@pytest.mark.parametrize(
    "given",
    [
        Not(EqualTo(("index",), 7)),
        EqualTo(("position",), 0),
        EqualTo(("body",), b"body-3"),
        EqualTo(("index", "x"), 3),
        IsNull(("term",)),
        EqualNullSafe(("index",), None),
        StringStartsWith(("group",), "x"),
        EqualTo(("topic",), "a"),
    ],
)
def test_other_filters_limit_nothing(terms: StoreWriter, given: Filter) -> None:
    assert len(filtered(terms, given)) == 60


def test_any_filters_leave_rows_that_spark_leaves_without_pushdown(terms: StoreWriter) -> None:
    everything = rows_of(make_batch_reader(terms))
    chance = random.Random(46)
    moments = [row["timestamp"] + timedelta(microseconds=step) for row in everything[::10] for step in (-1, 0, 1)]
    kinds = [kind for kind in COMPARED if kind not in (In, StringStartsWith)]
    columns: dict[str, list[Any]] = {"index": list(range(-2, 63)), "term": list(range(10)), "timestamp": moments}
    columns["timestamp"].append(datetime(1960, 1, 1, tzinfo=UTC))
    for _ in range(500):
        filters: list[Filter] = []
        for _ in range(chance.randint(1, 3)):
            column = chance.choice(list(columns))
            values, kind = columns[column], chance.choice([*kinds, In])
            value = tuple(chance.sample(values, 2)) if kind is In else chance.choice(values)
            made: Any = kind((column,), value)
            filters.append(Not(made) if chance.random() < 0.1 else made)
        found, expected = [
            [row for row in rows if all(passes(row, given) for given in filters)]
            for rows in (filtered(terms, *filters), everything)
        ]
        assert found == expected, filters


def test_times_limit_planned_range(terms: StoreWriter) -> None:
    times = [row["timestamp"] for row in rows_of(make_batch_reader(terms))[::10]]
    since, until = GreaterThan(("timestamp",), times[1]), LessThan(("timestamp",), times[3])
    assert [row["index"] for row in filtered(terms, since, until)] == list(range(20, 30))


def test_options_and_filters_limit_range_together(terms: StoreWriter) -> None:
    bounds = {"startingOffsets": '{"default": 25}', "endingOffsets": '{"default": 28}'}
    rows = filtered(terms, LessThan(("index",), 27), EqualTo(("term",), 4), **bounds)
    assert [row["index"] for row in rows] == [25, 26]
    rows = filtered(terms, GreaterThan(("index",), 40), **bounds)
    assert rows == []


def test_lost_end_is_reported_whatever_the_filters_want(terms: StoreWriter) -> None:
    for given in (LessThan(("term",), 50), LessThan(("term",), 2), LessThan(("index",), 10)):
        with pytest.raises(OffsetBeyondEndError):
            filtered(terms, given, endingOffsets='{"default": 70}')


def test_deleted_entries_are_lost_only_to_filters_that_want_them(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, segment_bytes=1 << 12) as store:
        for _ in range(10):
            store.append_numbers(20)
        first = store.trim()
        assert first > 0
        rows = filtered(store, LessThan(("index",), first + 2))
        assert [row["index"] for row in rows] == [first, first + 1]
        assert filtered(store, LessThan(("index",), first)) == []
        rows = filtered(store, GreaterThan(("index",), first), startingOffsets='{"default": 0}')
        assert len(rows) == 199 - first


def test_filters_of_messages_skip_other_messages(store: StoreWriter) -> None:
    bodies = [b"body-%d" % number for number in range(6)]
    store.append(
        encode_messages(
            ["a", "b"] * 3, 0, bodies, tags=["x", "y", None] * 2, keys=["k1", "k1 k2", "k3"] * 2
        ).to_pylist()
    )
    store.append([b"other"])
    cases: list[tuple[Filter, list[int]]] = [
        (EqualTo(("topic",), "a"), [0, 2, 4]),
        (In(("topic",), ("b", None, "none such")), [1, 3, 5]),
        (EqualTo(("tags",), "x"), [0, 3]),
        (EqualTo(("keys",), "k1 k2"), [1, 4]),
        (EqualNullSafe(("tags",), None), list(range(6))),
    ]
    for given, expected in cases:
        rows = filtered(store, given, decode="message")
        assert [row["index"] for row in rows] == [*expected, 6], "a body that is not a message stays"
    both = filtered(store, cases[0][0], EqualTo(("tags",), "x"), decode="message", topics="a,b")
    assert [row["index"] for row in both] == [0, 6]


def test_reader_with_filters_survives_pickle(terms: StoreWriter) -> None:
    reader = FilteredBatchReader(options_of(terms))
    reader.pushFilters([EqualTo(("index",), 7)])
    assert indexes(reader, reader.partitions()) == [7]

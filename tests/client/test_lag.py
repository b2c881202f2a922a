"""Lag as plain arithmetic over a log of data and control entries."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.client import Lag, measure_lag
from dledger_core.record import READ_SCHEMA

BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Log:
    """Entries of given sizes, some of them data; one read scans ``at_most`` entries."""

    def __init__(self, entries: list[tuple[bool, int]], at_most: int = 1000) -> None:
        self.entries = entries
        self.at_most = at_most
        self.reads = 0

    def position(self, index: int) -> int:
        return sum(size for _, size in self.entries[:index])

    def end_position(self, index: int) -> int:
        return self.position(index + 1)

    def rows(self, start: int, end: int) -> tuple[pa.RecordBatch, int]:
        self.reads += 1
        end = min(end, start + self.at_most)
        found = [
            {
                "index": index,
                "term": 1,
                "position": self.position(index),
                "timestamp": BEGAN + timedelta(seconds=index),
                "body": b"",
            }
            for index in range(start, end)
            if self.entries[index][0]
        ]
        return pa.RecordBatch.from_pylist(found, READ_SCHEMA), end


@given(
    entries=st.lists(st.tuples(st.booleans(), st.integers(48, 500)), max_size=60),
    start=st.integers(0, 60),
    at_most=st.integers(1, 100),
)
def test_lag_starts_at_first_data_entry(entries: list[tuple[bool, int]], start: int, at_most: int) -> None:
    log, start, end = Log(entries, at_most + 20), min(start, len(entries)), len(entries)
    behind = measure_lag(start, end, log.rows, log.end_position)
    first = next((index for index in range(start, end) if entries[index][0]), None)
    if first is None:
        assert behind == Lag(0, 0, None)
        assert behind.seconds() == 0.0
        return
    size = sum(size for _, size in entries[first:])
    assert behind == Lag(end - first, size, BEGAN + timedelta(seconds=first))
    assert behind.seconds(BEGAN + timedelta(seconds=first + 2.5)) == 2.5
    assert behind.seconds(BEGAN) == 0.0  # the leader's clock is ahead


def test_lag_scans_control_entries_in_few_reads() -> None:
    log = Log([(False, 48)] * 5000, 100_000)
    assert measure_lag(0, 5000, log.rows, log.end_position) == Lag()
    assert log.reads <= 13


def test_lag_takes_one_read_before_data_entry() -> None:
    log = Log([(True, 48)] * 50)
    assert measure_lag(7, 50, log.rows, log.end_position).records == 43
    assert log.reads == 1


def test_unscanned_entries_count_as_lag() -> None:
    log = Log([(False, 50)] * 100, 1)
    behind = measure_lag(10, 100, log.rows, log.end_position)
    assert (behind.records, behind.bytes, behind.seconds()) == (50, 2500, None)


def test_entries_of_lagging_replica_count_as_lag() -> None:
    log = Log([(True, 50)] * 10)
    nothing = pa.RecordBatch.from_pylist([], READ_SCHEMA)
    behind = measure_lag(4, 10, lambda start, _: (nothing, start), log.end_position)
    assert (behind.records, behind.bytes, behind.oldest) == (6, 300, None)

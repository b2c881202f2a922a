"""Rules of a returning reader as plain functions: whether its position still fits its log, and its lag."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core import LogRange
from dledger_core.client import EntryCheck, Lag, LogPosition, LossKind, check_of, find_loss, measure_lag
from dledger_core.errors import IndexOutOfRangeError
from dledger_core.lineage import AncestorLog
from dledger_core.record import READ_SCHEMA

KNOWN = EntryCheck(3, 0xAB)
VIEW = LogRange(10, 100, 99, "log-a")
JAVA = LogRange(10, 100, -1)
CONTINUED = LogRange(10, 100, 99, "log-c", (AncestorLog("log-b", 20, 2, 0xCD), AncestorLog("log-a", 49, 3, 0xAB)))


@pytest.mark.parametrize(
    ("position", "view", "kind"),
    [
        pytest.param(LogPosition(50, "log-a", 3, 0xAB), VIEW, None, id="fits"),
        pytest.param(LogPosition(50, "log-a", 3, 0xAB), JAVA, None, id="log without uuid"),
        pytest.param(LogPosition(100, "log-a", 3, 0xAB), VIEW, None, id="at end"),
        pytest.param(LogPosition(10, "log-a", 9, 0xFF), VIEW, None, id="at first index, record before deleted"),
        pytest.param(LogPosition(50, "log-a"), VIEW, None, id="no record known"),
        pytest.param(LogPosition(50, None, 3, 0xAB), VIEW, None, id="no uuid known"),
        pytest.param(LogPosition(50, "log-a", 3), VIEW, None, id="only term known"),
        pytest.param(LogPosition(50, "log-b", 3, 0xAB), VIEW, LossKind.LOG_RECREATED, id="other log"),
        pytest.param(LogPosition(101, "log-b", 3, 0xAB), VIEW, LossKind.LOG_RECREATED, id="other log, beyond its end"),
        pytest.param(LogPosition(50, "log-a", 3, 0xAB), CONTINUED, None, id="continued log, at its end"),
        pytest.param(LogPosition(15, "log-b", 3, 0xAB), CONTINUED, None, id="log continued before"),
        pytest.param(LogPosition(15, "log-a"), CONTINUED, None, id="continued log, no record known"),
        pytest.param(LogPosition(51, "log-a", 3, 0xAB), CONTINUED, LossKind.LOG_RECREATED, id="read beyond its end"),
        pytest.param(LogPosition(22, "log-b", 3, 0xAB), CONTINUED, LossKind.LOG_RECREATED, id="read beyond that end"),
        pytest.param(LogPosition(40, "log-a", 3, 0xAC), CONTINUED, LossKind.TERM_MISMATCH, id="lost entry of that log"),
        pytest.param(LogPosition(10, "log-a", 3, 0xAB), CONTINUED, LossKind.LOG_RECREATED, id="entry before deleted"),
        pytest.param(LogPosition(101, "log-a", 3, 0xAB), VIEW, LossKind.OFFSET_BEYOND_END, id="beyond end"),
        pytest.param(LogPosition(9, "log-a", 3, 0xAB), VIEW, LossKind.RETENTION, id="deleted"),
        pytest.param(LogPosition(50, "log-a", 4, 0xAB), VIEW, LossKind.TERM_MISMATCH, id="other term"),
        pytest.param(LogPosition(50, "log-a", 4), VIEW, LossKind.TERM_MISMATCH, id="other term, no check"),
        pytest.param(LogPosition(50, "log-a", 3, 0xAC), VIEW, LossKind.TERM_MISMATCH, id="other check"),
        pytest.param(LogPosition(50, None, 3, 0xAC), VIEW, LossKind.TERM_MISMATCH, id="other check, no uuid"),
    ],
)
def test_loss_of_position_is_named_or_none(position: LogPosition, view: LogRange, kind: LossKind | None) -> None:
    read: list[int] = []

    def record(index: int) -> EntryCheck:
        read.append(index)
        return KNOWN

    loss = find_loss(position, view, record)
    assert (loss and loss.kind) == kind
    assert loss is None or (loss.position, loss.view) == (position, view)
    assert loss is None or loss.found == (KNOWN if kind == LossKind.TERM_MISMATCH else None)
    assert read in ([], [position.next_index - 1])
    assert kind in (None, LossKind.TERM_MISMATCH) or not read, "the bounds decide"


@pytest.mark.parametrize(
    ("position", "view", "resume"),
    [
        pytest.param(LogPosition(50, "log-x", 3, 0xAB), VIEW, 10, id="other log"),
        pytest.param(LogPosition(500, "log-x", 3, 0xAB), VIEW, 10, id="other log, beyond its end"),
        pytest.param(LogPosition(51, "log-a", 3, 0xAB), CONTINUED, 50, id="read beyond the shared entries"),
        pytest.param(LogPosition(500, "log-b", 3, 0xAB), CONTINUED, 21, id="read beyond those of an earlier log"),
        pytest.param(LogPosition(10, "log-a", 3, 0xAB), CONTINUED, 10, id="entry before deleted"),
        pytest.param(LogPosition(101, "log-a", 3, 0xAB), VIEW, 101, id="beyond end: an older view of the log"),
        pytest.param(LogPosition(9, "log-a", 3, 0xAB), VIEW, 9, id="deleted"),
        pytest.param(LogPosition(50, "log-a", 4, 0xAB), VIEW, 50, id="other term"),
    ],
)
def test_reader_that_accepts_loss_resumes_at_first_unread_entry(
    position: LogPosition, view: LogRange, resume: int
) -> None:
    loss = find_loss(position, view, lambda _: KNOWN)
    assert loss is not None
    assert loss.resume_index == resume


@pytest.mark.parametrize(
    ("first", "kind"),
    [
        pytest.param(60, LossKind.RETENTION, id="with entries that were not read"),
        pytest.param(50, None, id="with the read entries alone"),
    ],
)
def test_record_deleted_since_the_view_was_made_is_no_error(first: int, kind: LossKind | None) -> None:
    def record(index: int) -> EntryCheck:
        raise IndexOutOfRangeError("deleted", "", "", {"index": index, "first_index": first})

    loss = find_loss(LogPosition(50, "log-a", 3, 0xAB), VIEW, record)
    assert (loss and loss.kind) == kind
    assert loss is None or loss.view.first_index == first


def test_record_that_the_log_ought_to_have_is_an_error() -> None:
    def record(index: int) -> EntryCheck:
        raise IndexOutOfRangeError("unknown", "", "", {"index": index, "first_index": 10})

    with pytest.raises(IndexOutOfRangeError):
        find_loss(LogPosition(50, "log-a", 3, 0xAB), VIEW, record)


def test_check_changes_with_each_part_of_record() -> None:
    record = (5, 2, 480, b"body")
    others = [(6, 2, 480, b"body"), (5, 3, 480, b"body"), (5, 2, 481, b"body"), (5, 2, 480, b"Body")]
    assert check_of(*record) not in [check_of(*other) for other in others]


BEGAN = datetime(2026, 1, 1, tzinfo=UTC)


class Log:
    """Entries of given sizes, some of them data; one read scans ``at_most`` entries."""

    def __init__(self, entries: list[tuple[bool, int]], at_most: int = 1000) -> None:
        self.entries = entries
        self.at_most = at_most
        self.reads = 0

    def end_position(self, index: int) -> int:
        return sum(size for _, size in self.entries[: index + 1])

    def rows(self, start: int, end: int) -> tuple[pa.RecordBatch, int]:
        self.reads += 1
        end = min(end, start + self.at_most)
        found = [
            {
                "index": index,
                "term": 1,
                "position": self.end_position(index - 1),
                "timestamp": BEGAN + timedelta(seconds=index),
                "body": b"",
            }
            for index in range(start, end)
            if self.entries[index][0]
        ]
        return pa.RecordBatch.from_pylist(found, READ_SCHEMA), end

    def lag_of(self, start: int) -> Lag:
        return measure_lag(start, len(self.entries), self.rows, self.end_position)


@given(
    entries=st.lists(st.tuples(st.booleans(), st.integers(48, 500)), max_size=60),
    start=st.integers(0, 60),
    at_most=st.integers(1, 100),
)
def test_lag_starts_at_first_data_entry(entries: list[tuple[bool, int]], start: int, at_most: int) -> None:
    log, start, end = Log(entries, at_most + 20), min(start, len(entries)), len(entries)
    lag = log.lag_of(start)
    first = next((index for index in range(start, end) if entries[index][0]), None)
    if first is None:
        assert lag == Lag(0, 0, None)
        assert lag.seconds() == 0.0
        return
    size = sum(size for _, size in entries[first:])
    assert lag == Lag(end - first, size, BEGAN + timedelta(seconds=first))
    assert lag.seconds(BEGAN + timedelta(seconds=first + 2.5)) == 2.5
    assert lag.seconds(BEGAN) == 0.0  # the leader's clock is ahead


@pytest.mark.parametrize(
    ("log", "start", "lag", "reads"),
    [
        pytest.param(Log([(False, 48)] * 5000, 100_000), 0, Lag(), 13, id="control entries"),
        pytest.param(Log([(True, 48)] * 50), 7, Lag(43, 43 * 48, BEGAN + timedelta(seconds=7)), 1, id="data"),
        pytest.param(Log([(False, 50)] * 100, 1), 10, Lag(50, 2500, None), 40, id="not scanned"),
        pytest.param(Log([(True, 50)] * 10, 0), 4, Lag(6, 300, None), 1, id="lagging replica"),
    ],
)
def test_lag_takes_few_reads(log: Log, start: int, lag: Lag, reads: int) -> None:
    assert log.lag_of(start) == lag
    assert log.reads <= reads
    assert (lag.seconds() is None) is (lag.records > 0 and lag.oldest is None)

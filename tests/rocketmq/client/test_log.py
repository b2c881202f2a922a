"""A Java group's log entry by entry: reads and appends in flight, and its end, without nodes."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.connect import JavaOptions
from dledger_core.errors import ConfigError, IndexOutOfRangeError, ProtocolError, RequestTimedOutError
from dledger_core.rocketmq.client.log import (
    PROBE_PREFIX,
    EndObservation,
    SafeEndTracker,
    append_all,
    batch_of,
    first_index,
    last_end,
    read_entries,
)
from dledger_core.rocketmq.remoting.messages import AppendResponse, WireEntry


class Node:
    """Holds entries; counts the requests in flight."""

    def __init__(self, entries: list[WireEntry]) -> None:
        self.entries = entries
        self.in_flight_now = self.most = self.asked = 0

    async def get(self, index: int) -> WireEntry:
        self.asked += 1
        self.in_flight_now += 1
        self.most = max(self.most, self.in_flight_now)
        try:
            await asyncio.sleep(0)
            if index >= len(self.entries):
                raise IndexOutOfRangeError("behind", "", "", {"code": 410})
            return self.entries[index]
        finally:
            self.in_flight_now -= 1


def entries(count: int, size: int = 100, term: int = 1) -> list[WireEntry]:
    return [WireEntry(index, term, 1, index * (48 + size), b"x" * size) for index in range(count)]


def read(node: Node, start: int, end: int, max_bytes: int = 1 << 20, in_flight: int = 8) -> list[WireEntry]:
    return asyncio.run(read_entries(node.get, start, end, max_bytes=max_bytes, in_flight=in_flight))


def test_entries_are_read_in_order_with_several_in_flight() -> None:
    node = Node(entries(100))
    assert read(node, 3, 90) == node.entries[3:90]
    assert node.most == 8
    assert node.in_flight_now == 0


def test_read_ends_at_end_of_log() -> None:
    node = Node(entries(10))
    assert read(node, 5, 1000) == node.entries[5:]
    assert node.in_flight_now == 0
    with pytest.raises(IndexOutOfRangeError):
        read(node, 10, 11)


@pytest.mark.slow
def test_read_limits_bytes_and_requests_in_flight() -> None:
    node = Node(entries(100, size=952))
    assert len(read(node, 0, 100, max_bytes=10_000)) == 10
    assert len(read(node, 0, 100, max_bytes=1)) == 1
    node = Node(entries(100, size=4 << 20))
    assert len(read(node, 0, 100, max_bytes=40 << 20, in_flight=64)) == 9, "the records are a little larger"
    assert node.asked < 10 + 64 + 4
    node = Node(entries(3))
    read(node, 0, 3, max_bytes=1)
    assert node.asked == 1


def test_decreasing_terms_are_rejected() -> None:
    node = Node([*entries(5, term=2), WireEntry(5, 1, 1, 0, b"")])
    with pytest.raises(ProtocolError):
        read(node, 0, 6)


def test_batch_skips_noops_and_probes() -> None:
    found = [
        WireEntry(0, 1, 1, 0, b"a"),
        WireEntry(1, 2, 2, 49, b""),
        WireEntry(2, 2, 1, 97, PROBE_PREFIX + b"some uuid"),
        WireEntry(3, 2, 1, 200, b""),
    ]
    rows = batch_of(found, records=False).to_pylist()
    assert [row["index"] for row in rows] == [0, 3]
    assert rows[0] == {"index": 0, "term": 1, "position": 0, "timestamp": None, "body": b"a"}
    assert [row["magic"] for row in batch_of(found, records=True).to_pylist()] == [1, 2, 1, 1]
    assert batch_of([], records=False).num_rows == 0


class Leader:
    """Takes appends; ``order`` says which index each gets, ``fails`` which of them fail."""

    def __init__(self, first: int = 0, order: list[int] | None = None, fails: tuple[int, ...] = ()) -> None:
        self.bodies: list[bytes] = []
        self._first, self._order, self._fails = first, order, fails

    async def append(self, body: bytes) -> AppendResponse:
        place = len(self.bodies)
        self.bodies.append(body)
        await asyncio.sleep(0)
        if place in self._fails:
            raise RequestTimedOutError("no answer", "n0")
        return AppendResponse(index=self._first + (self._order[place] if self._order else place), term=3)


def append(leader: Leader, count: int, in_flight: int) -> Any:
    return asyncio.run(append_all(leader.append, [b"%d" % i for i in range(count)], in_flight))


@pytest.mark.parametrize(
    ("leader", "count", "in_flight", "found"),
    [
        (Leader(first=7), 20, 4, (7, 26, 3, ())),
        (Leader(first=10, order=[1, 0, 5]), 3, 3, (10, 15, 3, (11, 10, 15))),
        (Leader(), 20, 1, (0, 19, 3, ())),
    ],
    ids=["in order", "other order", "one in flight"],
)
def test_append_returns_range_or_each_index(leader: Leader, count: int, in_flight: int, found: tuple[Any, ...]) -> None:
    result = append(leader, count, in_flight)
    assert (result.first_index, result.last_index, result.term, result.indexes) == found
    assert in_flight > 1 or leader.bodies == [b"%d" % i for i in range(count)]


def test_failed_append_counts_acknowledged_bodies() -> None:
    leader = Leader(first=5, fails=(6,))
    with pytest.raises(RequestTimedOutError) as caught:
        append(leader, 100, 4)
    assert caught.value.values["bodies"] == 100
    assert len(leader.bodies) < 12
    assert caught.value.values["appended"] == len(leader.bodies) - 1
    assert caught.value.values["first_index"] == 5


@pytest.mark.parametrize(
    "wrong", [{"safety_lag_ms": -1}, {"safety_lag_ms": 1 << 40}, {"appends_in_flight": 0}, {"reads_in_flight": 5000}]
)
def test_java_options_reject_values_out_of_range(wrong: dict[str, int]) -> None:
    with pytest.raises(ConfigError):
        JavaOptions(**wrong)  # type: ignore[arg-type]


# --- the end of the log ----------------------------------------------------------------------------------------------


class FakeLog:
    """A log of entries [first, end) as GET shows it; counts the requests."""

    def __init__(self, first: int, end: int) -> None:
        self.first, self.end, self.asked = first, end, 0

    async def term_at(self, index: int) -> int | None:
        assert index >= 0
        self.asked += 1
        return None if index >= self.end else -1 if index < self.first else index // 10

    async def is_deleted(self, index: int) -> bool:
        self.asked += 1
        return index < self.first


@given(st.integers(0, 300), st.integers(0, 300), st.integers(0, 700))
def test_last_end_finds_end_from_any_guess(first: int, count: int, guess: int) -> None:
    log = FakeLog(first, first + count)
    end, term = asyncio.run(last_end(log.term_at, guess, 0))
    if count:
        assert (end, term) == (log.end, (log.end - 1) // 10)
        assert asyncio.run(first_index(log.is_deleted, min(guess, first), end)) == first
    else:
        assert end == first


def test_unchanged_end_takes_two_requests() -> None:
    log = FakeLog(0, 1_000_000)
    assert asyncio.run(last_end(log.term_at, 1_000_000, 0)) == (1_000_000, 99_999)
    assert log.asked == 2
    log.asked = 0
    assert asyncio.run(last_end(log.term_at, 0, 0)) == (1_000_000, 99_999)
    assert log.asked < 50


def seen(watch: SafeEndTracker, at: float, end: int, term: int = 1, leader: str = "n0") -> None:
    watch.saw(leader, EndObservation(at, end, term))
    if (due := watch.due(at)) is not None:
        watch.confirm(due, term if due.end else -1)


@pytest.mark.parametrize(
    ("story", "safe"),
    [
        pytest.param([(0, 5)], -1, id="just seen"),
        pytest.param([(0, 5), (9.9, 5)], -1, id="not long enough"),
        pytest.param([(0, 5), (10, 5)], 5, id="long enough"),
        pytest.param([(0, 0, -1), (10, 0, -1)], 0, id="an empty log"),
        pytest.param([(0, 5), (4, 7), (8, 9), (12, 11)], 5, id="growing: what was seen at first"),
        pytest.param([(0, 5), (4, 7), (8, 9), (15, 11)], 7, id="growing: the newest that is old enough"),
        pytest.param([(0, 5), (4, 5, 1, "n1"), (10, 5, 1, "n1")], -1, id="another leader: the clock starts again"),
        pytest.param([(0, 5), (4, 5, 1, "n1"), (14, 5, 1, "n1")], 5, id="another leader, long enough"),
        pytest.param([(0, 5), (4, 6, 2), (13, 6, 2)], -1, id="the same leader in another term"),
        pytest.param([(0, 5), (4, 3), (10, 3)], -1, id="the log was truncated"),
        pytest.param([(0, 5), (4, 3), (14, 3)], 3, id="the log was truncated, long enough"),
        pytest.param([(0, 5), (10, 5), (11, 5, 2, "n1"), (12, 6, 2, "n1")], 5, id="a safe end stays safe"),
        pytest.param([(0, 5), (10, 5), (11, 4, 2, "n1")], 4, id="except for a truncated end"),
        pytest.param([(0, 5), (10, 5), (11, 4, 2, "n1"), (12, 9, 2, "n1")], 4, id="later entries are new"),
    ],
)
def test_safe_end_follows_observations(story: list[tuple[float, int]], safe: int) -> None:
    watch, at_once = SafeEndTracker(10.0), SafeEndTracker(0.0)
    for observed in story:
        seen(watch, *observed)
        seen(at_once, *observed)
    assert (watch.safe_end, at_once.safe_end) == (safe, story[-1][1])


def test_changed_term_restarts_clock() -> None:
    watch = SafeEndTracker(10.0)
    watch.saw("n0", EndObservation(0, 5, 1))
    due = watch.due(10)
    assert due is not None
    watch.confirm(due, 2)
    assert watch.safe_end == -1
    assert watch.due(100) is None

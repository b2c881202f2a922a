"""The end of a Java group's log: found by requests for entries, safe once observed long enough under one leader."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.rocketmq.client.log_end import EndObservation, SafeEndTracker, first_index, last_end


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
    watch = SafeEndTracker(10.0)
    for observed in story:
        seen(watch, *observed)
    assert watch.safe_end == safe


def test_changed_term_restarts_clock() -> None:
    watch = SafeEndTracker(10.0)
    watch.saw("n0", EndObservation(0, 5, 1))
    due = watch.due(10)
    assert due is not None
    watch.confirm(due, 2)
    assert watch.safe_end == -1
    assert watch.due(100) is None


def test_end_is_safe_at_once_without_lag() -> None:
    watch = SafeEndTracker(0.0)
    seen(watch, 3.0, 5)
    assert watch.safe_end == 5

"""Pure planning: limits of a micro-batch in entries and bytes, its delay, and its division into partitions."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_connector.planning import (
    SPLIT_BYTES_MIN,
    SPLIT_ENTRIES_MIN,
    Extent,
    MinimumDelay,
    Range,
    SplitPoints,
    ends_within_bytes,
    last_within,
    limit_ends,
    partition_count,
    searched_points,
    split,
)

logs = st.dictionaries(st.sampled_from("abcdef"), st.tuples(st.integers(0, 1000), st.integers(-5, 5000)), min_size=1)


@pytest.mark.parametrize(
    ("starts", "ends", "most", "expected"),
    [
        ({"a": 0}, {"a": 100}, None, {"a": 100}),
        ({"a": 0}, {"a": 100}, 30, {"a": 30}),
        ({"a": 40}, {"a": 30}, 30, {"a": 40}),
        ({"a": 0, "b": 0}, {"a": 900, "b": 100}, 100, {"a": 90, "b": 10}),
        ({"a": 0, "b": 0}, {"a": 9999, "b": 1}, 10, {"a": 9, "b": 1}),
        ({"a": 0, "b": 0, "c": 5}, {"a": 10, "b": 10, "c": 5}, 1, {"a": 1, "b": 1, "c": 5}),
    ],
)
def test_limits(starts: dict[str, int], ends: dict[str, int], most: int | None, expected: dict[str, int]) -> None:
    assert limit_ends(starts, ends, most) == expected


@given(logs, st.integers(1, 6000))
def test_limit_is_kept_and_starves_no_group(bounds: dict[str, tuple[int, int]], most: int) -> None:
    starts = {group: start for group, (start, _) in bounds.items()}
    ends = {group: start + count for group, (start, count) in bounds.items()}
    limited = limit_ends(starts, ends, most)
    behind = [group for group in starts if ends[group] > starts[group]]
    taken = {group: limited[group] - starts[group] for group in starts}
    assert all(0 <= taken[group] <= max(0, ends[group] - starts[group]) for group in starts)
    assert all(taken[group] >= 1 for group in behind)
    backlog = sum(ends[group] - starts[group] for group in behind)
    assert sum(taken.values()) == min(backlog, max(most, len(behind)))


def searching(position: Callable[[str, int], int]) -> SplitPoints:
    """Return the way of logs without a request for split points."""

    def search(extent: Extent, goals: Sequence[int], tolerance: int) -> Iterable[int]:
        return searched_points(extent, goals, tolerance, partial(position, extent.part.group))

    return search


sizes = st.lists(st.sampled_from([49, 148, 1048, 4_000_000]) | st.integers(48, 5000), max_size=200)


@given(st.lists(sizes, max_size=4), st.integers(1, 9), st.none() | st.integers(1, 50))
def test_partitions_cover_ranges_once_and_are_balanced_by_bytes(
    entries: list[list[int]], parts: int, most: int | None
) -> None:
    places = {f"g{number}": list(itertools.accumulate(lengths, initial=70)) for number, lengths in enumerate(entries)}
    extents = [Extent(Range(group, 5, 4 + len(at), 7, "log"), at[0], at[-1]) for group, at in places.items()]
    pieces = split(extents, parts, searching(lambda group, index: places[group][index - 5]), most)
    covered = [(part.group, at) for piece in pieces for part in piece for at in range(part.start, part.end)]
    assert covered == [(e.part.group, at) for e in extents for at in range(e.part.start, e.part.end)]
    assert all(pieces)
    assert all(part.count > 0 and part.min_commit == 7 and part.log == "log" for piece in pieces for part in piece)
    if most is not None:
        assert all(sum(part.count for part in piece) <= most for piece in pieces)
        return
    assert len(pieces) <= parts
    largest = max((size for lengths in entries for size in lengths), default=0)
    limit = sum(map(sum, entries)) / parts * 1.2 + 2 * largest + parts
    for piece in pieces:
        assert sum(places[p.group][p.end - 5] - places[p.group][p.start - 5] for p in piece) <= limit


def test_few_looks_at_long_logs() -> None:
    asked: list[int] = []

    def position(group: str, index: int) -> int:
        asked.append(index)
        return index * 148

    whole = Range("a", 1000, 10_000_000)
    pieces = split([Extent(whole, 148_000, 1_480_000_000)], 4, searching(position))
    assert [sum(part.count for part in piece) for piece in pieces] == pytest.approx([2_499_750] * 4, rel=0.1)
    assert len(asked) <= 6
    assert split([Extent(whole, 148_000, 1_480_000_000)], 1, searching(position)) == [(whole,)]
    assert len(asked) <= 6


def test_ten_thousand_partitions_ask_once_for_each_group() -> None:
    asked: list[int] = []

    def split_points(extent: Extent, goals: Sequence[int], _tolerance: int) -> Iterable[int]:
        asked.append(len(goals))
        return [goal // 148 for goal in goals]

    extents = [Extent(Range(group, 0, 100_000), 0, 14_800_000) for group in "abc"]
    pieces = split(extents, 10_000, split_points)
    assert len(pieces) == 10_000
    assert sum(asked) == 9_999
    assert len(asked) == 3


def test_places_that_make_no_sense_do_no_harm() -> None:
    whole = Range("a", 0, 1000)
    for place in (0, -5, 10**12):
        pieces = split([Extent(whole, 500, 100)], 3, searching(lambda group, index, place=place: place))
        assert pieces[-1][-1].end == 1000
        assert sum(part.count for piece in pieces for part in piece) == 1000


@pytest.mark.parametrize(
    ("entries", "nbytes", "cores", "least", "expected"),
    [
        (0, 0, 2, None, 1),
        (1, 100, 2, None, 1),
        (SPLIT_ENTRIES_MIN, 100, 2, None, 1),
        (SPLIT_ENTRIES_MIN + 1, 100, 2, None, 2),
        (10 * SPLIT_ENTRIES_MIN, 100, 2, None, 2),
        (10 * SPLIT_ENTRIES_MIN, 100, 2, 7, 7),
        (20, SPLIT_BYTES_MIN + 1, 2, None, 2),
        (20, SPLIT_BYTES_MIN, 2, None, 1),
        (5, 100, 2, 7, 5),
        (0, 0, 2, 7, 1),
    ],
)
def test_few_fat_partitions(entries: int, nbytes: int, cores: int, least: int | None, expected: int) -> None:
    assert partition_count(entries, nbytes, cores, least) == expected


@given(sizes.filter(bool), st.integers(1, 1_000_000), st.integers(0, 1000))
def test_most_entries_that_fit_but_one_at_least(entries: list[int], most: int, first: int) -> None:
    positions = list(itertools.accumulate(entries, initial=77))
    end = first + len(entries)
    found = last_within(first, end, most, lambda index: positions[index - first])
    taken = positions[found - first] - positions[0]
    assert first < found <= end
    assert taken <= most or found == first + 1
    assert found == end or positions[found - first + 1] - positions[0] > most


def test_few_calls_at_long_log() -> None:
    calls: list[int] = []

    def position(index: int) -> int:
        calls.append(index)
        return index * 148

    assert last_within(1000, 10_000_000, 148_000_000 + 5, position) == 1_001_000
    assert len(calls) <= 6
    calls.clear()
    step = 5_000_000  # small entries, then large ones

    def uneven(index: int) -> int:
        calls.append(index)
        return min(index, step) + max(0, index - step) * 1000

    assert last_within(0, 2 * step, 10**9, uneven) == step + (10**9 - step) // 1000
    assert len(calls) <= 2 * 24 + 2


@given(st.dictionaries(st.sampled_from("abc"), sizes, min_size=1), st.integers(1, 3_000_000))
def test_groups_share_bytes_and_none_starves(logs: dict[str, list[int]], most: int) -> None:
    positions = {group: list(itertools.accumulate(entries, initial=0)) for group, entries in logs.items()}
    ends = {group: len(entries) for group, entries in logs.items()}

    def position(group: str, index: int) -> int:
        assert ends[group], "a group without backlog"
        return positions[group][index]

    found = ends_within_bytes(dict.fromkeys(logs, 0), ends, most, position)
    taken = {group: positions[group][found[group]] for group in logs}
    assert all(min(1, ends[group]) <= found[group] <= ends[group] for group in logs)
    assert sum(taken[group] for group in logs if found[group] > 1) <= most
    if sum(positions[group][-1] for group in logs) <= most:
        assert found == ends


def test_batch_waits_for_minimum_or_delay() -> None:
    now = [100.0]
    delay = MinimumDelay(10, 5000, lambda: now[0])
    assert not delay.delays(0)
    assert not delay.delays(3)
    assert delay.delays(9)
    assert not delay.delays(10)
    now[0] += 4.9
    assert delay.delays(1)
    now[0] += 0.1
    assert not delay.delays(1)
    assert delay.delays(1)
    assert not MinimumDelay(None, 5000, lambda: now[0]).delays(1)

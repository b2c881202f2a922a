from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spark_connector.planning import SPLIT_ENTRIES_MIN, Range, limit_ends, partition_count, split

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
def test_a_limit_is_kept_and_starves_no_group(bounds: dict[str, tuple[int, int]], most: int) -> None:
    starts = {group: start for group, (start, _) in bounds.items()}
    ends = {group: start + count for group, (start, count) in bounds.items()}
    limited = limit_ends(starts, ends, most)
    behind = [group for group in starts if ends[group] > starts[group]]
    taken = {group: limited[group] - starts[group] for group in starts}
    assert all(0 <= taken[group] <= max(0, ends[group] - starts[group]) for group in starts)
    assert all(taken[group] >= 1 for group in behind)
    backlog = sum(ends[group] - starts[group] for group in behind)
    assert sum(taken.values()) == min(backlog, max(most, len(behind)))


@given(
    st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 100), st.integers(0, 300)), max_size=5), st.integers(1, 9)
)
def test_pieces_cover_the_ranges_once_in_order_and_are_balanced(ranges: list[tuple[str, int, int]], parts: int) -> None:
    whole = [Range(group, start, start + count, 7, "log") for group, start, count in ranges]
    pieces = split(whole, parts)
    covered = [(part.group, at) for piece in pieces for part in piece for at in range(part.start, part.end)]
    assert covered == [(part.group, at) for part in whole for at in range(part.start, part.end)]
    sizes = [sum(part.count for part in piece) for piece in pieces]
    assert all(sizes)
    assert len(pieces) <= parts
    if len(covered) >= parts:
        assert max(sizes) - min(sizes) <= 1
    assert all(part.min_commit == 7 and part.log == "log" for piece in pieces for part in piece)


@pytest.mark.parametrize(
    ("entries", "cores", "least", "expected"),
    [
        (0, 2, None, 1),
        (1, 2, None, 1),
        (SPLIT_ENTRIES_MIN, 2, None, 1),
        (SPLIT_ENTRIES_MIN + 1, 2, None, 2),
        (10 * SPLIT_ENTRIES_MIN, 2, None, 2),
        (10 * SPLIT_ENTRIES_MIN, 2, 7, 7),
        (5, 2, 7, 5),
        (0, 2, 7, 1),
    ],
)
def test_few_fat_partitions(entries: int, cores: int, least: int | None, expected: int) -> None:
    assert partition_count(entries, cores, least) == expected

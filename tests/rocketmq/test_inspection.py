"""The ranges of a log that a sample reads."""

from __future__ import annotations

from itertools import pairwise

import pytest

from dledger_core.rocketmq import sample_ranges


@pytest.mark.parametrize("first", [0, 7])
@pytest.mark.parametrize("count", [0, 1, 31, 32, 33, 100, 1001, 100_000])
@pytest.mark.parametrize("limit", [1, 2, 31, 32, 33, 1000])
def test_sample_ranges_are_disjoint_and_reach_the_end(first: int, count: int, limit: int) -> None:
    ranges = sample_ranges(first, first + count, limit)
    sizes = [stop - start for start, stop in ranges]
    assert all(size > 0 for size in sizes)
    assert sum(sizes) <= limit
    assert all(before[1] <= after[0] for before, after in pairwise(ranges))
    if count:
        assert ranges[-1][1] == first + count
        assert ranges[0][0] == first or limit == 1
    if count <= limit:
        assert sum(sizes) == count
    else:
        assert len(ranges) == min(32, limit)
        assert sum(sizes) > limit - 32

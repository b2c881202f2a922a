from __future__ import annotations

from itertools import pairwise

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.record import inside, merge_ranges

RANGES = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 60)), max_size=12)


def numbers(ranges: list[tuple[int, int]]) -> set[int]:
    return {n for low, high in ranges for n in range(low, high)}


@given(RANGES)
def test_merge_ranges_covers_the_same_numbers_sorted_and_apart(ranges: list[tuple[int, int]]) -> None:
    merged = merge_ranges(ranges)
    assert numbers(merged) == numbers(ranges)
    assert all(low < high for low, high in merged)
    assert all(before[1] < after[0] for before, after in pairwise(merged))


@given(RANGES)
def test_inside_agrees_with_membership(ranges: list[tuple[int, int]]) -> None:
    merged = merge_ranges(ranges)
    expected = [any(low <= n < high for low, high in merged) for n in range(61)]
    assert inside(np.arange(61), merged).tolist() == expected

"""Half-open ranges of integers, such as indexes or positions."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt


def inside(indexes: npt.NDArray[np.int64], ranges: Sequence[Any]) -> npt.NDArray[np.bool_]:
    """Return which of ``indexes`` are in one of the ``ranges`` [start, end), which are sorted and do not overlap.

    Raises:
        TypeError, ValueError, OverflowError: the ranges are not pairs of integers.
    """
    bounds = np.array(ranges, np.int64).reshape(-1, 2)
    if not len(bounds):
        return np.zeros(len(indexes), np.bool_)
    before = np.searchsorted(bounds[:, 0], indexes, side="right") - 1
    found: npt.NDArray[np.bool_] = (before >= 0) & (indexes < bounds[np.maximum(before, 0), 1])
    return found


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges [start, end) sorted, with those that overlap or touch merged; empty ones are dropped."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if start >= end:
            continue
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((start, end))
    return merged

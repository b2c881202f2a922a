"""Half-open index ranges."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

__all__ = ["inside"]


def inside(indexes: npt.NDArray[np.int64], ranges: Sequence[Any]) -> npt.NDArray[np.bool_]:
    """Returns which of ``indexes`` lie in one of the ``ranges`` [start, end), which are sorted and do not overlap.

    Raises:
        TypeError, ValueError, OverflowError: the ranges are not pairs of integers.
    """
    bounds = np.array(ranges, np.int64).reshape(-1, 2)
    if not len(bounds):
        return np.zeros(len(indexes), np.bool_)
    before = np.searchsorted(bounds[:, 0], indexes, side="right") - 1
    found: npt.NDArray[np.bool_] = (before >= 0) & (indexes < bounds[np.maximum(before, 0), 1])
    return found

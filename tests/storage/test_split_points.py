"""Split points of a range of entries, found by the index alone."""

from __future__ import annotations

import numpy as np
import pytest

from dledger_core.record import INDEX_RECORD
from dledger_core.storage.files.index_file import Rows
from dledger_core.storage.read.log_queries import split_points

FIRST, BEGIN = 1000, 5_000_000


class Index:
    """An index in memory, which counts its reads."""

    def __init__(self, sizes: np.ndarray) -> None:
        self.rows = np.zeros(len(sizes), INDEX_RECORD)
        self.rows["size"] = sizes
        self.rows["position"] = BEGIN + np.cumsum(sizes) - sizes
        self.reads = 0

    def read(self, start: int, end: int) -> Rows:
        self.reads += 1
        return self.rows[start - FIRST : end - FIRST]


def nearest(index: Index, start: int, end: int, positions: np.ndarray) -> list[int]:
    rows = index.rows[start - FIRST : end - FIRST]
    borders = np.append(rows["position"], rows["position"][-1] + rows["size"][-1]).astype(np.int64)
    return [start + int(np.abs(borders - position).argmin()) for position in positions]


@pytest.mark.parametrize("count", [1, 2, 1024, 1025, 20_000])
def test_split_points_are_nearest_records(count: int) -> None:
    random = np.random.default_rng(count)
    for sizes in (np.full(count, 148), random.integers(48, 5000, count), random.choice([48, 4_000_000], count)):
        index = Index(sizes)
        low, high = BEGIN - 100, BEGIN + int(sizes.sum()) + 100
        positions = np.sort(random.integers(low, high, 500))
        for start, end in ((FIRST, FIRST + count), (FIRST + count // 3, FIRST + count // 2 + 1)):
            found = split_points(index, start, end, positions)
            assert found.tolist() == nearest(index, start, end, positions)


def test_split_points_of_long_log_read_few_rows() -> None:
    index = Index(np.full(2_000_000, 148))
    positions = BEGIN + np.arange(1, 10_000, dtype=np.int64) * 148 * 200
    assert split_points(index, FIRST, FIRST + 2_000_000, positions).tolist() == list(
        range(FIRST + 200, FIRST + 2_000_000, 200)
    )
    assert index.reads < 10_000
    index.reads = 0
    split_points(index, FIRST, FIRST + 2_000_000, positions[:1])
    assert index.reads < 20


def test_split_points_of_damaged_index_stay_within_range() -> None:
    random = np.random.default_rng(1)
    index = Index(np.full(5000, 148))
    index.rows["position"] = random.integers(0, 1 << 62, 5000)
    index.rows["size"] = random.integers(0, 1 << 31, 5000)
    for positions in (np.array([-(1 << 63), 0, (1 << 63) - 1]), np.sort(random.integers(0, 1 << 62, 100))):
        found = split_points(index, FIRST + 1, FIRST + 4999, positions)
        assert (found >= FIRST + 1).all()
        assert (found <= FIRST + 4999).all()

"""Rows in memory over those of the files."""

from __future__ import annotations

import numpy as np
import pytest

from dledger_core.record import INDEX_RECORD
from dledger_core.storage.files.index_file import OverlaidIndex, Rows

OF_FILES, FIRST, SECOND = 1, 2, 3


def rows(start: int, end: int, term: int) -> Rows:
    found = np.zeros(max(end - start, 0), INDEX_RECORD)
    found["index"], found["term"] = np.arange(start, start + len(found)), term
    return found


class Below:
    """Files that have a row for each entry up to 19."""

    def read(self, start: int, end: int) -> Rows:
        found = rows(start, end, OF_FILES)
        found[max(20 - start, 0) :] = 0
        return found


@pytest.mark.parametrize("start", range(0, 30, 3))
def test_overlaid_index_reads_each_row_from_memory_where_there_is_one(start: int) -> None:
    index = OverlaidIndex(Below())
    terms = dict.fromkeys(range(20), OF_FILES)
    for first, stop, term in ((8, 12, FIRST), (12, 16, FIRST), (14, 25, SECOND)):
        index.extend(first, rows(first, stop, term))
        terms |= dict.fromkeys(range(first, stop), term)
        assert index.first == 8
    for end in range(start + 1, 31):
        found = index.read(start, end)
        assert found["term"].tolist() == [terms.get(at, 0) for at in range(start, end)], "no row is zeros"
        assert found["index"].tolist() == [at if at < 25 else 0 for at in range(start, end)]

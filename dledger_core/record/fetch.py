"""Result of a read, the same for a client and for a store's files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import pyarrow as pa

from dledger_core.record.arrow import empty_batch, to_arrow
from dledger_core.record.layout import MAGIC_DATA, READ_SCHEMA
from dledger_core.record.ranges import inside
from dledger_core.record.records import Records

__all__ = ["Fetch", "Isolation", "data_entries"]

Isolation = Literal["read_committed", "read_uncommitted"]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Entries of one read, and the ends of the log it came from.

    Attributes:
        batch: the entries; may end before the requested end.
        next_index: index at which the next read continues, after the last entry examined, also if it was left out.
        commit_index: commit index of the replica; -1 for a store that records none.
        visible_end: end of what ``read_committed`` shows.
        first_index: first index of the replica's log.
    """

    batch: pa.RecordBatch
    next_index: int
    commit_index: int
    visible_end: int
    first_index: int


def data_entries(records: Records, first_index: int, skip: Sequence[Any] = ()) -> pa.RecordBatch:
    """Return the data entries of checked records, with columns of READ_SCHEMA.

    Args:
        records: checked records.
        first_index: index of the first one.
        skip: index ranges [start, end) to leave out, sorted and disjoint.

    Raises:
        TypeError, ValueError, OverflowError: the ranges are not pairs of integers.
    """
    keep = records.headers["magic"] == MAGIC_DATA
    if len(skip):
        keep &= ~inside(np.arange(first_index, first_index + records.count), skip)
    return to_arrow(records, keep) if keep.any() else empty_batch(READ_SCHEMA)

"""Lag of a reader: records, bytes and seconds between its position and the end of the log.

Control entries and orphaned attempts alone are no lag: a query that is idle, or that ended before an election added
its entry, has read all data entries.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import numpy as np
import pyarrow as pa

from dledger_core.errors import IndexOutOfRangeError
from dledger_core.record import HEADER_BYTES

Rows = Callable[[int, int], tuple[pa.RecordBatch, int]]
"""Returns the data entries of [start, end) without orphaned attempts, and the index to continue at."""

_READS_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class Lag:
    """The entries that a reader has not read yet.

    Attributes:
        records: indexes from the first unread entry on; 0 if there is none.
        bytes: size of their records in the log.
        oldest: append time of the first unread entry; None if there is none or its time is unknown.
    """

    records: int = 0
    bytes: int = 0
    oldest: datetime | None = None

    def seconds(self, now: datetime | None = None) -> float | None:
        """Return the age of the first unread entry; 0 if there is none, None if unknown."""
        if not self.records:
            return 0.0
        if self.oldest is None:
            return None
        # Clock skew can put the append time in the future: clamp the age at 0.
        return max(0.0, round(((now or datetime.now(UTC)) - self.oldest).total_seconds(), 3))


def measure_lag(start: int, end: int, rows: Rows, end_position: Callable[[int], int]) -> Lag:
    """Find the first entry of [start, end) that the reader would receive, and measure the lag from there.

    Takes two reads if that is the entry at ``start``. A tail of control entries is scanned in steps that double.

    Args:
        start: the reader's next index.
        end: the readable end, exclusive.
        rows: reads a few entries.
        end_position: returns the position after the record at an index.
    """
    reach = 1
    for _ in range(_READS_MAX):
        if start >= end:
            return Lag()
        batch, following = rows(start, min(end, start + reach))
        if batch.num_rows:
            first, position = (batch.column(name)[0].as_py() for name in ("index", "position"))
            return Lag(end - first, end_position(end - 1) - position, batch.column("timestamp")[0].as_py())
        if following <= start:
            break  # this replica has no more entries now
        start, reach = following, reach * 2
    left = max(0, end - start)
    return Lag(left, end_position(end - 1) - end_position(start - 1) if left and start else 0)


def record_at(batch: pa.RecordBatch, index: int, where: str) -> dict[str, Any]:
    """Return term, position, end_position, timestamp and body of one record of a batch of records.

    Raises:
        IndexOutOfRangeError: the batch does not contain it.
    """
    found = np.flatnonzero(np.asarray(batch.column("index")) == index)
    if not len(found):
        raise IndexOutOfRangeError(f"index {index} is not in the log", where)
    at = int(found[0])
    row: dict[str, Any] = {name: batch.column(name)[at].as_py() for name in ("term", "position")}
    row |= {"timestamp": batch.column("timestamp")[at].as_py(), "body": batch.column("body")[at].as_py()}
    return row | {"end_position": row["position"] + HEADER_BYTES + len(row["body"])}

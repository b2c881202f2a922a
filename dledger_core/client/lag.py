"""How far a reader is behind a log: in records, bytes and seconds.

Where nothing but control entries and losing attempts is left, there is no lag: a query that is idle, or that ended
before an election added its entry, has read everything there is.
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

__all__ = ["Lag", "Rows", "measure_lag", "record_at"]

Rows = Callable[[int, int], tuple[pa.RecordBatch, int]]
"""Returns entries of [start, end), control entries and losers left out, and the index to go on from."""

_LOOKS_MAX: Final = 40


@dataclass(frozen=True, slots=True)
class Lag:
    """What a reader has not read yet.

    Attributes:
        records: indexes from the first unread entry on; 0 if there is none.
        bytes: what their records take in the log.
        oldest: append time of the first unread entry; None if there is none or its time is unknown.
    """

    records: int = 0
    bytes: int = 0
    oldest: datetime | None = None

    def seconds(self, now: datetime | None = None) -> float | None:
        """Returns how long the first unread entry has been waiting; 0 if there is none, None if unknown."""
        if not self.records:
            return 0.0
        if self.oldest is None:
            return None
        # Clocks of leader and reader differ a little: nothing waits since a time to come.
        return max(0.0, round(((now or datetime.now(UTC)) - self.oldest).total_seconds(), 3))


def measure_lag(start: int, end: int, rows: Rows, end_position: Callable[[int], int]) -> Lag:
    """Looks for the first entry of [start, end) that a reader would be given, and measures from there.

    Two reads where that is the entry at ``start``. A tail of control entries is looked through in steps that double.

    Args:
        start: the reader's next index.
        end: the end of what can be read.
        rows: reads a few entries.
        end_position: returns the position behind the record at an index.
    """
    reach = 1
    for _ in range(_LOOKS_MAX):
        if start >= end:
            return Lag()
        batch, following = rows(start, min(end, start + reach))
        if batch.num_rows:
            first, position = (batch.column(name)[0].as_py() for name in ("index", "position"))
            return Lag(end - first, end_position(end - 1) - position, batch.column("timestamp")[0].as_py())
        if following <= start:
            break  # this replica cannot say more now
        start, reach = following, reach * 2
    behind = max(0, end - start)
    return Lag(behind, end_position(end - 1) - end_position(start - 1) if behind and start else 0)


def record_at(batch: pa.RecordBatch, index: int, where: str) -> dict[str, Any]:
    """Returns term, position, end_position, timestamp and body of one record of a batch of records.

    Raises:
        IndexOutOfRangeError: the batch does not hold it.
    """
    found = np.flatnonzero(np.asarray(batch.column("index")) == index)
    if not len(found):
        raise IndexOutOfRangeError(f"index {index} is not in the log", where)
    at = int(found[0])
    row: dict[str, Any] = {name: batch.column(name)[at].as_py() for name in ("term", "position")}
    row |= {"timestamp": batch.column("timestamp")[at].as_py(), "body": batch.column("body")[at].as_py()}
    return row | {"end_position": row["position"] + HEADER_BYTES + len(row["body"])}

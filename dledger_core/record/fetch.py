"""Result of a read, the same for a client and for a store's files."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

__all__ = ["Fetch", "Isolation"]

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

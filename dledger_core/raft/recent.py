"""The tail of the log in memory: everything not yet durable, and recent batches for sending."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from dledger_core.ids import Index
from dledger_core.raft.batch import BATCHES_MAX, Batch

BATCH_OVERHEAD_BYTES: Final = 512
"""Cost of a batch in addition to its payload, so that many small batches are limited too."""
BATCHES_KEPT_MAX: Final = 4096
"""Largest number of durable batches in memory. Each is several Python objects, and the more there are, the longer
the garbage collector stops the node, in the end for an election timeout."""


class RecentBatches:
    """Consecutive batches up to the end of the log; the oldest durable ones leave when a limit is exceeded."""

    __slots__ = ("_batches", "_bytes_max", "_firsts", "_oldest", "nbytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._batches: list[Batch | None] = []
        self._firsts: list[int] = []
        self._oldest = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._batches) - self._oldest

    @property
    def first_index(self) -> Index | None:
        """First index in memory, or None if there is none."""
        return Index(self._firsts[self._oldest]) if self._oldest < len(self._firsts) else None

    def append(self, batch: Batch) -> None:
        """Add the batch at the end of the log."""
        self._batches.append(batch)
        self._firsts.append(batch.first_index)
        self.nbytes += batch.nbytes + BATCH_OVERHEAD_BYTES

    def truncate(self, index: Index) -> None:
        """Drop batches from ``index`` on."""
        while len(self._batches) > self._oldest and self._firsts[-1] >= index:
            self._firsts.pop()
            self._forget(self._batches.pop())

    def evict(self, durable_index: Index) -> None:
        """Drop the oldest durable batches while a limit is exceeded."""
        batches, at = self._batches, self._oldest
        while at < len(batches) and self._last_index(at) <= durable_index:
            if self.nbytes <= self._bytes_max and len(batches) - at <= BATCHES_KEPT_MAX:
                break
            self._forget(batches[at])
            at += 1
        self._drop_before(at)

    def trim(self, first_index: Index) -> None:
        """Drop batches that start before ``first_index``; the store has the rest of a batch that spans it."""
        at = self._oldest
        while at < len(self._firsts) and self._firsts[at] < first_index:
            self._forget(self._batches[at])
            at += 1
        self._drop_before(at)

    def slice(self, start: Index, max_bytes: int) -> tuple[Batch, ...]:
        """Return complete batches from the one containing ``start``: at least one, then as many as fit."""
        at = bisect_right(self._firsts, start, self._oldest) - 1
        chosen: list[Batch] = []
        nbytes = 0
        for number in range(at, min(len(self._batches), at + BATCHES_MAX)):
            batch = self._batches[number]
            assert batch is not None
            nbytes += batch.nbytes
            if chosen and nbytes > max_bytes:
                break
            chosen.append(batch)
        return tuple(chosen)

    def _last_index(self, at: int) -> int:
        batch = self._batches[at]
        assert batch is not None
        return batch.last_index

    def _forget(self, batch: Batch | None) -> None:
        assert batch is not None
        self.nbytes -= batch.nbytes + BATCH_OVERHEAD_BYTES

    def _drop_before(self, oldest: int) -> None:
        """Drop the batches before ``oldest``; move the rest only occasionally, so that a drop costs O(1)."""
        for at in range(self._oldest, oldest):
            self._batches[at] = None
        self._oldest = oldest
        if oldest == len(self._batches) or (oldest > 64 and oldest * 2 > len(self._batches)):
            del self._batches[:oldest]
            del self._firsts[:oldest]
            self._oldest = 0

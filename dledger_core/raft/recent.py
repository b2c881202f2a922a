"""The tail of the log in memory: everything not yet durable, and recent batches for sending."""

from __future__ import annotations

from bisect import bisect_right
from typing import Final

from dledger_core.ids import NO_INDEX, NO_TERM, Index
from dledger_core.raft.batch import BATCHES_MAX, Batch

__all__ = ["BATCHES_HELD_MAX", "BATCH_OVERHEAD_BYTES", "RecentBatches"]

BATCH_OVERHEAD_BYTES: Final = 512
"""What a batch costs beside its payload, so that tiny batches stay bounded too."""
BATCHES_HELD_MAX: Final = 4096
"""How many durable batches are held at most: each is a handful of Python objects, and the more there are, the longer
the garbage collector stops the node, in the end for an election timeout."""

_DROPPED: Final = Batch(NO_INDEX, 1, NO_TERM, 0, None)


class RecentBatches:
    """Consecutive batches up to the end of the log; the oldest leave once they are durable and space is short."""

    __slots__ = ("_batches", "_bytes_max", "_firsts", "_head", "nbytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._batches: list[Batch] = []
        self._firsts: list[int] = []
        self._head = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._batches) - self._head

    @property
    def first_index(self) -> Index | None:
        """First index held, or None if nothing is."""
        return self._batches[self._head].first_index if self._head < len(self._batches) else None

    def append(self, batch: Batch) -> None:
        """Adds the batch at the end of the log."""
        self._batches.append(batch)
        self._firsts.append(batch.first_index)
        self.nbytes += batch.nbytes + BATCH_OVERHEAD_BYTES

    def truncate(self, index: Index) -> None:
        """Drops batches from ``index`` on."""
        while len(self._batches) > self._head and self._firsts[-1] >= index:
            self._firsts.pop()
            self.nbytes -= self._batches.pop().nbytes + BATCH_OVERHEAD_BYTES

    def evict(self, durable_index: Index) -> None:
        """Drops the oldest durable batches while a bound is exceeded."""
        batches, head = self._batches, self._head
        while head < len(batches) and batches[head].last_index <= durable_index:
            if self.nbytes <= self._bytes_max and len(batches) - head <= BATCHES_HELD_MAX:
                break
            self.nbytes -= batches[head].nbytes + BATCH_OVERHEAD_BYTES
            head += 1
        self._drop_head(head)

    def compact(self, first_index: Index) -> None:
        """Drops batches that begin before ``first_index``: of one in two halves the store has the second."""
        batches, head = self._batches, self._head
        while head < len(batches) and batches[head].first_index < first_index:
            self.nbytes -= batches[head].nbytes + BATCH_OVERHEAD_BYTES
            head += 1
        self._drop_head(head)

    def slice(self, start: Index, max_bytes: int) -> tuple[Batch, ...]:
        """Returns whole batches from the one containing ``start``: at least one, then as many as fit and may be."""
        at = bisect_right(self._firsts, start, self._head) - 1
        end = at + 1
        nbytes = self._batches[at].nbytes
        stop = min(len(self._batches), at + BATCHES_MAX)
        while end < stop:
            nbytes += self._batches[end].nbytes
            if nbytes > max_bytes:
                break
            end += 1
        return tuple(self._batches[at:end])

    def _drop_head(self, head: int) -> None:
        """Forgets the batches before ``head``; moves the rest only now and then, so that a drop costs O(1)."""
        for at in range(self._head, head):
            self._batches[at] = _DROPPED
        self._head = head
        if head == len(self._batches) or (head > 64 and head * 2 > len(self._batches)):
            del self._batches[:head]
            del self._firsts[:head]
            self._head = 0

"""Orphaned ranges: entries of attempts that lost, which ``read_committed`` never shows. One stored row per range."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Sequence
from typing import Final

from dledger_core.control import Part
from dledger_core.record import merge_ranges
from dledger_core.storage.tables.changes import RowChanges, packed

ORPHANED: Final = b"o"
"""Prefix of the keys of orphaned ranges; the rest is the start."""


class OrphanedRanges:
    """Ranges [start, end) of orphaned attempts, sorted and disjoint."""

    def __init__(self, changes: RowChanges) -> None:
        self._changes = changes
        self._ranges: list[tuple[int, int]] = []

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """The ranges; the table's own list."""
        return self._ranges

    def add(self, parts: Iterable[Part]) -> None:
        """Add the entries of parts."""
        added = [(part.first, part.last + 1) for part in parts if part.rows]
        if not added:
            return
        at = max(bisect_left(self._ranges, min(added)) - 1, 0)  # earlier ranges, perhaps thousands, do not change
        before, after = self._ranges[at:], merge_ranges([*self._ranges[at:], *added])
        self._ranges[at:] = after
        for start, _ in set(before).difference(after):
            self._changes.put(ORPHANED + packed(start), None)
        for start, end in set(after).difference(before):
            self._changes.put(ORPHANED + packed(start), packed(end))

    def trim(self, first_index: int) -> None:
        """Forget the ranges of entries that this store has deleted; their number has no other limit."""
        end = bisect_right(self._ranges, first_index, key=lambda pair: pair[1])
        for start, _ in self._ranges[:end]:
            self._changes.put(ORPHANED + packed(start), None)
        del self._ranges[:end]

    def rows(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of each stored row."""
        for start, end in self._ranges:
            yield ORPHANED + packed(start), packed(end)

    def restore(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Add stored rows, each with its key after the prefix, in the order of the keys."""
        self._ranges += [(int.from_bytes(name, "big"), int.from_bytes(value, "big")) for name, value in rows]

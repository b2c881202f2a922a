"""The archive of a log: the consecutive ranges that were proved, and the end of it. One stored row per entry.

Rows are kept by the index of the control entry that brought them, also those of an archive that has ended: a log that
is continued below such an entry has the archive from before it, also where a snapshot install brought tables ahead.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgpack

from dledger_core.control import ArchivedRange
from dledger_core.ids import Index
from dledger_core.storage.tables.changes import RowChanges, packed

ARCHIVED: Final = b"A"
"""Prefix of the keys of the archive's rows; the rest is the index of the control entry."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """A control entry that changed the archive: a range that counts, or None for its end.

    ``table`` is the URI that it names; empty if it is the same as that of the range before.
    """

    index: int
    range: ArchivedRange | None
    table: str


class ArchiveTable:
    """The recorded ranges of one log. One thread changes it; any may ask.

    Args:
        changes: gets the stored rows that change.

    Attributes:
        table: URI of the archive's table, as the newest proof named it.
    """

    def __init__(self, changes: RowChanges) -> None:
        self._changes = changes
        self._entries: list[_Entry] = []
        self._ranges: list[ArchivedRange] = []
        self._has_ended = False
        self.table = ""

    @property
    def is_active(self) -> bool:
        """Whether the log has an archive: one range at least, and no end after it."""
        return bool(self._ranges)

    @property
    def start(self) -> int:
        """First index of the archive, -1 if there is none."""
        ranges = self._ranges
        return ranges[0].start if ranges else -1

    @property
    def end(self) -> int:
        """End (exclusive) of what is proved, -1 if there is no archive."""
        ranges = self._ranges
        return ranges[-1].end if ranges else -1

    @property
    def row_count(self) -> int:
        """Number of stored rows."""
        return len(self._entries)

    def containing(self, index: int, end: int | None = None, most: int | None = None) -> Sequence[ArchivedRange]:
        """Return the ranges that end after ``index``, those before ``end`` only, and ``most`` at most, in order."""
        ranges = self._ranges
        low = bisect_right(ranges, index, key=lambda each: each.end)
        high = len(ranges) if end is None else bisect_left(ranges, end, key=lambda each: each.start)
        return ranges[low : high if most is None else min(high, low + most)]

    def apply(self, fields: Mapping[str, Any], index: Index) -> None:
        """Apply a committed ``archived`` control entry.

        It counts only where the archive ends when it is applied: two jobs may prove one range, and an earlier leader's
        entry may come late.
        """
        found, table = ArchivedRange.of_row(fields["r"]), str(fields["u"])
        follows = found.start == self.end if self.is_active else bool(fields.get("b"))
        if follows and found.end <= index:
            self._add(_Entry(index, found, "" if table == self.table else table))
            self._ranges.append(found)
            self.table = table

    def apply_end(self, index: Index) -> None:
        """Apply a committed ``archive-end`` control entry; without an archive it changes nothing."""
        if self.is_active:
            self._add(_Entry(index, None, ""))
            self._ranges, self._has_ended, self.table = [], True, ""

    def _add(self, entry: _Entry) -> None:
        self._entries.append(entry)
        self._changes.put(*_stored(entry))

    def trim(self, first_index: int) -> None:
        """Forget an archive that ended before the log of this store begins: the log is never continued below that."""
        if not self._has_ended:
            return
        below = bisect_left(self._entries, first_index, key=lambda each: each.index)
        count = max((at + 1 for at in range(below) if self._entries[at].range is None), default=0)
        for entry in self._entries[:count]:
            self._changes.put(_stored(entry)[0], None)
        if count:
            self._restart(self._entries[count:])

    def forget_after(self, index: int) -> None:
        """Forget the entries after ``index``: the log has lost them. The owner stores all rows again."""
        # Not by the ends of the ranges: others have not received the entry, and ranges must be the same on all nodes.
        self._restart([entry for entry in self._entries if entry.index <= index])

    def _restart(self, entries: list[_Entry]) -> None:
        begin = max((at + 1 for at, entry in enumerate(entries) if entry.range is None), default=0)
        self._has_ended = begin > 0
        self._entries, self._ranges = entries, [entry.range for entry in entries[begin:] if entry.range is not None]
        self.table = next((entry.table for entry in reversed(entries[begin:]) if entry.table), "")

    def rows(self) -> Iterator[tuple[bytes, bytes]]:
        """Yield key and value of each stored row."""
        return map(_stored, self._entries)

    def restore(self, rows: Iterable[tuple[bytes, bytes]]) -> None:
        """Take stored rows, in the order of their keys; raise TypeError or ValueError if one is none."""
        self._restart([_restored(key, *msgpack.unpackb(value)) for key, value in rows])


def _stored(entry: _Entry) -> tuple[bytes, bytes]:
    value = (None if entry.range is None else entry.range.row(), entry.table)
    return ARCHIVED + packed(entry.index), bytes(msgpack.packb(value))


def _restored(key: bytes, row: Any, table: str) -> _Entry:
    found = None if row is None else ArchivedRange.of_row(row)
    return _Entry(int.from_bytes(key[len(ARCHIVED) :], "big"), found, table)

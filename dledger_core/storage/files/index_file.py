"""The index: a row of 32 bytes for each entry, at index * 32, with the place of its record.

The index is derived from the data. A row is used only after it was compared with its record. A row that was never
written reads as zeros. In a store written by Java the column ``magic`` may be wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import Buffer
from dledger_core.ids import Index, Term
from dledger_core.raft.batch import TermRange
from dledger_core.record import INDEX_RECORD, INDEX_RECORD_BYTES
from dledger_core.storage.files.segments import Segments

Rows = npt.NDArray[Any]
_GAP_FILES_MAX: Final = 1024


class IndexSource(Protocol):
    """A source of index rows."""

    def read(self, start: int, end: int) -> Rows:
        """Return the rows (dtype INDEX_RECORD) of entries [start, end); zeros where there are none."""


class IndexFile:
    """Rows in the files of ``index/``."""

    def __init__(self, segments: Segments) -> None:
        self.segments = segments

    def read(self, start: int, end: int) -> Rows:
        """See ``IndexSource``."""
        begin, stop = start * INDEX_RECORD_BYTES, end * INDEX_RECORD_BYTES
        if begin // self.segments.segment_bytes == (stop - 1) // self.segments.segment_bytes:
            data = self._bytes(begin, stop)
        else:
            data = b"".join(self._bytes(a, b) for a, b in self._split(begin, stop))
        return np.frombuffer(data, INDEX_RECORD)

    def _split(self, begin: int, stop: int) -> Iterator[tuple[int, int]]:
        while begin < stop:
            upto = min(stop, self.segments.base_of(begin) + self.segments.segment_bytes)
            yield begin, upto
            begin = upto

    def _bytes(self, begin: int, stop: int) -> bytes:
        data = self.segments.read(begin, stop - begin) if self.segments.covers(begin) else b""
        missing = stop - begin - len(data)
        return data + bytes(missing) if missing else data

    def write(self, first_index: int, rows: Rows) -> None:
        """Write rows, one write per file."""
        self.write_parts(first_index, [rows.astype(INDEX_RECORD, copy=False).tobytes()])

    def write_parts(self, first_index: int, rows: Sequence[Buffer]) -> None:
        """Write the bytes of rows, in order, one write per file."""
        begin = first_index * INDEX_RECORD_BYTES
        stop = begin + sum(memoryview(part).nbytes for part in rows)
        base = self.segments.base_of(begin)
        if base in self.segments.bases and stop <= base + self.segments.segment_bytes:
            self.segments.write(begin, rows)
            return
        data = memoryview(b"".join(rows))
        for at, upto in self._split(begin, stop):
            base = self.segments.base_of(at)
            if base not in self.segments.bases:
                self._make(base)
            self.segments.write(at, [data[at - begin : upto - begin]])

    def sync(self, first_index: int, end_index: int) -> None:
        """Make the rows [first_index, end_index) durable."""
        begin, stop, size = (
            first_index * INDEX_RECORD_BYTES,
            end_index * INDEX_RECORD_BYTES,
            self.segments.segment_bytes,
        )
        self.segments.sync([base for base in self.segments.bases if base + size > begin and base < stop])

    def _make(self, base: int) -> None:
        """Create a file, and those between it and its neighbors, so that there is no gap."""
        bases, step = self.segments.bases, self.segments.segment_bytes
        first = last = base
        if bases and base > bases[-1]:
            first = bases[-1] + step
        elif bases and base < bases[0]:
            last = bases[0] - step
        if last - first > _GAP_FILES_MAX * step:
            first = last = base  # the neighbor is an unexpected file; recovery removes it with the rows after the end
        for between in range(first, last + 1, step):
            self.segments.create(between)
        self.segments.sync_dir()

    def truncate(self, first_index: int, end_index: int) -> None:
        """Zero the rows [first_index, end_index) and remove later files."""
        begin, stop = first_index * INDEX_RECORD_BYTES, end_index * INDEX_RECORD_BYTES
        self.segments.drop([base for base in reversed(self.segments.bases) if base > begin])
        upto = min(stop, self.segments.base_of(begin) + self.segments.segment_bytes)
        if self.segments.covers(begin) and upto > begin:
            self.segments.zero(begin, upto)


class OverlaidIndex:
    """An index whose rows from some entry on are in memory, because those in the files are missing or wrong."""

    def __init__(self, below: IndexSource) -> None:
        self._below = below
        self._first: int | None = None
        self._rows = np.empty(0, INDEX_RECORD)

    @property
    def first(self) -> int | None:
        """The first entry with a row in memory, or None."""
        return self._first

    def extend(self, first_index: int, rows: Rows) -> None:
        """Add rows; each call must continue the previous one or overlap it."""
        if self._first is None:
            self._first = first_index
        self._rows = np.concatenate([self._rows[: first_index - self._first], rows], dtype=INDEX_RECORD)

    def read(self, start: int, end: int) -> Rows:
        """See ``IndexSource``."""
        if self._first is None or end <= self._first:
            return self._below.read(start, end)
        kept = self._rows[max(start - self._first, 0) : end - self._first]
        missing = end - max(start, self._first) - len(kept)
        if missing > 0:
            kept = np.concatenate([kept, np.zeros(missing, INDEX_RECORD)])
        if start >= self._first:
            return kept
        return np.concatenate([self._below.read(start, self._first), kept])


def agreement(rows: Rows, expected: Rows, *, magic: bool) -> npt.NDArray[np.bool_]:
    """Return which rows agree with the records.

    Args:
        rows: from the index.
        expected: from the records, of the same length.
        magic: compare the column ``magic`` too; not in a store written by Java.
    """
    names = ("position", "size", "index", "term", *(("magic",) if magic else ()))
    same = np.ones(len(rows), np.bool_)
    for name in names:
        same &= rows[name] == expected[name]
    return same


def contradiction(rows: Rows, expected: Rows) -> npt.NDArray[np.bool_]:
    """Return which rows have the place of the record and yet another term or magic.

    A header has no CRC; its row is the only cross-check. Where the two differ in these alone, one of them is damaged,
    and this store alone cannot decide which. A row with another place is simply wrong, and proves nothing.
    """
    place: npt.NDArray[np.bool_] = np.ones(len(rows), np.bool_)
    for name in ("position", "size", "index"):
        place &= rows[name] == expected[name]
    place &= (rows["term"] != expected["term"]) | (rows["magic"] != expected["magic"])
    return place


def term_ranges(term_at: Callable[[int], int], first_index: int, last_index: int) -> list[TermRange]:
    """Return the term ranges of entries [first_index, last_index], found by bisecting."""
    ranges: list[TermRange] = []
    start = first_index
    while start <= last_index:
        term = term_at(start)
        ranges.append(TermRange(Index(start), Term(term)))
        low, high = start, last_index + 1  # entry low has the term, entry high has another or is past the end
        while high - low > 1:
            middle = (low + high) // 2
            if term_at(middle) == term:
                low = middle
            else:
                high = middle
        start = high
    return ranges

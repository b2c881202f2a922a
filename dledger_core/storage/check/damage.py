"""Find the damage among entries that were durable, with indexes and positions.

Unlike recovery it continues after a bad record, at the next good one: by the record's own size, by the index, or at the
next segment. Unlike ``verify`` it starts at a place that is known to be right and may never miss one: the result is the
list of entries to fetch from a peer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index, Position
from dledger_core.record import Records, index_records
from dledger_core.storage.check.judge import Fault, ScanCursor, ScanStop
from dledger_core.storage.check.scan import RecordBlock, Scanner
from dledger_core.storage.files.index_file import IndexFile, IndexSource, agreement, contradiction
from dledger_core.storage.read.record_reader import RecordReader

_ROWS_PER_STEP: Final = 4096
_NEAR: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Damage:
    """Entries [start, end) of a store that are damaged or missing.

    Attributes:
        start: the first one; equal to ``end`` where only the BLANK at a segment's end is damaged.
        end: end (exclusive).
        position: required position of the first one, or of the BLANK before it.
        length: bytes up to the next intact record, or to the end of the durable entries.
        path: the file in which it starts.
        message: the fault, human-readable.
    """

    start: Index
    end: Index
    position: Position
    length: int
    path: str
    message: str


def wrong_rows(index: IndexSource, records: Records, first_index: int) -> tuple[int, npt.NDArray[Any]] | None:
    """Return the rows that the index needs to agree with these good records, or None if it does."""
    rows = index_records(records)
    wrong = np.flatnonzero(~agreement(index.read(first_index, first_index + records.count), rows, magic=True))
    if not len(wrong):
        return None
    first, stop = int(wrong[0]), int(wrong[-1]) + 1
    return first_index + first, rows[first:stop]


def write_wrong_rows(index: IndexFile, records: Records, first_index: int) -> None:
    """Correct, durably, the index rows of these good records."""
    wrong = wrong_rows(index, records, first_index)
    if wrong is not None:
        # Synced: no CRC covers a term, so the row may be all that confirms it (mutation "rewritten rows are not made
        # durable").
        index.write(*wrong)
        index.sync(wrong[0], wrong[0] + len(wrong[1]))


def next_record(
    reader: RecordReader, index: IndexSource, stop: ScanStop, at: int, *, end: int | None = None, skip: int = 0
) -> ScanCursor | None:
    """Return the next record after a bad one whose header has the expected index, or None.

    It is sought after the bad record by the record's own size, then by the size in its row, then by the next rows, then
    at the starts of segments.

    Args:
        reader: the store.
        index: its index as stored on disk.
        stop: the bad record.
        at: its index.
        end: end (exclusive) of the indexes to look for; None = only the next rows.
        skip: bytes after the bad record's position that cannot be read.
    """

    def found(position: int, wanted: int | None = None) -> ScanCursor | None:
        # A header has no CRC: it counts only with an index that is expected here. Any bytes of a body could look like
        # one.
        with contextlib.suppress(CorruptRecordError):
            header = reader.header_at(position)
            if header is not None and (header.index == wanted if wanted is not None else at <= header.index < upto):
                return ScanCursor(position, header.index, header.term)
        return None

    position, upto = stop.cursor.position, end if end is not None else 1 << 63
    # The nearest record first: whatever is skipped counts as damaged, and is fetched from a peer.
    row = index.read(at, at + 1)[0]
    sizes = [stop.size] if stop.size else []
    if int(row["index"]) == at and int(row["position"]) == position:
        sizes.append(int(row["size"]))
    for size in () if skip else sizes:
        if at + 1 < upto and (cursor := found(position + size, at + 1)):
            return cursor
    position += skip
    for low in range(at, end if end is not None else at + _ROWS_PER_STEP, _ROWS_PER_STEP):
        high = min(low + _ROWS_PER_STEP, upto)
        rows = index.read(low, high)
        known = np.flatnonzero((rows["index"] == np.arange(low, high)) & (rows["position"] > position))
        for number in known.tolist():
            if cursor := found(int(rows["position"][number]), low + number):
                return cursor
    # The first bytes of a segment are always those of a record.
    later = (cursor for base in reader.data.bases if base > position and (cursor := found(base)))
    return next(later, None)


class _Search:
    def __init__(
        self,
        reader: RecordReader,
        index: IndexSource,
        end: int,
        end_position: int,
        on_block: Callable[[RecordBlock], None],
    ) -> None:
        self.reader = reader
        self.data = reader.data
        self.index = index
        self.end = end
        self.end_position = end_position
        self.on_block = on_block
        self.before: RecordBlock | None = None

    def run(self, cursor: ScanCursor) -> Iterator[Damage]:
        while cursor.index is not None and cursor.index < self.end:
            stop, skip = self._scan(cursor)
            if stop is None:
                return
            place = stop.cursor
            index = cursor.index if place.index is None else place.index
            onward = next_record(self.reader, self.index, stop, index, end=self.end, skip=skip)
            onward = onward or ScanCursor(self.end_position, self.end)
            assert onward.index is not None
            yield Damage(
                Index(index),
                Index(onward.index),
                Position(place.position),
                max(onward.position - place.position, 0),
                str(self.data.path(place.position)),
                stop.damage.value,
            )
            cursor = ScanCursor(onward.position, onward.index)

    def _scan(self, cursor: ScanCursor) -> tuple[ScanStop | None, int]:
        """Return where the good records from a place on end, or None at the end of all; and bytes to skip."""
        scanner = Scanner(self.data, self.index, self.reader.rules, cursor)
        self.before = None
        try:
            for found in scanner.blocks():
                block = found.slice(min(found.records.count, self.end - found.first_index))
                stop = self._contradicted(block)
                if stop is not None:
                    return stop, 0
                self.before = block
                self.on_block(block)
                if found.end_index >= self.end:
                    return None, 0
        # The size of the next record cannot be read either, so the largest one is skipped; the index finds the records
        # in between.
        except CorruptRecordError:  # the disk cannot read some of the bytes that come next
            return ScanStop(Fault.BODY, scanner.cursor), RECORD_BYTES_MAX
        stop = scanner.stop or ScanStop(Fault.END, scanner.cursor)
        return (self._blame(stop) if stop.fault is Fault.TERM else stop), 0

    def _contradicted(self, block: RecordBlock) -> ScanStop | None:
        if not block.records.count:
            return None
        # No CRC covers term and magic. Where header and row differ one of them is damaged, and only a peer can say
        # which one (test_reader_rejects_a_record_that_its_row_contradicts).
        rows = self.index.read(block.first_index, block.end_index)
        wrong = np.flatnonzero(contradiction(rows, index_records(block.records)))
        if not len(wrong):
            return None
        at = int(wrong[0])
        if at:
            self.on_block(block.slice(at))
        cursor = ScanCursor(int(block.positions[at]), block.first_index + at)
        return ScanStop(Fault.ROW, cursor, int(block.records.sizes[at]))

    def _blame(self, stop: ScanStop) -> ScanStop:
        """Return the record to blame for a falling term: the previous one, unless its row confirms it."""
        # Terms in a log never fall (dissertation 3.5), so one of two records is wrong: the earlier one, unless its row
        # confirms it (test_flipped_bit_of_a_header_is_damage_with_its_place).
        before, index = self.before, stop.cursor.index
        if before is None or index is None or before.end_index != index:
            return stop
        last = before.records.slice(before.records.count - 1, before.records.count)
        if wrong_rows(self.index, last, index - 1) is None:
            return stop
        cursor = ScanCursor(int(before.positions[-1]), index - 1)
        return ScanStop(Fault.TERM, cursor, int(before.records.sizes[-1]))


def find_damage(
    reader: RecordReader,
    index: IndexSource,
    cursor: ScanCursor,
    end: int,
    end_position: int,
    on_block: Callable[[RecordBlock], None] = lambda _block: None,
) -> Iterator[Damage]:
    """Yield the damage among a store's entries, in order; changes nothing.

    Args:
        reader: the store.
        index: its index as stored on disk.
        cursor: start; its index and position must be right.
        end: end (exclusive) of the entries that must exist.
        end_position: end of the last one's record.
        on_block: receives all good records, in order.
    """
    return _Search(reader, index, end, end_position, on_block).run(cursor)


class _FarEnough(Exception):  # noqa: N818
    """The search is past the requested entries."""


def damage_near(
    reader: RecordReader, index: IndexSource, near: int, first: tuple[int, int], end: tuple[int, int]
) -> Damage | None:
    """Return the first damage at or shortly after entry ``near``, or None.

    Args:
        reader: the store.
        index: its index.
        near: index at which damage was found.
        first: the log's first entry and its position.
        end: end (exclusive) of the entries, and end of the last one's record.
    """

    def on_block(block: RecordBlock) -> None:
        # A read that found damage waits for its repair: the rest of the log is the scrub's work.
        if block.first_index > near + _NEAR:
            raise _FarEnough

    # Only an entry that header and row agree about is a start: from a wrong place good entries would be damage, and
    # would be overwritten.
    cursor = ScanCursor(first[1], first[0])
    for at in range(min(near, end[0]) - 1, max(first[0], near - _ROWS_PER_STEP) - 1, -1):
        row, header = index.read(at, at + 1)[0], None
        with contextlib.suppress(CorruptRecordError):
            header = reader.header_at(int(row["position"]))
        if header is not None and row.tolist() == (header.magic, int(row["position"]), header.size, at, header.term):
            cursor = ScanCursor(int(row["position"]), at)
            break
    try:
        return next(find_damage(reader, index, cursor, *end, on_block), None)
    except _FarEnough:
        return None

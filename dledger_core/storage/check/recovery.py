"""Crash recovery: find the end of the log and detect damage when a native store is opened.

Records that the checkpoint covers are only sampled (the first one of each segment, the last durable one), so that a
start does not read the whole log; every record after them is judged. Damage is reported and nothing is changed. A torn
tail is truncated after the last complete batch. A recovering voter keeps it, because it may be damaged and not torn:
the log ends before it, and the first append, or the end of the recovery, removes it. Index rows that lack their
record's place are rewritten from the data, once the records are known to reach the end that the checkpoint covers; a
row that contradicts its record is damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NUMBER_MAX
from dledger_core.record import INDEX_RECORD_BYTES, Header, Records, index_records
from dledger_core.storage.check.damage import wrong_rows
from dledger_core.storage.check.judge import Fault, ScanCursor, ScanStop, Verdict, complete_end, corrupt, verdict
from dledger_core.storage.check.scan import RecordBlock, Scanner
from dledger_core.storage.files.index_file import IndexFile, contradiction
from dledger_core.storage.files.layout import LogMeta
from dledger_core.storage.files.meta_files import Checkpoint
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.record_reader import RecordReader

_ZERO_BYTES_MAX = 32 << 20


@dataclass(frozen=True, slots=True)
class RecoveredEnd:
    """Both ends of the log after recovery.

    Attributes:
        first_index: index of the first entry, or of the next one if there is none.
        last_index: index of the last entry, or first_index - 1.
        position: end of the last record.
        term: term of the last entry; 0 if there is none.
        time_ms: append time of the last entry; 0 if unknown.
        written_end: end of a tail that was kept after ``position``; 0 if there is none.
    """

    first_index: int
    last_index: int
    position: int
    term: int
    time_ms: int
    written_end: int = 0


def truncate_tail(data: Segments, position: int, written_end: int) -> None:
    """Zero everything from ``position`` on, durably.

    Back to front and in limited steps: a crash in between leaves a shorter log with at most one torn step at its end.
    Zeros, because old bytes after a shorter log would look like its next records.
    """
    data.drop([base for base in reversed(data.bases) if base >= position and base != data.bases[0]])
    # The log may end where a segment does, with no file after it.
    if not data.covers(position):
        return
    base = data.base_of(position)
    stop = min(written_end, base + data.segment_bytes)
    while stop > position:
        start = max(position, stop - _ZERO_BYTES_MAX)
        data.zero(start, stop)
        data.sync([base])
        stop = start


def truncate_rows(index: IndexFile, last_index: int) -> None:
    """Zero the rows after entry ``last_index`` and remove later files."""
    segments = index.segments
    if segments.bases:
        segments.fill_up(segments.bases[-1])
        written_end = segments.written_end((last_index + 1) * INDEX_RECORD_BYTES)
        index.truncate(last_index + 1, -(-written_end // INDEX_RECORD_BYTES))


def missing_start(data: Segments, meta: LogMeta) -> int | None:
    """Return the position of the first record if its segment is missing.

    A trim replaces ``meta/log.json`` before it deletes segments, so the first segment never starts after the log.
    """
    lost = bool(data.bases) and data.bases[0] > data.base_of(meta.first_position)
    return meta.first_position if lost else None


def wrong_sizes(data: Segments) -> Iterator[tuple[int, int]]:
    """Yield (base, size) of each segment of a wrong size; a crash can leave only the last one short."""
    for base in data.bases:
        size = data.size_of(base)
        if size > data.segment_bytes or (size < data.segment_bytes and base != data.bases[-1]):
            yield base, size


class _Recovery:
    def __init__(
        self, reader: RecordReader, index: IndexFile, meta: LogMeta, unsynced_bytes_max: int, *, keep_tail: bool
    ) -> None:
        self.reader = reader
        self.data = reader.data
        self.index = index
        self.meta = meta
        self.unsynced_bytes_max = unsynced_bytes_max
        self.keep_tail = keep_tail

    def run(self, checkpoint: Checkpoint | None) -> RecoveredEnd:
        if not self.data.bases:
            self._reject_loss(checkpoint, self.meta.first_position)
            self.index.segments.drop(tuple(reversed(self.index.segments.bases)))
            return RecoveredEnd(self.meta.first_index, self.meta.first_index - 1, self.meta.first_position, 0, 0)
        # A trim renames the start of the log before it deletes files, so a log whose files begin later has lost some.
        lost = missing_start(self.data, self.meta)
        if lost is not None:
            raise CorruptRecordError(
                "data files are missing: the log starts before the first one",
                str(self.data.path(lost)),
                "restore them, or repair from a peer",
                {"first_index": self.meta.first_index, "position": lost},
            )
        self._check_sizes()
        start = self._start(checkpoint)
        first = start.index
        if first is None:
            raise CorruptRecordError(
                "the first record is damaged",
                str(self.data.path(start.position)),
                "repair the store from a peer, or restore it",
                {"position": start.position},
            )
        end = RecoveredEnd(first, first - 1, start.position, 0, 0)
        if checkpoint is not None and checkpoint.durable_index >= first:
            end = self._sample(checkpoint, start.position, first)
        elif checkpoint is not None and checkpoint.durable_index >= self.meta.first_index:
            self._reject_loss(checkpoint, start.position)
        return self._tail(end)

    def _reject_loss(self, checkpoint: Checkpoint | None, position: int) -> None:
        if checkpoint is not None and checkpoint.durable_index >= self.meta.first_index:
            raise CorruptRecordError(
                "data files are missing: the store ends before the checkpoint's durable_index",
                str(self.data.path(position)),
                "restore them, or repair from a peer",
                {"durable_index": checkpoint.durable_index, "position": position},
            )

    def _check_sizes(self) -> None:
        for base, size in wrong_sizes(self.data):
            raise CorruptRecordError(
                f"the file has {size} bytes instead of {self.data.segment_bytes}",
                str(self.data.path(base)),
                "restore it, or repair from a peer",
                {"position": base + min(size, self.data.segment_bytes)},
            )

    def _start(self, checkpoint: Checkpoint | None) -> ScanCursor:
        """Return the first record's place; its index is None if it cannot be known."""
        base = self.data.bases[0]
        if base == self.meta.first_position:
            header = self.reader.header_at(base)
            other = header is not None and header.index != self.meta.first_index
            if header is not None and other and self._is_confirmed(base, header, checkpoint):
                raise CorruptRecordError(
                    f"the first record has index {header.index}, but meta/log.json says {self.meta.first_index}",
                    str(self.data.path(base)),
                    "find out which of the two is damaged; restore it, or repair from a peer",
                    {"index": header.index, "first_index": self.meta.first_index, "position": base},
                )
            return ScanCursor(base, self.meta.first_index)
        found = self.reader.first_record()
        if found is None or found[0] > self.meta.first_index:
            return ScanCursor(base, None)
        return ScanCursor(found[1], found[0])

    def _is_confirmed(self, position: int, header: Header, checkpoint: Checkpoint | None) -> bool:
        """Whether a first record that contradicts ``meta/log.json`` may be right; if not, it is damaged.

        A recovering voter's log then ends before it: no repair would find damage to entries that nothing covers.
        """
        covered = checkpoint is not None and checkpoint.durable_index >= self.meta.first_index
        return not (covered or self.keep_tail) or self._row_agrees(position, header)

    def _sample(self, checkpoint: Checkpoint, position: int, first: int) -> RecoveredEnd:
        """Sample the records that the checkpoint covers and return their end."""
        if not self.data.covers(checkpoint.position - 1):
            self._reject_loss(checkpoint, self.data.bases[-1])
        if self._index_has_gaps(first, checkpoint.durable_index):
            # A missing file of rows is no damage: all rows follow from the data
            # (test_recovery_rebuilds_the_index_from_the_data).
            self._reindex(ScanCursor(position, first), checkpoint.position, checkpoint)
        known = self._check_segments(checkpoint, ScanCursor(position, first))
        # The fast way of a normal start: one row and one record instead of a scan of the last segment.
        if self._durable_row_fits(checkpoint):
            last = checkpoint.durable_index
            record = self._durable_record(last)
            if record is not None:
                return RecoveredEnd(first, last, checkpoint.position, record.first.term, record.first.time_ms)
        return self._scan_to(checkpoint, first, known)

    def _index_has_gaps(self, first: int, last: int) -> bool:
        segments = self.index.segments
        begin, end = first * INDEX_RECORD_BYTES, (last + 1) * INDEX_RECORD_BYTES
        bases = range(segments.base_of(begin), end, segments.segment_bytes)
        return any(base not in segments.bases for base in bases)

    def _durable_row_fits(self, checkpoint: Checkpoint) -> bool:
        row = self.index.read(checkpoint.durable_index, checkpoint.durable_index + 1)[0]
        return int(row["position"]) + int(row["size"]) == checkpoint.position

    def _durable_record(self, last: int) -> Records | None:
        try:
            return self.reader.read(last, last + 1, 1)
        except CorruptRecordError:
            return None

    def _scan_to(self, checkpoint: Checkpoint, first: int, known: ScanCursor) -> RecoveredEnd:
        """Find the fault in the last covered segment: in the index (rewritten) or in the data (damage)."""
        block = self._reindex(known, checkpoint.position, checkpoint)
        last = block.records.slice(0, checkpoint.durable_index + 1 - block.first_index).last
        return RecoveredEnd(first, checkpoint.durable_index, checkpoint.position, last.term, last.time_ms)

    def _check_segments(self, checkpoint: Checkpoint, known: ScanCursor) -> ScanCursor:
        """Check the first record of each segment against its row; where they differ, scan up to it and correct rows.

        The index in a header has no CRC. It is trusted once its row agrees, or once the records from the last known
        place on lead to it: a scan from a damaged index would end at once, or write rows that no record has.

        Args:
            checkpoint: covers the records.
            known: the first record, with the index in ``meta/log.json``.

        Returns:
            The first record of the last segment, with its index.
        """
        for base in self.data.bases:
            if base >= checkpoint.position:
                break
            at = max(base, known.position)
            header = self.reader.header_at(at)
            if header is None or not self._row_agrees(at, header):
                self._reindex(known, min(base + self.data.segment_bytes, checkpoint.position), checkpoint)
                header = self.reader.header_at(at)
            if header is not None:
                known = ScanCursor(at, header.index)
        return known

    def _row_agrees(self, position: int, header: Header) -> bool:
        """Whether the row of the header's index agrees with the header."""
        index = header.index
        row = self.index.read(index, index + 1)[0] if index <= NUMBER_MAX else None
        return row is not None and row.tolist() == (header.magic, position, header.size, index, header.term)

    def _reindex(self, known: ScanCursor, upto: int, checkpoint: Checkpoint) -> RecordBlock:
        """Correct rows of durable records, from a known one to position ``upto``; return the block that reaches it.

        Nothing is written before all of these records are found good, in order and not contradicted: a row is the
        only copy of a term that has no CRC.
        """
        # Two passes, the first of which writes nothing (test_wrong_index_in_a_first_record_creates_no_index_files).
        for block in self._blocks(known, upto):
            self.reader.cross_check(block)
            self._check_end(block, checkpoint)
        last: RecordBlock | None = None
        for last in self._blocks(known, upto):
            durable = min(last.records.count, checkpoint.durable_index + 1 - last.first_index)
            self._correct_index(last.slice(durable))
        assert last is not None
        return last

    def _blocks(self, known: ScanCursor, upto: int) -> Iterator[RecordBlock]:
        """Yield the blocks from a record up to the one that reaches position ``upto``; raise if none does."""
        scanner = Scanner(self.data, self.index, self.reader.rules, known)
        for block in scanner.blocks():
            yield block
            if block.end_position >= upto:
                return
        raise corrupt(self.data, scanner.stop or ScanStop(Fault.HEADER, known))

    def _check_end(self, block: RecordBlock, checkpoint: Checkpoint) -> None:
        """Raise if the last durable record does not end at the checkpoint's position."""
        at = checkpoint.durable_index - block.first_index
        if 0 <= at < block.records.count:
            fits = int(block.positions[at]) + int(block.records.sizes[at]) == checkpoint.position
        else:
            fits = (at >= 0) == (block.end_position < checkpoint.position)
        if not fits:
            place = ScanCursor(checkpoint.position, checkpoint.durable_index)
            raise corrupt(self.data, ScanStop(Fault.INDEX, place))

    def _correct_index(self, block: RecordBlock) -> None:
        wrong = wrong_rows(self.index, block.records, block.first_index)
        if wrong is not None:
            self.index.write(*wrong)

    def _tail(self, end: RecoveredEnd) -> RecoveredEnd:
        """Scan the records after the checkpoint; truncate a torn tail, raise on damage."""
        cursor = ScanCursor(end.position, end.last_index + 1, end.term)
        scanner = Scanner(self.data, self.index, self.reader.rules, cursor)
        for found in scanner.blocks():
            # Before rows are corrected: a row that contradicts its record is evidence (mutation "a row that contradicts
            # a kept record is overwritten").
            block = self._uncontradicted(found) if self.keep_tail else found
            self._correct_index(block)
            # The log ends after a whole batch: the rest of one that was torn would be a part of an append that was
            # never acknowledged (mutation "a torn batch keeps its first entries").
            at = complete_end(block.records) if block.records.count else None
            if at is not None:
                last = block.records.slice(0, at + 1).last
                position = int(block.positions[at]) + last.size
                end = RecoveredEnd(end.first_index, block.first_index + at, position, last.term, last.time_ms)
            if block.records.count < found.records.count:
                break
        written_end = self.data.written_end(end.position)
        # These bytes may be entries that others need: they stay until a leader has compared the log
        # (test_lost_checkpoint_makes_recovering_voter_that_cuts_nothing).
        if self.keep_tail and written_end > end.position:
            return replace(end, written_end=written_end)
        stop = scanner.stop
        if stop is not None and self._verdict(stop, cursor.position, written_end) is Verdict.DAMAGED:
            raise corrupt(self.data, stop)
        self.data.fill_up(self.data.bases[-1])
        truncate_tail(self.data, end.position, written_end)
        truncate_rows(self.index, end.last_index)
        return end

    def _uncontradicted(self, block: RecordBlock) -> RecordBlock:
        """Return the records before the first one whose row has another term or magic: one of the two is damaged.

        A recovering voter's checkpoint may have been lowered, so rows after it count as durable too.
        """
        rows = self.index.read(block.first_index, block.end_index)
        wrong = np.flatnonzero(contradiction(rows, index_records(block.records)))
        return block.slice(int(wrong[0])) if len(wrong) else block

    def _verdict(self, stop: ScanStop, covered_end: int, written_end: int) -> Verdict:
        return verdict(
            stop.cursor.position,
            covered_end=covered_end,
            written_end=written_end,
            unsynced_bytes_max=self.unsynced_bytes_max,
        )


def recover(
    reader: RecordReader,
    index: IndexFile,
    meta: LogMeta,
    checkpoint: Checkpoint | None,
    *,
    unsynced_bytes_max: int,
    keep_tail: bool = False,
) -> RecoveredEnd:
    """Truncate a torn tail, correct the index and return both ends of the log.

    Args:
        reader: the store.
        index: its index.
        meta: its identity.
        checkpoint: covers the durable entries; None = both copies are lost, or the store is new.
        unsynced_bytes_max: a bad record further from the last written byte is damage.
        keep_tail: leave the bytes after the last complete batch as they are (a recovering voter).

    Raises:
        CorruptRecordError: the store is damaged; no data was changed.
    """
    end = _Recovery(reader, index, meta, unsynced_bytes_max, keep_tail=keep_tail).run(checkpoint)
    # Records found here count as durable from now on, but a process that was killed may never have synced them. A sync
    # alone is not enough: a failed one has marked the pages clean, and the marker of the failure may be lost too.
    known, rows = 0, 0
    if checkpoint is not None:
        known, rows = checkpoint.position, (checkpoint.durable_index + 1) * INDEX_RECORD_BYTES
        index.segments.rewrite(rows, (end.last_index + 1) * INDEX_RECORD_BYTES)
        reader.data.rewrite(known, end.position)
    # The zeros after them likewise, if they removed entries: these would return behind the next ones, as entries that
    # no leader ever sent (test_start_makes_truncation_of_an_unmarked_failed_sync_durable).
    reader.data.clear_after(max(end.position, end.written_end))
    if not end.written_end:
        index.segments.clear_after((end.last_index + 1) * INDEX_RECORD_BYTES)
    reader.data.sync([base for base in reader.data.bases if base + reader.data.segment_bytes > known])
    index.segments.sync(index.segments.bases)
    return end

"""What an own store's files amount to when it is opened: where the log ends, and whether it may be trusted.

What the checkpoint vouches for is only checked in samples (the head of each segment, the last durable record); from
there on every record is checked. A bad record at or below the checkpoint, or further from the end of what was written
than unsynced bytes can be, is damage: it is reported and nothing is changed. Any other is the torn tail of a crash: the
log is cut back to its last whole batch. Index rows that do not know where their record lies are rewritten from the
data, once the records are known to reach what the checkpoint vouches for; a row that contradicts its record is damage.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dledger_core.errors import CorruptRecordError
from dledger_core.record import (
    HEADER_BYTES,
    INDEX_RECORD_BYTES,
    Header,
    Records,
    append_time,
    ends_batch,
    index_records,
)
from dledger_core.storage.check.scan import Cursor, Run, Scanner, Stop, StopKind
from dledger_core.storage.files.checkpoint import Checkpoint
from dledger_core.storage.files.index_file import IndexFile, agreement
from dledger_core.storage.files.log_info import LogMeta
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.record_reader import RecordReader, corrupt

__all__ = ["LogEnd", "batch_ends", "cut_tail", "missing_head", "recover", "wrong_sizes"]

_CUT_BYTES_MAX = 32 << 20
_INDEX_MAX = (1 << 63) // INDEX_RECORD_BYTES - 1  # whose row still has an offset


@dataclass(frozen=True, slots=True)
class LogEnd:
    """The log's extent after recovery.

    Attributes:
        first_index: index of the first entry held, or of the first to come.
        last_index: index of the last whole entry, or first_index - 1.
        position: where the last record ends.
        term: term of the last entry; 0 if there is none.
        time_ms: append time of the last entry; 0 if unknown.
        cut_bytes: bytes of a torn tail that were cut off.
    """

    first_index: int
    last_index: int
    position: int
    term: int
    time_ms: int
    cut_bytes: int = 0


def batch_ends(records: Records) -> npt.NDArray[np.int64]:
    """Returns the places in ``records`` of the last entries of batches; without a mark each entry is its own batch."""
    return np.flatnonzero(ends_batch(records.headers) | (records.headers["flags"] == 0))


def _whole_ends(records: Records) -> npt.NDArray[np.int64]:
    """Returns ``batch_ends`` without those whose header may be torn.

    Where a body follows, its CRC shows it. Where none does, a write that stopped inside the append time left zeros in
    the place of its last byte, and the leader that made the record saw to it that this byte is none.
    """
    ends = batch_ends(records)
    marks = records.headers["flags"][ends].astype(np.uint64)
    torn: npt.NDArray[np.bool_] = (
        (records.sizes[ends] == HEADER_BYTES) & (marks != 0) & ((marks & np.uint64(0xFF)) == 0)
    )
    whole: npt.NDArray[np.int64] = ends[~torn]
    return whole


def cut_tail(data: Segments, position: int, written_end: int) -> None:
    """Removes everything from ``position`` on, durably.

    Back to front and in bounded steps: a crash in between leaves a shorter log with at most one torn step at its end.
    """
    data.drop([base for base in reversed(data.bases) if base >= position and base != data.bases[0]])
    if not data.holds(position):
        return
    base = data.base_of(position)
    stop = min(written_end, base + data.segment_bytes)
    while stop > position:
        start = max(position, stop - _CUT_BYTES_MAX)
        data.zero(start, stop)
        data.sync([base])
        stop = start


def missing_head(data: Segments, meta: LogMeta) -> int | None:
    """Returns where the log begins if the segments that hold its beginning are gone.

    A prefix is deleted only after ``meta/log.json`` says so, so the first segment is never behind what it says.
    """
    lost = bool(data.bases) and data.bases[0] > data.base_of(meta.first_position)
    return meta.first_position if lost else None


def wrong_sizes(data: Segments) -> Iterator[tuple[int, int]]:
    """Yields (base, size) of each segment of a wrong size; a crash can leave only the last one short."""
    for base in data.bases:
        size = data.size_of(base)
        if size > data.segment_bytes or (size < data.segment_bytes and base != data.bases[-1]):
            yield base, size


class _Recovery:
    def __init__(self, reader: RecordReader, index: IndexFile, meta: LogMeta, unsynced_bytes_max: int) -> None:
        self.reader = reader
        self.data = reader.data
        self.index = index
        self.meta = meta
        self.unsynced_bytes_max = unsynced_bytes_max

    def run(self, checkpoint: Checkpoint | None) -> LogEnd:
        if not self.data.bases:
            self._refuse_loss(checkpoint, self.meta.first_position)
            self.index.segments.drop(tuple(reversed(self.index.segments.bases)))
            return LogEnd(self.meta.first_index, self.meta.first_index - 1, self.meta.first_position, 0, 0)
        lost = missing_head(self.data, self.meta)
        if lost is not None:
            raise CorruptRecordError(
                "data files are missing: the log begins before the first one",
                str(self.data.path(lost)),
                "restore them, or repair from a peer",
                {"first_index": self.meta.first_index, "position": lost},
            )
        self._check_sizes()
        head = self._head(checkpoint)
        first = head.index
        if first is None:
            raise CorruptRecordError(
                "the first record is damaged",
                str(self.data.path(head.position)),
                "repair the store from a peer, or restore it",
                {"position": head.position},
            )
        end = LogEnd(first, first - 1, head.position, 0, 0)
        if checkpoint is not None and checkpoint.durable_index >= first:
            end = self._trusted(checkpoint, head.position, first)
        elif checkpoint is not None and checkpoint.durable_index >= self.meta.first_index:
            self._refuse_loss(checkpoint, head.position)
        return self._tail(end)

    def _refuse_loss(self, checkpoint: Checkpoint | None, position: int) -> None:
        if checkpoint is not None and checkpoint.durable_index >= self.meta.first_index:
            raise CorruptRecordError(
                "data files are missing: the checkpoint vouches for more entries than the store holds",
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

    def _head(self, checkpoint: Checkpoint | None) -> Cursor:
        """Returns the first record's place; its index is None if it cannot be known."""
        base = self.data.bases[0]
        if base == self.meta.first_position:
            header = self.reader.header_at(base)
            other = header is not None and header.index != self.meta.first_index
            if header is not None and other and self._believed(base, header, checkpoint):
                raise CorruptRecordError(
                    f"the first record has index {header.index}, but meta/log.json says {self.meta.first_index}",
                    str(self.data.path(base)),
                    "find out which of the two is damaged; restore it, or repair from a peer",
                    {"index": header.index, "first_index": self.meta.first_index, "position": base},
                )
            return Cursor(base, self.meta.first_index)
        found = self.reader.first_record()
        if found is None or found[0] > self.meta.first_index:
            return Cursor(base, None)
        return Cursor(found[1], found[0])

    def _believed(self, position: int, header: Header, checkpoint: Checkpoint | None) -> bool:
        """Whether a first record that contradicts ``meta/log.json`` may be right; else ``_check_heads`` names it."""
        vouched = checkpoint is not None and checkpoint.durable_index >= self.meta.first_index
        return not vouched or self._row_knows(position, header)

    def _trusted(self, checkpoint: Checkpoint, position: int, first: int) -> LogEnd:
        """Samples what the checkpoint vouches for and returns its end."""
        if not self.data.holds(checkpoint.position - 1):
            self._refuse_loss(checkpoint, self.data.bases[-1])
        if self._index_has_holes(first, checkpoint.durable_index):
            self._reindex(Cursor(position, first), checkpoint.position, checkpoint)
        known = self._check_heads(checkpoint, Cursor(position, first))
        if self._durable_row_fits(checkpoint):
            last = checkpoint.durable_index
            record = self._durable_record(last)
            if record is not None:
                header = record.headers[0]
                time = append_time(header["flags"])
                return LogEnd(first, last, checkpoint.position, int(header["term"]), time)
        return self._walk_to(checkpoint, first, known)

    def _index_has_holes(self, first: int, last: int) -> bool:
        segments = self.index.segments
        bases = range(segments.base_of(first * 32), last * 32 + 1, segments.segment_bytes)
        return any(base not in segments.bases for base in bases)

    def _durable_row_fits(self, checkpoint: Checkpoint) -> bool:
        row = self.index.read(checkpoint.durable_index, checkpoint.durable_index + 1)[0]
        return int(row["position"]) + int(row["size"]) == checkpoint.position

    def _durable_record(self, last: int) -> Records | None:
        try:
            return self.reader.read(last, last + 1, 1)
        except CorruptRecordError:
            return None

    def _walk_to(self, checkpoint: Checkpoint, first: int, known: Cursor) -> LogEnd:
        """Finds what is wrong in the last trusted segment: the index (rewritten) or the data (damage)."""
        run = self._reindex(known, checkpoint.position, checkpoint)
        last = run.records.headers[checkpoint.durable_index - run.first_index]
        time = append_time(last["flags"])
        return LogEnd(first, checkpoint.durable_index, checkpoint.position, int(last["term"]), time)

    def _check_heads(self, checkpoint: Checkpoint, known: Cursor) -> Cursor:
        """Checks the first record of each segment against its row; where they differ, walks there and corrects rows.

        A head says itself which index it has. It is believed once its row says so too, or once the records from the
        last known place on lead to it: a walk from a damaged index would end nowhere, or in rows that no record has.

        Args:
            checkpoint: what is vouched for.
            known: the first record, whose index ``meta/log.json`` tells.

        Returns:
            The last head, with its index.
        """
        for base in self.data.bases:
            if base >= checkpoint.position:
                break
            at = max(base, known.position)
            header = self.reader.header_at(at)
            if header is None or not self._row_knows(at, header):
                self._reindex(known, min(base + self.data.segment_bytes, checkpoint.position), checkpoint)
                header = self.reader.header_at(at)
            if header is not None:
                known = Cursor(at, header.index)
        return known

    def _row_knows(self, position: int, header: Header) -> bool:
        """Whether the row of the index that a header names says the same as the header."""
        index = header.index
        row = self.index.read(index, index + 1)[0] if index <= _INDEX_MAX else None
        return row is not None and row.tolist() == (header.magic, position, header.size, index, header.term)

    def _reindex(self, known: Cursor, upto: int, checkpoint: Checkpoint) -> Run:
        """Corrects rows of durable records, from a known one to position ``upto``; returns the run that reaches it.

        Nothing is written before all of these records are found whole, in order and uncontradicted.
        """
        for run in self._runs(known, upto):
            self.reader.cross_check(run)
            self._check_end(run, checkpoint)
        last: Run | None = None
        for last in self._runs(known, upto):
            durable = min(last.records.count, checkpoint.durable_index + 1 - last.first_index)
            self._correct_index(Run(last.first_index, last.position, last.records.slice(0, durable)))
        assert last is not None
        return last

    def _runs(self, known: Cursor, upto: int) -> Iterator[Run]:
        """Yields the runs from a record up to the one that reaches position ``upto``; raises if none does."""
        scanner = Scanner(self.data, self.index, self.reader.rules, known)
        for run in scanner.runs():
            yield run
            if run.end_position >= upto:
                return
        stop = scanner.stop or Stop(StopKind.HEADER, known)
        raise corrupt(self.data, Stop(stop.kind if stop.kind is not StopKind.END else StopKind.HEADER, stop.cursor))

    def _check_end(self, run: Run, checkpoint: Checkpoint) -> None:
        """Raises if the last durable record does not end where the checkpoint says."""
        at = checkpoint.durable_index - run.first_index
        if 0 <= at < run.records.count:
            fits = int(run.positions[at]) + int(run.records.sizes[at]) == checkpoint.position
        else:
            fits = (at >= 0) == (run.end_position < checkpoint.position)
        if not fits:
            raise corrupt(self.data, Stop(StopKind.INDEX, Cursor(checkpoint.position, checkpoint.durable_index)))

    def _correct_index(self, run: Run) -> None:
        rows = index_records(run.records)
        wrong = np.flatnonzero(~agreement(self.index.read(run.first_index, run.end_index), rows, magic=True))
        if len(wrong):
            first, stop = int(wrong[0]), int(wrong[-1]) + 1
            self.index.write(run.first_index + first, rows[first:stop])

    def _tail(self, end: LogEnd) -> LogEnd:
        """Scans what nobody vouches for, decides between torn and damaged, and cuts a torn tail."""
        cursor = Cursor(end.position, end.last_index + 1, end.term)
        scanner = Scanner(self.data, self.index, self.reader.rules, cursor)
        for run in scanner.runs():
            self._correct_index(run)
            ends = _whole_ends(run.records)
            if len(ends):
                at = int(ends[-1])
                header = run.records.headers[at]
                position = run.position + int(run.records.starts[at]) + int(run.records.sizes[at])
                time = append_time(header["flags"])
                end = LogEnd(end.first_index, run.first_index + at, position, int(header["term"]), time)
        stop = scanner.stop
        bad = stop.cursor.position if stop is not None else end.position
        written_end = self.data.written_end(end.position)
        if written_end - bad > self.unsynced_bytes_max and stop is not None:
            kind = stop.kind if stop.kind is not StopKind.END else StopKind.HEADER
            raise corrupt(self.data, Stop(kind, stop.cursor))
        self.data.fill_up(self.data.bases[-1])
        cut_tail(self.data, end.position, written_end)
        self._wipe_index(end.last_index)
        return LogEnd(
            end.first_index, end.last_index, end.position, end.term, end.time_ms, max(written_end - end.position, 0)
        )

    def _wipe_index(self, last_index: int) -> None:
        segments = self.index.segments
        if segments.bases:
            segments.fill_up(segments.bases[-1])
            behind = segments.written_end((last_index + 1) * 32)
            self.index.cut(last_index + 1, -(-behind // 32))


def recover(
    reader: RecordReader,
    index: IndexFile,
    meta: LogMeta,
    checkpoint: Checkpoint | None,
    *,
    unsynced_bytes_max: int,
) -> LogEnd:
    """Returns the extent of the log, after cutting a torn tail and correcting the index.

    Raises:
        CorruptRecordError: the store is damaged; no data was changed.
    """
    end = _Recovery(reader, index, meta, unsynced_bytes_max).run(checkpoint)
    # What was found may never have been synced (a process can die between write and sync), yet counts as durable now.
    # A sync is not enough: one that failed has called the page cache clean, and the disk may have refused the mark.
    known, rows = 0, 0
    if checkpoint is not None:
        known, rows = checkpoint.position, (checkpoint.durable_index + 1) * INDEX_RECORD_BYTES
        index.segments.rewrite(rows, (end.last_index + 1) * INDEX_RECORD_BYTES)
        reader.data.rewrite(known, end.position)
    reader.data.sync([base for base in reader.data.bases if base + reader.data.segment_bytes > known])
    index.segments.sync(index.segments.bases)
    return end

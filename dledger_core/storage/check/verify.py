"""Reads a whole store and reports everything that is wrong with it, changing nothing.

Unlike recovery it goes on behind a bad record: by its size, by the index, or at the next segment. What lies behind the
last valid record is a torn tail (or what Java leaves behind when it truncates) unless the checkpoint vouches for it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np

from dledger_core.ids import Index, Position
from dledger_core.record import index_records
from dledger_core.storage.check.recovery import batch_ends, missing_head, wrong_sizes
from dledger_core.storage.check.scan import Cursor, Run, Scanner, Stop, StopKind
from dledger_core.storage.files.checkpoint import Checkpoint
from dledger_core.storage.files.index_file import IndexSource, agreement, contradiction
from dledger_core.storage.files.log_info import LogMeta
from dledger_core.storage.read.record_reader import RecordReader

__all__ = ["Finding", "FindingKind", "StoreReport", "record_behind", "verify_store"]

FindingKind = Literal["CORRUPT", "INDEX_MISMATCH", "TERM_REGRESSION", "INDEX_GAP", "TORN_TAIL", "FOREIGN_FILE"]
_SYNC_ROWS: Final = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a store.

    Attributes:
        kind: ``CORRUPT`` a record is damaged or missing; ``INDEX_MISMATCH`` the index does not say what the data says
            (harmless, recovery rewrites it); ``TERM_REGRESSION`` a term below the one before; ``INDEX_GAP`` indexes
            are missing; ``TORN_TAIL`` bytes behind the last whole batch, which recovery would cut; ``FOREIGN_FILE``
            something that no store of ours holds.
        severity: ``error`` or ``warning``.
        start: first index concerned.
        end: index behind the last one concerned.
        path: the file.
        position: where in the data.
        message: what is wrong, for people.
    """

    kind: FindingKind
    severity: Literal["error", "warning"]
    start: Index
    end: Index
    path: str
    position: Position
    message: str


@dataclass(frozen=True, slots=True)
class StoreReport:
    """What ``verify`` found.

    Attributes:
        first_index: the first entry held.
        last_index: the last valid entry; ``first_index - 1`` if there is none.
        findings: everything wrong, in log order.
    """

    first_index: Index
    last_index: Index
    findings: tuple[Finding, ...]


def record_behind(reader: RecordReader, index: IndexSource, stop: Stop, at: int) -> Cursor | None:
    """Returns the next record behind a bad one that fits its index, or None.

    Args:
        reader: the store.
        index: its index as it lies on disk.
        stop: where the bad one lies.
        at: its index.
    """
    position = stop.cursor.position
    rows = index.read(at, at + _SYNC_ROWS)
    candidates = [(at + 1, position + stop.size)] if stop.size else []
    own_row = rows[0]
    if int(own_row["index"]) == at and int(own_row["position"]) == position:
        candidates.append((at + 1, position + int(own_row["size"])))
    known = np.flatnonzero((rows["index"] == np.arange(at, at + len(rows))) & (rows["position"] > position))
    candidates += [(at + row, int(rows["position"][row])) for row in known.tolist()]
    for expected, place in candidates:
        header = reader.header_at(place)
        if header is not None and header.index == expected:
            return Cursor(place, expected, header.term)
    for base in reader.data.bases:
        header = reader.header_at(base) if base > position else None
        if header is not None and header.index > at:
            return Cursor(base, header.index, header.term)
    return None


class _Verifier:
    def __init__(
        self, reader: RecordReader, index: IndexSource, checkpoint: Checkpoint | None, meta: LogMeta | None
    ) -> None:
        self.reader = reader
        self.data = reader.data
        self.index = index
        self.checkpoint = checkpoint
        self.meta = meta
        self.findings: list[Finding] = []
        self.first: int | None = None
        self.end = 0
        self.end_position = 0
        self.whole_end = 0
        self.whole_position = 0
        self.highest_term = 0
        self.needs_recheck: Stop | None = None

    def run(self, first_index: int) -> StoreReport:
        self.end = self.whole_end = first_index
        if self.meta is not None:
            self._check_head(self.meta, first_index)
        self._check_sizes(first_index)
        cursor = self._begin()
        while cursor is not None:
            scanner = Scanner(self.data, self.index, self.reader.rules, cursor)
            for run in scanner.runs():
                self._see(run)
            stop = scanner.stop or Stop(StopKind.END, scanner.cursor)
            cursor = self._pass(stop)
            if cursor is None:
                self._finish(stop.cursor.position, stop.kind)
        self._check_covered()
        first = first_index if self.first is None else self.first
        findings = tuple(sorted(self.findings, key=lambda finding: (finding.position, finding.start)))
        return StoreReport(Index(first), Index(self.whole_end - 1), findings)

    def _begin(self) -> Cursor | None:
        if not self.data.bases:
            return None
        base, meta = self.data.bases[0], self.meta
        return Cursor(base, meta.first_index if meta is not None and base == meta.first_position else None)

    def _check_head(self, meta: LogMeta, first_index: int) -> None:
        """Reports lost first files, which recovery refuses before it looks at records."""
        lost = missing_head(self.data, meta)
        if lost is not None:
            end = max(first_index, meta.first_index + 1)
            self._report("CORRUPT", meta.first_index, end, lost, "data files at the log's beginning are missing")

    def _check_sizes(self, first_index: int) -> None:
        """Reports files of a wrong size, which recovery refuses as well; Java's refuses the last one too."""
        data, whole = self.data, self.data.segment_bytes
        wrong = list(wrong_sizes(data))
        if self.meta is None:
            wrong += [(base, size) for base in data.bases[-1:] if (size := data.size_of(base)) < whole]
        for base, size in wrong:
            header = self.reader.header_at(base)
            index = first_index if header is None else header.index
            message = f"the file has {size} bytes instead of {whole}"
            self._report("CORRUPT", index, index, base + min(size, whole - 1), message)

    def _see(self, run: Run) -> None:
        """Takes note of valid records."""
        if self.needs_recheck is not None and run.last_term >= self.highest_term:
            self._recheck()
        if self.first is None:
            self.first = run.first_index
        if self.needs_recheck is None:
            self.highest_term = max(self.highest_term, run.last_term)
            self.end, self.end_position = run.end_index, run.end_position
            ends = batch_ends(run.records)
            if len(ends):
                at = int(ends[-1])
                self.whole_end = run.first_index + at + 1
                self.whole_position = int(run.positions[at]) + int(run.records.sizes[at])
        expected = index_records(run.records)
        expected["position"] = run.positions
        rows = self.index.read(run.first_index, run.end_index)
        wrong = ~agreement(rows, expected, magic=self.meta is not None)
        if bool(wrong.any()):
            durable = self.checkpoint.durable_index if self.checkpoint is not None and self.meta is not None else -1
            doubted = wrong & contradiction(rows, expected) & (expected["index"] <= durable)
            for at in np.flatnonzero(doubted).tolist():
                index = run.first_index + at
                self._report("CORRUPT", index, index + 1, int(run.positions[at]), StopKind.WITNESS.value)
            self._index_mismatch(run, np.flatnonzero(wrong & ~doubted))

    def _recheck(self) -> None:
        """The log goes on behind records of a lower term: they are part of it, and wrong."""
        if self.needs_recheck is not None:
            index = self.needs_recheck.cursor.index or 0
            self._report("TERM_REGRESSION", index, index + 1, self.needs_recheck.cursor.position, StopKind.TERM.value)
        self.needs_recheck = None

    def _index_mismatch(self, run: Run, wrong: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        if not len(wrong):
            return
        for piece in np.split(wrong, np.flatnonzero(np.diff(wrong) > 1) + 1):
            start, end = run.first_index + int(piece[0]), run.first_index + int(piece[-1]) + 1
            position = int(run.positions[int(piece[0])])
            self._report("INDEX_MISMATCH", start, end, position, "the index does not say what the data says")

    def _report(self, kind: FindingKind, start: int, end: int, position: int, message: str) -> None:
        last = next((f for f in reversed(self.findings) if f.kind == kind), None)
        if last is not None and last.end == start and last.message == message:
            self.findings[self.findings.index(last)] = replace(last, end=Index(end))
            return
        severity: Literal["error", "warning"] = "warning" if kind in ("INDEX_MISMATCH", "TORN_TAIL") else "error"
        path = self._index_path(start) if kind == "INDEX_MISMATCH" else self.data.path(position)
        self.findings.append(Finding(kind, severity, Index(start), Index(end), str(path), Position(position), message))

    def _index_path(self, start: int) -> Path:
        segments = getattr(self.index, "segments", self.data)
        found: Path = segments.path(start * 32)
        return found

    def _pass(self, stop: Stop) -> Cursor | None:
        """Reports why a scan stopped and returns where to go on, or None at the end."""
        cursor = stop.cursor
        index = self.end if cursor.index is None else cursor.index
        if stop.kind is StopKind.TERM and self.needs_recheck is None:
            if not self._blame_record_before(index):
                self.needs_recheck = stop
            return Cursor(cursor.position, index)
        if stop.kind is StopKind.TERM:
            return Cursor(cursor.position, index)
        if stop.kind is StopKind.INDEX:
            return self._pass_wrong_index(cursor, index)
        if self.data.written_end(cursor.position) == cursor.position:
            return None
        onward = record_behind(self.reader, self.index, stop, index)
        if onward is None or onward.index is None:
            return None
        kind = stop.kind if stop.kind is not StopKind.END else StopKind.HEADER
        self._report("CORRUPT", index, max(onward.index, index + 1), cursor.position, kind.value)
        return Cursor(onward.position, onward.index)

    def _pass_wrong_index(self, cursor: Cursor, index: int) -> Cursor | None:
        """Tells a record whose index is damaged, by the record behind it, from entries that are missing."""
        header = self.reader.header_at(cursor.position)
        if header is None:
            return None
        rows = self.index.read(index, index + 2)
        own = (int(rows[0]["index"]), int(rows[0]["position"]), int(rows[0]["size"]))
        behind = self.reader.header_at(cursor.position + header.size)
        if own == (index, cursor.position, header.size) and (behind is None or behind.index != header.index + 1):
            self._report("CORRUPT", index, index + 1, cursor.position, StopKind.INDEX.value)
            return Cursor(cursor.position + header.size, index + 1, cursor.term)
        for at in (cursor.position + header.size, int(rows[1]["position"])):
            following = self.reader.header_at(at) if at > cursor.position else None
            if following is not None and following.index == index + 1:
                self._report("CORRUPT", index, index + 1, cursor.position, StopKind.INDEX.value)
                return Cursor(at, index + 1, cursor.term)
        if header.index > index:
            self._report("INDEX_GAP", index, header.index, cursor.position, "entries are missing")
            return Cursor(cursor.position, header.index, cursor.term)
        return None

    def _blame_record_before(self, index: int) -> bool:
        """Whether a term falls because the record before has a damaged one: then the index has it lower."""
        if any((found.kind, found.end) == ("CORRUPT", index) for found in self.findings[-1:]):
            self.highest_term = 0  # its index row has said already that the record before is wrong
            return True
        row = self.index.read(index - 1, index)[0] if index else None
        header = self.reader.header_at(int(row["position"])) if row is not None else None
        if row is None or header is None or not (header.index == int(row["index"]) == index - 1):
            return False
        if int(row["term"]) >= header.term:
            return False
        message = "the record's term fits neither the index nor what follows"
        self._report("CORRUPT", index - 1, index, int(row["position"]), message)
        self.highest_term = int(row["term"])
        return True

    def _finish(self, position: int, kind: StopKind) -> None:
        """Judges what lies behind the last valid record."""
        if self.needs_recheck is not None:
            position, kind = self.needs_recheck.cursor.position, StopKind.TERM
        start = position if self.whole_end == self.end else self.whole_position
        behind = self.data.written_end(start) - start
        blank = self.data.read(start, 4) == b"\xff\xff\xff\xff" if self.data.holds(start) else False
        if behind > 0 and not blank and not self._is_covered(start):
            message = f"{behind} bytes behind the last whole batch ({kind.value})"
            self._report("TORN_TAIL", self.whole_end, max(self.end, self.whole_end + 1), start, message)

    def _is_covered(self, position: int) -> bool:
        return self.checkpoint is not None and position < self.checkpoint.position

    def _check_covered(self) -> None:
        if self.checkpoint is None or self.checkpoint.durable_index < self.whole_end:
            return
        self.whole_end = max(self.end, self.whole_end)  # part of a batch, but of a durable one
        end = self.checkpoint.durable_index + 1
        if end > self.end:
            self._report("CORRUPT", self.end, end, self.end_position, "durable entries are damaged or missing")


def verify_store(
    reader: RecordReader,
    index: IndexSource,
    first_index: int,
    checkpoint: Checkpoint | None,
    meta: LogMeta | None,
) -> StoreReport:
    """Scans a store from its first record to its last.

    Args:
        reader: the store.
        index: its index as it lies on disk.
        first_index: what an empty store begins with.
        checkpoint: what is vouched for, or None.
        meta: the identity of a store of ours; None where Java wrote it.
    """
    return _Verifier(reader, index, checkpoint, meta).run(first_index)

"""Read a complete store and report everything that is wrong with it, changing nothing.

Unlike recovery it continues after a bad record: by its size, by the index, or at the next segment. Data after the last
good record is judged like in recovery, with the default limit on unsynced bytes. In Java's stores it is a torn tail, or
remains of a truncation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np

from dledger_core.config import RECORD_BYTES_MAX, StorageConfig
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import NO_INDEX, Index, Position
from dledger_core.record import INDEX_RECORD_BYTES, MAGIC_BLANK, PREFIX, index_records, is_segment_name
from dledger_core.storage.check.coverage import NOTHING, Coverage, Inspection, OpaqueInspection, Remark
from dledger_core.storage.check.damage import next_record
from dledger_core.storage.check.judge import Fault, ScanCursor, ScanStop, Verdict, complete_end, verdict
from dledger_core.storage.check.recovery import missing_start, wrong_sizes
from dledger_core.storage.check.scan import RecordBlock, Scanner
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.identity import load_identity
from dledger_core.storage.files.index_file import IndexFile, agreement, contradiction
from dledger_core.storage.files.layout import Layout, LogMeta, lacks_identity
from dledger_core.storage.files.members_file import members_file
from dledger_core.storage.files.meta_files import Checkpoint, load_hard_state
from dledger_core.storage.files.segments import read_failure
from dledger_core.storage.read.log_queries import place_of
from dledger_core.storage.read.record_reader import RecordReader
from dledger_core.storage.tables.tables import load_tables

FindingKind = Literal[
    "CORRUPT", "INDEX_MISMATCH", "TERM_REGRESSION", "INDEX_GAP", "TORN_TAIL", "MISSING", "FOREIGN_FILE"
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing wrong with a store.

    Attributes:
        kind: ``CORRUPT`` a record is damaged or missing; ``INDEX_MISMATCH`` an index row differs from its record
            (harmless, recovery rewrites it); ``TERM_REGRESSION`` a term below the previous one; ``INDEX_GAP`` indexes
            are missing; ``TORN_TAIL`` bytes after the last complete batch, which recovery would truncate;
            ``MISSING`` the index of a Java store names entries after the last one, and the data has none there;
            ``FOREIGN_FILE`` an unexpected file.
        severity: ``error`` or ``warning``.
        start: first index concerned.
        end: end (exclusive) of the indexes concerned.
        path: the file.
        position: position in the data.
        message: the fault, human-readable.
        topic: of a damaged message, if it can be read.
        key: of a damaged message, if it has one.
    """

    kind: FindingKind
    severity: Literal["error", "warning"]
    start: Index
    end: Index
    path: str
    position: Position
    message: str
    topic: str | None = None
    key: str | None = None


@dataclass(frozen=True, slots=True)
class StoreReport:
    """Result of ``verify``.

    Attributes:
        first_index: the first entry.
        last_index: the last good entry; ``first_index - 1`` if there is none.
        findings: everything wrong, in log order.
        deleted: entries [start, end) that retention deleted before they could be checked; None = none.
        coverage: how much of the bodies of good records any check covers.
        remarks: something unusual that is not damage.
    """

    first_index: Index
    last_index: Index
    findings: tuple[Finding, ...]
    deleted: tuple[Index, Index] | None = None
    coverage: Coverage = NOTHING
    remarks: tuple[Remark, ...] = ()


class _Verifier:
    def __init__(
        self, reader: RecordReader, index: IndexFile, checkpoint: Checkpoint | None, meta: LogMeta | None
    ) -> None:
        self.reader = reader
        self.data = reader.data
        self.index = index
        self.checkpoint = checkpoint
        self.meta = meta
        self.inspection: Inspection = OpaqueInspection() if reader.bodies is None else reader.bodies.inspection()
        self.findings: list[Finding] = []
        self.first: int | None = None
        self.end = 0
        self.end_position = 0
        self.written_end = 0
        self.complete_end = 0
        self.complete_position = 0
        self.highest_term = 0
        self.needs_recheck: ScanStop | None = None

    def run(self, first_index: int) -> StoreReport:
        self.end = self.complete_end = first_index
        if self.meta is not None:
            self._check_start(self.meta, first_index)
        self._check_sizes(first_index)
        cursor = self._first(first_index)
        while cursor is not None:
            scanner = Scanner(self.data, self.index, self.reader.rules, cursor)
            try:
                for block in scanner.blocks():
                    self._add(block)
            except CorruptRecordError as error:
                cursor = self._pass_unreadable(scanner.cursor, error)
                continue
            stop = scanner.stop or ScanStop(Fault.END, scanner.cursor)
            cursor = self._pass(stop)
            if cursor is None:
                self._finish(stop)
        self._check_covered()
        first = first_index if self.first is None else self.first
        findings = tuple(sorted(self.findings, key=lambda finding: (finding.position, finding.start)))
        seen = self.inspection
        last = Index(self.complete_end - 1)
        return StoreReport(Index(first), last, findings, coverage=seen.coverage, remarks=seen.remarks())

    def _first(self, first_index: int) -> ScanCursor | None:
        if not self.data.bases:
            return None
        base, meta = self.data.bases[0], self.meta
        known = meta is None or base == meta.first_position
        return ScanCursor(base, first_index if known else None)

    def _check_start(self, meta: LogMeta, first_index: int) -> None:
        """Report missing first files, which recovery rejects before it reads records."""
        lost = missing_start(self.data, meta)
        if lost is not None:
            end = max(first_index, meta.first_index + 1)
            self._report("CORRUPT", meta.first_index, end, lost, "data files at the start of the log are missing")

    def _check_sizes(self, first_index: int) -> None:
        """Report files of a wrong size, which recovery rejects as well; Java's rejects the last one too."""
        data, full = self.data, self.data.segment_bytes
        wrong = list(wrong_sizes(data))
        if self.meta is None:
            wrong += [(base, size) for base in data.bases[-1:] if (size := data.size_of(base)) < full]
        for base, size in wrong:
            header = self.reader.header_at(base)
            index = first_index if header is None else header.index
            message = f"the file has {size} bytes instead of {full}"
            self._report("CORRUPT", index, index, base + min(size, full - 1), message)

    def _add(self, block: RecordBlock) -> None:
        """Record good records and compare their index rows."""
        if self.needs_recheck is not None and block.last_term >= self.highest_term:
            self._recheck()
        if self.first is None:
            self.first = block.first_index
        # After a falling term the end of the log is open: the records after it may be remains of an older log.
        if self.needs_recheck is None:
            self.highest_term = max(self.highest_term, block.last_term)
            self.end, self.end_position = block.end_index, block.end_position
            at = complete_end(block.records)
            if at is not None:
                self.complete_end = block.first_index + at + 1
                self.complete_position = int(block.positions[at]) + int(block.records.sizes[at])
        self._check_bodies(block)
        expected = index_records(block.records)
        expected["position"] = block.positions
        rows = self.index.read(block.first_index, block.end_index)
        wrong = ~agreement(rows, expected, magic=self.meta is not None)
        if bool(wrong.any()):
            durable = self.checkpoint.durable_index if self.checkpoint is not None and self.meta is not None else -1
            # Below the checkpoint the row was durable, so one of the two is damaged. Later rows are written again at
            # the next start.
            contradicted = wrong & contradiction(rows, expected) & (expected["index"] <= durable)
            for at in np.flatnonzero(contradicted).tolist():
                index = block.first_index + at
                self._report("CORRUPT", index, index + 1, int(block.positions[at]), Fault.ROW.value)
            self._index_mismatch(block, np.flatnonzero(wrong & ~contradicted))

    def _check_bodies(self, block: RecordBlock) -> None:
        """Report damaged messages in good records, and inspect all bodies."""
        bodies, good = self.reader.bodies, np.ones(block.records.count, np.bool_)
        if bodies is not None:
            good[bodies.damaged(block.records)] = False
        self.inspection.add(block.records, block.positions, good)
        if bodies is None:
            return
        for row in np.flatnonzero(~good).tolist():
            index, position = block.first_index + row, int(block.positions[row])
            message = f"{Fault.MESSAGE.value}: {bodies.fault(block.records, row)}"
            named = bodies.describe(block.records, row)
            self._report("CORRUPT", index, index + 1, position, message, **named)

    def _recheck(self) -> None:
        """Report records of a lower term after which the log continues: they belong to it, and are wrong."""
        if self.needs_recheck is not None:
            index = self.needs_recheck.cursor.index or 0
            self._report("TERM_REGRESSION", index, index + 1, self.needs_recheck.cursor.position, Fault.TERM.value)
        self.needs_recheck = None

    def _index_mismatch(self, block: RecordBlock, wrong: np.ndarray[tuple[int], np.dtype[np.int64]]) -> None:
        if not len(wrong):
            return
        for part in np.split(wrong, np.flatnonzero(np.diff(wrong) > 1) + 1):
            start, end = block.first_index + int(part[0]), block.first_index + int(part[-1]) + 1
            position = int(block.positions[int(part[0])])
            self._report("INDEX_MISMATCH", start, end, position, "index rows differ from their records")

    def _report(self, kind: FindingKind, start: int, end: int, position: int, message: str, **named: str) -> None:
        last = next((f for f in reversed(self.findings) if f.kind == kind), None)
        if last is not None and last.end == start and last.message == message and not named:
            self.findings[self.findings.index(last)] = replace(last, end=Index(end))
            return
        severity: Literal["error", "warning"] = "warning" if kind in ("INDEX_MISMATCH", "TORN_TAIL") else "error"
        path = self._index_path(start) if kind == "INDEX_MISMATCH" else self.data.path(position)
        self.findings.append(
            Finding(kind, severity, Index(start), Index(end), str(path), Position(position), message, **named)
        )

    def _index_path(self, start: int) -> Path:
        return self.index.segments.path(start * INDEX_RECORD_BYTES)

    def _pass(self, stop: ScanStop) -> ScanCursor | None:
        """Report why a scan stopped and return where to continue, or None at the end."""
        cursor = stop.cursor
        index = self.end if cursor.index is None else cursor.index
        # Whether the record of the lower term belongs to the log shows only after it: if terms rise again, it does.
        if stop.fault is Fault.TERM and self.needs_recheck is None:
            if not self._blame_record_before(index):
                self.needs_recheck = stop
            return ScanCursor(cursor.position, index)
        if stop.fault is Fault.TERM:
            return ScanCursor(cursor.position, index)
        if stop.fault is Fault.INDEX:
            return self._pass_wrong_index(cursor, index)
        if self._written_end(cursor.position) == cursor.position:
            return None
        onward = next_record(self.reader, self.index, stop, index)
        if onward is None or onward.index is None:
            return None
        self._report("CORRUPT", index, max(onward.index, index + 1), cursor.position, stop.damage.value)
        return ScanCursor(onward.position, onward.index)

    def _pass_unreadable(self, cursor: ScanCursor, error: CorruptRecordError) -> ScanCursor | None:
        """Report bytes that the disk cannot read, and return where to continue.

        Raises:
            CorruptRecordError: the file no longer exists.
        """
        # Retention of a running node has deleted the file, which is not damage.
        if isinstance(read_failure(error), FileNotFoundError):
            raise error
        index, position = self.end if cursor.index is None else cursor.index, cursor.position
        with contextlib.suppress(CorruptRecordError):  # the entries before those bytes, one by one
            while position < cursor.position + RECORD_BYTES_MAX:
                block = RecordBlock(index, place_of(self.reader, index)[0], self.reader.read(index, index + 1, 1))
                self._add(block)
                index, position = block.end_index, block.end_position
            return ScanCursor(position, index)
        onward = next_record(self.reader, self.index, ScanStop(Fault.BODY, ScanCursor(position, index)), index)
        end = index + 1 if onward is None or onward.index is None else max(onward.index, index + 1)
        self._report("CORRUPT", index, end, position, error.what)
        return None if onward is None else ScanCursor(onward.position, end)

    def _pass_wrong_index(self, cursor: ScanCursor, index: int) -> ScanCursor | None:
        """Distinguish a damaged index, by the record after it, from missing entries."""
        header = self.reader.header_at(cursor.position)
        if header is None:
            return None
        rows = self.index.read(index, index + 2)
        # The row and the next record decide: a flipped bit in one index must not be reported as a gap of missing
        # entries.
        own = (int(rows[0]["index"]), int(rows[0]["position"]), int(rows[0]["size"]))
        after = self.reader.header_at(cursor.position + header.size)
        if own == (index, cursor.position, header.size) and (after is None or after.index != header.index + 1):
            self._report("CORRUPT", index, index + 1, cursor.position, Fault.INDEX.value)
            return ScanCursor(cursor.position + header.size, index + 1, cursor.term)
        # If the next entry follows by either size, this one is there and only its own index is wrong.
        for at in (cursor.position + header.size, int(rows[1]["position"])):
            following = self.reader.header_at(at) if at > cursor.position else None
            if following is not None and following.index == index + 1:
                self._report("CORRUPT", index, index + 1, cursor.position, Fault.INDEX.value)
                return ScanCursor(at, index + 1, cursor.term)
        if header.index > index:
            self._report("INDEX_GAP", index, header.index, cursor.position, "entries are missing")
            return ScanCursor(cursor.position, header.index, cursor.term)
        return None

    def _blame_record_before(self, index: int) -> bool:
        """Whether a term falls because the record before has a damaged one: then its row has a lower one."""
        if any((found.kind, found.end) == ("CORRUPT", index) for found in self.findings[-1:]):
            self.highest_term = 0  # its index row has shown already that the record before is wrong
            return True
        row = self.index.read(index - 1, index)[0] if index else None
        header = self.reader.header_at(int(row["position"])) if row is not None else None
        if row is None or header is None or not (header.index == int(row["index"]) == index - 1):
            return False
        if int(row["term"]) >= header.term:
            return False
        message = "the record's term fits neither its index row nor the next record"
        self._report("CORRUPT", index - 1, index, int(row["position"]), message)
        self.highest_term = int(row["term"])
        return True

    def _finish(self, stop: ScanStop) -> None:
        """Judge the data after the last good record."""
        if self.needs_recheck is not None:
            stop = self.needs_recheck
        start = stop.cursor.position if self.complete_end == self.end else self.complete_position
        written_end = self._written_end(start)
        if written_end == start or self._is_blank(start):
            return
        covered_end = self.checkpoint.position if self.checkpoint is not None else 0
        found = verdict(
            start if start < covered_end else stop.cursor.position,
            covered_end=covered_end,
            written_end=written_end,
            unsynced_bytes_max=None if self.meta is None else StorageConfig().unsynced_bytes_max,
        )
        end = max(self.end, self.complete_end + 1)
        # A warning only: the next start truncates it, and nothing acknowledged is in it
        # (test_verify_reports_a_torn_tail_as_a_warning).
        if found is Verdict.TORN:
            message = f"{written_end - start} bytes after the last complete batch ({stop.fault.value})"
            self._report("TORN_TAIL", self.complete_end, end, start, message)
        elif start >= covered_end:  # else ``_check_covered`` reports it
            self._report("CORRUPT", self.complete_end, end, start, stop.damage.value)

    def _written_end(self, position: int) -> int:
        """Return ``Segments.written_end``; a scan that stops often reads the rest of the files once."""
        end = self.written_end if self.written_end > position else self.data.written_end(position)
        if end > position:
            self.written_end = end
        return end

    def _is_blank(self, position: int) -> bool:
        prefix = self.data.read(position, PREFIX.size) if self.data.covers(position) else b""
        return len(prefix) == PREFIX.size and PREFIX.unpack(prefix)[0] == MAGIC_BLANK

    def _check_covered(self) -> None:
        if self.checkpoint is None or self.checkpoint.durable_index < self.complete_end:
            return
        self.complete_end = max(self.end, self.complete_end)  # a part of a batch, but of a durable one
        end = self.checkpoint.durable_index + 1
        if end > self.end:
            self._report("CORRUPT", self.end, end, self.end_position, "durable entries are damaged or missing")


def verify_store(
    reader: RecordReader,
    index: IndexFile,
    first_index: int,
    checkpoint: Checkpoint | None,
    meta: LogMeta | None,
) -> StoreReport:
    """Scan a store from its first record to its last.

    Args:
        reader: the store.
        index: its index as stored on disk.
        first_index: first index of an empty store.
        checkpoint: covers the durable entries; None = none is known.
        meta: the identity of a native store; None if Java wrote it.
    """
    return _Verifier(reader, index, checkpoint, meta).run(first_index)


def start_findings(
    files: Files, layout: Layout, meta: LogMeta | None, *, last_index: int, last_term: int
) -> Iterator[Finding]:
    """Yield problems other than records for which ``CommitLog.open`` would reject the store.

    Args:
        files: the file system.
        layout: the store.
        meta: its identity, or None; no node starts on one of Java's, which has no such problem.
        last_index: the log's last entry.
        last_term: the term of that entry; 0 if there is none.
    """
    end = Index(last_index + 1)
    if meta is None:
        if lacks_identity(files, layout):
            message = "the file is missing; the store was read as if Java had written it"
            yield Finding("CORRUPT", "error", end, end, str(layout.log_meta), Position(0), message)
        return
    for directory in (layout.data, layout.index):
        for name in files.listdir(directory) or ():
            if not is_segment_name(name):
                message = "unexpected file; move it out of the store"
                yield Finding("FOREIGN_FILE", "error", end, end, str(directory / name), Position(0), message)
    if last_index != NO_INDEX and members_file(layout).load(files).value is None:
        message = "both copies of the file are missing or damaged; the node starts as a recovering voter"
        yield Finding("CORRUPT", "error", end, end, str(layout.members), Position(0), message)
    for load in (
        lambda: _check_hard_state(files, layout, last_term or meta.previous_term or 0),
        lambda: load_tables(files, layout, meta),
    ):
        try:
            load()
        except CorruptRecordError as error:
            yield Finding("CORRUPT", "error", end, end, error.where, Position(0), error.what)


def _check_hard_state(files: Files, layout: Layout, last_term: int) -> None:
    """Raise CorruptRecordError if a store that may vote has lost its vote; one that retired its log never votes."""
    # A store that retired its log never votes in it, so it may have lost its vote.
    identity = load_identity(files, layout)
    if identity.recovery is None or identity.is_member:
        load_hard_state(files, layout, last_term)

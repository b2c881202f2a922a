"""``open_store``: read-only access to a node's store, native or Java's of both generations, online or offline.

No lock is taken and nothing is written, so it works on a running broker's own directory. A native log ends at its last
complete batch. A log of Java's ends at its last complete record: Java's recovery would end it at the first bad one and
delete the rest, but what follows can still be read here. The view is fixed when the store is opened; open it again to
see more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from dledger_core.config import DATA_SEGMENT_BYTES, INDEX_SEGMENT_BYTES
from dledger_core.continuation import Chain
from dledger_core.errors import BadRequestError, CorruptRecordError, StoreIncompleteError, StoreMismatchError
from dledger_core.ids import GroupName, Index, NodeId, Position
from dledger_core.raft.batch import TermRange
from dledger_core.record import (
    DESCRIPTIONS,
    HEADER_BYTES,
    INDEX_RECORD_BYTES,
    MAGIC_DATA,
    READ_SCHEMA,
    Fetch,
    Isolation,
    Records,
    append_times,
    data_entries,
    description_batch,
    empty_batch,
    index_records,
    is_segment_name,
    to_arrow,
)
from dledger_core.storage.check.damage import next_record
from dledger_core.storage.check.judge import (
    JAVA_A,
    JAVA_B,
    BodyFormat,
    Fault,
    Rules,
    ScanCursor,
    ScanStop,
    complete_end,
    native_rules,
)
from dledger_core.storage.check.recovery import missing_start
from dledger_core.storage.check.scan import Scanner
from dledger_core.storage.check.verify import Finding, StoreReport, start_findings, verify_store
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.index_file import IndexFile, OverlaidIndex, agreement, term_ranges
from dledger_core.storage.files.layout import Layout, LogMeta, check_complete, lacks_identity, load_log_meta
from dledger_core.storage.files.meta_files import Checkpoint, load_checkpoint, read_properties
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.log_queries import (
    control_entries,
    index_at_position,
    index_at_time,
    place_of,
    producer_rows,
    segment_rows,
    segment_summaries,
    term_rows,
    transaction_rows,
)
from dledger_core.storage.read.record_reader import RecordReader, out_of_range
from dledger_core.storage.read.visibility import Outcomes, Until, Visibility
from dledger_core.storage.tables.tables import LogTables, load_tables

READ_BYTES: Final = 8 << 20
_TAIL_SEGMENTS: Final = 3
_TAIL_BYTES: Final = 1 << 30
"""Java recovers its last three files. Where files are as large as its default, two contain all that it can have had in
memory only, and reading a third takes a second.
"""
_MISSING_ROWS: Final = 1024
_OPEN_ATTEMPTS: Final = 4
"""Retention may delete files between the listing of a directory and the first read."""
_SAMPLE: Final = 8
_FIRST_ROWS: Final = 1 << 16
_TIME_MAX: Final = 1 << 47


@dataclass(frozen=True, slots=True)
class Gap:
    """Entries of which a store has no data, because files between others are missing.

    Attributes:
        start: the first one.
        end: end (exclusive).
        position: of the first missing file.
        end_position: of the file after the missing ones.
        path: the first missing file.
        since: append or store time of the entry before them; None if unknown.
        until: time of the entry after them.
    """

    start: Index
    end: Index
    position: Position
    end_position: Position
    path: Path
    since: datetime | None = None
    until: datetime | None = None

    @property
    def message(self) -> str:
        """The gap as a statement."""
        return missing_files(self.position, self.end_position, self.since, self.until)

    @property
    def error(self) -> CorruptRecordError:
        """The gap as an error."""
        values = {"index": int(self.start), "end": int(self.end), "position": int(self.position)}
        remedy = "restore the file, copy the store of a replica, or repair the store from a peer"
        return CorruptRecordError(self.message, str(self.path), remedy, values)


def missing_files(position: int, end: int, since: datetime | None, until: datetime | None) -> str:
    """Return the statement about missing files: their positions, and the times of the entries around them."""
    between = [
        f"{name} {time.isoformat(timespec='seconds')}" for name, time in (("after", since), ("before", until)) if time
    ]
    times = f"; their entries were written {' and '.join(between)}" if between else ""
    return f"the files of positions {position} to {end - 1} are missing{times}"


@dataclass(frozen=True, slots=True)
class _Origin:
    """Writer and recorded state of a store."""

    writer: Literal["dledger-python", "java-a", "java-b"]
    meta: LogMeta | None
    checkpoint: Checkpoint | None
    java_commit_index: int | None

    @property
    def rules(self) -> Rules:
        if self.meta is not None:
            # Only committed entries: the others may be overwritten while this view stays open.
            committed = self.checkpoint.commit_index if self.checkpoint is not None else -1
            return replace(native_rules(self.meta), cross_checked_to=committed + 1)
        return JAVA_A if self.writer == "java-a" else JAVA_B


def _origin(files: Files, layout: Layout) -> _Origin:
    meta = load_log_meta(files, layout.log_meta)
    if meta is not None:
        return _Origin("dledger-python", meta, load_checkpoint(files, layout.checkpoint), None)
    pairs = read_properties(files, layout.root / "checkpoint")
    if pairs is None:
        return _Origin("java-b", None, None, None)
    text = pairs.get("committedIndex", "")
    return _Origin("java-a", None, None, int(text) if re.fullmatch("-1|[0-9]{1,18}", text, re.ASCII) else None)


def _segment_bytes(files: Files, directory: Path, recorded: int | None, default: int) -> int:
    """Return the size of the files in a directory: as recorded, or of the first two files; the last may differ."""
    if recorded is not None:
        return recorded
    return max((files.open(directory / name).size() for name in _names(files, directory)[:2]), default=0) or default


def _names(files: Files, directory: Path) -> list[str]:
    return sorted(name for name in files.listdir(directory) or () if is_segment_name(name))


def _check_directory(files: Files, layout: Layout) -> None:
    """Raise if a directory without identity has no ``data/`` or no data files in it."""
    names = files.listdir(layout.data)
    found = "there is no data/" if names is None else f"data/ contains {names[0]!r}" if names else ""
    if found and not any(map(is_segment_name, names or ())):
        raise StoreMismatchError(
            f"no store found ({found})", str(layout.root), "name the directory that contains data/ and index/"
        )


def open_store(
    path: Path | str,
    *,
    bodies: BodyFormat | None = None,
    files: Files | None = None,
    since: StoreReader | None = None,
) -> StoreReader:
    """Open a node's store for reading.

    Args:
        path: the directory that contains ``data/`` and ``index/``.
        bodies: the format of bodies that are checked and decoded; None = all are opaque.
        files: the file system.
        since: an earlier view of the same store, whose tail need not be scanned again. It does not change.

    Raises:
        StoreMismatchError: there is no store.
        StoreIncompleteError: a conversion into it, or a snapshot install, is not finished.
    """
    files, layout = files or OsFiles(), Layout(Path(path))
    for _ in range(_OPEN_ATTEMPTS):
        names = _names(files, layout.data)
        try:
            opened = _open(files, layout, bodies, since)
        except (FileNotFoundError, CorruptRecordError):
            if _names(files, layout.data) == names:
                raise
        else:
            if not opened.gaps or _names(files, layout.data) == names:
                return opened
            opened.close()
    return _open(files, layout, bodies, since)


def _open(files: Files, layout: Layout, bodies: BodyFormat | None, since: StoreReader | None) -> StoreReader:
    check_complete(files, layout)
    origin = _origin(files, layout)
    if origin.meta is None:
        _check_directory(files, layout)
    meta = origin.meta
    if meta is not None and meta.discarding:
        raise StoreIncompleteError(
            "a snapshot install of the store was interrupted",
            str(layout.root),
            "start its node: it completes the install",
        )
    data_bytes = _segment_bytes(files, layout.data, meta.data_segment_bytes if meta else None, DATA_SEGMENT_BYTES)
    index_bytes = _segment_bytes(files, layout.index, meta.index_segment_bytes if meta else None, INDEX_SEGMENT_BYTES)
    data = Segments.load(files, layout.data, data_bytes, gaps=True)
    index = Segments.load(files, layout.index, index_bytes, gaps=True)
    return StoreReader(files, layout, origin, data, IndexFile(index), bodies, since)


class StoreReader:
    """A read-only view of one store; made by ``open_store``. Reads are safe from any thread."""

    def __init__(
        self,
        files: Files,
        layout: Layout,
        origin: _Origin,
        data: Segments,
        index: IndexFile,
        bodies: BodyFormat | None = None,
        since: StoreReader | None = None,
    ) -> None:
        self._files = files
        self._layout = layout
        self._origin = origin
        self._disk_index = index
        self._index = OverlaidIndex(index)
        self._reader = RecordReader(data, self._index, origin.rules)
        self.first_index: Final = Index(self._find_first(origin.meta))
        # A view with damage is not continued: the damage may have been repaired meanwhile.
        continued = since if since is not None and self._continues(since) else None
        self._outcomes: Outcomes | None = None if continued is None else continued._outcomes
        self._visibility: dict[Until, Visibility] = {}
        seen = None if continued is None else continued._seen_end()
        self._damaged: list[tuple[Index, Index]] = []
        self.last_index: Final = Index(self._scan_tail(seen))
        if bodies is not None:
            self._reader.bodies = bodies if origin.meta is not None else self._format_of_log(bodies)

    def _format_of_log(self, bodies: BodyFormat) -> BodyFormat:
        """Return the format for the bodies of a Java log, by its first and last entries."""
        end = self.last_index + 1
        found = []
        for index in {*range(self.first_index, end)[:_SAMPLE], *range(self.first_index, end)[-_SAMPLE:]}:
            with contextlib.suppress(CorruptRecordError):
                found.append(self.records(index, index + 1))
        if not found:
            return bodies
        return bodies.of_log(Records(np.concatenate([one.sizes for one in found]), b"".join(one.data for one in found)))

    def _find_first(self, meta: LogMeta | None) -> int:
        """Return the first entry's index: as recorded, else from the first record."""
        if meta is not None and self._reader.data.bases[:1] == (meta.first_position,):
            return meta.first_index
        found = self._reader.first_record()
        if meta is not None:
            return meta.first_index if found is None else found[0]
        return self._first_by_index(found)

    def _first_by_index(self, found: tuple[int, int] | None) -> int:
        """Return the index of a Java log's first entry: as in its record, unless the row of its position has another.

        Neither has a CRC, but the rows after it show which rows continue each other.
        """
        bases, files = self._reader.data.bases, self._disk_index.segments.bases
        if not bases or not files:
            return 0 if found is None else found[0]
        position = bases[0] if found is None else found[1]
        if found is not None:
            row = self._disk_index.read(found[0], found[0] + 1)[0]
            if (int(row["index"]), int(row["position"])) == found and row["size"] >= HEADER_BYTES:
                return found[0]
        at = files[0] // INDEX_RECORD_BYTES
        end = (files[-1] + self._disk_index.segments.segment_bytes) // INDEX_RECORD_BYTES
        while at < end:
            rows = self._disk_index.read(at, at + _FIRST_ROWS)
            own = (rows["position"] == position) & (rows["index"] == np.arange(at, at + len(rows)))
            own &= rows["size"] >= HEADER_BYTES
            if bool(own.any()):
                return at + int(np.argmax(own))
            if not bool((rows["size"] > 0).any()):
                break
            at += _FIRST_ROWS
        return 0 if found is None else found[0]

    def __repr__(self) -> str:
        return f"StoreReader({str(self.path)!r}, {self.writer}, indexes {self.first_index} to {self.last_index})"

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self._layout.root

    @property
    def writer(self) -> Literal["dledger-python", "java-a", "java-b"]:
        """Program that writes the store: this one, or Java's generation A or B."""
        return self._origin.writer

    @property
    def commit_index(self) -> Index | None:
        """The recorded commit index, a lower bound; None if the store records none."""
        found = self.checkpoint_commit_index
        return None if found is None else Index(min(found, self.last_index))

    @property
    def identity_lost(self) -> bool:
        """Whether the store is native but has no ``meta/log.json``, so that it is read as if Java had written it."""
        return self._origin.meta is None and lacks_identity(self._files, self._layout)

    @property
    def checkpoint_commit_index(self) -> Index | None:
        """The last committed entry in the checkpoint; above ``last_index`` if the end is lost."""
        checkpoint, java = self._origin.checkpoint, self._origin.java_commit_index
        found = java if checkpoint is None else checkpoint.commit_index
        return None if found is None else Index(found)

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log; None in a store without one, like all of Java's."""
        return self._origin.meta.log_uuid if self._origin.meta is not None else None

    @property
    def chain(self) -> Chain:
        """The logs that the log continues, oldest first; Java's continue none."""
        return self._origin.meta.continues if self._origin.meta is not None else ()

    @property
    def group(self) -> GroupName | None:
        """The group; None in a store written by Java, which does not record it."""
        return GroupName(self._origin.meta.group) if self._origin.meta is not None else None

    @property
    def node_id(self) -> NodeId | None:
        """The node: recorded, or taken from the directory's name."""
        if self._origin.meta is not None:
            return NodeId(self._origin.meta.node_id)
        name = self._layout.root.resolve().name
        return NodeId(name.removeprefix("dledger-")) if name.startswith("dledger-") else None

    @property
    def meta(self) -> LogMeta | None:
        """Identity and constants of a native store; None in a store written by Java."""
        return self._origin.meta

    @property
    def segment_bytes(self) -> tuple[int, int]:
        """Sizes of the data files and of the index files."""
        return self._reader.data.segment_bytes, self._disk_index.segments.segment_bytes

    @property
    def position_end(self) -> int:
        """End of the last entry's record; the start of the files if there is none."""
        if self.last_index < self.first_index:
            return self._reader.data.bases[0] if self._reader.data.bases else 0
        return sum(self._place_of(self.last_index))

    def control_entries(self, start: int, end: int) -> Iterator[tuple[Index, int, bytes]]:
        """Yield (index, append time in ms, body) of a native store's control entries in [start, end)."""
        return control_entries(self._reader, max(start, self.first_index), min(end, self.last_index + 1))

    def _continues(self, since: StoreReader) -> bool:
        """Whether this is the store of an earlier view, and still contains that view's last entry.

        The same index and term mean the same log up to there (Log Matching, Raft section 5.3).
        """
        if since.damaged or since.gaps:
            return False
        same = (since.writer, since.log_uuid, since.segment_bytes) == (self.writer, self.log_uuid, self.segment_bytes)
        if not same or since.last_index < max(since.first_index, self.first_index):
            return False
        row = since._index.read(since.last_index, since.last_index + 1)[0]
        header = self._reader.header_at(int(row["position"]))
        return header is not None and (header.size, header.index, header.term) == (
            int(row["size"]),
            int(row["index"]),
            int(row["term"]),
        )

    def _seen_end(self) -> ScanCursor:
        """Return the place up to which this view's index rows are in the files; later rows are in memory."""
        if self._index.first is not None:
            row = self._index.read(self._index.first, self._index.first + 1)[0]
            return ScanCursor(int(row["position"]), self._index.first)
        return ScanCursor(self.position_end, self.last_index + 1, self._reader.term_at(self.last_index))

    def _scan_tail(self, seen: ScanCursor | None) -> int:
        """Scan the tail, keep the index rows that the files lack, and return the last entry's index."""
        start = self._tail_start() if seen is None else seen
        last = (start.index if start.index is not None else self.first_index) - 1
        cursor: ScanCursor | None = start
        while cursor is not None:
            scanner = Scanner(self._reader.data, self._disk_index, self._origin.rules, cursor)
            last = self._add_tail(scanner, last)
            cursor = self._after_damage(scanner.stop, last + 1)
        return last

    def _add_tail(self, scanner: Scanner, last: int) -> int:
        """Add the records of one scan, and return the last entry's index."""
        for block in scanner.blocks():
            rows = index_records(block.records)
            rows["position"] = block.positions
            if self._index.first is None:
                on_disk = self._disk_index.read(block.first_index, block.end_index)
                wrong = np.flatnonzero(~agreement(on_disk, rows, magic=False))
                if len(wrong):
                    first = int(wrong[0])
                    self._index.extend(block.first_index + first, rows[first:])
            else:
                self._index.extend(block.first_index, rows)
            at = complete_end(block.records)
            if at is not None:
                last = block.first_index + at
        return last

    def _after_damage(self, stop: ScanStop | None, start: int) -> ScanCursor | None:
        """Return the record of a Java log that follows a bad one, or None where the log ends; note the damage.

        In a native log too the record after a missing file follows. Older records that follow are no part of the log:
        Java does not remove the entries that it truncates.
        """
        if stop is None or (stop.cursor.index or 0) != start:
            return None
        if self._origin.meta is not None and not self._is_hole(stop.cursor.position):
            return None
        after = next_record(self._reader, self._disk_index, stop, start)
        if after is None or after.index is None or after.term < stop.cursor.term:
            return None
        again = Scanner(self._reader.data, self._disk_index, self._origin.rules, stop.cursor)
        if next(again.blocks(), None) is not None:  # the store has grown meanwhile
            return stop.cursor
        end = max(after.index, start + 1)
        if not self._is_hole(stop.cursor.position):
            self._damaged.append((Index(start), Index(end)))
        if self._index.first is not None:
            self._index.extend(start, self._disk_index.read(start, end))
        return ScanCursor(after.position, end, after.term)

    @property
    def damaged(self) -> tuple[tuple[Index, Index], ...]:
        """Entries [start, end) in the last files of a Java store that are damaged, and that complete entries follow.

        Reading them raises CorruptRecordError. In other files damage is found by reading.
        """
        return tuple(self._damaged)

    @cached_property
    def missing(self) -> tuple[Index, Index] | None:
        """Entries [start, end) of a Java store that its index continues with, and that its data lacks; None = none.

        A row continues the log if it starts where the entry before it ends, or in the next file, with a term that is
        not lower. Rows of entries that Java truncated have lower terms, and their data is still there.
        """
        if self._origin.meta is not None or self.last_index < self.first_index:
            return None
        start = at = self.last_index + 1
        place, term = self.position_end, self._reader.term_at(self.last_index)
        step, full = _MISSING_ROWS, self._reader.data.segment_bytes
        while True:
            rows = self._disk_index.read(at, at + step)
            ends = rows["position"].astype(np.int64) + rows["size"]
            before = np.concatenate([[place], ends[:-1]])
            terms = np.concatenate([[term], rows["term"].astype(np.int64)])
            follows = (rows["position"] >= before) & (rows["position"] < before + full) & (np.diff(terms) >= 0)
            valid = follows & (rows["index"] == np.arange(at, at + step)) & (rows["size"] >= HEADER_BYTES)
            count = step if bool(valid.all()) else int(np.argmin(valid))
            at += count
            if count < step:
                break
            place, term = int(ends[-1]), int(rows["term"][-1])
        return (Index(start), Index(at)) if at > start and not self.has_grown() else None

    def _is_hole(self, position: int) -> bool:
        return any(low <= position < high for low, high in self._reader.data.holes)

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Entries whose data files are missing between others, or at the start of a native store, in order."""
        return (*self._gap_at_start(), *(self._gap(low, high) for low, high in self._reader.data.holes))

    def _gap_at_start(self) -> Iterator[Gap]:
        meta, data = self._origin.meta, self._reader.data
        lost = None if meta is None else missing_start(data, meta)
        if meta is not None and lost is not None:
            end, high = max(self.first_index, Index(meta.first_index)), Position(data.bases[0])
            until = self.time_of(end)
            yield Gap(Index(meta.first_index), end, Position(lost), high, data.path(lost), None, until)

    def _gap(self, low: int, high: int) -> Gap:
        data = self._reader.data
        base = low - data.segment_bytes
        header = self._reader.header_at(base)
        scanner = Scanner(
            data,
            self._index,
            self._origin.rules,
            ScanCursor(base, None if header is None else header.index),
            body_crc=False,
        )
        start = next(reversed([block.end_index for block in scanner.blocks()]), int(self.first_index))
        later = (self._reader.header_at(each) for each in data.bases if each >= high)
        end = next((header.index for header in later if header is not None), int(self.last_index) + 1)
        end = max(start, end)
        times = self.time_of(start - 1), self.time_of(end)
        return Gap(Index(start), Index(end), Position(low), Position(high), data.path(low), *times)

    def time_of(self, index: int) -> datetime | None:
        """Return the append time of an entry, or the store time of its message; None if it cannot be read."""
        if not self.first_index <= index <= self.last_index:
            return None
        try:
            record = self.records(index, index + 1, 1)
        except CorruptRecordError:
            return None
        millis, bodies = int(append_times(record.headers)[0]), self._reader.bodies
        if 0 < millis < _TIME_MAX:
            return datetime.fromtimestamp(millis / 1000, UTC)
        return None if bodies is None else bodies.stored_at(record)

    @property
    def first_index_now(self) -> Index:
        """First index of the files as they are now: retention may have deleted entries of this view meanwhile."""
        now = Segments.load(self._files, self._layout.data, self._reader.data.segment_bytes, gaps=True)
        try:
            if now.bases[:1] == self._reader.data.bases[:1]:
                return self.first_index
            found = RecordReader(now, self._disk_index, self._origin.rules).first_record()
        finally:
            now.close()
        return max(self.first_index, Index(self.last_index + 1 if found is None else found[0]))

    def has_grown(self) -> bool:
        """Whether a complete record follows now: a broker may be running, and it writes data before the index."""
        return self._follows(self.position_end, self.last_index + 1)

    def _follows(self, position: int, index: int) -> bool:
        now = Segments.load(self._files, self._layout.data, self._reader.data.segment_bytes, gaps=True)
        term = self._reader.term_at(self.last_index) if self.last_index >= self.first_index else 0
        scanner = Scanner(now, self._disk_index, self._origin.rules, ScanCursor(position, index, term))
        try:
            return any(complete_end(block.records) is not None for block in scanner.blocks())
        finally:
            now.close()

    def damage_end(self, error: CorruptRecordError) -> Index:
        """Return the next entry after a damaged one that can be found, or ``last_index + 1``.

        Args:
            error: raised by a read; names the damaged entry.
        """
        start, position = int(error.values["index"]), int(error.values["position"])
        for low, high in (*self._damaged, *((gap.start, gap.end) for gap in self.gaps)):
            if low <= start < high:
                return high
        stop = ScanStop(Fault.HEADER, ScanCursor(position, start))
        after = next_record(self._reader, self._index, stop, start, end=self.last_index + 1)
        return Index(self.last_index + 1 if after is None or after.index is None else max(after.index, start + 1))

    def _tail_start(self) -> ScanCursor:
        """Return the start of the tail: after the checkpoint, or a segment whose first record has an index row."""
        data, checkpoint = self._reader.data, self._origin.checkpoint
        covered = checkpoint is not None and checkpoint.durable_index >= self.first_index
        if checkpoint is not None and covered and data.covers(checkpoint.position):
            return ScanCursor(checkpoint.position, checkpoint.durable_index + 1)
        if self._origin.meta is None:
            tail = min(_TAIL_SEGMENTS, 1 + -(-_TAIL_BYTES // data.segment_bytes))
            for base in reversed(data.bases[: max(len(data.bases) - tail + 1, 1)]):
                header = self._reader.header_at(base)
                if header is not None:
                    row = self._disk_index.read(header.index, header.index + 1)[0]
                    same = (int(row["position"]), int(row["size"]), int(row["index"]), int(row["term"]))
                    if same == (base, header.size, header.index, header.term):
                        return ScanCursor(base, header.index)
        return ScanCursor(data.bases[0] if data.bases else 0, self.first_index if data.bases else None)

    def term_ranges(self) -> list[TermRange]:
        """Return the term ranges, in order."""
        return term_ranges(self._reader.term_at, self.first_index, self.last_index)

    def describe(self, table: str) -> pa.RecordBatch:
        """Return a description of the log: a table of DESCRIPTIONS, up to the last entry.

        A store that Java wrote has no producers and transactions.

        Raises:
            BadRequestError: there is no such table.
        """
        end = self.last_index + 1
        if table == "terms":
            return description_batch(table, term_rows(self.term_ranges(), self.first_index, end))
        if table == "segments":
            found = segment_summaries(self._reader, end) if end > self.first_index else []
            return description_batch(table, segment_rows(found, self.position_of, end))
        if table == "producers":
            return description_batch(table, producer_rows(self._tables()))
        if table == "transactions":
            tables = self._tables()
            return description_batch(table, transaction_rows(tables, tables.log_time_ms))
        raise BadRequestError(f"no table {table!r}", "table", f"use {', '.join(DESCRIPTIONS)}")

    def position_of(self, index: int) -> int:
        """Return the byte position of an entry's record."""
        return self._place_of(index)[0]

    def _place_of(self, index: int) -> tuple[int, int]:
        """Return position and size of an entry's record; by its index row if it is damaged."""
        try:
            return place_of(self._reader, index)[:2]
        except CorruptRecordError:
            row = self._index.read(index, index + 1)[0]
            return int(row["position"]), int(row["size"])

    def _tables(self) -> LogTables:
        """Return producers and transactions as of the last entry: the snapshot, and the control entries after it."""
        if self._origin.meta is None:
            return LogTables()
        tables = load_tables(self._files, self._layout, self._origin.meta)
        for index, time_ms, body in self.control_entries(tables.applied_index + 1, self.last_index + 1):
            tables.apply(index, time_ms, body)
        return tables

    def committed_end(self, until: Until = "committed") -> Index:
        """Return the end (exclusive) of the committed entries.

        It is the end of all entries with ``until="end"``, and for a store that records no commit index.
        """
        if until == "end" or self.commit_index is None:
            return Index(self.last_index + 1)
        return Index(max(self.commit_index + 1, self.first_index))

    @property
    def visible_end(self) -> Index:
        """End (exclusive) of the entries that ``read_committed`` shows."""
        return self.visibility().end

    def visibility(self, until: Until = "committed") -> Visibility:
        """Return the entries that ``read_committed`` shows; all of them in a store written by Java.

        Raises:
            CorruptRecordError: a control entry is damaged, or the snapshot that replaces deleted ones.
        """
        found = self._visibility.get(until)
        if found is None:
            found = self._visibility[until] = self._find_visibility(self.committed_end(until))
        return found

    def shown(self, isolation: Isolation = "read_committed", until: Until = "committed") -> Visibility:
        """Return the entries that a reader with this isolation receives.

        Raises:
            CorruptRecordError: see ``visibility``; not with ``read_uncommitted``.
        """
        return self.visibility(until) if isolation == "read_committed" else Visibility(self.committed_end(until))

    def _find_visibility(self, end: int) -> Visibility:
        meta = self._origin.meta
        if meta is None:
            return Visibility(Index(end))
        outcomes = self._outcomes
        if outcomes is None or outcomes.end < self.first_index:
            outcomes = Outcomes(load_tables(self._files, self._layout, meta), self.first_index)
        if self.commit_index is not None and end <= self.commit_index + 1:
            self._outcomes = outcomes  # later entries may still be replaced: their outcomes are not kept
        elif outcomes is self._outcomes:
            outcomes = Outcomes(load_tables(self._files, self._layout, meta), self.first_index)
        return outcomes.visibility(self.control_entries, end)

    def fetch(
        self,
        start: int,
        end: int,
        *,
        max_bytes: int = READ_BYTES,
        isolation: Isolation = "read_committed",
        until: Until = "committed",
    ) -> Fetch:
        """Return data entries from ``start`` on, like ``Client.fetch``.

        Args:
            start: first index.
            end: end (exclusive).
            max_bytes: limit on the bytes of the records; at least one is read.
            isolation: ``read_uncommitted`` shows entries of open transactions and orphaned attempts too.
            until: the recorded commit index, or the last entry of the store.

        Returns:
            The entries. ``next_index`` is ``start`` if the visible part of this view ends there.

        Raises:
            IndexOutOfRangeError: ``start`` is below the log's first index.
            CorruptRecordError: a record is damaged.
        """
        if start < self.first_index:
            raise out_of_range(self._layout.root, start, end, self.first_index, self.last_index)
        batch, following = self._shown_entries(self.shown(isolation, until), start, end, max_bytes)
        commit = -1 if self.commit_index is None else int(self.commit_index)
        return Fetch(batch, following, commit, self.visibility(until).end, self.first_index)

    def _shown_entries(self, shown: Visibility, start: int, end: int, max_bytes: int) -> tuple[pa.RecordBatch, int]:
        """Return data entries from ``start`` on, and the index at which the next read continues."""
        low, stop, skip = shown.span(start, end)
        if low == stop:
            return empty_batch(READ_SCHEMA), low
        records = self.records(low, stop, max_bytes)
        return data_entries(records, low, skip), low + records.count

    def hidden(self, entries: pa.RecordBatch) -> pa.StringArray:
        """Return for each entry why ``read_committed`` hides it, a ``Hidden``; null for the entries that it shows.

        Args:
            entries: with the columns ``index`` and ``magic``, as ``read`` returns them.

        Raises:
            CorruptRecordError: see ``visibility``.
        """
        indexes, is_data = np.asarray(entries.column("index")), np.asarray(entries.column("magic")) == MAGIC_DATA
        return pa.array(self.visibility().hidden(indexes, is_data, self.committed_end()), pa.string())

    def read_visible(self, start: int, end: int) -> pa.RecordBatch:
        """Return all visible data entries in [start, end), with columns of READ_SCHEMA; see ``fetch``."""
        batches = []
        while start < end:
            found = self.fetch(start, end)
            if found.next_index == start:
                break
            batches.append(found.batch)
            start = found.next_index
        return pa.concat_batches(batches) if batches else empty_batch(READ_SCHEMA)

    def index_at_position(self, position: int) -> Index:
        """Return the index of the entry whose record contains a position, else of the next one.

        It is ``last_index + 1`` if there is none.

        Raises:
            CorruptRecordError: a record is damaged.
        """
        return Index(index_at_position(self._reader, self.first_index, self.last_index + 1, position))

    def index_at_time(self, timestamp_ms: int) -> Index:
        """Return the index of the first entry appended at or after a time (ms since the epoch).

        It is ``last_index + 1`` if there is none.

        Raises:
            BadRequestError: Java wrote the store, so it has no append times.
            CorruptRecordError: a record is damaged.
        """
        if self._origin.meta is None:
            raise BadRequestError("the store records no append times", str(self.path), "use indexes instead of times")
        return Index(index_at_time(self._reader, self.first_index, self.last_index + 1, timestamp_ms))

    def read(self, start: int, end: int, *, max_bytes: int = READ_BYTES) -> pa.RecordBatch:
        """Return entries from ``start`` on, control entries included, with columns of RECORD_SCHEMA.

        May end before ``end`` when ``max_bytes`` is reached, but contains at least one entry.

        Raises:
            IndexOutOfRangeError: ``start`` is not in the log.
            CorruptRecordError: a record is damaged.
        """
        return to_arrow(self.records(start, end, max_bytes), magic=True)

    def messages(
        self,
        start: int | None = None,
        end: int | None = None,
        *,
        isolation: Isolation = "read_committed",
        until: Until = "committed",
    ) -> pa.RecordBatchReader:
        """Return the messages of the entries [start, end) as a stream of Arrow batches, with the rows of ``fetch``.

        Columns are index, term, position, timestamp and those of the messages. A body that is not a message stays in
        ``body``, with the reason in ``error``. pandas, Polars and DuckDB read the stream without further libraries.

        Args:
            start: the first index; None = of the log.
            end: end (exclusive); None = of the visible entries.
            isolation: ``read_uncommitted`` shows entries of open transactions and orphaned attempts too.
            until: the recorded commit index, or the last entry of the store.

        Raises:
            BadRequestError: the store was opened with opaque bodies.
            IndexOutOfRangeError: ``start`` is not in the log.
            CorruptRecordError: a control entry is damaged; raised by the stream at a damaged record or message.
        """
        bodies = self._reader.bodies
        if bodies is None:
            raise BadRequestError(
                "bodies are opaque in this view", str(self.path), "open the store without opaque=True"
            )
        first = self.first_index if start is None else start
        stop = self.last_index + 1 if end is None else min(end, self.last_index + 1)
        if start is not None and not self.first_index <= start <= self.last_index + 1:
            raise out_of_range(self.path, start, stop, self.first_index, self.last_index)
        shown = self.shown(isolation, until)
        return pa.RecordBatchReader.from_batches(bodies.schema, self._decoded(bodies, shown, first, stop))

    def _decoded(self, bodies: BodyFormat, shown: Visibility, at: int, end: int) -> Iterator[pa.RecordBatch]:
        while (found := self._shown_entries(shown, at, end, READ_BYTES))[1] > at:
            yield from bodies.decode(found[0])
            at = found[1]

    def records(self, start: int, end: int, max_bytes: int = READ_BYTES) -> Records:
        """Return records as stored on disk, checked; otherwise like ``read``."""
        if not self.first_index <= start <= self.last_index or end <= start:
            raise out_of_range(self._layout.root, start, end, self.first_index, self.last_index)
        try:
            return self._reader.read(start, min(end, self.last_index + 1), max_bytes)
        except CorruptRecordError as error:
            first = self.first_index_now
            if start < first:  # retention has deleted it meanwhile
                raise out_of_range(self._layout.root, start, end, first, self.last_index) from error
            raise

    def index_mismatches(self, records: Records) -> list[int]:
        """Return the indexes of those ``records`` whose rows in the index files differ from the data.

        Rows at the end that were not written yet do not count: the index of a running or killed store lags there.
        """
        if not records.count:
            return []
        expected = index_records(records)
        start = int(expected["index"][0])
        rows = self._disk_index.read(start, start + records.count)
        if not self._origin.rules.position_checked:
            expected["position"] = rows["position"]
        wrong = ~agreement(rows, expected, magic=self._origin.meta is not None)
        found = start + np.flatnonzero(wrong)
        return [int(index) for index in found if index < self._index_end or rows["size"][index - start]]

    @cached_property
    def _index_end(self) -> int:
        """End (exclusive) of the entries that the index files contain."""
        first = self._index.first
        if first is None:
            return self.last_index + 1
        before = max(first - 1, self.first_index)
        written = np.flatnonzero(self._disk_index.read(before, self.last_index + 1)["size"])
        # Without a single row the index is lost; it does not lag.
        return before + int(written[-1]) + 1 if len(written) else self.last_index + 1

    def verify(self) -> StoreReport:
        """Read everything and report all problems; see ``Finding``.

        If retention deletes files before they are read, the rest is checked: see ``StoreReport.deleted``.
        """
        try:
            return self._verify()
        except (FileNotFoundError, CorruptRecordError):
            if self.first_index_now == self.first_index:
                raise
        with open_store(self.path, bodies=self._reader.bodies, files=self._files) as now:
            report = now.verify()
        return replace(report, deleted=(self.first_index, report.first_index))

    def _verify(self) -> StoreReport:
        meta = self._origin.meta
        report = verify_store(self._reader, self._disk_index, self.first_index, self._origin.checkpoint, meta)
        term = 0
        with contextlib.suppress(CorruptRecordError):  # it is one of the findings
            term = self._reader.term_at(self.last_index) if self.last_index >= self.first_index else 0
        more = start_findings(self._files, self._layout, meta, last_index=report.last_index, last_term=term)
        found = [*more, *map(self._with_gap, report.findings)]
        for each in [each for each in found if each.kind in ("TORN_TAIL", "CORRUPT") and each.start > self.last_index]:
            if self._follows(each.position, each.start):  # a node or broker wrote it meanwhile
                found.remove(each)
        if self.missing is not None:  # more than a torn write: the index was written after the data
            found = [*(each for each in found if each.kind != "TORN_TAIL"), self._missing_finding(self.missing)]
        return replace(report, findings=tuple(found))

    def _with_gap(self, finding: Finding) -> Finding:
        """Return a finding of missing files with the times of the entries around them."""
        gap = next((each for each in self.gaps if each.position == finding.position), None)
        return finding if gap is None or finding.kind != "CORRUPT" else replace(finding, message=gap.message)

    def _missing_finding(self, missing: tuple[Index, Index]) -> Finding:
        position = Position(self.position_end)
        path = self._reader.data.path(position)
        message = "the index has rows of these entries, and the data does not contain them"
        return Finding("MISSING", "error", *missing, str(path), position, message)

    def close(self) -> None:
        """Close the data and index files."""
        self._reader.data.close()
        self._disk_index.segments.close()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

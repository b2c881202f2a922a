"""``open_store``: read-only access to a node's store, ours or Java's of both generations, live or at rest.

No lock is taken and nothing is written, so it works on a running broker's own directory. What counts as the log's end
is what the writer's own recovery would keep: the scan of the tail ends at the first invalid record (in a store of
ours, at the last whole batch). The view is fixed when the store is opened; open it again to see more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Final, Literal

import numpy as np
import pyarrow as pa

from dledger_core.config import DATA_SEGMENT_BYTES, INDEX_SEGMENT_BYTES
from dledger_core.errors import BadRequestError, CorruptRecordError, StoreIncompleteError, StoreMismatchError
from dledger_core.ids import GroupName, Index, NodeId
from dledger_core.raft.batch import TermRange
from dledger_core.record import (
    DESCRIPTIONS,
    READ_SCHEMA,
    Fetch,
    Isolation,
    Records,
    data_entries,
    description_batch,
    empty_batch,
    index_records,
    is_segment_name,
    to_arrow,
)
from dledger_core.storage.check.recovery import batch_ends
from dledger_core.storage.check.scan import Cursor, Rules, Scanner
from dledger_core.storage.check.start_check import start_findings
from dledger_core.storage.check.verify import StoreReport, record_behind, verify_store
from dledger_core.storage.files.checkpoint import Checkpoint, load_checkpoint
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.hard_state import read_properties
from dledger_core.storage.files.index_file import IndexFile, OverlaidIndex, agreement, term_ranges
from dledger_core.storage.files.layout import Layout, check_complete, lacks_identity
from dledger_core.storage.files.log_info import LogMeta, load_log_meta
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.read.descriptions import producer_rows, segment_rows, term_rows
from dledger_core.storage.read.log_queries import control_entries, index_at_position, index_at_time, segment_facts
from dledger_core.storage.read.record_reader import RecordReader, out_of_range, own_rules
from dledger_core.storage.read.visibility import Outcomes, Until, Visibility
from dledger_core.storage.tables.tables import LogTables
from dledger_core.storage.write.trim import load_tables

__all__ = ["StoreReader", "open_store"]

READ_BYTES: Final = 8 << 20
_TAIL_SEGMENTS: Final = 3
_JAVA_A: Final = Rules(blank="jump")
_JAVA_B: Final = Rules(position_checked=False, blank="skip")


@dataclass(frozen=True, slots=True)
class _Origin:
    """Who wrote a store, and what it says about itself."""

    writer: Literal["dledger-python", "java-a", "java-b"]
    meta: LogMeta | None
    checkpoint: Checkpoint | None
    java_commit_index: int | None

    @property
    def rules(self) -> Rules:
        if self.meta is not None:
            # Only of what is committed: the rest may be overwritten while this view of it stays.
            committed = self.checkpoint.commit_index if self.checkpoint is not None else -1
            return replace(own_rules(self.meta), cross_checked_to=committed + 1)
        return _JAVA_A if self.writer == "java-a" else _JAVA_B


def _origin(files: Files, layout: Layout) -> _Origin:
    meta = load_log_meta(files, layout.log_meta)
    if meta is not None:
        return _Origin("dledger-python", meta, load_checkpoint(files, layout.checkpoint), None)
    pairs = read_properties(files, layout.root / "checkpoint")
    if pairs is None:
        return _Origin("java-b", None, None, None)
    text = pairs.get("committedIndex", "")
    return _Origin("java-a", None, None, int(text) if text.lstrip("-").isdigit() else None)


def _segment_bytes(files: Files, directory: Path, recorded: int | None, default: int) -> int:
    """Returns the size of the files in a folder: the recorded one, or that of the first ones, the last may be cut."""
    if recorded is not None:
        return recorded
    names = sorted(name for name in files.listdir(directory) or () if is_segment_name(name))
    return max((files.open(directory / name).size() for name in names[:2]), default=0) or default


def _check_folder(files: Files, layout: Layout) -> None:
    """Refuses a directory without identity whose ``data/`` is missing or holds something else than data files."""
    names = files.listdir(layout.data)
    found = "there is no data/" if names is None else f"data/ holds {names[0]!r}" if names else ""
    if found and not any(map(is_segment_name, names or ())):
        raise StoreMismatchError(
            f"no store is here ({found})", str(layout.root), "name the directory that holds data/ and index/"
        )


def open_store(path: Path | str, *, files: Files | None = None, since: StoreReader | None = None) -> StoreReader:
    """Opens a node's store for reading.

    Args:
        path: the directory that holds ``data/`` and ``index/``.
        files: the file system.
        since: an earlier view of the same store: its tail need not be looked at again. It stays as it is.

    Raises:
        StoreMismatchError: there is no store.
        StoreIncompleteError: a conversion into it, or its emptying, has not come to its end.
        CorruptRecordError: a data file is missing between others.
    """
    files, layout = files or OsFiles(), Layout(Path(path))
    check_complete(files, layout)
    origin = _origin(files, layout)
    if origin.meta is None:
        _check_folder(files, layout)
    meta = origin.meta
    if meta is not None and meta.discarding:
        raise StoreIncompleteError(
            "the store was being emptied, to go on from its leader's first index",
            str(layout.root),
            "start its node: it ends what was interrupted",
        )
    data_bytes = _segment_bytes(files, layout.data, meta.data_segment_bytes if meta else None, DATA_SEGMENT_BYTES)
    index_bytes = _segment_bytes(files, layout.index, meta.index_segment_bytes if meta else None, INDEX_SEGMENT_BYTES)
    data = Segments.load(files, layout.data, data_bytes)
    index = Segments.load(files, layout.index, index_bytes, gaps=True)
    return StoreReader(files, layout, origin, data, IndexFile(index), since)


class StoreReader:
    """A read-only view of one store; made by ``open_store``. Reads are safe from any thread."""

    def __init__(
        self,
        files: Files,
        layout: Layout,
        origin: _Origin,
        data: Segments,
        index: IndexFile,
        since: StoreReader | None = None,
    ) -> None:
        self._files = files
        self._layout = layout
        self._origin = origin
        self._disk_index = index
        self._index = OverlaidIndex(index)
        self._reader = RecordReader(data, self._index, origin.rules)
        self.first_index: Final = Index(self._find_first(origin.meta))
        continued = since if since is not None and self._continues(since) else None
        self._outcomes: Outcomes | None = None if continued is None else continued._outcomes
        self._visibility: dict[Until, Visibility] = {}
        seen = None if continued is None else continued._seen_end()
        self.last_index: Final = Index(self._scan_tail(seen))

    def _find_first(self, meta: LogMeta | None) -> int:
        """Returns the first entry's index: as recorded, else as the first record says."""
        if meta is not None and self._reader.data.bases[:1] == (meta.first_position,):
            return meta.first_index
        found = self._reader.first_record()
        if found is not None:
            return found[0]
        return meta.first_index if meta is not None else 0

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self._layout.root

    @property
    def writer(self) -> Literal["dledger-python", "java-a", "java-b"]:
        """Who writes the store: we, or Java's generation A or B."""
        return self._origin.writer

    @property
    def commit_index(self) -> Index | None:
        """A recorded lower bound on what is committed; None if the store records none."""
        found = self.checkpoint_commit_index
        return None if found is None else Index(min(found, self.last_index))

    @property
    def identity_lost(self) -> bool:
        """Whether the store is ours but has no ``meta/log.json``, so that it is read as if Java had written it."""
        return self._origin.meta is None and lacks_identity(self._files, self._layout)

    @property
    def checkpoint_commit_index(self) -> Index | None:
        """What the checkpoint, if any, says is the last committed entry; above ``last_index`` if the end is lost."""
        checkpoint, java = self._origin.checkpoint, self._origin.java_commit_index
        found = java if checkpoint is None else checkpoint.commit_index
        return None if found is None else Index(found)

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log; None in a store that has none, like all of Java's."""
        return self._origin.meta.log_uuid if self._origin.meta is not None else None

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
        """What a store of ours records about itself; None in a store written by Java."""
        return self._origin.meta

    @property
    def segment_bytes(self) -> tuple[int, int]:
        """Sizes of the data files and of the index files."""
        return self._reader.data.segment_bytes, self._disk_index.segments.segment_bytes

    @property
    def position_end(self) -> int:
        """Where the last entry's record ends; where the files begin if there is none."""
        if self.last_index < self.first_index:
            return self._reader.data.bases[0] if self._reader.data.bases else 0
        row = self._index.read(self.last_index, self.last_index + 1)[0]
        return int(row["position"]) + int(row["size"])

    def control_entries(self, start: int, end: int) -> Iterator[tuple[Index, int, bytes]]:
        """Yield (index, append time in ms, body) of a native store's control entries in [start, end)."""
        return control_entries(self._reader, max(start, self.first_index), min(end, self.last_index + 1))

    def _continues(self, since: StoreReader) -> bool:
        """Whether this is the store of an earlier view, and still holds that view's last entry.

        The same index and term mean the same log up to there, as Raft has it.
        """
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

    def _seen_end(self) -> Cursor:
        """Returns the place up to which the files held all this view knows; behind it rows are in memory."""
        if self._index.first is not None:
            row = self._index.read(self._index.first, self._index.first + 1)[0]
            return Cursor(int(row["position"]), self._index.first)
        return Cursor(self.position_end, self.last_index + 1, self._reader.term_at(self.last_index))

    def _scan_tail(self, seen: Cursor | None) -> int:
        """Walks the tail, holds the index rows that the files do not have, and returns the last entry's index."""
        start = self._tail_start() if seen is None else seen
        last = (start.index if start.index is not None else self.first_index) - 1
        scanner = Scanner(self._reader.data, self._disk_index, self._origin.rules, start)
        for run in scanner.runs():
            rows = index_records(run.records)
            rows["position"] = run.positions
            if self._index.first is None:
                on_disk = self._disk_index.read(run.first_index, run.end_index)
                wrong = np.flatnonzero(~agreement(on_disk, rows, magic=False))
                if len(wrong):
                    at = int(wrong[0])
                    self._index.extend(run.first_index + at, rows[at:])
            else:
                self._index.extend(run.first_index, rows)
            ends = batch_ends(run.records)
            if len(ends):
                last = run.first_index + int(ends[-1])
        self._stop = scanner.stop
        return last

    def damaged_end(self) -> tuple[Index, Index] | None:
        """Returns the entries [start, end) behind the last one that are damaged: others follow, so the log goes on.

        None where nothing follows, or what is older than the last entry: Java leaves what it truncates.
        """
        stop, start = self._stop, self.last_index + 1
        if stop is None or (stop.cursor.index or 0) != start:
            return None
        behind = record_behind(self._reader, self._disk_index, stop, start)
        if behind is None or behind.index is None or behind.term < stop.cursor.term:
            return None
        again = Scanner(self._reader.data, self._disk_index, self._origin.rules, stop.cursor)
        if next(again.runs(), None) is not None:  # it has grown meanwhile
            return None
        return Index(start), Index(max(behind.index, start + 1))

    def _tail_start(self) -> Cursor:
        """Returns where the tail begins: behind the checkpoint, or at a segment whose head the index knows."""
        data, checkpoint = self._reader.data, self._origin.checkpoint
        vouched = checkpoint is not None and checkpoint.durable_index >= self.first_index
        if checkpoint is not None and vouched and data.holds(checkpoint.position):
            return Cursor(checkpoint.position, checkpoint.durable_index + 1)
        if self._origin.meta is None:
            for base in reversed(data.bases[: max(len(data.bases) - _TAIL_SEGMENTS + 1, 1)]):
                header = self._reader.header_at(base)
                if header is not None:
                    row = self._disk_index.read(header.index, header.index + 1)[0]
                    same = (int(row["position"]), int(row["size"]), int(row["index"]), int(row["term"]))
                    if same == (base, header.size, header.index, header.term):
                        return Cursor(base, header.index)
        return Cursor(data.bases[0] if data.bases else 0)

    def term_ranges(self) -> list[TermRange]:
        """Returns the runs of terms, in order."""
        return term_ranges(self._reader.term_at, self.first_index, self.last_index)

    def describe(self, table: str) -> pa.RecordBatch:
        """Returns what the store says about its log: a table of DESCRIPTIONS, up to the last entry.

        In a store that Java wrote there are no producers.

        Raises:
            BadRequestError: there is no such table.
        """
        end = self.last_index + 1
        if table == "terms":
            return description_batch(table, term_rows(self.term_ranges(), self.first_index, end))
        if table == "segments":
            facts = segment_facts(self._reader, end) if end > self.first_index else []
            return description_batch(table, segment_rows(facts, self._position_of, end))
        if table == "producers":
            return description_batch(table, producer_rows(self._tables()))
        raise BadRequestError(f"no table {table!r}", "table", f"use {', '.join(DESCRIPTIONS)}")

    def _position_of(self, index: int) -> int:
        return int(self._index.read(index, index + 1)["position"][0])

    def _tables(self) -> LogTables:
        """Producers and transactions as of the last entry: the snapshot, and the control entries behind it."""
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
            max_bytes: bound on the records that are read; at least one is.
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
        committed_end = self.committed_end(until)
        visible = self.visibility(until)
        shown = visible if isolation == "read_committed" else Visibility(committed_end)
        low, stop, skip = shown.span(start, end)
        batch = empty_batch(READ_SCHEMA)
        if low < stop:
            records = self.records(low, stop, max_bytes)
            batch = data_entries(records, low, skip)
            low += records.count
        commit = -1 if self.commit_index is None else int(self.commit_index)
        return Fetch(batch, low, commit, visible.end, self.first_index)

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
        """Returns entries from ``start`` on, control entries included, with columns of RECORD_SCHEMA.

        May end before ``end`` when ``max_bytes`` is reached, but holds at least one entry.

        Raises:
            IndexOutOfRangeError: ``start`` is not in the log.
            CorruptRecordError: a record is damaged.
        """
        return to_arrow(self.records(start, end, max_bytes), magic=True)

    def records(self, start: int, end: int, max_bytes: int = READ_BYTES) -> Records:
        """Returns records as they lie on disk, checked; otherwise like ``read``."""
        if not self.first_index <= start <= self.last_index or end <= start:
            raise out_of_range(self._layout.root, start, end, self.first_index, self.last_index)
        return self._reader.read(start, min(end, self.last_index + 1), max_bytes)

    def index_mismatches(self, records: Records) -> list[int]:
        """Returns those of ``records`` about which the index files say something else than the data.

        Rows at the end that were not written yet do not count: a store that runs, or was killed, is behind there.
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
        """The index behind the last entry that the index files know."""
        first = self._index.first
        if first is None:
            return self.last_index + 1
        before = max(first - 1, self.first_index)
        written = np.flatnonzero(self._disk_index.read(before, self.last_index + 1)["size"])
        # Without a single row the index is lost, and not behind.
        return before + int(written[-1]) + 1 if len(written) else self.last_index + 1

    def verify(self) -> StoreReport:
        """Reads everything and reports what is wrong; see ``Finding``."""
        meta = self._origin.meta
        report = verify_store(self._reader, self._disk_index, self.first_index, self._origin.checkpoint, meta)
        term = 0
        with contextlib.suppress(CorruptRecordError):  # then it is among the findings
            term = self._reader.term_at(self.last_index) if self.last_index >= self.first_index else 0
        more = start_findings(self._files, self._layout, meta, last_index=report.last_index, last_term=term)
        return replace(report, findings=(*more, *report.findings))

    def close(self) -> None:
        """Lets go of the files."""
        self._reader.data.close()
        self._disk_index.segments.close()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

"""``open_store``: read-only access to a node's store, native or Java's of both generations, online or offline.

No lock is taken and nothing is written, so it works on a running broker's own directory. A native log ends at its last
complete batch. A log of Java's ends at its last complete record: Java's recovery would end it at the first bad one and
delete the rest, but what follows can still be read here. The view is fixed when the store is opened; open it again to
see more.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Final

import numpy as np
import pyarrow as pa

from dledger_core.errors import BadRequestError, CorruptRecordError
from dledger_core.ids import GroupName, Index, NodeId, Position
from dledger_core.lineage import Ancestors
from dledger_core.raft.batch import TermRange
from dledger_core.record import (
    DESCRIPTIONS,
    MAGIC_DATA,
    READ_SCHEMA,
    RECORD_SCHEMA,
    Fetch,
    Isolation,
    Records,
    append_times,
    data_entries,
    description_batch,
    empty_batch,
    to_arrow,
)
from dledger_core.storage.check.damage import next_record
from dledger_core.storage.check.judge import BodyFormat, Fault, ScanCursor, ScanStop
from dledger_core.storage.check.verify import Finding, StoreReport, start_findings, verify_store
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.index_file import term_ranges
from dledger_core.storage.files.layout import Layout, LogMeta, lacks_identity
from dledger_core.storage.read.gaps import Gap, gaps_of, missing_at_end
from dledger_core.storage.read.log_queries import (
    control_entries,
    index_at_position,
    index_at_time,
    producer_rows,
    segment_rows,
    segment_summaries,
    split_points,
    term_rows,
    transaction_rows,
)
from dledger_core.storage.read.log_tail import LogTail
from dledger_core.storage.read.record_reader import out_of_range
from dledger_core.storage.read.store_files import StoreFiles, data_names
from dledger_core.storage.read.visibility import StoreVisibility, Until, Visibility
from dledger_core.storage.read.writers import WriterName

READ_BYTES: Final = 8 << 20
_OPEN_ATTEMPTS: Final = 4
"""Retention may delete files between the listing of a directory and the first read."""
_SAMPLE: Final = 8
_TIME_MAX: Final = 1 << 47


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
        names = data_names(files, layout.data)
        try:
            opened = StoreReader(StoreFiles(files, layout), bodies, since)
        except (FileNotFoundError, CorruptRecordError):
            if data_names(files, layout.data) == names:
                raise
        else:
            if not opened.gaps or data_names(files, layout.data) == names:
                return opened
            opened.close()
    return StoreReader(StoreFiles(files, layout), bodies, since)


class StoreReader:
    """A read-only view of one store; made by ``open_store``. Reads are safe from any thread.

    It has many methods because each question about a store is one, and all share one view of its files. They are short:
    the work is in ``log_queries``, ``gaps`` and ``visibility``.

    Attributes:
        path: the store's directory.
        writer: program that writes the store: this one, or Java's generation A or B.
        meta: identity and constants of a native store; None in a store written by Java.
        log_uuid: identity of the log; None in a store without one, like all of Java's.
        chain: the logs that the log continues, oldest first; Java's continue none.
        group: the group; None in a store written by Java, which does not record it.
        node_id: the node: recorded, or taken from the directory's name.
        segment_bytes: sizes of the data files and of the index files.
        first_index: the first entry.
        last_index: the last entry.
        checkpoint_commit_index: the recorded commit index; above ``last_index`` if the end is lost; None if the store
            records none.
        commit_index: the same, at most ``last_index``: a lower bound of the log's.
        damaged: entries [start, end) in the last files of a Java store that are damaged, and that complete entries
            follow. Reading them raises CorruptRecordError. In other files damage is found by reading.
    """

    path: Path
    writer: WriterName
    meta: LogMeta | None
    log_uuid: str | None
    chain: Ancestors
    group: GroupName | None
    node_id: NodeId | None
    segment_bytes: tuple[int, int]
    first_index: Index
    last_index: Index
    checkpoint_commit_index: Index | None
    commit_index: Index | None
    damaged: tuple[tuple[Index, Index], ...]

    def __init__(self, store: StoreFiles, bodies: BodyFormat | None = None, since: StoreReader | None = None) -> None:
        self._store, writer, meta = store, store.writer, store.writer.meta
        self.path, self.writer, self.meta = store.layout.root, writer.name, meta
        self.log_uuid, self.chain = (None, ()) if meta is None else (meta.log_uuid, meta.continues)
        self.group = None if meta is None else GroupName(meta.group)
        before, prefix, named = self.path.resolve().name.partition("dledger-")
        node_id = meta.node_id if meta is not None else named if prefix and not before else ""
        self.node_id = NodeId(node_id) if node_id else None
        self.segment_bytes = store.segment_bytes
        self.first_index = Index(writer.first_index(store.reader, store.rows))
        # A view with damage is not continued: the damage may have been repaired meanwhile.
        continued = since if since is not None and _continues(self, since) else None
        if continued is None:
            start = writer.tail_start(store.reader, store.rows, self.first_index)
        else:
            start = continued._tail.resume_at(continued.position_end)
        self._tail: LogTail = LogTail(store, self.first_index, start)
        self.last_index, self.damaged = self._tail.last_index, tuple(self._tail.damaged)
        recorded = self.checkpoint_commit_index = writer.commit_index
        self.commit_index = None if recorded is None else Index(min(recorded, self.last_index))
        self._visibility: StoreVisibility = StoreVisibility(
            writer.tables,
            self.control_entries,
            self.first_index,
            0 if self.commit_index is None else self.commit_index + 1,
            None if continued is None else continued._visibility,
        )
        if bodies is not None:
            store.reader.bodies = bodies if meta is not None else _format_of_log(bodies, self)

    def __repr__(self) -> str:
        return f"StoreReader({str(self.path)!r}, {self.writer}, indexes {self.first_index} to {self.last_index})"

    @property
    def identity_lost(self) -> bool:
        """Whether the store is native but has no ``meta/log.json``, so that it is read as if Java had written it."""
        return self.meta is None and lacks_identity(self._store.files, self._store.layout)

    @property
    def position_end(self) -> int:
        """End of the last entry's record; the start of the files if there is none."""
        if self.last_index < self.first_index:
            return next(iter(self._store.reader.data.bases), 0)
        return sum(self._store.place_of(self.last_index))

    def control_entries(self, start: int, end: int) -> Iterator[tuple[Index, int, bytes]]:
        """Yield (index, append time in ms, body) of a native store's control entries in [start, end)."""
        return control_entries(self._store.reader, max(start, self.first_index), min(end, self.last_index + 1))

    @cached_property
    def missing(self) -> tuple[Index, Index] | None:
        """Entries [start, end) of a Java store that its index continues with, and that its data lacks; None = none."""
        if self.meta is not None or self.last_index < self.first_index:
            return None
        start, end = missing_at_end(self._store, self.last_index, self.position_end)
        return (start, end) if end > start and not self.has_grown() else None

    @cached_property
    def gaps(self) -> tuple[Gap, ...]:
        """Entries whose data files are missing between others, or at the start of a native store, in order."""
        return tuple(gaps_of(self._store, self.first_index, self.last_index, self.time_of))

    def time_of(self, index: int) -> datetime | None:
        """Return the append time of an entry, or the store time of its message; None if it cannot be read."""
        if not self.first_index <= index <= self.last_index:
            return None
        try:
            record = self.raw(index, index + 1, 1)
        except CorruptRecordError:
            return None
        millis, bodies = int(append_times(record.column("flags"))[0]), self._store.reader.bodies
        if 0 < millis < _TIME_MAX:
            return datetime.fromtimestamp(millis / 1000, UTC)
        return None if bodies is None else bodies.stored_at(record)

    @property
    def first_index_now(self) -> Index:
        """First index of the files as they are now: retention may have deleted entries of this view meanwhile."""
        return self._store.first_index_now(self.first_index, self.last_index)

    def has_grown(self) -> bool:
        """Whether a complete record follows now: a broker may be running, and it writes data before the index."""
        return self._store.is_complete_now(ScanCursor(self.position_end, self.last_index + 1, self._tail.last_term))

    def damage_end(self, error: CorruptRecordError) -> Index:
        """Return the next entry after a damaged one that can be found, or ``last_index + 1``.

        Args:
            error: raised by a read; names the damaged entry.
        """
        start, position = int(error.values["index"]), int(error.values["position"])
        for low, high in (*self.damaged, *((gap.start, gap.end) for gap in self.gaps)):
            if low <= start < high:
                return high
        stop = ScanStop(Fault.HEADER, ScanCursor(position, start))
        after = next_record(self._store.reader, self._store.index, stop, start, end=self.last_index + 1)
        return Index(self.last_index + 1 if after is None or after.index is None else max(after.index, start + 1))

    def term_ranges(self) -> list[TermRange]:
        """Return the term ranges, in order."""
        return term_ranges(self._store.reader.term_at, self.first_index, self.last_index)

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
            found = segment_summaries(self._store.reader, end) if end > self.first_index else []
            return description_batch(table, segment_rows(found, self.position_of, end))
        if table in ("producers", "transactions"):
            tables = self._store.writer.tables()
            for index, time_ms, body in self.control_entries(tables.applied_index + 1, self.last_index + 1):
                tables.apply(index, time_ms, body)
            rows = producer_rows(tables) if table == "producers" else transaction_rows(tables, tables.log_time_ms)
            return description_batch(table, rows)
        raise BadRequestError(f"no table {table!r}", "table", f"use {', '.join(DESCRIPTIONS)}")

    def position_of(self, index: int) -> int:
        """Return the byte position of an entry's record."""
        return self._store.place_of(index)[0]

    def committed_end(self, until: Until = "committed") -> Index:
        """Return the end (exclusive) of the committed entries.

        It is the end of all entries with ``until="end"``, and for a store that records no commit index.
        """
        if until == "end" or self.commit_index is None:
            return Index(self.last_index + 1)
        return Index(max(self.commit_index + 1, self.first_index))

    def shown(self, isolation: Isolation = "read_committed", until: Until = "committed") -> Visibility:
        """Return the entries that a reader with this isolation receives; all of them in a store written by Java.

        Raises:
            CorruptRecordError: a control entry is damaged, or the snapshot that replaces deleted ones; not with
                ``read_uncommitted``.
        """
        end = self.committed_end(until)
        if isolation == "read_uncommitted" or self.meta is None:
            return Visibility(end)
        return self._visibility.before(end)

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
            raise out_of_range(self.path, start, end, self.first_index, self.last_index)
        batch, following = self._shown_entries(self.shown(isolation, until), start, end, max_bytes)
        commit = -1 if self.commit_index is None else int(self.commit_index)
        return Fetch(batch, following, commit, self.shown(until=until).end, self.first_index)

    def _shown_entries(self, shown: Visibility, start: int, end: int, max_bytes: int) -> tuple[pa.RecordBatch, int]:
        """Return data entries from ``start`` on, and the index at which the next read continues."""
        low, stop, skip = shown.span(start, end)
        if low == stop:
            return empty_batch(READ_SCHEMA), low
        records = self.raw(low, stop, max_bytes)
        return data_entries(records, low, skip), low + records.count

    def hidden(self, entries: pa.RecordBatch) -> pa.StringArray:
        """Return for each entry why ``read_committed`` hides it, a ``Hidden``; null for the entries that it shows.

        Args:
            entries: with the columns ``index`` and ``magic``, as ``read`` returns them.

        Raises:
            CorruptRecordError: see ``shown``.
        """
        indexes, is_data = np.asarray(entries.column("index")), np.asarray(entries.column("magic")) == MAGIC_DATA
        return pa.array(self.shown().hidden(indexes, is_data, self.committed_end()), pa.string())

    def index_at_position(self, position: int) -> Index:
        """Return the index of the entry whose record contains a position, else of the next one.

        It is ``last_index + 1`` if there is none.

        Raises:
            CorruptRecordError: a record is damaged.
        """
        return Index(index_at_position(self._store.reader, self.first_index, self.last_index + 1, position))

    def split_points(self, start: int, end: int, positions: Sequence[int]) -> list[int]:
        """Return where to divide the entries [start, end) into parts of given sizes, like ``Client.split_points``.

        Raises:
            IndexOutOfRangeError: the range is not in the log.
        """
        if not self.first_index <= start < end <= self.last_index + 1:
            raise out_of_range(self.path, start, end, self.first_index, self.last_index)
        found: list[int] = split_points(self._store.index, start, end, np.array(positions, np.int64)).tolist()
        return found

    def index_at_time(self, timestamp_ms: int) -> Index:
        """Return the index of the first entry appended at or after a time (ms since the epoch).

        It is ``last_index + 1`` if there is none.

        Raises:
            BadRequestError: Java wrote the store, so it has no append times.
            CorruptRecordError: a record is damaged.
        """
        if self.meta is None:
            raise BadRequestError("the store records no append times", str(self.path), "use indexes instead of times")
        return Index(index_at_time(self._store.reader, self.first_index, self.last_index + 1, timestamp_ms))

    def read(self, start: int, end: int, *, max_bytes: int = READ_BYTES) -> pa.RecordBatch:
        """Return entries from ``start`` on, control entries included, with columns of RECORD_SCHEMA.

        May end before ``end`` when ``max_bytes`` is reached, but contains at least one entry.

        Raises:
            IndexOutOfRangeError: ``start`` is not in the log.
            CorruptRecordError: a record is damaged.
        """
        return to_arrow(self.raw(start, end, max_bytes), schema=RECORD_SCHEMA)

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
        bodies = self._store.reader.bodies
        if bodies is None:
            raise BadRequestError(
                "bodies are opaque in this view", str(self.path), "open the store without opaque=True"
            )
        first = self.first_index if start is None else start
        stop = self.last_index + 1 if end is None else min(end, self.last_index + 1)
        if start is not None and not self.first_index <= start <= self.last_index + 1:
            raise out_of_range(self.path, start, stop, self.first_index, self.last_index)
        shown = self.shown(isolation, until)

        def decoded(at: int) -> Iterator[pa.RecordBatch]:
            while (found := self._shown_entries(shown, at, stop, READ_BYTES))[1] > at:
                yield from bodies.decode(found[0])
                at = found[1]

        return pa.RecordBatchReader.from_batches(bodies.schema, decoded(first))

    def raw(self, start: int, end: int, max_bytes: int = READ_BYTES) -> Records:
        """Return records as stored on disk, checked; otherwise like ``read``."""
        if not self.first_index <= start <= self.last_index or end <= start:
            raise out_of_range(self.path, start, end, self.first_index, self.last_index)
        try:
            return self._store.reader.read(start, min(end, self.last_index + 1), max_bytes, gather=True)
        except CorruptRecordError as error:
            first = self.first_index_now
            if start < first:  # retention has deleted it meanwhile
                raise out_of_range(self.path, start, end, first, self.last_index) from error
            raise

    def index_mismatches(self, records: Records) -> list[int]:
        """Return the indexes of those ``records`` whose rows in the index files differ; see ``LogTail``."""
        return self._tail.index_mismatches(records)

    def verify(self) -> StoreReport:
        """Read everything and report all problems; see ``Finding``.

        If retention deletes files before they are read, the rest is checked: see ``StoreReport.deleted``.
        """
        try:
            return _verified(self)
        except (FileNotFoundError, CorruptRecordError):
            if self.first_index_now == self.first_index:
                raise
        with open_store(self.path, bodies=self._store.reader.bodies, files=self._store.files) as now:
            report = now.verify()
        return replace(report, deleted=(self.first_index, report.first_index))

    def close(self) -> None:
        """Close the data and index files."""
        self._store.close()

    def __enter__(self) -> StoreReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _format_of_log(bodies: BodyFormat, view: StoreReader) -> BodyFormat:
    """Return the format for the bodies of a Java log, by its first and last entries."""
    indexes, found = range(view.first_index, view.last_index + 1), []
    for index in {*indexes[:_SAMPLE], *indexes[-_SAMPLE:]}:
        with contextlib.suppress(CorruptRecordError):
            found.append(view.raw(index, index + 1))
    if not found:
        return bodies
    return bodies.of_log(Records(np.concatenate([one.sizes for one in found]), b"".join(one.data for one in found)))


def _continues(view: StoreReader, since: StoreReader) -> bool:
    """Whether a view is of the store of an earlier one, and still contains that view's last entry.

    The same index and term mean the same log up to there (Log Matching, Raft section 5.3).
    """
    if since.damaged or since.gaps or since.last_index < max(since.first_index, view.first_index):
        return False
    if (since.writer, since.log_uuid, since.segment_bytes) != (view.writer, view.log_uuid, view.segment_bytes):
        return False
    row = since._store.index.read(since.last_index, since.last_index + 1)[0]
    header = view._store.reader.header_at(int(row["position"]))
    found = None if header is None else (header.size, header.index, header.term)
    return found == (int(row["size"]), int(row["index"]), int(row["term"]))


def _verified(view: StoreReader) -> StoreReport:
    store, term = view._store, 0
    report = verify_store(store.reader, store.rows, view.first_index, store.writer.checkpoint, view.meta)
    with contextlib.suppress(CorruptRecordError):  # it is one of the findings
        term = view._tail.last_term
    found = [*start_findings(store.files, store.layout, view.meta, last_index=report.last_index, last_term=term)]
    gaps = {gap.position: gap.message for gap in view.gaps}
    for each in report.findings:
        late = each.kind in ("TORN_TAIL", "CORRUPT") and each.start > view.last_index
        if late and store.is_complete_now(ScanCursor(each.position, each.start, view._tail.last_term)):
            continue  # a node or broker wrote it meanwhile
        named = each.kind == "CORRUPT" and each.position in gaps
        found.append(replace(each, message=gaps[each.position]) if named else each)
    if view.missing is not None:  # more than a torn write: the index was written after the data
        position = Position(view.position_end)
        message = "the index has rows of these entries, and the data does not contain them"
        path = str(store.reader.data.path(position))
        found = [each for each in found if each.kind != "TORN_TAIL"]
        found.append(Finding("MISSING", "error", *view.missing, path, position, message))
    return replace(report, findings=tuple(found))

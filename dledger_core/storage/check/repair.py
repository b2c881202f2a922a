"""Replace damaged records by good ones, in an open log or in a store that cannot be opened.

Only fitting records are written: committed entries of a peer, at the same indexes and positions, with valid CRCs and
with terms between those of their good neighbors. Uncommitted entries would do harm: another entry may replace them on
the majority. Nothing is ever truncated.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from dledger_core.config import StorageConfig
from dledger_core.errors import ConfigError, CorruptRecordError, DiskFailedError, StoreMismatchError
from dledger_core.ids import NO_TERM, NUMBER_MAX, TERM_JUMP_MAX, Index, Position, Term
from dledger_core.raft.floor import Floor
from dledger_core.raft.ready import HardState
from dledger_core.record import (
    HEADER_BYTES,
    INDEX_RECORD_BYTES,
    MAGIC_BLANK,
    PREFIX,
    Records,
    contiguous,
    index_records,
    place,
)
from dledger_core.storage.check.damage import Damage, find_damage, write_wrong_rows
from dledger_core.storage.check.holes import InspectedLog, LastBatch, agreed_end, inspect_records, keep_bytes
from dledger_core.storage.check.judge import ScanCursor, Verdict, complete_end, first_fault, native_rules, verdict
from dledger_core.storage.check.recovery import truncate_rows, truncate_tail
from dledger_core.storage.check.scan import RecordBlock, Scanner
from dledger_core.storage.files.file_system import File, Files, OsFiles
from dledger_core.storage.files.index_file import IndexFile, contradiction, term_ranges
from dledger_core.storage.files.layout import (
    Layout,
    LogMeta,
    load_log_meta,
    lock_store,
    open_identity,
    refuse,
    save_log_meta,
)
from dledger_core.storage.files.meta_files import (
    Checkpoint,
    clear_needs_verification,
    hard_state_file,
    load_checkpoint,
    load_floor,
    load_hard_state,
    raise_floor,
    rewrite_unconfirmed,
    save_checkpoint,
    save_hard_state,
    verification_reason,
)
from dledger_core.storage.files.quarantine import end_quarantine, quarantine_reason
from dledger_core.storage.files.segments import Segments, read_failure
from dledger_core.storage.read.record_reader import RecordReader
from dledger_core.storage.tables.tables import cut_back, load_tables
from dledger_core.storage.write.trim import end_interrupted


def _misfit(damage: Damage, what: str, index: int) -> CorruptRecordError:
    return CorruptRecordError(
        f"the peer's records do not fit: {what}",
        damage.path,
        "compare the replicas with jobs/audit_replicas.py",
        {"index": index, "position": damage.position},
    )


def write_back(
    reader: RecordReader, index: IndexFile, damage: Damage, records: Records | None, commit_index: int
) -> Damage | None:
    """Write fetched records over a damaged range, durably, and read them back.

    Args:
        reader: the store.
        index: its index.
        damage: the damaged range.
        records: good entries from ``damage.start`` on, at most to ``damage.end``; None if no entry is damaged.
        commit_index: entries up to here are committed.

    Returns:
        The rest of the damage, or None.

    Raises:
        CorruptRecordError: the records do not fit; nothing was written.
        OSError: the disk failed: it cannot read the neighbors either, or returns other bytes than were written.
    """
    try:
        left = _write_fitting(reader, index, damage, records, commit_index)
    except CorruptRecordError as error:
        if (failure := read_failure(error)) is not None:
            raise failure from error
        raise
    try:
        at = damage.start
        # Read back: a disk that returns other bytes than were written has failed, and nothing it holds is repaired
        # (test_repair_on_disk_that_fails_all_reads_is_a_failed_disk).
        while records is not None and at < damage.start + records.count:
            at = Index(at + reader.read(at, damage.start + records.count, records.nbytes).count)
    except CorruptRecordError as error:
        raise OSError(errno.EIO, os.strerror(errno.EIO), damage.path) from error
    return left


def _write_fitting(
    reader: RecordReader, index: IndexFile, damage: Damage, records: Records | None, commit_index: int
) -> Damage | None:
    data = reader.data
    if records is None or not records.count:
        if damage.start < damage.end:
            raise _misfit(damage, "there are no records", damage.start)
        _write_blank(data, damage.position)
        data.sync([data.base_of(damage.position)])
        return None
    _check(reader, index, damage, records, commit_index)
    positions = records.headers["position"].astype(np.int64)
    end = int(positions[-1]) + int(records.sizes[-1])
    stop = damage.start + records.count
    # From here on only bytes of the damaged range are written, so a crash leaves at most the damage there was
    # (test_repair_resumes_after_a_crash_at_any_step).
    touched = _write_records(data, damage.position, records)
    if stop == damage.end and end < damage.position + damage.length:
        _write_blank(data, end)
        touched.add(data.base_of(end))
    data.sync(sorted(touched))  # before the rows: a crash must not tear a record and its row
    index.write(damage.start, index_records(records))
    index.sync(damage.start, stop)
    if stop == damage.end:
        return None
    left = damage.position + damage.length - end
    return Damage(Index(stop), damage.end, Position(end), left, str(data.path(end)), damage.message)


def _check(reader: RecordReader, index: IndexFile, damage: Damage, records: Records, commit_index: int) -> None:
    """Raise unless the records fit; nothing is written yet."""
    data, stop = reader.data, damage.start + records.count
    # A later leader may replace an uncommitted entry (dissertation 3.6.2), so only a committed one of a peer is
    # certainly this log's too (test_repair_rejects_records_that_do_not_fit).
    if stop > damage.end or stop - 1 > commit_index:
        raise _misfit(damage, "they are not known to be committed", stop - 1)
    if int(records.sizes.max()) > data.segment_bytes - PREFIX.size:
        raise _misfit(damage, "a record fits no segment", damage.start)
    headers = records.headers
    positions = place(records.sizes, damage.position, data.segment_bytes)
    if not bool((headers["position"] == positions).all()):
        raise _misfit(damage, "they have other positions", damage.start)
    fault = first_fault(records, damage.start, reader.rules, positions=positions)
    if fault is not None:
        raise _misfit(damage, fault[1].value, damage.start + fault[0])
    end = int(positions[-1]) + int(records.sizes[-1])
    limit = damage.position + damage.length
    # The gap between the last fetched record and the next good one can only be a BLANK.
    if stop == damage.end and end != limit and data.base_of(end) + data.segment_bytes != limit:
        raise _misfit(damage, "they do not reach the next good record", stop - 1)
    if end > limit:
        raise _misfit(damage, "they overlap good records", stop - 1)
    # A peer with another history at these indexes has other terms; CRCs alone would accept its records.
    before = _neighbor_term(reader, index, damage.start - 1)
    after = _neighbor_term(reader, index, stop, limit) if stop == damage.end else None
    terms = headers["term"]
    if (before is not None and int(terms[0]) < before) or (after is not None and int(terms[-1]) > after):
        raise _misfit(damage, "their terms are not between those of the neighbors", damage.start)
    _cross_check(reader, index, damage, records)


def _neighbor_term(reader: RecordReader, index: IndexFile, at: int, position: int | None = None) -> int | None:
    """Return the term of an entry, if its row and its record agree: a header has no CRC, and may be damaged too."""
    if at < 0:
        return None
    row = index.read(at, at + 1)[0]
    header = reader.header_at(int(row["position"]) if position is None else position)
    return header.term if header is not None and header.index == at and header.term == int(row["term"]) else None


def _cross_check(reader: RecordReader, index: IndexFile, damage: Damage, records: Records) -> None:
    """Raise if a row contradicts a fetched record, unless the record here equals it: then the row is damaged."""
    rows = index.read(damage.start, damage.start + records.count)
    for at in np.flatnonzero(contradiction(rows, index_records(records))).tolist():
        fetched = records.slice(at, at + 1).first
        found = reader.header_at(fetched.position)
        if found is None or replace(found, flags=0, crc=0) != replace(fetched, flags=0, crc=0):
            raise _misfit(damage, "term and magic differ from the record here and from its row", damage.start + at)


def _write_records(data: Segments, position: int, records: Records) -> set[int]:
    """Write records at their positions, BLANKs between segments; return the segments that were written."""
    view, offset, touched = memoryview(records.data), 0, set[int]()
    for at, length in contiguous(records.headers["position"].astype(np.int64), records.sizes):
        if at != position:
            _write_blank(data, position)
            touched.add(data.base_of(position))
        base = data.base_of(at)
        if base not in data.bases:
            data.create(base)
            data.sync_dir()
        data.fill_up(base)
        data.write(at, [view[offset : offset + length]])
        touched.add(base)
        offset += length
        position = at + length
    return touched


def _write_blank(data: Segments, position: int) -> None:
    """Write the BLANK that fills a segment from ``position`` on, and zeros after it."""
    stop = data.base_of(position) + data.segment_bytes
    data.write(position, [PREFIX.pack(MAGIC_BLANK, stop - position)])
    data.zero(position + PREFIX.size, stop)


class StoreRepair:
    """A native store that is locked for repair, whether it can be opened as a log or not; made by ``open``.

    It has many methods because a repair reads and writes all files of a store under one lock: each method is one step
    for a caller (inspect, write back, end the log), and none is left to other classes half done.
    """

    def __init__(self, files: Files, layout: Layout, meta: LogMeta, lock: File | None, config: StorageConfig) -> None:
        self.meta = meta
        self._files = files
        self._layout = layout
        self._lock = lock
        self._closed = False
        self._config = config
        write = lock is not None
        self._data = Segments.load(files, layout.data, meta.data_segment_bytes, write=write, gaps=True)
        index = Segments.load(files, layout.index, meta.index_segment_bytes, write=write, gaps=True)
        self._index = IndexFile(index)
        self._reader = RecordReader(self._data, self._index, native_rules(meta))
        self._checkpoint = load_checkpoint(files, layout.checkpoint)

    @classmethod
    def open(
        cls,
        directory: Path | str,
        *,
        group: str | None = None,
        node_id: str | None = None,
        files: Files | None = None,
        config: StorageConfig | None = None,
        write: bool = True,
    ) -> StoreRepair:
        """Open a store for repair.

        Args:
            directory: the one that contains ``data/`` and ``index/``.
            group: the group it must belong to; None = any.
            node_id: the node it must belong to; None = any.
            files: the file system.
            config: for its limit on unsynced bytes.
            write: take the lock; False = read only, also while a node has the store open.

        Raises:
            StoreMismatchError: it belongs to another group or node, or is not a native store.
            StoreBusyError: another process has it open.
        """
        files, layout = files or OsFiles(), Layout(Path(directory))
        try:
            found = load_log_meta(files, layout.log_meta)
            if found is None or (found.discarding and not write):
                raise StoreMismatchError(
                    "no native store found", str(layout.root), "name the store of a node; of a broker, see --from"
                )
            group, node_id = group or found.group, node_id or found.node_id
            open_identity(files, layout, group=group, node_id=node_id)
            lock = lock_store(files, layout) if write else None
            try:
                if found.discarding:
                    for parent in (layout.root, layout.meta, layout.data, layout.index):
                        files.sync_dir(parent)  # the restart must be durable before anything is deleted
                    found = end_interrupted(files, layout, found)
                return cls(files, layout, found, lock, config or StorageConfig())
            except BaseException:
                if lock is not None:
                    lock.close()
                raise
        except OSError as error:
            refuse(error, layout.root)

    @property
    def verification_reason(self) -> str | None:
        """Reason why the store needs verification, or None."""
        return verification_reason(self._files, self._layout)

    @property
    def quarantine_reason(self) -> str | None:
        """Reason why the replica is quarantined, or None."""
        return quarantine_reason(self._files, self._layout)

    def end_quarantine(self) -> None:
        """Let the replica participate in its group again, as a recovering voter.

        It votes again once a leader has compared its log: until then it may have entries that the group never
        committed, and its vote could elect a leader that has them.

        Raises:
            CorruptRecordError: the node's term is unknown.
            DiskFailedError: a write failed.
        """
        term = load_hard_state(self._files, self._layout, last_term=0).term
        with self._writing():
            # The floor first: a crash in between leaves a quarantined replica, never one that votes
            # (test_repaired_replica_is_a_recovering_voter_after_its_quarantine).
            raise_floor(self._files, self._layout, Floor(term), term)
            end_quarantine(self._files, self._layout)

    @property
    def floor(self) -> Floor | None:
        """The least end of a log that the node elects; see ``load_floor``."""
        with contextlib.suppress(CorruptRecordError):
            term = load_hard_state(self._files, self._layout, last_term=0).term
            return load_floor(self._files, self._layout, term)
        return load_floor(self._files, self._layout, NO_TERM)

    def set_term(self, term: Term) -> None:
        """Replace an unusable term, and forget the vote.

        The node must not be asked for a vote in a term in which it voted before. So the term is one that no node of
        the group ever had, and all of them get it while none runs.

        Raises:
            ConfigError: it is not above the term of an entry, or too high.
            DiskFailedError: the write failed.
        """
        last_term = self._last_term()
        # At or below the last entry's term the node may have voted already (dissertation 3.8;
        # test_term_is_set_above_the_entries_and_without_a_vote).
        if not last_term < term <= NUMBER_MAX - TERM_JUMP_MAX:
            raise ConfigError(
                f"the term must be above {last_term}, the last entry's, and at most {NUMBER_MAX - TERM_JUMP_MAX}, "
                f"got {term}",
                str(self.path),
                "choose a term above every term that the nodes logged, and set it on all of them",
            )
        with self._writing():
            save_hard_state(self._files, self._layout, HardState(term, None))

    def _last_term(self) -> int:
        """Return the term of the last index row, also of a torn tail; without one that of the entry before the log."""
        rows = self._index.segments
        end = rows.written_end(self.meta.first_index * INDEX_RECORD_BYTES) if rows.bases else 0
        last = -(-end // INDEX_RECORD_BYTES) - 1
        if last < self.meta.first_index:
            return self.meta.previous_term or 0
        return int(self._index.read(last, last + 1)[0]["term"])

    @property
    def path(self) -> Path:
        """The store's directory."""
        return self._layout.root

    def find(self, *, rewrite_rows: bool = False) -> list[Damage]:
        """Read all entries that were durable and return the damage.

        Args:
            rewrite_rows: correct index rows that do not agree with a good record.

        Raises:
            DiskFailedError: writing the rows failed.
        """
        end = self._durable_end()
        if end is None:
            return []
        first = ScanCursor(self.meta.first_position, self.meta.first_index)

        def on_block(block: RecordBlock) -> None:
            if self._closed:
                raise RuntimeError("the store was closed during the read")
            if rewrite_rows:
                write_wrong_rows(self._index, block.records, block.first_index)

        with self._writing():
            found = list(find_damage(self._reader, self._index, first, *end, on_block))
            if rewrite_rows:
                self._index.segments.sync(self._index.segments.bases)
        if not found or self._checkpoint is not None:
            return found  # the checkpoint covers every entry that was read
        written_end = self._data.written_end(self.meta.first_position)
        return [damage for damage in found if self._verdict(damage, written_end) is Verdict.DAMAGED]

    def _verdict(self, damage: Damage, written_end: int) -> Verdict:
        return verdict(
            damage.position,
            covered_end=0,
            written_end=written_end,
            unsynced_bytes_max=self._config.unsynced_bytes_max,
        )

    def _durable_end(self) -> tuple[int, int] | None:
        """Return the ends (index, position) of the durable entries by the checkpoint, or else by the index."""
        # Without a checkpoint only the last row shows the end (test_find_without_checkpoint_trusts_the_last_row).
        if self._checkpoint is not None:
            return self._checkpoint.durable_index + 1, self._checkpoint.position
        rows = self._index.segments
        end = rows.written_end(self.meta.first_index * INDEX_RECORD_BYTES) if rows.bases else 0
        last = -(-end // INDEX_RECORD_BYTES) - 1
        row = self._index.read(last, last + 1)[0] if last >= self.meta.first_index else None
        if row is None or int(row["index"]) != last or int(row["size"]) < HEADER_BYTES:
            return None
        return last + 1, int(row["position"]) + int(row["size"])

    def prepare(self) -> None:
        """Create missing data files and extend short ones with zeros, which count as damage.

        Raises:
            DiskFailedError: a write failed.
        """
        end = self._durable_end()
        if end is None:
            return
        data = self._data
        with self._writing():
            # Zeros in place of missing bytes are damage with a place and a size, which the search then finds.
            for base in range(data.base_of(self.meta.first_position), end[1], data.segment_bytes):
                if base not in data.bases:
                    data.create(base)
                data.fill_up(base)
            data.sync(data.bases)
            data.sync_dir()

    def set_floor_if_end_is_lost(self, found: Sequence[Damage]) -> None:
        """Set the floor (T, ∞) if entries after the last durable one may be lost too.

        Called before any repair: afterwards nothing shows that the end was damaged.

        Raises:
            CorruptRecordError: the node's term is unknown.
            DiskFailedError: writing the marker failed.
        """
        end = self._durable_end()
        # If the last durable entry is damaged, later ones may be too, and nothing counts them: the node may have
        # acknowledged them (test_repair_marks_recovering_voter_before_repairing_damaged_end).
        if end is not None and any(damage.end >= end[0] for damage in found) and not self._end_is_known(*end):
            self._set_open_floor()

    def _end_is_known(self, end: int, end_position: int) -> bool:
        """Whether complete batches follow the durable entries, up to a clean end: then no later entry is lost."""
        position = end_position
        scanner = Scanner(self._data, self._index, self._reader.rules, ScanCursor(end_position, end))
        with contextlib.suppress(CorruptRecordError):  # the disk cannot read it
            for block in scanner.blocks() if self._checkpoint is not None and self._data.covers(end_position) else ():
                at = complete_end(block.records)
                if at is not None:
                    position = int(block.positions[at]) + int(block.records.sizes[at])
        # Appended after the lost bytes, and complete up to the last one: nothing behind them can be missing
        # (test_damage_before_complete_records_up_to_clean_end_is_no_lost_end).
        return position > end_position and position == self._data.written_end(end_position)

    def _set_open_floor(self) -> None:
        # A vote that was lost altogether is refused here: a term that is too low would let the floor end too early
        # (test_recovering_marker_needs_the_nodes_term).
        known = hard_state_file(self._layout.hard_state).load(self._files).exists
        term = load_hard_state(self._files, self._layout, last_term=0 if known else 1).term
        with self._writing():
            raise_floor(self._files, self._layout, Floor(term), term)

    @property
    def commit_index(self) -> int:
        """Last entry that is known to be committed."""
        first = self.meta.first_index - 1
        return first if self._checkpoint is None else max(first, self._checkpoint.commit_index)

    def end_before_uncommitted(self) -> None:
        """End the log before damage to uncommitted entries, for now: as a recovering voter, with all bytes kept.

        No peer can be asked for such entries, and without them the node could not help to commit them. Entries that a
        later leader sends replace the rest. The next start finds the end, from the last committed entry on.

        Raises:
            CorruptRecordError: the last committed entry is damaged too.
            DiskFailedError: a write failed.
        """
        last = self.commit_index
        position = self.meta.first_position
        if last >= self.meta.first_index:
            record = self._reader.read(last, last + 1, 1).first
            position = record.position + record.size
        checkpoint = Checkpoint(last, last, position)
        # The floor first: with a lower checkpoint alone the node would vote as if its log ended there
        # (test_log_ends_before_damage_to_uncommitted_entries_for_now).
        self._set_open_floor()
        with self._writing():
            save_checkpoint(self._files, self._layout.checkpoint, checkpoint)
        self._checkpoint = checkpoint

    def inspect(self) -> InspectedLog:
        """Return the log that the store contains; the store is read completely."""
        return inspect_records(self._reader, self._index, self.meta, self._durable_end())

    def term_ranges(self, first_index: int, last_index: int) -> tuple[tuple[int, int], ...]:
        """Return (term, first index) of each range of entries with one term; empty if index rows are damaged."""
        with contextlib.suppress(CorruptRecordError):
            found = term_ranges(self._reader.term_at, first_index, last_index)
            return tuple((each.term, each.first_index) for each in found)
        return ()

    def read(self, start: int, end: int, max_bytes: int) -> Records:
        """Return good records [start, ...) up to ``end`` or ``max_bytes``; raise CorruptRecordError where damaged."""
        return self._reader.read(start, end, max_bytes)

    def agreed_end(self, start: int, records: Records, behind: Records | None, commit_index: int) -> int:
        """See ``holes.agreed_end``."""
        return agreed_end(self._reader, self._index, start, records, behind, commit_index)

    def end_before_hole(self, start: int) -> Path | None:
        """End the log before its first hole, and keep all bytes from there on in a file; return its path.

        Only of a store that has retired its log. None if the first hole does not start at ``start``. A cut that a
        crash interrupted has removed the end of the log, and is continued.

        Raises:
            CorruptRecordError: the tables are damaged, and their entries are deleted.
            DiskFailedError: a write failed.
        """
        found = self.inspect()
        if (found.holes[0].start if found.holes else found.last_index + 1) != start:
            return None
        return self._end_before(start)

    def end_after(self, index: int) -> Path | None:
        """End the log after an entry, or after the batch before it, and keep all bytes from there on in a file.

        Return the file's path, or None if the log has no later entry. Can be repeated as ``end_before_hole``.

        Raises:
            DiskFailedError: a write failed.
        """
        return self._end_before(index + 1) if self.inspect().last_index > index else None

    def _end_before(self, start: int) -> Path:
        durable = self._durable_end()
        before = LastBatch(self.meta)
        list(find_damage(self._reader, self._index, before.cursor, start, before.position, before.on_block))
        with self._writing():
            # The copy is durable before anything is cut off, and checkpoint and tables are lowered before the data is:
            # above the end of the log they mean a lost end (test_log_that_was_cut_is_no_log_that_lost_its_end).
            path = keep_bytes(
                self._files, self._layout, self._data, self.meta.log_uuid, before.last_index + 1, before.position
            )
            self.cut_back_tables(before.last_index)
            if durable is not None and durable[0] > before.last_index + 1:
                commit_index = min(self.commit_index, before.last_index)
                checkpoint = Checkpoint(before.last_index, commit_index, before.position)
                save_checkpoint(self._files, self._layout.checkpoint, checkpoint)
                self._checkpoint = checkpoint
            truncate_tail(self._data, before.position, self._data.written_end(before.position))
            truncate_rows(self._index, before.last_index)
            self._index.segments.sync(self._index.segments.bases)
        return path

    def cut_back_tables(self, last_index: int) -> None:
        """Let the tables forget, durably, the entries after an index, also those that a snapshot brought.

        Raises:
            CorruptRecordError: the tables are damaged, and their entries are deleted.
            DiskFailedError: a write failed.
        """
        with self._writing():
            table_store = self._files.open_tables(self._layout.tables, lambda error: None)  # sync reports it
            try:
                tables = load_tables(self._files, self._layout, self.meta, table_store.read)
                if tables.applied_index <= last_index:
                    return
                if self.meta.tables_index is not None and self.meta.tables_index > last_index:
                    # First: a start refuses tables that are older than this index
                    # (test_tables_of_a_snapshot_are_cut_back_to_the_end_of_a_log_that_is_continued).
                    self.meta = replace(self.meta, tables_index=last_index)
                    save_log_meta(self._files, self._layout.log_meta, self.meta)
                cut_back(tables, table_store, self.meta, last_index)
            finally:
                table_store.close()

    def write_back(self, damage: Damage, records: Records | None, commit_index: int) -> Damage | None:
        """See ``write_back``.

        Raises:
            CorruptRecordError: the records do not fit; nothing was written.
            DiskFailedError: a write failed.
        """
        with self._writing():
            return write_back(self._reader, self._index, damage, records, commit_index)

    def settle(self) -> None:
        """Sync all readable data and clear the needs-verification marker. Last step of a repair.

        Raises:
            DiskFailedError: a write failed.
        """
        with self._writing():
            # After a failed sync the kernel calls lost pages clean: a sync alone would write nothing (mutation "the
            # page cache after a failed sync is trusted"). The marker goes last, so that a crash repeats all of it.
            if self.verification_reason is not None:
                rewrite_unconfirmed(self._files, self._layout, self._data, self._index.segments)
            clear_needs_verification(self._files, self._layout)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except PermissionError:  # not a disk failure
            raise
        except OSError as error:
            raise DiskFailedError(
                f"writing failed: {error.strerror or error}", str(self.path), "check the disk"
            ) from error

    def close(self) -> None:
        """Close the store; a ``find`` in another thread ends."""
        self._closed = True
        self._data.close()
        self._index.segments.close()
        if self._lock is not None:
            self._lock.close()

    def __enter__(self) -> StoreRepair:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

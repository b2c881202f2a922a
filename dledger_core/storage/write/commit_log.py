"""``CommitLog``: one replica's log on disk, as the Raft core and the node see it.

Three kinds of callers and their calls:

* the event loop stages (``place``, ``stage``, ``stage_truncate``, ``stage_restart``): batches get their positions,
  nothing is read or written;
* one writer thread persists (``persist``, ``save_checkpoint``, ``trim``), in the order of the Readys;
* any thread reads durable entries.

The first write or sync that fails is the last one, whichever thread asked for it and whatever the error is, a full disk
too: from then on the log rejects writes, because a failed sync leaves the contents of the disk unknown, and the kernel
reports it only once per open file. Reads continue.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final, Self

from dledger_core.config import StorageConfig
from dledger_core.continuation import Chain
from dledger_core.errors import DiskFailedError, StoreMismatchError, invariant
from dledger_core.founding import LogConstants
from dledger_core.ids import NO_INDEX, NO_TERM, Index, Position, Term
from dledger_core.raft.batch import Batch, Proposal
from dledger_core.raft.floor import Floor
from dledger_core.raft.pointers import LogPointers
from dledger_core.raft.ready import HardState
from dledger_core.record import INDEX_RECORD_BYTES, ProposedBatch, Records
from dledger_core.storage.check.damage import Damage, write_wrong_rows
from dledger_core.storage.check.judge import native_rules
from dledger_core.storage.check.recovery import RecoveredEnd, recover
from dledger_core.storage.check.repair import write_back
from dledger_core.storage.files.acknowledged_file import Remembered, load_acknowledged, save_acknowledged
from dledger_core.storage.files.file_system import DiskSpace, File, Files, OsFiles
from dledger_core.storage.files.identity import constants_of
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.layout import Layout, LogMeta, claim_store, refuse, save_log_meta
from dledger_core.storage.files.members_file import ConfigurationEntry, KnownConfigurations, members_file
from dledger_core.storage.files.meta_files import (
    Checkpoint,
    FloorFile,
    checkpoint_file,
    hard_state_file,
    load_checkpoint,
    load_hard_state,
    mark_needs_verification,
    raise_floor,
    save_checkpoint,
    save_hard_state,
)
from dledger_core.storage.files.quarantine import mark_quarantined
from dledger_core.storage.files.segments import Segments
from dledger_core.storage.files.table_store import Rows
from dledger_core.storage.read import log_queries
from dledger_core.storage.read.record_reader import RecordReader
from dledger_core.storage.tables.tables import LogTables, TableChanges, load_tables, save_tables
from dledger_core.storage.write.appender import Appender, Preallocation, bounded
from dledger_core.storage.write.durable_log import DurableLog
from dledger_core.storage.write.staging import StagedEnd, Staging, check_proposal, with_java_entries
from dledger_core.storage.write.trim import LogStart, end_interrupted, remove_everything


class CommitLog(DurableLog):
    """One replica's durable log; made by ``open``.

    Attributes:
        clock_ms: returns the append time of a new batch, ms since the epoch.
        preallocation_type: runs ``preallocate``; a simulation has no thread for it.
    """

    preallocation_type: ClassVar[type[Preallocation]] = Preallocation

    def __init__(self, files: Files, layout: Layout, meta: LogMeta, config: StorageConfig, lock: File) -> None:
        self.config: Final = config
        self.clock_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
        self._files = files
        self._layout = layout
        self._meta = meta
        self._lock = lock
        self._failure: DiskFailedError | None = None
        self._removals = 0
        for directory in (layout.root, layout.meta, layout.data, layout.index):
            files.sync_dir(directory)  # a file created by a killed process is visible but may not be durable yet
        self._meta = meta = end_interrupted(files, layout, meta)
        self._table_store = files.open_tables(layout.tables, self._fail)
        self._tables: LogTables | None = self._stored_tables()
        data = Segments.load(
            files, layout.data, config.data_segment_bytes, write=True, open_max=config.open_segments_max
        )
        index = Segments.load(
            files, layout.index, config.index_segment_bytes, write=True, gaps=True, open_max=config.open_segments_max
        )
        self._index = IndexFile(index)
        self._reader = RecordReader(data, self._index, native_rules(meta))
        hard_state_file(layout.hard_state).make_equal(files)
        checkpoint_file(layout.checkpoint).make_equal(files)
        members_file(layout).make_equal(files)
        self._checkpoint = load_checkpoint(files, layout.checkpoint)
        self._hard_state = load_hard_state(files, layout, 0)
        saved = members_file(layout).load(files).value
        # A store without entries that never voted has acknowledged nothing, so it has lost nothing.
        is_new = not data.bases and self._hard_state == HardState(Term(0), None)
        self._members = saved or KnownConfigurations(lost=not is_new)
        if not is_new and (self._checkpoint is None or saved is None or self._has_lost_entries()):
            # Before recovery changes anything: the end is lost, although the files may not show it.
            raise_floor(files, layout, Floor(self._hard_state.term), self._hard_state.term)
        self.acknowledged: Final = load_acknowledged(files, layout)
        self._floor_file: Final = FloorFile(files, layout, self._hard_state.term)
        end = self._recover(keep_tail=self.floor is not None and self.floor.is_open)
        self.recovered: Final[RecoveredEnd] = end
        self._members = self._find_configurations(end)
        if self._members != saved:
            members_file(layout).save(files, self._members)
        self._first_index, self._last_index = end.first_index, end.last_index
        load_hard_state(files, layout, end.term or meta.previous_term or 0)  # raises if it is older than the log
        self._tables = self._cut_back(self._tables, end.last_index)
        recorded = self._checkpoint.commit_index if self._checkpoint is not None else NO_INDEX
        self._commit_index = min(max(recorded, end.first_index - 1), end.last_index)
        self._appender = Appender(data, self._index, end, config.preallocate_bytes)
        self._staging = Staging(config, StagedEnd(end.last_index + 1, end.position, end.time_ms), self._certain_end_of)
        self._preallocation = self.preallocation_type(self.preallocate)

    def _recover(self, *, keep_tail: bool) -> RecoveredEnd:
        return recover(
            self._reader,
            self._index,
            self._meta,
            self._checkpoint,
            unsynced_bytes_max=self.config.unsynced_bytes_max,
            keep_tail=keep_tail,
        )

    def _has_lost_entries(self) -> bool:
        """Whether the log ends before an entry that was durable: what looks like a torn tail is damage.

        Two files name such entries: the members file configurations, the tables the newest control entry that they
        include.
        """
        assert self._tables is not None
        newest = max(self._members.started(self._meta.first_index).newest_index, self._tables.durable_index)
        covered = NO_INDEX if self._checkpoint is None else self._checkpoint.durable_index
        return newest > max(covered, self._meta.first_index - 1) and self._recover(keep_tail=True).last_index < newest

    def _cut_back(self, tables: LogTables, last_index: int) -> LogTables:
        """Return the tables without the entries that the log has lost; store them before others get their indexes.

        Tables of a log that contains its first entry are derived from it again.
        """
        if tables.durable_index <= last_index:
            return tables
        if self._meta.tables_index is None:
            tables = LogTables()
        else:
            tables.forget_after(Index(last_index))
        self._table_store.write(TableChanges.complete(tables).rows, replace=True)
        self._table_store.sync()
        return tables

    def _find_configurations(self, end: RecoveredEnd) -> KnownConfigurations:
        """Return the configurations of the file and of the log.

        The checkpoint covers a configuration entry only after the file names it, so only later entries are searched.
        """
        known = self._members.started(self._meta.first_index).trimmed(end.first_index)
        known = known.checked(end.first_index, end.last_index, self._reader.term_at)
        covered = NO_INDEX if known.lost or self._checkpoint is None else self._checkpoint.durable_index
        begin = max(end.first_index, covered + 1)
        found = log_queries.configuration_entries(self._reader, begin, end.last_index + 1)
        entries = {entry.index: entry for entry in (*found, *known.entries)}.values()
        return known.with_entries(entries).completed(end.first_index)

    @classmethod
    def open(
        cls,
        directory: Path | str,
        *,
        group: str,
        node_id: str,
        config: StorageConfig | None = None,
        files: Files | None = None,
    ) -> CommitLog:
        """Open a store, or create one where there is none; recover from a crash.

        Args:
            directory: the store, ``<dir>/<group>/dledger-<node id>``.
            group: the group it must belong to.
            node_id: the node it must belong to.
            config: segment sizes and profile apply only to a new store; an old one keeps its own.
            files: the file system.

        Raises:
            StoreMismatchError: the directory belongs to another node or group, or is not a store; nothing was written.
            StoreBusyError: another process has it open.
            CorruptRecordError: the store is damaged; nothing was truncated.
            ConfigError: the directory cannot be created or written.
        """
        files, config, layout = files or OsFiles(), config or StorageConfig(), Layout(Path(directory))
        try:
            meta, lock = claim_store(files, layout, group=group, node_id=node_id, config=config)
            try:
                log = cls(files, layout, meta, meta.effective(config), lock)
                log._write_checkpoint()
            except BaseException:
                lock.close()
                raise
        except OSError as error:
            refuse(error, layout.root)
        return log

    # --- state --------------------------------------------------------------------------------------------------

    @property
    def directory(self) -> Path:
        """The store's directory."""
        return self._layout.root

    @property
    def hard_state(self) -> HardState:
        """Term and vote, as last made durable."""
        return self._hard_state

    @property
    def commit_index(self) -> Index:
        """A lower bound on the commit index; after ``open`` the recorded one."""
        return Index(self._commit_index)

    @property
    def configurations(self) -> Sequence[ConfigurationEntry]:
        """The configurations that the log contains or that precede it, in order; empty if it knows none."""
        return self._members.of_log(self._last_index)

    @property
    def ends_below_members(self) -> bool:
        """Whether the log has lost the newest configuration entry, or may have: it does not know its group."""
        return self._members.ends_above(self._last_index)

    @property
    def floor(self) -> Floor | None:
        """The least end of a log that the node elects, as written; None if it has lost nothing."""
        return self._floor_file.floor

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log, or None while the node does not know it."""
        return self._meta.log_uuid

    @property
    def meta(self) -> LogMeta:
        """Identity and constants of the log, and its start. Any thread may call."""
        return self._meta

    @property
    def chain(self) -> Chain:
        """The logs that the log continues, oldest first."""
        return self._meta.continues

    @property
    def constants(self) -> LogConstants:
        """Constants of the log that are fixed when it is founded."""
        return constants_of(self._meta, self.config)

    @property
    def failure(self) -> DiskFailedError | None:
        """Reason why the log rejects writes, or None."""
        return self._failure

    def _stored_tables(self) -> LogTables:
        return load_tables(self._files, self._layout, self._meta, self._table_store.read)

    def load_tables(self) -> LogTables:
        """Return the stored tables; later control entries of the log are not applied yet."""
        tables, self._tables = self._tables, None
        return tables if tables is not None else self._stored_tables()

    def save_tables(self, changes: TableChanges) -> None:
        """Store changes of the tables by committed entries that are in the log; called by the writer thread.

        Changes from before the last restart of the log come too late, and are dropped.
        """
        with self._writing():
            self._save_tables(changes)

    def _save_tables(self, changes: TableChanges) -> None:
        if changes.rows and changes.applied_index >= (self._meta.tables_index or NO_INDEX):
            if self._appender.unsynced_bytes:  # page-cache: the tables must never be ahead of the log
                self._appender.sync()
            self._table_store.write(changes.rows, replace=changes.is_complete)

    def scan_tables(self, begin: bytes, end: bytes, count: int) -> Rows:
        """Return stored rows of the tables; see ``TableStore.scan``. Any thread may call."""
        return self._table_store.scan(begin, end, count)

    def tables_image(self) -> bytes:
        """Return the stored tables as bytes, for a snapshot install. Any thread may call."""
        return self._table_store.image()

    def rows_in_image(self, image: bytes) -> Rows | None:
        """Return the rows of another store's image; raise DamagedTablesError. Any thread may call."""
        return self._files.rows_in_image(image)

    def space(self) -> tuple[Position, DiskSpace]:
        """Return the end of the log on disk, then the free space; any thread may call."""
        position = self._appender.position
        return Position(position), self._files.space(self._layout.root)

    def check_proposal(self, proposal: ProposedBatch) -> None:
        """Raise BadRequestError if the batch exceeds a limit of the log."""
        check_proposal(proposal, self.config)

    def pointers(self, core: LogPointers) -> LogPointers:
        """Return the core's log pointers with those of the files added."""
        checkpoint = self._checkpoint
        return replace(
            core,
            stored_last_index=self._last_index,
            checkpoint_durable_index=None if checkpoint is None else checkpoint.durable_index,
            checkpoint_commit_index=None if checkpoint is None else checkpoint.commit_index,
            position_end=self._appender.position,
            staged_end=self._staging.end,
        )

    # --- event loop ---------------------------------------------------------------------------------------------

    @property
    def staged_end(self) -> Position:
        """End of the last staged record."""
        return self._staging.end

    @property
    def newest_time_ms(self) -> int:
        """Append time of the last staged entry; no later one is lower."""
        return self._staging.time_ms

    def place(self, proposal: Proposal, first_index: Index, term: Term, now_ms: int | None = None) -> Batch:
        """Encode a leader's batch at the staged end, without I/O, with an append time that never decreases.

        Raises:
            BadRequestError: it exceeds a limit; nothing changed.
        """
        invariant(isinstance(proposal, ProposedBatch), "the store cannot encode this proposal", kind=type(proposal))
        assert isinstance(proposal, ProposedBatch)
        return self._staging.place(proposal, first_index, term, self.clock_ms() if now_ms is None else now_ms)

    def stage(self, batch: Batch) -> None:
        """Add a leader's batch at the staged end, without I/O.

        Raises:
            CorruptRecordError: its records do not continue the staged end exactly.
        """
        self._staging.stage(batch)

    def stage_truncate(self, index: Index) -> None:
        """Move the staged end back to before entry ``index``."""
        self._staging.truncate(index)

    def stage_restart(self, start: LogStart) -> None:
        """Move the staged end to the new start of the log; the same ``start`` must be passed to ``persist``."""
        self._staging.restart(StagedEnd(start.first_index, start.position, 0))

    # --- writer thread ------------------------------------------------------------------------------------------

    def persist(
        self,
        hard_state: HardState | None,
        truncate_from: Index | None,
        batches: Sequence[Batch],
        restart: LogStart | None = None,
    ) -> None:
        """Make a Ready durable: the hard state, the restart, the truncation, then all batches with one sync.

        The hard state is first: an entry of a term is durable only after the term is, or a restart could vote in a term
        that its own log exceeds.

        Raises:
            DiskFailedError: a write or sync failed, now or earlier.
        """
        with self._writing():
            if hard_state is not None:
                invariant(
                    hard_state.term >= self._hard_state.term,
                    "the term on disk would decrease",
                    term=hard_state.term,
                    stored=self._hard_state.term,
                )
                save_hard_state(self._files, self._layout, hard_state)
                self._hard_state = hard_state
            if restart is not None:
                self._restart(restart)
            if truncate_from is not None:
                self._truncate(truncate_from)
            if batches:
                self._save_meta(with_java_entries(self._meta, batches))
                self._append(batches)

    def _append(self, batches: Sequence[Batch]) -> None:
        # Recovery judges a bad record further from the end than ``unsynced_bytes_max`` as damage, so this many bytes
        # must never be unsynced at once. Half of it, because recovery cannot know where a sync stopped.
        limit = max(self.config.unsynced_bytes_max // 2, 1)
        rolled = False
        for share in bounded(batches, limit):
            invariant(
                share[0].first_index == self._last_index + 1,
                "a batch leaves a gap in the files",
                first=share[0].first_index,
                last=self._last_index,
            )
            rolled |= self._appender.append(share)
            if self.config.durability == "fsync" or self._appender.unsynced_bytes > limit:
                self._sync_measured()
            self._last_index = share[-1].last_index
            self._staging.persisted(share)
        self._know(self._members.appended(batches))
        if rolled:
            self._write_checkpoint()
        if self.config.preallocate_bytes:
            self._preallocation.poke()

    def _sync_measured(self) -> None:
        began = time.perf_counter()
        self._appender.sync()
        if self.on_sync is not None:
            self.on_sync(time.perf_counter() - began)

    def _know(self, members: KnownConfigurations) -> None:
        """Replace the members file after the log is durable, whatever ``durability`` says."""
        if members != self._members:
            self._appender.sync()
            self._appender.sync_index()
            members_file(self._layout).save(self._files, members)
            self._members = members

    def _truncate(self, index: int) -> None:
        if index > self._last_index:
            return
        invariant(
            index > self._commit_index,
            "a committed entry would be truncated",
            index=index,
            commit_index=self._commit_index,
        )
        end = self._certain_end_of(index - 1)
        members = self._members.truncated(index, self._last_index)
        self._last_index = index - 1
        self._removals += 1
        # Before the truncation: a checkpoint above the end of the log means damage.
        if self._checkpoint is not None and self._checkpoint.durable_index >= index:
            self._save(Checkpoint(index - 1, min(self._commit_index, index - 1), end.position))
        self._appender.truncate(end.position, index)
        self._know(members)

    def save_checkpoint(self, commit_index: int) -> None:
        """Record the durable and the committed end. Raises like ``persist``."""
        with self._writing():
            self._commit_index = max(self._commit_index, min(commit_index, self._last_index))
            self._write_checkpoint()

    def raise_floor(self, floor: Floor) -> None:
        """Set or raise the floor of an open log. Raises like ``persist``.

        Where the end is lost, the members file was set back with the log, so this store does not know its group either,
        also after a restart.
        """
        with self._writing():
            if floor.is_open:
                self._know(replace(self._members, lost=True))
            self._floor_file.raise_to(floor)

    def save_acknowledged(self, known: Mapping[str, Remembered]) -> None:
        """Record what is remembered of each other store. Raises like ``persist``."""
        with self._writing():
            save_acknowledged(self._files, self._layout, known)

    def remove_floor(self, commit_index: int) -> None:
        """Remove the floor (``Ready.floor_changed``). Raises like ``persist``."""
        with self._writing():
            self._appender.remove_kept_tail(self._last_index + 1)  # without the floor it is damage
        self.save_checkpoint(commit_index)
        with self._writing():
            self._know(KnownConfigurations(self._members.of_log(self._last_index)))
            self._floor_file.remove()

    def _write_checkpoint(self) -> None:
        self._appender.sync()
        self._appender.sync_index()
        last = self._last_index
        invariant(self._appender.unsynced_bytes == 0, "a checkpoint covers unsynced entries", last=last)
        checkpoint = Checkpoint(last, min(self._commit_index, last), self._appender.position)
        if checkpoint != self._checkpoint:
            self._save(checkpoint)

    def _save(self, checkpoint: Checkpoint) -> None:
        save_checkpoint(self._files, self._layout.checkpoint, checkpoint)
        self._checkpoint = checkpoint

    def trim(self, index: int, tables: TableChanges, commit_index: int) -> Index:
        """Delete data segments that end before ``index``; return the new first index. Raises like ``persist``.

        Args:
            index: no entry from here on is deleted.
            tables: with these changes the tables include the committed entries up to ``commit_index``.
            commit_index: the log starts here at the latest, because the position of a committed entry never changes.
        """
        with self._writing():
            self._save_tables(tables)
            found = log_queries.segment_before(self._reader, min(index, commit_index))
            if found is None:
                return self.first_index()
            position, first, term = found
            self._table_store.sync()
            self._commit_index = max(self._commit_index, min(commit_index, self._last_index))
            self._write_checkpoint()  # before the deletion, so that it covers only remaining entries
            self._save_meta(
                replace(
                    self._meta,
                    first_position=position,
                    first_index=first,
                    previous_term=term,
                    tables_index=max(min(tables.applied_index, first - 1), self._meta.tables_index or NO_INDEX),
                )
            )
            invariant(
                self._first_index <= first <= self._commit_index + 1 and first <= self._last_index + 1,
                "the log would start after its committed entries",
                first=first,
                commit_index=self._commit_index,
            )
            self._first_index = first
            self._removals += 1
            data, rows = self._reader.data, self._index.segments
            data.drop([base for base in data.bases if base < position])
            rows.drop([base for base in rows.bases if base + rows.segment_bytes <= first * INDEX_RECORD_BYTES])
            self._know(self._members.trimmed(first))
            return Index(first)

    def _restart(self, start: LogStart) -> None:
        """Discard the log and restart it; a crash leaves the old or the new one, and the hard state in any case."""
        # Not in place of the others: those belong to the log that a crash before the restart continues.
        save_tables(self._files, self._layout.new_tables, start.tables)
        self._know(self._members.installing(start.first_index, start.members, self._last_index))
        self._save_meta(
            replace(
                self._meta,
                first_position=start.position,
                first_index=start.first_index,
                previous_term=start.previous_term if start.previous_term != NO_TERM else None,
                tables_index=start.tables.applied_index,
                log_uuid=self._meta.log_uuid or start.log_uuid,
                commitlog_prefix=self._meta.commitlog_prefix or start.commitlog_prefix,
                discarding=True,
            )
        )
        invariant(
            start.first_index > self._commit_index,
            "a restart would discard committed entries",
            first=start.first_index,
            commit_index=self._commit_index,
        )
        self._commit_index = start.first_index - 1
        self._first_index, self._last_index = start.first_index, start.first_index - 1
        self._removals += 1
        self._appender.restart(start.position)
        self._table_store.close()
        self._meta = remove_everything(self._files, self._layout, self._meta)
        self._table_store = self._files.open_tables(self._layout.tables, self._fail)
        self._know(self._members.started(start.first_index))
        self._checkpoint = load_checkpoint(self._files, self._layout.checkpoint)

    def adopt_uuid(self, uuid: str) -> None:
        """Record the log's identity, once.

        Raises:
            StoreMismatchError: the store belongs to another log.
        """
        if self._meta.log_uuid not in (None, uuid):
            raise StoreMismatchError(
                f"the store belongs to log {self._meta.log_uuid}, not {uuid}",
                str(self._layout.root),
                "start the node with an empty directory, or with the peers of its own log",
            )
        with self._writing():
            self._save_meta(replace(self._meta, log_uuid=uuid))

    def adopt_chain(self, chain: Chain) -> None:
        """Record the logs that the log continues."""
        with self._writing():
            self._save_meta(replace(self._meta, continues=chain))

    def _save_meta(self, meta: LogMeta) -> None:
        if meta != self._meta:
            save_log_meta(self._files, self._layout.log_meta, meta)
            self._meta = meta
            self._reader.rules = native_rules(meta)

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        if self._failure is not None:
            raise self._failure
        try:
            yield
        except OSError as error:
            raise self._fail(error) from error
        if self._failure is not None:  # a sync of another thread failed meanwhile
            raise self._failure

    def write_back(self, damage: Damage, records: Records | None, commit_index: int) -> Damage | None:
        """Replace damaged records; see ``repair.write_back``. Called by the writer thread."""
        with self._writing():
            self._write_checkpoint()  # so that damage which a crash leaves does not look like a torn tail
            return write_back(self._reader, self._index, damage, records, min(commit_index, self._last_index))

    def rewrite_rows(self, records: Records, first_index: int) -> None:
        """Correct index rows that do not agree with good committed records. Called by the writer thread."""
        with self._writing():
            if first_index >= self._first_index:
                write_wrong_rows(self._index, records, first_index)

    def _fail(self, error: OSError) -> DiskFailedError:
        if self._failure is None:
            mark_needs_verification(
                self._files, self._layout, f"{error.strerror or error} at {error.filename or 'a file'}"
            )
        self._failure = self._failure or DiskFailedError(
            f"the disk failed: {error.strerror or error}",
            str(error.filename or self._layout.root),
            "check the disk, then start again; the store needs verification",
            {"errno": error.errno or 0},
        )
        return self._failure

    def stop_on(self, error: OSError) -> None:
        """Treat an error of a read like one of a write: the disk failed. Raises DiskFailedError."""
        with self._writing():
            raise error

    def reject_writes(self, error: BaseException) -> None:
        """Reject all writes, because the replica stopped: later state may be wrong. Any thread may call."""
        self._failure = self._failure or DiskFailedError(
            f"the replica stopped: {error}", str(self._layout.root), "check the log, then start again"
        )

    def require_verification(self, reason: str) -> None:
        """Mark the store, so that its next start verifies it. Any thread may call."""
        mark_needs_verification(self._files, self._layout, reason)

    def quarantine(self, reason: str) -> None:
        """Keep the replica out of its group, after a restart too. Any thread may call."""
        mark_quarantined(self._files, self._layout, reason)

    def preallocate(self) -> bool:
        """Preallocate one chunk; return whether there is more to do. Safe from any one thread."""
        if self._failure is not None:
            return False
        try:
            return self._appender.preallocate()
        except OSError as error:
            self._fail(error)
            return False

    def checked(self) -> Self:
        """Return the log after ``check_recent``; if that raises, close the log first."""
        try:
            self.check_recent()
        except BaseException:
            self.close()
            raise
        return self

    def close(self, commit_index: int | None = None) -> None:
        """Sync, save a last checkpoint and close the store; the log is not usable afterwards."""
        self._preallocation.close()
        try:
            if self._failure is None:
                self.save_checkpoint(self._commit_index if commit_index is None else commit_index)
        finally:
            self._table_store.close()
            self._reader.data.close()
            self._index.segments.close()
            self._lock.close()
            self._failure = self._failure or DiskFailedError("the log is closed", str(self._layout.root))

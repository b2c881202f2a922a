"""The writing side of a log: one writer thread calls it, in the order of the Readys.

Each method is atomic for a crash: the order of its writes leaves the old or the new state, or one that the next start
completes (``tests/storage/test_recovery.py``, ``tests/storage/test_trim.py``).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dledger_core.bootstrap import ARCHIVE_VERSION
from dledger_core.errors import StoreMismatchError, invariant
from dledger_core.ids import NO_INDEX, NO_TERM, Index
from dledger_core.lineage import Ancestors
from dledger_core.raft.batch import Batch
from dledger_core.raft.floor import Floor
from dledger_core.raft.ready import HardState
from dledger_core.record import INDEX_RECORD_BYTES, Records
from dledger_core.storage.check.damage import Damage, write_wrong_rows
from dledger_core.storage.check.judge import native_rules
from dledger_core.storage.check.repair import write_back
from dledger_core.storage.files.acknowledged_file import Remembered, save_acknowledged
from dledger_core.storage.files.layout import FORMAT_VERSION_MAX, LogMeta, save_log_meta
from dledger_core.storage.files.members_file import KnownConfigurations, members_file
from dledger_core.storage.files.meta_files import Checkpoint, load_checkpoint, save_checkpoint, save_hard_state
from dledger_core.storage.read import log_queries
from dledger_core.storage.tables.tables import TableChanges, save_tables
from dledger_core.storage.write.append_clock import AppendClock
from dledger_core.storage.write.appender import Appender, Preallocation, bounded
from dledger_core.storage.write.durable_log import DurableLog
from dledger_core.storage.write.recovered_store import RecoveredStore
from dledger_core.storage.write.staging import StagedEnd, Staging, with_java_entries
from dledger_core.storage.write.trim import LogStart, remove_everything


def _wall_ms() -> int:
    return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class LogHooks:
    """Clock and callbacks that the owner of a log passes to it.

    Attributes:
        clock: append times of a leader's batches; by default the wall clock.
        on_sync: called with the duration in seconds of each sync of appended entries, in the writing thread.
        on_damage: called with the index near which a read found damage, in the reading thread.
        preallocation: runs ``CommitLog.preallocate``; a simulation has no thread for it.
    """

    clock: AppendClock = field(default_factory=lambda: AppendClock(_wall_ms, _wall_ms))
    on_sync: Callable[[float], None] | None = None
    on_damage: Callable[[int], None] | None = None
    preallocation: Callable[[Callable[[], bool]], Preallocation] = Preallocation


class LogWriter(DurableLog):
    """Persists Readys, truncates, trims and restarts a log."""

    def __init__(self, store: RecoveredStore, hooks: LogHooks) -> None:
        end = store.end
        super().__init__(store, hooks.on_damage)
        self._files = store.files
        self._on_sync = hooks.on_sync
        self._fail_stop = store.fail_stop
        self._table_store = store.table_store
        self._checkpoint = store.checkpoint
        self._hard_state = store.hard_state
        self._members = store.members
        self._floor_file = store.floor_file
        recorded = store.checkpoint.commit_index if store.checkpoint is not None else NO_INDEX
        self._commit_index = min(max(recorded, end.first_index - 1), end.last_index)
        self._appender = Appender(store.reader.data, store.index, end, self.config.preallocate_bytes)
        staged = StagedEnd(end.last_index + 1, end.position, end.time_ms)
        self._staging = Staging(self.config, staged, self._certain_end_of)
        self._preallocation = hooks.preallocation(self.preallocate)

    @property
    def hard_state(self) -> HardState:
        """Term and vote, as last made durable."""
        return self._hard_state

    @property
    def commit_index(self) -> Index:
        """A lower bound on the commit index; after ``open`` the recorded one."""
        return Index(self._commit_index)

    @property
    def floor(self) -> Floor | None:
        """The least end of a log that the node elects, as written; None if it has lost nothing."""
        return self._floor_file.floor

    def preallocate(self) -> bool:
        """Preallocate one chunk; return whether there is more to do. Safe from any one thread."""
        if self._fail_stop.failure is not None:
            return False
        try:
            return self._appender.preallocate()
        except OSError as error:
            self._fail_stop.fail(error)
            return False

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
        with self._fail_stop.writing():
            # Term and vote are durable before any message of the Ready leaves (dissertation 3.8). A node that forgot a
            # vote could vote twice in one term (mutation "a vote is not written").
            if hard_state is not None:
                invariant(
                    hard_state.term >= self._hard_state.term,
                    "the term on disk would decrease",
                    term=hard_state.term,
                    stored=self._hard_state.term,
                )
                save_hard_state(self._files, self._layout, hard_state)
                self._hard_state = hard_state
            # Before the batches: they follow the entries of the snapshot
            # (test_restart_and_later_batches_are_persisted_together).
            if restart is not None:
                self._restart(restart)
            if truncate_from is not None:
                self._truncate(truncate_from)
            if batches:
                # Before the records: a record of Java's has no flags, and recovery takes it for damage unless the
                # identity says that such records exist up to here.
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
        # A configuration is in force from its append on (dissertation 4.1), so a restart must find it: the file names
        # it before its acknowledgement leaves (test_configuration_entry_is_durable_and_named_before_persist_returns).
        self._know(self._members.appended(batches))
        # Recovery scans everything after the checkpoint: about one segment at most.
        if rolled:
            self._write_checkpoint()
        # A thread that is woken for nothing takes the interpreter lock from the acknowledgement of this batch.
        if self.config.preallocate_bytes and self._appender.needs_zeros:
            self._preallocation.poke()

    def _sync_measured(self) -> None:
        began = time.perf_counter()
        self._appender.sync()
        if self._on_sync is not None:
            self._on_sync(time.perf_counter() - began)

    def _know(self, members: KnownConfigurations) -> None:
        """Replace the members file after the log is durable, whatever ``durability`` says."""
        # The entry first: if the file named an entry that a crash has lost, the store would count as one that lost
        # acknowledged entries (test_log_that_ends_below_the_file_is_a_recovering_voter).
        if members != self._members:
            self._appender.sync()
            self._appender.sync_index()
            # A program that does not know the version must not open the store, once the entry is acknowledged.
            self._raise_format(members.version)
            members_file(self._layout).save(self._files, members)
            self._members = members

    def _raise_format(self, group_version: int) -> None:
        if group_version >= ARCHIVE_VERSION and self._meta.format_version < FORMAT_VERSION_MAX:
            self._save_meta(replace(self._meta, format_version=FORMAT_VERSION_MAX))

    def adopt_group_version(self, version: int) -> None:
        """Raise the format of the store if a group of this version needs it. Raises like ``persist``.

        At a start: a crash may have kept the configuration entry alone, and a recovery of a lost majority begins a
        group with the version that the lost one had.
        """
        with self._fail_stop.writing():
            self._raise_format(version)

    def _truncate(self, index: int) -> None:
        if index > self._last_index:
            return
        # A new leader has all committed entries (dissertation 3.6), so no conflict is ever among them.
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
        # Before the truncation too: a file that names an entry which the log lacks means a lost end, and a power cut
        # would take a vote (test_crash_of_a_truncation_leaves_no_floor_and_no_truncated_configuration). An entry
        # that is still there is found in the log: the checkpoint does not cover it.
        self._know(members)
        self._appender.truncate(end.position, index)

    def save_checkpoint(self, commit_index: int) -> None:
        """Record the durable and the committed end. Raises like ``persist``."""
        with self._fail_stop.writing():
            self._commit_index = max(self._commit_index, min(commit_index, self._last_index))
            self._write_checkpoint()

    def raise_floor(self, floor: Floor) -> None:
        """Set or raise the floor of an open log. Raises like ``persist``.

        Where the end is lost, the members file was set back with the log, so this store does not know its group either,
        also after a restart.
        """
        with self._fail_stop.writing():
            # The configurations that it has lost may be newer than those that it knows.
            if floor.is_open:
                self._know(replace(self._members, lost=True))
            self._floor_file.raise_to(floor)

    def save_acknowledged(self, known: Mapping[str, Remembered]) -> None:
        """Record what is remembered of each other store. Raises like ``persist``."""
        with self._fail_stop.writing():
            save_acknowledged(self._files, self._layout, known)

    def remove_floor(self, commit_index: int) -> None:
        """Remove the floor (``Ready.floor_changed``). Raises like ``persist``."""
        with self._fail_stop.writing():
            self._appender.remove_kept_tail(self._last_index + 1)  # without the floor it is damage
        # The floor goes last. While it is there the node does not vote, whatever a crash leaves of the rest
        # (test_end_of_recovery_removes_a_kept_tail, test_store_forgets_its_lost_end_only_when_recovery_ends).
        self.save_checkpoint(commit_index)
        with self._fail_stop.writing():
            self._know(KnownConfigurations(self._members.of_log(self._last_index)))
            self._floor_file.remove()

    def _write_checkpoint(self) -> None:
        # What the checkpoint covers is never truncated, so it covers only what is synced, rows too: no CRC covers a
        # term, and only they repeat it.
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
        with self._fail_stop.writing():
            # The tables are the snapshot of the deleted entries (dissertation 5): durable first, or nothing could
            # derive them again (test_trim_is_atomic_across_crashes_and_keeps_the_tables,
            # test_trimmed_log_without_its_tables_is_corrupt).
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
            # Before the files go: a reader that fails now finds that the range has changed, and no damage.
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
        # A leader installs a snapshot only where entries are missing (dissertation 5.1); committed entries of this log
        # would be lost from a majority.
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
        self._table_store = self._files.open_tables(self._layout.tables, self._fail_stop.fail)
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
        with self._fail_stop.writing():
            self._save_meta(replace(self._meta, log_uuid=uuid))

    def adopt_ancestors(self, chain: Ancestors) -> None:
        """Record the logs that the log continues."""
        with self._fail_stop.writing():
            self._save_meta(replace(self._meta, continues=chain))

    def _save_meta(self, meta: LogMeta) -> None:
        if meta != self._meta:
            save_log_meta(self._files, self._layout.log_meta, meta)
            self._meta = meta
            self._reader.rules = native_rules(meta)

    def write_back(self, damage: Damage, records: Records | None, commit_index: int) -> Damage | None:
        """Replace damaged records; see ``repair.write_back``. Called by the writer thread."""
        with self._fail_stop.writing():
            self._write_checkpoint()  # so that damage which a crash leaves does not look like a torn tail
            return write_back(self._reader, self._index, damage, records, min(commit_index, self._last_index))

    def rewrite_rows(self, records: Records, first_index: int) -> None:
        """Correct index rows that do not agree with good committed records. Called by the writer thread."""
        with self._fail_stop.writing():
            # A trim may have deleted the records since they were read.
            if first_index >= self._first_index:
                write_wrong_rows(self._index, records, first_index)

    def save_tables(self, changes: TableChanges) -> None:
        """Store changes of the tables by committed entries that are in the log; called by the writer thread.

        Changes from before the last restart of the log come too late, and are dropped.
        """
        with self._fail_stop.writing():
            self._save_tables(changes)

    def _save_tables(self, changes: TableChanges) -> None:
        if changes.rows and changes.applied_index >= (self._meta.tables_index or NO_INDEX):
            if self._appender.unsynced_bytes:  # page-cache: the tables must never be ahead of the log
                self._appender.sync()
            self._table_store.write(changes.rows, replace=changes.is_complete)

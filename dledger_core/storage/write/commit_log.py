"""``CommitLog``: one replica's log on disk, as the Raft core and the node see it.

Three kinds of callers and their calls:

* the event loop stages (``place``, ``stage``, ``stage_truncate``, ``stage_restart``): batches get their positions,
  nothing is read or written;
* one writer thread persists (``persist``, ``save_checkpoint``, ``trim``), in the order of the Readys;
* any thread reads durable entries.

Each kind has a class: ``CommitLog``, its base ``LogWriter``, whose base is ``DurableLog``. The first write or sync that
fails is the last one (``FailStop``); reads continue.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Self

from dledger_core.bootstrap import LogConstants
from dledger_core.config import StorageConfig
from dledger_core.errors import DiskFailedError, invariant
from dledger_core.ids import Index, Position, Term
from dledger_core.lineage import Ancestors
from dledger_core.raft.batch import Batch, Proposal
from dledger_core.raft.pointers import LogPointers
from dledger_core.record import ProposedBatch
from dledger_core.storage.files.file_system import DiskSpace, Files, OsFiles
from dledger_core.storage.files.identity import constants_of
from dledger_core.storage.files.layout import Layout, LogMeta, claim_store, refuse
from dledger_core.storage.files.members_file import ConfigurationEntry
from dledger_core.storage.files.meta_files import mark_needs_verification
from dledger_core.storage.files.quarantine import mark_quarantined
from dledger_core.storage.files.table_store import Rows
from dledger_core.storage.tables.tables import LogTables, load_tables
from dledger_core.storage.write.log_writer import LogHooks, LogWriter
from dledger_core.storage.write.recovered_store import RecoveredStore, recover_store
from dledger_core.storage.write.staging import StagedEnd, check_proposal
from dledger_core.storage.write.trim import LogStart


class CommitLog(LogWriter):
    """One replica's durable log; made by ``open``.

    Attributes:
        clock: append times of a leader's batches.
        acknowledged: what is remembered of each other store, as it was when the log was opened.
        recovered: both ends of the log, as it was when the log was opened.
    """

    def __init__(self, store: RecoveredStore, hooks: LogHooks) -> None:
        super().__init__(store, hooks)
        self.clock: Final = hooks.clock
        self.acknowledged: Final = store.acknowledged
        self.recovered: Final = store.end
        self._lock = store.lock
        self._tables: LogTables | None = store.tables

    @classmethod
    def open(
        cls,
        directory: Path | str,
        *,
        group: str,
        node_id: str,
        config: StorageConfig | None = None,
        files: Files | None = None,
        hooks: LogHooks | None = None,
    ) -> Self:
        """Open a store, or create one where there is none; recover from a crash.

        Args:
            directory: the store, ``<dir>/<group>/dledger-<node id>``.
            group: the group it must belong to.
            node_id: the node it must belong to.
            config: segment sizes and profile apply only to a new store; an old one keeps its own.
            files: the file system.
            hooks: clock and callbacks of the owner.

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
                store = recover_store(files, layout, meta, meta.effective(config), lock)
                log = cls(store, hooks or LogHooks())
                # Recovery has made durable what it found. From now on damage to it is damage, and never a torn tail
                # (test_state_found_at_a_start_survives_a_power_loss).
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
    def configurations(self) -> Sequence[ConfigurationEntry]:
        """The configurations that the log contains or that precede it, in order; empty if it knows none."""
        return self._members.of_log(self._last_index)

    @property
    def ends_below_members(self) -> bool:
        """Whether the log has lost the newest configuration entry, or may have: it does not know its group."""
        return self._members.ends_above(self._last_index)

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log, or None while the node does not know it."""
        return self._meta.log_uuid

    @property
    def meta(self) -> LogMeta:
        """Identity and constants of the log, and its start. Any thread may call."""
        return self._meta

    @property
    def chain(self) -> Ancestors:
        """The logs that the log continues, oldest first."""
        return self._meta.continues

    @property
    def constants(self) -> LogConstants:
        """Constants of the log that are fixed when it is bootstrapped."""
        return constants_of(self._meta, self.config)

    @property
    def failure(self) -> DiskFailedError | None:
        """Reason why the log rejects writes, or None."""
        return self._fail_stop.failure

    def _stored_tables(self) -> LogTables:
        return load_tables(self._files, self._layout, self._meta, self._table_store.read)

    def load_tables(self) -> LogTables:
        """Return the stored tables; later control entries of the log are not applied yet."""
        # Once only: the caller changes them, and any later caller needs the stored rows.
        tables, self._tables = self._tables, None
        return tables if tables is not None else self._stored_tables()

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
        return self._staging.place(proposal, first_index, term, self.clock.now_ms() if now_ms is None else now_ms)

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

    # --- failure, close -----------------------------------------------------------------------------------------

    def stop_on(self, error: OSError) -> None:
        """Treat an error of a read like one of a write: the disk failed. Raises DiskFailedError."""
        with self._fail_stop.writing():
            raise error

    def reject_writes(self, error: BaseException) -> None:
        """Reject all writes, because the replica stopped: later state may be wrong. Any thread may call."""
        self._fail_stop.reject(f"the replica stopped: {error}", "check the log, then start again")

    def require_verification(self, reason: str) -> None:
        """Mark the store, so that its next start verifies it. Any thread may call."""
        mark_needs_verification(self._files, self._layout, reason)

    def quarantine(self, reason: str) -> None:
        """Keep the replica out of its group, after a restart too. Any thread may call."""
        mark_quarantined(self._files, self._layout, reason)

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
        # First, because its thread writes to the files that are closed next.
        self._preallocation.close()
        try:
            if self._fail_stop.failure is None:
                self.save_checkpoint(self._commit_index if commit_index is None else commit_index)
        finally:
            self._table_store.close()
            self._reader.data.close()
            self._index.segments.close()
            # Last, because another process may open the store from here on.
            self._lock.close()
            self._fail_stop.reject("the log is closed")

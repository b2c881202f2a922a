"""Everything that a replica writes in addition to its Readys: checkpoints, deletions, tables, the end of the log."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from dledger_core.client.position import check_of_last
from dledger_core.errors import BusyError, CorruptRecordError, RecoveryRefusedError
from dledger_core.ids import NO_TERM, Index, Term
from dledger_core.lineage import LogEnd
from dledger_core.server.replica.ready_loop import ReadyLoop


class ReplicaStore:
    """The store of one replica.

    Args:
        loop: the replica's; ``close`` and ``retire`` close its log.
    """

    def __init__(self, loop: ReadyLoop) -> None:
        self._loop = loop
        self._raft = loop.raft
        self._log = loop.log
        self._controls = loop.controls

    def run(self, job: Callable[[], None]) -> None:
        """Queue a job for the thread that writes; an error of it stops the replica."""
        self._loop.disk.run(job)

    @property
    def readable_end(self) -> Index:
        """End (exclusive) of the entries that are committed and durable here.

        The end of the files is not enough: they may still contain an old leader's tail, to be truncated, at indexes
        that are already committed with other content.
        """
        # Tests: test_entries_to_truncate_are_never_served_as_committed,
        # test_snapshot_install_responds_after_disk_and_hides_old_entries.
        return Index(min(self._controls.commit_index, self._raft.durable_index, self._log.last_index()) + 1)

    @property
    def end(self) -> tuple[Term, Index]:
        """Term and index of the last entry, which elections compare."""
        last_index = self._raft.last_index
        return self._term_at(last_index), last_index

    def _term_at(self, index: Index) -> Term:
        term = self._raft.term_at(index)
        return NO_TERM if term is None else term

    @property
    def archived_end(self) -> int | None:
        """The first entry that no retention deletes because the log's archive does not have it; None = no archive.

        It is a rule of the log: the options of a node do not change it.
        """
        archive = self._controls.tables.archive
        if archive.is_active:
            return archive.end
        # Not applied yet, it may be committed: then this node could lead, and would lack entries that are not archived
        # (test_range_that_waits_for_its_commit_holds_retention_back).
        return 0 if self._controls.awaits_archive else None

    def trim(self, index: Index) -> None:
        """Queue the deletion of the segments before ``index``, which must be committed and the first entry of one."""
        archived = self.archived_end
        if archived is not None and index > archived:
            return  # test_no_caller_trims_what_is_not_archived
        # Only readable entries: another leader's entry at that index might start at another position
        # (test_trim_deletes_nothing_that_is_not_readable).
        if index < self.readable_end and self._log.first_index() < index:
            self._loop.run(self._raft.trim, index)  # first: the core must not read deleted entries
            self._delete_forgotten()

    def _delete_forgotten(self) -> None:
        """Queue the deletion of the segments before the core's first index.

        A segment stays while a record that shows where the next one starts is damaged. Every checkpoint tries again:
        a snapshot for a member that lags waits for the deletion, and no later trim may come, for example under a pin
        (``test_deletion_that_damage_held_up_happens_after_the_repair``).
        """
        index, commit_index = self._raft.first_index, self._controls.commit_index
        tables = self._controls.tables.take_changes()

        def delete() -> None:
            self._log.trim(index, tables, commit_index)

        self.run(delete)

    def save_checkpoint(self) -> None:
        """Queue a checkpoint of what changed: durable and commit index, acknowledgements of other stores, tables.

        The disk writes the entries that the tables include before, so these never contain an entry that it lacks.
        """
        tables = self._controls.tables
        # Only after the files are deleted: a crash before that restarts the log where it began.
        tables.trim(self._log.first_index())
        # Not while an install waits for the disk: a crash may keep the old log, and what its archive does not have
        # (test_checkpoint_before_an_install_deletes_no_entry).
        if self._log.first_index() < self._raft.first_index < self.readable_end:
            self._delete_forgotten()
        if (known := self._loop.peer_watermarks.unwritten()) is not None:
            self.run(partial(self._log.save_acknowledged, known))
        # Hundreds of idle groups would wake their disk threads each second
        # (test_checkpoint_is_written_only_where_something_changed).
        if self._loop.checkpoint_due:
            self._loop.checkpoint_due = False
            self.run(partial(self._log.save_checkpoint, self._controls.commit_index))
        if (changes := tables.take_changes()).rows:
            self.run(partial(self._log.save_tables, changes))

    async def store_tables(self, timeout_s: float) -> None:
        """Store the changes of the tables now, so that readers of the store find them; raise BusyError."""
        loop = asyncio.get_running_loop()
        stored, changes = asyncio.Event(), self._controls.tables.take_changes()

        def store() -> None:
            self._log.save_tables(changes)
            loop.call_soon_threadsafe(stored.set)

        self.run(store)
        try:
            await asyncio.wait_for(stored.wait(), timeout_s)
        except TimeoutError:
            raise BusyError("the disk is slow", f"group {self._loop.group} on {self._loop.node_id}", "retry") from None

    # --- the end of the log ----------------------------------------------------------------------------------

    def log_end(self) -> LogEnd:
        """Return the present end of the log, without the check of its last entry."""
        status, (last_term, last_index) = self._raft.status(), self.end
        return LogEnd(
            term=status.term,
            last_term=last_term,
            last_index=last_index,
            commit_index=self._controls.commit_index,
            is_recovering=status.is_recovering,
            # Of the core, and not of the files: a damaged one must not keep a survivor from answering
            # (test_open_store_that_is_damaged_answers_and_is_recovered).
            ranges=tuple((found.term, found.first_index) for found in self._raft.term_ranges),
        )

    async def retire(self) -> LogEnd:
        """Stop permanently, write queued data, close the store, and return its end, which is final.

        Raises:
            DiskFailedError: a write failed, now or earlier.
        """
        self._loop.close()
        # The loop stops first: an entry that is acknowledged after its end was read would be missing in the recovery.
        end = await asyncio.to_thread(self.close_with_end)
        stopped = RecoveryRefusedError(
            f"the store of {self._loop.node_id} has retired its log", f"group {self._loop.group}"
        )
        self._loop.stop(stopped)  # the clients that wait get a response
        return end

    def close_with_end(self) -> LogEnd:
        """Write queued data, close the store and return its end, for a caller without an event loop."""
        end, log = self.log_end(), self._log
        self._loop.disk.close()
        try:
            if log.failure is not None:
                raise log.failure
            log.save_tables(self._controls.tables.take_changes())
            last_index = log.last_index()
            return replace(
                end,
                term=log.hard_state.term,
                last_term=self._term_at(last_index),
                last_index=last_index,
                commit_index=min(self._controls.commit_index, last_index),
                check=self._check_at(last_index) if last_index >= log.first_index() else None,
            )
        finally:
            log.close(self._controls.commit_index)

    def _check_at(self, index: int) -> int | None:
        try:
            records = self._log.read(index, index + 1, 1)
        except CorruptRecordError:  # a hole, which other survivors fill: then the files show it
            return None
        return check_of_last(records).check

    async def close(self) -> None:
        """Write queued data and close the store; write nothing after a failure."""
        self._loop.close()
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        """Close as ``close`` does, for a caller without an event loop."""
        self._loop.close()
        self._loop.disk.close()
        try:
            # After a failed write the files may lack anything; the next start verifies them
            # (test_stopped_replica_writes_and_sends_nothing).
            if self._log.failure is None:
                if (known := self._loop.peer_watermarks.unwritten()) is not None:
                    self._log.save_acknowledged(known)
                self._log.save_tables(self._controls.tables.take_changes())
        finally:
            # Also after an error, so that the lock of the store is free
            # (test_close_releases_store_when_its_last_write_fails).
            self._log.close(self._controls.commit_index)

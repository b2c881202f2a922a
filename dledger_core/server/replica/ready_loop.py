"""The Ready loop of one replica: input goes to the core, and its Readys to network, disk, tables and services.

An iteration runs after all input of one iteration of the event loop, so that everything that arrived meanwhile shares
one message per member and one sync. The first error ends the loop: a replica whose state may be wrong sends nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Protocol, TypeVar, TypeVarTuple

from dledger_core.errors import DiskFailedError, DLedgerError, ProposalDroppedError, ProtocolError, invariant
from dledger_core.ids import Index, NodeId, node_of
from dledger_core.raft import LogRestart, Message, RawNode, Ready, Role, SoftState
from dledger_core.server.replica.change_signal import ChangeSignal
from dledger_core.server.replica.controls import Controls
from dledger_core.server.replica.environment import Environment
from dledger_core.server.replica.peer_watermarks import PeerWatermarks
from dledger_core.server.replica.snapshot import NewLog
from dledger_core.storage import CommitLog

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
Ts = TypeVarTuple("Ts")


class ReplicaObserver(Protocol):
    """A service that follows a replica; called on the event loop, must not block."""

    def committed(self, commit_index: Index) -> None:
        """The commit index advanced, and the tables with it."""

    def role_changed(self, soft_state: SoftState) -> None:
        """Role, leader or term changed."""


class ReadyLoop:
    """Gives input to the core and executes its Readys, until an error stops it.

    Args:
        group: the group's name.
        node_id: this node.
        raft: the core.
        log: the store.
        controls: the tables as of the committed entries.
        peer_watermarks: the memory of the other members' stores.
        environment: iterations and the disk.
        send: sends a message to a peer.
        on_applied: called after control entries were applied to the tables.
        on_configured: called with each Ready that has a configuration.
        on_failed: called once with the error that stopped the loop.

    Attributes:
        soft_state: role, leader and term that the services know.
        changes: wakes coroutines at each change.
        disk: writes the Readys.
        checkpoint_due: something was written or committed since this was set to False.
    """

    def __init__(
        self,
        *,
        group: str,
        node_id: NodeId,
        raft: RawNode,
        log: CommitLog,
        controls: Controls,
        peer_watermarks: PeerWatermarks,
        environment: Environment,
        send: Callable[[Message], None],
        on_applied: Callable[[], None],
        on_configured: Callable[[Ready], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self.group = group
        self.node_id = node_id
        self.raft = raft
        self.log = log
        self.controls = controls
        self.peer_watermarks = peer_watermarks
        self._call_soon = environment.call_soon
        self._send = send
        self._on_applied = on_applied
        self._on_configured = on_configured
        self._on_failed = on_failed
        self._observers: tuple[ReplicaObserver, ...] = ()
        self._is_scheduled = False
        self._is_closing = False
        self._propose: Callable[[], None] | None = None
        self._reads: dict[int, Callable[[Index | None], None]] = {}
        self._next_read = 1
        self.has_failed = False
        self.soft_state = SoftState(Role.FOLLOWER, None, log.hard_state.term)
        self.changes = ChangeSignal()
        self.checkpoint_due = True
        self.disk = environment.open_disk(log, self._persisted, self.fail)

    def observe(self, *observers: ReplicaObserver) -> None:
        """Call these services at each change from now on, in this order, after those that observe already."""
        self._observers += observers

    @property
    def is_leader(self) -> bool:
        """Whether this node leads, and has not stopped."""
        return self.soft_state.role is Role.LEADER

    # --- input -----------------------------------------------------------------------------------------------

    def run(self, step: Callable[[*Ts], object], *arguments: *Ts) -> None:
        """Give the core input; a step that returns False has no output. A ProtocolError is the caller's."""
        if self.has_failed or self._is_closing:
            return
        try:
            result = step(*arguments)
        except ProtocolError:
            # The core has changed nothing (test_call_that_raises_leaves_the_state_unchanged). A peer whose malformed
            # bytes stopped the replica could stop a group.
            raise
        except BaseException as error:  # noqa: BLE001 - a broken invariant stops the replica
            self.fail(error)
            return
        # Without a Ready: they are most of what idle groups send.
        if repeats := self.raft.take_repeats():
            for message in repeats:
                self._send(message)
        if result is not False and self.raft.has_ready():
            self.schedule()

    def ask(self, request: Callable[[*Ts], T], *arguments: *Ts) -> T:
        """Run a caller's request: the core's DLedgerErrors go to the caller, any other error stops the replica.

        A stopped replica sends and writes nothing, so it certainly drops the request.
        """
        if not (self.has_failed or self._is_closing):
            try:
                result = request(*arguments)
            except DLedgerError:
                raise
            except BaseException as error:  # noqa: BLE001 - a broken invariant stops the replica
                self.fail(error)
            else:
                self.schedule()
                return result
        raise ProposalDroppedError(f"{self.node_id} has stopped", f"group {self.group}", "ask another node")

    def ask_read_index(self, reply: Callable[[Index | None], None]) -> int:
        """Ask for a linearizable index; ``reply`` gets it, or None if leadership was lost first.

        Returns:
            The request's number, for ``forget_read_index``.

        Raises:
            NotLeaderError: another node leads, or none.
        """
        number, self._next_read = self._next_read, self._next_read + 1
        self.ask(self.raft.read_index, number)
        self._reads[number] = reply
        return number

    def forget_read_index(self, number: int) -> None:
        """Drop a request, whether its reply was called or not."""
        self._reads.pop(number, None)

    def schedule(self) -> None:
        """Run at the end of this iteration, so that all input of the iteration is written together."""
        if not self._is_scheduled:
            self._is_scheduled = True
            self._call_soon(self._pump)

    def propose_soon(self, propose: Callable[[], None]) -> None:
        """Call ``propose`` once before the next run, which writes and sends what it proposes."""
        self._propose = propose
        self.schedule()

    # --- the end ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Take nothing in from now on."""
        self._is_closing = True

    def fail(self, error: BaseException) -> None:
        """Stop because of an error, and report it."""
        if self.has_failed:
            return
        _LOG.critical("replica stopped: group=%s node=%s error=%s", self.group, self.node_id, error)
        # The core is intact, and needs no disk for this: without it the group waits for an election timeout
        # (test_leader_with_failed_disk_hands_leadership_over_at_once). After a broken invariant it may be wrong.
        if isinstance(error, DiskFailedError) and (message := self.raft.successor()) is not None:
            self._send(message)
        self.stop(error)
        self._on_failed(error)

    def stop(self, error: BaseException) -> None:
        """Take nothing in, write nothing and send nothing from now on, because of ``error``. Idempotent.

        The services see a follower without a leader: waiting clients get their response, and role listeners a change.
        """
        if self.has_failed:
            return
        self.has_failed = True
        self.log.reject_writes(error)
        # Before any service is called: none of them may see a leader that has stopped.
        self.soft_state = SoftState(Role.FOLLOWER, None, self.soft_state.term)
        try:
            # Clients that wait get their response now, and not after their timeout.
            reads, self._reads = self._reads, {}
            for reply in reads.values():
                reply(None)
            self._role_changed(self.soft_state)
        except Exception:  # noqa: BLE001 - the first error is the one to report
            _LOG.exception("error while stopping a replica: group=%s node=%s", self.group, self.node_id)

    # --- the Ready loop --------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._is_scheduled = False
        self.run(self._iterate)

    def _iterate(self) -> bool:
        propose, self._propose = self._propose, None
        if propose is not None:
            self._is_scheduled = True  # what it proposes is in this iteration, and needs none of its own
            try:
                propose()
            finally:
                self._is_scheduled = False
        while self.raft.has_ready() and not self.has_failed:
            self.execute(self.raft.ready())
        return False

    def execute(self, ready: Ready) -> None:
        """Execute a Ready, in the order that ``Ready`` explains."""
        if ready.restart is not None:
            self._install(ready.restart)
        if ready.truncate_from is not None:
            self.controls.truncate(ready.truncate_from)
            self.peer_watermarks.truncated(ready.truncate_from)
        for batch in ready.batches:
            self.controls.stage(batch)
        # Before the disk has anything: these messages say nothing about this disk (thesis section 10.2.1), and the
        # followers' syncs run at the same time as this one.
        for message in ready.messages:
            self._send(message)
        self.checkpoint_due |= ready.must_persist or ready.committed is not None
        # In order: the persisted messages of a later Ready depend on all earlier ones.
        if ready.must_persist or self.disk.busy:
            self.disk.submit(ready)
        else:
            self._finish(ready)
        if ready.committed is not None:
            self._committed(Index(ready.committed[1] - 1))
        if ready.floor_changed and ready.floor is None:
            self.disk.run(partial(self.log.remove_floor, self.controls.commit_index))
        if ready.soft_state is not None:
            self._role_changed(ready.soft_state)
        if ready.configuration is not None or ready.committed_configuration is not None:
            self._on_configured(ready)
        for read in ready.reads:
            reply = self._reads.pop(read.request_id, None)
            if reply is not None:
                reply(read.index)

    def _install(self, new_start: LogRestart) -> None:
        """Restart the log where the leader's begins; the files follow."""
        new_log = new_start.payload
        assert isinstance(new_log, NewLog)
        _LOG.warning(
            "installing snapshot: group=%s node=%s first_index=%d", self.group, self.node_id, new_start.first_index
        )
        # Tables and commit index at once: between them a service would see entries that are visible by the old tables
        # and deleted from the log (mutation "a snapshot install keeps the old tables").
        self.controls.restart(new_start.first_index, new_log.tables)
        self._on_applied()
        self._report_commit()

    def _persisted(self, readys: list[Ready]) -> None:
        for ready in readys:
            self.run(self._finish, ready)
        self.changes.notify()

    def _finish(self, ready: Ready) -> None:
        for message in ready.persisted_messages:
            self._send(message)
        self.raft.advance(ready.number)

    def _committed(self, commit_index: Index) -> None:
        if self.controls.commit(commit_index):
            self._on_applied()
        self._report_commit()

    def _report_commit(self) -> None:
        commit_index = self.controls.commit_index
        for observer in self._observers:
            observer.committed(commit_index)
        self.changes.notify()

    def _role_changed(self, soft_state: SoftState) -> None:
        before = self.soft_state
        invariant(soft_state.term >= before.term, "the term moved back", old=before.term, new=soft_state.term)
        self.soft_state = soft_state
        leader = soft_state.leader_id
        _LOG.info(
            "role changed: group=%s node=%s role=%s term=%d leader=%s",
            self.group,
            self.node_id,
            soft_state.role.value,
            soft_state.term,
            None if leader is None else node_of(leader),
        )
        for observer in self._observers:
            observer.role_changed(soft_state)
        self.changes.notify()

"""One group on one node: the Ready loop that joins the Raft core, the log, the tables and the network.

Everything here runs in one thread, a node's event loop, in iterations that ``Environment.call_soon`` starts; only the
disk has a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any, Final, Protocol, TypeVar

import numpy as np

from dledger_core import control
from dledger_core.client.position import check_of
from dledger_core.config import LIMITS, Limits, RaftConfig
from dledger_core.continuation import Chain, ContinuedLog, LogEnd, contains
from dledger_core.errors import (
    BusyError,
    DiskFailedError,
    DLedgerError,
    LogContestedError,
    NotLeaderError,
    ProposalDroppedError,
    ProtocolError,
    RecoveryRefusedError,
    invariant,
)
from dledger_core.ids import NO_INDEX, NO_TERM, Index, MemberId, NodeId, Term, node_of
from dledger_core.raft import (
    Batch,
    Condition,
    Configuration,
    ConfigurationInForce,
    Floor,
    Heartbeat,
    HeartbeatResponse,
    LogRestart,
    MemberChange,
    Message,
    RawNode,
    Ready,
    Role,
    SoftState,
)
from dledger_core.record import HEADER_BYTES, MAGIC_DATA, ProposedBatch, records_of
from dledger_core.server.maintenance.disk_space import SpaceGuard
from dledger_core.server.maintenance.retention import Pins
from dledger_core.server.monitoring.measures import GroupMeasures
from dledger_core.server.replica.acknowledged import Acknowledged
from dledger_core.server.replica.attachments import ShownStore
from dledger_core.server.replica.change_signal import ChangeSignal, response_within
from dledger_core.server.replica.environment import Environment
from dledger_core.server.replica.log_time import LogTime
from dledger_core.server.replica.pace import CatchUpPace
from dledger_core.server.replica.snapshot import NewLog, SnapshotInstalls, without_deleted
from dledger_core.storage import CommitLog
from dledger_core.storage.read.visibility import Visibility
from dledger_core.storage.tables.tables import LogTables

_HAND_OVER_LOOK_S: Final = 0.02
"""Interval at which a leader that hands over checks that its successor is connected."""


@dataclass(frozen=True, slots=True)
class _Control:
    """A control entry that is staged and waits for its commit."""

    index: Index
    time_ms: int
    body: bytes


def _known_configurations(log: CommitLog, founded: Configuration) -> list[ConfigurationInForce]:
    """Return the configurations of a log, after the one in force before its first entry."""
    known = [ConfigurationInForce(found.index, Configuration.from_bytes(found.body)) for found in log.configurations]
    if not known or known[0].index >= log.first_index():
        known.insert(0, ConfigurationInForce(NO_INDEX, founded))
    return known


class Controls:
    """The tables of one replica, and the control entries that are not applied to them yet.

    Attributes:
        tables: the state as of the committed entries.
    """

    def __init__(self, log: CommitLog) -> None:
        self.tables = log.load_tables()
        self._waiting: deque[_Control] = deque()
        start, end = Index(max(self.tables.applied_index + 1, log.first_index())), log.last_index() + 1
        for index, time_ms, body in log.control_entries(start, Index(end)):
            self._waiting.append(_Control(index, time_ms, body))

    def stage(self, batch: Batch) -> None:
        """Record the control and configuration entries of a staged batch: if it has any, its first one is such."""
        records = records_of(batch)
        if records.first.magic == MAGIC_DATA:
            return
        view, time_ms = memoryview(records.data), records.first.time_ms
        for row in np.flatnonzero(records.headers["magic"] != MAGIC_DATA).tolist():
            begin, index = int(records.starts[row]), Index(batch.first_index + row)
            body = bytes(view[begin + HEADER_BYTES : begin + int(records.sizes[row])])
            # Not the tables' applied index: those of a snapshot may already include entries that follow it.
            last = self._waiting[-1].index if self._waiting else NO_INDEX
            invariant(index > last, "a control entry is staged out of order", index=index, last=last)
            self._waiting.append(_Control(index, time_ms, body))

    def truncate(self, index: Index) -> None:
        """Discard staged entries from ``index`` on."""
        while self._waiting and self._waiting[-1].index >= index:
            self._waiting.pop()

    def apply(self, commit_index: Index) -> None:
        """Apply the committed entries to the tables."""
        while self._waiting and self._waiting[0].index <= commit_index:
            entry = self._waiting.popleft()
            self.tables.apply(entry.index, entry.time_ms, entry.body)

    @property
    def log_time_ms(self) -> int:
        """The newest log time of the log, committed or not."""
        staged = [control.log_time(control.unpack(entry.body)) or 0 for entry in self._waiting]
        return max([self.tables.log_time_ms, *staged])

    def restart(self, tables: LogTables) -> None:
        """Replace the tables after a snapshot install."""
        self._waiting.clear()
        self.tables = tables


_LOG = logging.getLogger(__name__)
T = TypeVar("T")


class ReplicaObserver(Protocol):
    """A service that follows a replica; called on the event loop, must not block."""

    def committed(self, commit_index: Index) -> None:
        """The commit index advanced, and the tables with it."""

    def role_changed(self, soft_state: SoftState) -> None:
        """Role, leader or term changed."""


class Replica:
    """A group's replica on this node.

    Args:
        group: the group's name.
        member: this member.
        configuration: the one that the group was founded with; used while the store knows none.
        config: Raft's settings.
        log: the opened store; closed by ``close``.
        send: called with (group, message) for every message to a peer.
        on_failed: called once with the error that stopped the replica.
        on_configuration: called with (group, configuration in force) at the start and at each change.
        reserve_bytes: free disk space below which appends are rejected.
        environment: clocks, iterations, randomness and disk.
        limits: the node's limits.
        measures: counters of the group; they outlive the replica.
    """

    # CPython reads the attributes of an object with more than 30 slowly, unless they are slots.
    __slots__ = (
        "_append_clock",
        "_checkpoint_due",
        "_clock_difference_ms",
        "_closing",
        "_controls",
        "_disk",
        "_environment",
        "_failed",
        "_leading_from",
        "_log_time_interval_ms",
        "_log_time_recorded_ms",
        "_next_read",
        "_observers",
        "_on_configuration",
        "_on_failed",
        "_pace",
        "_propose",
        "_reads",
        "_scheduled",
        "_send",
        "_uuid_recorded",
        "_was_member",
        "acknowledged",
        "changes",
        "commit_index",
        "contested",
        "group",
        "log",
        "log_time",
        "measures",
        "member",
        "node_id",
        "pins",
        "raft",
        "soft_state",
        "space",
    )

    def __init__(
        self,
        *,
        group: str,
        member: MemberId,
        configuration: Configuration,
        config: RaftConfig,
        log: CommitLog,
        send: Callable[[str, Message], None],
        on_failed: Callable[[BaseException], None],
        environment: Environment,
        on_configuration: Callable[[str, ConfigurationInForce], None] = lambda group, found: None,
        reserve_bytes: int = 0,
        limits: Limits = LIMITS,
        measures: GroupMeasures | None = None,
    ) -> None:
        self.group = group
        self.measures = measures or GroupMeasures()
        self.member = member
        self.node_id = node_of(member)
        self.log = log
        self.space = SpaceGuard(group, log, reserve_bytes, limits)
        self.pins = Pins(limits)
        self.acknowledged = Acknowledged(log.acknowledged, is_durable=log.config.durability == "fsync")
        self._send = send
        self._on_failed = on_failed
        self._on_configuration = on_configuration
        self._environment = environment
        self._log_time_interval_ms = int(limits.log_time_s * 1000)
        self._clock_difference_ms = limits.clock_difference_ms
        self._append_clock = log.clock
        self._pace = CatchUpPace(environment.monotonic_ms, lambda: self.log.staged_end)
        self._controls = Controls(log)
        self.log_time = LogTime(environment.running_ms)
        self._log_time_recorded_ms = 0
        self._scheduled = False
        self._failed = False
        self._closing = False
        self._uuid_recorded = log.log_uuid is not None
        self.contested: LogContestedError | None = None
        self.changes = ChangeSignal()
        self._observers: tuple[ReplicaObserver, ...] = ()
        self._propose: Callable[[], None] | None = None
        self._checkpoint_due = True
        self._reads: dict[int, Callable[[Index | None], None]] = {}
        self._next_read = 1
        self.soft_state = SoftState(Role.FOLLOWER, None, log.hard_state.term)
        self._leading_from: Index | None = None
        self.raft = RawNode(
            member=member,
            configurations=_known_configurations(log, configuration),
            config=config,
            store=log,
            hard_state=log.hard_state,
            commit_index=log.commit_index,
            random=environment.random,
            noop=self._noop,
            configuration_entry=self._configuration_entry,
            log_time=lambda: self.log_time.now_ms,
            snapshot_payloads=SnapshotInstalls(
                log, lambda: self.tables, self._configuration_before, environment.background
            ),
            floor=log.floor,
            ends_below_members=log.ends_below_members,
            start_ticks=config.election_ticks_max,
        )
        self._disk = environment.open_disk(log, self._persisted, self._fail)
        self.commit_index = log.commit_index
        self._apply_controls(self.commit_index)
        self._was_member = self.member in self.raft.configuration.members
        on_configuration(group, self.raft.configuration_before(Index(self.raft.last_index + 1)))

    def observe(self, *observers: ReplicaObserver) -> None:
        """Call these services at each change from now on, in this order, after those that observe already."""
        self._observers += observers

    @property
    def tables(self) -> LogTables:
        """Producers, transactions and the log's uuid, as of the committed entries."""
        return self._controls.tables

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log, once its first entry is committed here."""
        return self.log.log_uuid or self.tables.log_uuid

    @property
    def chain(self) -> Chain:
        """The logs that this log continues, oldest first."""
        return self.tables.chain if self.tables.log_uuid == self.log_uuid else self.log.chain

    def follows(self, log_uuid: str, index: int, term: int) -> bool | None:
        """Whether this log continues another one and contains its entry of this index and term.

        None if it is the same log, or while that is not known here; see ``continuation.contains``.
        """
        if log_uuid == self.log_uuid:
            return None
        return contains(
            self.chain,
            log_uuid,
            index,
            term,
            first_index=self.raft.first_index,
            commit_index=self.commit_index,
            term_at=lambda index: self.raft.term_at(Index(index)),
        )

    @property
    def profile_b(self) -> bool:
        """Whether control entries may be written."""
        return self.log.config.profile == "B"

    def _noop(self, first_index: Index) -> ProposedBatch:
        del first_index
        uuid = self.log.log_uuid
        recorded = uuid is None or self.tables.log_uuid == uuid
        self.log_time.observe(self._controls.log_time_ms)
        chain = {"c": [asdict(link) for link in self.log.chain]} if self.log.chain else {}
        return self._recording(self.pack_control({} if recorded else {"k": "log", "u": uuid} | chain))

    def pack_control(self, fields: dict[str, Any]) -> bytes:
        """Return the body of a control entry that this leader appends now: it holds the log time."""
        return control.pack(fields | {"t": self.log_time.now_ms})

    def _configuration_entry(self, body: bytes) -> ProposedBatch:
        self._log_time_recorded_ms = self.log_time.now_ms
        return ProposedBatch(configuration=self.pack_control(control.unpack(body)))

    def _configuration_before(self, index: Index) -> ConfigurationInForce:
        return self.raft.configuration_before(index)

    def _recording(self, body: bytes) -> ProposedBatch:
        self._log_time_recorded_ms = self.log_time.now_ms
        return ProposedBatch(control=body)

    # --- input -----------------------------------------------------------------------------------------------

    def tick(self) -> None:
        """Count one tick of the clock."""
        self._guard(self._tick)

    def _tick(self) -> bool:
        expired = self.raft.tick()
        if self.is_leader:
            used = self.raft.allow_catch_up(self._pace.bytes_per_tick)
            self._pace.tick(used=used)
            return expired or used
        return expired

    def step(self, message: Message) -> None:
        """Deliver a peer's message; raise ProtocolError if it is malformed, which concerns its connection only."""
        self._guard(partial(self._step, without_deleted(message, self.raft.first_index)))

    def _step(self, message: Message) -> None:
        if self.space.admits(message, self.raft):
            self.raft.step(message)
            self.acknowledged.observe(message)
            if isinstance(message, Heartbeat) and message.term >= self.soft_state.term:
                self.log_time.observe(message.log_time_ms)

    def propose(self, proposal: ProposedBatch) -> Batch:
        """Append a batch as leader; raise BadRequestError if it exceeds a limit of the log, else as the core does.

        While a leader appends, an entry with the log time precedes a batch at least each ``Limits.log_time_s``.
        """
        if self.contested is not None:
            raise self.contested

        def propose() -> Batch:
            if proposal.has_control:
                self._log_time_recorded_ms = self.log_time.now_ms
            elif self.profile_b and self.log_time.now_ms - self._log_time_recorded_ms >= self._log_time_interval_ms:
                self.raft.propose(self._recording(self.pack_control({})))
            batch = self.raft.propose(proposal)
            self._pace.proposed(batch.last_index)
            return batch

        return self._ask(propose)

    def propose_change(self, change: MemberChange) -> Batch:
        """Append the configuration that a change of one member makes; raise as the core does."""
        return self._ask(lambda: self.raft.propose_change(change))

    def transfer_leadership(self, target: NodeId) -> None:
        """Start a transfer of leadership to another node's voter; raise as the core does."""
        voters = self.raft.configuration.voters
        member = next((voter for voter in voters if node_of(voter) == target), MemberId(target))
        self._ask(lambda: self.raft.transfer_leadership(member))

    async def hand_over(self, timeout_s: float, is_connected: Callable[[NodeId], bool]) -> None:
        """Transfer leadership to a connected voter: to the one with the most entries, else to the next one.

        Returns when this node no longer leads, when no voter takes leadership, or after the timeout.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        for target in self.raft.successors():
            if not is_connected(node_of(target)):
                continue
            with contextlib.suppress(DLedgerError):  # it no longer leads, or has stopped
                self.transfer_leadership(node_of(target))
            while self.is_leader and self.raft.transferee == target and is_connected(node_of(target)):
                if (left := deadline - loop.time()) <= 0:
                    return
                await self.wait_change(min(left, _HAND_OVER_LOOK_S))
            if not self.is_leader:
                return

    def report_unreachable(self, peer: NodeId) -> None:
        """Record that the connection to a peer was lost."""
        for member in self.raft.configuration.members:
            if node_of(member) == peer:
                self._guard(partial(self.raft.report_unreachable, member))

    def report_receiving(self, member: MemberId) -> None:
        """Record that a member's bytes arrive and delay its heartbeats."""
        self._guard(partial(self.raft.report_receiving, member))

    def report_received(self, member: MemberId) -> None:
        """Record that a member receives bytes of this node that delay the heartbeats."""
        self._guard(partial(self.raft.report_received, member))

    def schedule(self) -> None:
        """Run the Ready loop at the end of this iteration, so that all input of the iteration is written together."""
        if not self._scheduled:
            self._scheduled = True
            self._environment.call_soon(self._pump)

    def propose_soon(self, propose: Callable[[], None]) -> None:
        """Call ``propose`` once before the next run of the Ready loop, which writes and sends what it proposes."""
        self._propose = propose
        self.schedule()

    def _guard(self, function: Callable[[], object]) -> None:
        """Run a step of the replica; one that returns False has no output. A ProtocolError is the caller's."""
        if self._failed or self._closing:
            return
        try:
            result = function()
        except ProtocolError:
            raise
        except BaseException as error:  # noqa: BLE001 - a broken invariant stops the replica
            self._fail(error)
            return
        if result is not False and self.raft.has_ready():
            self.schedule()

    def _ask(self, function: Callable[[], T]) -> T:
        """Run a caller's request: the core's DLedgerErrors go to the caller, any other error stops the replica.

        A stopped replica sends and writes nothing, so it certainly drops the request.
        """
        if not (self._failed or self._closing):
            try:
                result = function()
            except DLedgerError:
                raise
            except BaseException as error:  # noqa: BLE001 - a broken invariant stops the replica
                self._fail(error)
            else:
                self.schedule()
                return result
        raise ProposalDroppedError(f"{self.node_id} has stopped", f"group {self.group}", "ask another node")

    def _fail(self, error: BaseException) -> None:
        if not self._failed:
            _LOG.critical("replica stopped: group=%s node=%s error=%s", self.group, self.node_id, error)
            if isinstance(error, DiskFailedError) and (message := self.raft.successor()) is not None:
                self._send(self.group, message)  # the core is intact, and needs no disk for this
            self.stop(error)
            self._on_failed(error)

    def stop(self, error: BaseException) -> None:
        """Take nothing in, write nothing and send nothing from now on, because of ``error``. Idempotent.

        The services see a follower without a leader: waiting clients get their response, and role listeners a change.
        """
        if self._failed:
            return
        self._failed = True
        self.log.reject_writes(error)
        try:
            reads, self._reads = self._reads, {}
            for reply in reads.values():
                reply(None)
            self._role_changed(SoftState(Role.FOLLOWER, None, self.soft_state.term))
        except Exception:  # noqa: BLE001 - the first error is the one to report
            _LOG.exception("error while stopping a replica: group=%s node=%s", self.group, self.node_id)

    # --- the Ready loop --------------------------------------------------------------------------------------

    def _pump(self) -> None:
        self._scheduled = False
        self._guard(self._iterate)

    def _iterate(self) -> bool:
        propose, self._propose = self._propose, None
        if propose is not None:
            propose()
        while self.raft.has_ready() and not self._failed:
            self._handle(self.raft.ready())
        return False

    def _handle(self, ready: Ready) -> None:
        if ready.restart is not None:
            self._install_snapshot(ready.restart)
        if ready.truncate_from is not None:
            self._controls.truncate(ready.truncate_from)
            self.acknowledged.truncated(ready.truncate_from)
        for batch in ready.batches:
            self._controls.stage(batch)
        for message in ready.messages:
            self._send(self.group, self._with_condition(message))
        self._checkpoint_due |= ready.must_persist or ready.committed is not None
        if ready.must_persist or self._disk.busy:
            self._disk.submit(ready)
        else:
            self._finish(ready)
        if ready.committed is not None:
            self._committed(Index(ready.committed[1] - 1))
        if ready.floor_changed and ready.floor is None:
            self._disk.run(partial(self.log.remove_floor, self.commit_index))
        if ready.soft_state is not None:
            self._role_changed(ready.soft_state)
        if ready.configuration is not None or ready.committed_configuration is not None:
            self._report_configuration(ready)
        for read in ready.reads:
            reply = self._reads.pop(read.request_id, None)
            if reply is not None:
                reply(read.index)

    def _with_condition(self, message: Message) -> Message:
        """Add what the disk limits to a response to a heartbeat."""
        if isinstance(message, HeartbeatResponse) and self.space.is_full:
            withheld = Condition.NONE if self.space.accepts_entries else Condition.WITHHOLDS
            return replace(message, condition=message.condition | Condition.DISK_FULL | withheld)
        return message

    def _report_configuration(self, ready: Ready) -> None:
        if ready.configuration is not None:
            self._on_configuration(self.group, ready.configuration)
        in_force = self.raft.configuration.members
        self._was_member |= self.member in in_force
        committed = ready.committed_configuration
        # A store that was just admitted receives configurations from before.
        removed = self._was_member and self.member not in in_force
        if removed and committed is not None and self.member not in (members := committed.configuration.members):
            _LOG.warning(
                "removed from the group, the store may be deleted: group=%s node=%s members=%s",
                self.group,
                self.node_id,
                " ".join(members),
            )

    def _install_snapshot(self, new_start: LogRestart) -> None:
        """Restart the log where the leader's begins; the files follow."""
        new_log = new_start.payload
        assert isinstance(new_log, NewLog)
        _LOG.warning(
            "installing snapshot: group=%s node=%s first_index=%d", self.group, self.node_id, new_start.first_index
        )
        self._controls.restart(new_log.tables)
        self._committed(Index(new_start.first_index - 1))

    def _persisted(self, readys: list[Ready]) -> None:
        for ready in readys:
            self._guard(lambda ready=ready: self._finish(ready))  # type: ignore[misc]
        self.changes.notify()

    def _finish(self, ready: Ready) -> None:
        for message in ready.persisted_messages:
            self._send(self.group, self._with_condition(message))
        self.raft.advance(ready.number)

    def _committed(self, commit_index: Index) -> None:
        invariant(
            commit_index >= self.commit_index, "the commit index moved back", old=self.commit_index, new=commit_index
        )
        self.commit_index = commit_index
        self._pace.committed(commit_index)
        self._apply_controls(commit_index)
        for observer in self._observers:
            observer.committed(commit_index)
        self.changes.notify()

    def _apply_controls(self, commit_index: Index) -> None:
        self._controls.apply(commit_index)
        self.log_time.observe(self.tables.log_time_ms)
        if self.tables.log_uuid is not None and not self._uuid_recorded:
            self._uuid_recorded = True
            self._disk.run(partial(self.log.adopt_uuid, self.tables.log_uuid))
        if self.tables.log_uuid == self.log.log_uuid and self.tables.chain != self.log.chain:
            self._disk.run(partial(self.log.adopt_chain, self.tables.chain))  # a member that was admitted later

    def _role_changed(self, soft_state: SoftState) -> None:
        before = self.soft_state
        invariant(soft_state.term >= before.term, "the term moved back", old=before.term, new=soft_state.term)
        if soft_state.role is not Role.LEADER:
            self._leading_from = None
            self._pace.forget()
            self._append_clock.follow()
            self.log_time.follow()
        elif (self.soft_state.role, self.soft_state.term) != (Role.LEADER, soft_state.term):
            self._leading_from = self.raft.last_index
            self._append_clock.lead()
            self._compare_times()
            if self.profile_b:
                self.log_time.lead()
        self.soft_state = soft_state
        _LOG.info(
            "role changed: group=%s node=%s role=%s term=%d leader=%s",
            self.group,
            self.node_id,
            soft_state.role.value,
            soft_state.term,
            self.leader_node,
        )
        for observer in self._observers:
            observer.role_changed(soft_state)
        self.changes.notify()

    def _compare_times(self) -> None:
        """Report that a clock of an earlier leader was ahead: append times never decrease."""
        ahead_ms = self.log.newest_time_ms - self._append_clock.now_ms()
        if ahead_ms > self._clock_difference_ms:
            _LOG.warning(
                "append times ahead of the clock: group=%s node=%s ahead_ms=%d remedy=synchronize clocks; appends get "
                "the newest time of the log until the clock reaches it; for right times now append to a new group",
                self.group,
                self.node_id,
                ahead_ms,
            )

    # --- for services ----------------------------------------------------------------------------------------

    @property
    def is_leader(self) -> bool:
        """Whether this node leads the group, and has not stopped."""
        return self.soft_state.role is Role.LEADER and not self._failed

    @property
    def leader_ready(self) -> bool:
        """Whether this node leads and has committed an entry of its term, so that its tables are complete."""
        if not self.is_leader:
            return False
        return self._leading_from is None or self.commit_index >= self._leading_from or not self.profile_b

    @property
    def pin_time_ms(self) -> int:
        """The time by which pins expire: the log time; in profile A, which has none, this node's running time."""
        return self.log_time.now_ms if self.profile_b else self._environment.running_ms()

    @property
    def leader_node(self) -> NodeId | None:
        """The node of the group's leader, None if this node knows none."""
        leader = self.soft_state.leader_id
        return None if leader is None else node_of(leader)

    def not_leader(self) -> NotLeaderError:
        """Return the error that names the leader."""
        leader = self.leader_node
        hint = f"ask {leader}" if leader and leader != self.node_id else "retry"
        return NotLeaderError(
            f"{self.node_id} is not the leader of group {self.group}",
            "",
            hint,
            {"leader_id": leader, "group": self.group},
        )

    @property
    def end(self) -> tuple[Term, Index]:
        """Term and index of the last entry, which elections compare."""
        last_index = self.raft.last_index
        term = self.raft.term_at(last_index)
        return NO_TERM if term is None else term, last_index

    @property
    def readable_end(self) -> Index:
        """End (exclusive) of the entries that are committed and durable here.

        The end of the files is not enough: they may still contain an old leader's tail, to be truncated, at indexes
        that are already committed with other content.
        """
        return Index(min(self.commit_index, self.raft.durable_index, self.log.last_index()) + 1)

    @property
    def visibility(self) -> Visibility:
        """Entries that ``read_committed`` shows now; valid until the next control entry is applied."""
        return Visibility.of(self.tables.transactions, self.readable_end)

    @property
    def visible_end(self) -> Index:
        """End (exclusive) of the entries that ``read_committed`` shows."""
        return self.visibility.end

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until an entry became readable, the role changed, or the timeout expires."""
        await self.changes.wait(timeout_s)

    async def read_index(self, timeout_s: float) -> Index:
        """Return an index up to which reads are linearizable; raise NotLeaderError."""
        index = await response_within(timeout_s, self.ask_read_index, self.forget_read_index)
        if index is None:
            raise self.not_leader()
        return index

    def ask_read_index(self, reply: Callable[[Index | None], None]) -> int:
        """Ask for such an index; ``reply`` gets it, or None if leadership was lost first. Raises NotLeaderError.

        Returns:
            The request's number, for ``forget_read_index``.
        """
        number, self._next_read = self._next_read, self._next_read + 1
        self._ask(lambda: self.raft.read_index(number))
        self._reads[number] = reply
        return number

    def forget_read_index(self, number: int) -> None:
        """Drop a request, whether its reply was called or not."""
        self._reads.pop(number, None)

    def trim(self, index: Index) -> None:
        """Queue the deletion of the segments before ``index``, which must be committed and the first entry of one.

        Another leader's entry at that index might start at another position. The core gets the new first index before
        the files go: it must not read deleted entries.
        """
        if index < self.readable_end and self.log.first_index() < index:
            tables = self.tables.take_changes()
            self._guard(lambda: self.raft.trim(index))
            commit_index = self.commit_index

            def delete() -> None:
                self.log.trim(index, tables, commit_index)

            self._disk.run(delete)

    def run_on_disk(self, job: Callable[[], None]) -> None:
        """Queue a job for the thread that writes; an error of it stops the replica."""
        self._disk.run(job)

    def raise_floor(self, needed: Floor | None) -> bool:
        """Raise the floor, because another node remembers more of this log than it contains; return whether it rose.

        Args:
            needed: the floor that the other node names: that of a leader at the end of its term, or one without an
                index. Acknowledged entries may be lost then, of any term up to the present one. None is such a floor
                too: version 0.2.0 names none.
        """
        before, term = self.raft.floor, self.raft.status().term
        floor = Floor(term) if needed is None or needed.is_open or needed.term > term else needed
        self._guard(lambda: self.raft.raise_floor(floor))
        return self.raft.floor != before

    def report_attached(self, member: MemberId) -> None:
        """Record that the stores of this node and of ``member`` were checked by each other."""
        self.raft.report_attached(member)

    def check_attach(self, theirs: ShownStore) -> None:
        """Check another member's store, which its node shows; a leader counts no entry that it lacks.

        Raises:
            IdentityLostError, EndLostError: it has forgotten what this node remembers, see ``Acknowledged.check``.
        """
        self._guard(lambda: self.raft.report_end(theirs.member, theirs.last_term, theirs.last_index))
        self.acknowledged.check(self.group, theirs, self.raft, self.commit_index)

    def save_checkpoint(self) -> None:
        """Queue a checkpoint of what changed: durable and commit index, acknowledgements of other stores, tables.

        The disk writes the entries that the tables include before, so these never contain an entry that it lacks.
        """
        # Only after the files are deleted: a crash before that restarts the log where it began.
        self.tables.trim(self.log.first_index())
        if (known := self.acknowledged.unwritten()) is not None:
            self._disk.run(partial(self.log.save_acknowledged, known))
        if self._checkpoint_due:
            self._checkpoint_due = False
            self._disk.run(partial(self.log.save_checkpoint, self.commit_index))
        if (changes := self.tables.take_changes()).rows:
            self._disk.run(partial(self.log.save_tables, changes))

    async def store_tables(self, timeout_s: float) -> None:
        """Store the changes of the tables now, so that readers of the store find them; raise BusyError."""
        loop = asyncio.get_running_loop()
        stored, changes = asyncio.Event(), self.tables.take_changes()

        def store() -> None:
            self.log.save_tables(changes)
            loop.call_soon_threadsafe(stored.set)

        self._disk.run(store)
        try:
            await asyncio.wait_for(stored.wait(), timeout_s)
        except TimeoutError:
            raise BusyError("the disk is slow", f"group {self.group} on {self.node_id}", "retry") from None

    def log_end(self) -> LogEnd:
        """Return the present end of the log, without the check of its last entry."""
        status, (last_term, last_index) = self.raft.status(), self.end
        return LogEnd(
            term=status.term,
            last_term=last_term,
            last_index=last_index,
            commit_index=self.commit_index,
            is_recovering=status.is_recovering,
            ranges=tuple((found.term, found.first_index) for found in self.log.term_ranges()),
        )

    def _check_at(self, index: int) -> int:
        records = self.log.read(index, index + 1, 1)
        header = records.headers[0]
        body = memoryview(records.data)[HEADER_BYTES : int(records.sizes[0])]
        return check_of(index, int(header["term"]), int(header["position"]), body)

    def contest(self, link: ContinuedLog, node_id: str, index: int, term: int | None) -> None:
        """Refuse appends from now on: a store of the continued log has a committed entry that this log lacks."""
        if self.contested is None:
            _LOG.critical(
                "appends refused, the continued log is alive: group=%s log=%s continued=%s index=%d peer=%s "
                "committed_index=%d committed_term=%s remedy=decide which log stays, stop the nodes of the other one "
                "and move their stores away, restart the rest",
                self.group,
                self.log_uuid,
                link.log_uuid,
                link.index,
                node_id,
                index,
                term,
            )
        self.contested = LogContestedError(
            f"log {self.log_uuid} continues log {link.log_uuid} up to index {link.index}, and lacks a committed entry "
            f"of that log that {node_id} has, at index {index}" + ("" if term is None else f" of term {term}"),
            f"group {self.group}",
            "decide which log stays: stop the nodes of the other one, move their stores away, restart the rest",
            {"group": self.group, "log": self.log_uuid, "continued": link.log_uuid, "index": link.index},
        )

    async def give_up(self) -> LogEnd:
        """Stop permanently, write queued data, close the store, and return its end, which is final.

        Raises:
            DiskFailedError: a write failed, now or earlier.
        """
        self._closing = True
        end = await asyncio.to_thread(self._close_with_end)
        stopped = RecoveryRefusedError(f"the store of {self.node_id} has given its log up", f"group {self.group}")
        self.stop(stopped)  # the clients that wait get a response
        return end

    def _close_with_end(self) -> LogEnd:
        end = self.log_end()
        self._disk.close()
        try:
            if self.log.failure is not None:
                raise self.log.failure
            self.log.save_tables(self.tables.take_changes())
            last_index = self.log.last_index()
            term = self.raft.term_at(last_index)
            return replace(
                end,
                term=self.log.hard_state.term,
                last_term=NO_TERM if term is None else term,
                last_index=last_index,
                commit_index=min(self.commit_index, last_index),
                check=self._check_at(last_index) if last_index >= self.log.first_index() else None,
            )
        finally:
            self.log.close(self.commit_index)

    async def close(self) -> None:
        """Write queued data and close the store; write nothing after a failure."""
        self._closing = True
        await asyncio.to_thread(self.close_blocking)

    def close_blocking(self) -> None:
        """Close as ``close`` does, for a caller without an event loop."""
        self._closing = True
        self._disk.close()
        try:
            if self.log.failure is None:
                if (known := self.acknowledged.unwritten()) is not None:
                    self.log.save_acknowledged(known)
                self.log.save_tables(self.tables.take_changes())
        finally:
            self.log.close(self.commit_index)

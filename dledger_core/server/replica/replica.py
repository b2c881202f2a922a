"""One group on one node: wires the Raft core, the log, the tables and the network together.

Everything here runs in one thread, a node's event loop, in iterations that ``Environment.call_soon`` starts; only the
disk has a thread of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from dledger_core.config import LIMITS, Limits, RaftConfig
from dledger_core.errors import NotLeaderError
from dledger_core.ids import Index, MemberId, NodeId, node_of
from dledger_core.raft import (
    Batch,
    Condition,
    Configuration,
    ConfigurationInForce,
    Heartbeat,
    HeartbeatResponse,
    MemberChange,
    Message,
    RawNode,
    Ready,
    Role,
    SoftState,
)
from dledger_core.record import ProposedBatch
from dledger_core.server.maintenance.disk_space import SpaceGuard
from dledger_core.server.maintenance.retention import Pins
from dledger_core.server.monitoring.measures import GroupMeasures
from dledger_core.server.replica.change_signal import response_within
from dledger_core.server.replica.controls import Controls, known_configurations
from dledger_core.server.replica.environment import Environment
from dledger_core.server.replica.leadership import Leadership
from dledger_core.server.replica.lineage import Lineage
from dledger_core.server.replica.log_time import LogTime, TimedEntries
from dledger_core.server.replica.peer_reports import PeerReports
from dledger_core.server.replica.peer_watermarks import PeerWatermarks
from dledger_core.server.replica.preferred_leaders import PreferredLeaders
from dledger_core.server.replica.ready_loop import ReadyLoop
from dledger_core.server.replica.snapshot import SnapshotInstalls, without_deleted
from dledger_core.server.replica.store import ReplicaStore
from dledger_core.storage import CommitLog
from dledger_core.storage.read.visibility import Visibility
from dledger_core.storage.tables.tables import LogTables

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """Identity of a replica, and its settings.

    Attributes:
        group: the group's name.
        member: this member.
        bootstrapped: the configuration that the group was bootstrapped with; used while the store knows none.
        raft: Raft's settings.
        preferred_leaders: nodes that should lead once they have caught up, best first.
        reserve_bytes: free disk space below which appends are rejected.
        limits: the node's limits.
    """

    group: str
    member: MemberId
    bootstrapped: Configuration
    raft: RaftConfig
    preferred_leaders: tuple[NodeId, ...] = ()
    reserve_bytes: int = 0
    limits: Limits = LIMITS


class Replica:
    """A group's replica on this node.

    Args:
        settings: see ``ReplicaSettings``.
        log: the opened store; closed by ``store.close``.
        environment: clocks, iterations, randomness, network and disk.
        on_failed: called once with the error that stopped the replica.
        on_configuration: called with (group, configuration in force) at the start and at each change.
        measures: counters of the group; they outlive the replica.

    Attributes:
        loop: gives input to the core.
        leadership: who leads, and handing it over.
        store: writes checkpoints, deletions and the end of the log.
        lineage: which log it is.
        peers: takes the reports of links.
    """

    loop_type: ClassVar[type[ReadyLoop]] = ReadyLoop
    """The simulation shows each Ready to its checker."""

    def __init__(
        self,
        settings: ReplicaSettings,
        log: CommitLog,
        environment: Environment,
        on_failed: Callable[[BaseException], None],
        on_configuration: Callable[[str, ConfigurationInForce], None] = lambda group, found: None,
        measures: GroupMeasures | None = None,
    ) -> None:
        group, node_id, limits = settings.group, node_of(settings.member), settings.limits
        self.group, self.node_id, self.member, self.log = group, node_id, settings.member, log
        self.profile_b = log.config.profile == "B"
        self.measures = measures or GroupMeasures()
        self.space = SpaceGuard(group, log, settings.reserve_bytes, limits)
        self.pins = Pins(limits)
        self.peer_watermarks = PeerWatermarks(log.acknowledged, is_durable=log.config.durability == "fsync")
        self.log_time = LogTime(environment.running_ms)
        self._environment = environment
        self._on_configuration = on_configuration
        self._entries = TimedEntries(self.log_time, int(limits.log_time_s * 1000) if self.profile_b else None)
        self._controls = Controls(log)
        self.raft = RawNode(
            member=settings.member,
            configurations=known_configurations(log, settings.bootstrapped),
            config=settings.raft,
            store=log,
            hard_state=log.hard_state,
            commit_index=log.commit_index,
            random=environment.random,
            noop=self._noop,
            configuration_entry=self._entries.configuration,
            log_time=lambda: self.log_time.now_ms,
            snapshot_payloads=SnapshotInstalls(log, lambda: self.tables, environment.background),
            floor=log.floor,
            ends_below_members=log.ends_below_members,
            # A disk that was set back must not vote before its peers have compared it (``RaftState.is_starting``).
            start_ticks=settings.raft.election_ticks_max,
        )
        self.loop = self.loop_type(
            group=group,
            node_id=node_id,
            raft=self.raft,
            log=log,
            controls=self._controls,
            peer_watermarks=self.peer_watermarks,
            environment=environment,
            send=self._send,
            on_applied=self._applied,
            on_configured=self._configured,
            on_failed=on_failed,
        )
        self.changes = self.loop.changes
        self.lineage = Lineage(self.loop)
        preferred = PreferredLeaders(self.raft, node_id, settings.preferred_leaders, settings.raft.election_ticks_min)
        self.leadership = Leadership(self.loop, self.log_time, environment, limits, preferred)
        self.store = ReplicaStore(self.loop)
        self.peers = PeerReports(self.loop)
        self.loop.observe(self.leadership)
        self._applied()
        log.adopt_group_version(self.raft.configuration.version)
        self._was_member = settings.member in self.raft.configuration.members
        on_configuration(group, self.raft.configuration_before(Index(self.raft.last_index + 1)))

    # --- of the core -----------------------------------------------------------------------------------------

    def _noop(self, first_index: Index) -> ProposedBatch:
        del first_index
        # Uncommitted entries too: one of them may become committed, and log time must not fall after it
        # (test_new_leader_continues_from_uncommitted_entry).
        self.log_time.observe(self._controls.log_time_ms)
        return self._entries.entry(self.lineage.unrecorded())

    def _send(self, message: Message) -> None:
        # A member that says nothing of its full disk looks like one that is slow, and the leader would count on it.
        if isinstance(message, HeartbeatResponse) and self.space.is_full:
            withheld = Condition.NONE if self.space.accepts_entries else Condition.WITHHOLDS
            message = replace(message, condition=message.condition | Condition.DISK_FULL | withheld)
        self._environment.send(self.group, message)

    def _applied(self) -> None:
        self.log_time.observe(self.tables.log_time_ms)
        self.lineage.adopt()

    def _configured(self, ready: Ready) -> None:
        if ready.configuration is not None:
            self._on_configuration(self.group, ready.configuration)
        in_force = self.raft.configuration.members
        self._was_member |= self.member in in_force
        committed = ready.committed_configuration
        # A store that was just admitted receives configurations from before
        # (test_store_that_was_never_a_member_is_not_reported_as_removed).
        removed = self._was_member and self.member not in in_force
        if removed and committed is not None and self.member not in (members := committed.configuration.members):
            _LOG.warning(
                "removed from the group, the store may be deleted: group=%s node=%s members=%s",
                self.group,
                self.node_id,
                " ".join(members),
            )

    # --- input -----------------------------------------------------------------------------------------------

    def tick(self, beat: bool | None = None) -> None:
        """Count one tick of the clock; for ``beat`` see ``RawNode.tick``."""
        self.loop.run(self._tick, beat)

    def _tick(self, beat: bool | None) -> bool:
        expired = self.raft.tick(beat)
        return (self.is_leader and self.leadership.tick()) or expired

    def step(self, message: Message) -> None:
        """Deliver a peer's message; raise ProtocolError if it is malformed, which concerns its connection only."""
        self.loop.run(self._step, without_deleted(message, self.raft.first_index))

    def _step(self, message: Message) -> bool:
        # A full follower takes no entries, but it still follows: otherwise it would campaign against a leader that
        # works (test_full_follower_still_follows_and_recovers).
        if (admitted := self.space.admits(message, self.raft)) and (admitted := self.raft.step(message)):
            self.peer_watermarks.observe(message)
            # A deposed leader counts on until it hears of the new one; its time is not the group's
            # (test_follower_learns_log_time_from_heartbeats_of_its_leader).
            if isinstance(message, Heartbeat) and message.term >= self.loop.soft_state.term:
                self.log_time.observe(message.log_time_ms)
        return admitted

    def propose(self, proposal: ProposedBatch) -> Batch:
        """Append a batch as leader; raise BadRequestError if it exceeds a limit of the log, else as the core does.

        While a leader appends, an entry with the log time precedes a batch at least each ``Limits.log_time_s``.
        """
        # Test: test_majority_that_is_alive_stays_and_new_log_refuses_appends.
        if self.lineage.forked is not None:
            raise self.lineage.forked
        return self.loop.ask(self._propose, proposal)

    def _propose(self, proposal: ProposedBatch) -> Batch:
        if (due := self._entries.before(proposal)) is not None:
            self.raft.propose(due)
        batch = self.raft.propose(proposal)
        self.leadership.rate.proposed(batch.last_index)
        return batch

    def propose_soon(self, propose: Callable[[], None]) -> None:
        """Call ``propose`` once before the next run of the Ready loop, which writes and sends what it proposes."""
        self.loop.propose_soon(propose)

    def propose_change(self, change: MemberChange) -> Batch:
        """Append the configuration that a change of one member makes; raise as the core does."""
        return self.loop.ask(self.raft.propose_change, change)

    def pack_control(self, fields: dict[str, Any]) -> bytes:
        """Return the body of a control entry that this leader appends now: it holds the log time."""
        return self.log_time.pack(fields)

    def ask_read_index(self, reply: Callable[[Index | None], None]) -> int:
        """See ``ReadyLoop.ask_read_index``."""
        return self.loop.ask_read_index(reply)

    async def read_index(self, timeout_s: float) -> Index:
        """Return an index up to which reads are linearizable; raise NotLeaderError."""
        index = await response_within(timeout_s, self.loop.ask_read_index, self.loop.forget_read_index)
        if index is None:
            raise self.not_leader()
        return index

    async def wait_change(self, timeout_s: float) -> None:
        """Wait until an entry became readable, the role changed, or the timeout expires."""
        await self.changes.wait(timeout_s)

    # --- state -----------------------------------------------------------------------------------------------

    @property
    def tables(self) -> LogTables:
        """Producers, transactions and the log's uuid, as of the committed entries."""
        return self._controls.tables

    @property
    def commit_index(self) -> Index:
        """The last entry that this node knows to be committed."""
        return self._controls.commit_index

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log, once its first entry is committed here."""
        return self.lineage.log_uuid

    @property
    def soft_state(self) -> SoftState:
        """Role, leader and term."""
        return self.loop.soft_state

    @property
    def is_leader(self) -> bool:
        """Whether this node leads the group, and has not stopped."""
        return self.loop.soft_state.role is Role.LEADER

    @property
    def leader_ready(self) -> bool:
        """Whether this node leads and has committed an entry of its term, so that its tables are complete."""
        return self.leadership.is_ready

    @property
    def leader_node(self) -> NodeId | None:
        """The node of the group's leader, None if this node knows none."""
        return self.leadership.node

    def not_leader(self) -> NotLeaderError:
        """Return the error that names the leader."""
        return self.leadership.not_leader()

    @property
    def pin_time_ms(self) -> int:
        """The time by which pins expire: the log time; in profile A, which has none, this node's running time."""
        return self.log_time.now_ms if self.profile_b else self._environment.running_ms()

    @property
    def readable_end(self) -> Index:
        """End (exclusive) of the entries that are committed and durable here."""
        return self.store.readable_end

    @property
    def visibility(self) -> Visibility:
        """Entries that ``read_committed`` shows now; valid until the next control entry is applied."""
        return Visibility.of(self.tables.transactions, self.readable_end)

    @property
    def visible_end(self) -> Index:
        """End (exclusive) of the entries that ``read_committed`` shows."""
        return self.visibility.end

"""RawNode: the interface of the core. Inputs go in, ``ready`` returns work, ``advance`` confirms that it is durable."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from dledger_core.config import RaftConfig, RandomSource
from dledger_core.errors import invariant
from dledger_core.ids import NO_INDEX, Index, MemberId, Term
from dledger_core.raft import election, leadership, membership, raft, replication
from dledger_core.raft.batch import Batch, LogStore, Proposal, SnapshotPayloads, TermRange
from dledger_core.raft.configuration import Configuration, MemberChange
from dledger_core.raft.configurations import ConfigurationInForce
from dledger_core.raft.floor import Floor
from dledger_core.raft.log import RaftLog
from dledger_core.raft.messages import Condition, Message, TimeoutNow
from dledger_core.raft.pointers import LogPointers
from dledger_core.raft.progress import ProgressState
from dledger_core.raft.ready import HardState, Ready, Role, SoftState
from dledger_core.raft.state import ConfigurationEntry, NewestLogTime, Noop, RaftState


@dataclass(frozen=True, slots=True)
class ProgressStatus:
    """A leader's view of one member, also of a removed one that may not have heard so.

    Attributes:
        match_index: last index known durable there and equal to the leader's.
        next_index: first index of the next AppendEntries.
        state: how the leader sends to it.
        is_active: it responded within the minimum election timeout.
        is_caught_up: a learner may be promoted.
        inflight_messages, inflight_bytes: AppendEntries that are not acknowledged.
        is_stalled: it responds, and has acknowledged no entry for several election timeouts although it lacks some.
        condition: what it reported last.
        is_unheard: it has not responded yet, and this leader has led for less than the minimum election timeout.
    """

    match_index: Index
    next_index: Index
    state: ProgressState
    is_active: bool
    is_caught_up: bool
    inflight_messages: int
    inflight_bytes: int
    is_stalled: bool = False
    is_unheard: bool = False
    condition: Condition = Condition.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A replica at one moment; ``progress`` is empty unless it leads.

    ``configuration`` is the one in force, of the entry at ``configuration_index``; until that is committed, a change of
    members is pending.
    """

    node_id: MemberId
    role: Role
    term: Term
    leader_id: MemberId | None
    first_index: Index
    last_index: Index
    durable_index: Index
    commit_index: Index
    transferee: MemberId | None
    is_recovering: bool
    has_active_leader: bool
    configuration: Configuration
    configuration_index: Index
    is_change_pending: bool
    progress: dict[MemberId, ProgressStatus]


class RawNode:
    """One replica of one group, without I/O, clock or threads; one event loop owns it.

    It has many methods because it is the only interface: each is one input or one fact, and the modules of the package
    have the rules.

    A call that raises a DLedgerError leaves the state unchanged.
    InvariantViolationError means that a safety property is broken: the replica must stop and must not be used again.

    Attributes:
        state: what the rules decide on; others only read it, as the simulation does after every step.

    Args:
        member: this member.
        configurations: that of every configuration entry of the log, in order, after the one that was in force before
            its first index. Those above ``commit_index`` are not committed.
        config: settings, times in ticks.
        store: the log's store; see ``LogStore``.
        hard_state: term and vote as recovered from disk.
        commit_index: recovered lower bound.
        random: the only source of randomness.
        noop: makes the no-op at an index.
        configuration_entry: makes the batch of a configuration entry of its body.
        log_time: returns the log time that heartbeats carry.
        snapshot_payloads: packs and installs snapshots; without it followers that need one wait.
        floor: the least end of a log that this member elects, because it may have lost entries; None = it kept all.
        ends_below_members: the log ends below the newest configuration entry ever appended here: this member does not
            know its group, so it keeps its floor even as the sole voter. Needs ``floor``.
        start_ticks: ticks for which it waits for the other voters before it votes, see ``report_attached``.
    """

    def __init__(
        self,
        *,
        member: MemberId,
        configurations: Sequence[ConfigurationInForce],
        config: RaftConfig,
        store: LogStore,
        hard_state: HardState,
        commit_index: Index,
        random: RandomSource,
        noop: Noop,
        configuration_entry: ConfigurationEntry,
        log_time: NewestLogTime = lambda: 0,
        snapshot_payloads: SnapshotPayloads | None = None,
        floor: Floor | None = None,
        ends_below_members: bool = False,
        start_ticks: int = 0,
    ) -> None:
        log = RaftLog(
            store,
            commit_index=commit_index,
            recent_bytes_max=config.recent_bytes_max,
            configurations=configurations,
        )
        invariant(
            # Term and vote are durable before entries of the term are: a hard state below the log was lost, and a vote
            # with it.
            log.last_term <= hard_state.term,
            "the log has a higher term than the hard state",
            last_term=log.last_term,
            term=hard_state.term,
        )
        self._log = log
        self.state = RaftState(
            member=member,
            config=config,
            log=log,
            hard_state=hard_state,
            random=random,
            noop=noop,
            configuration_entry=configuration_entry,
            log_time=log_time,
            snapshot_payloads=snapshot_payloads,
            floor=floor,
            ends_below_members=ends_below_members,
            start_ticks=start_ticks,
        )
        self._number = 0
        self._in_flight: deque[tuple[int, bool, HardState | None]] = deque()
        self._persisting = 0
        self._emitted_hard_state = hard_state
        self._emitted_soft_state = self._soft_state()
        self._emitted_commit_index = log.commit_index
        self._emitted_configuration = log.configurations.in_force
        self._emitted_committed_configuration = self._committed_configuration()
        self._catch_up_allowed = self.state.catch_up_bytes

    def tick(self, beat: bool | None = None) -> bool:
        """Count one tick; return whether a timer expired. Without that there is no new output but ``take_repeats``.

        Args:
            beat: whether a leader's heartbeats leave with this tick: one of each ``heartbeat_ticks`` of all groups of a
                process, so that they share a frame. None = ``heartbeat_ticks`` after its last ones.
        """
        return raft.tick(self.state, beat, persisting=self._persisting > 0)

    def allow_catch_up(self, nbytes: int) -> bool:
        """Let a leader read at most ``nbytes`` from the files for members that lag, until the next call.

        Returns:
            Whether any were read since the last call.
        """
        used = self.state.catch_up_bytes < self._catch_up_allowed
        if used or nbytes != self._catch_up_allowed:
            replication.allow_catch_up(self.state, nbytes)
            self._catch_up_allowed = self.state.catch_up_bytes
        return used

    def step(self, message: Message) -> bool:
        """Process a message from another member; raise ProtocolError if it is malformed.

        Returns:
            False if there is no new output but ``take_repeats``: an equal message was processed before.
        """
        return raft.step(self.state, message)

    def take_repeats(self) -> Sequence[Message]:
        """Return messages that repeat earlier ones, as a network may do too; else the next Ready contains them."""
        repeats = self.state.repeats
        if repeats:
            self.state.repeats = []
        return repeats

    def propose(self, proposal: Proposal) -> Batch:
        """Append a proposed batch to the leader's log; return it with its index, term and position.

        Raises:
            NotLeaderError: another node leads, or none.
            TransferringError: leadership is being transferred.
            BadRequestError: it exceeds a limit of the log.
        """
        return leadership.propose(self.state, proposal)

    def propose_change(self, change: MemberChange) -> Batch:
        """Append the configuration that one change of members makes; return its batch. It is in force at once.

        Raises:
            NotLeaderError: another node leads, or none.
            TransferringError: leadership is being transferred.
            MemberChangeRefusedError: a rule of ``membership`` or of ``Configuration.after`` refuses it.
        """
        return membership.propose_change(self.state, change)

    def read_index(self, request_id: int) -> None:
        """Request a linearizable read index, to be returned in ``Ready.reads``; raise NotLeaderError."""
        leadership.read_index(self.state, request_id)

    def transfer_leadership(self, target: MemberId) -> None:
        """Start to transfer leadership; raise NotLeaderError, or BadRequestError for a member that cannot lead."""
        leadership.transfer_leadership(self.state, target)

    def successor(self) -> TimeoutNow | None:
        """Return the message that hands leadership over when this member must stop; changes nothing."""
        return leadership.successor(self.state)

    def successors(self) -> list[MemberId]:
        """Return the voters that could lead instead of this leader, best first."""
        return leadership.successors(self.state)

    @property
    def is_elected_by_transfer(self) -> bool:
        """Whether the leader at that time requested the last campaign of this member."""
        return self.state.transfer_campaign

    @property
    def transferee(self) -> MemberId | None:
        """The voter to which leadership is being transferred, or None."""
        return self.state.transferee

    def raise_floor(self, floor: Floor) -> None:
        """Set or raise the floor, because entries that this member may have acknowledged are lost."""
        self.state.raise_floor(floor)

    @property
    def floor(self) -> Floor | None:
        """The least end of a log that this member elects; None if it has lost nothing."""
        return self.state.floor

    def report_attached(self, member: MemberId) -> None:
        """Record that this store and that of a member were checked by each other: each objects to lost votes."""
        self.state.attached.add(member)

    def campaign(self) -> None:
        """Start an election now; do nothing on a leader or a learner."""
        election.campaign(self.state)

    def report_unreachable(self, member: MemberId) -> None:
        """Record that the connection to a member was lost, perhaps with messages in flight."""
        # A process that ends closes its connections at once (test_lost_connections_to_the_leader_shorten_the_election).
        # One lost connection proves little (test_one_lost_connection_does_not_replace_the_leader).
        if self.state.role is Role.FOLLOWER and member == self.state.leader_id:
            election.shorten_election_timeout(self.state)
            return
        progress = self.state.progress.get(member)
        # Messages in flight are lost with it; a window that waited for them would wait for the next heartbeat
        # (test_lost_connection_restarts_with_one_probe).
        if progress is not None and progress.state is ProgressState.REPLICATE:
            progress.become_probe(Index(progress.match_index + 1))
            self.state.send_due = True

    def report_end(self, member: MemberId, last_term: Term, last_index: Index) -> None:
        """Record the end of a member's log, as its node shows it: a leader counts no entry that the log lacks.

        It lacks those after its end, and those of later terms than that of its last entry, however long it is.
        """
        # Tests: test_leader_counts_no_entry_that_an_attached_member_lacks,
        # test_leader_counts_no_entry_of_an_attached_member_whose_last_term_is_older.
        progress, end = self.state.progress.get(member), min(last_index, self._log.last_index_up_to(last_term))
        if progress is not None and progress.ends_at(end):
            self.state.send_due = True

    def confirm_leader(self, member: MemberId) -> None:
        """Wait for another election timeout if ``member`` leads: the caller knows that it is active."""
        # Only the leader's own sign of life: those of others say nothing about it
        # (test_bytes_of_another_node_prevent_no_election_and_keep_no_leader).
        if member == self.state.leader_id:
            self.state.election_elapsed = 0

    def confirm_member(self, member: MemberId) -> None:
        """Count a member as active in the next quorum check: the caller knows that it receives this leader's bytes."""
        progress = self.state.progress.get(member)
        if progress is not None:
            progress.heard_at = self.state.ticks_as_leader

    def trim(self, first_index: Index) -> None:
        """Record that the store deleted all entries before ``first_index``."""
        self._log.trim(first_index)

    def term_at(self, index: Index) -> Term | None:
        """Return the term of an entry, or None if the log does not contain it."""
        return self._log.term_at(index) if index != NO_INDEX else None

    @property
    def term_ranges(self) -> Sequence[TermRange]:
        """The term ranges of the log, in order; the first one may begin before it."""
        return self._log.term_ranges

    def last_index_up_to(self, term: Term) -> Index:
        """Return the last index whose entry has at most ``term``; NO_INDEX if the log is not known to have one."""
        return self._log.last_index_up_to(term)

    def configuration_before(self, first_index: Index) -> ConfigurationInForce:
        """Return the configuration in force before ``first_index``, which is not below the log's own."""
        return self._log.configurations.before(first_index)

    @property
    def first_index(self) -> Index:
        """The first entry of the log; of an empty one the next."""
        return self._log.first_index

    @property
    def last_index(self) -> Index:
        """The last entry, durable or not."""
        return self._log.last_index

    @property
    def durable_index(self) -> Index:
        """The last entry that is durable here and not about to be truncated."""
        return self._log.durable_index

    @property
    def configuration(self) -> Configuration:
        """The configuration in force."""
        return self.state.configuration

    @property
    def leader_contact_ticks(self) -> int | None:
        """Ticks since the last message of the leader, 0 on a leader, None if no leader is known."""
        state = self.state
        if state.leader_id is None:
            return None
        return 0 if state.role is Role.LEADER else state.election_elapsed

    def pointers(self) -> LogPointers:
        """Return the log pointers that the core owns; ``CommitLog.pointers`` adds those of the files."""
        return self._log.pointers()

    def status(self) -> Status:
        """Return the replica's state for status and metrics."""
        state, log = self.state, self._log
        return Status(
            node_id=state.member,
            role=state.role,
            term=state.term,
            leader_id=state.leader_id,
            first_index=log.first_index,
            last_index=log.last_index,
            durable_index=log.durable_index,
            commit_index=log.commit_index,
            transferee=state.transferee,
            is_recovering=state.is_recovering,
            has_active_leader=state.has_active_leader,
            configuration=state.configuration,
            configuration_index=log.configurations.in_force.index,
            is_change_pending=membership.is_change_pending(state),
            progress={
                member: ProgressStatus(
                    progress.match_index,
                    progress.next_index,
                    progress.state,
                    leadership.is_active(state, member),
                    leadership.is_caught_up(state, member),
                    progress.inflight_messages,
                    progress.inflight_bytes,
                    leadership.is_stalled(state, member),
                    progress.heard_at is None and state.ticks_as_leader <= state.config.election_ticks_min,
                    progress.condition,
                )
                for member, progress in state.progress.items()
            },
        )

    def has_ready(self) -> bool:
        """Whether ``ready`` would return anything."""
        state, log, hard, soft = self.state, self._log, self._emitted_hard_state, self._emitted_soft_state
        return bool(
            state.messages
            or state.repeats
            or state.persisted_messages
            or state.send_due
            or state.restart is not None
            or state.floor_changed
            or log.configurations.in_force is not self._emitted_configuration
            or log.commit_index > self._emitted_commit_index
            or log.has_output
            or state.term != hard.term
            or state.voted_for != hard.voted_for
            or state.role is not soft.role
            or state.leader_id != soft.leader_id
            or state.reads.results
            or leadership.is_read_round_due(state)
        )

    def ready(self) -> Ready:
        """Return all output since the last call."""
        state, log = self.state, self._log
        if state.role is Role.LEADER:
            leadership.flush(state)
        state.send_due = False
        self._number += 1
        hard_state = self._take_hard_state()
        restart, state.restart = state.restart, None
        # Entries of the snapshot are committed and not in the log: the replica takes them with the restart, not as a
        # range.
        if restart is not None:
            self._emitted_commit_index = max(self._emitted_commit_index, Index(restart.first_index - 1))
        truncate_from, batches = log.take_output(self._number)
        ready = Ready(
            number=self._number,
            hard_state=hard_state,
            restart=restart,
            truncate_from=truncate_from,
            batches=batches,
            messages=(*state.messages, *self.take_repeats()),
            persisted_messages=tuple(state.persisted_messages),
            committed=self._take_committed(),
            reads=tuple(state.reads.results),
            soft_state=self._take_soft_state(),
            floor=state.floor if state.floor_changed else None,
            floor_changed=state.floor_changed,
            configuration=self._take_configuration(),
            committed_configuration=self._take_committed_configuration(),
        )
        state.floor_changed = False
        state.messages.clear()
        state.persisted_messages.clear()
        state.reads.results.clear()
        self._in_flight.append((self._number, ready.must_persist, hard_state))
        self._persisting += ready.must_persist
        return ready

    def advance(self, number: int) -> None:
        """Record that all Readys up to ``number`` are durable and their persisted_messages sent."""
        invariant(
            bool(self._in_flight) and self._in_flight[0][0] <= number <= self._number,
            "advance without this Ready in flight",
            number=number,
            last_number=self._number,
        )
        state = self.state
        while self._in_flight and self._in_flight[0][0] <= number:
            _, persisted, hard_state = self._in_flight.popleft()
            if persisted:
                self._persisting -= 1
                state.persist_elapsed = 0
            if hard_state is not None:
                state.durable_hard_state = hard_state
        rose = self._log.persisted(number)
        if state.role is Role.LEADER:
            # The leader's own disk is one acknowledgement like any other, perhaps the one that was missing (thesis
            # section 10.2.1; test_appends_leave_and_commit_before_the_leaders_disk).
            if rose and self._log.durable_index > self._log.commit_index:
                replication.maybe_commit(state)
                leadership.maybe_send_timeout_now(state)
        else:
            election.maybe_count_self_vote(state)
        state.update_floor()

    def _take_hard_state(self) -> HardState | None:
        state, emitted = self.state, self._emitted_hard_state
        if state.term == emitted.term and state.voted_for == emitted.voted_for:
            return None
        self._emitted_hard_state = HardState(state.term, state.voted_for)
        return self._emitted_hard_state

    def _take_committed(self) -> tuple[Index, Index] | None:
        start, end = Index(self._emitted_commit_index + 1), Index(self._log.commit_index + 1)
        if start >= end:
            return None
        self._emitted_commit_index = self._log.commit_index
        return start, end

    def _committed_configuration(self) -> ConfigurationInForce:
        return self._log.configurations.before(Index(self._log.commit_index + 1))

    def _take_configuration(self) -> ConfigurationInForce | None:
        found = self._log.configurations.in_force
        if found is self._emitted_configuration:
            return None
        self._emitted_configuration = found
        return found

    def _take_committed_configuration(self) -> ConfigurationInForce | None:
        emitted = self._emitted_committed_configuration
        if self._log.configurations.in_force is emitted or (found := self._committed_configuration()) is emitted:
            return None
        self._emitted_committed_configuration = found
        return found

    def _soft_state(self) -> SoftState:
        return SoftState(self.state.role, self.state.leader_id, self.state.term)

    def _take_soft_state(self) -> SoftState | None:
        soft_state = self._soft_state()
        if soft_state == self._emitted_soft_state:
            return None
        self._emitted_soft_state = soft_state
        return soft_state

"""The state of one replica that all parts of the algorithm share, and the only code that changes term and vote.

A property only reads. Every change is a transition that ``step``, ``tick``, ``propose`` or ``advance`` makes, and that
the next Ready shows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, TypeAlias

from dledger_core.config import RaftConfig, RandomSource
from dledger_core.errors import invariant
from dledger_core.ids import NO_INDEX, NO_TERM, NUMBER_MAX, Index, MemberId, Term
from dledger_core.raft.batch import Proposal, SnapshotPayloads
from dledger_core.raft.configuration import Configuration
from dledger_core.raft.floor import Floor, higher
from dledger_core.raft.log import RaftLog
from dledger_core.raft.messages import Heartbeat, HeartbeatResponse, InstallSnapshot, Message
from dledger_core.raft.progress import Progress
from dledger_core.raft.reads import ReadQueue
from dledger_core.raft.ready import HardState, LogRestart, Role

Noop: TypeAlias = Callable[[Index], Proposal]
"""Makes the no-op of a new leader at an index."""

ConfigurationEntry: TypeAlias = Callable[[bytes], Proposal]
"""Makes the batch of a configuration entry of its body."""

NewestLogTime: TypeAlias = Callable[[], int]
"""Returns the log time that a leader's heartbeats carry; the core does not look at it."""


@dataclass(slots=True)
class IncomingSnapshot:
    """One transfer as the follower sees it.

    Attributes:
        identity: what all its chunks have in common; see ``identity_of``.
        nbytes: bytes received.
        chunks: what was received.
    """

    identity: tuple[object, ...]
    nbytes: int = 0
    chunks: list[bytes] = field(default_factory=list)

    @staticmethod
    def identity_of(message: InstallSnapshot) -> tuple[object, ...]:
        """Return the values that no two transfers share, so that chunks of two leaders or of two starts never mix."""
        sent_by = (message.sender, message.term, message.number)
        return (*sent_by, message.first_index, message.previous_term, message.total)

    def add(self, offset: int, data: bytes) -> None:
        """Add a chunk if it is the next one."""
        if data and offset == self.nbytes:
            self.chunks.append(bytes(data))
            self.nbytes += len(data)

    def join(self) -> bytes:
        """Return all chunks as one, the same object each time."""
        if len(self.chunks) != 1:
            self.chunks = [b"".join(self.chunks)]
        return self.chunks[0]


UNLIMITED: Final = 1 << 62


class RaftState:
    """Figure 2 of the Raft paper, plus the state of the extensions.

    Attributes:
        member: this member.
        term, voted_for: the hard state as of now; it may not be durable yet.
        durable_hard_state: the hard state that a confirmed Ready has persisted.
        election_elapsed: ticks since the last leader message, vote or campaign; on a leader since its last quorum
            check.
        persist_elapsed: ticks since the disk last completed a Ready, while one is in flight.
        votes: responses in this campaign, by member: a repeated response is not a second vote.
        progress: the other members, on a leader only; also those that were removed and may not have heard so.
        ticks_as_leader: ticks since this member became leader.
        heartbeat_round: number of the last heartbeat broadcast in this term.
        send_due: there may be something to send to some member at the next Ready.
        catch_up_bytes: bytes that may still be read from the files for members that lag, see ``allow_catch_up``.
        transfer_campaign: the last campaign was requested by the leader.
        snapshot_payloads: the replica's part in snapshot installs; None = followers that need one wait.
        snapshot_number: number of the last transfer started.
        incoming_snapshot: the chunks of a transfer to this member.
        restart: the log was restarted; the next Ready contains it.
        floor: the least end of a log that this member elects, see ``Floor``; None = it has forgotten nothing.
        floor_changed: the floor was set, raised or removed since the last Ready.
        complete_to: in a term above that of the floor the log was equal to the leader's, which ended here.
        ends_below_members: the log ended below the newest configuration entry ever appended here when it was opened,
            or may have since another member remembered more of it. So this member does not know its group, and no
            exception for a group of one or two holds.
        start_ticks: ticks for which this member still waits for the other voters after its start, see ``is_starting``.
        attached: members whose connection was attached since the start.
        repeats: messages that repeat earlier ones, which a network may do too: they may leave at any time.
        answered: the last heartbeat, with a response that a repetition of it gets too; None = it had more effects.
    """

    # CPython reads the attributes of an object with more than 30 slowly, unless they are slots.
    __slots__ = (
        "_random",
        "answered",
        "attached",
        "catch_up_bytes",
        "complete_to",
        "config",
        "configuration_entry",
        "durable_hard_state",
        "election_elapsed",
        "election_timeout",
        "ends_below_members",
        "floor",
        "floor_changed",
        "heartbeat_elapsed",
        "heartbeat_round",
        "incoming_snapshot",
        "leader_id",
        "log",
        "log_time",
        "member",
        "messages",
        "noop",
        "persist_elapsed",
        "persisted_messages",
        "progress",
        "reads",
        "repeats",
        "restart",
        "role",
        "send_due",
        "snapshot_number",
        "snapshot_payloads",
        "start_ticks",
        "term",
        "ticks_as_leader",
        "transfer_campaign",
        "transfer_elapsed",
        "transferee",
        "voted_for",
        "votes",
    )

    def __init__(
        self,
        *,
        member: MemberId,
        config: RaftConfig,
        log: RaftLog,
        hard_state: HardState,
        random: RandomSource,
        noop: Noop,
        configuration_entry: ConfigurationEntry,
        log_time: NewestLogTime,
        snapshot_payloads: SnapshotPayloads | None = None,
        floor: Floor | None = None,
        ends_below_members: bool = False,
        start_ticks: int = 0,
    ) -> None:
        self.member = member
        self.config = config
        self.log = log
        self.term: Term = hard_state.term
        self.voted_for: MemberId | None = hard_state.voted_for
        self.durable_hard_state = hard_state
        self.noop = noop
        self.configuration_entry = configuration_entry
        self.log_time = log_time
        self.snapshot_payloads = snapshot_payloads
        self.snapshot_number = 0
        self.incoming_snapshot: IncomingSnapshot | None = None
        self.restart: LogRestart | None = None
        self.role = self._passive_role()
        self.leader_id: MemberId | None = None
        self.election_elapsed = 0
        self.heartbeat_elapsed = 0
        self.persist_elapsed = 0
        self.votes: dict[MemberId, bool] = {}
        self.progress: dict[MemberId, Progress] = {}
        self.ticks_as_leader = 0
        self.reads = ReadQueue()
        self.heartbeat_round = 0
        self.send_due = False
        self.catch_up_bytes = UNLIMITED
        self.transferee: MemberId | None = None
        self.transfer_elapsed = 0
        self.transfer_campaign = False
        invariant(
            floor is not None or not ends_below_members,
            "a log that ends below its configuration has a floor",
            member=member,
        )
        self.ends_below_members = ends_below_members
        # A sole voter has no peer that could know more of its log than it does. But a log that lost its newest
        # configuration entry may show a sole voter that has been one of several since.
        alone = self.configuration.is_sole_voter(member) and not ends_below_members
        self.floor = None if alone else floor
        self.floor_changed = alone and floor is not None
        self.complete_to: Index | None = None
        self.start_ticks = start_ticks
        self.attached: set[MemberId] = set()
        self.messages: list[Message] = []
        self.persisted_messages: list[Message] = []
        self.repeats: list[Message] = []
        self.answered: tuple[Heartbeat, HeartbeatResponse] | None = None
        self._random = random
        self.election_timeout = 0
        self.reset_election_timer()
        self._leave_floors_term()
        self.update_floor()

    @property
    def configuration(self) -> Configuration:
        """The configuration in force, committed or not."""
        return self.log.configurations.in_force.configuration

    @property
    def may_campaign(self) -> bool:
        """Whether this member may campaign: as a voter, and as a removed one until the removal is committed.

        Until then its log may be the only one that the other voters can elect (thesis section 4.2.2). It counts only
        the voters of the configuration in force, so not itself.
        """
        configurations = self.log.configurations
        in_force = configurations.in_force
        if in_force.configuration.is_voter(self.member):
            return True
        pending = in_force.index > self.log.commit_index
        return pending and configurations.before(in_force.index).configuration.is_voter(self.member)

    @property
    def is_recovering(self) -> bool:
        """Whether it is unknown which entries this member may have acknowledged: its floor is (T, ∞)."""
        return self.floor is not None and self.floor.is_open

    @property
    def is_starting(self) -> bool:
        """Whether this member has started and may still learn that it lost votes or entries.

        Its peers remember both and object when they attach (``report_attached``). Until each other voter is attached,
        or the longest election timeout has passed once, it neither votes nor campaigns: a disk that was set back would
        otherwise elect a log without acknowledged entries before a peer can object.
        """
        return self.start_ticks > 0 and not self.configuration.is_sole_voter(self.member)

    def count_start(self) -> None:
        """Count a tick of the start; part of ``tick``."""
        if not self.start_ticks:
            return
        if self.start_ticks > 1 and self.configuration.voters - {self.member} <= self.attached:
            self.start_ticks = 1  # one tick more: a peer that objects does so meanwhile
            return
        self.start_ticks -= 1
        if not self.start_ticks and self.election_elapsed >= self.election_timeout:
            # Those that waited in vain end their wait at the same moment.
            self.election_elapsed = 0
            self.shorten_election_timer()

    def raise_floor(self, floor: Floor) -> None:
        """Set or raise the floor, because entries that this member may have acknowledged are lost.

        With a floor (T, ∞) it enters T + 1: in that term it has forgotten neither a vote nor an acknowledgement. Its
        configuration may be older than an entry that is lost too.
        """
        # Nothing lowers a floor but the entries themselves
        # (test_second_loss_raises_floor_and_forgets_how_far_the_log_had_come).
        raised = higher(self.floor, floor)
        # The newest configuration may be among the lost entries
        # (test_voter_whose_disk_was_set_back_does_not_elect_the_other_of_two).
        if floor.is_open:
            self.ends_below_members = True
        # An end that reached the old floor does not cover entries lost since.
        self.complete_to = None
        if raised != self.floor:
            self.floor = raised
            self.floor_changed = True
            self._leave_floors_term()
            self.update_floor()
            if self.floor is not None and self.role in (Role.PRE_CANDIDATE, Role.CANDIDATE):
                self.become_follower(self.term, None)  # its log must not be elected

    def _leave_floors_term(self) -> None:
        # A leader that this member may have elected, and entries that it may have acknowledged, belong to terms up to
        # T. In a higher term neither its vote nor its acknowledgements are forgotten. A disk that was set back may have
        # voted in T + 1 too; a peer that remembers it refuses a store that shows T, and can no longer notice it. So
        # this member votes for no other one in T + 1.
        floor = self.floor
        if floor is not None and floor.is_open and self.term <= floor.term:
            self.become_follower(Term(floor.term + 1), None)
            self.vote(self.member)

    def update_floor(self) -> None:
        """Remove the floor once this member has every entry that it may have acknowledged.

        Part of ``step`` and ``advance``.

        Either its own durable end is at or above the floor. For (T, ∞) this is an entry of a term above T: its leader
        was elected without this member, by a majority whose logs reached their own floors. By Leader Completeness (Raft
        section 5.4.3) its log contained every entry that was committed with this member's help, and by Log Matching
        (section 5.3) this log equals it up to that entry. Or the log equals that of such a leader, which may have
        appended nothing: in profile A there is no no-op.
        """
        floor = self.floor
        if floor is None:
            return
        log = self.log
        durable = log.durable_index
        reached = floor.admits(log.term_at(durable) or NO_TERM, durable) if durable != NO_INDEX else False
        # Entries that a later leader has truncated since were not committed.
        complete = self.complete_to is not None and durable >= min(self.complete_to, log.last_index)
        if reached or complete:
            invariant(
                self.term > floor.term or not floor.is_open,
                "a recovering voter votes in a term that it may have forgotten",
                term=floor.term,
            )
            self.floor = None
            self.floor_changed = True
            self.complete_to = None

    def record_complete(self, index: Index) -> None:
        """Record that the log equals that of the leader of this term, which ends at ``index``."""
        if self.floor is not None and self.term > self.floor.term:
            self.complete_to = index

    @property
    def is_hard_state_durable(self) -> bool:
        """Whether the current term and vote are on disk."""
        durable = self.durable_hard_state
        return durable.term == self.term and durable.voted_for == self.voted_for

    @property
    def has_active_leader(self) -> bool:
        """Whether a leader was active within the minimum election timeout; if so, vote requests are ignored."""
        if self.role is Role.LEADER:
            return True
        return self.leader_id is not None and self.election_elapsed < self.config.election_ticks_min

    def reset_election_timer(self) -> None:
        """Start a new election timeout of random length."""
        # Random, so that candidates of one moment do not split the votes again and again (Raft section 5.2;
        # test_candidate_campaigns_again_after_a_split_vote).
        self.election_elapsed = 0
        self.election_timeout = self._random.randrange(self.config.election_ticks_min, self.config.election_ticks_max)

    def shorten_election_timer(self) -> None:
        """Leave about a quarter of the minimum election timeout.

        The rest is random, because all followers lose the connection to a crashed leader at the same moment.
        """
        wait = 2 + self._random.randrange(0, 1 + self.config.election_ticks_min // 4)
        self.election_elapsed = max(self.election_elapsed, self.election_timeout - wait)

    def enter_term(self, term: Term, voted_for: MemberId | None) -> None:
        """Move to a higher term; the vote of a term changes here and in ``vote`` only."""
        invariant(self.term < term <= NUMBER_MAX, "terms never decrease", term=term, current=self.term)
        self.term = term
        self.voted_for = voted_for

    def vote(self, candidate: MemberId) -> None:
        """Give this term's one vote (Election Safety, Raft section 5.2)."""
        invariant(
            self.voted_for is None or self.voted_for == candidate,
            "one vote per term",
            term=self.term,
            voted_for=self.voted_for,
            candidate=candidate,
        )
        self.voted_for = candidate

    def become_follower(self, term: Term, leader_id: MemberId | None) -> None:
        """Follow ``leader_id``, or no leader yet, in ``term``."""
        if term > self.term:
            self.enter_term(term, None)
        if self.role is Role.LEADER:
            self._leave_leadership()
        passive = self._passive_role()
        # A higher term alone restarts no timer: a candidate that cannot win would keep one that can from campaigning
        # (Raft figure 2, rules for followers).
        if self.role is not passive or leader_id is not None:
            self.reset_election_timer()
        self.role = passive
        self.leader_id = leader_id
        self.votes = {}

    def commit_to(self, index: Index) -> None:
        """Commit what a leader says; a follower whose removal is among it stops to be one."""
        # Its removal is committed, so the voters do without it. If it campaigned on, it would raise their term (thesis
        # section 4.2.3; test_removed_member_receives_its_removal_and_its_commit).
        if self.log.commit_to(index) and not self.may_campaign:
            self.become_follower(self.term, self.leader_id)

    def send(self, message: Message) -> None:
        """Queue a message that may leave at once."""
        self.messages.append(message)

    def send_persisted(self, message: Message) -> None:
        """Queue a message that leaves after all output so far is durable."""
        self.persisted_messages.append(message)

    def send_dependent(self, message: Message) -> None:
        """Queue a message that depends on term and vote, but on no entry of the log."""
        # Such a response does not wait for entries: on a slow disk it would look like a dead member
        # (test_response_that_depends_on_a_durable_term_only_does_not_wait).
        if self.is_hard_state_durable:
            self.messages.append(message)
        else:
            self.persisted_messages.append(message)

    def _passive_role(self) -> Role:
        return Role.FOLLOWER if self.may_campaign else Role.LEARNER

    def _leave_leadership(self) -> None:
        self.reads.fail()
        self.progress = {}
        self.transferee = None
        self.send_due = False

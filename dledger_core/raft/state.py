"""The state of one replica that all parts of the algorithm share, and the only code that changes term and vote."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from dledger_core.config import RaftConfig, RandomSource
from dledger_core.errors import invariant
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft.chunks import IncomingSnapshot, SnapshotPayloads
from dledger_core.raft.log import RaftLog
from dledger_core.raft.messages import Message
from dledger_core.raft.progress import Progress
from dledger_core.raft.quorum import Configuration
from dledger_core.raft.reads import ReadQueue
from dledger_core.raft.ready import HardState, LogRestart, Role

__all__ = ["NoopPayload", "RaftState"]

NoopPayload: TypeAlias = Callable[[Index], tuple[object, int]]


class RaftState:
    """Figure 2 of the Raft paper, plus what the extensions need.

    Attributes:
        term, voted_for: the hard state as of now; it may not be durable yet.
        durable_hard_state: the hard state that a confirmed Ready has persisted.
        election_elapsed: ticks since this node heard a leader, voted or campaigned; on a leader since its last
            quorum check.
        persist_elapsed: ticks since the disk last finished something, while it has something to do.
        votes: answers in this campaign, by voter: a repeated answer is not a second vote.
        progress: the other members, on a leader only.
        heartbeat_round: number of the last heartbeat broadcast in this term.
        send_due: there may be something to send to some member at the next Ready.
        transfer_campaign: the last campaign was one that the leader itself asked for.
        snapshot_payloads: the driver's part in resets; None = members that need one wait.
        snapshot_number: number of the last transfer begun.
        incoming_snapshot: what has arrived of a transfer to this node.
        new_start: the log was begun anew, which the next Ready tells.
        preferred_pause: quorum checks to wait before leadership is offered to a preferred node again.
        recovering_above: this node has no vote before it holds a committed entry of a higher term, or all that a leader
            of a higher term held; None = it has one.
        complete_to: in such a term the log was equal to the leader's, which ended here.
    """

    def __init__(
        self,
        *,
        node_id: NodeId,
        configuration: Configuration,
        config: RaftConfig,
        log: RaftLog,
        hard_state: HardState,
        random: RandomSource,
        noop_payload: NoopPayload,
        snapshot_payloads: SnapshotPayloads | None = None,
        recovering_above: Term | None = None,
    ) -> None:
        self.node_id = node_id
        self.configuration = configuration
        self.config = config
        self.log = log
        self.term: Term = hard_state.term
        self.voted_for: NodeId | None = hard_state.voted_for
        self.durable_hard_state = hard_state
        self.noop_payload = noop_payload
        self.snapshot_payloads = snapshot_payloads
        self.snapshot_number = 0
        self.incoming_snapshot: IncomingSnapshot | None = None
        self.new_start: LogRestart | None = None
        self.role = self._passive_role()
        self.leader_id: NodeId | None = None
        self.election_elapsed = 0
        self.heartbeat_elapsed = 0
        self.persist_elapsed = 0
        self.votes: dict[NodeId, bool] = {}
        self.progress: dict[NodeId, Progress] = {}
        self.reads = ReadQueue()
        self.heartbeat_round = 0
        self.send_due = False
        self.transferee: NodeId | None = None
        self.transfer_elapsed = 0
        self.transfer_campaign = False
        self.preferred_pause = 0
        self.recovering_above = None if configuration.is_sole_voter(node_id) else recovering_above
        self.complete_to: Index | None = None
        self.messages: list[Message] = []
        self.persisted_messages: list[Message] = []
        self._random = random
        self.election_timeout = 0
        self.reset_election_timer()
        if self.recovering_above is not None and self.term <= self.recovering_above:
            # Whoever it may have helped into office, and whatever was sent to it, is of the past from now on.
            self.enter_term(Term(self.recovering_above + 1), None)

    @property
    def is_voter(self) -> bool:
        """Whether this node may campaign."""
        return self.node_id in self.configuration.voters

    @property
    def has_vote(self) -> bool:
        """Whether this node keeps all promises that it gave; see ``recovering_above``."""
        if self.recovering_above is not None:
            log = self.log
            term = log.term_at(log.commit_index) if log.commit_index <= log.durable_index else None
            committed = term is not None and term > self.recovering_above
            # What a later leader has cut since was not committed.
            complete = self.complete_to is not None and log.durable_index >= min(self.complete_to, log.last_index)
            if committed or complete:
                self.recovering_above = None
        return self.recovering_above is None

    def note_complete(self, index: Index) -> None:
        """Takes note that the log equals that of a leader, which ends at ``index``."""
        if self.recovering_above is not None:
            self.complete_to = index

    @property
    def is_hard_state_durable(self) -> bool:
        """Whether term and vote of this moment are on disk."""
        durable = self.durable_hard_state
        return durable.term == self.term and durable.voted_for == self.voted_for

    @property
    def has_active_leader(self) -> bool:
        """Whether a leader was heard so recently that other candidates are ignored (vote stickiness)."""
        if self.role is Role.LEADER:
            return True
        return self.leader_id is not None and self.election_elapsed < self.config.election_ticks_min

    def reset_election_timer(self) -> None:
        """Starts a new wait of random length."""
        self.election_elapsed = 0
        self.election_timeout = self._random.randrange(self.config.election_ticks_min, self.config.election_ticks_max)

    def hurry_election(self) -> None:
        """Leaves about a quarter of the shortest wait: others shall notice too, and not all ask at once."""
        wait = 2 + self._random.randrange(0, 1 + self.config.election_ticks_min // 4)
        self.election_elapsed = max(self.election_elapsed, self.election_timeout - wait)

    def enter_term(self, term: Term, voted_for: NodeId | None) -> None:
        """Moves to a higher term; the vote of a term changes here and in ``vote`` only."""
        invariant(term > self.term, "terms never go back", term=term, current=self.term)
        self.term = term
        self.voted_for = voted_for

    def vote(self, candidate: NodeId) -> None:
        """Gives this term's one vote."""
        invariant(
            self.voted_for is None or self.voted_for == candidate,
            "one vote per term",
            term=self.term,
            voted_for=self.voted_for,
            candidate=candidate,
        )
        self.voted_for = candidate

    def become_follower(self, term: Term, leader_id: NodeId | None) -> None:
        """Follows ``leader_id``, or nobody yet, in ``term``."""
        if term > self.term:
            self.enter_term(term, None)
        if self.role is Role.LEADER:
            self._leave_leadership()
        passive = self._passive_role()
        if self.role is not passive or leader_id is not None:
            self.reset_election_timer()
        self.role = passive
        self.leader_id = leader_id
        self.votes = {}

    def send(self, message: Message) -> None:
        """Queues a message that may leave at once."""
        self.messages.append(message)

    def send_persisted(self, message: Message) -> None:
        """Queues a message that leaves after all output so far is durable."""
        self.persisted_messages.append(message)

    def send_dependent(self, message: Message) -> None:
        """Queues a message that depends on term and vote, but on no entry of the log."""
        if self.is_hard_state_durable:
            self.messages.append(message)
        else:
            self.persisted_messages.append(message)

    def _passive_role(self) -> Role:
        return Role.FOLLOWER if self.is_voter else Role.LEARNER

    def _leave_leadership(self) -> None:
        self.reads.fail()
        self.progress = {}
        self.transferee = None
        self.send_due = False

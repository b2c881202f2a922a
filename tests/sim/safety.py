"""Safety properties of a group, checked from outside: against its disks, its messages and its Readys.

The Raft paper's figure 3 (election safety, leader append-only, log matching, leader completeness, state machine
safety) and the rules of this implementation: a node votes once per term across restarts, no message is sent before the
state it depends on is durable, an entry commits only on a majority of disks and in the leader's own term, no term and
no log pointer falls, no committed entry is truncated, and a read index is never stale.

Every majority is one of the configuration that the core has in force at that moment.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from dledger_core.ids import NO_INDEX, Index, MemberId, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Batch,
    Configuration,
    ConfigurationInForce,
    LogPointers,
    LogRestart,
    Message,
    Ready,
    RequestVote,
    RequestVoteResponse,
    Role,
    check_pointers,
)
from tests.support.memory_store import configurations_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dledger_core.lineage import RecoveryRecord
    from tests.sim.member import Member
    from tests.support.memory_store import MemoryStore


class SafetyViolationError(AssertionError):
    """A safety property does not hold; ``what`` names it."""

    def __init__(self, what: str, *details: object) -> None:
        super().__init__(f"{what}: {', '.join(map(repr, details))}")
        self.what = what


def check(condition: bool, what: str, *details: object) -> None:
    if not condition:
        raise SafetyViolationError(what, *details)


class SafetyChecker:
    """Watches all members of one group.

    Attributes:
        configuration: the newest committed one.
        committed: every batch that a member reported as committed, in order.
        acknowledged: the appends whose success a client received: payload → first index.
        commit_points: index, term, and the leader's term of each entry of which a leader counted a majority.
        lost: disks from before they lost the end of their log; their acknowledgements from then still count.
    """

    def __init__(self, members: dict[MemberId, Member], bootstrapped: Configuration) -> None:
        self.configuration = ConfigurationInForce(NO_INDEX, bootstrapped)
        self.committed: list[Batch] = []
        self.acknowledged: dict[object, Index] = {}
        self.leaders: dict[Term, MemberId] = {}
        self.lost: list[tuple[MemberId, MemoryStore]] = []
        self._members = members
        self._firsts: list[int] = []
        self._votes: dict[tuple[Term, MemberId], MemberId] = {}
        self._batches: dict[tuple[Index, Term], tuple[object, int, Term]] = {}
        self.commit_points: list[tuple[Index, Term, Term]] = []
        self._reads: dict[int, Index] = {}
        self._seen: dict[MemberId, tuple[Term, LogPointers]] = {}
        self._leader_last_index: dict[tuple[MemberId, Term], int] = {}

    @property
    def commit_index(self) -> Index:
        """Highest index that any member reported as committed."""
        return self.committed[-1].last_index if self.committed else NO_INDEX

    def committed_batch(self, index: int) -> Batch | None:
        """Return the committed batch that contains an entry, or None."""
        return self.committed[bisect_right(self._firsts, index) - 1] if 0 <= index <= self.commit_index else None

    def continue_log(self, entries: list[Batch], record: RecoveryRecord) -> None:
        """Begin with the entries of a log that this one continues: they count as committed in it."""
        self.committed = entries
        self._firsts = [batch.first_index for batch in entries]
        point = Index(record.point.index)
        self.configuration = ConfigurationInForce(point, self.configuration.configuration)
        if entries:
            self.commit_points.append((point, Term(record.point.term), Term(record.term)))

    def contains(self, batch: Batch) -> bool:
        """Whether a batch of a log that this one continues, perhaps without its deleted start, is committed here."""
        known = self.committed_batch(batch.first_index)
        if known is None or known.last_index < batch.last_index or known.term != batch.term:
            return False
        start = batch.first_index - known.first_index
        return known.payload[start : start + batch.count] == batch.payload  # type: ignore[index]

    def payloads(self, start: int, end: int) -> tuple[object, ...]:
        """Return the payloads of the committed entries [start, end), whose batches have one for each entry."""
        found: list[object] = []
        while start + len(found) < end:
            at = start + len(found)
            batch = self.committed[bisect_right(self._firsts, at) - 1]
            found += batch.payload[at - batch.first_index : end - batch.first_index]  # type: ignore[index]
        return tuple(found)

    def on_start(self, member: Member) -> None:
        """Check a member that starts from its disk."""
        status, term = member.core.status(), member.disk.hard_state.term
        # A recovering voter enters the next term, in which it votes for no other member.
        state = member.core.state
        leaves = status.term == term + 1 and state.voted_for in (None, state.member)
        check(status.term == term or leaves, "a node starts in another term than its durable one", member.node_id)
        self._seen[member.node_id] = (status.term, member.pointers())

    def on_step(self, member: Member) -> None:
        """Check a member after one input."""
        state, now = member.core.state, member.pointers()
        term = state.term
        before_term, before = self._seen[member.node_id]
        check(term >= before_term, "a term fell", member.node_id, before_term, term)
        if now != before:
            check_pointers(now, before)
        self._seen[member.node_id] = (term, now)
        if state.role is Role.LEADER:
            self._check_leader(member, term, now.last_index)
            if now.commit_index > before.commit_index:
                self._check_commit(member, term, Index(now.commit_index))

    def on_ready(self, member: Member, ready: Ready) -> None:
        """Check a Ready; its batches are in ``member.staged`` already."""
        if ready.restart is not None:
            self._check_restart(member, ready.restart)
        if ready.truncate_from is not None:
            before = ready.committed[0] - 1 if ready.committed else member.core.pointers().commit_index
            check(ready.truncate_from > before, "a committed entry is truncated", member.node_id, ready)
        for batch in ready.batches:
            known = (batch.payload, batch.count, member.staged.term_at(Index(batch.first_index - 1)))
            first = self._batches.setdefault((batch.first_index, batch.term), known)
            check(first == known, "logs do not match", member.node_id, batch, first)
        if ready.committed is not None:
            self._check_committed(member, *ready.committed)
        for read in ready.reads:
            needed = self._reads.pop(read.request_id)
            check(read.index is None or read.index >= needed, "a stale read index", member.node_id, read, needed)

    def on_send(self, member: Member, message: Message) -> None:
        """Check a message that leaves a member."""
        durable, disk = member.disk.hard_state, member.disk
        pre = isinstance(message, RequestVote | RequestVoteResponse) and message.pre
        if not pre or (isinstance(message, RequestVoteResponse) and not message.granted):
            check(message.term <= durable.term, "a message leaves before its term is durable", message, durable)
        match message:
            case RequestVote(pre=False):
                self._check_vote(member, message.term, message.sender)
                # The log that a candidate claims must survive a crash. One that gave up since may have truncated its
                # log for the leader of that term, so this request cannot win any longer.
                gave_up = member.core.state.leader_id is not None or message.term in self.leaders
                durable_claim = message.last_index <= disk.last_index() or gave_up
                check(durable_claim, "a candidate claims entries that are not durable", message)
            case RequestVoteResponse(pre=False, granted=True):
                self._check_vote(member, message.term, message.target)
            case AppendEntriesResponse(accepted=True) if message.term == durable.term:
                check(message.match_index <= disk.last_index(), "acknowledged before durable", message)
            case AppendEntries():
                for batch in message.batches:
                    staged = member.staged.batch_at(batch.first_index)
                    check(staged is not None and staged.payload == batch.payload, "sent before staged", batch, staged)

    def on_acknowledged(self, batch: Batch) -> None:
        """Record that a client received the success of its append."""
        self.acknowledged[batch.payload] = batch.first_index

    def on_read_asked(self, request_id: int) -> None:
        """Record the lowest index that this read may be answered with."""
        self._reads[request_id] = self.commit_index

    def check_disks(self) -> None:
        """Check that the disk of every member has the same committed log, once all have caught up."""
        for member in self._members.values():
            disk = member.disk
            if member.node_id not in self.configuration.configuration.members or not member.up:
                continue
            for batch in self.committed:
                if disk.first_index() <= batch.first_index:
                    found = disk.batch_at(batch.first_index)
                    check(found is not None and found.payload == batch.payload, "lost", member.node_id, batch, found)
        for payload, first_index in self.acknowledged.items():
            batch = self.committed_batch(first_index)
            check(batch is not None and batch.payload == payload, "an acknowledged append is lost", payload)

    def _wins(self, member: Member, nodes: Iterable[MemberId]) -> bool:
        """Whether ``nodes`` are a majority of the configuration that the member has in force."""
        return member.core.state.configuration.is_quorum(set(nodes))

    def _check_vote(self, member: Member, term: Term, candidate: MemberId) -> None:
        given = self._votes.setdefault((term, member.node_id), candidate)
        check(given == candidate, "two votes in one term", member.node_id, term, given, candidate)
        durable = member.disk.hard_state
        if durable.term == term:
            check(durable.voted_for == candidate, "a vote leaves before it is durable", member.node_id, term, durable)

    def _check_leader(self, member: Member, term: Term, last_index: int) -> None:
        known = self.leaders.setdefault(term, member.node_id)
        check(known == member.node_id, "two leaders in one term", term, known, member.node_id)
        before = self._leader_last_index.get((member.node_id, term))
        if before is None:
            check(member.core.state.may_campaign, "a leader is no voter", member.node_id, term)
            durable = member.disk.hard_state
            if (durable.term, durable.voted_for) == (term, known):
                self._check_vote(member, term, known)  # a sole voter sends no message with its own vote
            voters = [node for (of_term, node), given in self._votes.items() if (of_term, given) == (term, known)]
            check(self._wins(member, voters), "elected without a majority", member.node_id, term, voters)
            self._check_completeness(member, term)
        else:
            check(last_index >= before, "a leader truncated its own log", member.node_id, term, before, last_index)
        self._leader_last_index[member.node_id, term] = last_index

    def _check_completeness(self, member: Member, term: Term) -> None:
        for index, entry_term, leader_term in reversed(self.commit_points):
            if leader_term < term:
                if index >= member.core.first_index:
                    found = member.core.term_at(index)
                    check(found == entry_term, "a leader lacks a committed entry", member.node_id, term, index, found)
                return

    def _check_commit(self, member: Member, term: Term, commit_index: Index) -> None:
        """Check a leader whose commit_index rose."""
        entry_term = member.core.term_at(commit_index)
        check(entry_term == term, "committed by counting an entry of an older term", member.node_id, term, entry_term)
        disks = [*((one.node_id, one.disk) for one in self._members.values()), *self.lost]
        nodes = [
            node for node, disk in disks if commit_index < disk.first_index() or disk.term_at(commit_index) == term
        ]
        check(self._wins(member, nodes), "committed without a majority of disks", member.node_id, commit_index, nodes)
        self.commit_points.append((commit_index, term, term))

    def _check_restart(self, member: Member, start: LogRestart) -> None:
        """Check a member that discards its log, which is still on its disk."""
        previous = start.first_index - 1
        check(previous <= self.commit_index, "a log restarts after an uncommitted entry", member.node_id, start)
        for batch in self.committed[bisect_right(self._firsts, previous) :]:
            found = member.disk.batch_at(batch.first_index)
            differs = found is None or found.payload != batch.payload
            check(differs, "a committed entry is discarded", member.node_id, start)

    def _check_committed(self, member: Member, start: Index, end: Index) -> None:
        """Check that [start, end), which a member reported as committed, is complete batches.

        A log that starts inside a batch (after a trim or a snapshot) makes its node name indexes inside the batches
        of others. Such a batch was committed before as a whole, or no entry of it had been deleted.
        """
        index = start
        while index < end:
            batch = member.staged.batch_at(index)
            check(batch is not None, "a commit of a missing entry", member.node_id, index)
            assert batch is not None
            complete = batch.first_index == index and batch.last_index < end
            check(complete or batch.last_index <= self.commit_index, "a commit splits a batch", member.node_id, batch)
            known = self.committed_batch(index)
            if known is None:
                self.committed.append(batch)
                self._firsts.append(batch.first_index)
                self.configuration = [self.configuration, *configurations_of([batch])][-1]
            else:
                # The start of the log's first batch may have been deleted.
                deleted = batch.first_index - known.first_index
                payload = known.payload[deleted:] if deleted else known.payload  # type: ignore[index]
                same = payload == batch.payload and known.term == batch.term
                check(same, "two entries are committed at one index", member.node_id, known, batch)
            index = Index(batch.last_index + 1)

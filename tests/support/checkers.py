"""Safety properties of a group, judged from outside: from what nodes put on disk, send and report.

The Raft paper's figure 3 (election safety, leader append-only, log matching, leader completeness, state machine
safety) and what the implementation adds: a node votes once per term across restarts, nothing leaves before what it
depends on is durable, an entry is committed only once a majority of disks holds it and only through the leader's own
term, terms and commit_index never go back, nothing committed is cut, a read index is never stale.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

from dledger_core.ids import NO_INDEX, Index, NodeId, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Batch,
    LogRestart,
    Message,
    Ready,
    RequestVote,
    RequestVoteResponse,
    Role,
)

if TYPE_CHECKING:
    from tests.support.cluster_sim import SimNode
    from tests.support.memory_store import MemoryStore


class SafetyViolationError(AssertionError):
    """A safety property does not hold."""


def check(condition: bool, what: str, *details: object) -> None:
    if not condition:
        raise SafetyViolationError(f"{what}: {', '.join(map(repr, details))}")


class SafetyChecker:
    """Watches all nodes of one group."""

    def __init__(self, nodes: dict[NodeId, SimNode]) -> None:
        self.nodes = nodes
        self.majority = len(nodes) // 2 + 1
        self.leaders: dict[Term, NodeId] = {}
        self.votes: dict[tuple[Term, NodeId], NodeId] = {}
        self.batches: dict[tuple[Index, Term], tuple[object, int, Term]] = {}
        self.committed: list[Batch] = []
        self.committed_firsts: list[int] = []
        self.commit_points: list[tuple[Index, Term, Term]] = []
        self.acknowledged: dict[object, Index] = {}
        self.reads: dict[int, Index] = {}
        self.seen: dict[NodeId, tuple[Term, Index]] = {}
        self.leader_last_index: dict[tuple[NodeId, Term], Index] = {}
        self.lost: list[tuple[NodeId, MemoryStore]] = []
        """Disks that lost the end of their log, as they were: what was acknowledged from there still counts."""

    @property
    def commit_index(self) -> Index:
        """Highest index that any node reported as committed."""
        return self.committed[-1].last_index if self.committed else NO_INDEX

    def payloads(self, start: int, end: int) -> tuple[object, ...]:
        """Returns what identifies each of the committed entries [start, end), whose batches say that entry by entry."""
        at, found = bisect_right(self.committed_firsts, start) - 1, []
        while start < end:
            batch = self.committed[at]
            parts = batch.payload[start - batch.first_index : end - batch.first_index]  # type: ignore[index]
            found += parts
            start, at = start + len(parts), at + 1
        return tuple(found)

    def on_start(self, node: SimNode) -> None:
        """A node starts from its disk."""
        status = node.status
        term = node.disk.hard_state.term
        known = status.term == term or (status.term == term + 1 and node.core._state.voted_for is None)
        check(known, "a node starts in its durable term, or behind it without a vote", node.node_id)
        self.seen[node.node_id] = (status.term, status.commit_index)

    def on_step(self, node: SimNode) -> None:
        """A node has taken one input."""
        state = node.core._state
        term, commit_index, last_index = state.term, state.log.commit_index, state.log.last_index
        before_term, before_commit = self.seen[node.node_id]
        check(term >= before_term, "a term went back", node.node_id, before_term, term)
        check(commit_index >= before_commit, "commit_index went back", node.node_id, before_commit, commit_index)
        check(commit_index <= last_index, "commit_index is beyond the log", node.node_id, commit_index, last_index)
        self.seen[node.node_id] = (term, commit_index)
        if state.role is Role.LEADER:
            self._check_leader(node, term, last_index)
            if commit_index > before_commit:
                self._check_commit(node, term, commit_index)

    def on_ready(self, node: SimNode, ready: Ready) -> None:
        """A node hands out a Ready; its batches are in ``node.staged`` already."""
        if ready.restart is not None:
            self._check_new_start(node, ready.restart)
        if ready.truncate_from is not None:
            committed_before = ready.committed[0] - 1 if ready.committed else node.core._state.log.commit_index
            check(ready.truncate_from > committed_before, "a committed entry is cut", node.node_id, ready)
        for batch in ready.batches:
            known = (batch.payload, batch.count, node.staged.term_at(Index(batch.first_index - 1)))
            held = self.batches.setdefault((batch.first_index, batch.term), known)
            check(held == known, "logs do not match", node.node_id, batch, held)
        if ready.committed is not None:
            self._check_committed(node, *ready.committed)
        for answer in ready.reads:
            needed = self.reads.pop(answer.request_id)
            if answer.index is not None:
                check(answer.index >= needed, "a stale read index", node.node_id, answer, needed)

    def _check_new_start(self, node: SimNode, start: LogRestart) -> None:
        """A node discards its log, which is still on its disk."""
        begin = start.first_index
        check(begin - 1 <= self.commit_index, "a log begins behind what is not committed", node.node_id, start)
        for batch in self.committed[bisect_right(self.committed_firsts, begin - 1) :]:
            held = node.disk.batch_at(batch.first_index)
            check(held is None or held.payload != batch.payload, "a committed entry is discarded", node.node_id, start)

    def on_send(self, node: SimNode, message: Message) -> None:
        """A message leaves a node."""
        durable = node.disk.hard_state
        if not (isinstance(message, RequestVote | RequestVoteResponse) and message.pre):
            check(message.term <= durable.term, "a message leaves before its term is durable", message, durable)
        elif isinstance(message, RequestVoteResponse) and not message.granted:
            check(message.term <= durable.term, "a refusal leaves before its term is durable", message, durable)
        if isinstance(message, RequestVote) and not message.pre:
            self._check_vote(node, message.term, message.sender)
            # What a candidate claims of its log must survive a crash. One that gave up since may have cut its log: it
            # did so for the leader of that term, so that this request cannot win any more.
            given_up = node.core._state.leader_id is not None or self.leaders.get(message.term) is not None
            durable_claim = message.last_index <= node.disk.last_index() or given_up
            check(durable_claim, "a candidate claims what is not durable", message)
        elif isinstance(message, RequestVoteResponse) and message.granted and not message.pre:
            self._check_vote(node, message.term, message.target)
        elif isinstance(message, AppendEntriesResponse) and message.accepted:
            if message.term == durable.term:
                check(message.match_index <= node.disk.last_index(), "acknowledged before durable", message)
        elif isinstance(message, AppendEntries):
            for batch in message.batches:
                held = node.staged.batch_at(batch.first_index)
                check(held is not None and held.payload == batch.payload, "sent before staged", batch, held)

    def on_acknowledged(self, batch: Batch) -> None:
        """A client was told that its append is committed."""
        self.acknowledged[batch.payload] = batch.first_index

    def on_read_asked(self, request_id: int) -> None:
        """A client asks for a linearizable read."""
        self.reads[request_id] = self.commit_index

    def check_disks(self) -> None:
        """At the end, when all nodes are up to date: disks agree and hold all that was acknowledged."""
        for node in self.nodes.values():
            for batch in self.committed:
                if batch.first_index >= node.disk.first_index():
                    held = node.disk.batch_at(batch.first_index)
                    check(held is not None and held.payload == batch.payload, "lost", node.node_id, batch, held)
        for payload, first_index in self.acknowledged.items():
            at = bisect_right(self.committed_firsts, first_index) - 1
            check(at >= 0 and self.committed[at].payload == payload, "an acknowledged append is lost", payload)

    def _check_vote(self, node: SimNode, term: Term, candidate: NodeId) -> None:
        given = self.votes.setdefault((term, node.node_id), candidate)
        check(given == candidate, "two votes in one term", node.node_id, term, given, candidate)
        durable = node.disk.hard_state
        if durable.term == term:
            check(durable.voted_for == candidate, "a vote leaves before it is durable", node.node_id, term, durable)

    def _check_leader(self, node: SimNode, term: Term, last_index: Index) -> None:
        known = self.leaders.get(term)
        if known is None:
            self.leaders[term] = node.node_id
            self._check_completeness(node, term)
        else:
            check(known == node.node_id, "two leaders in one term", term, known, node.node_id)
        before = self.leader_last_index.get((node.node_id, term), NO_INDEX)
        check(last_index >= before, "a leader cut its own log", node.node_id, term, before, last_index)
        self.leader_last_index[node.node_id, term] = last_index

    def _check_completeness(self, node: SimNode, term: Term) -> None:
        for index, entry_term, leader_term in reversed(self.commit_points):
            if leader_term < term and index >= node.status.first_index:
                held = node.core.term_at(index)
                check(held == entry_term, "a leader lacks a committed entry", node.node_id, term, index, held)
            if leader_term < term:
                return

    def _check_commit(self, node: SimNode, term: Term, commit_index: Index) -> None:
        """A leader's commit_index rose."""
        entry_term = node.core.term_at(commit_index)
        check(entry_term == term, "committed by counting an entry of an older term", node.node_id, term, entry_term)
        holders = [
            other.node_id
            for other in self.nodes.values()
            if commit_index < other.disk.first_index() or other.disk.term_at(commit_index) == entry_term
        ]
        holders += [lost for lost, disk in self.lost if disk.term_at(commit_index) == entry_term]
        majority = len(set(holders)) >= self.majority
        check(majority, "committed without a majority of disks", node.node_id, commit_index, holders)
        self.commit_points.append((commit_index, entry_term, term))

    def _check_committed(self, node: SimNode, start: Index, end: Index) -> None:
        """A node reported [start, end) as committed: whole batches.

        A log that begins inside a batch, after a deletion or a reset, makes its node tell others of that place, where
        their batches do not end. All of such a batch was committed before, or nothing of it had been deleted.
        """
        index = start
        while index < end:
            batch = node.staged.batch_at(index)
            check(batch is not None, "a commit of nothing", node.node_id, index)
            assert batch is not None
            whole = batch.first_index == index and batch.last_index < end
            check(whole or batch.last_index <= self.commit_index, "commit cuts a batch", node.node_id, index, batch)
            if index <= self.commit_index:
                known = self.committed[bisect_right(self.committed_firsts, index) - 1]
                gone = batch.first_index - known.first_index  # of the log's first batch the beginning may be deleted
                parts = known.payload if not gone else known.payload[gone:]  # type: ignore[index]
                same = parts == batch.payload and known.term == batch.term
                check(same, "two entries committed at one index", node.node_id, known, batch)
            else:
                self.committed.append(batch)
                self.committed_firsts.append(batch.first_index)
            index = Index(batch.last_index + 1)

"""What a leader does beside replication: heartbeats, quorum checks, ReadIndex, transfer, preferred leaders."""

from __future__ import annotations

from typing import Final

from dledger_core.errors import BadRequestError, NotLeaderError, TransferringError, invariant
from dledger_core.ids import Index, NodeId
from dledger_core.raft import replication
from dledger_core.raft.batch import Batch
from dledger_core.raft.messages import AppendEntriesResponse, Heartbeat, HeartbeatResponse, TimeoutNow
from dledger_core.raft.progress import Progress, ProgressState
from dledger_core.raft.quorum import majority_value
from dledger_core.raft.ready import Role
from dledger_core.raft.state import RaftState

__all__ = [
    "become_leader",
    "flush",
    "handle_append_entries_response",
    "handle_heartbeat_response",
    "propose",
    "read_index",
    "require_leader",
    "tick_leader",
    "transfer_leadership",
]

_PREFERRED_PAUSE: Final = 16
"""Quorum checks between two offers of leadership to preferred nodes, so that one that cannot win does little harm."""
_HELD_PAUSE: Final = 750
"""The same (about five minutes) for a leader that is not preferred itself and got its office by a transfer: somebody
asked for it by hand, or the nodes disagree about who is preferred and must not pass leadership round and round."""


def become_leader(state: RaftState) -> None:
    """Takes over: nothing is known of the others' logs, and the first entry of the new term is a NOOP."""
    invariant(state.role is Role.CANDIDATE, "only a candidate becomes leader", role=state.role)
    state.role = Role.LEADER
    state.leader_id = state.node_id
    state.election_elapsed = state.heartbeat_elapsed = 0
    state.heartbeat_round = 0
    state.transferee = None
    by_hand = state.transfer_campaign and state.node_id not in state.config.preferred_leaders
    state.preferred_pause = _HELD_PAUSE if by_hand else 0
    next_index = Index(state.log.last_index + 1)
    configuration = state.configuration
    state.progress = {
        member: Progress(next_index, is_voter=member in configuration.voters)
        for member in configuration.members
        if member != state.node_id
    }
    state.send_due = True
    if state.config.noop_on_election:
        payload, nbytes = state.noop_payload(next_index)
        replication.append(state, payload, 1, nbytes)


def require_leader(state: RaftState) -> None:
    """Raises NotLeaderError unless this node leads."""
    if state.role is not Role.LEADER:
        raise NotLeaderError(
            "this node does not lead the group",
            str(state.node_id),
            "ask the leader",
            {"leader_id": state.leader_id, "term": state.term},
        )


def propose(state: RaftState, payload: object, count: int, nbytes: int) -> Batch:
    """Appends a batch; raises NotLeaderError or TransferringError and then changes nothing."""
    require_leader(state)
    if state.transferee is not None:
        raise TransferringError(
            "leadership is being handed over", str(state.node_id), "retry", {"leader_id": state.transferee}
        )
    if count < 1 or nbytes < 0:
        raise BadRequestError("a batch has at least one entry", values={"count": count, "nbytes": nbytes})
    return replication.append(state, payload, count, nbytes)


def read_index(state: RaftState, request_id: int) -> None:
    """Queues a read; it is answered once a majority echoes a heartbeat round that starts after now."""
    require_leader(state)
    state.reads.waiting.append(request_id)


def flush(state: RaftState) -> None:
    """Queues all messages that are due; called once per Ready, so that one message carries many proposals."""
    # One round at a time: reads that come meanwhile share the next one.
    if state.reads.waiting and not state.reads.in_round and _has_committed_in_term(state):
        _broadcast_heartbeat(state)
    if state.send_due:
        replication.send_appends(state)


def transfer_leadership(state: RaftState, target: NodeId) -> None:
    """Hands leadership to ``target`` as soon as its log is complete; proposals are refused meanwhile."""
    require_leader(state)
    if target not in state.configuration.voters:
        raise BadRequestError(f"{target} is not a voter of the group", "transfer", "name one of its voters")
    if target in (state.node_id, state.transferee):
        return
    state.transferee = target
    state.transfer_elapsed = 0
    state.send_due = True
    _maybe_send_timeout_now(state, target, state.progress[target])


def tick_leader(state: RaftState) -> None:
    """Counts one tick on a leader."""
    config = state.config
    state.heartbeat_elapsed += 1
    state.election_elapsed += 1
    if state.transferee is not None:
        state.transfer_elapsed += 1
        if state.transfer_elapsed >= config.election_ticks_min:
            state.transferee = None
    if state.election_elapsed >= config.election_ticks_min:
        state.election_elapsed = 0
        heard = _take_heard(state)
        if not _has_quorum(state, heard):
            state.become_follower(state.term, None)
            return
        _maybe_transfer_to_preferred(state, heard)
    if state.heartbeat_elapsed >= config.heartbeat_ticks:
        _broadcast_heartbeat(state)


def handle_append_entries_response(state: RaftState, message: AppendEntriesResponse) -> None:
    """Takes note of an answer to AppendEntries."""
    progress = state.progress.get(message.sender)
    if progress is None:
        return
    progress.active = True
    if message.accepted:
        replication.handle_accepted(state, progress, message)
        if message.sender == state.transferee:
            _maybe_send_timeout_now(state, message.sender, progress)
    else:
        replication.handle_refused(state, progress, message)


def handle_heartbeat_response(state: RaftState, message: HeartbeatResponse) -> None:
    """Takes note that a member follows, confirms reads, and looks for losses and for what could not be read before."""
    progress = state.progress.get(message.sender)
    if progress is None:
        return
    progress.active = True
    due = progress.heard_heartbeat(message.round, message.last_index, state.log.first_index)
    if due or progress.next_index <= state.log.last_index:
        state.send_due = True
    if state.reads.in_round:
        _confirm_reads(state)


def _broadcast_heartbeat(state: RaftState) -> None:
    state.heartbeat_elapsed = 0
    state.heartbeat_round += 1
    commit_index = state.log.commit_index
    for member, progress in state.progress.items():
        progress.watch(state.heartbeat_round)
        state.send(
            Heartbeat(
                sender=state.node_id,
                target=member,
                term=state.term,
                commit_index=min(progress.match_index, commit_index),
                round=state.heartbeat_round,
            )
        )
    if state.reads.waiting and _has_committed_in_term(state):
        state.reads.start_round(state.heartbeat_round, commit_index)
        _confirm_reads(state)


def _confirm_reads(state: RaftState) -> None:
    rounds = [progress.acked_round for progress in state.progress.values() if progress.is_voter]
    if state.is_voter:
        rounds.append(state.heartbeat_round)
    state.reads.confirm(majority_value(rounds))


def _has_committed_in_term(state: RaftState) -> bool:
    """Returns whether this leader's commit index is known to be the group's (thesis, section 6.4, step 1)."""
    return state.log.term_at(state.log.commit_index) == state.term


def _take_heard(state: RaftState) -> set[NodeId]:
    """Returns the members heard since the last call."""
    heard = {member for member, progress in state.progress.items() if progress.active}
    for progress in state.progress.values():
        progress.active = False
    return heard


def _has_quorum(state: RaftState, heard: set[NodeId]) -> bool:
    """Returns whether the leader may go on: a majority answers, and its own disk does."""
    if state.configuration.is_sole_voter(state.node_id):
        return True
    voters = len((heard | {state.node_id}) & state.configuration.voters)
    # Heartbeats alone would keep a leader in office that can commit nothing (pitfall 14).
    return voters >= state.configuration.majority and state.persist_elapsed < state.config.election_ticks_max


def _maybe_transfer_to_preferred(state: RaftState, heard: set[NodeId]) -> None:
    """Offers leadership to a better preferred node that follows closely."""
    if state.preferred_pause > 0:
        state.preferred_pause -= 1
        return
    if state.transferee is not None or not _has_committed_in_term(state):
        return
    for node_id in state.config.preferred_leaders:
        if node_id == state.node_id:
            return
        progress = state.progress.get(node_id)
        if (
            progress is not None
            and progress.is_voter
            and node_id in heard
            and progress.state is ProgressState.REPLICATE
            and progress.match_index >= state.log.commit_index
        ):
            state.preferred_pause = _PREFERRED_PAUSE
            transfer_leadership(state, node_id)
            return


def _maybe_send_timeout_now(state: RaftState, target: NodeId, progress: Progress) -> None:
    if progress.match_index == state.log.last_index:
        state.send(TimeoutNow(sender=state.node_id, target=target, term=state.term))

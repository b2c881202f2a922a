"""The two inputs that time and the network give: ``tick`` and ``step``.

``step`` is the one place where terms are compared; handlers see messages of the current term only (and pre-votes,
whose term is a question and not a fact).
"""

from __future__ import annotations

from dledger_core.errors import ProtocolError
from dledger_core.ids import Index
from dledger_core.raft import election, following, leadership
from dledger_core.raft import snapshot_install as resetting
from dledger_core.raft.messages import (
    AppendEntries,
    AppendEntriesResponse,
    Heartbeat,
    HeartbeatResponse,
    InstallSnapshot,
    InstallSnapshotResponse,
    Message,
    RequestVote,
    RequestVoteResponse,
    TimeoutNow,
)
from dledger_core.raft.ready import Role
from dledger_core.raft.state import RaftState

__all__ = ["step", "tick"]


def tick(state: RaftState, *, persisting: bool) -> None:
    """Counts one tick; ``persisting`` says whether the disk has work it has not confirmed."""
    state.persist_elapsed = state.persist_elapsed + 1 if persisting else 0
    if state.role is Role.LEADER:
        leadership.tick_leader(state)
    else:
        election.tick_follower(state)


def step(state: RaftState, message: Message) -> None:
    """Takes a message from another member.

    Raises:
        ProtocolError: it is malformed or not for this node; nothing changed.
    """
    if message.target != state.node_id or message.sender == state.node_id:
        raise ProtocolError("a message for another node", str(message.sender), values={"target": message.target})
    if isinstance(message, AppendEntries):
        following.check_batches(message)
    elif isinstance(message, InstallSnapshot):
        resetting.check_snapshot(message)
    if message.term < state.term:
        _answer_stale(state, message)
    elif message.term == state.term or _enter_higher_term(state, message):
        _dispatch(state, message)


def _enter_higher_term(state: RaftState, message: Message) -> bool:
    """Adopts a higher term where it is a fact; returns whether the message is to be handled."""
    if isinstance(message, RequestVote):
        if state.has_active_leader and not message.transfer:
            return False
        if not message.pre:
            state.become_follower(message.term, None)
    elif isinstance(message, RequestVoteResponse) and message.pre and message.granted:
        pass
    elif isinstance(message, AppendEntries | Heartbeat | InstallSnapshot):
        state.become_follower(message.term, message.sender)
    else:
        state.become_follower(message.term, None)
    return True


def _answer_stale(state: RaftState, message: Message) -> None:
    """Tells the sender of a lower term the higher one; answers of a lower term mean nothing any more."""
    if isinstance(message, RequestVote):
        election.refuse_request_vote(state, message)
    elif isinstance(message, AppendEntries):
        following.refuse_append_entries(state, message)
    elif isinstance(message, Heartbeat):
        following.refuse_heartbeat(state, message)
    elif isinstance(message, InstallSnapshot):
        following.refuse(state, message.sender, Index(message.first_index - 1))


def _dispatch(state: RaftState, message: Message) -> None:
    match message:
        case AppendEntries():
            following.handle_append_entries(state, message)
        case AppendEntriesResponse():
            leadership.handle_append_entries_response(state, message)
        case Heartbeat():
            following.handle_heartbeat(state, message)
        case HeartbeatResponse():
            leadership.handle_heartbeat_response(state, message)
        case InstallSnapshot():
            resetting.handle_install_snapshot(state, message)
        case InstallSnapshotResponse():
            resetting.handle_install_snapshot_response(state, message)
        case RequestVote():
            election.handle_request_vote(state, message)
        case RequestVoteResponse():
            election.handle_request_vote_response(state, message)
        case TimeoutNow():
            election.handle_timeout_now(state, message)

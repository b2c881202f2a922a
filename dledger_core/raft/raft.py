"""The two inputs from time and the network: ``tick`` and ``step``.

``step`` is the only function that compares terms (Raft section 5.1); handlers receive messages of the current term
only, and pre-votes, whose term is a question and not a fact.
"""

from __future__ import annotations

from dledger_core.errors import ProtocolError
from dledger_core.ids import TERM_JUMP_MAX
from dledger_core.raft import election, following, leadership, snapshot_install
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


def tick(state: RaftState, beat: bool | None = None, *, persisting: bool) -> bool:
    """Count one tick; ``persisting`` tells whether a Ready is in flight to the disk. Return whether a timer expired."""
    state.persist_elapsed = state.persist_elapsed + 1 if persisting else 0
    return leadership.tick_leader(state, beat) if state.role is Role.LEADER else election.tick_follower(state)


def step(state: RaftState, message: Message) -> bool:
    """Process a message from another member; return False if it has no effect but to show that the sender is alive.

    Raises:
        ProtocolError: it is malformed or for another member; nothing changed.
    """
    # Most messages of an idle group: hundreds of such groups must cost next to nothing.
    if isinstance(message, Heartbeat):
        if following.takes_repetition(state, message):
            return False
    elif isinstance(message, HeartbeatResponse) and leadership.takes_repetition(state, message):
        return False
    if message.target != state.member or message.sender == state.member:
        raise ProtocolError("the message is for another member", str(message.sender), values={"target": message.target})
    # Terms end at a highest number. A damaged or hostile message that jumped there would leave the group without a next
    # term, and so without elections (test_term_implausibly_far_ahead_is_refused_and_changes_nothing).
    if message.term > state.term + TERM_JUMP_MAX:
        raise ProtocolError(
            "the term is implausibly far ahead",
            str(message.sender),
            "find out where it comes from; dledger repair --term sets the term of a stopped node",
            {"term": message.term, "term_here": state.term},
        )
    # Before the terms are compared: a malformed message must change nothing, not even the term
    # (test_impossible_append_changes_nothing).
    if isinstance(message, AppendEntries):
        following.check_batches(message)
    elif isinstance(message, InstallSnapshot):
        snapshot_install.check_snapshot(message)
    # A response of an older term was given to another leadership or campaign. Counted in this one, it would be a vote
    # or an acknowledgement that no member gave (Raft section 5.1; mutation "responses of an older term count").
    if message.term < state.term:
        _reject_stale(state, message)
    elif message.term == state.term or _enter_higher_term(state, message):
        _dispatch(state, message)
        state.update_floor()
    return True


def _enter_higher_term(state: RaftState, message: Message) -> bool:
    """Adopt a higher term where it is a fact; return whether to handle the message."""
    if isinstance(message, RequestVote):
        # Vote stickiness (thesis section 4.2.3): a member that lost contact must not depose a leader that works. A
        # transfer is exempt, because the leader itself requested it.
        if state.has_active_leader and not message.transfer:
            return False
        # A pre-vote names a term that no member has entered. A member that adopted it could be made to depose a leader
        # that works, which pre-vote is there to prevent (thesis section 9.6;
        # test_pre_vote_changes_neither_term_nor_vote_nor_timer).
        if not message.pre:
            state.become_follower(message.term, None)
    elif isinstance(message, RequestVoteResponse) and message.pre and message.granted:
        pass  # it echoes the term that this member would campaign in
    elif isinstance(message, AppendEntries | Heartbeat | InstallSnapshot):
        state.become_follower(message.term, message.sender)
    else:
        state.become_follower(message.term, None)
    return True


def _reject_stale(state: RaftState, message: Message) -> None:
    """Send the higher term to the sender of a request; a response of a lower term has no meaning in this one."""
    # Silence would be safe, but a deposed leader would accept appends that it cannot commit until its own quorum check
    # (mutation "a stale leader gets no response").
    if isinstance(message, RequestVote):
        election.reject_request_vote(state, message)
    elif isinstance(message, AppendEntries):
        following.reject_append_entries(state, message)
    elif isinstance(message, Heartbeat):
        following.reject_heartbeat(state, message)
    elif isinstance(message, InstallSnapshot):
        following.reject(state, message.sender)


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
            snapshot_install.handle_install_snapshot(state, message)
        case InstallSnapshotResponse():
            snapshot_install.handle_install_snapshot_response(state, message)
        case RequestVote():
            election.handle_request_vote(state, message)
        case RequestVoteResponse():
            election.handle_request_vote_response(state, message)
        case TimeoutNow():
            election.handle_timeout_now(state, message)

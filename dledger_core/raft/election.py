"""Elections: pre-vote, votes, transfer campaigns (Raft sections 5.2, 5.4.1; Ongaro's thesis, sections 9.6, 3.10)."""

from __future__ import annotations

from dledger_core.ids import NO_TERM, NodeId, Term
from dledger_core.raft import leadership
from dledger_core.raft.messages import RequestVote, RequestVoteResponse, TimeoutNow
from dledger_core.raft.quorum import VoteResult
from dledger_core.raft.ready import Role
from dledger_core.raft.state import RaftState

__all__ = [
    "campaign",
    "handle_request_vote",
    "handle_request_vote_response",
    "handle_timeout_now",
    "maybe_count_self_vote",
    "refuse_request_vote",
    "shorten_election_timeout",
    "tick_follower",
]


def tick_follower(state: RaftState) -> None:
    """Counts one tick on a node that does not lead."""
    state.election_elapsed += 1
    if state.role is Role.LEARNER or not state.has_vote:
        return
    if state.role is Role.CANDIDATE and not state.is_hard_state_durable:
        # Nobody has been asked yet: on a slow disk a further campaign would only start the wait again.
        return
    alone = state.role is Role.FOLLOWER and state.configuration.is_sole_voter(state.node_id)
    if alone or state.election_elapsed >= state.election_timeout:
        campaign(state)


def campaign(state: RaftState, *, transfer: bool = False) -> None:
    """Starts a campaign: with a pre-vote, unless the old leader asked for it or nobody else votes."""
    if state.role is Role.LEADER or not state.is_voter or not state.has_vote:
        return
    if transfer or state.configuration.is_sole_voter(state.node_id):
        _become_candidate(state, transfer=transfer)
    else:
        _become_pre_candidate(state)


def shorten_election_timeout(state: RaftState) -> None:
    """Waits no longer than a part of the shortest timeout, because the connection to the leader broke.

    A process that dies breaks all its connections at once, long before its silence is one. But a broken connection
    proves nothing: others are asked first (pre-vote), and whoever still hears the leader refuses.
    """
    state.leader_id = None
    state.hurry_election()


def handle_timeout_now(state: RaftState, message: TimeoutNow) -> None:
    """Campaigns at once if the leader itself asks."""
    if state.role is Role.FOLLOWER and message.sender == state.leader_id:
        campaign(state, transfer=True)


def handle_request_vote(state: RaftState, message: RequestVote) -> None:
    """Votes, or says whether it would; a pre-vote leaves term, vote and timer alone."""
    candidate = message.sender
    free = state.voted_for == candidate or (state.voted_for is None and state.leader_id is None)
    willing = free or (message.pre and message.term > state.term)
    granted = willing and _may_elect(state, message)
    if message.pre:
        term = message.term if granted else state.term
        state.send_dependent(_response(state, candidate, term, granted=granted, pre=True))
        return
    if granted:
        state.vote(candidate)
        state.election_elapsed = 0
    state.send_persisted(_response(state, candidate, state.term, granted=granted, pre=False))


def _may_elect(state: RaftState, message: RequestVote) -> bool:
    """Whether the candidate holds everything that this node knows to be committed, or may have known."""
    if state.has_vote:
        return state.log.is_up_to_date(message.last_index, message.last_term)
    # In a group of two nothing is committed that the other one did not hold; what is known to be, it must still hold.
    log = state.log
    known = (log.term_at(log.commit_index) or NO_TERM, log.commit_index)
    return len(state.configuration.voters) == 2 and (message.last_term, message.last_index) >= known


def refuse_request_vote(state: RaftState, message: RequestVote) -> None:
    """Answers a request of a lower term, so that its sender learns the higher one."""
    state.send_dependent(_response(state, message.sender, state.term, granted=False, pre=message.pre))


def handle_request_vote_response(state: RaftState, message: RequestVoteResponse) -> None:
    """Counts an answer of this campaign."""
    if message.pre:
        asked = state.term + 1 if message.granted else state.term
        expected = state.role is Role.PRE_CANDIDATE and message.term == asked
    else:
        expected = state.role is Role.CANDIDATE
    if expected:
        state.votes.setdefault(message.sender, message.granted)
        _tally(state)


def maybe_count_self_vote(state: RaftState) -> None:
    """Counts a candidate's vote for itself once it is durable, like anybody else's."""
    if state.role is Role.CANDIDATE and state.node_id not in state.votes and state.is_hard_state_durable:
        state.votes[state.node_id] = True
        _tally(state)


def _tally(state: RaftState) -> None:
    result = state.configuration.vote_result(state.votes)
    if result is VoteResult.LOST:
        state.become_follower(state.term, None)
    elif result is VoteResult.WON:
        if state.role is Role.PRE_CANDIDATE:
            _become_candidate(state, transfer=False)
        else:
            leadership.become_leader(state)


def _become_pre_candidate(state: RaftState) -> None:
    state.role = Role.PRE_CANDIDATE
    state.leader_id = None
    state.votes = {state.node_id: True}
    state.reset_election_timer()
    for request in _requests(state, Term(state.term + 1), pre=True, transfer=False):
        state.send(request)


def _become_candidate(state: RaftState, *, transfer: bool) -> None:
    state.enter_term(Term(state.term + 1), state.node_id)
    state.role = Role.CANDIDATE
    state.transfer_campaign = transfer
    state.leader_id = None
    state.votes = {}
    state.reset_election_timer()
    for request in _requests(state, state.term, pre=False, transfer=transfer):
        state.send_persisted(request)


def _requests(state: RaftState, term: Term, *, pre: bool, transfer: bool) -> list[RequestVote]:
    log = state.log
    return [
        RequestVote(
            sender=state.node_id,
            target=member,
            term=term,
            last_index=log.last_index,
            last_term=log.last_term,
            pre=pre,
            transfer=transfer,
        )
        for member in state.configuration.members
        if member != state.node_id and member in state.configuration.voters
    ]


def _response(state: RaftState, target: NodeId, term: Term, *, granted: bool, pre: bool) -> RequestVoteResponse:
    return RequestVoteResponse(sender=state.node_id, target=target, term=term, granted=granted, pre=pre)

"""Elections: pre-vote, votes, transfer campaigns (Raft sections 5.2, 5.4.1; Ongaro's thesis, sections 9.6, 3.10)."""

from __future__ import annotations

from dledger_core.ids import NO_TERM, MemberId, Term
from dledger_core.raft import leadership
from dledger_core.raft.configuration import VoteResult
from dledger_core.raft.messages import RequestVote, RequestVoteResponse, TimeoutNow
from dledger_core.raft.ready import Role
from dledger_core.raft.state import RaftState


def tick_follower(state: RaftState) -> bool:
    """Count one tick on a member that does not lead; return whether it starts a campaign."""
    state.election_elapsed += 1
    if state.start_ticks:
        state.count_start()
    if state.leader_id is not None and state.election_elapsed < state.election_timeout:
        return False  # as most ticks of hundreds of groups
    # A learner does not count, so its log may lack what the voters have. Below its floor a member would elect, as
    # itself, a log without entries that it acknowledged (test_member_below_its_floor_does_not_campaign). At its start
    # it waits for objections (test_voter_that_starts_does_not_campaign).
    if state.role is Role.LEARNER or state.floor is not None or state.is_starting:
        return False
    if state.role is Role.CANDIDATE and not state.is_hard_state_durable:
        # No request was sent yet: on a slow disk another campaign would only restart the wait.
        return False
    if state.election_elapsed >= state.election_timeout or _is_alone(state):
        campaign(state)
        return True
    return False


def _is_alone(state: RaftState) -> bool:
    """Whether no other member can lead, so that it need not wait for one."""
    return state.leader_id is None and state.role is Role.FOLLOWER and state.configuration.is_sole_voter(state.member)


def campaign(state: RaftState, *, transfer: bool = False) -> None:
    """Start a campaign: with a pre-vote, unless the leader requested it or there is no other voter.

    A pre-vote (thesis section 9.6) changes no term, so a member that returns from a partition cannot depose a leader
    that the others still follow.
    """
    if state.role is Role.LEADER or not state.may_campaign or state.floor is not None or state.is_starting:
        return
    # No pre-vote in a transfer: the others still follow the leader, and would refuse it (thesis section 3.10).
    if transfer or state.configuration.is_sole_voter(state.member):
        _become_candidate(state, transfer=transfer)
    else:
        _become_pre_candidate(state)


def shorten_election_timeout(state: RaftState) -> None:
    """Shorten the election timeout because the connection to the leader was lost.

    A process that exits closes all its connections at once, long before its election timeouts expire. A lost
    connection alone proves nothing, so a pre-vote runs first; members with an active leader reject it.
    """
    state.leader_id = None
    state.shorten_election_timer()


def handle_timeout_now(state: RaftState, message: TimeoutNow) -> None:
    """Campaign at once if the leader itself requests it."""
    # Voters grant a transfer although their leader is active. If any member could request one, any member could depose
    # a leader that works (test_only_the_leader_can_request_a_campaign).
    if state.role is Role.FOLLOWER and message.sender == state.leader_id:
        campaign(state, transfer=True)


def handle_request_vote(state: RaftState, message: RequestVote) -> None:
    """Vote, or respond to a pre-vote, which changes neither term nor vote nor timer."""
    # One vote per term, also across a restart: with two a term could have two leaders, which commit different entries
    # at one index (Election Safety, Raft section 5.2; test_voter_votes_once_per_term_across_a_restart).
    candidate = message.sender
    # A member that follows a leader of this term need not vote in it any longer: the election is decided.
    free = state.voted_for == candidate or (state.voted_for is None and state.leader_id is None)
    willing = free or (message.pre and message.term > state.term)
    granted = willing and not state.is_starting and _may_elect(state, message)
    if message.pre:
        term = message.term if granted else state.term
        state.send_dependent(_response(state, candidate, term, granted=granted, pre=True))
        return
    if granted:
        state.vote(candidate)
        state.election_elapsed = 0
    # After the vote is durable: a vote that a crash makes a member forget can be given to two candidates of one term.
    state.send_persisted(_response(state, candidate, state.term, granted=granted, pre=False))


def _may_elect(state: RaftState, message: RequestVote) -> bool:
    """Whether the candidate has every entry that this member knows to be committed, or may have known."""
    # Raft compares the candidate's log with what this member has (section 5.4.1). The floor stands for what it had and
    # has lost (test_recovering_voter_cannot_elect_a_leader_that_lacks_committed_entries).
    log, floor = state.log, state.floor
    if floor is None or floor.admits(message.last_term, message.last_index):
        return log.is_up_to_date(message.last_index, message.last_term)
    # In a group of two an entry is committed only if both have it. So the other voter has every entry that this one
    # may have forgotten, unless it lacks even an entry known to be committed. This holds for entries after that of the
    # configuration of two. Entries before it may have been committed by this member and a third voter; of those the
    # candidate must have all that are here, as any candidate must, and they are here: the log reaches that entry.
    # Without this exception one damaged end of two disks would need an operator, though no entry can be missing.
    in_force = log.configurations.in_force
    exempt = floor.is_open and not state.ends_below_members
    if not exempt or in_force.configuration.voters != {state.member, message.sender}:
        return False
    known = max(in_force.index, log.commit_index)
    return (message.last_term, message.last_index) >= (log.term_at(known) or NO_TERM, known)


def reject_request_vote(state: RaftState, message: RequestVote) -> None:
    """Reject a request of a lower term, so that its sender learns the higher one."""
    state.send_dependent(_response(state, message.sender, state.term, granted=False, pre=message.pre))


def handle_request_vote_response(state: RaftState, message: RequestVoteResponse) -> None:
    """Count a response to this campaign."""
    if message.pre:
        requested = state.term + 1 if message.granted else state.term
        expected = state.role is Role.PRE_CANDIDATE and message.term == requested
    else:
        expected = state.role is Role.CANDIDATE
    if expected:
        # By member, and the first response counts: a network that repeats one must not make two votes of it.
        state.votes.setdefault(message.sender, message.granted)
        _tally(state)


def maybe_count_self_vote(state: RaftState) -> None:
    """Count a candidate's vote for itself once it is durable, like the vote of any other member."""
    if state.role is Role.CANDIDATE and state.member not in state.votes and state.is_hard_state_durable:
        state.votes[state.member] = True
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
    # A pre-vote promises nothing, so its own need not be durable; a vote must be
    # (test_own_vote_counts_with_its_own_ready_only).
    state.votes = {state.member: True}
    state.reset_election_timer()
    for request in _requests(state, Term(state.term + 1), pre=True, transfer=False):
        state.send(request)


def _become_candidate(state: RaftState, *, transfer: bool) -> None:
    state.enter_term(Term(state.term + 1), state.member)
    state.role = Role.CANDIDATE
    state.transfer_campaign = transfer
    state.leader_id = None
    state.votes = {}
    state.reset_election_timer()
    # After term and self-vote are durable: otherwise a candidate that crashes could vote for another one in its term.
    for request in _requests(state, state.term, pre=False, transfer=transfer):
        state.send_persisted(request)


def _requests(state: RaftState, term: Term, *, pre: bool, transfer: bool) -> list[RequestVote]:
    log = state.log
    return [
        RequestVote(
            sender=state.member,
            target=member,
            term=term,
            last_index=log.last_index,
            last_term=log.last_term,
            pre=pre,
            transfer=transfer,
        )
        for member in state.configuration.members
        if member != state.member and state.configuration.is_voter(member)
    ]


def _response(state: RaftState, target: MemberId, term: Term, *, granted: bool, pre: bool) -> RequestVoteResponse:
    return RequestVoteResponse(sender=state.member, target=target, term=term, granted=granted, pre=pre)

"""One test per sentence about elections in the Raft paper (sections 5.1, 5.2, 5.4.1) and the thesis (9.6)."""

from __future__ import annotations

import pytest

from dledger_core.config import RaftConfig
from dledger_core.ids import NO_INDEX, NO_TERM, Index, NodeId, Term
from dledger_core.raft import (
    AppendEntries,
    Heartbeat,
    HeartbeatResponse,
    RequestVote,
    RequestVoteResponse,
    Role,
)
from tests.support.group import CONFIG, N0, N1, N2, N3, NODES, Group, Member, only
from tests.support.memory_store import MemoryStore, log_of


def vote_request(
    term: int, *, sender: NodeId = N1, last: tuple[int, int] = (NO_TERM, NO_INDEX), pre: bool = False
) -> RequestVote:
    return RequestVote(
        sender=sender, target=N0, term=Term(term), last_term=Term(last[0]), last_index=Index(last[1]), pre=pre
    )


def vote(term: int, sender: NodeId, *, granted: bool = True, pre: bool = False) -> RequestVoteResponse:
    return RequestVoteResponse(sender=sender, target=N0, term=Term(term), granted=granted, pre=pre)


def heartbeat(term: int, *, sender: NodeId = N1, commit_index: int = NO_INDEX, number: int = 1) -> Heartbeat:
    return Heartbeat(sender=sender, target=N0, term=Term(term), commit_index=Index(commit_index), round=number)


def candidate(member: Member) -> Member:
    """Carries a lone node through the pre-vote; its own vote is durable."""
    member.raw.campaign()
    member.run()
    for other in NODES[1:3]:
        if member.role is Role.PRE_CANDIDATE:
            member.step(vote(member.term + 1, other, pre=True))
    assert member.role is Role.CANDIDATE
    return member


def leader(member: Member) -> Member:
    candidate(member)
    member.step(vote(member.term, N1))
    assert member.role is Role.LEADER
    return member


# 5.1


@pytest.mark.parametrize("role", [Role.FOLLOWER, Role.PRE_CANDIDATE, Role.CANDIDATE, Role.LEADER])
def test_a_larger_term_is_adopted_in_every_role(role: Role) -> None:
    """5.1: if one server's current term is smaller than the other's, it updates its term to the larger value."""
    member = Member(term=1)
    if role is Role.PRE_CANDIDATE:
        member.raw.campaign()
    elif role is Role.CANDIDATE:
        candidate(member)
    elif role is Role.LEADER:
        leader(member)
    member.step(heartbeat(9))
    assert (member.role, member.term, member.raw.status().leader_id) == (Role.FOLLOWER, 9, N1)
    assert member.store.hard_state.term == 9


def test_a_stale_term_is_rejected_with_the_newer_one() -> None:
    """5.1: if a server receives a request with a stale term number, it rejects the request."""
    member = Member(term=5)
    for message in (
        heartbeat(4),
        AppendEntries(
            sender=N1,
            target=N0,
            term=Term(4),
            prev_index=NO_INDEX,
            prev_term=NO_TERM,
            commit_index=NO_INDEX,
            batches=(),
        ),
        vote_request(4),
        vote_request(4, pre=True),
    ):
        (answer,) = member.step(message)
        assert (answer.term, answer.target) == (5, N1)
        assert getattr(answer, "granted", False) is False
        assert getattr(answer, "accepted", False) is False
        assert member.raw.status().leader_id is None


# 5.2


def test_servers_start_as_followers() -> None:
    """5.2: when servers start up, they begin as followers."""
    assert Member().role is Role.FOLLOWER


def test_heartbeats_keep_a_follower() -> None:
    """5.2: a server remains in follower state as long as it receives valid messages from a leader."""
    member = Member(term=1)
    for _ in range(20):
        member.step(heartbeat(1))
        member.tick(CONFIG.election_ticks_min - 1)
        assert member.role is Role.FOLLOWER


def test_leaders_send_periodic_heartbeats() -> None:
    """5.2: leaders send periodic heartbeats to all followers."""
    member = leader(Member())
    for _ in range(3):
        sent = only(member.tick(CONFIG.heartbeat_ticks), Heartbeat)
        assert [message.target for message in sent] == [N1, N2]
        for message in sent:
            member.step(
                HeartbeatResponse(
                    sender=message.target, target=N0, term=message.term, round=message.round, last_index=NO_INDEX
                )
            )


def test_silence_starts_an_election() -> None:
    """5.2: if a follower receives no communication over the election timeout, it begins an election."""
    member = Member(term=3)
    sent = only(member.tick(CONFIG.election_ticks_max), RequestVote)
    assert member.role is Role.PRE_CANDIDATE
    assert {message.target for message in sent} == {N1, N2}
    assert all(message.pre and message.term == 4 for message in sent)


def test_a_campaign_raises_the_term_and_votes_for_itself() -> None:
    """5.2: to begin an election, a follower increments its current term and transitions to candidate state."""
    member = candidate(Member(term=3))
    assert (member.term, member.store.hard_state.voted_for) == (4, N0)


def test_requests_go_to_all_others_with_the_log_they_speak_for() -> None:
    """5.2: it votes for itself and issues RequestVote RPCs in parallel to each of the other servers."""
    member = Member(store=MemoryStore(log_of(1, 2)))
    member.raw.campaign()
    member.run()
    sent = only(member.step(vote(3, N1, pre=True)), RequestVote)
    assert [(m.target, m.term, m.last_index, m.last_term, m.pre) for m in sent] == [
        (N1, 3, 1, 2, False),
        (N2, 3, 1, 2, False),
    ]


@pytest.mark.parametrize(
    ("size", "votes", "role"),
    [
        (1, {}, Role.LEADER),
        (3, {N1: True}, Role.LEADER),
        (3, {N1: False}, Role.CANDIDATE),
        (3, {N1: False, N2: False}, Role.FOLLOWER),
        (5, {N1: True}, Role.CANDIDATE),
        (5, {N1: True, N2: True}, Role.LEADER),
        (5, {N1: True, N2: False, N3: False}, Role.CANDIDATE),
    ],
)
def test_a_majority_wins(size: int, votes: dict[NodeId, bool], role: Role) -> None:
    """5.2: a candidate wins an election if it receives votes from a majority of the servers in the full cluster."""
    member = Member(voters=NODES[:size])
    if size == 1:
        member.tick(1)
    else:
        candidate(member)
        for sender, granted in votes.items():
            member.step(vote(member.term, sender, granted=granted))
    assert member.role is role


def test_a_repeated_answer_is_one_vote() -> None:
    """5.2: votes are a mapping from voter to answer."""
    member = candidate(Member(voters=NODES[:5]))
    for _ in range(3):
        member.step(vote(member.term, N1))
    assert member.role is Role.CANDIDATE


def test_answers_of_strangers_and_of_older_terms_do_not_count() -> None:
    member = candidate(Member(term=4))
    member.step(vote(member.term, NodeId("stranger")))
    member.step(vote(member.term - 1, N1))
    member.step(vote(member.term, N1, pre=True))
    assert member.role is Role.CANDIDATE


def test_one_vote_per_term_first_come_first_served() -> None:
    """5.2: each server will vote for at most one candidate in a given term, on a first-come-first-served basis."""
    member = Member()
    (first,) = only(member.step(vote_request(1, sender=N1)), RequestVoteResponse)
    (second,) = only(member.step(vote_request(1, sender=N2)), RequestVoteResponse)
    (again,) = only(member.step(vote_request(1, sender=N1)), RequestVoteResponse)
    assert (first.granted, second.granted, again.granted) == (True, False, True)


def test_a_vote_is_kept_across_a_restart() -> None:
    """5.2 with figure 2: votedFor is persistent state."""
    member = Member()
    member.step(vote_request(1, sender=N1))
    reborn = Member(store=member.store, term=1, voted_for=member.store.hard_state.voted_for)
    (answer,) = only(reborn.step(vote_request(1, sender=N2)), RequestVoteResponse)
    assert not answer.granted


@pytest.mark.parametrize("campaigning", [Role.PRE_CANDIDATE, Role.CANDIDATE])
def test_a_candidate_returns_to_follower_before_a_legitimate_leader(campaigning: Role) -> None:
    """5.2: if the leader's term is at least as large, the candidate recognizes the leader as legitimate."""
    member = Member(term=3)
    if campaigning is Role.CANDIDATE:
        candidate(member)
    else:
        member.raw.campaign()
    member.step(heartbeat(member.term))
    assert (member.role, member.raw.status().leader_id) == (Role.FOLLOWER, N1)


def test_a_split_vote_times_out_into_a_new_campaign() -> None:
    """5.2: each candidate will time out and start a new election."""
    member = candidate(Member())
    member.tick(CONFIG.election_ticks_max)
    assert member.role is Role.PRE_CANDIDATE
    member.step(vote(member.term + 1, N2, pre=True))
    assert (member.role, member.term) == (Role.CANDIDATE, 2)


def test_timeouts_are_random_and_drawn_anew() -> None:
    """5.2: election timeouts are chosen randomly from a fixed interval."""
    waits = set()
    for seed in range(60):
        member = Member(seed=seed)
        ticks = 0
        while member.role is Role.FOLLOWER:
            member.raw.tick()
            ticks += 1
        waits.add(ticks)
    assert waits == set(range(CONFIG.election_ticks_min, CONFIG.election_ticks_max))


# 5.4.1


@pytest.mark.parametrize(
    ("last", "granted"),
    [((2, 2), True), ((2, 3), True), ((3, 0), True), ((2, 1), False), ((1, 9), False)],
)
@pytest.mark.parametrize("pre", [True, False])
def test_the_voter_denies_its_vote_if_its_own_log_is_more_up_to_date(
    last: tuple[int, int], granted: bool, pre: bool
) -> None:
    """5.4.1: the voter denies its vote if its own log is more up-to-date than that of the candidate."""
    member = Member(store=MemoryStore(log_of(1, 1, 2)), term=3)
    (answer,) = only(member.step(vote_request(4, last=last, pre=pre)), RequestVoteResponse)
    assert answer.granted is granted


# Thesis 9.6


def test_a_pre_vote_changes_neither_term_nor_vote_nor_timer() -> None:
    """9.6: a candidate only increments its term if it first learns that it could win."""
    member = Member(term=3, voted_for=N2)
    member.tick(5)
    (answer,) = only(member.step(vote_request(8, pre=True)), RequestVoteResponse)
    assert (answer.granted, answer.term) == (True, 8)
    assert member.store.hard_state.term == 3
    assert member.store.hard_state.voted_for == N2
    assert member.raw._state.election_elapsed == 5


def test_a_refused_pre_vote_leaves_the_candidate_in_its_term() -> None:
    member = Member(term=3)
    member.raw.campaign()
    member.run()
    for sender in (N1, N2):
        member.step(vote(3, sender, granted=False, pre=True))
    assert (member.role, member.term) == (Role.FOLLOWER, 3)


def test_a_refusal_with_a_higher_term_brings_a_straggler_up() -> None:
    member = Member(term=3)
    member.raw.campaign()
    member.run()
    member.step(vote(7, N1, granted=False, pre=True))
    assert (member.role, member.term) == (Role.FOLLOWER, 7)


def test_followers_whose_connections_to_the_leader_broke_elect_another_at_once() -> None:
    """A process that dies breaks its connections: nobody waits for an election timeout then."""
    group = Group(5)
    group.elect(N0)
    group.drop = lambda message: N0 in (message.sender, message.target)
    followers = [group[node] for node in NODES[1:]]
    for follower in followers:
        follower.raw.report_unreachable(N0)
        assert follower.raw.status().leader_id is None
    for _ in range(3 + CONFIG.election_ticks_min // 4):
        group.tick()
    assert [follower.term for follower in followers] == [2] * 4
    assert [follower.role for follower in followers].count(Role.LEADER) == 1


def test_one_broken_connection_to_the_leader_replaces_nobody() -> None:
    """It may be the network: the others still hear the leader and refuse."""
    group = Group(3)
    group.elect(N0)
    group[N1].raw.report_unreachable(N0)
    group[N2].raw.report_unreachable(N1)
    group.drop = lambda message: {message.sender, message.target} == {N0, N1}
    group.tick(CONFIG.election_ticks_min)
    assert (group[N1].role, group[N1].term) == (Role.PRE_CANDIDATE, 1)
    group.drop = lambda _: False
    group.tick(CONFIG.heartbeat_ticks)
    assert [group[node].role for node in NODES[:3]] == [Role.LEADER, Role.FOLLOWER, Role.FOLLOWER]
    assert {group[node].raw.status().leader_id for node in NODES[:3]} == {N0}
    assert {group[node].term for node in NODES[:3]} == {1}


@pytest.mark.parametrize("pre", [True, False])
def test_a_node_that_hears_a_leader_ignores_candidates(pre: bool) -> None:
    """Thesis 4.2.3: a RequestVote within the minimum election timeout of hearing a leader is ignored."""
    member = Member(term=3)
    member.step(heartbeat(3))
    assert member.step(vote_request(9, sender=N2, pre=pre)) == []
    assert member.term == 3
    member.raw.tick()
    for _ in range(CONFIG.election_ticks_min - 1):
        member.raw.tick()
    assert member.step(vote_request(9, sender=N2, pre=pre)) != []


def test_a_leader_ignores_candidates_as_long_as_it_leads() -> None:
    member = leader(Member())
    assert member.step(vote_request(9, sender=N2)) == []
    assert member.role is Role.LEADER


def test_a_node_of_a_higher_term_makes_the_leader_step_down() -> None:
    """A straggler of a higher term is never stuck: its answer to a heartbeat carries its term."""
    group = Group(3)
    group.elect(N0)
    group[N2].raw._state.enter_term(Term(7), None)
    group.tick(2 * CONFIG.election_ticks_max)
    terms = {member.term for member in group.members.values()}
    leaders = [member for member in group.members.values() if member.role is Role.LEADER]
    assert len(terms) == 1
    assert terms.pop() > 7
    assert len(leaders) == 1


def test_a_leader_without_a_majority_steps_down() -> None:
    """Thesis 6.2: a leader steps down if an election timeout elapses without a round of heartbeats to a majority."""
    group = Group(5)
    group.elect(N0)
    group.drop = lambda message: message.target == N0 and message.sender != N1
    for _ in range(2 * CONFIG.election_ticks_min):
        group[N0].raw.tick()
        group.deliver()
    assert (group[N0].role, group[N0].raw.status().leader_id) == (Role.FOLLOWER, None)


def test_a_leader_with_a_bare_majority_stays() -> None:
    group = Group(5)
    group.elect(N0)
    group.drop = lambda message: N3 in (message.target, message.sender)
    for _ in range(5 * CONFIG.election_ticks_min):
        group[N0].raw.tick()
        group.deliver()
    assert group[N0].role is Role.LEADER


def test_a_sole_voter_elects_itself_at_the_first_tick_and_never_steps_down() -> None:
    member = Member(voters=[N0])
    assert member.tick(1) == []
    assert (member.role, member.term, member.commit_index) == (Role.LEADER, 1, 0)
    member.tick(10 * CONFIG.election_ticks_max)
    assert (member.role, member.term) == (Role.LEADER, 1)


def test_a_learner_follows_and_never_campaigns() -> None:
    member = Member(voters=[N1, N2], learners=[N0], term=1)
    assert member.role is Role.LEARNER
    member.step(heartbeat(1))
    assert member.tick(5 * CONFIG.election_ticks_max) == []
    member.raw.campaign()
    assert (member.role, member.term) == (Role.LEARNER, 1)


def test_on_a_slow_disk_a_candidate_waits_instead_of_raising_its_term() -> None:
    member = Member(voters=[N0], config=RaftConfig(election_ticks_min=10, election_ticks_max=20, heartbeat_ticks=2))
    for _ in range(200):
        member.raw.tick()
        member.take()
    assert (member.role, member.term) == (Role.CANDIDATE, 1)
    member.run()
    assert member.role is Role.LEADER


def test_campaigns_of_a_group_end_with_one_leader() -> None:
    for seed in range(20):
        group = Group((Member(node, voters=NODES[:5], seed=seed * 10 + at) for at, node in enumerate(NODES)))
        group.tick(10 * CONFIG.election_ticks_max)
        assert [member.role for member in group.members.values()].count(Role.LEADER) == 1

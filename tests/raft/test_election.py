"""Elections: Raft sections 5.1, 5.2, 5.4.1; thesis 3.10 (transfer), 4.2.3 (stickiness), 6.2, 9.6 (pre-vote)."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from dledger_core.errors import ProtocolError, TransferringError
from dledger_core.ids import TERM_JUMP_MAX, NodeId, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Heartbeat,
    Message,
    RequestVote,
    RequestVoteResponse,
    Role,
    TimeoutNow,
)
from tests.raft.messages import (
    ack,
    append,
    candidate,
    heartbeat,
    in_role,
    leader,
    one,
    snapshot,
    vote,
    vote_request,
)
from tests.support.group import CONFIG, N0, N1, N2, N3, NODES, Group, Member, only
from tests.support.memory_store import MemoryStore, log_of

CAMPAIGNING = [Role.PRE_CANDIDATE, Role.CANDIDATE]


# --- terms (5.1) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", [Role.FOLLOWER, *CAMPAIGNING, Role.LEADER])
def test_member_adopts_a_higher_term_in_every_role(role: Role) -> None:
    member = in_role(role)
    member.step(heartbeat(9))
    assert (member.role, member.term, member.raw.status().leader_id) == (Role.FOLLOWER, 9, N1)
    assert member.store.hard_state.term == 9


@pytest.mark.parametrize(
    "kind",
    [
        heartbeat,
        vote_request,
        vote,
        lambda term: vote_request(term, pre=True),
        lambda term: vote_request(term, transfer=True),
        lambda term: append(prev=(-1, -1), term=term),
        lambda term: ack(N1, 0, term),
        lambda term: snapshot(term=term),
    ],
    ids=["heartbeat", "vote request", "vote", "pre-vote", "transfer", "append", "acknowledgement", "snapshot"],
)
def test_term_implausibly_far_ahead_is_refused_and_changes_nothing(kind: Callable[[int], Message]) -> None:
    member = Member(term=5)
    with pytest.raises(ProtocolError) as refused:
        member.raw.step(kind(5 + TERM_JUMP_MAX + 1))
    assert refused.value.values["term_here"] == 5
    assert not member.raw.has_ready()
    member.step(kind(5 + TERM_JUMP_MAX))


@pytest.mark.parametrize(
    "message",
    [heartbeat(4), append(prev=(-1, -1), term=4), vote_request(4), vote_request(4, pre=True)],
    ids=["heartbeat", "append", "vote", "pre-vote"],
)
def test_member_rejects_a_lower_term_with_its_own(message: Heartbeat) -> None:
    member = Member(term=5)
    (response,) = member.step(message)
    assert (response.term, response.target) == (5, N1)
    assert not getattr(response, "granted", False)
    assert not getattr(response, "accepted", False)
    assert member.raw.status().leader_id is None


@pytest.mark.parametrize("role", CAMPAIGNING)
def test_candidate_follows_a_leader_of_its_term(role: Role) -> None:
    member = in_role(role, term=3)
    member.step(heartbeat(member.term))
    assert (member.role, member.raw.status().leader_id) == (Role.FOLLOWER, N1)


# --- timeouts -----------------------------------------------------------------------------------------------------


def test_follower_waits_while_heartbeats_arrive() -> None:
    member = Member(term=1)
    for _ in range(20):
        member.step(heartbeat(1))
        member.tick(CONFIG.election_ticks_min - 1)
        assert member.role is Role.FOLLOWER


def test_follower_starts_a_pre_vote_after_its_timeout() -> None:
    member = Member(term=3, store=MemoryStore(log_of(1, 2)))
    sent = only(member.tick(CONFIG.election_ticks_max), RequestVote)
    assert (member.role, member.term) == (Role.PRE_CANDIDATE, 3)
    fields = [(m.target, m.term, m.last_index, m.last_term, m.pre) for m in sent]
    assert fields == [(N1, 4, 1, 2, True), (N2, 4, 1, 2, True)]
    fields = [(m.target, m.term, m.pre) for m in only(member.step(vote(4, pre=True)), RequestVote)]
    assert fields == [(N1, 4, False), (N2, 4, False)]
    assert (member.term, member.store.hard_state.voted_for) == (4, N0)


def test_election_timeouts_cover_their_interval() -> None:
    waits = set()
    for seed in range(60):
        member, ticks = Member(seed=seed), 0
        while member.role is Role.FOLLOWER:
            member.raw.tick()
            ticks += 1
        waits.add(ticks)
    assert waits == set(range(CONFIG.election_ticks_min, CONFIG.election_ticks_max))


def test_candidate_campaigns_again_after_a_split_vote() -> None:
    member = candidate(Member())
    member.tick(CONFIG.election_ticks_max)
    assert member.role is Role.PRE_CANDIDATE
    member.step(vote(member.term + 1, N2, pre=True))
    assert (member.role, member.term) == (Role.CANDIDATE, 2)


def test_candidate_keeps_its_term_while_its_disk_is_slow() -> None:
    member = Member(voters=[N0])
    for _ in range(200):
        member.raw.tick()
        member.take()
    assert (member.role, member.term) == (Role.CANDIDATE, 1)
    member.run()
    assert member.role is Role.LEADER


def test_learner_follows_and_never_campaigns() -> None:
    member = Member(voters=[N1, N2], learners=[N0], term=1)
    member.step(heartbeat(1))
    assert member.tick(5 * CONFIG.election_ticks_max) == []
    member.raw.campaign()
    assert (member.role, member.term) == (Role.LEARNER, 1)


def test_sole_voter_leads_from_the_first_tick_on() -> None:
    member = Member(voters=[N0])
    assert member.tick(1) == []
    assert (member.role, member.term, member.commit_index) == (Role.LEADER, 1, 0)
    member.tick(10 * CONFIG.election_ticks_max)
    assert (member.role, member.term) == (Role.LEADER, 1)


# --- votes (5.2, 5.4.1) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "votes", "role"),
    [
        (3, {N1: True}, Role.LEADER),
        (3, {N1: False}, Role.CANDIDATE),
        (3, {N1: False, N2: False}, Role.FOLLOWER),
        (5, {N1: True}, Role.CANDIDATE),
        (5, {N1: True, N2: True}, Role.LEADER),
        (5, {N1: True, N2: False, N3: False}, Role.CANDIDATE),
    ],
)
def test_candidate_wins_with_a_majority(size: int, votes: dict[NodeId, bool], role: Role) -> None:
    member = candidate(Member(voters=NODES[:size]))
    for sender, granted in votes.items():
        for _ in range(3):
            member.step(vote(member.term, sender, granted=granted))
    assert member.role is role


def test_candidate_ignores_votes_of_strangers_and_other_campaigns() -> None:
    member = candidate(Member(term=4))
    for response in (vote(5, NodeId("stranger")), vote(4), vote(5, pre=True)):
        member.step(response)
    assert member.role is Role.CANDIDATE


def test_voter_votes_once_per_term_across_a_restart() -> None:
    member = Member()

    def granted(sender: NodeId) -> bool:
        return one(member.step(vote_request(1, sender=sender)), RequestVoteResponse).granted

    assert [granted(sender) for sender in (N1, N2, N1)] == [True, False, True]
    member.crash()
    assert [granted(sender) for sender in (N2, N1)] == [False, True]


@pytest.mark.parametrize(
    ("last", "granted"), [((2, 2), True), ((2, 3), True), ((3, 0), True), ((2, 1), False), ((1, 9), False)]
)
@pytest.mark.parametrize("pre", [True, False])
def test_voter_rejects_a_log_less_up_to_date(last: tuple[int, int], granted: bool, pre: bool) -> None:
    member = Member(store=MemoryStore(log_of(1, 1, 2)), term=3)
    assert one(member.step(vote_request(4, last=last, pre=pre)), RequestVoteResponse).granted is granted


def test_own_vote_counts_with_its_own_ready_only() -> None:
    member = Member(voters=[N0])
    member.tick(1)
    member.propose("x")
    member.take()
    member.raw.step(vote(2, granted=False))
    member.raw.tick()
    member.take()
    member.persist(1)
    assert (member.role, member.term) == (Role.CANDIDATE, 3), "an earlier Ready does not contain the vote"
    member.persist()
    assert member.role is Role.LEADER


# --- pre-vote and stickiness (9.6, 4.2.3) -------------------------------------------------------------------------


def test_pre_vote_changes_neither_term_nor_vote_nor_timer() -> None:
    member = Member(term=3, voted_for=N2)
    plain = Member(term=3, voted_for=N2)
    for each in (member, plain):
        each.tick(5)
    response = one(member.step(vote_request(8, pre=True)), RequestVoteResponse)
    assert (response.granted, response.term) == (True, 8)
    assert member.store.hard_state == plain.store.hard_state
    ticks = [next(n for n in range(99) if m.tick() and m.role is Role.PRE_CANDIDATE) for m in (member, plain)]
    assert ticks[0] == ticks[1]


@pytest.mark.parametrize(("term", "expected"), [(3, 3), (7, 7)])
def test_rejected_pre_candidate_keeps_or_adopts_the_term(term: int, expected: int) -> None:
    member = in_role(Role.PRE_CANDIDATE, term=3)
    for sender in (N1, N2):
        member.step(vote(term, sender, granted=False, pre=True))
    assert (member.role, member.term) == (Role.FOLLOWER, expected)


@pytest.mark.parametrize("pre", [True, False])
def test_follower_ignores_candidates_while_its_leader_is_active(pre: bool) -> None:
    member = Member(term=3)
    member.step(heartbeat(3))
    assert member.step(vote_request(9, sender=N2, pre=pre)) == []
    assert member.term == 3
    for _ in range(CONFIG.election_ticks_min):
        member.raw.tick()
    assert member.step(vote_request(9, sender=N2, pre=pre)) != []


def test_leader_ignores_candidates() -> None:
    member = leader(Member())
    assert member.step(vote_request(9, sender=N2)) == []
    assert member.role is Role.LEADER


def test_lost_connections_to_the_leader_shorten_the_election() -> None:
    group = Group(5)
    group.elect(N0)
    group.drop = lambda message: N0 in (message.sender, message.target)
    followers = [group[node] for node in NODES[1:]]
    for follower in followers:
        follower.raw.report_unreachable(N0)
        assert follower.raw.status().leader_id is None
    group.tick(3 + CONFIG.election_ticks_min // 4)
    assert [follower.term for follower in followers] == [2] * 4
    assert [follower.role for follower in followers].count(Role.LEADER) == 1


def test_one_lost_connection_does_not_replace_the_leader() -> None:
    group = Group(3)
    group.elect(N0)
    group[N1].raw.report_unreachable(N0)
    group[N2].raw.report_unreachable(N1)
    group.drop = lambda message: {message.sender, message.target} == {N0, N1}
    group.tick(CONFIG.election_ticks_min)
    assert (group[N1].role, group[N1].term) == (Role.PRE_CANDIDATE, 1)
    group.drop = lambda _: False
    group.tick(CONFIG.heartbeat_ticks)
    assert {(group[node].raw.status().leader_id, group[node].term) for node in NODES[:3]} == {(N0, 1)}


def test_bytes_of_the_leader_that_delay_its_heartbeats_prevent_an_election() -> None:
    group = Group(3)
    group.elect(N0)
    group.drop = lambda message: N0 in (message.sender, message.target)
    for _ in range(3 * CONFIG.election_ticks_max):
        group.tick(1)
        for follower in (N1, N2):
            group[follower].raw.confirm_leader(N0)
            group[N0].raw.confirm_member(follower)
    assert {(member.raw.status().leader_id, member.term) for member in group.members.values()} == {(N0, 1)}


def test_bytes_of_another_node_prevent_no_election_and_keep_no_leader() -> None:
    group = Group(3)
    group.elect(N0)
    group.drop = lambda message: N0 in (message.sender, message.target)
    for _ in range(3 * CONFIG.election_ticks_max):
        group.tick(1)
        group[N1].raw.confirm_leader(N2)
        group[N2].raw.confirm_leader(N1)
        group[N0].raw.confirm_leader(N1)
    assert group[N0].role is not Role.LEADER
    assert {group[N1].role, group[N2].role} == {Role.LEADER, Role.FOLLOWER}


@pytest.mark.parametrize("victim", [N1, N2])
def test_returning_follower_does_not_disturb_the_group(victim: str) -> None:
    group = Group(3)
    group.elect(N0)
    group.drop = lambda message: victim in (message.target, message.sender)
    group.tick(10 * CONFIG.election_ticks_max)
    group.drop = lambda message: False
    group.tick(3 * CONFIG.election_ticks_max)
    assert {(member.raw.status().leader_id, member.term) for member in group.members.values()} == {(N0, 1)}


@pytest.mark.parametrize("node", NODES[:3])
@pytest.mark.parametrize("kind", ["cannot send", "cannot receive"])
def test_half_connected_leader_is_replaced_and_follower_is_not(node: str, kind: str) -> None:
    group = Group(3)
    group.elect(N0)
    group.drop = lambda message: node == (message.sender if kind == "cannot send" else message.target)
    group.tick(12 * CONFIG.election_ticks_max)
    (found,) = [member.node_id for member in group.members.values() if member.role is Role.LEADER]
    assert (found == N0) is (node != N0)
    terms = {member.term for member in group.members.values()}
    group.tick(5 * CONFIG.election_ticks_max)
    assert {member.term for member in group.members.values()} == terms


def test_partially_connected_group_elects_the_member_that_reaches_a_majority() -> None:
    group = Group(5)
    group.elect(N0)
    group.drop = lambda message: N2 not in (message.target, message.sender)
    group.tick(20 * CONFIG.election_ticks_max)
    assert group[N2].role is Role.LEADER


# --- check-quorum (6.2) -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("reachable", "stays"), [(1, False), (2, True), (3, True)])
def test_leader_stays_with_a_majority_and_steps_down_without(reachable: int, stays: bool) -> None:
    group = Group(5)
    group.elect(N0)
    group.drop = lambda message: message.target == N0 and message.sender not in NODES[: reachable + 1]
    for _ in range(5 * CONFIG.election_ticks_min if stays else 2 * CONFIG.election_ticks_min):
        group[N0].raw.tick()
        group.deliver()
    assert (group[N0].role, group[N0].term) == (Role.LEADER if stays else Role.FOLLOWER, 1)
    assert (group[N0].raw.status().leader_id, bool(group[N0].raw.status().progress)) == (N0 if stays else None, stays)


@pytest.mark.parametrize(("every", "role"), [(0, Role.FOLLOWER), (CONFIG.election_ticks_min, Role.LEADER)])
def test_leader_steps_down_if_its_disk_hangs_and_stays_if_it_is_slow(every: int, role: Role) -> None:
    group = Group(3)
    member = group.elect(N0)
    for tick in range(10 * CONFIG.election_ticks_max if every else 30):
        if every or not tick:
            member.propose("x")
        member.raw.tick()
        group.deliver(member.take())
        if every and tick % every == 0:
            group.deliver(member.persist(1))
        for node in (N1, N2):
            group.deliver(group[node].run())
    assert member.role is role


# --- transfer (3.10) ----------------------------------------------------------------------------------------------


def test_transfer_completes_the_targets_log_first() -> None:
    group = Group(3)
    member = group.elect(N0)
    group.drop = lambda message: message.target == N1 and isinstance(message, AppendEntries)
    for body in "xyz":
        member.propose(body)
        group.deliver()
    last = member.raw.last_index
    member.raw.transfer_leadership(N1)
    group.deliver()
    assert only(group.delivered, TimeoutNow) == []
    with pytest.raises(TransferringError):
        member.propose("rejected")
    group.drop = lambda message: False
    group.tick(2 * CONFIG.heartbeat_ticks)
    request = one(group.delivered, TimeoutNow)
    before = group.delivered[: group.delivered.index(request)]
    assert max(m.match_index for m in only(before, AppendEntriesResponse) if m.sender == N1) == last
    assert (group[N1].role, group[N1].term, member.role) == (Role.LEADER, 2, Role.FOLLOWER)
    assert not [m for m in only(group.delivered, RequestVote) if m.term == 2 and m.pre], "no pre-vote"


def test_transfer_waits_until_appends_in_flight_are_committed() -> None:
    """A leader that steps down before leaves their outcome unknown, although the target has them."""
    group = Group(3)
    leader, target = group.elect(N0), group[N1]
    group.deliver()
    leader.propose("in flight")
    leader.raw.transfer_leadership(N1)
    early = leader.take()
    for message in only(early, AppendEntries):
        if message.target == N1:
            for response in target.step(message):
                leader.receive(response)
    early += leader.take()
    assert leader.raw.last_index > leader.commit_index, "this disk is not done"
    assert only(early, TimeoutNow) == []
    leader.persist()
    assert leader.commit_index == leader.raw.last_index
    assert one(leader.take(), TimeoutNow).target == N1


@pytest.mark.parametrize("lost", ["everything", "timeout now"])
def test_transfer_is_given_up_after_an_election_timeout(lost: str) -> None:
    group = Group(3)
    member = group.elect(N0)
    group.drop = lambda message: message.target == N1 and (lost == "everything" or isinstance(message, TimeoutNow))
    member.raw.transfer_leadership(N1)
    group.deliver()
    group.tick(CONFIG.election_ticks_min - 1)
    with pytest.raises(TransferringError):
        member.propose("one tick too early")
    group.tick(1)
    assert member.raw.status().transferee is None
    group.drop = lambda message: False
    group.tick(10 * CONFIG.election_ticks_max)
    member.propose("y")
    group.deliver()
    assert (member.role, member.term, member.commit_index) == (Role.LEADER, 1, 1)


def test_transfer_to_another_target_replaces_the_first() -> None:
    group = Group(3)
    member = group.elect(N0)
    member.raw.transfer_leadership(N0)
    assert member.raw.status().transferee is None, "to itself"
    group.drop = lambda message: message.target == N1
    member.raw.transfer_leadership(N1)
    group.deliver()
    member.raw.transfer_leadership(N2)
    group.deliver()
    assert (group[N2].role, member.role) == (Role.LEADER, Role.FOLLOWER)


def test_only_the_leader_can_request_a_campaign() -> None:
    group = Group(3)
    group.elect(N0)
    group[N1].raw.step(TimeoutNow(sender=N2, target=N1, term=Term(1)))
    assert (group[N1].role, group[N1].term) == (Role.FOLLOWER, 1)

"""The checklist of bugs that real replicated logs had (performance-reliability 2.5), each as one small scenario.

Not here: membership (10) and repeated appends (13) belong to other layers; a stalled loop (16) to the driver.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger_core.config import RaftConfig
from dledger_core.errors import InvariantViolationError, NotLeaderError, TransferringError
from dledger_core.ids import NO_INDEX, NO_TERM, Index, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Batch,
    Heartbeat,
    HeartbeatResponse,
    RequestVote,
    Role,
    TimeoutNow,
)
from tests.support.group import CONFIG, N0, N1, N2, N3, N4, NODES, Group, Member, only
from tests.support.memory_store import MemoryStore, log_of


def answers(group: Group, node: str) -> list[tuple[int, int | None]]:
    member = group.members[node]
    return [(answer.request_id, answer.index) for ready in member.readys for answer in ready.reads]


def profile_a() -> RaftConfig:
    return RaftConfig(election_ticks_min=10, election_ticks_max=20, heartbeat_ticks=2, noop_on_election=False)


def test_01_an_old_term_does_not_commit_by_counting() -> None:
    """Figure 8, in profile A where no NOOP hides it: the entry of term 2 is on a majority and yet not committed."""
    old = log_of(1, 2)
    group = Group(5, config=profile_a(), logs={N0: old, N1: old, N2: old, N3: old[:1], N4: old[:1]})
    leader = group.elect(N0)
    group.tick(3 * CONFIG.heartbeat_ticks)
    assert [group[node].log_terms() for node in NODES] == [[1, 2]] * 5
    assert leader.commit_index == NO_INDEX
    leader.propose("x", 1, 1)
    group.deliver()
    assert leader.commit_index == 2


def test_02_a_follower_commits_only_what_this_message_matched() -> None:
    member = Member(store=MemoryStore(log_of(1, 2, 2)), term=3)
    probe = AppendEntries(
        sender=N1, target=N0, term=Term(3), prev_index=Index(0), prev_term=Term(1), commit_index=Index(2), batches=()
    )
    member.step(probe)
    assert member.commit_index == 0


def test_03_a_deposed_leaders_append_is_never_reported_at_the_same_index() -> None:
    """Success belongs to (index, term): the batch of term 1 at index 1 never appears as committed."""
    group = Group(3)
    old = group.elect(N0)
    group.drop = lambda message: N0 in (message.target, message.sender)
    lost = old.propose("lost", 1, 1)
    group.deliver()
    new = group.elect(N1)
    new.propose("kept", 1, 1)
    group.deliver()
    group.drop = lambda message: False
    group.tick(2 * CONFIG.heartbeat_ticks)
    assert old.commit_index >= lost.first_index
    assert old.raw.term_at(lost.first_index) != lost.term
    stepped_down = next(at for at, r in enumerate(old.readys) if r.soft_state and at > 3 and r.soft_state.term > 1)
    committed_at = next(at for at, r in enumerate(old.readys) if r.committed and r.committed[1] > lost.first_index)
    assert stepped_down <= committed_at, "the driver learns of the lost leadership first, or with it"


def test_04_a_deposed_leader_appends_nothing() -> None:
    group = Group(3)
    leader = group.elect(N0)
    leader.raw.step(Heartbeat(sender=N1, target=N0, term=Term(5), commit_index=NO_INDEX, round=1))
    with pytest.raises(NotLeaderError):
        leader.propose("x", 1, 1)
    leader.run()
    assert leader.log_terms() == [1]


def test_05_truncation_only_on_a_conflict_and_never_below_commit() -> None:
    member = Member(store=MemoryStore(log_of(1, 1, 1)), term=1, commit_index=1)
    held = log_of(1, 1, 1)
    stale = AppendEntries(
        sender=N1,
        target=N0,
        term=Term(1),
        prev_index=NO_INDEX,
        prev_term=NO_TERM,
        commit_index=Index(0),
        batches=(held[0],),
    )
    member.step(stale)
    assert member.log_terms() == [1, 1, 1]
    wrong = Batch(Index(1), 1, Term(2), 1, "other")
    with pytest.raises(InvariantViolationError):
        member.step(
            AppendEntries(
                sender=N1,
                target=N0,
                term=Term(2),
                prev_index=Index(0),
                prev_term=Term(1),
                commit_index=Index(0),
                batches=(wrong,),
            )
        )


def test_06_and_07_own_vote_and_own_entries_count_after_the_disk() -> None:
    member = Member(voters=[N0])
    member.raw.tick()
    member.take()
    assert member.role is Role.CANDIDATE
    member.persist()
    assert (member.role, member.commit_index) == (Role.LEADER, NO_INDEX)
    member.take()
    assert member.commit_index == NO_INDEX
    member.persist()
    assert member.commit_index == 0


def test_06_the_own_vote_counts_with_the_ready_that_held_it() -> None:
    member = Member(voters=[N0])
    member.tick(1)
    member.propose("x", 1, 1)
    member.take()
    member.raw.step_down()
    member.raw.tick()
    member.take()
    member.persist(1)
    assert (member.role, member.term) == (Role.CANDIDATE, 2), "an earlier Ready says nothing of the vote"
    member.persist()
    assert member.role is Role.LEADER


@pytest.mark.parametrize("victim", [N1, N2])
def test_08_a_node_that_comes_back_disturbs_nobody(victim: str) -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: victim in (message.target, message.sender)
    group.tick(10 * CONFIG.election_ticks_max)
    group.drop = lambda message: False
    group.tick(3 * CONFIG.election_ticks_max)
    assert (leader.role, leader.term) == (Role.LEADER, 1)
    assert {member.term for member in group.members.values()} == {1}


@pytest.mark.parametrize("node", NODES[:3])
@pytest.mark.parametrize("kind", ["cannot send", "cannot receive"])
def test_09_a_half_deaf_leader_is_replaced_and_a_half_deaf_follower_is_not_minded(node: str, kind: str) -> None:
    group = Group(3)
    group.elect(N0)
    group.drop = lambda message: node == (message.sender if kind == "cannot send" else message.target)
    group.tick(12 * CONFIG.election_ticks_max)
    leaders = [member.node_id for member in group.members.values() if member.role is Role.LEADER]
    assert len(leaders) == 1
    assert (leaders[0] == N0) is (node != N0)
    terms = {member.term for member in group.members.values()}
    group.tick(5 * CONFIG.election_ticks_max)
    assert {member.term for member in group.members.values()} == terms, "the group has come to rest"


def test_09_partial_connectivity_finds_a_leader_that_reaches_a_majority() -> None:
    """A bridge: everybody reaches n2 only; n0 was the leader of the full group."""
    group = Group(5)
    group.elect(N0)
    group.drop = lambda message: N2 not in (message.target, message.sender)
    group.tick(20 * CONFIG.election_ticks_max)
    assert group[N2].role is Role.LEADER


def test_11_transfer_catches_the_target_up_and_moves_at_once() -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: message.target == N1 and isinstance(message, AppendEntries)
    leader.propose("x", 1, 1)
    group.deliver()
    leader.raw.transfer_leadership(N1)
    group.deliver()
    assert only(group.delivered, TimeoutNow) == []
    with pytest.raises(TransferringError):
        leader.propose("y", 1, 1)
    group.drop = lambda message: False
    group.tick(2 * CONFIG.heartbeat_ticks)
    assert (group[N1].role, group[N1].term, leader.role) == (Role.LEADER, 2, Role.FOLLOWER)
    assert not [m for m in only(group.delivered, RequestVote) if m.term == 2 and m.pre], (
        "passes pre-vote and stickiness"
    )


def test_11_transfer_is_given_up_after_an_election_timeout() -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: message.target == N1
    leader.raw.transfer_leadership(N1)
    group.deliver()
    group.tick(CONFIG.election_ticks_min)
    assert leader.raw.status().transferee is None
    leader.propose("y", 1, 1)
    group.deliver()
    assert leader.commit_index == 1


def test_11_transfer_is_given_up_also_when_timeout_now_is_lost() -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: isinstance(message, TimeoutNow)
    leader.raw.transfer_leadership(N1)
    group.deliver()
    group.tick(CONFIG.election_ticks_min - 1)
    with pytest.raises(TransferringError):
        leader.propose("one tick too early", 1, 1)
    group.tick(1)
    leader.propose("y", 1, 1)
    group.deliver()
    assert (leader.role, leader.commit_index) == (Role.LEADER, 1)


def test_11_only_the_leader_may_ask_for_a_campaign() -> None:
    group = Group(3)
    group.elect(N0)
    group[N1].raw.step(TimeoutNow(sender=N2, target=N1, term=Term(1)))
    assert (group[N1].role, group[N1].term) == (Role.FOLLOWER, 1)


def test_11_transfer_to_itself_is_nothing() -> None:
    leader = Group(3).elect(N0)
    leader.raw.transfer_leadership(N0)
    assert leader.raw.status().transferee is None


def test_11_a_preferred_node_that_follows_closely_gets_the_lead() -> None:
    config = RaftConfig(election_ticks_min=10, election_ticks_max=20, heartbeat_ticks=2, preferred_leaders=(N2, N0, N1))
    group = Group(3, config=config)
    group.elect(N1)
    group.drop = lambda message: N2 in (message.target, message.sender)
    group.tick(30 * CONFIG.election_ticks_min)
    assert group[N0].role is Role.LEADER, "the best of those it hears"
    group.drop = lambda message: False
    group.tick(60 * CONFIG.election_ticks_min)
    assert group[N2].role is Role.LEADER
    term = group[N2].term
    group.tick(10 * CONFIG.election_ticks_max)
    assert (group[N2].role, group[N2].term) == (Role.LEADER, term)


def test_11_who_was_asked_to_lead_by_hand_keeps_the_lead_for_minutes() -> None:
    config = RaftConfig(election_ticks_min=10, election_ticks_max=20, heartbeat_ticks=2, preferred_leaders=(N2,))
    group = Group(3, config=config)
    group.elect(N2).raw.transfer_leadership(N0)
    group.deliver()
    term = group[N0].term
    group.tick(500 * CONFIG.election_ticks_min)
    assert (group[N0].role, group[N0].term) == (Role.LEADER, term)
    group.tick(300 * CONFIG.election_ticks_min)
    assert group[N2].role is Role.LEADER


def test_11_who_won_an_election_gives_the_lead_to_the_preferred_node_at_once() -> None:
    config = RaftConfig(election_ticks_min=10, election_ticks_max=20, heartbeat_ticks=2, preferred_leaders=(N2,))
    group = Group(3, config=config)
    group.elect(N0)
    group.tick(2 * CONFIG.election_ticks_min)
    assert group[N2].role is Role.LEADER


def test_11_nodes_that_disagree_about_who_is_preferred_do_not_pass_the_lead_round() -> None:
    group = Group(3)
    for node, preferred in ((N0, N1), (N1, N2), (N2, N0)):
        group[node].raw._state.config = replace(CONFIG, preferred_leaders=(preferred,))
    group.elect(N0)
    group.tick(500 * CONFIG.election_ticks_min)
    assert group[N1].role is Role.LEADER
    assert group[N1].term == 2, "one transfer, not one every few seconds"


def test_11_a_target_that_is_behind_gets_timeout_now_only_when_its_log_is_complete() -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: message.target == N1
    for body in "xyz":
        leader.propose(body, 1, 1)
        group.deliver()
    last = leader.raw.status().last_index
    leader.raw.transfer_leadership(N1)
    group.delivered.clear()
    group.drop = lambda message: False
    group.tick(2 * CONFIG.heartbeat_ticks)
    (asked,) = only(group.delivered, TimeoutNow)
    accepted = [m for m in group.delivered[: group.delivered.index(asked)] if isinstance(m, AppendEntriesResponse)]
    assert max(m.match_index for m in accepted if m.sender == N1) == last
    assert group[N1].role is Role.LEADER


def test_11_a_second_transfer_replaces_the_first() -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: message.target == N1
    leader.raw.transfer_leadership(N1)
    group.deliver()
    leader.raw.transfer_leadership(N2)
    group.deliver()
    assert (group[N2].role, leader.role) == (Role.LEADER, Role.FOLLOWER)


def test_11_after_a_transfer_that_was_given_up_nothing_moves_by_itself() -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: message.target == N1
    leader.raw.transfer_leadership(N1)
    group.deliver()
    with pytest.raises(TransferringError):
        leader.propose("refused", 1, 1)
    group.tick(CONFIG.election_ticks_min)
    group.drop = lambda message: False
    group.tick(10 * CONFIG.election_ticks_max)
    assert (leader.role, leader.term) == (Role.LEADER, 1)
    leader.propose("accepted", 1, 1)
    group.deliver()
    assert leader.commit_index == 1


def test_12_a_read_needs_an_echo_of_a_later_round() -> None:
    group = Group(3)
    leader = group.elect(N0)
    old = HeartbeatResponse(
        sender=N1, target=N0, term=Term(1), round=leader.raw._state.heartbeat_round, last_index=Index(0)
    )
    leader.raw.read_index(7)
    beats = only(leader.take(), Heartbeat)
    assert {message.round for message in beats} == {old.round + 1}
    leader.step(old)
    assert answers(group, N0) == []
    leader.step(HeartbeatResponse(sender=N1, target=N0, term=Term(1), round=old.round + 1, last_index=Index(0)))
    assert answers(group, N0) == [(7, 0)]


def test_12_a_read_waits_for_the_first_commit_of_the_term() -> None:
    group = Group(3)
    group.drop = lambda message: isinstance(message, AppendEntries)
    leader = group.elect(N0)
    leader.raw.read_index(7)
    group.tick(3 * CONFIG.heartbeat_ticks)
    assert answers(group, N0) == []
    group.drop = lambda message: False
    group.tick(3 * CONFIG.heartbeat_ticks)
    assert answers(group, N0) == [(7, 0)]


def test_12_a_deposed_leader_answers_with_none() -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: N0 in (message.target, message.sender)
    leader.raw.read_index(7)
    group.deliver()
    leader.raw.read_index(8)
    group.elect(N1).propose("new", 1, 1)
    group.deliver()
    assert answers(group, N0) == []
    group.tick(3 * CONFIG.election_ticks_max)
    assert sorted(answers(group, N0)) == [(7, None), (8, None)]


def test_12_reads_share_a_round_and_a_lost_round_is_repeated() -> None:
    group = Group(3)
    leader = group.elect(N0)
    before = leader.raw._state.heartbeat_round
    group.drop = lambda message: isinstance(message, Heartbeat)
    for request in range(100):
        leader.raw.read_index(request)
        leader.run()
    assert leader.raw._state.heartbeat_round == before + 1
    group.drop = lambda message: False
    group.tick(CONFIG.heartbeat_ticks)
    assert answers(group, N0) == [(request, 0) for request in range(100)]


def test_12_a_sole_voter_answers_at_once() -> None:
    member = Member(voters=[N0])
    member.tick(1)
    member.raw.read_index(7)
    member.run()
    assert next(answer for ready in member.readys for answer in ready.reads).index == 0


def test_14_a_leader_whose_disk_hangs_steps_down() -> None:
    group = Group(3)
    leader = group.elect(N0)
    leader.propose("x", 1, 1)
    for _ in range(CONFIG.election_ticks_max + CONFIG.election_ticks_min):
        leader.raw.tick()
        group.deliver(leader.take())
        for node in (N1, N2):
            group.deliver(group[node].run())
    assert leader.role is Role.FOLLOWER


def test_14_a_slow_but_working_disk_keeps_the_lead() -> None:
    group = Group(3)
    leader = group.elect(N0)
    for tick in range(10 * CONFIG.election_ticks_max):
        leader.propose("x", 1, 1)
        leader.raw.tick()
        group.deliver(leader.take())
        if tick % CONFIG.election_ticks_min == 0:
            group.deliver(leader.persist(1))
        for node in (N1, N2):
            group.deliver(group[node].run())
    assert leader.role is Role.LEADER


def test_15_deleting_what_a_follower_needs_marks_it_and_deletes_nothing_there() -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: N2 in (message.target, message.sender)
    for at in range(5):
        leader.propose(f"x{at}", 1, 1)
        group.deliver()
    leader.store.trim(Index(4))
    leader.raw.trim(Index(4))
    group.drop = lambda message: False
    leader.raw.report_unreachable(N2)
    group.tick(5 * CONFIG.heartbeat_ticks)
    assert leader.raw.status().progress[N2].needs_snapshot
    assert group[N2].log_terms() == [1]

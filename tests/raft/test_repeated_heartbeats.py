"""Heartbeats of an idle group repeat an earlier one, and both ends process the repetition without a Ready."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

from dledger_core.raft import Condition, Heartbeat, HeartbeatResponse, Message, Role
from tests.raft.messages import heartbeat, vote_request
from tests.support.group import CONFIG, N0, N1, N2, NODES, Group, Member, only


def idle(members: int = 3) -> tuple[Group, Member]:
    """Return a group whose members have answered a heartbeat about all entries."""
    group = Group(members)
    leader = group.elect(N0)
    leader.propose("x")
    group.tick(4 * CONFIG.heartbeat_ticks, N0)
    group.delivered.clear()
    return group, cast("Member", leader)


def beats(leader: Member) -> list[Message]:
    """Return the repetitions that the leader sends in the next interval."""
    out: list[Message] = []
    for _ in range(CONFIG.heartbeat_ticks):
        leader.raw.tick()
        out += leader.raw.take_repeats()
    assert not leader.raw.has_ready()
    return out


def test_idle_group_exchanges_repetitions_and_no_ready() -> None:
    group, leader = idle()
    sent = beats(leader)
    assert [message.target for message in only(sent, Heartbeat)] == [N1, N2]
    assert beats(leader) == sent
    for message in sent:
        follower = group[message.target]
        assert not follower.raw.step(message)
        [response] = follower.raw.take_repeats()
        assert not follower.raw.has_ready()
        assert not leader.raw.step(response)
        assert not leader.raw.has_ready()


def test_repetitions_keep_followers_and_leader_for_ever() -> None:
    group, leader = idle()
    group.tick(20 * CONFIG.election_ticks_max)
    assert [group[node].role for node in NODES[:3]] == [Role.LEADER, Role.FOLLOWER, Role.FOLLOWER]
    assert leader.term == 1
    rounds = {message.round for message in only(group.delivered, Heartbeat)}
    assert 1 < len(rounds) < len(only(group.delivered, Heartbeat)) / 4, "log time travels with a new round at times"


def test_without_repetitions_followers_campaign_and_the_leader_steps_down() -> None:
    group, leader = idle()
    group.drop = lambda _: True
    group.tick(2 * CONFIG.election_ticks_max)
    assert leader.role is not Role.LEADER
    assert N0 not in {group[node].raw.status().leader_id for node in NODES[:3]}


def test_repetition_without_taking_it_is_part_of_the_next_ready() -> None:
    _, leader = idle()
    assert [message.target for message in only(leader.tick(CONFIG.heartbeat_ticks), Heartbeat)] == [N1, N2]


def newest_round(group: Group) -> int:
    return max(message.round for message in only(group.delivered, Heartbeat))


def test_read_starts_a_new_round() -> None:
    group, leader = idle()
    group.deliver(beats(leader))
    before = newest_round(group)
    leader.raw.read_index(7)
    group.deliver()
    assert newest_round(group) == before + 1
    assert [read.request_id for ready in leader.readys for read in ready.reads] == [7]


def test_commit_index_travels_with_a_new_round_and_is_repeated_then() -> None:
    group, leader = idle()
    leader.propose("y")
    group.deliver()
    group.tick(2 * CONFIG.heartbeat_ticks, N0)
    assert {group[node].commit_index for node in NODES[:3]} == {leader.commit_index}
    assert {message.commit_index for message in only(beats(leader), Heartbeat)} == {leader.commit_index}


def test_member_that_lacks_entries_gets_new_rounds_and_the_others_repetitions() -> None:
    group, leader = idle()
    group.drop = lambda message: message.target == N2
    leader.propose("y")
    group.deliver()
    group.tick(3 * CONFIG.heartbeat_ticks, N0)
    sent = only(leader.tick(CONFIG.heartbeat_ticks), Heartbeat)
    rounds = {message.target: message.round for message in sent}
    assert rounds[N1] == newest_round(group) < rounds[N2]


def test_response_that_changes_is_processed_in_full() -> None:
    _, leader = idle()
    last = only(beats(leader), Heartbeat)[0]
    response = HeartbeatResponse(sender=N1, target=N0, term=last.term, round=last.round, last_index=last.commit_index)
    assert not leader.raw.step(response)
    assert leader.raw.step(replace(response, condition=Condition.DISK_FULL))
    assert leader.raw.status().progress[N1].condition is Condition.DISK_FULL


def test_follower_of_another_term_answers_in_full() -> None:
    group, leader = idle()
    last = only(beats(leader), Heartbeat)[0]
    follower = group[N1]
    follower.step(replace(vote_request(leader.term + 1, sender=N2, transfer=True), target=N1))
    sent = follower.step(last)
    assert [message.term for message in sent] == [leader.term + 1]
    assert follower.raw.status().leader_id is None


def test_follower_without_leader_learns_it_from_a_repetition() -> None:
    group, leader = idle()
    last = only(beats(leader), Heartbeat)[0]
    follower = group[N1]
    follower.raw.report_unreachable(N0)
    assert follower.raw.status().leader_id is None
    follower.step(last)
    assert follower.raw.status().leader_id == N0


def test_repetition_is_answered_with_the_end_of_now() -> None:
    group, leader = idle()
    last = only(beats(leader), Heartbeat)[0]
    leader.propose("y")
    group.deliver()
    [response] = only(group[N1].step(last), HeartbeatResponse)
    assert response.last_index == last.commit_index + 1


def test_repeated_response_of_an_earlier_term_counts_no_longer() -> None:
    _, leader = idle()
    last = only(beats(leader), Heartbeat)[0]
    response = HeartbeatResponse(sender=N1, target=N0, term=last.term, round=last.round, last_index=last.commit_index)
    leader.step(heartbeat(leader.term + 1, sender=N2))
    assert leader.role is Role.FOLLOWER
    assert leader.step(response) == []
    assert leader.role is Role.FOLLOWER

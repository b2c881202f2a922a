"""The Ready contract: what waits for the disk, what does not, and what a late confirmation is worth."""

from __future__ import annotations

import pytest

from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    InvariantViolationError,
    NotLeaderError,
    ProtocolError,
    TransferringError,
)
from dledger_core.ids import NO_INDEX, NO_TERM, Index, NodeId, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Batch,
    Heartbeat,
    HeartbeatResponse,
    RequestVote,
    RequestVoteResponse,
    Role,
)
from tests.support.group import CONFIG, N0, N1, N2, NODES, Group, Member, only
from tests.support.memory_store import MemoryStore, log_of


def append(*batches: Batch, prev: tuple[int, int], term: int, commit_index: int = NO_INDEX) -> AppendEntries:
    return AppendEntries(
        sender=N1,
        target=N0,
        term=Term(term),
        prev_index=Index(prev[0]),
        prev_term=Term(prev[1]),
        commit_index=Index(commit_index),
        batches=batches,
    )


def batch(first_index: int, term: int, count: int = 1) -> Batch:
    return Batch(Index(first_index), count, Term(term), 10, f"{term}.{first_index}")


def ack(sender: NodeId, match_index: int, term: int = 1) -> AppendEntriesResponse:
    return AppendEntriesResponse(
        sender=sender,
        target=N0,
        term=Term(term),
        accepted=True,
        match_index=Index(match_index),
        hint_term=NO_TERM,
        hint_first_index=Index(0),
        last_index=Index(match_index),
    )


def test_a_fresh_node_has_nothing_to_do() -> None:
    assert not Member().raw.has_ready()


def test_readys_are_numbered_from_one_without_gaps() -> None:
    group = Group(3)
    leader = group.elect(N0)
    for _ in range(5):
        leader.propose("x", 1, 1)
        group.deliver()
    assert [ready.number for ready in leader.readys] == list(range(1, len(leader.readys) + 1))


def test_a_vote_waits_for_the_disk() -> None:
    member = Member()
    request = RequestVote(
        sender=N1, target=N0, term=Term(1), last_index=NO_INDEX, last_term=NO_TERM, pre=False, transfer=False
    )
    member.raw.step(request)
    assert member.take() == []
    assert member.unpersisted[0].hard_state == member.raw._emitted_hard_state
    (answer,) = only(member.persist(), RequestVoteResponse)
    assert answer.granted


def test_an_acknowledgement_waits_for_the_disk_also_when_the_entries_came_before() -> None:
    member = Member(term=1)
    message = append(batch(0, 1), prev=(-1, NO_TERM), term=1)
    member.raw.step(message)
    assert only(member.take(), AppendEntriesResponse) == []
    member.raw.step(message)
    assert only(member.take(), AppendEntriesResponse) == []
    assert [message.match_index for message in only(member.persist(1), AppendEntriesResponse)] == [0]


def test_an_answer_that_depends_only_on_a_durable_term_does_not_wait() -> None:
    member = Member(term=1)
    beat = Heartbeat(sender=N1, target=N0, term=Term(1), commit_index=NO_INDEX, round=1)
    member.raw.step(beat)
    assert len(only(member.take(), HeartbeatResponse)) == 1
    member.raw.step(Heartbeat(sender=N1, target=N0, term=Term(2), commit_index=NO_INDEX, round=1))
    assert only(member.take(), HeartbeatResponse) == []
    assert len(only(member.persist(), HeartbeatResponse)) == 1


def test_vote_requests_wait_and_pre_vote_requests_do_not() -> None:
    member = Member()
    member.raw.campaign()
    assert [message.pre for message in only(member.take(), RequestVote)] == [True, True]
    member.raw.step(RequestVoteResponse(sender=N1, target=N0, term=Term(1), granted=True, pre=True))
    assert member.take() == []
    assert [message.pre for message in only(member.persist(), RequestVote)] == [False, False]


def test_a_leaders_appends_leave_before_its_own_disk() -> None:
    leader = Group(3).elect(N0)
    leader.propose("x", 1, 1)
    assert len(only(leader.take(), AppendEntries)) == 2
    assert leader.raw.status().durable_index == 0


def test_the_followers_may_commit_before_the_leaders_disk() -> None:
    leader = Group(3).elect(N0)
    leader.propose("x", 1, 1)
    leader.take()
    leader.raw.step(ack(N1, 1))
    assert leader.commit_index == 0, "one follower and an unfinished disk are no majority"
    leader.raw.step(ack(N2, 1))
    assert leader.commit_index == 1


def test_the_leader_counts_itself_with_the_ready_that_held_the_entries() -> None:
    leader = Group(3).elect(N0)
    leader.propose("x", 1, 1)
    leader.take()
    leader.propose("y", 1, 1)
    leader.take()
    leader.raw.step(ack(N1, 2))
    leader.persist(1)
    assert leader.commit_index == 1
    leader.persist(1)
    assert leader.commit_index == 2


def test_an_acknowledgement_of_an_older_term_does_not_count() -> None:
    """The member may have cut since what it acknowledged to an earlier leader, even to this one."""
    leader = Group(3).elect(N0)
    leader.raw.step_down()
    leader.tick(CONFIG.election_ticks_max)
    leader.step(RequestVoteResponse(sender=N1, target=N0, term=Term(2), granted=True, pre=True))
    leader.step(RequestVoteResponse(sender=N1, target=N0, term=Term(2), granted=True, pre=False))
    assert (leader.role, leader.term) == (Role.LEADER, 2)
    leader.step(ack(N1, 1, term=1))
    assert leader.commit_index == 0
    leader.step(ack(N1, 1, term=2))
    assert leader.commit_index == 1


def test_one_confirmation_covers_all_readys_before_it() -> None:
    leader = Group(3).elect(N0)
    for _ in range(3):
        leader.propose("x", 1, 1)
        leader.take()
    leader.raw.advance(leader.readys[-1].number)
    assert leader.raw.status().durable_index == 3


def test_a_late_confirmation_does_not_vouch_for_what_was_cut() -> None:
    member = Member(store=MemoryStore(log_of(1)), term=2)
    member.raw.step(append(batch(1, 2, 5), prev=(0, 1), term=2))
    member.take()
    member.raw.step(append(batch(1, 3, 2), prev=(0, 1), term=3))
    member.take()
    member.persist(1)
    assert member.raw.status().durable_index == 0
    member.persist(1)
    assert member.raw.status().durable_index == 2


def test_a_hard_state_is_handed_out_only_when_it_changed() -> None:
    group = Group(3)
    leader = group.elect(N0)
    leader.readys.clear()
    leader.propose("x", 1, 1)
    group.deliver()
    assert all(ready.hard_state is None for ready in leader.readys)


def test_what_steps_down_before_it_was_handed_out_is_never_sent() -> None:
    leader = Group(3).elect(N0)
    leader.propose("x", 1, 1)
    leader.raw.step(append(batch(1, 5), prev=(0, 1), term=5))
    messages = leader.run()
    assert only(messages, AppendEntries) == []
    assert leader.log_terms() == [1, 5]
    assert "x" not in [held.payload for held in leader.store.batches]


def test_committed_ranges_are_consecutive() -> None:
    group = Group(3)
    leader = group.elect(N0)
    for _ in range(10):
        leader.propose("x", 3, 1)
        group.deliver()
    group.tick(5)
    for member in group.members.values():
        ranges = [ready.committed for ready in member.readys if ready.committed]
        assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == 31


def test_an_unknown_number_is_a_programmers_error() -> None:
    member = Member()
    with pytest.raises(InvariantViolationError):
        member.raw.advance(1)


def test_recovered_state_must_fit() -> None:
    with pytest.raises(InvariantViolationError):
        Member(store=MemoryStore(log_of(1)), commit_index=1)
    with pytest.raises(InvariantViolationError):
        Member(store=MemoryStore(log_of(1, 5)), term=4)


# Every error leaves the state unchanged


def snapshot(member: Member) -> tuple[object, ...]:
    state = member.raw._state
    return member.raw.status(), member.raw.has_ready(), state.voted_for, state.election_elapsed, dict(state.votes)


def follower() -> Member:
    member = Member(store=MemoryStore(log_of(1, 1)), term=2)
    member.step(Heartbeat(sender=N1, target=N0, term=Term(2), commit_index=Index(0), round=1))
    return member


def leader() -> Member:
    return Group(3).elect(N0)


def transferring() -> Member:
    member = leader()
    member.propose("x", 1, 1)
    member.run()
    member.raw.transfer_leadership(N1)
    member.run()
    return member


@pytest.mark.parametrize(
    ("make", "call", "error"),
    [
        pytest.param(follower, lambda m: m.propose("x", 1, 1), NotLeaderError, id="propose on a follower"),
        pytest.param(follower, lambda m: m.raw.read_index(1), NotLeaderError, id="read on a follower"),
        pytest.param(follower, lambda m: m.raw.transfer_leadership(N1), NotLeaderError, id="transfer on a follower"),
        pytest.param(leader, lambda m: m.propose("x", 0, 1), BadRequestError, id="an empty batch"),
        pytest.param(leader, lambda m: m.raw.transfer_leadership(NodeId("nx")), BadRequestError, id="to a stranger"),
        pytest.param(transferring, lambda m: m.propose("x", 1, 1), TransferringError, id="propose in a transfer"),
        pytest.param(
            follower,
            lambda m: m.raw.step(append(batch(3, 2), prev=(1, 1), term=9)),
            ProtocolError,
            id="batches with a gap",
        ),
        pytest.param(
            follower,
            lambda m: m.raw.step(append(batch(2, 5), prev=(1, 1), term=3)),
            ProtocolError,
            id="a batch of a later term than its message",
        ),
        pytest.param(
            follower,
            lambda m: m.raw.step(append(batch(2, 1), batch(3, 0), prev=(1, 1), term=9)),
            ProtocolError,
            id="falling terms",
        ),
        pytest.param(
            follower, lambda m: m.raw.step(append(prev=(-5, -1), term=9, commit_index=9)), ProtocolError, id="no place"
        ),
        pytest.param(
            follower,
            lambda m: m.raw.step(Heartbeat(sender=N1, target=N2, term=Term(9), commit_index=Index(0), round=1)),
            ProtocolError,
            id="for another node",
        ),
    ],
)
def test_a_call_that_raises_leaves_the_state_unchanged(make, call, error: type[DLedgerError]) -> None:
    member = make()
    before = snapshot(member)
    with pytest.raises(error):
        call(member)
    assert snapshot(member) == before


def test_not_leader_names_the_leader() -> None:
    with pytest.raises(NotLeaderError) as caught:
        follower().propose("x", 1, 1)
    assert caught.value.leader_id == N1


def test_two_leaders_in_one_term_stop_the_replica() -> None:
    member = leader()
    with pytest.raises(InvariantViolationError):
        member.raw.step(append(prev=(-1, NO_TERM), term=member.term))


def test_step_down_keeps_the_term() -> None:
    member = leader()
    member.raw.step_down()
    member.run()
    assert (member.role, member.term, member.raw.status().leader_id) == (Role.FOLLOWER, 1, None)
    assert CONFIG.election_ticks_min <= member.raw._state.election_timeout
    assert set(member.raw._state.progress) == set()
    assert {message.target for message in only(member.tick(CONFIG.election_ticks_max), RequestVote)} == set(NODES[1:3])

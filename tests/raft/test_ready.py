"""The Ready contract: messages before and after the disk, late confirmations, reads; and calls that raise."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    InvariantViolationError,
    NotLeaderError,
    ProtocolError,
    TransferringError,
)
from dledger_core.ids import NO_TERM, Index, NodeId, Term
from dledger_core.raft import (
    AppendEntries,
    AppendEntriesResponse,
    Heartbeat,
    HeartbeatResponse,
    RequestVote,
    RequestVoteResponse,
    Role,
)
from tests.raft.messages import ack, append, batch, heartbeat, heartbeat_response, leader, one, vote, vote_request
from tests.support.group import CONFIG, N0, N1, N2, N3, Group, Member, only
from tests.support.memory_store import MemoryStore, log_of


def led() -> Member:
    return Group(3).elect(N0)


def reads(member: Member) -> list[tuple[int, int | None]]:
    return [(read.request_id, read.index) for ready in member.readys for read in ready.reads]


# --- before and after the disk ------------------------------------------------------------------------------------


def test_readys_are_numbered_and_committed_ranges_are_consecutive() -> None:
    group = Group(3)
    leader = group.elect(N0)
    for _ in range(10):
        leader.propose("x", 3)
        group.deliver()
    group.tick(5)
    assert [ready.number for ready in leader.readys] == list(range(1, len(leader.readys) + 1))
    for member in group.members.values():
        ranges = [ready.committed for ready in member.readys if ready.committed]
        assert [start for start, _ in ranges] == [0, *(end for _, end in ranges[:-1])]
        assert ranges[-1][1] == 31


@pytest.mark.parametrize(
    ("message", "kind"),
    [
        (vote_request(1), RequestVoteResponse),
        (append(batch(0, 1), prev=(-1, NO_TERM), term=1), AppendEntriesResponse),
        (heartbeat(2), HeartbeatResponse),
    ],
)
def test_response_waits_for_the_disk_it_depends_on(message: Heartbeat, kind: type) -> None:
    member = Member()
    member.raw.step(message)
    assert member.take() == []
    assert member.unpersisted[0].must_persist
    assert len(only(member.persist(), kind)) == 1


def test_response_that_depends_on_a_durable_term_only_does_not_wait() -> None:
    member = Member(term=1)
    member.raw.step(heartbeat(1))
    assert len(only(member.take(), HeartbeatResponse)) == 1


def test_repeated_append_is_acknowledged_after_the_first_one_is_durable() -> None:
    member = Member(term=1)
    for _ in range(2):
        member.raw.step(append(batch(0, 1), prev=(-1, NO_TERM), term=1))
        assert only(member.take(), AppendEntriesResponse) == []
    assert one(member.persist(1), AppendEntriesResponse).match_index == 0


def test_vote_requests_wait_for_the_disk_and_pre_vote_requests_do_not() -> None:
    member = Member()
    member.raw.campaign()
    assert [message.pre for message in only(member.take(), RequestVote)] == [True, True]
    member.raw.step(vote(1, pre=True))
    assert member.take() == []
    assert [message.pre for message in only(member.persist(), RequestVote)] == [False, False]


def test_appends_leave_and_commit_before_the_leaders_disk() -> None:
    leader = led()
    leader.propose("x")
    assert len(only(leader.take(), AppendEntries)) == 2
    assert leader.raw.durable_index == 0
    leader.raw.step(ack(N1, 1))
    assert leader.commit_index == 0, "one follower is not a majority"
    leader.raw.step(ack(N2, 1))
    assert leader.commit_index == 1


def test_leader_counts_itself_with_the_ready_that_contained_the_entries() -> None:
    leader = led()
    for _ in range(2):
        leader.propose("x")
        leader.take()
    leader.raw.step(ack(N1, 2))
    for commit_index in (1, 2):
        leader.persist(1)
        assert leader.commit_index == commit_index


def test_acknowledgement_of_an_earlier_term_does_not_count() -> None:
    """The member may have truncated the entries since, even those of this leader."""
    leader = led()
    leader.step(vote(2, granted=False))
    leader.tick(CONFIG.election_ticks_max)
    leader.step(vote(3, pre=True))
    leader.step(vote(3))
    assert (leader.role, leader.term) == (Role.LEADER, 3)
    leader.step(ack(N1, 1, term=1))
    assert leader.commit_index == 0
    leader.step(ack(N1, 1, term=3))
    assert leader.commit_index == 1


def test_one_confirmation_covers_all_earlier_readys() -> None:
    leader = led()
    for _ in range(3):
        leader.propose("x")
        leader.take()
    leader.raw.advance(leader.readys[-1].number)
    assert leader.raw.durable_index == 3


def test_ready_has_a_hard_state_only_after_a_change() -> None:
    group = Group(3)
    leader = group.elect(N0)
    leader.readys.clear()
    leader.propose("x")
    group.deliver()
    assert all(ready.hard_state is None for ready in leader.readys)


def test_proposal_of_a_leader_deposed_before_its_ready_is_never_sent() -> None:
    leader = led()
    leader.propose("x")
    leader.raw.step(append(batch(1, 5), prev=(0, 1), term=5))
    assert only(leader.run(), AppendEntries) == []
    assert leader.log_terms() == [1, 5]
    assert "x" not in [kept.payload for kept in leader.store.batches]


# --- ReadIndex ----------------------------------------------------------------------------------------------------


def test_read_needs_an_echo_of_a_later_round() -> None:
    leader = led()
    leader.raw.read_index(7)
    (number,) = {message.round for message in only(leader.take(), Heartbeat)}

    def echo(round_: int) -> None:
        fields = {"sender": N1, "target": N0, "term": Term(1), "round": round_, "last_index": Index(0)}
        leader.step(HeartbeatResponse(**fields))

    echo(number - 1)
    assert reads(leader) == []
    echo(number)
    assert reads(leader) == [(7, 0)]


def test_read_is_not_confirmed_by_a_learner() -> None:
    member = leader(Member(voters=[N0, N1, N3], learners=[N2]))
    member.step(ack(N1, 0))
    member.raw.read_index(7)
    (number,) = {message.round for message in only(member.run(), Heartbeat)}
    for sender, found in ((N2, []), (N3, [(7, 0)])):
        fields = {"sender": sender, "target": N0, "term": Term(1), "round": number, "last_index": Index(0)}
        member.step(HeartbeatResponse(**fields))
        assert reads(member) == found


def test_read_waits_for_the_first_commit_of_the_term() -> None:
    group = Group(3)
    group.drop = lambda message: isinstance(message, AppendEntries)
    leader = group.elect(N0)
    leader.raw.read_index(7)
    group.tick(3 * CONFIG.heartbeat_ticks)
    assert reads(leader) == []
    group.drop = lambda message: False
    group.tick(3 * CONFIG.heartbeat_ticks)
    assert reads(leader) == [(7, 0)]


def test_reads_of_a_deposed_leader_fail() -> None:
    group = Group(3)
    leader = group.elect(N0)
    group.drop = lambda message: N0 in (message.target, message.sender)
    leader.raw.read_index(7)
    group.deliver()
    leader.raw.read_index(8)
    group.elect(N1).propose("new")
    group.deliver()
    assert reads(leader) == []
    group.tick(3 * CONFIG.election_ticks_max)
    assert sorted(reads(leader)) == [(7, None), (8, None)]


def test_reads_share_a_round_and_a_lost_round_is_repeated() -> None:
    group = Group(3)
    leader = group.elect(N0)
    rounds: set[int] = set()
    group.drop = lambda message: isinstance(message, Heartbeat)
    for request in range(100):
        leader.raw.read_index(request)
        rounds |= {message.round for message in only(leader.run(), Heartbeat)}
    assert len(rounds) == 1
    group.drop = lambda message: False
    group.tick(CONFIG.heartbeat_ticks)
    assert reads(leader) == [(request, 0) for request in range(100)]


def test_read_of_a_sole_voter_needs_no_round_trip() -> None:
    member = Member(voters=[N0])
    member.tick(1)
    member.raw.read_index(7)
    member.run()
    assert reads(member) == [(7, 0)]


# --- calls that raise ---------------------------------------------------------------------------------------------


def follower() -> Member:
    member = Member(store=MemoryStore(log_of(1, 1)), term=2)
    member.step(heartbeat(2, commit_index=0))
    return member


def transferring() -> Member:
    member = led()
    member.propose("x")
    member.run()
    member.raw.transfer_leadership(N1)
    member.run()
    return member


@pytest.mark.parametrize(
    ("make", "call", "error"),
    [
        pytest.param(follower, lambda m: m.propose("x"), NotLeaderError, id="propose on a follower"),
        pytest.param(follower, lambda m: m.raw.read_index(1), NotLeaderError, id="read on a follower"),
        pytest.param(follower, lambda m: m.raw.transfer_leadership(N1), NotLeaderError, id="transfer on a follower"),
        pytest.param(led, lambda m: m.propose("x", 0), BadRequestError, id="empty batch"),
        pytest.param(led, lambda m: m.raw.transfer_leadership(NodeId("nx")), BadRequestError, id="to a stranger"),
        pytest.param(transferring, lambda m: m.propose("x"), TransferringError, id="propose in a transfer"),
        *(
            pytest.param(follower, lambda m, message=message: m.raw.step(message), ProtocolError, id=name)
            for name, message in {
                "batches with a gap": append(batch(3, 2), prev=(1, 1), term=9),
                "a batch of a later term": append(batch(2, 5), prev=(1, 1), term=3),
                "falling terms": append(batch(2, 1), batch(3, 0), prev=(1, 1), term=9),
                "impossible prev_index": append(prev=(-5, -1), term=9, commit_index=9),
                "for another member": heartbeat(9, target=N2),
                "from itself": heartbeat(9, sender=N0),
            }.items()
        ),
    ],
)
def test_call_that_raises_leaves_the_state_unchanged(make, call, error: type[DLedgerError]) -> None:
    member = make()

    def state() -> tuple[object, ...]:
        return member.raw.status(), member.raw.pointers(), member.raw.has_ready(), member.store.hard_state

    before = state()
    with pytest.raises(error):
        call(member)
    assert state() == before


def test_response_to_a_heartbeat_of_an_earlier_term_confirms_no_read() -> None:
    """Its sender leads again, in the term of the response, and rounds start again in each term."""
    follower_of_term_2 = Member(N1, term=2)
    late = replace(heartbeat(1, sender=N0, target=N1), round=25)
    response = one(follower_of_term_2.step(late), HeartbeatResponse)
    again = leader(Member(term=1))
    again.step(ack(N1, again.raw.last_index, again.term))
    assert (again.term, response.term) == (2, 2)
    again.raw.read_index(7)
    again.step(response)
    assert reads(again) == []
    newest = max(beat.round for ready in again.readys for beat in only(list(ready.messages), Heartbeat))
    again.step(heartbeat_response(newest, term=2, last_index=0))
    assert reads(again) == [(7, 0)]


def test_not_leader_error_names_the_leader() -> None:
    with pytest.raises(NotLeaderError) as caught:
        follower().propose("x")
    assert caught.value.leader_id == N1


@pytest.mark.parametrize(
    "broken",
    [
        lambda: Member().raw.advance(1),
        lambda: Member(store=MemoryStore(log_of(1)), commit_index=1),
        lambda: Member(store=MemoryStore(log_of(1, 5)), term=4),
    ],
    ids=["advance without a Ready", "commit past the log", "log above the term"],
)
def test_broken_invariant_stops_the_member(broken) -> None:
    with pytest.raises(InvariantViolationError):
        broken()

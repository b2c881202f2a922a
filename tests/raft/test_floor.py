"""A floor: which logs a member elects that may have lost entries it acknowledged, and when it ends."""

from __future__ import annotations

import itertools

import pytest

from dledger_core.ids import Index, Term
from dledger_core.raft import Floor, RequestVote, RequestVoteResponse, Role
from dledger_core.raft.floor import higher
from tests.raft.messages import append, batch, one, vote_request
from tests.support.group import CONFIG, N0, N1, N2, Group, Member, only
from tests.support.memory_store import MemoryStore, log_of

WAIT = CONFIG.election_ticks_max
FLOORS = (None, *(Floor(Term(term), index) for term in (1, 2) for index in (Index(0), Index(1), Index(7), None)))


def member(*log: int, term: int, floor: Floor | None = None, start_ticks: int = 0) -> Member:
    found = Member(store=MemoryStore(log_of(*log)), term=term, floor=floor, start_ticks=start_ticks)
    found.run()
    return found


def grants(voter: Member, term: int, last: tuple[int, int], *, pre: bool = False) -> bool:
    return one(voter.step(vote_request(term, last=last, pre=pre)), RequestVoteResponse).granted


@pytest.mark.parametrize(
    ("last", "admitted"), [((2, 9), False), ((3, 4), False), ((3, 5), True), ((3, 6), True), ((4, 0), True)]
)
def test_floor_admits_logs_that_end_at_or_above_it(last: tuple[int, int], admitted: bool) -> None:
    assert Floor(Term(3), Index(5)).admits(Term(last[0]), Index(last[1])) is admitted


@pytest.mark.parametrize(("last", "admitted"), [((3, 1 << 60), False), ((4, 0), True)])
def test_floor_without_index_admits_logs_of_later_terms_only(last: tuple[int, int], admitted: bool) -> None:
    assert Floor(Term(3)).admits(Term(last[0]), Index(last[1])) is admitted


@pytest.mark.parametrize(("one_floor", "other"), list(itertools.product(FLOORS, repeat=2)))
def test_higher_floor_admits_what_both_admit(one_floor: Floor | None, other: Floor | None) -> None:
    found = higher(one_floor, other)
    assert found == higher(other, one_floor)
    ends = [(Term(term), Index(index)) for term in range(4) for index in range(-1, 9)]
    for end in ends:
        both = all(floor is None or floor.admits(*end) for floor in (one_floor, other))
        assert (found is None or found.admits(*end)) is both


def test_vote_needs_floor_and_own_end() -> None:
    voter = member(1, 2, term=5, floor=Floor(Term(3), Index(1)))
    assert not grants(voter, 6, (2, 9))
    assert not grants(voter, 7, (3, 0))
    assert not grants(voter, 7, (3, 0), pre=True)
    assert grants(voter, 8, (3, 1))


def test_member_below_its_floor_does_not_campaign() -> None:
    follower = member(1, 2, term=5, floor=Floor(Term(3), Index(1)))
    assert follower.tick(3 * WAIT) == []
    follower.raw.campaign()
    assert (follower.run(), follower.role, follower.raw.status().is_recovering) == ([], Role.FOLLOWER, False)


def test_floor_is_removed_when_durable_end_reaches_it() -> None:
    follower = member(1, 2, term=5, floor=Floor(Term(5), Index(3)))
    follower.step(append(batch(2, 5), prev=(1, 2), term=5))
    assert follower.tick(3 * WAIT) == []
    follower.step(append(batch(3, 5), prev=(2, 5), term=5))
    assert only(follower.tick(3 * WAIT), RequestVote)
    assert [ready.floor for ready in follower.readys if ready.floor_changed] == [None]


def test_raised_floor_is_written_first_and_deposes_no_leader_of_a_later_term() -> None:
    group = Group(3)
    leader = group.elect(N0)
    term = leader.term
    leader.raw.raise_floor(Floor(Term(term - 1), Index(7)))
    leader.run()
    assert leader.role is Role.LEADER
    leader.raw.raise_floor(Floor(Term(term)))
    ready = leader.raw.ready()
    assert (ready.floor, ready.must_persist, leader.term, leader.role) == (
        Floor(Term(term)), True, term + 1, Role.FOLLOWER
    )  # fmt: skip


@pytest.mark.parametrize("role", [Role.PRE_CANDIDATE, Role.CANDIDATE])
def test_candidate_whose_floor_rises_above_its_log_is_not_elected(role: Role) -> None:
    group = Group(3)
    group.drop = lambda message: role is Role.PRE_CANDIDATE or not getattr(message, "pre", False)
    candidate = group[N0]
    candidate.raw.campaign()
    group.deliver()
    assert candidate.role is role
    candidate.raw.raise_floor(Floor(candidate.term, Index(7)))
    group.drop = lambda message: False
    group.deliver()
    assert candidate.role is Role.FOLLOWER
    group.tick(3 * WAIT)
    assert candidate.role is Role.FOLLOWER


def test_second_loss_raises_floor_and_forgets_how_far_the_log_had_come() -> None:
    """A member that recovers above term 5 follows the leader of term 7, and loses its end again."""
    lost = member(1, 2, term=5, floor=Floor(Term(5)))
    lost.raw.step(append(prev=(1, 2), term=7, last_index=3))
    lost.raw.raise_floor(Floor(Term(7)))
    lost.run()
    assert (lost.raw.status().is_recovering, lost.term) == (True, 8)
    lost.step(append(batch(2, 6), prev=(1, 2), term=8, last_index=5))
    assert lost.raw.status().is_recovering, "an entry of term 6 ends a floor of term 5 only"
    lost.raw.raise_floor(Floor(Term(3)))
    assert lost.raw.status().is_recovering, "nothing lowers a floor"
    lost.step(append(batch(3, 8), prev=(2, 6), term=8))
    assert not lost.raw.status().is_recovering


@pytest.mark.parametrize("pre", [True, False])
def test_voter_that_starts_waits_for_all_voters_or_for_the_longest_timeout(pre: bool) -> None:
    voter = member(1, term=5, start_ticks=WAIT)
    assert not grants(voter, 6, (9, 9), pre=pre)
    voter.raw.report_attached(N1)
    voter.tick(2)
    assert not grants(voter, 7, (9, 9), pre=pre)
    voter.raw.report_attached(N2)
    assert not grants(voter, 8, (9, 9), pre=pre), "the other one may still object"
    voter.tick(2)
    assert grants(voter, 9, (9, 9), pre=pre)
    late = member(1, term=5, start_ticks=WAIT)
    late.tick(WAIT - 1)
    assert not grants(late, 6, (9, 9), pre=pre)
    late.tick(1)
    assert grants(late, 7, (9, 9), pre=pre)


def test_voter_that_starts_does_not_campaign() -> None:
    voter = member(1, term=5, start_ticks=WAIT)
    assert voter.tick(WAIT - 1) == []
    assert only(voter.tick(WAIT), RequestVote)


def test_sole_voter_does_not_wait_for_others() -> None:
    alone = Member(N0, voters=(N0,), store=MemoryStore(log_of(1)), start_ticks=WAIT)
    alone.tick(1)
    assert alone.role is Role.LEADER

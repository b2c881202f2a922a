"""A recovering voter votes again only with a committed entry of a later term, or a later leader's complete log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger_core.ids import NO_INDEX, NodeId, Term
from dledger_core.raft import Batch, Floor, RequestVote, RequestVoteResponse, Role, TimeoutNow
from tests.raft.messages import append, batch, config, heartbeat, one, vote_request
from tests.support.group import CONFIG, N0, N1, N2, N3, N4, NODES, Group, Member, only
from tests.support.memory_store import MemoryStore, log_of


def recovering(above: int = 5, *, voters: tuple[NodeId, ...] = (N0, N1, N2), log: tuple[int, ...] = (1, 2)) -> Member:
    member = Member(store=MemoryStore(log_of(*log)), term=above, voters=voters, floor=Floor(Term(above)))
    member.run()
    return member


def is_recovering(member: Member) -> bool:
    """Whether it is; a Ready has shown the end, and reading the status changes nothing."""
    found = member.raw.status().is_recovering
    assert found == member.raw.status().is_recovering
    assert not member.raw.has_ready()
    assert any(ready.floor_changed and ready.floor is None for ready in member.readys) is not found
    return found


def next_entry(term: int, commit_index: int, **more: int) -> object:
    """The leader's entry after the member's two."""
    return append(batch(2, term), prev=(1, 2), term=term, commit_index=commit_index, **more)


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("transfer", [True, False])
def test_recovering_voter_rejects_every_candidate_of_its_term(pre: bool, transfer: bool) -> None:
    member = recovering()
    request = vote_request(7, last=(5, 99), pre=pre, transfer=transfer)
    assert not one(member.step(request), RequestVoteResponse).granted
    assert is_recovering(member)


def test_recovering_voter_never_campaigns() -> None:
    member = recovering()
    assert member.tick(5 * CONFIG.election_ticks_max) == []
    member.raw.campaign()
    assert member.run() == []
    member.step(heartbeat(7))
    assert only(member.step(TimeoutNow(sender=N1, target=N0, term=Term(7))), RequestVote) == []
    assert member.role is Role.FOLLOWER


def test_recovering_voter_leaves_the_term_that_it_may_have_forgotten() -> None:
    member = recovering(above=5)
    assert (member.term, member.store.hard_state.voted_for) == (6, N0), "a disk set back may have voted in term 6 too"
    member.step(next_entry(5, 2))
    assert (member.raw.last_index, member.commit_index, is_recovering(member)) == (1, NO_INDEX, True)


@pytest.mark.parametrize(
    ("message", "recovers"),
    [
        pytest.param(next_entry(6, 1), True, id="an entry of the new term is here"),
        pytest.param(next_entry(6, 2), True, id="an entry of the new term is committed"),
        pytest.param(next_entry(7, 2), True, id="an entry of a later term is committed"),
        pytest.param(append(prev=(1, 2), term=6, last_index=1), True, id="the leader's log ends here"),
        pytest.param(append(prev=(1, 2), term=6, last_index=2), False, id="the leader's log continues"),
        pytest.param(append(prev=(1, 2), term=6), False, id="the leader does not report its end"),
    ],
)
def test_recovering_voter_votes_again_with_a_later_leaders_entries(message: object, recovers: bool) -> None:
    member = recovering(above=5)
    member.step(message)
    assert is_recovering(member) is not recovers
    member.tick(CONFIG.election_ticks_max)
    assert (member.role is Role.PRE_CANDIDATE) is recovers


@pytest.mark.parametrize("message", [next_entry(6, 2), next_entry(6, 1, last_index=2)], ids=["committed", "complete"])
def test_recovering_voter_votes_again_once_the_entries_are_durable(message: object) -> None:
    member = recovering(above=5)
    member.raw.step(message)
    member.take()
    assert is_recovering(member)
    member.persist()
    member.take()
    assert not is_recovering(member)


def test_recovered_voter_is_shown_by_the_first_ready_after_a_restart() -> None:
    store = MemoryStore(log_of(1, 2, 6), hard_state=None)
    member = Member(store=store, term=6, commit_index=2, floor=Floor(Term(5)))
    member.take()
    assert not is_recovering(member)


def test_idle_group_of_profile_a_ends_the_recovery() -> None:
    options = config(noop_on_election=False)
    lost = Member(N0, store=MemoryStore(log_of(1, 2)), term=5, floor=Floor(Term(5)), config=options)
    others = [Member(n, store=MemoryStore(log_of(1, 2, 5)), config=options, seed=s) for s, n in [(1, N1), (2, N2)]]
    group = Group([lost, *others])
    group.tick(6 * CONFIG.election_ticks_max)
    assert [member.log_terms() for member in group.members.values()] == [[1, 2, 5]] * 3
    assert (lost.commit_index, is_recovering(lost)) == (NO_INDEX, False)
    (leader,) = [member for member in others if member.role is Role.LEADER]
    group.drop = lambda message: leader.node_id in (message.sender, message.target)
    group.tick(6 * CONFIG.election_ticks_max)
    assert any(member.role is Role.LEADER for member in group.members.values() if member is not leader)


def test_recovering_voter_acknowledges_entries() -> None:
    leader = Member(N1, store=MemoryStore(log_of(1, 2, 5)), term=6)
    group = Group([recovering(above=5), leader, Member(N2, store=MemoryStore(log_of(1)), term=6)])
    group.elect(N1)
    group.drop = lambda message: N2 in (message.sender, message.target)
    leader.propose("x")
    group.deliver()
    assert leader.commit_index == leader.raw.last_index == 4
    group.tick(CONFIG.heartbeat_ticks)
    assert not is_recovering(group[N0])


def test_recovering_voter_cannot_elect_a_leader_that_lacks_committed_entries() -> None:
    """Entry 2 was committed by N0 and N1; N0 lost it and N1 is unreachable."""
    others = [Member(N1, store=MemoryStore(log_of(1, 2, 5))), Member(N2, store=MemoryStore(log_of(1, 2)))]
    group = Group([recovering(above=5), *others])
    group.drop = lambda message: N1 in (message.sender, message.target)
    group.tick(10 * CONFIG.election_ticks_max)
    assert not any(group[node].role is Role.LEADER for node in (N0, N2))
    group.drop = lambda _: False
    group.tick(4 * CONFIG.election_ticks_max)
    assert [group[node].log_terms()[:3] for node in (N0, N1, N2)] == [[1, 2, 5]] * 3
    assert not is_recovering(group[N0])


def test_leader_that_counts_a_lost_acknowledgement_is_deposed_by_the_first_response() -> None:
    group = Group(5, logs={node: log_of(1) for node in NODES})
    leader = group.elect(N1)
    group.drop = lambda message: bool({N2, N3, N4} & {message.sender, message.target})
    leader.propose("lost by N0")
    group.deliver()
    last = leader.raw.last_index
    kept: list[Batch] = [kept for kept in group[N0].store.batches if kept.last_index < last]
    store = MemoryStore(kept, hard_state=group[N0].store.hard_state)
    group.members[N0] = Member(N0, voters=NODES, store=store, floor=Floor(Term(leader.term)))
    group.tick(CONFIG.heartbeat_ticks)
    assert leader.role is not Role.LEADER
    assert leader.commit_index < last
    group.drop = lambda _: False
    group.tick(6 * CONFIG.election_ticks_max)
    assert len({tuple(member.log_terms()) for member in group.members.values()}) == 1
    assert not is_recovering(group[N0])


@pytest.mark.parametrize(("commit_index", "elected"), [(-1, True), (1, True), (2, False)])
def test_recovering_voter_of_two_elects_a_log_with_all_known_commits(commit_index: int, elected: bool) -> None:
    pair = (N0, N1)
    store = MemoryStore(log_of(1, 2, 5))
    lost = Member(N0, voters=pair, store=store, term=5, commit_index=commit_index, floor=Floor(Term(5)))
    group = Group([lost, Member(N1, voters=pair, store=MemoryStore(log_of(1, 2)), term=5)])
    group.tick(6 * CONFIG.election_ticks_max)
    assert (group[N1].role is Role.LEADER) is elected
    assert lost.log_terms()[:2] == [1, 2]
    if elected:
        assert not is_recovering(lost)
        assert lost.log_terms() == group[N1].log_terms()


def test_sole_voter_does_not_recover() -> None:
    member = recovering(voters=(N0,))
    assert not member.raw.status().is_recovering
    member.tick(1)
    assert (member.role, member.term, member.log_terms()[:2]) == (Role.LEADER, 6, [1, 2])


def test_entries_of_a_leader_that_were_truncated_since_do_not_delay_the_recovery() -> None:
    member = recovering(above=5)
    member.step(replace(append(batch(2, 6), batch(3, 6), prev=(1, 2), term=6), last_index=3))
    assert not is_recovering(member)

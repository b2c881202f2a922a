"""A node that lost the end of its log has no vote until it holds a committed entry of a term that began without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dledger_core.ids import NO_INDEX, NO_TERM, Index, NodeId, Term
from dledger_core.raft import AppendEntries, Batch, Heartbeat, RequestVote, RequestVoteResponse, Role, TimeoutNow
from tests.support.group import CONFIG, N0, N1, N2, N3, N4, NODES, Group, Member, only
from tests.support.memory_store import MemoryStore, log_of


def abstaining(above: int = 5, *, voters: tuple[NodeId, ...] = (N0, N1, N2), log: tuple[int, ...] = (1, 2)) -> Member:
    return Member(store=MemoryStore(log_of(*log)), term=above, voters=voters, recovering_above=above)


def request(term: int, *, pre: bool, transfer: bool = False) -> RequestVote:
    return RequestVote(
        sender=N1, target=N0, term=Term(term), last_term=Term(9), last_index=Index(99), pre=pre, transfer=transfer
    )


def appended(term: int, commit_index: int) -> AppendEntries:
    """The leader's entry behind the two that the node holds."""
    batch = Batch(Index(2), 1, Term(term), 1, "x")
    return AppendEntries(
        sender=N1,
        target=N0,
        term=Term(term),
        prev_index=Index(1),
        prev_term=Term(2),
        commit_index=Index(commit_index),
        batches=(batch,),
    )


def granted(messages: list[object]) -> bool:
    (answer,) = only(messages, RequestVoteResponse)
    return answer.granted


@pytest.mark.parametrize("pre", [True, False])
@pytest.mark.parametrize("transfer", [True, False])
def test_it_votes_for_nobody_however_long_their_log(pre: bool, transfer: bool) -> None:
    member = abstaining()
    member.run()
    assert not granted(member.step(request(7, pre=pre, transfer=transfer)))
    assert member.raw.status().is_recovering


def test_it_does_not_campaign_by_itself_by_hand_or_when_its_leader_asks() -> None:
    member = abstaining()
    member.run()
    assert member.tick(5 * CONFIG.election_ticks_max) == []
    member.raw.campaign()
    assert member.run() == []
    member.step(Heartbeat(sender=N1, target=N0, term=Term(7), commit_index=NO_INDEX, round=1))
    assert only(member.step(TimeoutNow(sender=N1, target=N0, term=Term(7))), RequestVote) == []
    assert member.role is Role.FOLLOWER


def test_it_leaves_the_term_in_which_it_may_have_promised_something() -> None:
    """So no leader whom it helped into office, and no message of before, is believed any more."""
    member = abstaining(above=5)
    member.run()
    assert (member.term, member.store.hard_state.voted_for) == (6, None)
    member.step(appended(5, 2))
    assert (member.raw.last_index, member.commit_index, member.raw.status().is_recovering) == (1, NO_INDEX, True)


@pytest.mark.parametrize(
    ("term", "commit_index", "is_recovering"),
    [(6, 1, True), (6, 2, False), (7, 2, False)],
    ids=["an older entry is committed", "one of the new term", "of a later term"],
)
def test_it_votes_again_with_a_committed_entry_of_a_later_term(
    term: int, commit_index: int, is_recovering: bool
) -> None:
    member = abstaining(above=5)
    member.run()
    member.step(appended(term, commit_index))
    assert member.commit_index == commit_index
    assert member.raw.status().is_recovering is is_recovering
    member.tick(CONFIG.election_ticks_max)
    assert (member.role is Role.PRE_CANDIDATE) is not is_recovering


@pytest.mark.parametrize(
    ("last_index", "is_recovering"),
    [(1, False), (2, True), (None, True)],
    ids=["it ends here", "goes on", "is not told"],
)
def test_it_votes_again_with_all_that_a_leader_of_a_later_term_holds(
    last_index: int | None, is_recovering: bool
) -> None:
    """In profile A, where no NOOP is appended, an idle group commits nothing in its new term."""
    member = abstaining(above=5)
    member.run()
    told = {} if last_index is None else {"last_index": Index(last_index)}
    probe = {"prev_index": Index(1), "prev_term": Term(2), "commit_index": NO_INDEX, "batches": ()}
    member.step(AppendEntries(sender=N1, target=N0, term=Term(6), **probe, **told))  # type: ignore[arg-type]
    assert member.raw.status().is_recovering is is_recovering


def test_an_idle_group_of_profile_a_gives_the_vote_back() -> None:
    config = replace(CONFIG, noop_on_election=False)
    lost = Member(N0, store=MemoryStore(log_of(1, 2)), term=5, recovering_above=5, config=config)
    others = [
        Member(node, store=MemoryStore(log_of(1, 2, 5)), config=config, seed=at) for at, node in [(1, N1), (2, N2)]
    ]
    group = Group([lost, *others])
    group.tick(6 * CONFIG.election_ticks_max)
    assert [member.log_terms() for member in group.members.values()] == [[1, 2, 5]] * 3
    assert lost.commit_index == NO_INDEX
    assert not lost.raw.status().is_recovering
    (leader,) = [member for member in others if member.role is Role.LEADER]
    group.drop = lambda message: leader.node_id in (message.sender, message.target)
    group.tick(6 * CONFIG.election_ticks_max)
    assert any(member.role is Role.LEADER for member in group.members.values() if member is not leader)


def test_what_a_leader_holds_counts_once_it_is_durable_here() -> None:
    member = abstaining(above=5)
    member.run()
    message = appended(6, 1)
    member.raw.step(replace(message, last_index=Index(2)))
    member.take()
    assert member.raw.status().is_recovering
    member.persist()
    assert not member.raw.status().is_recovering


def test_an_entry_that_is_not_durable_here_gives_no_vote_back() -> None:
    member = abstaining(above=5)
    member.run()
    member.raw.step(appended(6, 2))
    member.take()
    assert member.commit_index == 2
    assert member.raw.status().is_recovering
    member.persist()
    assert not member.raw.status().is_recovering


def test_it_acknowledges_what_it_is_sent_meanwhile() -> None:
    """So a group of three in which another node is down goes on with it, once somebody leads."""
    leader = Member(N1, store=MemoryStore(log_of(1, 2, 5)), term=6)
    late = Member(N2, store=MemoryStore(log_of(1)), term=6)
    group = Group([abstaining(above=5), leader, late])
    group.elect(N1)
    group.drop = lambda message: N2 in (message.sender, message.target)
    leader.propose("x", 1, 1)
    group.deliver()
    assert leader.commit_index == leader.raw.last_index == 4
    group.tick(CONFIG.heartbeat_ticks)
    assert not group[N0].raw.status().is_recovering


def test_the_hole_that_chaos_found() -> None:
    """Three nodes: entry 2 is committed by N0 and N1, N0 loses it, N1 falls silent; N0 and N2 must not elect."""
    others = [Member(N1, store=MemoryStore(log_of(1, 2, 5))), Member(N2, store=MemoryStore(log_of(1, 2)))]
    group = Group([abstaining(above=5), *others])
    group.drop = lambda message: N1 in (message.sender, message.target)
    group.tick(10 * CONFIG.election_ticks_max)
    assert not any(group[node].role is Role.LEADER for node in (N0, N2))
    group.drop = lambda _: False
    group.tick(4 * CONFIG.election_ticks_max)
    assert [group[node].log_terms()[:3] for node in (N0, N1, N2)] == [[1, 2, 5]] * 3
    assert not group[N0].raw.status().is_recovering


def test_a_leader_that_still_counts_what_is_lost_is_deposed_by_the_first_answer() -> None:
    """Five nodes: N1 counts N0's old acknowledgement; were it to go on, N2's would commit what N0 no longer has."""
    group = Group(5, logs={node: log_of(1) for node in NODES})
    leader = group.elect(N1)
    others = {N2, N3, N4}
    group.drop = lambda message: bool(others & {message.sender, message.target})
    leader.propose("lost by N0", 1, 1)
    group.deliver()
    held = leader.raw.last_index
    term = leader.term
    store = MemoryStore(
        [batch for batch in group[N0].store.batches if batch.last_index < held],
        hard_state=group[N0].store.hard_state,
    )
    group.members[N0] = Member(N0, voters=NODES, store=store, recovering_above=term)
    group.tick(CONFIG.heartbeat_ticks)
    assert leader.role is not Role.LEADER
    assert leader.commit_index < held
    group.drop = lambda _: False
    group.tick(6 * CONFIG.election_ticks_max)
    logs = {tuple(member.log_terms()) for member in group.members.values()}
    assert len(logs) == 1
    assert not group[N0].raw.status().is_recovering


def test_of_two_the_other_one_is_elected_because_it_holds_all_that_is_committed() -> None:
    late = Member(N1, voters=(N0, N1), store=MemoryStore(log_of(1, 2)), term=5)
    group = Group([abstaining(above=5, voters=(N0, N1), log=(1, 2, 5)), late])
    group.tick(4 * CONFIG.election_ticks_max)
    assert group[N1].role is Role.LEADER
    assert not group[N0].raw.status().is_recovering
    assert group[N0].log_terms() == group[N1].log_terms()


@pytest.mark.parametrize(("commit_index", "elected"), [(-1, True), (1, True), (2, False)])
def test_of_two_the_other_one_must_hold_what_is_known_to_be_committed(commit_index: int, elected: bool) -> None:
    lost = Member(
        N0, voters=(N0, N1), store=MemoryStore(log_of(1, 2, 5)), term=5, commit_index=commit_index, recovering_above=5
    )
    group = Group([lost, Member(N1, voters=(N0, N1), store=MemoryStore(log_of(1, 2)), term=5)])
    group.tick(6 * CONFIG.election_ticks_max)
    assert (group[N1].role is Role.LEADER) is elected
    assert lost.log_terms()[:2] == [1, 2]


def test_the_only_voter_has_nobody_to_ask() -> None:
    member = abstaining(voters=(N0,))
    assert not member.raw.status().is_recovering
    member.tick(1)
    assert member.role is Role.LEADER
    assert member.raw.status().term == 6
    assert member.log_terms()[:2] == [1, 2]
    assert NO_TERM not in member.log_terms()

"""Quorum arithmetic against a slow oracle."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.errors import ConfigError
from dledger_core.ids import NodeId
from dledger_core.raft import Configuration
from dledger_core.raft.quorum import VoteResult

NODES = [NodeId(f"n{at}") for at in range(7)]
sizes = st.integers(1, 7)


@given(st.lists(st.integers(-1, 20), min_size=1, max_size=7))
def test_majority_value_is_the_largest_reached_by_a_majority(values: list[int]) -> None:
    configuration = Configuration(frozenset(NODES[: len(values)]))
    slow = max(low for low in values if sum(value >= low for value in values) >= configuration.majority)
    assert configuration.majority_value(dict(zip(NODES, values, strict=False)).__getitem__) == slow


@given(sizes, st.dictionaries(st.sampled_from([*NODES, NodeId("stranger")]), st.booleans()))
def test_vote_result_agrees_with_all_ways_to_answer(size: int, votes: dict[NodeId, bool]) -> None:
    configuration = Configuration(frozenset(NODES[:size]))
    won = any(all(votes.get(voter) for voter in some) for some in combinations(NODES[:size], configuration.majority))
    can_win = any(
        all(votes.get(voter, True) for voter in some) for some in combinations(NODES[:size], configuration.majority)
    )
    expected = VoteResult.WON if won else VoteResult.PENDING if can_win else VoteResult.LOST
    assert configuration.vote_result(votes) is expected


@given(sizes)
def test_two_majorities_meet(size: int) -> None:
    configuration = Configuration(frozenset(NODES[:size]))
    assert 2 * configuration.majority > size


@pytest.mark.parametrize(
    ("voters", "learners", "what"),
    [(frozenset(), frozenset(), "at least one voter"), (frozenset(NODES[:2]), frozenset(NODES[1:3]), "both voter")],
)
def test_a_wrong_configuration_is_refused(voters: frozenset[NodeId], learners: frozenset[NodeId], what: str) -> None:
    with pytest.raises(ConfigError, match=what):
        Configuration(voters, learners)


def test_members_are_sorted_and_learners_do_not_count() -> None:
    configuration = Configuration(frozenset({NodeId("n2"), NodeId("n0")}), frozenset({NodeId("n1")}))
    assert configuration.members == ("n0", "n1", "n2")
    assert configuration.majority == 2
    assert configuration.vote_result({NodeId("n0"): True, NodeId("n1"): True}) is VoteResult.PENDING

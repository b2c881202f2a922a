"""Quorum arithmetic against a slow oracle."""

from __future__ import annotations

from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.errors import ConfigError
from dledger_core.ids import NodeId
from dledger_core.raft import Configuration
from dledger_core.raft.configuration import VoteResult

NODES = [NodeId(f"n{at}") for at in range(7)]
sizes = st.integers(1, 7)


@given(st.lists(st.integers(-1, 20), min_size=1, max_size=7))
def test_majority_value_is_the_largest_reached_by_a_majority(values: list[int]) -> None:
    configuration = Configuration(frozenset(NODES[: len(values)]))
    slow = max(low for low in values if sum(value >= low for value in values) >= configuration.majority)
    assert configuration.majority_value(dict(zip(NODES, values, strict=False)).__getitem__) == slow


@given(sizes, st.dictionaries(st.sampled_from([*NODES, NodeId("stranger")]), st.booleans()))
def test_vote_result_agrees_with_every_possible_majority(size: int, votes: dict[NodeId, bool]) -> None:
    configuration = Configuration(frozenset(NODES[:size]))
    won = any(all(votes.get(voter) for voter in some) for some in combinations(NODES[:size], configuration.majority))
    can_win = any(
        all(votes.get(voter, True) for voter in some) for some in combinations(NODES[:size], configuration.majority)
    )
    expected = VoteResult.WON if won else VoteResult.PENDING if can_win else VoteResult.LOST
    assert configuration.vote_result(votes) is expected


@given(sizes, st.sets(st.sampled_from([*NODES, NodeId("stranger")])))
def test_quorum_is_a_majority_of_the_voters(size: int, members: set[NodeId]) -> None:
    configuration = Configuration(frozenset(NODES[:size]))
    found = sum(node in members for node in NODES[:size])
    assert configuration.is_quorum(members) is (2 * found > size)
    assert 2 * configuration.majority > size


@pytest.mark.parametrize(("voters", "learners"), [(NODES[:0], NODES[:1]), (NODES[:2], NODES[1:3])])
def test_configuration_needs_voters_that_are_not_learners(voters: list[NodeId], learners: list[NodeId]) -> None:
    with pytest.raises(ConfigError):
        Configuration(frozenset(voters), frozenset(learners))


def test_configuration_sorts_members_and_does_not_count_learners() -> None:
    configuration = Configuration(frozenset({NodeId("n2"), NodeId("n0")}), frozenset({NodeId("n1")}))
    assert configuration.members == ("n0", "n1", "n2")
    assert configuration.majority == 2
    assert configuration.vote_result({NodeId("n0"): True, NodeId("n1"): True}) is VoteResult.PENDING

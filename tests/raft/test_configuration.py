"""Quorum arithmetic against a slow oracle, and the changes of one member."""

from __future__ import annotations

from itertools import combinations

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.errors import ConfigError, CorruptRecordError, MemberChangeRefusedError
from dledger_core.ids import NodeId
from dledger_core.raft import (
    UNKNOWN,
    AddLearner,
    Configuration,
    MemberChange,
    Promote,
    Remove,
    SetAddress,
    SetVersion,
)
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


# --- changes ------------------------------------------------------------------------------------------------------

N0, N1, N2, N3, N4 = NODES[:5]
PAIR = frozenset({N0, N1})
ADDRESSES = {N0: "n0:1", N1: "n1:1", N2: "n2:1"}
REPLACING = Configuration(PAIR, frozenset({N2}), ADDRESSES, frozenset({N2}), {N2: N1}, version=3)

changes = st.one_of(
    st.builds(
        AddLearner,
        st.sampled_from(NODES),
        st.sampled_from(["a:1", "a:2"]),
        st.booleans(),
        st.none() | st.sampled_from(NODES),
    ),
    st.builds(Promote, st.sampled_from(NODES)),
    st.builds(Remove, st.sampled_from(NODES)),
    st.builds(SetAddress, st.sampled_from(NODES), st.sampled_from(["a:1", "a:2"])),
    st.builds(SetVersion, st.integers(0, 3)),
)


@pytest.mark.parametrize(
    ("before", "change", "after"),
    [
        (
            Configuration(PAIR, addresses={N0: "n0:1"}),
            AddLearner(N2, "n2:1"),
            Configuration(PAIR, frozenset({N2}), {N0: "n0:1", N2: "n2:1"}),
        ),
        (
            Configuration(PAIR),
            AddLearner(N2, "n2:1", replaces=N1),
            Configuration(PAIR, frozenset({N2}), {N2: "n2:1"}, frozenset({N2}), {N2: N1}),
        ),
        (
            REPLACING,
            Remove(N1),
            Configuration(
                frozenset({N0}), frozenset({N2}), {N0: "n0:1", N2: "n2:1"}, frozenset({N2}), {N2: N1}, version=3
            ),
        ),
        (
            REPLACING.after(Remove(N1)),
            Promote(N2),
            Configuration(frozenset({N0, N2}), addresses={N0: "n0:1", N2: "n2:1"}, version=3),
        ),
        (REPLACING, Remove(N2), Configuration(PAIR, addresses={N0: "n0:1", N1: "n1:1"}, version=3)),
        (Configuration(PAIR, frozenset({N2})), Promote(N2), Configuration(PAIR | {N2})),
        (Configuration(PAIR), SetAddress(N1, "n1:9"), Configuration(PAIR, addresses={N1: "n1:9"})),
        (Configuration(PAIR, version=1), SetVersion(2), Configuration(PAIR, version=2)),
    ],
    ids=["learner", "replacement", "removal of replaced", "promotion", "call off", "promote", "address", "version"],
)
def test_change_makes_next_configuration(before: Configuration, change: MemberChange, after: Configuration) -> None:
    assert before.after(change) == after


def test_last_voter_is_not_removed() -> None:
    with pytest.raises(MemberChangeRefusedError) as refused:
        Configuration(frozenset({N0}), frozenset({N1})).after(Remove(N0))
    assert refused.value.reason == "last-voter"


@given(sizes, st.lists(changes, max_size=12))
def test_majorities_before_and_after_any_change_have_a_common_member(size: int, wanted: list[MemberChange]) -> None:
    configuration = Configuration(frozenset(NODES[:size]))
    for change in wanted:
        try:
            after = configuration.after(change)
        except MemberChangeRefusedError:
            continue
        assert len(configuration.voters ^ after.voters) <= 1
        both = len(configuration.voters | after.voters)
        assert configuration.majority + after.majority > both
        assert not set(after.replaces) & after.voters
        assert not after.promote - after.learners
        assert Configuration.from_bytes(after.to_bytes()) == after
        configuration = after


def test_unknown_configuration_survives_encoding_and_has_no_majority() -> None:
    assert Configuration.from_bytes(UNKNOWN.to_bytes()) == UNKNOWN
    assert UNKNOWN.is_unknown
    assert not UNKNOWN.is_quorum(set(NODES))
    assert not UNKNOWN.is_sole_voter(N0)
    assert not REPLACING.is_unknown


@pytest.mark.parametrize(
    "changed",
    [
        {"voters": []},
        {"voters": ["n0", 1]},
        {"voters": ["n1", "n0"]},
        {"voters": ["n0", "n0"]},
        {"voters": "n0"},
        {"learners": ["n0"]},
        {"addresses": {"n4": "a:1"}},
        {"addresses": {"n0": 1}},
        {"promote": ["n0"]},
        {"replaces": {"n0": "n1"}},
        {"version": "1"},
        {"version": True},
        {"later": 1},
    ],
    ids=str,
)
def test_malformed_configuration_is_corrupt(changed: dict[str, object]) -> None:
    with pytest.raises(CorruptRecordError):
        Configuration.from_bytes(msgpack.packb(msgpack.unpackb(REPLACING.to_bytes()) | changed))


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x80", b"\x80\x80", b"[1]", msgpack.packb([1])], ids=bytes.hex)
def test_bytes_that_are_no_configuration_are_corrupt(data: bytes) -> None:
    with pytest.raises(CorruptRecordError):
        Configuration.from_bytes(data)

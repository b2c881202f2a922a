"""Choice of the recovering voters that vote again."""

from __future__ import annotations

import asyncio

import pytest

from dledger_core.client.recovery import VoterEnd, recover, with_votes
from dledger_core.errors import UnreachableError
from tests.support.server_group import free_peers


@pytest.mark.parametrize(
    ("ends", "chosen"),
    [
        ([(3, 9, False), (3, 5, True), (2, 90, True)], ["n1"]),
        ([(1, 1, False), (3, 5, True), (3, 7, True)], ["n2"]),
        ([(3, 9, False), (3, 5, False), (2, 90, True)], []),
        ([(3, 9, True), (3, 5, True), (4, 0, True)], ["n0", "n2"]),
        ([(3, 9, False), (3, 5, False), (3, 10, True)], ["n2"]),
        ([(1, 1, True), (1, 1, False)], ["n0"]),
        ([(1, 1, False)] * 2 + [(1, 5, True), (1, 6, True), (2, 0, True)], ["n4"]),
    ],
)
def test_best_ends_vote_again_until_there_is_a_majority(ends: list[tuple[int, int, bool]], chosen: list[str]) -> None:
    found = with_votes([VoterEnd(f"n{at}", *end) for at, end in enumerate(ends)])
    assert [end.node_id for end in found if end.votes_again] == chosen


def test_recover_needs_an_answer_of_every_voter() -> None:
    with pytest.raises(UnreachableError):
        asyncio.run(recover(free_peers(3), "g", 1.0))

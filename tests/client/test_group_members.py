"""Values that a client derives from the members that a leader reports."""

from __future__ import annotations

from typing import Any

import pytest

from dledger_core.client.members import GroupMembers, MemberStatus, members_of
from dledger_core.net import messages


def member(node: str, *, role: str = "voter", is_active: bool = True) -> MemberStatus:
    return MemberStatus(node, "", "", role, False, None, is_active, 9, 0, 0, 0.0)


def group(*members: MemberStatus, **fields: Any) -> GroupMembers:
    return GroupMembers(3, fields.pop("is_change_pending", False), members, **fields)


N0, N1, N2, N3, N4 = (member(f"n{number}") for number in range(5))
DEAD = member("n2", is_active=False)


@pytest.mark.parametrize(
    ("found", "recovering", "expected"),
    [
        (group(N0), (), 0),
        (group(N0, N1), (), 0),
        (group(N0, N1, N2), (), 1),
        (group(N0, N1, DEAD), (), 0),
        (group(N0, N1, N2), ("n1",), 0),
        (group(N0, N1, DEAD), ("n1",), -1),
        (group(N0, N1, N2, N3, N4), (), 2),
        (group(N0, N1, N2, member("n3", role="learner")), (), 1),
        (group(N0, N1, DEAD, member("n3", role="learner")), (), 0),
        (group(N0, N1, N2, is_change_pending=True, voters_before=("n0", "n1", "n2", "n3")), (), 0),
        (group(N0, N1, N2, is_change_pending=True, voters_before=("n0", "n1", "n2")), (), 1),
    ],
)
def test_learners_recovering_and_silent_voters_and_pending_changes_count(
    found: GroupMembers, recovering: tuple[str, ...], expected: int
) -> None:
    assert found.failures_survived(recovering) == expected


def test_members_of_a_response_have_names_and_seconds() -> None:
    row = ["n3", "store", "h:1", "learner", True, "old", True, 5, 4, 300, 2500]
    response = messages.MemberResponse(
        configuration=7, is_change_pending=True, members=[row, [*row[:5], "", *row[6:10], -1]], voters_before=["n0"]
    )
    found = members_of(messages.MEMBER_OK.decode(messages.MEMBER_OK.encode(response)))
    first, second = found.members
    assert (first.replaces, first.seconds_left, first.lag_bytes) == ("old", 2.5, 300)
    assert (second.replaces, second.seconds_left) == (None, None)
    assert (found.configuration_index, found.is_change_pending, found.voters) == (7, True, ())

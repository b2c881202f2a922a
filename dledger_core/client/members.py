"""The members of a group: what a client learns of them, and how many more failures the group survives."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Literal

from dledger_core.net import messages

Operation = Literal["list", "add", "remove", "promote", "replace"]


@dataclass(frozen=True, slots=True)
class MemberStatus:
    """A member of a group as its leader knows it.

    Attributes:
        node_id: its node.
        store_uuid: its store; a node whose disk was emptied is another member.
        address: HOST:PORT as last recorded in the log, empty if none is.
        role: ``voter``, or ``learner``, which receives the log and does not count.
        is_promoted: whether a learner becomes a voter once it has caught up.
        replaces: store uuid of the voter that a learner takes the place of, or None.
        is_active: whether it responded to the leader within an election timeout.
        match_index: last index that is known to be durable there.
        lag_entries: entries that it lacks.
        lag_bytes: bytes that it lacks, at least.
        seconds_left: time until it has them at its present speed; None if it is not known.
    """

    node_id: str
    store_uuid: str
    address: str
    role: str
    is_promoted: bool
    replaces: str | None
    is_active: bool
    match_index: int
    lag_entries: int
    lag_bytes: int
    seconds_left: float | None


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The members of a group.

    Attributes:
        configuration_index: index of the configuration entry in force; -1 = the group was founded with it.
        is_change_pending: whether that entry is not committed yet.
        members: all of them, sorted.
        voters_before: node ids of the voters before the pending change.
        warning: text about the number of voters after a change, or None.
    """

    configuration_index: int
    is_change_pending: bool
    members: tuple[MemberStatus, ...]
    voters_before: tuple[str, ...] = ()
    warning: str | None = None

    @property
    def voters(self) -> tuple[str, ...]:
        """Node ids of the voters."""
        return tuple(member.node_id for member in self.members if member.role == "voter")

    def failures_survived(self, recovering: Collection[str] = ()) -> int:
        """Return how many more voters may fail before the group has no majority; negative if it has none now.

        A voter counts only if it responds and is not recovering; learners never count. While a change is pending, both
        the voters before and after it must have a majority.

        Args:
            recovering: node ids of recovering voters.
        """
        healthy = {member.node_id for member in self.members if member.is_active} - set(recovering)
        sets = [self.voters, self.voters_before] if self.is_change_pending else [self.voters]
        return min(_spare(voters, healthy) for voters in sets)


def _spare(voters: Iterable[str], healthy: Collection[str]) -> int:
    counted = list(voters)
    return sum(voter in healthy for voter in counted) - (len(counted) // 2 + 1)


def members_of(response: messages.MemberResponse) -> GroupMembers:
    """Return the members that a leader reports."""
    members = tuple(
        MemberStatus(
            node_id=node,
            store_uuid=store,
            address=address,
            role=role,
            is_promoted=promote,
            replaces=replaces or None,
            is_active=active,
            match_index=match,
            lag_entries=entries,
            lag_bytes=nbytes,
            seconds_left=None if left_ms < 0 else left_ms / 1000,
        )
        for node, store, address, role, promote, replaces, active, match, entries, nbytes, left_ms in response.members
    )
    return GroupMembers(
        response.configuration, response.is_change_pending, members, tuple(response.voters_before), response.warning
    )

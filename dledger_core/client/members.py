"""The members of a group: what a client learns of them, and how many more failures the group survives."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from typing import Final, Literal

from dledger_core.net import messages

RECOVERING: Final = "recovering"
DISK_FULL: Final = "disk-full"
WITHHOLDS: Final = "withholds"
STALLED: Final = "stalled"
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
        is_active: whether it responded to the leader within an election timeout; also while a new leader has led for
            less than that.
        match_index: last index that is known to be durable there.
        lag_entries: entries that it lacks.
        lag_bytes: bytes that it lacks, at least.
        seconds_left: time until it has them at its present speed; None if it is not known.
        conditions: what limits it as a voter: ``recovering`` (it withholds its vote), ``disk-full`` (as leader it
            rejects appends), ``withholds`` (its disk has no space for entries), ``stalled`` (it has acknowledged no
            entry for five election timeouts, although it lacks some). Leaders of 0.2 report none.
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
    conditions: tuple[str, ...] = ()

    @property
    def acknowledges(self) -> bool:
        """Whether its acknowledgement of an append is expected: it responds, votes, and has space for entries."""
        return self.is_active and not {RECOVERING, WITHHOLDS, STALLED} & set(self.conditions)


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The members of a group.

    Attributes:
        configuration_index: index of the configuration entry in force; -1 = the group was bootstrapped with it.
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

    def failures_survived(
        self, recovering: Collection[str] = (), disk_full: Collection[str] = (), leader_id: str | None = None
    ) -> int:
        """Return how many more voters may fail before no append is acknowledged; negative if none is now.

        A voter counts only if it acknowledges; learners never count. While a change is pending, both the voters before
        and after it must have a majority. One of the voters must have a disk with space for a leader.

        Args:
            recovering: node ids of further voters that do not acknowledge.
            disk_full: node ids of further voters that would reject appends as leader.
            leader_id: the leader; with a disk that is nearly full it rejects appends now.
        """
        healthy = {member.node_id for member in self.members if member.acknowledges} - set(recovering)
        full = {member.node_id for member in self.members if DISK_FULL in member.conditions} | set(disk_full)
        sets = [self.voters, self.voters_before] if self.is_change_pending else [self.voters]
        leaders = sum(voter in healthy and voter not in full for voter in self.voters)
        found = min(leaders - 1, *(_spare(voters, healthy) for voters in sets))
        return min(found, -1) if leader_id in full else found


def _spare(voters: Iterable[str], healthy: Collection[str]) -> int:
    counted = list(voters)
    return sum(voter in healthy for voter in counted) - (len(counted) // 2 + 1)


def members_of(response: messages.MemberResponse) -> GroupMembers:
    """Return the members that a leader reports."""
    conditions: dict[str, tuple[str, ...]] = {}
    for node, name in response.conditions or ():
        conditions[node] = (*conditions.get(node, ()), name)
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
            conditions=conditions.get(node, ()),
        )
        for node, store, address, role, promote, replaces, active, match, entries, nbytes, left_ms in response.members
    )
    return GroupMembers(
        response.configuration, response.is_change_pending, members, tuple(response.voters_before), response.warning
    )


def response_of(found: GroupMembers, commits: list[int] | None = None) -> messages.MemberResponse:
    """Return the response that reports members, and how long commits took if that is asked for."""
    return messages.MemberResponse(
        configuration=found.configuration_index,
        is_change_pending=found.is_change_pending,
        members=[
            [
                each.node_id,
                each.store_uuid,
                each.address,
                each.role,
                each.is_promoted,
                each.replaces or "",
                each.is_active,
                each.match_index,
                each.lag_entries,
                each.lag_bytes,
                -1 if each.seconds_left is None else int(1000 * each.seconds_left),
            ]
            for each in found.members
        ],
        voters_before=list(found.voters_before),
        warning=found.warning,
        conditions=[[each.node_id, name] for each in found.members for name in each.conditions] or None,
        commits=commits,
    )

"""Members that count, and how many are enough: the only module with quorum arithmetic.

Votes, acknowledgements and echoes are counted by member, never by address or connection, and always through the
configuration in force. So a change of members changes every quorum at one place and at one moment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from dledger_core.errors import ConfigError
from dledger_core.ids import MemberId


class VoteResult(Enum):
    """Result of a campaign so far."""

    PENDING = "pending"
    WON = "won"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Configuration:
    """The members of a group: voters count, learners only receive the log.

    Attributes:
        voters: members whose votes and acknowledgements count; at least one.
        learners: members that receive the log and do not count.
        members: all of them in sorted order, so that every run iterates over them in the same order.
    """

    voters: frozenset[MemberId]
    learners: frozenset[MemberId] = frozenset()
    members: tuple[MemberId, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.voters:
            raise ConfigError("a group needs at least one voter", "voters", "name its nodes")
        both = sorted(self.voters & self.learners)
        if both:
            raise ConfigError(f"{both[0]} is both voter and learner", "learners", "list each node once")
        object.__setattr__(self, "members", tuple(sorted(self.voters | self.learners)))

    @property
    def majority(self) -> int:
        """Number of voters that is enough."""
        return len(self.voters) // 2 + 1

    def is_voter(self, member: MemberId) -> bool:
        """Whether the member's vote and acknowledgements count."""
        return member in self.voters

    def is_sole_voter(self, member: MemberId) -> bool:
        """Whether ``member`` alone is a majority."""
        return len(self.voters) == 1 and member in self.voters

    def is_quorum(self, members: Set[MemberId]) -> bool:
        """Whether ``members`` contain a majority of the voters."""
        return len(members & self.voters) >= self.majority

    def vote_result(self, votes: Mapping[MemberId, bool]) -> VoteResult:
        """Return the result of ``votes``; those of learners and strangers do not count."""
        granted = sum(votes.get(voter) is True for voter in self.voters)
        rejected = sum(votes.get(voter) is False for voter in self.voters)
        if granted >= self.majority:
            return VoteResult.WON
        if rejected > len(self.voters) - self.majority:
            return VoteResult.LOST
        return VoteResult.PENDING

    def majority_value(self, value_of: Callable[[MemberId], int]) -> int:
        """Return the largest number that a majority of the voters has reached."""
        values = sorted(map(value_of, self.voters))
        return values[len(values) - self.majority]


def even_group_warning(voters: int) -> str | None:
    """Return a warning if the number of voters is even: the last one adds cost and no fault tolerance."""
    if voters % 2:
        return None
    failures = (voters - 1) // 2
    return (
        f"a group of {voters} nodes survives the failure of {failures or 'none'} of them, "
        f"no more than {_nodes(voters - 1)} would; use {voters - 1} or {voters + 1}"
    )


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"

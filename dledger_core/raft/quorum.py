"""Who counts, and how many are enough: the only place with quorum arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TypeVar

from dledger_core.errors import ConfigError
from dledger_core.ids import NodeId

__all__ = ["Configuration", "VoteResult", "even_group_warning", "majority_value"]

_Number = TypeVar("_Number", bound=int)


class VoteResult(Enum):
    """What a count of votes says so far."""

    PENDING = "pending"
    WON = "won"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class Configuration:
    """The members of a group: voters count, learners only receive the log.

    Attributes:
        voters: nodes whose votes and acknowledgements count; at least one.
        learners: nodes that are sent the log and count nowhere.
        members: all of them in sorted order, so that every run visits them alike.
    """

    voters: frozenset[NodeId]
    learners: frozenset[NodeId] = frozenset()
    members: tuple[NodeId, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.voters:
            raise ConfigError("a group needs at least one voter", "voters", "name its nodes")
        both = sorted(self.voters & self.learners)
        if both:
            raise ConfigError(f"{both[0]} is both voter and learner", "learners", "list each node once")
        object.__setattr__(self, "members", tuple(sorted(self.voters | self.learners)))

    @property
    def majority(self) -> int:
        """How many voters are enough."""
        return len(self.voters) // 2 + 1

    def is_sole_voter(self, node_id: NodeId) -> bool:
        """Returns whether ``node_id`` alone is a majority."""
        return len(self.voters) == 1 and node_id in self.voters

    def vote_result(self, votes: Mapping[NodeId, bool]) -> VoteResult:
        """Returns the outcome of ``votes``; answers of others than voters do not count."""
        granted = refused = 0
        for voter in self.voters:
            answer = votes.get(voter)
            if answer is True:
                granted += 1
            elif answer is False:
                refused += 1
        if granted >= self.majority:
            return VoteResult.WON
        if refused > len(self.voters) - self.majority:
            return VoteResult.LOST
        return VoteResult.PENDING


def majority_value(values: list[_Number]) -> _Number:
    """Returns the largest number that a majority of ``values`` has reached; sorts ``values`` in place."""
    values.sort()
    return values[(len(values) - 1) // 2]


def even_group_warning(voters: int) -> str | None:
    """Returns what to tell who runs an even number of voters: the last one costs and helps nothing."""
    if voters % 2:
        return None
    failures = (voters - 1) // 2
    return (
        f"a group of {voters} nodes survives the failure of {failures or 'none'} of them, "
        f"no more than {_nodes(voters - 1)} would; use {voters - 1} or {voters + 1}"
    )


def _nodes(count: int) -> str:
    return f"{count} node" if count == 1 else f"{count} nodes"

"""Members that count, how many are enough, and the changes of one member: the only module with quorum arithmetic.

Votes, acknowledgements and echoes are counted by member, never by address or connection, and always through the
configuration in force. So a change of members changes every quorum at one place and at one moment.

A change adds or removes one voter at most (thesis section 4.1): then each majority of the old voters and each of the
new ones have a member in common, and no joint consensus is needed. ``Configuration.after`` keeps that rule; what a
leader checks in addition is in ``membership``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Final, NoReturn, TypeAlias, TypeVar

import msgpack

from dledger_core.errors import ConfigError, CorruptRecordError, MemberChangeRefusedError
from dledger_core.ids import MemberId

T = TypeVar("T")


class VoteResult(Enum):
    """Result of a campaign so far."""

    PENDING = "pending"
    WON = "won"
    LOST = "lost"


@dataclass(frozen=True, slots=True)
class AddLearner:
    """Add a member that receives the log and does not count.

    Attributes:
        member: the new member.
        address: where it is reached, HOST:PORT.
        promote: it becomes a voter once it has caught up.
        replaces: the voter that it takes the place of, which includes ``promote``; None = none.
    """

    member: MemberId
    address: str
    promote: bool = False
    replaces: MemberId | None = None


@dataclass(frozen=True, slots=True)
class Promote:
    """Make a learner a voter."""

    member: MemberId


@dataclass(frozen=True, slots=True)
class Remove:
    """Remove a voter or a learner."""

    member: MemberId


@dataclass(frozen=True, slots=True)
class SetAddress:
    """Record where a member is reached."""

    member: MemberId
    address: str


@dataclass(frozen=True, slots=True)
class SetVersion:
    """Raise the group's version: every member knows its features."""

    version: int


MemberChange: TypeAlias = AddLearner | Promote | Remove | SetAddress | SetVersion
"""A change of one configuration into the next one."""


@dataclass(frozen=True, slots=True)
class Configuration:
    """The members of a group: voters count, learners only receive the log.

    Attributes:
        voters: members whose votes and acknowledgements count. Without any the configuration is ``UNKNOWN``.
        learners: members that receive the log and do not count.
        addresses: HOST:PORT of members as last recorded; may lack a member.
        promote: learners that become voters once they have caught up.
        replaces: learner → the voter that it takes the place of. It is kept until the promotion, so that any later
            leader continues the replacement from the configuration alone.
        version: the group's version: features that all members know.
        members: voters and learners in sorted order, so that every run iterates over them in the same order.
    """

    voters: frozenset[MemberId]
    learners: frozenset[MemberId] = frozenset()
    addresses: Mapping[MemberId, str] = field(default_factory=dict)
    promote: frozenset[MemberId] = frozenset()
    replaces: Mapping[MemberId, MemberId] = field(default_factory=dict)
    version: int = 0
    members: tuple[MemberId, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not self.voters and self.learners:
            raise ConfigError("a group needs at least one voter", "voters", "name its nodes")
        both = sorted(self.voters & self.learners)
        if both:
            raise ConfigError(f"{both[0]} is both voter and learner", "learners", "list each node once")
        strangers = sorted(self.addresses.keys() - self.voters - self.learners)
        waiting = sorted((self.promote | self.replaces.keys()) - self.learners)
        if strangers or waiting:
            raise ConfigError(f"{(strangers + waiting)[0]} is not a member that can have this", "members")
        object.__setattr__(self, "members", tuple(sorted(self.voters | self.learners)))

    @property
    def is_unknown(self) -> bool:
        """Whether this is the configuration of a store that has not received its group's yet; see ``UNKNOWN``."""
        return not self.voters

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
        # Learners do not count: they may lag for hours, and a majority with them need not meet one of the voters
        # (test_learner_counts_for_no_commit_read_or_quorum_check).
        return len(members & self.voters) >= self.majority

    def vote_result(self, votes: Mapping[MemberId, bool]) -> VoteResult:
        """Return the result of ``votes``; those of learners and strangers do not count."""
        # By the configuration in force at the candidate: a removed member may still respond (thesis section 4.2.1).
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

    def after(self, change: MemberChange) -> Configuration:
        """Return the configuration that ``change`` makes of this one.

        Raises:
            MemberChangeRefusedError: it does not fit this configuration.
        """
        match change:
            case AddLearner():
                return self._with_learner(change)
            case Promote(member):
                return self._with_voter(member)
            case Remove(member):
                return self._without(member)
            case SetAddress(member, address):
                self._require_member(member)
                if self.addresses.get(member) == address:
                    refuse("no-change", f"{member} has the address {address} already")
                return replace(self, addresses={**self.addresses, member: address})
            case SetVersion(version):
                if version <= self.version:
                    refuse("no-change", f"the group has version {self.version} already", version=version)
                return replace(self, version=version)

    def to_bytes(self) -> bytes:
        """Return the body of a configuration entry."""
        return bytes(
            msgpack.packb(
                {
                    "voters": sorted(self.voters),
                    "learners": sorted(self.learners),
                    "addresses": dict(sorted(self.addresses.items())),
                    "promote": sorted(self.promote),
                    "replaces": dict(sorted(self.replaces.items())),
                    "version": self.version,
                }
            )
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Configuration:
        """Return the configuration of an entry's body, which holds the log time in ``t`` too.

        Raises:
            CorruptRecordError: the rest is not what ``to_bytes`` returns.
        """
        try:
            fields = msgpack.unpackb(data)
            fields.pop("t", None)
            found = cls(
                voters=_members(fields["voters"]),
                learners=_members(fields["learners"]),
                addresses=_names(fields["addresses"]),
                promote=_members(fields["promote"]),
                replaces=_names(fields["replaces"]),
                version=_checked(fields["version"], int),
            )
            # Two bodies of one configuration would make two replicas differ that have the same members.
            canonical = found.to_bytes() == msgpack.packb(fields)
        except (ValueError, TypeError, KeyError, AttributeError, msgpack.UnpackException) as error:
            raise CorruptRecordError("a configuration entry is malformed", values={"error": str(error)}) from error
        if not canonical:
            raise CorruptRecordError("a configuration entry is malformed", values={"error": "it has other fields"})
        return found

    def _with_learner(self, change: AddLearner) -> Configuration:
        member, replaces = change.member, change.replaces
        if member in self.members:
            refuse("already-member", f"{member} is a member already")
        if replaces is not None:
            if replaces not in self.voters:
                refuse("unknown-member", f"{replaces} is not a voter, so {member} cannot replace it")
            # Both would be promoted, and the group would have one voter more than before its replacement.
            if replaces in self.replaces.values():
                refuse("already-replaced", f"another learner replaces {replaces} already", "remove that learner first")
        promote = {member} if change.promote or replaces is not None else set()
        return replace(
            self,
            learners=self.learners | {member},
            addresses={**self.addresses, member: change.address},
            promote=self.promote | promote,
            replaces={**self.replaces, **({} if replaces is None else {member: replaces})},
        )

    def _with_voter(self, member: MemberId) -> Configuration:
        self._require_member(member)
        if member in self.voters:
            refuse("no-change", f"{member} is a voter already")
        replaced = self.replaces.get(member)
        if replaced in self.voters:
            # With both as voters one machine would count twice; and no entry may change two voters.
            refuse(
                "replaced-voter", f"{member} replaces {replaced}, which is still a voter", f"remove {replaced} first"
            )
        return replace(
            self,
            voters=self.voters | {member},
            learners=self.learners - {member},
            promote=self.promote - {member},
            replaces=_without_key(self.replaces, member),
        )

    def _without(self, member: MemberId) -> Configuration:
        self._require_member(member)
        # A group without voters can elect no leader, and so can never add one (test_last_voter_is_not_removed).
        if self.is_sole_voter(member):
            refuse("last-voter", f"{member} is the last voter", "promote another member first")
        return replace(
            self,
            voters=self.voters - {member},
            learners=self.learners - {member},
            addresses=_without_key(self.addresses, member),
            promote=self.promote - {member},
            replaces=_without_key(self.replaces, member),
        )

    def _require_member(self, member: MemberId) -> None:
        if member not in self.members:
            refuse("unknown-member", f"{member} is not a member of the group", "list the members", members=self.members)


UNKNOWN: Final = Configuration(frozenset())
"""Configuration of a store that was admitted and has not received its group's: it follows and never campaigns."""


def refuse(reason: str, what: str, remedy: str = "", **values: Any) -> NoReturn:
    """Raise MemberChangeRefusedError; ``reason`` is for programs and never changes."""
    raise MemberChangeRefusedError(what, "", remedy, {"reason": reason} | values)


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


def _without_key(values: Mapping[MemberId, T], key: MemberId) -> dict[MemberId, T]:
    return {member: value for member, value in values.items() if member != key}


def _checked(value: Any, kind: type[T]) -> T:
    if type(value) is not kind:
        raise ValueError(f"{value!r} is not of type {kind.__name__}")
    return value


def _members(values: Any) -> frozenset[MemberId]:
    return frozenset(MemberId(_checked(value, str)) for value in _checked(values, list))


def _names(values: Any) -> dict[MemberId, Any]:
    return {MemberId(_checked(key, str)): _checked(value, str) for key, value in _checked(values, dict).items()}

"""Names for the numbers and strings that must never be swapped.

Each is a ``NewType``: mypy rejects a swap and nothing is paid at run time.
"""

from typing import Final, NewType

__all__ = [
    "NO_INDEX",
    "NO_TERM",
    "NUMBER_MAX",
    "TERM_JUMP_MAX",
    "GroupName",
    "Index",
    "MemberId",
    "NodeId",
    "Position",
    "QueueOffset",
    "Term",
    "member_id",
    "node_of",
    "store_of",
]

Index = NewType("Index", int)
"""Position of an entry in the log, from 0."""

Term = NewType("Term", int)
"""Raft term, from 0 (a one-node Java group stays in term 0)."""

Position = NewType("Position", int)
"""Byte offset in a group's data files. RocketMQ's physical offset is position + 48."""

QueueOffset = NewType("QueueOffset", int)
"""Slot number in a RocketMQ consume queue."""

NodeId = NewType("NodeId", str)
"""Name of a server process, unique in its peers string; contains no ``-``."""

MemberId = NewType("MemberId", str)
"""A member of a group, whose votes and acknowledgements count: ``<node id>/<store uuid>``.

A node whose disk was emptied has another store uuid, so it is another member. Where no store is known, the node id
alone stands for the member.
"""

GroupName = NewType("GroupName", str)
"""Name of one Raft group, which is one replicated log."""

NO_INDEX: Final = Index(-1)
"""The index before the first entry of an empty log."""

NO_TERM: Final = Term(-1)
"""The term of ``NO_INDEX``; below every real term."""

NUMBER_MAX: Final = (1 << 56) - 1
"""Highest term, index and position that a peer may send and a file may contain: one limit, so that nothing is written
that the next start rejects. The position of every index row, and a position plus a record, fits 63 bits."""

TERM_JUMP_MAX: Final = 1 << 32
"""Most terms that a peer may be ahead. Each election raises the term by one: at a hundred elections per second a node
would have been away for more than a year. A term cannot be lowered again, so a wrong one would cost the group its
future."""


def member_id(node_id: str, store_uuid: str = "") -> MemberId:
    """Return the member that a node's store is."""
    return MemberId(f"{node_id}/{store_uuid}" if store_uuid else node_id)


def node_of(member: MemberId) -> NodeId:
    """Return the id of the node that has a member's store."""
    return NodeId(member.partition("/")[0])


def store_of(member: MemberId) -> str:
    """Return the uuid of a member's store; empty if it is not known."""
    return member.partition("/")[2]

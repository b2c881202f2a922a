"""Results of client operations."""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime

import pyarrow as pa

from dledger_core.control import Part
from dledger_core.digest import RangeDigest


@dataclass(frozen=True, slots=True)
class AppendResult:
    """Indexes of an append: [first_index, last_index], all of one term.

    ``indexes`` is empty except for a Java group, where other entries may be in between: then each body's index.
    """

    first_index: int
    last_index: int
    term: int
    indexes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Indexes of an append of a transaction's attempt, with the row count and CRC that its commit lists."""

    first_index: int
    last_index: int
    term: int
    rows: int
    crc: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry; ``timestamp`` is None where the append time is unknown (written by Java)."""

    index: int
    term: int
    position: int
    timestamp: datetime | None
    body: bytes


@dataclass(frozen=True, slots=True)
class PositionFetch:
    """One read by position: entries of the log, or messages of the commitlog prefix.

    Attributes:
        batch: columns as ``Fetch.batch``; messages of the prefix have no index, term or timestamp.
        next_position: position to continue at in the prefix; None in the log.
        next_index: index to continue at with ``fetch``; None in the prefix.
    """

    batch: pa.RecordBatch
    next_position: int | None
    next_index: int | None


@dataclass(frozen=True, slots=True)
class LogRange:
    """Entries that can be read now: [first_index, end).

    Attributes:
        first_index: first stored index.
        end: index after the last readable entry.
        commit_index: commit index of the replica with that end; -1 where none is known.
        log_uuid: identity of the log; None if it has none.
    """

    first_index: int
    end: int
    commit_index: int
    log_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """State that one node reports; numbers are -1 and role is ``unreachable`` if it did not respond.

    The size of orphaned attempts (``lost_entries``, ``lost_bytes``) is -1 also if it was not queried. A node that
    ``is_recovering`` does not vote, because the end of its log, with entries it acknowledged, may be lost.
    """

    node_id: str
    address: str
    role: str = "unreachable"
    first_index: int = -1
    last_index: int = -1
    commit_index: int = -1
    visible_end: int = -1
    data_bytes: int = -1
    reachable: bool = False
    lost_entries: int = -1
    lost_bytes: int = -1
    is_recovering: bool = False


@dataclass(frozen=True, slots=True)
class Metadata:
    """State of a group as its nodes report it.

    Attributes:
        leader_id: the leader, None if no node knows one.
        term: highest term any node knows.
        nodes: each node of the peers string, in its order.
        log_uuid: identity of the log, None before its first leader.
        preferred_leaders: nodes that should lead once caught up, best first, as configured.
    """

    leader_id: str | None
    term: int
    nodes: tuple[NodeStatus, ...]
    log_uuid: str | None = None
    preferred_leaders: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The new role of a node in its group.

    Attributes:
        node_id: the node.
        role: leader, follower, learner, candidate, pre-candidate, or ``unreachable``.
        broker_role: in RocketMQ's words ``master`` for a leader, else ``slave``; None if unreachable.
        term: its term, -1 if unreachable.
        leader_id: the leader that it follows, None without one.
        reason: why it is unreachable.
    """

    node_id: str
    role: str
    broker_role: str | None = None
    term: int = -1
    leader_id: str | None = None
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ProducerState:
    """State of a producer in the log.

    Attributes:
        known: whether the log contains appends of it.
        epoch: its epoch.
        next_sequence: the sequence its next append must have.
        last_range: (first, last) index of its newest append, None if there is none.
    """

    known: bool
    epoch: int
    next_sequence: int
    last_range: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class TransactionState:
    """A transaction.

    Attributes:
        state: ``unknown``, ``open``, ``committed`` or ``aborted``.
        parts: of a committed one.
        index: the leader's commit index.
        input_id: the input of a committed one, if its writer named it.
        newest: the newest micro-batch that the query has committed, -1 if none.
    """

    state: str
    parts: tuple[Part, ...]
    index: int
    input_id: str = ""
    newest: int = -1


@dataclass(frozen=True, slots=True)
class DigestReport:
    """Digests of aligned ranges as one replica computed them from its files.

    Attributes:
        ranges: consecutive, from the requested start on.
        next_index: index to continue at.
        commit_index: commit index of the replica.
        damaged: indexes of records whose body does not match its CRC.
    """

    ranges: tuple[RangeDigest, ...]
    next_index: int
    commit_index: int
    damaged: tuple[int, ...]

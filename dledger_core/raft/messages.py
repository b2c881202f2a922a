"""Messages between the replicas of one group: one frozen dataclass each.

Every message carries ``sender``, ``target`` and ``term``; the term is checked in one place (``Raft.step``).
The group is not part of a message: the driver knows it. Field meanings follow the Raft paper (figure 2) and
Ongaro's thesis (pre-vote §9.6, transfer §3.10, ReadIndex §6.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft.batch import Batch

__all__ = [
    "UNTOLD",
    "AppendEntries",
    "AppendEntriesResponse",
    "Heartbeat",
    "HeartbeatResponse",
    "InstallSnapshot",
    "InstallSnapshotResponse",
    "Message",
    "RequestVote",
    "RequestVoteResponse",
    "TimeoutNow",
]


UNTOLD: Final = Index((1 << 63) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    sender: NodeId
    target: NodeId
    term: Term


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestVote(_Message):
    """Asks for a vote; with ``pre`` only asks whether one would be given.

    ``term`` is the term the sender campaigns in, so for a pre-vote one above its own. ``transfer`` marks a
    campaign the old leader asked for: it passes vote stickiness.
    """

    last_index: Index
    last_term: Term
    pre: bool
    transfer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestVoteResponse(_Message):
    """Answers RequestVote. A granted pre-vote echoes the asked term; a refusal carries the voter's own."""

    granted: bool
    pre: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendEntries(_Message):
    """Batches that follow (prev_index, prev_term); none = a probe.

    ``batches`` are consecutive and start at ``prev_index + 1``. ``last_index`` is the leader's own: a follower that
    matches so far holds all that the leader held. A leader of before this field never says that.
    """

    prev_index: Index
    prev_term: Term
    commit_index: Index
    batches: tuple[Batch, ...]
    last_index: Index = UNTOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendEntriesResponse(_Message):
    """Answers AppendEntries.

    Accepted: ``match_index`` is the last index known to equal the leader's, durable here. Refused: ``match_index``
    repeats the refused prev_index, and the hint names the follower's term at that place (or NO_TERM if its log is
    shorter), the first index of that term's run, and its last index.
    """

    accepted: bool
    match_index: Index
    hint_term: Term
    hint_first_index: Index
    last_index: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(_Message):
    """Keeps followers from campaigning, carries the commit index and a ReadIndex round.

    The driver packs the heartbeats of all groups between two nodes into one frame. ``commit_index`` is never above
    what this follower is known to match. ``round`` counts ReadIndex rounds; the response echoes it.
    """

    commit_index: Index
    round: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatResponse(_Message):
    """Answers Heartbeat with its round and the follower's last durable index."""

    round: int
    last_index: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutNow(_Message):
    """The leader asks a caught-up follower to campaign at once (leadership transfer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallSnapshot(_Message):
    """A piece of what a member needs to begin its log at ``first_index``, because the leader deleted what was before.

    ``data`` lies at ``offset`` of ``total`` bytes; an empty piece asks how much has arrived. ``number`` tells transfers
    of one leader and term apart. A member that holds (first_index - 1, previous_term) needs none of it, and answers as
    it does when it has begun anew: with an accepting AppendEntriesResponse.
    """

    number: int
    first_index: Index
    previous_term: Term
    offset: int
    total: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallSnapshotResponse(_Message):
    """Answers InstallSnapshot while pieces are missing: so many bytes have arrived."""

    number: int
    offset: int


Message = (
    RequestVote
    | RequestVoteResponse
    | AppendEntries
    | AppendEntriesResponse
    | Heartbeat
    | HeartbeatResponse
    | TimeoutNow
    | InstallSnapshot
    | InstallSnapshotResponse
)

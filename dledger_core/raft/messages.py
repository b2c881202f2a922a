"""Messages between the members of one group: one frozen dataclass each.

Every message carries ``sender``, ``target`` and ``term``; the term is checked in one place (``raft.step``).
The group is not part of a message: the transport knows it. Field meanings follow the Raft paper (figure 2) and
Ongaro's thesis (pre-vote §9.6, transfer §3.10, ReadIndex §6.4).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag
from typing import Final

from dledger_core.ids import NUMBER_MAX, Index, MemberId, Term
from dledger_core.raft.batch import Batch

UNKNOWN_END: Final = Index(NUMBER_MAX)
"""``AppendEntries.last_index`` of a leader that does not report it: no follower ever matches that far."""


class Condition(IntFlag):
    """Limits of a replica that follows: a leader needs them to know how many failures the group survives."""

    NONE = 0
    RECOVERING = 1
    """It withholds its vote."""
    DISK_FULL = 2
    """As leader it would reject appends."""
    WITHHOLDS = 4
    """It accepts no entries, or only small messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Message:
    sender: MemberId
    target: MemberId
    term: Term


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestVote(_Message):
    """Ask for a vote; with ``pre`` ask only whether one would be granted.

    ``term`` is the term of the campaign, so for a pre-vote one above the sender's. ``transfer`` marks a campaign that
    the old leader requested: vote stickiness does not apply to it.
    """

    last_index: Index
    last_term: Term
    pre: bool
    transfer: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestVoteResponse(_Message):
    """Grant or reject a vote. A granted pre-vote echoes the requested term; a rejection carries the voter's own."""

    granted: bool
    pre: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendEntries(_Message):
    """Batches that follow (prev_index, prev_term); none = a probe.

    ``batches`` are consecutive and start at ``prev_index + 1``. ``last_index`` is the leader's own: a follower that
    matches up to there has every entry of the leader.
    """

    prev_index: Index
    prev_term: Term
    commit_index: Index
    batches: tuple[Batch, ...]
    last_index: Index = UNKNOWN_END


@dataclass(frozen=True, slots=True, kw_only=True)
class AppendEntriesResponse(_Message):
    """Accept or reject AppendEntries.

    Accepted: ``match_index`` is the last index known to equal the leader's, durable here. Rejected: ``match_index``
    repeats the rejected prev_index, and the hint is the follower's term there (NO_TERM if its log is shorter), the
    first index of that term range, and its last index.
    """

    accepted: bool
    match_index: Index
    hint_term: Term
    hint_first_index: Index
    last_index: Index


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat(_Message):
    """Keep followers from campaigning; carries the commit index, a ReadIndex round and the log time.

    The transport packs the heartbeats of all groups between two nodes into one frame. ``commit_index`` never exceeds
    the follower's match_index: a heartbeat compares no entry, so it can commit only matched ones. ``round`` counts
    ReadIndex rounds; the response echoes it.
    """

    commit_index: Index
    round: int
    log_time_ms: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HeartbeatResponse(_Message):
    """Echo a heartbeat's round with the follower's last durable index.

    ``condition`` is for reports only: no decision of the core depends on it.
    """

    round: int
    last_index: Index
    condition: Condition = Condition.NONE


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeoutNow(_Message):
    """The leader asks a caught-up follower to campaign at once (leadership transfer)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallSnapshot(_Message):
    """A chunk of the state that a follower needs to restart its log at ``first_index``.

    ``data`` is at ``offset`` of ``total`` bytes; an empty chunk asks how much has arrived, and at the end confirms that
    all has. ``number`` distinguishes transfers of one leader and term. A follower that contains (first_index - 1,
    previous_term) needs no snapshot, and responds as it does after an install: with an accepting AppendEntriesResponse.
    """

    number: int
    first_index: Index
    previous_term: Term
    offset: int
    total: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class InstallSnapshotResponse(_Message):
    """Report how many bytes have arrived, until the leader has confirmed that all have."""

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

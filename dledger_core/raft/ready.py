"""The core's whole output: what to persist, what to send and when, what is committed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft.batch import Batch
from dledger_core.raft.messages import Message

__all__ = ["HardState", "LogRestart", "ReadReady", "Ready", "Role", "SoftState"]


class Role(Enum):
    """What a replica is in its group."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"
    LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class HardState:
    """Durable before any message that depends on it leaves."""

    term: Term
    voted_for: NodeId | None


@dataclass(frozen=True, slots=True)
class SoftState:
    """What others may want to know; not durable."""

    role: Role
    leader_id: NodeId | None
    term: Term


@dataclass(frozen=True, slots=True)
class ReadReady:
    """A ReadIndex request that is confirmed: reads up to ``index`` are linearizable.

    ``index`` is None when leadership was lost first: ask again elsewhere.
    """

    request_id: int
    index: Index | None


@dataclass(frozen=True, slots=True)
class LogRestart:
    """The whole log is to be discarded and begun anew.

    Attributes:
        first_index: where it begins; everything before is committed.
        previous_term: term of the entry before, or NO_TERM if unknown.
        payload: what the driver's ``SnapshotPayloads.unpack`` returned.
    """

    first_index: Index
    previous_term: Term
    payload: object


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """One turn's output. Several may be in flight; they are persisted in order of ``number``.

    The driver, in this order:

    1. hands ``batches`` to the log (that assigns positions to a leader's own), then sends ``messages``;
    2. on disk: writes ``hard_state``, begins anew at ``new_start``, cuts the log from ``truncate_from`` on,
       appends ``batches``, syncs once;
    3. sends ``persisted_messages`` and calls ``advance(number)``;
    4. serves ``committed`` as soon as it is seen (it never covers entries that can be cut).
       A majority holds them durably, this node's own disk perhaps not yet: a checkpoint of commit_index
       must wait for this Ready, or be bounded by ``Status.durable_index``.

    ``advance(number)`` confirms all Readys up to ``number``.

    A Ready without anything to persist (``must_persist`` false) still goes through 3, after all earlier ones.

    Attributes:
        number: counts up by one.
        hard_state: to make durable, or None if unchanged.
        new_start: discard the log first and begin it anew, or None.
        truncate_from: cut all entries from this index on before appending, or None.
        batches: consecutive, to append and sync.
        messages: may leave at once.
        persisted_messages: only after this and all earlier Readys are durable.
        committed: half-open range [start, end) of newly committed indexes, or None.
        reads: ReadIndex answers.
        soft_state: new role, leader or term, or None if unchanged.
    """

    number: int
    hard_state: HardState | None = None
    new_start: LogRestart | None = None
    truncate_from: Index | None = None
    batches: tuple[Batch, ...] = ()
    messages: tuple[Message, ...] = ()
    persisted_messages: tuple[Message, ...] = ()
    committed: tuple[Index, Index] | None = None
    reads: tuple[ReadReady, ...] = ()
    soft_state: SoftState | None = None

    @property
    def must_persist(self) -> bool:
        """Whether anything has to reach the disk before ``advance``."""
        return bool(self.hard_state or self.batches or self.new_start or self.truncate_from is not None)

"""The core's complete output: state and batches to persist, messages to send, entries that are committed."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from dledger_core.ids import Index, MemberId, Term
from dledger_core.raft.batch import Batch
from dledger_core.raft.configurations import ConfigurationInForce
from dledger_core.raft.floor import Floor
from dledger_core.raft.messages import Message


class Role(Enum):
    """Role of a replica in its group."""

    FOLLOWER = "follower"
    PRE_CANDIDATE = "pre-candidate"
    CANDIDATE = "candidate"
    LEADER = "leader"
    LEARNER = "learner"


@dataclass(frozen=True, slots=True)
class HardState:
    """Term and vote; durable before any message that depends on them is sent."""

    term: Term
    voted_for: MemberId | None


@dataclass(frozen=True, slots=True)
class SoftState:
    """Role, leader and term for subscribers; not durable."""

    role: Role
    leader_id: MemberId | None
    term: Term


@dataclass(frozen=True, slots=True)
class ReadReady:
    """A ReadIndex request that is confirmed: reads up to ``index`` are linearizable.

    ``index`` is None if leadership was lost first: ask the new leader.
    """

    request_id: int
    index: Index | None


@dataclass(frozen=True, slots=True)
class LogRestart:
    """Discard the whole log and restart it at ``first_index`` (snapshot install).

    Attributes:
        first_index: the new first index; every entry before it is committed.
        previous_term: term of the entry before, or NO_TERM if unknown.
        payload: the object that ``SnapshotPayloads.install`` returned.
        configuration: the one in force before ``first_index``.
    """

    first_index: Index
    previous_term: Term
    payload: object
    configuration: ConfigurationInForce


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Output of one iteration. Several may be in flight; they are persisted in order of ``number``.

    The Ready loop, in this order:

    1. sends ``messages``;
    2. on disk: writes a raised ``floor`` and ``hard_state``, restarts the log as ``restart`` says, truncates it from
       ``truncate_from`` on, appends ``batches``, syncs once;
    3. sends ``persisted_messages`` and calls ``advance(number)``;
    4. serves ``committed`` as soon as it receives it (it never covers entries that can be truncated).
       A majority has them on disk, this node perhaps not yet: a checkpoint of commit_index waits for this Ready or is
       limited by ``durable_index``.

    ``messages`` need not wait for this disk: an AppendEntries makes no statement about the leader's own disk, which
    counts as one acknowledgement like any other (thesis, section 10.2.1). ``persisted_messages`` are votes and
    acknowledgements: each is a statement about this disk.

    ``advance(number)`` confirms all Readys up to ``number``. A Ready without anything to persist (``must_persist`` is
    false) still goes through 3, after all earlier ones.

    Attributes:
        number: increases by one.
        hard_state: to make durable, or None if unchanged.
        restart: discard the log first and restart it, or None.
        truncate_from: truncate from this index on before appending, or None.
        batches: consecutive, to append and sync.
        messages: may leave at once.
        persisted_messages: only after this and all earlier Readys are durable.
        committed: half-open range [start, end) of newly committed indexes, or None.
        reads: results of ReadIndex requests.
        soft_state: new role, leader or term, or None if unchanged.
        floor: the member's floor if ``floor_changed``. One that was set or raised is made durable before anything that
            follows; the file of a removed one (None) may be deleted at any time.
        floor_changed: the floor was set, raised or removed.
        configuration: the configuration in force, if it changed: by an append, a truncation or a snapshot install. It
            may not be committed, nor durable before this Ready is.
        committed_configuration: the newest committed configuration, if it changed. Only by this one does a member
            learn that it is removed: an uncommitted one may be undone.
    """

    number: int
    hard_state: HardState | None = None
    restart: LogRestart | None = None
    truncate_from: Index | None = None
    batches: tuple[Batch, ...] = ()
    messages: tuple[Message, ...] = ()
    persisted_messages: tuple[Message, ...] = ()
    committed: tuple[Index, Index] | None = None
    reads: tuple[ReadReady, ...] = ()
    soft_state: SoftState | None = None
    floor: Floor | None = None
    floor_changed: bool = False
    configuration: ConfigurationInForce | None = None
    committed_configuration: ConfigurationInForce | None = None

    @property
    def must_persist(self) -> bool:
        """Whether anything must reach the disk before ``advance``."""
        # A raised floor too: later votes depend on it
        # (test_raised_floor_is_written_first_and_deposes_no_leader_of_a_later_term).
        return bool(self.hard_state or self.batches or self.restart or self.floor or self.truncate_from is not None)

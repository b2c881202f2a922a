"""The decisions of the bootstrap of a group, without I/O, clock or randomness. A test searches all interleavings.

A group's log starts with a *bootstrap record*, which names its stores. ``dledger init`` asks every node of the peers
list for the identity of its store (``StoreAnswer``), decides with ``decide`` on one ``Action``, sends it to the nodes,
and asks again until the group is bootstrapped or the answer is a ``Refusal``. It keeps no state between two rounds: it
may be interrupted at any instruction and run again, and several may run at once.

A store changes its ``StoreIdentity`` only by the functions below, and each result is durable before the response
leaves. Its replica votes only once ``is_member`` is durable:

* a record is marked complete only after all its stores hold it durably;
* a record that is not complete can be retired, permanently; another one takes its place only when n - majority + 1 of
  its n voters have retired it, because then no majority of its voters can vote, now or later. The new record names
  the retired ones that its init counted, and a store takes it only if it names all that the store has retired. So a
  record whose init asked a store before that store retired another one is refused there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal, TypeAlias

from dledger_core.config import StorageConfig, is_node_id
from dledger_core.errors import ConfigError, FoundingRefusedError
from dledger_core.ids import NUMBER_MAX, NodeId
from dledger_core.lineage import RecoveryState, stored_fields

GROUP_VERSION: Final = 1
"""Version of the features that the members of a new group use, so that a node of 0.2.0 may be one of them."""
ARCHIVE_VERSION: Final = 2
"""Version of a group that has had an archive: its leader raises it when the first range is proved."""
GROUP_VERSION_MAX: Final = ARCHIVE_VERSION
"""Highest version that this node understands."""

Peers: TypeAlias = tuple[tuple[NodeId, str], ...]
"""A peers list, sorted: (node id, HOST:PORT)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConstants:
    """Constants of a log that are fixed when it is bootstrapped.

    Attributes:
        profile: ``A`` or ``B``.
        data_segment_bytes: size of a data file.
        index_segment_bytes: size of an index file.
        commitlog_prefix: fingerprint of the CommitLog that the log starts after; None if it starts after none.
        first_position: position of the first entry: the end of that CommitLog, otherwise 0.
    """

    profile: Literal["A", "B"]
    data_segment_bytes: int
    index_segment_bytes: int
    commitlog_prefix: str | None = None
    first_position: int = 0

    def __post_init__(self) -> None:
        StorageConfig(
            profile=self.profile,
            data_segment_bytes=self.data_segment_bytes,
            index_segment_bytes=self.index_segment_bytes,
        )
        if not 0 <= self.first_position <= NUMBER_MAX:
            raise ConfigError(f"first_position {self.first_position} is out of range")


@dataclass(frozen=True, slots=True)
class NamedStore:
    """A store that a bootstrap record names.

    Attributes:
        node_id: its node.
        store: its uuid.
        address: HOST:PORT of the node.
    """

    node_id: NodeId
    store: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class BootstrapRecord:
    """The bootstrap of one log.

    Attributes:
        record_id: made by the init that wrote the record.
        log_uuid: identity of the log.
        constants: constants of the log.
        version: the group's version.
        voters: the first voters, sorted by node id.
        learners: empty stores next to converted ones; they become voters when they have caught up.
        replaces: ids of the records, retired by enough voters, whose place it takes; sorted.
    """

    record_id: str
    log_uuid: str
    constants: LogConstants
    version: int
    voters: tuple[NamedStore, ...]
    learners: tuple[NamedStore, ...] = ()
    replaces: tuple[str, ...] = ()

    @property
    def stores(self) -> tuple[NamedStore, ...]:
        """All named stores."""
        return self.voters + self.learners

    @property
    def peers(self) -> Peers:
        """The peers list that the record was made for."""
        return tuple(sorted((named.node_id, named.address) for named in self.stores))

    @property
    def retired_min(self) -> int:
        """Number of voters that must retire the record before another one takes its place."""
        return len(self.voters) - (len(self.voters) // 2 + 1) + 1

    def names(self, node_id: NodeId, store: str | None) -> bool:
        """Whether the record names this store of this node."""
        return any((named.node_id, named.store) == (node_id, store) for named in self.stores)

    def to_fields(self) -> dict[str, Any]:
        """Return the record as a map of plain values."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: object) -> BootstrapRecord | None:
        """Return the record of such a map, or None if it is malformed."""
        if not isinstance(fields, dict):
            return None
        try:
            record = cls(
                **fields
                | {
                    "constants": LogConstants(**fields["constants"]),
                    "voters": tuple(NamedStore(**named) for named in fields["voters"]),
                    "learners": tuple(NamedStore(**named) for named in fields["learners"]),
                    "replaces": tuple(fields["replaces"]),
                }
            )
        except (KeyError, TypeError, ConfigError):
            return None
        texts = [record.record_id, record.log_uuid, *record.replaces]
        texts += [text for named in record.stores for text in (named.node_id, named.store, named.address)]
        ids = [named.node_id for named in record.stores]
        fits = all(type(text) is str and 0 < len(text) < _TEXT_MAX for text in texts) and type(record.version) is int
        return record if fits and record.voters and len(set(ids)) == len(ids) and all(map(is_node_id, ids)) else None


_TEXT_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class RetiredRecord:
    """A bootstrap record that a store has retired and never takes again.

    Attributes:
        record_id: the record.
        is_voter: whether it named the store as a voter.
        needed: voters that must retire it before another record takes its place.
    """

    record_id: str
    is_voter: bool
    needed: int


@dataclass(frozen=True, slots=True)
class Admission:
    """Admission of a store to a log that exists: its leader names the store in a configuration entry.

    Attributes:
        log_uuid: the log.
        constants: constants of the log.
    """

    log_uuid: str
    constants: LogConstants

    @classmethod
    def from_fields(cls, fields: dict[str, Any]) -> Admission:
        """Return the admission of a map of plain values; raise TypeError, KeyError or ConfigError."""
        return cls(str(fields["log_uuid"]), LogConstants(**fields["constants"]))


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreIdentity:
    """The identity of a store, ``meta/identity``.

    Attributes:
        store: its uuid; None until an init or an admission asks for it, because a start must not create an identity.
        record: the bootstrap record that it holds.
        is_complete: whether all stores of the record held it durably.
        retired: bootstrap records that it has retired.
        admission: the log that it was admitted to.
        recovery: what it did in ``dledger recover --lost``; once complete, the log that it belongs to.
    """

    store: str | None = None
    record: BootstrapRecord | None = None
    is_complete: bool = False
    retired: tuple[RetiredRecord, ...] = ()
    admission: Admission | None = None
    recovery: RecoveryState | None = None

    @property
    def is_member(self) -> bool:
        """Whether the store belongs to a log: only then its replica opens."""
        if self.recovery is not None:
            return self.recovery.is_complete
        return self.is_complete or self.admission is not None

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log that the store belongs to, None if there is none."""
        if self.recovery is not None:
            record = self.recovery.record
            return record.log_uuid if record is not None and self.recovery.is_complete else None
        if self.admission is not None:
            return self.admission.log_uuid
        return self.record.log_uuid if self.record is not None and self.is_complete else None

    def to_fields(self) -> dict[str, Any]:
        """Return the identity as a map of plain values."""
        state = None if self.recovery is None else self.recovery.to_fields()
        return asdict(replace(self, recovery=None), dict_factory=stored_fields) | {"continuation": state}

    @classmethod
    def from_fields(cls, fields: object) -> StoreIdentity | None:
        """Return the identity of such a map, or None if it is malformed."""
        if not isinstance(fields, dict):
            return None
        try:
            record, admission, state = fields["record"], fields["admission"], fields["continuation"]
            identity = cls(
                store=fields["store"],
                record=BootstrapRecord.from_fields(record),
                is_complete=fields["is_complete"],
                retired=tuple(RetiredRecord(**each) for each in fields["given_up"]),
                admission=None if admission is None else Admission.from_fields(admission),
                recovery=RecoveryState.from_fields(state),
            )
        except (KeyError, TypeError, ConfigError):
            return None
        fits = type(fields["is_complete"]) is bool and isinstance(fields["store"], str | None)
        parsed = (identity.record is None, identity.recovery is None) == (record is None, state is None)
        return identity if fits and parsed else None


EMPTY: Final = StoreIdentity()


# --- a store --------------------------------------------------------------------------------------------------------


def named(identity: StoreIdentity, new_store: str) -> StoreIdentity:
    """Return the identity with a uuid: its own, otherwise ``new_store``."""
    return identity if identity.store is not None else replace(identity, store=new_store)


def taken(answer: StoreAnswer, record: BootstrapRecord) -> StoreIdentity:
    """Return the identity of a store that takes a bootstrap record.

    Args:
        answer: the store as its node reports it.
        record: the record.

    Raises:
        FoundingRefusedError: the record does not name the store or differs from the node's list or log, or the store
            belongs to another log, holds another record, or has retired this one.
    """
    identity, node = answer.identity, answer.node_id
    if identity.record == record:
        return identity
    if identity.is_member:
        raise _refused(f"the store of {node} belongs to log {identity.log_uuid}", "move it away if that log is lost")
    if identity.recovery is not None:
        raise _refused(_has_retired(node, identity.recovery), _AFTER_RETIRING)
    if identity.record is not None:
        raise _refused(f"the store of {node} holds another bootstrap record", "run dledger init --again")
    if not knows_retired(record, identity):
        raise _refused(
            f"the store of {node} has retired this bootstrap record, or another one since", "run dledger init again"
        )
    if not record.names(node, identity.store):
        raise _refused(f"the bootstrap record does not name the store of {node}", "run dledger init again")
    if record.peers != answer.peers:
        raise _refused(
            f"the bootstrap record was made for {_text(record.peers)}, and {node} was started with "
            f"{_text(answer.peers)}",
            "start all nodes with the same peers string",
        )
    if answer.converted_log not in (None, record.log_uuid) or record.constants != _fitting(answer, record):
        raise _refused(f"the log of the bootstrap record differs from the one of {node}", "run dledger init again")
    return replace(identity, record=record, is_complete=False)


def knows_retired(record: BootstrapRecord, identity: StoreIdentity) -> bool:
    """Whether the init that wrote a record counted all records that a store has retired."""
    return all(each.record_id in record.replaces for each in identity.retired)


def _fitting(answer: StoreAnswer, record: BootstrapRecord) -> LogConstants:
    """Return the constants that a record may have for a store: a learner takes those of the converted stores."""
    if any(named.node_id == answer.node_id for named in record.learners):
        return record.constants
    return answer.constants


def completed(identity: StoreIdentity, record_id: str) -> StoreIdentity:
    """Return the identity of a store whose record is complete; raise FoundingRefusedError if it holds another one."""
    if identity.record is None or identity.record.record_id != record_id:
        raise _refused("the store does not hold this bootstrap record", "run dledger init again")
    return replace(identity, is_complete=True)


def retired(identity: StoreIdentity, node_id: NodeId, record_id: str) -> StoreIdentity:
    """Return the identity of a store that retires its incomplete record.

    Raises:
        FoundingRefusedError: it holds another record, or a complete one.
    """
    record = identity.record
    if record is None or record.record_id != record_id or identity.is_member:
        raise _refused("the store does not hold this bootstrap record, or it is complete", "run dledger init again")
    is_voter = any((voter.node_id, voter.store) == (node_id, identity.store) for voter in record.voters)
    entry = RetiredRecord(record_id, is_voter, record.retired_min)
    return replace(identity, record=None, retired=(*identity.retired, entry))


def admitted(answer: StoreAnswer, admission: Admission, new_store: str) -> StoreIdentity:
    """Return the identity of a store that is admitted to a log: its own if it belongs to that log already.

    A new uuid, although an init may have asked for one before: a record that names the old one is refused then.

    Raises:
        FoundingRefusedError: it belongs to another log, holds a bootstrap record or entries.
    """
    identity, node = answer.identity, answer.node_id
    if identity.log_uuid == admission.log_uuid:
        return identity
    if identity.recovery is not None and not identity.is_member:
        raise _refused(_has_retired(node, identity.recovery), _AFTER_RETIRING)
    if identity.is_member or answer.converted_log is not None:
        belongs = identity.log_uuid or answer.converted_log
        raise _refused(f"the store of {node} belongs to log {belongs}", "move it away, then run the command again")
    if identity.record is not None:
        raise _refused(
            f"the store of {node} holds the bootstrap record of another log", "move it away, then run the command again"
        )
    return replace(identity, store=new_store, admission=admission)


_AFTER_RETIRING: Final = "run dledger recover --lost again, or move the store away"


def _has_retired(node: NodeId, state: RecoveryState) -> str:
    return f"the store of {node} has retired log {state.retired.log_uuid}"


def _refused(what: str, remedy: str) -> FoundingRefusedError:
    return FoundingRefusedError(what, "", remedy)


# --- init -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAnswer:
    """A node's answer about its store of a group.

    Attributes:
        node_id: the node.
        peers: the list that it was started with.
        identity: identity of the store.
        constants: those of its log, or of its settings.
        converted_log: identity of the log of a converted store that was not bootstrapped; None for any other store.
    """

    node_id: NodeId
    peers: Peers
    identity: StoreIdentity
    constants: LogConstants
    converted_log: str | None = None

    def to_fields(self) -> dict[str, Any]:
        """Return the answer as a map of plain values."""
        return asdict(self, dict_factory=stored_fields)

    @classmethod
    def from_fields(cls, fields: object) -> StoreAnswer | None:
        """Return the answer of such a map, or None if it is malformed."""
        if not isinstance(fields, dict):
            return None
        try:
            identity = StoreIdentity.from_fields(fields["identity"])
            if identity is None:
                return None
            return cls(
                node_id=NodeId(str(fields["node_id"])),
                peers=tuple((NodeId(str(node)), str(address)) for node, address in fields["peers"]),
                identity=identity,
                constants=LogConstants(**fields["constants"]),
                converted_log=None if fields["converted_log"] is None else str(fields["converted_log"]),
            )
        except (KeyError, TypeError, ValueError):
            return None


@dataclass(frozen=True, slots=True)
class Exists:
    """All stores belong to one log: nothing to do.

    Attributes:
        log_uuid: the log.
    """

    log_uuid: str


@dataclass(frozen=True, slots=True)
class Take:
    """Send a bootstrap record to ``nodes``."""

    record: BootstrapRecord
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Complete:
    """Mark a bootstrap record, which all its stores hold durably, complete on ``nodes``."""

    record: BootstrapRecord
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Retire:
    """Retire incomplete bootstrap records: (node, record id)."""

    records: tuple[tuple[NodeId, str], ...]


@dataclass(frozen=True, slots=True)
class Wait:
    """Wait for the answers of ``nodes``."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The group cannot be bootstrapped; ``what`` and ``remedy`` as in an error."""

    what: str
    remedy: str


Decision: TypeAlias = Exists | Take | Complete | Retire | Wait | Refusal


def decide(
    group: str,
    peers: Peers,
    answers: Mapping[NodeId, StoreAnswer],
    new_record_id: str,
    new_log_uuid: str,
    *,
    again: bool = False,
) -> Decision:
    """Return the next action of an init.

    Args:
        group: the group.
        peers: its list.
        answers: the answers by the listed node that was asked; of the others there is none.
        new_record_id: id of a record that this action may create.
        new_log_uuid: identity of a log that this action may create.
        again: whether incomplete records that cannot be continued are retired.
    """
    for node in sorted(answers):
        if (refusal := _fits(peers, node, answers[node])) is not None:
            return refusal
    has_members = any(answer.identity.is_member for answer in answers.values())
    retired = {node: state for node, answer in answers.items() if (state := _retired_log(answer.identity)) is not None}
    unfinished = [node for node in sorted(retired) if not has_members or retired[node].record is not None]
    if unfinished:
        return Refusal(
            f"the stores of {', '.join(unfinished)} have retired their log, in a recovery that is not finished or "
            "because they were restored from a backup",
            "run dledger recover --lost, with the same nodes if it was run before",
        )
    if retired:
        return Refusal(
            f"the stores of {', '.join(sorted(retired))} have retired their log, and the group does without them",
            "move these stores away and start their nodes, then run dledger member add or dledger member replace",
        )
    if has_members:
        return _with_members(group, peers, answers)
    missing = tuple(node for node, _ in peers if node not in answers)
    if missing:
        return Wait(missing)
    held = {node: answer.identity.record for node, answer in answers.items() if answer.identity.record is not None}
    records = {record.record_id: record for record in held.values()}
    if not records:
        if (refusal := _not_retired(answers)) is not None:
            return refusal
        return _new(peers, answers, new_record_id, new_log_uuid)
    if len(records) == 1:
        (record,) = records.values()
        if all(_continues(record, node, answer.identity) for node, answer in answers.items()) and record.peers == peers:
            lacking = tuple(node for node, _ in peers if node not in held)
            return Take(record, lacking) if lacking else Complete(record, tuple(node for node, _ in peers))
    if again:
        return Retire(tuple((node, held[node].record_id) for node in sorted(held)))
    holders = ", ".join(f"{node} holds {held[node].record_id[:8]}" for node in sorted(held))
    return Refusal(
        f"an earlier bootstrap is incomplete and cannot be continued: {holders}",
        f"retire it: {command('init --again', group, peers)}",
    )


def _retired_log(identity: StoreIdentity) -> RecoveryState | None:
    """Return the state in a recovery of a store that has no log now."""
    return None if identity.is_member else identity.recovery


def command(words: str, group: str, peers: Peers) -> str:
    """Return a command line about a group."""
    return f"dledger {words} --group {group} --peers '{_text(peers)}'"


def _fits(peers: Peers, node: NodeId, answer: StoreAnswer) -> Refusal | None:
    """Return why an answer does not count, or None."""
    if answer.node_id != node:
        address = dict(peers)[node]
        return Refusal(f"the node at {address} is {answer.node_id}, not {node}", "correct the peers string")
    if answer.peers != peers:
        return Refusal(
            f"{node} was started with another list: {_text(answer.peers)}, not {_text(peers)}",
            "start all nodes with the same peers string, and give it to dledger init",
        )
    return None


def _continues(record: BootstrapRecord, node: NodeId, identity: StoreIdentity) -> bool:
    """Whether a store holds a record or may take it."""
    return identity.record == record or (record.names(node, identity.store) and knows_retired(record, identity))


def is_retired(answers: Mapping[NodeId, StoreAnswer], record: RetiredRecord) -> bool:
    """Whether enough voters of a record have retired it, so that no majority of them can vote."""
    return _count_retired(answers, record) >= record.needed


def _count_retired(answers: Mapping[NodeId, StoreAnswer], record: RetiredRecord) -> int:
    return sum(
        any(each.record_id == record.record_id and each.is_voter for each in answer.identity.retired)
        for answer in answers.values()
    )


def _not_retired(answers: Mapping[NodeId, StoreAnswer]) -> Refusal | None:
    for answer in answers.values():
        for each in answer.identity.retired:
            if not is_retired(answers, each):
                count = _count_retired(answers, each)
                return Refusal(
                    f"{count} of the stores of an earlier bootstrap have retired it, {each.needed} are needed: the "
                    "others were lost, and may have acknowledged entries",
                    "restore the lost stores; only if the group was never used, remove the stores of all its nodes",
                )
    return None


def _with_members(group: str, peers: Peers, answers: Mapping[NodeId, StoreAnswer]) -> Decision:
    """Return the action where a store belongs to a log: complete its bootstrap, or report stores that are not in it."""
    logs = {str(answer.identity.log_uuid): node for node, answer in answers.items() if answer.identity.is_member}
    if len(logs) > 1:
        shown = ", ".join(f"{node} has log {log}" for log, node in sorted(logs.items()))
        return Refusal(
            f"the stores belong to different logs: {shown}",
            "move the stores of the wrong log away, or correct the peers string",
        )
    (log_uuid,) = logs
    record = next((a.identity.record for a in answers.values() if a.identity.is_complete), None)
    left = [node for node, answer in answers.items() if not answer.identity.is_member]
    if record is not None:
        incomplete = tuple(node for node in sorted(left) if answers[node].identity.record == record)
        if incomplete:
            return Complete(record, incomplete)
    if left:
        what, words = _lost(log_uuid, record, answers, sorted(left))
        return Refusal(what, f"run {command(words, group, peers)}")
    missing = tuple(node for node, _ in peers if node not in answers)
    return Wait(missing) if missing else Exists(log_uuid)


def _lost(
    log_uuid: str, record: BootstrapRecord | None, answers: Mapping[NodeId, StoreAnswer], left: list[NodeId]
) -> tuple[str, str]:
    """Describe empty or foreign stores next to those of a log; return the words of the command to run."""
    holders = ", ".join(sorted(node for node, answer in answers.items() if answer.identity.is_member))
    statement = f"log {log_uuid} exists on {holders}, and the stores of {', '.join(left)} do not belong to it"
    voters = () if record is None else record.voters
    lost = sum(voter.node_id in left for voter in voters)
    if lost and len(voters) - lost < len(voters) // 2 + 1:
        return f"{statement}: a majority of its voters is lost", f"recover --lost {','.join(left)}"
    if record is None:
        return f"{statement}; a member is replaced there, another node is added", "member list"
    return statement, f"member replace {left[0]}"


def _new(peers: Peers, answers: Mapping[NodeId, StoreAnswer], record_id: str, log_uuid: str) -> Take | Refusal:
    """Return the action that sends a new record."""
    converted = {node: answer for node, answer in answers.items() if answer.converted_log is not None}
    logs = {str(answer.converted_log) for answer in converted.values()}
    if len(logs) > 1:
        shown = ", ".join(f"{node} has {answer.converted_log}" for node, answer in sorted(converted.items()))
        return Refusal(f"the converted stores are of different logs: {shown}", "convert copies of the same group")
    voters = converted or answers
    first = min(voters)
    for node in sorted(voters):
        if voters[node].constants != voters[first].constants:
            return Refusal(
                f"{first} and {node} would start different logs: {_difference(voters[first], voters[node])}",
                "start all nodes with the same settings",
            )
    addresses = dict(peers)

    def stores(nodes: Mapping[NodeId, StoreAnswer]) -> tuple[NamedStore, ...]:
        return tuple(NamedStore(node, nodes[node].identity.store or "", addresses[node]) for node in sorted(nodes))

    record = BootstrapRecord(
        record_id=record_id,
        log_uuid=logs.pop() if logs else log_uuid,
        constants=voters[first].constants,
        version=GROUP_VERSION,
        voters=stores(voters),
        learners=stores({node: answer for node, answer in answers.items() if node not in voters}),
        replaces=tuple(sorted({each.record_id for answer in answers.values() for each in answer.identity.retired})),
    )
    return Take(record, tuple(node for node, _ in peers))


def _difference(one: StoreAnswer, other: StoreAnswer) -> str:
    ours, theirs = asdict(one.constants), asdict(other.constants)
    return ", ".join(f"{name} {ours[name]} and {theirs[name]}" for name in ours if ours[name] != theirs[name])


def _text(peers: Peers) -> str:
    return ";".join(f"{node}-{address}" for node, address in peers)

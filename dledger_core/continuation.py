"""The decisions of ``dledger recover --lost``: a new log continues one whose majority is lost permanently. No I/O.

A log is a chain: it *continues* the logs before it, each up to one entry that index, term and check identify. The
recovery asks all nodes, decides with ``decide`` on one ``Action``, carries it out, and asks again. It keeps no state
between two rounds, so it may be interrupted at any instruction and run again, and two may run at once.

A store changes its ``Continuation`` only by ``gave_up``, ``taken`` and ``completed``, and the result is durable before
the response leaves:

* A store that gave its log up neither votes nor acknowledges in it, ever. So its end is final, and the best end of all
  survivors contains every committed entry that one of them has (Raft's rule of elections).
* A record is complete only after all its survivors hold it, and a survivor replaces one only for a record that names a
  survivor of the first as lost. So two recoveries that name the same lost nodes end as one log.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Final, TypeAlias

from dledger_core.errors import RecoveryRefusedError
from dledger_core.ids import NO_INDEX, NO_TERM, NUMBER_MAX, NodeId

_TEXT_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class ContinuedLog:
    """A log that another one continues.

    Attributes:
        log_uuid: the log.
        index: the last entry that the other log contains.
        term: its term.
        check: its check, as in a reader's position; None if the log was empty.
    """

    log_uuid: str
    index: int
    term: int
    check: int | None


Chain: TypeAlias = tuple[ContinuedLog, ...]
"""The logs that a log continues, oldest first."""


def find_link(chain: Sequence[ContinuedLog], log_uuid: str | None) -> ContinuedLog | None:
    """Return the link of a log in a chain, or None."""
    return next((link for link in chain if link.log_uuid == log_uuid), None)


def follows(chain: Chain, log_uuid: str, last_index: int) -> bool:
    """Whether a log with this chain contains a log's entries up to ``last_index``, by their indexes only."""
    link = find_link(chain, log_uuid)
    return link is not None and last_index <= link.index


def contains(
    chain: Chain,
    log_uuid: str,
    index: int,
    term: int,
    *,
    first_index: int,
    commit_index: int,
    term_at: Callable[[int], int | None],
) -> bool | None:
    """Whether a log with this chain contains the entry of another log that index and term name; None if unknown.

    Up to the link, all entries of this log are those of the other one, where index and term identify an entry. Only
    committed entries count: a learner may still hold entries that its log does not have. The term of a deleted entry
    is not known.

    Args:
        chain: chain of this log.
        log_uuid: the other log.
        index: index of the entry; NO_INDEX for an empty log, which every log contains.
        term: term of the entry.
        first_index: first entry of this log.
        commit_index: last committed entry of this log.
        term_at: returns the term of an entry of this log.
    """
    if not follows(chain, log_uuid, index):
        return False
    if index == NO_INDEX:
        return True
    return term_at(index) == term if first_index <= index <= commit_index else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LogEnd:
    """The end of a store's log.

    Attributes:
        term: the store's own term.
        last_term: term of the last entry.
        last_index: index of the last entry.
        commit_index: the last entry that the store knows to be committed.
        check: check of the last entry; None if the log is empty or the entry is deleted.
        is_recovering: whether the store may have lost entries after it.
        ranges: (term, first index) of each range of entries with one term, in order; empty where it is unknown. The
            first one may begin before the log, and has the term of the entry before it.
    """

    term: int
    last_term: int
    last_index: int
    commit_index: int
    check: int | None = None
    is_recovering: bool = False
    ranges: tuple[tuple[int, int], ...] = ()

    @property
    def rank(self) -> tuple[int, int]:
        """The order of elections."""
        return self.last_term, self.last_index

    def term_at(self, index: int) -> int | None:
        """Return the term of an entry; None if it is unknown, or the log does not reach it."""
        if index == self.last_index:
            return self.last_term
        known = [term for term, start in self.ranges if start <= index] if index < self.last_index else []
        return known[-1] if known else None

    def may_contain(self, index: int, term: int | None) -> bool:
        """Whether the log has the entry of this index and term; where the term is unknown, of this index."""
        found = self.term_at(index)
        return index <= self.last_index and (None in (term, found) or found == term)


@dataclass(frozen=True, slots=True)
class Hole:
    """Entries [start, end) of a store's log without a good record; the log continues behind them."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class GivenUpLog:
    """The log that a store gave up, and its final end there."""

    log_uuid: str
    store: str
    end: LogEnd


@dataclass(frozen=True, slots=True)
class Survivor:
    """A store that continues in the new log.

    Attributes:
        node_id: its node.
        before: its uuid in the old log.
        store: its uuid in the new log.
        address: HOST:PORT of the node.
    """

    node_id: NodeId
    before: str
    store: str
    address: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuationRecord:
    """The beginning of a log that continues another one.

    Attributes:
        log_uuid: identity of the new log.
        continues: its chain; the last one is the log that was given up.
        term: highest term that a survivor reported; the new log starts above it.
        version: the group's version.
        voter: the survivor with the best end, the only voter.
        learners: the others; they become voters when they have caught up.
        lost: the nodes that were named lost, sorted.
    """

    log_uuid: str
    continues: Chain
    term: int
    version: int
    voter: Survivor
    learners: tuple[Survivor, ...]
    lost: tuple[NodeId, ...]

    @property
    def point(self) -> ContinuedLog:
        """The end of the old log that the new one contains."""
        return self.continues[-1]

    @property
    def survivors(self) -> tuple[Survivor, ...]:
        """All survivors, the voter first: of two records, only one can get its first survivor."""
        return self.voter, *self.learners

    def find(self, node_id: NodeId) -> Survivor | None:
        """Return a node's survivor, or None."""
        return next((survivor for survivor in self.survivors if survivor.node_id == node_id), None)

    def to_fields(self) -> dict[str, Any]:
        """Return the record as a map of plain values."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: object) -> ContinuationRecord | None:
        """Return the record of such a map, or None if it is malformed."""
        try:
            assert isinstance(fields, dict)
            record = cls(
                **fields
                | {
                    "continues": chain_of(fields["continues"]),
                    "voter": Survivor(**fields["voter"]),
                    "learners": tuple(Survivor(**each) for each in fields["learners"]),
                    "lost": tuple(fields["lost"]),
                }
            )
        except (AssertionError, KeyError, TypeError, ValueError):
            return None
        texts = [record.log_uuid, *record.lost]
        texts += [text for each in record.survivors for text in (each.node_id, each.before, each.store, each.address)]
        fits = all(type(text) is str and 0 < len(text) < _TEXT_MAX for text in texts) and bool(record.continues)
        return record if fits and type(record.version) is int and _fits(record.term) else None


def chain_of(rows: object) -> Chain:
    """Return the chain of a list of maps; raise ValueError or TypeError if it is malformed."""
    if not isinstance(rows, list | tuple):
        raise TypeError("not a list")
    chain = tuple(ContinuedLog(**row) for row in rows)
    for link in chain:
        check_fits = link.check is None or (type(link.check) is int and 0 <= link.check < 1 << 32)
        if type(link.log_uuid) is not str or not check_fits or not _fits(link.index) or not _fits(link.term):
            raise ValueError("not a continued log")
    return chain


def chain_rows(chain: Chain) -> list[list[Any]]:
    """Return a chain as METADATA carries it."""
    return [[link.log_uuid, link.index, link.term, -1 if link.check is None else link.check] for link in chain]


def chain_of_rows(rows: Sequence[Sequence[Any]] | None) -> Chain:
    """Return the chain of ``chain_rows``."""
    return tuple(
        ContinuedLog(log_uuid, index, term, None if check < 0 else check) for log_uuid, index, term, check in rows or ()
    )


def end_of(fields: object) -> LogEnd:
    """Return the end of a map; raise ValueError or TypeError if it is malformed."""
    if not isinstance(fields, dict):
        raise TypeError("not a map")
    ranges = tuple((term, start) for term, start in fields.get("ranges", ()))
    end = LogEnd(**fields | {"ranges": ranges})
    if not all(map(_fits, (end.term, end.last_term, end.last_index, end.commit_index))):
        raise ValueError("not the end of a log")
    return end


def _fits(number: object) -> bool:
    return type(number) is int and NO_TERM <= number <= NUMBER_MAX


# --- a store --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Continuation:
    """State of a store in a recovery: part of its identity.

    Attributes:
        given_up: the log that it gave up.
        record: the record that it holds.
        is_complete: whether all survivors held the record: the store belongs to the new log.
    """

    given_up: GivenUpLog
    record: ContinuationRecord | None = None
    is_complete: bool = False

    def to_fields(self) -> dict[str, Any]:
        """Return the state as a map of plain values."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: object) -> Continuation | None:
        """Return the state of such a map, or None if it is malformed."""
        try:
            assert isinstance(fields, dict)
            before, record = fields["given_up"], fields["record"]
            given_up = GivenUpLog(before["log_uuid"], before["store"], end_of(before["end"]))
            found = cls(
                given_up, None if record is None else ContinuationRecord.from_fields(record), fields["is_complete"]
            )
        except (AssertionError, KeyError, TypeError, ValueError):
            return None
        fits = found.record is not None or found.is_complete is False
        return found if fits and (record is None) == (found.record is None) else None


def gave_up(state: Continuation | None, log_uuid: str, store: str, end: LogEnd) -> Continuation:
    """Return the state of a store that gives its log up; the same again if it did so before."""
    if state is not None and state.given_up.log_uuid == log_uuid:
        return state
    return Continuation(GivenUpLog(log_uuid, store, end))


def with_end(state: Continuation | None, end: LogEnd) -> Continuation:
    """Return the state of a store whose holes were filled, or whose log was ended before one.

    Raises:
        RecoveryRefusedError: it has not given its log up, or a record names its end.
    """
    record = None if state is None else state.record
    if state is None or state.is_complete or (record is not None and record.voter.before == state.given_up.store):
        raise _refused("the store has not given its log up, or the record of a recovery names its end")
    return replace(state, given_up=replace(state.given_up, end=end))


def taken(state: Continuation | None, node_id: NodeId, record: ContinuationRecord) -> Continuation:
    """Return the state of a store that takes a record.

    Raises:
        RecoveryRefusedError: it did not give this log up, the record does not name it, or it holds another one.
    """
    if state is not None and state.record == record:
        return state
    survivor = record.find(node_id)
    if (
        state is None
        or survivor is None
        or (record.point.log_uuid, survivor.before)
        != (
            state.given_up.log_uuid,
            state.given_up.store,
        )
    ):
        raise _refused(f"the store of {node_id} has not given up the log that the record continues")
    if state.is_complete or (state.record is not None and not _outranks(record, state.record)):
        raise _refused(f"the store of {node_id} holds the record of another recovery")
    return replace(state, record=record)


def _outranks(record: ContinuationRecord, held: ContinuationRecord) -> bool:
    """Whether a record may replace one: it names all its lost nodes, and a survivor of it too.

    Without that survivor the held record cannot be complete on all; a person says that it will not return.
    """
    lost = set(record.lost)
    return set(held.lost) < lost and any(each.node_id in lost for each in held.survivors)


def completed(state: Continuation | None, log_uuid: str) -> Continuation:
    """Return the state of a store whose record all survivors hold; raise RecoveryRefusedError if it has another."""
    if state is None or state.record is None or state.record.log_uuid != log_uuid:
        raise _refused("the store does not hold the record of this recovery")
    return replace(state, is_complete=True)


def _refused(what: str) -> RecoveryRefusedError:
    return RecoveryRefusedError(what, "", "run dledger recover again")


# --- a recovery -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class KnownMember:
    """A member of a log as one of its stores knows it."""

    node_id: NodeId
    store: str
    address: str
    is_voter: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class SurvivorAnswer:
    """A node's answer about its store of a group.

    Attributes:
        node_id: the node.
        log_uuid: the log that the store belongs to, or that it gave up; None if there is none.
        store: its uuid in that log.
        profile: of the log.
        version: the group's version.
        members: members of the log as the store knows them.
        chain: the logs that the log continues.
        end: end of the log; None if it cannot be read now.
        reason: why it cannot.
        leader: an active leader that the store follows, or that it is itself.
        state: what it did in a recovery.
        holes: the holes of its log.
    """

    node_id: NodeId
    log_uuid: str | None = None
    store: str | None = None
    profile: str = "B"
    version: int = 0
    members: tuple[KnownMember, ...] = ()
    chain: Chain = ()
    end: LogEnd | None = None
    reason: str = ""
    leader: NodeId | None = None
    state: Continuation | None = None
    holes: tuple[Hole, ...] = ()

    @property
    def held(self) -> ContinuationRecord | None:
        """A record that is not complete here."""
        return None if self.state is None or self.state.is_complete else self.state.record

    @property
    def has_given_up(self) -> bool:
        """Whether the store gave its log up and is not in a new one yet."""
        return self.state is not None and not self.state.is_complete

    def to_fields(self) -> dict[str, Any]:
        """Return the answer as a map of plain values."""
        return asdict(self)

    @classmethod
    def from_fields(cls, fields: object) -> SurvivorAnswer | None:
        """Return the answer of such a map, or None if it is malformed."""
        try:
            assert isinstance(fields, dict)
            end, state = fields["end"], fields["state"]
            found = Continuation.from_fields(state)
            if (found is None) != (state is None):
                return None
            return cls(
                **fields
                | {
                    "members": tuple(KnownMember(**each) for each in fields["members"]),
                    "chain": chain_of(fields["chain"]),
                    "end": None if end is None else end_of(end),
                    "state": found,
                    "holes": tuple(Hole(**each) for each in fields.get("holes", ())),
                }
            )
        except (AssertionError, KeyError, TypeError, ValueError):
            return None


Answers: TypeAlias = Mapping[NodeId, SurvivorAnswer]


@dataclass(frozen=True, slots=True)
class GiveUpLog:
    """Let ``nodes`` give a log up."""

    log_uuid: str
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class FillHoles:
    """Let ``nodes`` fill the holes of their stores from ``survivors``, which have all given the log up."""

    log_uuid: str
    nodes: tuple[NodeId, ...]
    survivors: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class CutLog:
    """Let a node end its log before its first hole, which starts at ``start``: a person has accepted the loss."""

    nodes: tuple[NodeId]
    start: int


@dataclass(frozen=True, slots=True)
class TakeRecord:
    """Send a record to ``nodes``, in this order, one at a time."""

    record: ContinuationRecord
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class CompleteRecord:
    """Mark a record, which all survivors hold, complete on ``nodes``."""

    record: ContinuationRecord
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Continued:
    """The group has a new log on all survivors: nothing to do."""

    log_uuid: str
    chain: Chain


@dataclass(frozen=True, slots=True)
class Unanswered:
    """These nodes must answer first."""

    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Refused:
    """No recovery is possible, or none is needed; ``what`` and ``remedy`` as in an error."""

    what: str
    remedy: str


@dataclass(frozen=True, slots=True)
class Electable:
    """The voters that answer can elect a leader: nothing is changed."""

    nodes: tuple[NodeId, ...]
    leader: NodeId | None


Holes: TypeAlias = Mapping[NodeId, tuple[Hole, ...]]
Action: TypeAlias = (
    GiveUpLog | FillHoles | CutLog | TakeRecord | CompleteRecord | Continued | Electable | Unanswered | Refused
)


def best_of(ends: Mapping[NodeId, LogEnd]) -> NodeId:
    """Return the survivor with the best end of those that may continue the log; of equal ones the first by node id.

    The best (last term, last index) is Raft's rule for a *majority* of voters. Survivors are none: an old leader with
    an uncommitted entry of a late term outranks a log with entries that a lost leader of a later term has committed
    (the paper's figure 8). So only stores continue the log that contain the entry at the highest commit index of all.
    """
    known = max(sorted(ends), key=lambda node: ends[node].commit_index)
    index = ends[known].commit_index
    term = ends[known].term_at(index)
    eligible = [node for node in sorted(ends) if ends[node].may_contain(index, term)]
    return max(eligible or sorted(ends), key=lambda node: ends[node].rank)


def decide(
    lost: AbstractSet[NodeId],
    answers: Answers,
    new_uuid: Callable[[], str],
    *,
    accepts_loss: bool = False,
    tried: Holes | None = None,
) -> Action:
    """Return the next action of a recovery.

    Args:
        lost: the nodes that were named lost.
        answers: the answers of all nodes that answered, the named ones too.
        new_uuid: returns a new identity.
        accepts_loss: whether a hole without an intact copy may end the log.
        tried: the holes before the last attempt to fill them.
    """
    found = {node: answer for node, answer in answers.items() if answer.log_uuid is not None and node not in lost}
    records = {record.log_uuid: record for answer in found.values() if (record := answer.held) is not None}
    if records:
        return _continued(lost, answers, records, new_uuid, tried, accepts_loss=accepts_loss)
    logs = {str(answer.log_uuid): node for node, answer in found.items()}
    if len(logs) != 1:
        return _no_log(logs)
    (log_uuid,) = logs
    refusal = _not_possible(lost, answers, found, log_uuid)
    if refusal is not None:
        return refusal
    serving = tuple(node for node in sorted(found) if not found[node].has_given_up)
    if serving:
        return GiveUpLog(log_uuid, serving)
    if (action := _repair_action(lost, found, log_uuid, tried, accepts_loss=accepts_loss)) is not None:
        return action
    record = _new_record(lost, found, new_uuid)
    return TakeRecord(record, tuple(survivor.node_id for survivor in record.survivors))


def holes_of(lost: AbstractSet[NodeId], answers: Answers) -> Holes:
    """Return the holes of the survivors that have some."""
    return {node: answers[node].holes for node in sorted(answers) if node not in lost and answers[node].holes}


def _repair_action(
    lost: AbstractSet[NodeId], found: Answers, log_uuid: str, tried: Holes | None, *, accepts_loss: bool
) -> Action | None:
    """Return the repair that holes require before a record names the best end, or None.

    As long as an attempt fills some, there is another one: a store may need one that has just been filled. Holes of the
    others do not matter: they get the entries from the voter.
    """
    holes, best = holes_of(lost, found), _best(found)
    if holes and len(found) > 1 and holes != tried:
        return FillHoles(log_uuid, tuple(holes), tuple(sorted(found)))
    if best not in holes:
        return None
    hole, end = holes[best][0], found[best].end
    assert end is not None
    if accepts_loss:
        return CutLog((best,), hole.start)
    command = " ".join(["dledger recover", *_naming(lost), "--accept-loss"])
    return Refused(
        f"entries {hole.start} to {hole.end - 1} are damaged on {best}, and no node that is left has them; its log "
        f"continues behind them up to {end.last_index}",
        f"start a node that has them and leave it out of --lost; or run {command}: the log ends before entry "
        f"{hole.start}, and the bytes behind it are kept in a file of the store",
    )


def _naming(lost: Iterable[NodeId]) -> list[str]:
    """Return the option that names lost nodes; empty if there are none."""
    return [f"--lost {','.join(sorted(lost))}"] if lost else []


def _no_log(logs: Mapping[str, NodeId]) -> Refused:
    if not logs:
        return Refused("no node that is left has a store of the group", "restore a store, or found the group again")
    shown = ", ".join(f"{node} has log {log}" for log, node in sorted(logs.items()))
    return Refused(f"the stores belong to different logs: {shown}", "move the stores of the wrong log away")


def _not_possible(lost: AbstractSet[NodeId], answers: Answers, found: Answers, log_uuid: str) -> Action | None:
    """Return why the survivors of a log may not be asked to give it up, or None."""
    known = _members(found)
    for node in sorted(lost):
        answer = answers.get(node)
        if answer is not None and answer.log_uuid == log_uuid and _is_member(known, answer):
            return Refused(
                f"{node} is not lost: it answers with a store of log {log_uuid}", f"run the command without {node}"
            )
    unreadable = [node for node, answer in sorted(found.items()) if answer.end is None]
    if unreadable:
        return Refused(
            f"the store of {unreadable[0]} cannot be used: {found[unreadable[0]].reason}",
            "repair the store, or name the node lost",
        )
    left = sorted({member.node_id for member in known} - lost - found.keys())
    wiped = [node for node in left if node in answers]
    if wiped:
        return Refused(f"{wiped[0]} answers and has no store of log {log_uuid}", f"add {wiped[0]} to --lost")
    if left:
        return Unanswered(tuple(left))
    best = found[_best(found)]
    voters = [member.node_id for member in best.members if member.is_voter]
    able = [node for node in voters if node not in lost and _votes(found[node])]
    if len(able) > len(voters) // 2 and best.state is not None and best.state.is_complete:
        return Continued(log_uuid, best.chain)
    if len(able) > len(voters) // 2:
        leaders = (found[node].leader for node in able)
        return Electable(tuple(able), next((leader for leader in leaders if leader is not None), None))
    leader = next((answer.leader for _, answer in sorted(found.items()) if answer.leader is not None), None)
    if leader is not None:
        return Refused(
            f"{leader} leads the group, so a majority of its voters is alive",
            "run dledger member replace; if the nodes were lost seconds ago, run the command again",
        )
    if best.profile == "A":
        return Refused("a log of profile A cannot change its members", "copy a store, and found the group again")
    return None


def _votes(answer: SurvivorAnswer) -> bool:
    return not answer.has_given_up and answer.end is not None and not answer.end.is_recovering


def _members(found: Answers) -> set[KnownMember]:
    """All members that one of the stores knows: an uncommitted change may be in force on one of them only."""
    return {member for answer in found.values() for member in answer.members}


def _is_member(known: AbstractSet[KnownMember], answer: SurvivorAnswer) -> bool:
    return any((member.node_id, member.store) == (answer.node_id, answer.store) for member in known)


def _best(found: Answers) -> NodeId:
    return best_of({node: answer.end for node, answer in found.items() if answer.end is not None})


def _continued(
    lost: AbstractSet[NodeId],
    answers: Answers,
    records: Mapping[str, ContinuationRecord],
    new_uuid: Callable[[], str],
    tried: Holes | None,
    *,
    accepts_loss: bool,
) -> Action:
    """Return the action where stores hold incomplete records: continue the one of the same lost nodes."""
    mine = [record for record in records.values() if set(record.lost) == set(lost)]
    others = [record for record in records.values() if set(record.lost) != set(lost)]
    complete = {
        str(answer.log_uuid) for answer in answers.values() if answer.state is not None and answer.state.is_complete
    }
    started = next((record for record in records.values() if record.log_uuid in complete), None)
    if started is not None:
        return CompleteRecord(started, _holders(started, answers))
    if len(mine) == 1:
        record = mine[0]
        missing = tuple(each.node_id for each in record.survivors if each.node_id not in answers)
        if missing:
            return Unanswered(missing)
        lacking = tuple(each.node_id for each in record.survivors if answers[each.node_id].held != record)
        return TakeRecord(record, lacking) if lacking else CompleteRecord(record, _holders(record, answers))
    fresh = {node: answer for node, answer in answers.items() if node not in lost and answer.has_given_up}
    if not mine and fresh and all(set(record.lost) < set(lost) for record in others):
        log_uuid = others[0].point.log_uuid
        if (action := _repair_action(lost, fresh, log_uuid, tried, accepts_loss=accepts_loss)) is not None:
            return action
    if not mine and fresh:
        record = _new_record(lost, fresh, new_uuid)
        if all(_outranks(record, held) for held in others):
            return TakeRecord(record, tuple(survivor.node_id for survivor in record.survivors))
    shown = "; ".join("".join(_naming(record.lost)) or "no --lost" for record in others or mine)
    return Refused(
        f"another recovery is in progress, with {shown}",
        "run that command; name all lost nodes of both if one of its survivors was lost meanwhile",
    )


def _holders(record: ContinuationRecord, answers: Answers) -> tuple[NodeId, ...]:
    nodes = (each.node_id for each in record.survivors)
    return tuple(node for node in nodes if node in answers and answers[node].held == record)


def _new_record(lost: AbstractSet[NodeId], found: Answers, new_uuid: Callable[[], str]) -> ContinuationRecord:
    """Return a record of stores that have all given their log up."""
    ends = {node: answer.end for node, answer in found.items() if answer.end is not None}
    best = best_of(ends)
    end, chain = ends[best], found[best].chain
    addresses = {member.node_id: member.address for member in found[best].members}
    addresses = {member.node_id: member.address for member in _members(found)} | addresses

    def survivor(node: NodeId) -> Survivor:
        return Survivor(node, found[node].store or "", new_uuid(), addresses[node])

    return ContinuationRecord(
        log_uuid=new_uuid(),
        continues=_extended(chain, ContinuedLog(str(found[best].log_uuid), end.last_index, end.last_term, end.check)),
        term=max(each.term for each in ends.values()),
        version=found[best].version,
        voter=survivor(best),
        learners=tuple(survivor(node) for node in sorted(found) if node != best),
        lost=tuple(sorted(lost)),
    )


def _extended(chain: Chain, point: ContinuedLog) -> Chain:
    """Return a chain with one more link, which caps the earlier ones: the new log contains nothing after its point.

    The best end may be that of a survivor that never caught up in the log of the point. Its last entry is one of the
    earlier log then, because a log that continues another one has entries of higher terms only.
    """
    end = point.term, point.index
    capped = (replace(point, log_uuid=link.log_uuid) if end < (link.term, link.index) else link for link in chain)
    return (*capped, point)


# --- what may be lost -----------------------------------------------------------------------------------------------


def preview(lost: AbstractSet[NodeId], answers: Answers) -> dict[str, Any]:
    """Return the entries that a recovery keeps and those that it may lose, as plain values; for ``--dry-run``.

    Entries up to ``committed_end`` are certain. Those in ``unconfirmed`` are kept, although no survivor knows whether
    they are committed. From ``may_be_lost_from`` on, entries are lost that only lost nodes had.
    """
    found = {node: answer for node, answer in answers.items() if answer.log_uuid is not None and node not in lost}
    ends = {node: answer.end for node, answer in found.items() if answer.end is not None}
    if not ends:
        return {}
    best = best_of(ends)
    committed_end = max(end.commit_index for end in ends.values()) + 1
    return {
        "log": found[best].log_uuid,
        "lost": sorted(lost),
        "first_voter": best,
        "continues_at_index": ends[best].last_index,
        "continues_at_term": ends[best].last_term,
        "committed_end": committed_end,
        "unconfirmed": [committed_end, ends[best].last_index + 1],
        "may_be_lost_from": committed_end,
        "survivors": [
            {
                "node": node,
                "last_term": end.last_term,
                "last_index": end.last_index,
                "commit_index": end.commit_index,
                "terms": [{"term": term, "from_index": start} for term, start in end.ranges],
                "is_recovering": end.is_recovering,
                "has_given_up": found[node].has_given_up,
                "holes": [
                    {"start": hole.start, "end": hole.end, "filled_by": _fillers(node, hole, found)}
                    for hole in found[node].holes
                ],
            }
            for node, end in sorted(ends.items())
        ],
    }


def _fillers(node: NodeId, hole: Hole, found: Answers) -> list[NodeId]:
    """Return the other survivors whose logs have entries where one has a hole; a repair finds out whether they fit."""
    return [
        other
        for other, answer in sorted(found.items())
        if other != node
        and answer.end is not None
        and answer.end.last_index >= hole.end - 1
        and not any(theirs.start < hole.end and hole.start < theirs.end for theirs in answer.holes)
    ]


# --- a store of the old log -----------------------------------------------------------------------------------------


class Response(Enum):
    """Reaction of a store to a log that continues its own. A node of the new log chooses it at each attach."""

    STOP = "stop"
    """Set the store aside: its last entry, and with it all that it has, is in the new log."""
    STAY = "stay"
    """Go on: it has committed entries that the new log lacks. The new log refuses appends."""
    WAIT = "wait"
    """Go on for now: the new log lacks its last entry, which may be committed, or it is not known to have it."""


def respond(*, has_committed: bool | None, has_end: bool | None) -> Response:
    """Return the reaction of a store of a log that another one continues.

    A store that leads continues as well: it may have sent entries whose commit it does not know.

    Args:
        has_committed: whether the new log ``contains`` the last entry that the store knows to be committed. Entries
            that are not committed contest nothing, whatever their term.
        has_end: whether it contains the last entry of the store.
    """
    if has_committed is False:
        return Response.STAY
    return Response.STOP if has_end else Response.WAIT

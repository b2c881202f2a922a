"""The lineage of a log, and the changes of a store in a recovery from a lost majority. No I/O.

A log *continues* its ancestors, each up to one entry that index, term and check identify. ``dledger recover`` starts
such a log; ``dledger_core.recovery`` has its decisions.

A store changes its ``RecoveryState`` only by ``retired``, ``taken`` and ``completed``, and the result is durable before
the response leaves:

* A store that retired its log neither votes nor acknowledges in it, ever. So its end is final.
* A record is complete only after all its survivors hold it, and a survivor replaces one only for a record that names a
  survivor of the first as lost. So two recoveries that name the same lost nodes end as one log.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any, Final, TypeAlias

from dledger_core.errors import RecoveryRefusedError
from dledger_core.ids import NO_INDEX, NO_TERM, NUMBER_MAX, NodeId

_TEXT_MAX: Final = 512


@dataclass(frozen=True, slots=True)
class AncestorLog:
    """A log that another one continues: a link of the lineage.

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


Ancestors: TypeAlias = tuple[AncestorLog, ...]
"""The logs that a log continues, oldest first."""


def find_link(ancestors: Sequence[AncestorLog], log_uuid: str | None) -> AncestorLog | None:
    """Return the link of a log among these, or None."""
    return next((link for link in ancestors if link.log_uuid == log_uuid), None)


def follows(ancestors: Ancestors, log_uuid: str, last_index: int) -> bool:
    """Whether a log with these ancestors contains a log's entries up to ``last_index``, by their indexes only."""
    link = find_link(ancestors, log_uuid)
    return link is not None and last_index <= link.index


def contains(
    ancestors: Ancestors,
    log_uuid: str,
    index: int,
    term: int,
    *,
    first_index: int,
    commit_index: int,
    term_at: Callable[[int], int | None],
) -> bool | None:
    """Whether a log with these ancestors contains the entry of another log that index and term name; None if unknown.

    Up to the link, all entries of this log are those of the other one, where index and term identify an entry. Only
    committed entries count: a learner may still hold entries that its log does not have. The term of a deleted entry
    is not known, but terms never fall: it is at most that of the link and of the first entry that is left.

    Args:
        ancestors: the ancestors of this log.
        log_uuid: the other log.
        index: index of the entry; NO_INDEX for an empty log, which every log contains.
        term: term of the entry.
        first_index: first entry of this log.
        commit_index: last committed entry of this log.
        term_at: returns the term of an entry of this log.
    """
    link = find_link(ancestors, log_uuid)
    if link is None or index > link.index:
        return False
    if index == NO_INDEX:
        return True
    # Unknown would be asked again without end where the entry is deleted, and both logs would go on
    # (test_deleted_entry_of_another_term_is_known_to_be_missing).
    if term > link.term or (index == link.index and term != link.term):
        return False
    known = max(index, first_index)
    if known > min(commit_index, link.index):
        return None
    highest = term_at(known)
    if known == index:
        return highest == term
    return False if highest is not None and term > highest else None


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

    def start_of_term(self, index: int) -> int:
        """Return the first entry of the term of an entry whose term is known; it may be before the log."""
        starts = [start for _, start in self.ranges if start <= index]
        return starts[-1] if starts else index

    def may_contain(self, index: int, term: int | None) -> bool:
        """Whether the log has the entry of this index and term; where the term is unknown, of this index."""
        found = self.term_at(index)
        return index <= self.last_index and (None in (term, found) or found == term)


def agreed_index(one: LogEnd, other: LogEnd) -> int | None:
    """Return the last entry that two stores of one log share; NO_INDEX if none, None if it is not known.

    Entries of one index and term have equal entries before them (the paper's section 5.3, Log Matching). Where the
    terms differ, the higher one began after the last shared entry.
    """
    index = min(one.last_index, other.last_index)
    while index > NO_INDEX:
        terms = one.term_at(index), other.term_at(index)
        if None in terms:
            return None
        if terms[0] == terms[1]:
            return index
        later = one if (terms[0] or 0) > (terms[1] or 0) else other
        index = later.start_of_term(index) - 1
    return NO_INDEX


@dataclass(frozen=True, slots=True)
class RetiredLog:
    """The log that a store retired, and its final end there, without ranges: the store's files have them."""

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
        agreed_index: in profile A, the last entry that its log shares with the best one: it is a voter from the start,
            and its log ends there. None in profile B.
    """

    node_id: NodeId
    before: str
    store: str
    address: str
    agreed_index: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryRecord:
    """The beginning of a log that continues another one.

    Attributes:
        log_uuid: identity of the new log.
        continues: its ancestors; the last one is the log that was retired.
        term: highest term that a survivor reported; the new log starts above it.
        version: the group's version.
        voter: the survivor with the best end, the only voter.
        learners: the others; they become voters when they have caught up, in profile A at once.
        lost: the nodes that were named lost, sorted.
    """

    log_uuid: str
    continues: Ancestors
    term: int
    version: int
    voter: Survivor
    learners: tuple[Survivor, ...]
    lost: tuple[NodeId, ...]

    @property
    def point(self) -> AncestorLog:
        """The end of the old log that the new one contains."""
        return self.continues[-1]

    @property
    def all_vote(self) -> bool:
        """Whether all survivors are voters from the start: in profile A, which has no entries with configurations."""
        return self.voter.agreed_index is not None

    @property
    def survivors(self) -> tuple[Survivor, ...]:
        """All survivors, the voter first: of two records, only one can get its first survivor."""
        return self.voter, *self.learners

    def find(self, node_id: NodeId) -> Survivor | None:
        """Return a node's survivor, or None."""
        return next((survivor for survivor in self.survivors if survivor.node_id == node_id), None)

    def to_fields(self) -> dict[str, Any]:
        """Return the record as a map of plain values; in profile B as 0.2.0 reads it."""
        fields = asdict(self)
        for survivor in (fields["voter"], *fields["learners"]):
            if survivor["agreed_index"] is None:
                del survivor["agreed_index"]
        return fields

    @classmethod
    def from_fields(cls, fields: object) -> RecoveryRecord | None:
        """Return the record of such a map, or None if it is malformed."""
        try:
            assert isinstance(fields, dict)
            record = cls(
                **fields
                | {
                    "continues": ancestors_of(fields["continues"]),
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
        fits = fits and all(each.agreed_index is None or _fits(each.agreed_index) for each in record.survivors)
        return record if fits and type(record.version) is int and _fits(record.term) else None


def ancestors_of(rows: object) -> Ancestors:
    """Return the ancestors of a list of maps; raise ValueError or TypeError if it is malformed."""
    if not isinstance(rows, list | tuple):
        raise TypeError("not a list")
    ancestors = tuple(AncestorLog(**row) for row in rows)
    for link in ancestors:
        check_fits = link.check is None or (type(link.check) is int and 0 <= link.check < 1 << 32)
        if type(link.log_uuid) is not str or not check_fits or not _fits(link.index) or not _fits(link.term):
            raise ValueError("not a continued log")
    return ancestors


def ancestor_rows(ancestors: Ancestors) -> list[list[Any]]:
    """Return ancestors as METADATA carries them."""
    return [[link.log_uuid, link.index, link.term, -1 if link.check is None else link.check] for link in ancestors]


def ancestors_of_rows(rows: Sequence[Sequence[Any]] | None) -> Ancestors:
    """Return the ancestors of ``ancestor_rows``."""
    return tuple(
        AncestorLog(log_uuid, index, term, None if check < 0 else check) for log_uuid, index, term, check in rows or ()
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


_STORED_NAMES: Final = {"retired": "given_up", "recovery": "continuation"}


def stored_fields(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the fields of a state by their names in files and messages: the ``dict_factory`` of ``asdict``.

    Releases since 0.2.0 read and write these names (test_identities_and_answers_have_the_field_names_that_0_2_0_reads).
    """
    return {_STORED_NAMES.get(name, name): value for name, value in pairs}


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """State of a store in a recovery: part of its identity.

    Attributes:
        retired: the log that it retired.
        record: the record that it holds.
        is_complete: whether all survivors held the record: the store belongs to the new log.
    """

    retired: RetiredLog
    record: RecoveryRecord | None = None
    is_complete: bool = False

    def to_fields(self) -> dict[str, Any]:
        """Return the state as a map of plain values, which 0.2.0 reads too: it knows no ranges."""
        fields = asdict(self, dict_factory=stored_fields)
        del fields["given_up"]["end"]["ranges"]
        return fields | {"record": None if self.record is None else self.record.to_fields()}

    @classmethod
    def from_fields(cls, fields: object) -> RecoveryState | None:
        """Return the state of such a map, or None if it is malformed."""
        try:
            assert isinstance(fields, dict)
            before, record = fields["given_up"], fields["record"]
            retired_log = RetiredLog(before["log_uuid"], before["store"], end_of(before["end"]))
            found = cls(
                retired_log, None if record is None else RecoveryRecord.from_fields(record), fields["is_complete"]
            )
        except (AssertionError, KeyError, TypeError, ValueError):
            return None
        fits = found.record is not None or found.is_complete is False
        return found if fits and (record is None) == (found.record is None) else None


def retired(state: RecoveryState | None, log_uuid: str, store: str, end: LogEnd) -> RecoveryState:
    """Return the state of a store that retires its log; the same again if it did so before."""
    if state is not None and state.retired.log_uuid == log_uuid:
        return state
    return RecoveryState(RetiredLog(log_uuid, store, replace(end, ranges=())))


def with_end(state: RecoveryState | None, end: LogEnd) -> RecoveryState:
    """Return the state of a store whose holes were filled, or whose log was ended before one.

    Raises:
        RecoveryRefusedError: it has not retired its log, or a record names its end.
    """
    record = None if state is None else state.record
    if state is None or state.is_complete or (record is not None and record.voter.before == state.retired.store):
        raise _refused("the store has not retired its log, or the record of a recovery names its end")
    return replace(state, retired=replace(state.retired, end=replace(end, ranges=())))


def taken(state: RecoveryState | None, node_id: NodeId, record: RecoveryRecord) -> RecoveryState:
    """Return the state of a store that takes a record.

    Raises:
        RecoveryRefusedError: it did not retire this log, the record does not name it, or it holds another one.
    """
    if state is not None and state.record == record:
        return state
    survivor = record.find(node_id)
    if (
        state is None
        or survivor is None
        or (record.point.log_uuid, survivor.before)
        != (
            state.retired.log_uuid,
            state.retired.store,
        )
    ):
        raise _refused(f"the store of {node_id} has not retired the log that the record continues")
    if state.is_complete or (state.record is not None and not outranks(record, state.record)):
        raise _refused(f"the store of {node_id} holds the record of another recovery")
    return replace(state, record=record)


def outranks(record: RecoveryRecord, held: RecoveryRecord) -> bool:
    """Whether a record may replace one: it names all its lost nodes, and a survivor of it too.

    Without that survivor the held record cannot be complete on all; an operator says that it will not return.
    """
    lost = set(record.lost)
    return set(held.lost) < lost and any(each.node_id in lost for each in held.survivors)


def completed(state: RecoveryState | None, log_uuid: str) -> RecoveryState:
    """Return the state of a store whose record all survivors hold; raise RecoveryRefusedError if it has another."""
    if state is None or state.record is None or state.record.log_uuid != log_uuid:
        raise _refused("the store does not hold the record of this recovery")
    return replace(state, is_complete=True)


def _refused(what: str) -> RecoveryRefusedError:
    return RecoveryRefusedError(what, "", "run dledger recover again")


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
            that are not committed fork nothing, whatever their term.
        has_end: whether it contains the last entry of the store.
    """
    if has_committed is False:
        return Response.STAY
    return Response.STOP if has_end else Response.WAIT

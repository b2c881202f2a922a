"""The decisions of ``dledger recover``, for a group that cannot elect a leader. No I/O.

The recovery asks all nodes, decides with ``decide`` on one ``Action``, carries it out, and asks again. It keeps no
state between two rounds, so it may be interrupted at any instruction and run again, and two may run at once. The
changes that a store may make, and their order, are in ``lineage``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from collections.abc import Set as AbstractSet
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeAlias

from dledger_core.ids import NodeId
from dledger_core.lineage import (
    AncestorLog,
    Ancestors,
    LogEnd,
    RecoveryRecord,
    RecoveryState,
    Survivor,
    agreed_index,
    ancestors_of,
    end_of,
    outranks,
    stored_fields,
)


@dataclass(frozen=True, slots=True)
class Hole:
    """Entries [start, end) of a store's log without a good record; the log continues behind them."""

    start: int
    end: int


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
        log_uuid: the log that the store belongs to, or that it retired; None if there is none.
        store: its uuid in that log.
        profile: of the log.
        version: the group's version.
        members: members of the log as the store knows them.
        chain: the logs that the log continues.
        end: end of the log; None if it cannot be read now.
        reason: why the group is not served, with or without an end; empty where it is.
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
    chain: Ancestors = ()
    end: LogEnd | None = None
    reason: str = ""
    leader: NodeId | None = None
    state: RecoveryState | None = None
    holes: tuple[Hole, ...] = ()

    @property
    def held(self) -> RecoveryRecord | None:
        """A record that is not complete here."""
        return None if self.state is None or self.state.is_complete else self.state.record

    @property
    def has_retired(self) -> bool:
        """Whether the store retired its log and is not in a new one yet."""
        return self.state is not None and not self.state.is_complete

    def to_fields(self) -> dict[str, Any]:
        """Return the answer as a map of plain values."""
        return asdict(self, dict_factory=stored_fields)

    @classmethod
    def from_fields(cls, fields: object) -> SurvivorAnswer | None:
        """Return the answer of such a map, or None if it is malformed."""
        try:
            assert isinstance(fields, dict)
            end, state = fields["end"], fields["state"]
            found = RecoveryState.from_fields(state)
            if (found is None) != (state is None):
                return None
            return cls(
                **fields
                | {
                    "members": tuple(KnownMember(**each) for each in fields["members"]),
                    "chain": ancestors_of(fields["chain"]),
                    "end": None if end is None else end_of(end),
                    "state": found,
                    "holes": tuple(Hole(**each) for each in fields.get("holes", ())),
                }
            )
        except (AssertionError, KeyError, TypeError, ValueError):
            return None


Answers: TypeAlias = Mapping[NodeId, SurvivorAnswer]


@dataclass(frozen=True, slots=True)
class RetireLog:
    """Let ``nodes`` retire a log."""

    log_uuid: str
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class FillHoles:
    """Let ``nodes`` fill the holes of their stores from ``survivors``, which have all retired the log."""

    log_uuid: str
    nodes: tuple[NodeId, ...]
    survivors: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class CutLog:
    """Let a node end its log before its first hole, which starts at ``start``: an operator has accepted the loss."""

    nodes: tuple[NodeId]
    start: int


@dataclass(frozen=True, slots=True)
class TakeRecord:
    """Send a record to ``nodes``, in this order, one at a time."""

    record: RecoveryRecord
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class CompleteRecord:
    """Mark a record, which all survivors hold, complete on ``nodes``."""

    record: RecoveryRecord
    nodes: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True)
class Recovered:
    """The group has a new log on all survivors: nothing to do."""

    log_uuid: str
    chain: Ancestors


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
    """Voters that answer can elect a leader: nothing is changed.

    Attributes:
        nodes: those voters.
        leader: the leader that they follow already, if there is one.
        replaced: members whose stores never vote again, although they answer: they have retired the log, such as one
            that was restored from a backup, or they have none. ``dledger member replace`` is for them.
    """

    nodes: tuple[NodeId, ...]
    leader: NodeId | None
    replaced: tuple[NodeId, ...] = ()


Holes: TypeAlias = Mapping[NodeId, tuple[Hole, ...]]
Action: TypeAlias = (
    RetireLog | FillHoles | CutLog | TakeRecord | CompleteRecord | Recovered | Electable | Unanswered | Refused
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
    if not (found := _of_members(found)):
        return _no_log({})
    refusal = _not_possible(lost, answers, found, log_uuid)
    if refusal is not None:
        return refusal
    serving = tuple(node for node in sorted(found) if not found[node].has_retired)
    if serving:
        return RetireLog(log_uuid, serving)
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
        return _foreign(found, best) if found[best].profile == "A" else None
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


def _foreign(found: Answers, best: NodeId) -> Refused | None:
    """Return why a survivor cannot be a voter of a new log of profile A, or None.

    Such a log has no entries with configurations, so that its members never change: all survivors are voters from the
    start, and each ends its log where it differs from the best one.
    """
    ends = {node: answer.end for node, answer in found.items() if answer.end is not None}
    unknown = [node for node in sorted(ends) if agreed_index(ends[best], ends[node]) is None]
    if not unknown:
        return None
    return Refused(
        f"no entry is known that the logs of {unknown[0]} and {best} have in common",
        f"add {unknown[0]} to --lost: the log of {best} continues without it",
    )


def _naming(lost: Iterable[NodeId]) -> list[str]:
    """Return the option that names lost nodes; empty if there are none."""
    return [f"--lost {','.join(sorted(lost))}"] if lost else []


def _no_log(logs: Mapping[str, NodeId]) -> Refused:
    if not logs:
        return Refused("no node that is left has a store of the group", "restore a store, or bootstrap the group again")
    shown = ", ".join(f"{node} has log {log}" for log, node in sorted(logs.items()))
    return Refused(f"the stores belong to different logs: {shown}", "move the stores of the wrong log away")


def _not_possible(lost: AbstractSet[NodeId], answers: Answers, found: Answers, log_uuid: str) -> Action | None:
    """Return why the survivors of a log may not be asked to retire it, or None."""
    known = _members(found)
    electable = _electable(known, answers, found)
    for node in sorted(lost):
        answer = answers.get(node)
        is_known = answer is not None and answer.log_uuid == log_uuid and _is_member(known, answer)
        if is_known and not (electable is not None and node in electable.replaced):
            return Refused(
                f"{node} is not lost: it answers with a store of log {log_uuid}", f"run the command without {node}"
            )
    if electable is not None:
        first = found[electable.nodes[0]]
        is_continued = first.state is not None and first.state.is_complete
        is_over = is_continued and not lost & {member.node_id for member in known} and not electable.replaced
        return Recovered(log_uuid, first.chain) if is_over else electable
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
    leader = next((answer.leader for _, answer in sorted(found.items()) if answer.leader is not None), None)
    if leader is not None:
        return Refused(
            f"{leader} leads the group, so a majority of its voters is alive",
            "run dledger member replace; if the nodes were lost seconds ago, run the command again",
        )
    return None


def _electable(known: AbstractSet[KnownMember], answers: Answers, found: Answers) -> Electable | None:
    """Return the voters that can elect a store, or None.

    A store can be elected if, in its own configuration, the voters that answer, may vote, and whose end is not above
    its own, are a majority.
    """
    for node in sorted(found):
        candidate = found[node]
        voters = [member for member in candidate.members if member.is_voter]
        able = [member.node_id for member in voters if _elects(found.get(member.node_id), member, candidate)]
        if node in able and len(able) > len(voters) // 2:
            leaders = (found[each].leader for each in able)
            members = {member.node_id for member in known}
            replaced = [each for each in sorted(members & answers.keys()) if _never_votes(answers[each])]
            return Electable(
                tuple(able), next((leader for leader in leaders if leader is not None), None), tuple(replaced)
            )
    return None


def _elects(answer: SurvivorAnswer | None, member: KnownMember, candidate: SurvivorAnswer) -> bool:
    """Whether a store may vote for a candidate; a damaged one that waits for its repair votes for none."""
    if answer is None or answer.end is None or answer.store != member.store or candidate.end is None:
        return False
    may_vote = not answer.has_retired and not answer.reason and not answer.end.is_recovering
    return may_vote and answer.end.rank <= candidate.end.rank


def _never_votes(answer: SurvivorAnswer) -> bool:
    return answer.log_uuid is None or answer.has_retired


def _members(found: Answers) -> set[KnownMember]:
    """All members that one of the stores knows: an uncommitted change may be in force on one of them only."""
    return {member for answer in found.values() for member in answer.members}


def _of_members(found: Answers) -> dict[NodeId, SurvivorAnswer]:
    """Return the stores of nodes that one of the configurations names; a restored store has another uuid than its node.

    One that was removed has nothing that counts: a store that knows its removal has all entries before it.
    """
    left = dict(found)
    while removed := left.keys() - {member.node_id for member in _members(left)}:
        for node in removed:
            del left[node]
    return left


def _is_member(known: AbstractSet[KnownMember], answer: SurvivorAnswer) -> bool:
    return any((member.node_id, member.store) == (answer.node_id, answer.store) for member in known)


def _best(found: Answers) -> NodeId:
    return best_of({node: answer.end for node, answer in found.items() if answer.end is not None})


def _continued(
    lost: AbstractSet[NodeId],
    answers: Answers,
    records: Mapping[str, RecoveryRecord],
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
    fresh = {node: answer for node, answer in answers.items() if node not in lost and answer.has_retired}
    fresh = _of_members(fresh)
    if not mine and fresh and all(set(record.lost) < set(lost) for record in others):
        log_uuid = others[0].point.log_uuid
        if (action := _repair_action(lost, fresh, log_uuid, tried, accepts_loss=accepts_loss)) is not None:
            return action
    if not mine and fresh:
        record = _new_record(lost, fresh, new_uuid)
        if all(outranks(record, held) for held in others):
            return TakeRecord(record, tuple(survivor.node_id for survivor in record.survivors))
    shown = "; ".join("".join(_naming(record.lost)) or "no --lost" for record in others or mine)
    return Refused(
        f"another recovery is in progress, with {shown}",
        "run that command; name all lost nodes of both if one of its survivors was lost meanwhile",
    )


def _holders(record: RecoveryRecord, answers: Answers) -> tuple[NodeId, ...]:
    nodes = (each.node_id for each in record.survivors)
    return tuple(node for node in nodes if node in answers and answers[node].held == record)


def _new_record(lost: AbstractSet[NodeId], found: Answers, new_uuid: Callable[[], str]) -> RecoveryRecord:
    """Return a record of stores that have all retired their log."""
    ends = {node: answer.end for node, answer in found.items() if answer.end is not None}
    best = best_of(ends)
    end, chain = ends[best], found[best].chain
    addresses = {member.node_id: member.address for member in found[best].members}
    addresses = {member.node_id: member.address for member in _members(found)} | addresses
    all_vote = found[best].profile == "A"

    def survivor(node: NodeId) -> Survivor:
        agreed = agreed_index(end, ends[node]) if all_vote else None
        return Survivor(node, found[node].store or "", new_uuid(), addresses[node], agreed)

    return RecoveryRecord(
        log_uuid=new_uuid(),
        continues=extended(chain, AncestorLog(str(found[best].log_uuid), end.last_index, end.last_term, end.check)),
        term=max(each.term for each in ends.values()),
        version=found[best].version,
        voter=survivor(best),
        learners=tuple(survivor(node) for node in sorted(found) if node != best),
        lost=tuple(sorted(lost)),
    )


def extended(chain: Ancestors, point: AncestorLog) -> Ancestors:
    """Return the ancestors with one more, which caps the earlier ones: the new log contains nothing after its point.

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
        "all_vote": found[best].profile == "A",
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
                "has_given_up": found[node].has_retired,
                "holes": [
                    {"start": hole.start, "end": hole.end, "filled_by": _fillers(node, hole, found)}
                    for hole in found[node].holes
                ],
            }
            for node, end in sorted(ends.items())
        ],
    }


def plan_of(found: Mapping[str, Any]) -> list[str]:
    """Return the plan of a recovery as lines for an operator, from its ``preview``."""
    nodes = [each["node"] for each in found["survivors"]]
    certain, end = found["committed_end"], found["continues_at_index"] + 1
    lines = [
        f"plan: {', '.join(nodes)} retire log {found['log']} permanently; a new log continues it",
        f"plan: {found['first_voter']} has the best end; all of them vote from the start, the others catch up from it"
        if found["all_vote"]
        else f"plan: {found['first_voter']} is its only voter at first; the others catch up from it and vote then",
        f"plan: entries before {certain} are committed and kept",
    ]
    if certain < end:
        lines.append(
            f"plan: entries {certain} to {end - 1} are kept, although no node knows whether they are committed"
        )
    if found["lost"]:
        only = ", ".join(found["lost"])
        lines.append(f"plan: entries from {end} on are lost, if {only} acknowledged any")
    for each in found["survivors"]:
        for hole in each["holes"]:
            by = ", ".join(hole["filled_by"])
            lines.append(
                f"plan: {each['node']} has entries {hole['start']} to {hole['end'] - 1} damaged; "
                + (f"they are taken from {by} where they fit" if by else "no node that is left has them")
            )
    return lines


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

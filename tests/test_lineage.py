"""``recover --lost``: the decisions of stores and recoveries, one by one and in all interleavings."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import TypeAlias

import pytest

from dledger_core import recovery
from dledger_core.bootstrap import LogConstants, RetiredRecord, StoreAnswer, StoreIdentity
from dledger_core.errors import RecoveryRefusedError
from dledger_core.ids import NodeId
from dledger_core.lineage import (
    AncestorLog,
    Ancestors,
    LogEnd,
    RecoveryRecord,
    RecoveryState,
    Response,
    completed,
    contains,
    follows,
    respond,
    retired,
    taken,
)
from dledger_core.recovery import (
    Action,
    CompleteRecord,
    Electable,
    KnownMember,
    Recovered,
    Refused,
    RetireLog,
    SurvivorAnswer,
    TakeRecord,
    Unanswered,
    preview,
)

Stores: TypeAlias = tuple[RecoveryState | None, ...]
State: TypeAlias = tuple[Stores, tuple[Action | None, ...]]
NODES = tuple(NodeId(f"n{i}") for i in range(5))
MEMBERS = tuple(KnownMember(node, f"store of {node}", f"host:{i}", True) for i, node in enumerate(NODES[:3]))


def end(last_term: int = 3, last_index: int = 9, commit_index: int = 5, **fields: object) -> LogEnd:
    known = {"term": 4, "last_term": last_term, "last_index": last_index, "commit_index": commit_index, "check": 7}
    return LogEnd(**known | fields)  # type: ignore[arg-type]


def answer(node: str, **fields: object) -> SurvivorAnswer:
    known = {"log_uuid": "old", "store": f"store of {node}", "members": MEMBERS, "end": end(), "version": 1}
    return SurvivorAnswer(node_id=NodeId(node), **known | fields)  # type: ignore[arg-type]


def after_retiring(found: SurvivorAnswer, record: RecoveryRecord | None = None) -> SurvivorAnswer:
    assert found.end is not None
    state = retired(found.state, str(found.log_uuid), str(found.store), found.end)
    return replace(found, state=state if record is None else taken(state, found.node_id, record))


def decided(lost: str, *answers: SurvivorAnswer) -> Action:
    numbers = itertools.count()
    named = frozenset(map(NodeId, filter(None, lost.split(","))))
    return recovery.decide(named, {each.node_id: each for each in answers}, lambda: f"new {next(numbers)}")


# --- a recovery -----------------------------------------------------------------------------------------------------


OLD_LEADER = {"last_term": 3, "last_index": 11, "commit_index": 10, "ranges": ((1, 0), (3, 11))}
"""It appended an entry of term 3 that no majority has, where the others have one of term 2 (the paper's figure 8)."""


@pytest.mark.parametrize(
    ("knows", "voter"),
    [
        pytest.param({"last_term": 2, "commit_index": 11, "ranges": ((1, 0), (2, 11))}, "n3", id="another one there"),
        pytest.param({"last_term": 2, "commit_index": 10, "ranges": ((1, 0), (2, 11))}, "n4", id="none there"),
        pytest.param({"last_term": 2, "last_index": 12, "commit_index": 12}, "n3", id="one that the log lacks"),
        pytest.param({"last_term": 3, "commit_index": 11, "ranges": ((1, 0), (3, 11))}, "n3", id="the same"),
    ],
)
def test_best_end_contains_the_newest_entry_that_a_survivor_knows_to_be_committed(
    knows: dict[str, object], voter: str
) -> None:
    five = tuple(KnownMember(node, f"store of {node}", f"host:{node}", True) for node in NODES)
    ends = {"n3": end(**({"last_index": 11} | knows)), "n4": end(**OLD_LEADER)}  # type: ignore[arg-type]
    survivors = [after_retiring(answer(node, members=five, end=found)) for node, found in ends.items()]
    action = decided("n0,n1,n2", *survivors)
    assert isinstance(action, TakeRecord)
    assert action.record.voter.node_id == voter


def test_recovery_without_lost_nodes_is_for_voters_that_may_not_elect() -> None:
    """A (T, ∞) floor takes the vote; two of three that have it leave no majority."""
    healthy, first, second = (answer(node, end=end(is_recovering=node != "n0")) for node in ("n0", "n1", "n2"))
    assert decided("", healthy, first, second) == RetireLog("old", NODES[:3])
    able = decided("", healthy, first, answer("n2"))
    assert able == Electable((NODES[0], NODES[2]), None)
    assert decided("", healthy, first) == Unanswered((NODES[2],))
    assert decided("n2", healthy, first) == RetireLog("old", NODES[:2]), "one disk lost and one floor: A4"


def test_voters_that_can_elect_one_of_them_are_asked_for_nothing_else() -> None:
    """Whatever the others do: a store that retired the log, or lost it, is for ``dledger member replace``."""
    two = answer("n0"), answer("n1", end=end(3, 8))
    assert decided("", *two) == Electable(NODES[:2], None)
    assert decided("n2", *two) == Electable(NODES[:2], None)
    restored = after_retiring(answer("n2", end=end(2, 7)))
    wiped = answer("n2", log_uuid=None, store=None, end=None)
    for third in (restored, wiped):
        for lost in ("", "n2"):
            assert decided(lost, *two, third) == Electable(NODES[:2], None, (NODES[2],))
    ahead = end(4, 9)  # elected by the other one
    assert decided("", two[0], answer("n1", end=end(is_recovering=True)), answer("n2", end=ahead)) == Electable(
        (NODES[0], NODES[2]), None
    )


def test_state_that_a_store_keeps_has_the_fields_that_0_2_0_reads() -> None:
    """Version 0.2.0 refuses a map with a name that it does not know, and the store with it."""
    action = decided("n0", *(after_retiring(answer(node, end=end(ranges=((1, 0),)))) for node in ("n1", "n2")))
    assert isinstance(action, TakeRecord)
    state = retired(None, "old", "store of n1", end(ranges=((1, 0), (3, 9))))
    kept = StoreIdentity(store="store of n1", recovery=taken(state, NODES[1], action.record)).to_fields()
    before, record = kept["continuation"]["given_up"], kept["continuation"]["record"]
    assert set(before["end"]) == {"term", "last_term", "last_index", "commit_index", "check", "is_recovering"}
    assert set(record["voter"]) == {"node_id", "before", "store", "address"}
    assert StoreIdentity.from_fields(kept) == StoreIdentity(
        store="store of n1", recovery=taken(state, NODES[1], action.record)
    )


def test_identities_and_answers_have_the_field_names_that_0_2_0_reads() -> None:
    survivor = after_retiring(answer("n1"))
    identity = StoreIdentity(store="s", retired=(RetiredRecord("r", True, 2),), recovery=survivor.state)
    asked = StoreAnswer(
        node_id=NODES[1],
        peers=(),
        identity=identity,
        constants=LogConstants(profile="B", data_segment_bytes=1 << 20, index_segment_bytes=20 << 12),
    )
    state = survivor.to_fields()["state"]
    assert set(state) == {"given_up", "record", "is_complete"}
    for fields in (identity.to_fields(), asked.to_fields()["identity"]):
        assert set(fields) == {"store", "record", "is_complete", "given_up", "admission", "continuation"}
        assert set(fields["continuation"]) == set(state)
    assert SurvivorAnswer.from_fields(survivor.to_fields()) == survivor
    assert StoreAnswer.from_fields(asked.to_fields()) == asked


def test_recovery_lets_all_survivors_retire_log_before_one_of_them_gets_record() -> None:
    five = tuple(KnownMember(node, f"store of {node}", f"host:{node}", True) for node in NODES)
    ends = {"n3": end(3, 12, 4), "n4": end(4, 7, 6)}
    live = [answer(node, members=five, end=ends[node]) for node in ends]
    assert decided("n0,n1,n2", *live) == RetireLog("old", (NodeId("n3"), NodeId("n4")))
    assert decided("n0,n1,n2", after_retiring(live[0]), live[1]) == RetireLog("old", (NodeId("n4"),))
    action = decided("n0,n1,n2", *map(after_retiring, live))
    assert isinstance(action, TakeRecord)
    assert action.nodes == ("n4", "n3"), "the best one first"
    record = action.record
    assert record.point == AncestorLog("old", 7, 4, 7)
    assert (record.voter.node_id, [each.node_id for each in record.learners]) == ("n4", ["n3"])
    assert len({record.log_uuid, *(each.store for each in record.survivors)}) == 3
    assert record.term == 4


def test_recovery_continues_record_of_survivor_and_completes_it_once_all_hold_it() -> None:
    two = [answer("n1"), answer("n2", end=end(3, 8))]
    both = [after_retiring(each) for each in two]
    four = (*MEMBERS, KnownMember(NODES[3], "store of n3", "host:3", True))
    both = [replace(each, members=four) for each in both]
    action = decided("n0,n3", *both)
    assert isinstance(action, TakeRecord)
    record = action.record
    first = replace(both[0], state=taken(both[0].state, NODES[1], record))
    assert decided("n0,n3", first, both[1]) == TakeRecord(record, (NODES[2],))
    assert decided("n0,n3", first) == Unanswered((NODES[2],))
    second = replace(both[1], state=taken(both[1].state, NODES[2], record))
    assert decided("n0,n3", first, second) == CompleteRecord(record, (NODES[1], NODES[2]))
    done = member_of(record, first)
    assert decided("n0,n3", done, second) == CompleteRecord(record, (NODES[2],))
    assert decided("n0,n3", done, member_of(record, second)) == Recovered(record.log_uuid, record.continues)


def member_of(record: RecoveryRecord, found: SurvivorAnswer) -> SurvivorAnswer:
    members = tuple(
        KnownMember(each.node_id, each.store, each.address, each == record.voter) for each in record.survivors
    )
    survivor = record.find(found.node_id)
    assert survivor is not None
    return replace(
        found,
        log_uuid=record.log_uuid,
        store=survivor.store,
        chain=record.continues,
        members=members,
        state=completed(found.state, record.log_uuid),
    )


@pytest.mark.parametrize(
    ("lost", "answers", "expected"),
    [
        ("n0,n1", [answer("n0"), answer("n2")], Refused),  # it answers: not lost
        ("n0,n1", [answer("n0", log_uuid=None, store=None, end=None), answer("n2")], RetireLog),  # its disk is
        ("n0,n1", [answer("n0", store="another"), answer("n2")], RetireLog),
        ("n0", [answer("n2")], Unanswered),  # n1 is not named
        ("n0", [answer("n1"), answer("n2")], Electable),
        ("n0,n1", [answer("n2", leader=NODES[1])], Refused),
        ("n0,n1", [answer("n2", end=None, reason="it is damaged")], Refused),
        ("n0,n1", [answer("n2", profile="A")], RetireLog),
        ("n0", [answer("n1", end=end(3, 8)), answer("n2", reason="it is being repaired")], RetireLog),  # no vote
        ("n0,n1,n2", [], Refused),
        ("n0", [answer("n1", log_uuid=None, store=None, end=None), answer("n2")], Refused),  # n1 is lost too
        ("n0,n1", [answer("n2"), answer("n3", log_uuid="other")], Refused),
        ("n0,n1", [after_retiring(answer("n2"))], TakeRecord),
    ],
)
def test_recovery_is_refused_unless_majority_is_lost(lost: str, answers: list[SurvivorAnswer], expected: type) -> None:
    assert isinstance(decided(lost, *answers), expected)


def test_recovery_waits_for_every_member_that_is_not_named_lost() -> None:
    four = (*MEMBERS, KnownMember(NODES[3], "store of n3", "host:3", False))
    assert decided("n0,n1", answer("n2", members=four)) == Unanswered((NODES[3],))


def test_lost_node_that_returns_after_others_retired_log_can_be_a_survivor() -> None:
    survivor, returned = after_retiring(answer("n2")), answer("n0")
    assert isinstance(decided("n0,n1", survivor, returned), Refused)
    assert decided("n1", survivor, returned) == RetireLog("old", (NODES[0],)), "n0 alone has no majority"


@pytest.mark.parametrize("others", [(), MEMBERS[1:2]], ids=["a group that is unknown", "another one that was removed"])
def test_store_that_was_removed_is_no_survivor(others: tuple[KnownMember, ...]) -> None:
    """No address of it is known either; a store that knows its removal has all entries before it."""
    left = answer("n0", members=MEMBERS[:1], end=end(is_recovering=True))
    removed = answer("n2", members=others)
    also = answer("n1", members=())
    assert decided("", left, removed, also) == RetireLog("old", NODES[:1])
    action = decided("", after_retiring(left), after_retiring(removed), after_retiring(also))
    assert isinstance(action, TakeRecord)
    assert [each.node_id for each in action.record.survivors] == ["n0"]
    assert isinstance(decided("n0", removed, also), Refused)


def test_second_recovery_replaces_record_only_if_a_survivor_of_it_was_lost() -> None:
    five = tuple(KnownMember(node, f"store of {node}", f"host:{node}", True) for node in NODES)
    live = [after_retiring(answer(node, members=five)) for node in NODES[2:]]
    action = decided("n0,n1", *(replace(each, members=five) for each in live[1:]))
    assert action == Unanswered((NODES[2],)) or isinstance(action, Refused)
    three = decided("n0,n1", *live)
    assert isinstance(three, TakeRecord)
    holding = [replace(each, state=taken(each.state, each.node_id, three.record)) for each in live[1:]]
    again = decided("n0,n1,n2", *holding)
    assert isinstance(again, TakeRecord)
    assert again.nodes == (NODES[3], NODES[4])
    assert taken(holding[0].state, NODES[3], again.record).record == again.record
    with pytest.raises(RecoveryRefusedError):
        taken(taken(holding[0].state, NODES[3], again.record), NODES[3], three.record)


def test_store_takes_only_record_of_the_log_that_it_retired() -> None:
    action = decided("n0,n1", after_retiring(answer("n2")))
    assert isinstance(action, TakeRecord)
    with pytest.raises(RecoveryRefusedError):
        taken(None, NODES[2], action.record)
    with pytest.raises(RecoveryRefusedError):
        taken(retired(None, "old", "another store", end()), NODES[2], action.record)
    with pytest.raises(RecoveryRefusedError):
        completed(retired(None, "old", "store of n2", end()), action.record.log_uuid)
    held = taken(retired(None, "old", "store of n2", end()), NODES[2], action.record)
    assert RecoveryState.from_fields(json.loads(json.dumps(held.to_fields()))) == held


# --- all interleavings ----------------------------------------------------------------------------------------------


class Search:
    """Two recoveries at once, each interrupted between any two messages and run again.

    Args:
        early: a record is complete where one survivor takes it, and the second recovery sends it in another order.
    """

    def __init__(self, *, early: bool = False) -> None:
        self.early = early
        self.members = tuple(KnownMember(node, f"store of {node}", f"host:{node}", True) for node in NODES)
        self.nodes = NODES[3:]
        self.ends = {node: end(3, 5 + at) for at, node in enumerate(self.nodes)}
        self.violation: tuple[RecoveryState | None, ...] | None = None

    def answers(self, stores: Stores) -> dict[NodeId, SurvivorAnswer]:
        found = {}
        for node, state in zip(self.nodes, stores, strict=True):
            live = answer(node, members=self.members, end=self.ends[node], state=state)
            record = state.record if state is not None and state.is_complete else None
            found[node] = live if record is None else member_of(record, live)
        return found

    def run(self) -> int:
        start: State = ((None,) * len(self.nodes), (None, None))
        seen, queue = {start}, [start]
        while queue and self.violation is None:
            for following in self.steps(*queue.pop()):
                complete = {s.record.log_uuid for s in following[0] if s is not None and s.is_complete and s.record}
                if len(complete) > 1:
                    self.violation = following[0]
                if following not in seen:
                    seen.add(following)
                    queue.append(following)
        return len(seen)

    def steps(self, stores: Stores, acting: tuple[Action | None, ...]) -> Iterator[State]:
        for number, action in enumerate(acting):

            def then(action: Action | None, number: int = number) -> tuple[Action | None, ...]:
                return tuple(action if at == number else each for at, each in enumerate(acting))

            if action is None:
                names = map("{}/{}".format, itertools.repeat(number), itertools.count())
                found = recovery.decide(frozenset(NODES[:3]), self.answers(stores), names.__next__)
                if self.early and number and isinstance(found, TakeRecord):
                    found = replace(found, nodes=found.nodes[::-1])
                if not isinstance(found, Recovered | Refused | Unanswered):
                    yield stores, then(found)
                continue
            assert isinstance(action, RetireLog | TakeRecord | CompleteRecord)
            yield stores, then(None)  # interrupted
            node = action.nodes[0]
            at = self.nodes.index(node)
            with contextlib.suppress(RecoveryRefusedError):
                changed = self.changed(stores[at], node, action)
                rest = replace(action, nodes=action.nodes[1:]) if len(action.nodes) > 1 else None
                yield tuple(changed if which == at else store for which, store in enumerate(stores)), then(rest)

    def changed(self, state: RecoveryState | None, node: NodeId, action: Action) -> RecoveryState:
        match action:
            case RetireLog():
                return retired(state, "old", f"store of {node}", self.ends[node])
            case TakeRecord(record, _):
                found = taken(state, node, record)
                return completed(found, record.log_uuid) if self.early else found
            case CompleteRecord(record, _):
                return completed(state, record.log_uuid)
        raise AssertionError(action)


def test_two_recoveries_in_all_interleavings_make_one_log() -> None:
    search = Search()
    assert search.run() > 100
    assert search.violation is None


def test_search_finds_two_logs_where_record_is_complete_before_all_hold_it() -> None:
    search = Search(early=True)
    search.run()
    assert search.violation is not None


# --- dry run --------------------------------------------------------------------------------------------------------


def test_dry_run_says_which_entries_are_certain_kept_and_may_be_lost() -> None:
    found = preview(
        frozenset({NODES[0]}),
        {NODES[1]: answer("n1", end=end(3, 12, 4)), NODES[2]: answer("n2", end=end(4, 7, 6, is_recovering=True))},
    )
    assert json.loads(json.dumps(found)) == {
        "log": "old",
        "lost": ["n0"],
        "first_voter": "n2",
        "all_vote": False,
        "continues_at_index": 7,
        "continues_at_term": 4,
        "committed_end": 7,
        "unconfirmed": [7, 8],
        "may_be_lost_from": 7,
        "survivors": [
            {
                "node": "n1",
                "last_term": 3,
                "last_index": 12,
                "commit_index": 4,
                "terms": [],
                "is_recovering": False,
                "has_given_up": False,
                "holes": [],
            },
            {
                "node": "n2",
                "last_term": 4,
                "last_index": 7,
                "commit_index": 6,
                "terms": [],
                "is_recovering": True,
                "has_given_up": False,
                "holes": [],
            },
        ],
    }


# --- a store of the old log, and its readers ------------------------------------------------------------------------

CHAIN = (AncestorLog("older", 3, 1, 5), AncestorLog("old", 9, 3, 7))


@pytest.mark.parametrize(
    ("log_uuid", "index", "term", "expected"),
    [
        ("old", 9, 3, True),
        ("old", 7, 2, True),
        ("older", 3, 1, None),  # deleted
        ("older", 4, 2, False),
        ("old", 7, 3, False),  # the new log has an entry of term 2 there
        ("old", 10, 3, False),
        ("old", 4, 1, None),
        ("old", -1, -1, True),
        ("another", 7, 2, False),
    ],
)
@pytest.mark.parametrize("commit_index", [6, 12])
def test_log_contains_committed_entry_up_to_link_only(
    log_uuid: str, index: int, term: int, expected: bool | None, commit_index: int
) -> None:
    found = contains(
        CHAIN,
        log_uuid,
        index,
        term,
        first_index=5,
        commit_index=commit_index,
        term_at={5: 1, 6: 1, 7: 2, 8: 3, 9: 3, 10: 3, 11: 5, 12: 5}.get,
    )
    is_known = log_uuid != "old" or index > 9 or index <= commit_index
    assert found is (expected if is_known else None)


@pytest.mark.parametrize(
    ("index", "term", "first_index"),
    [
        (9, 4, 5),
        (9, 2, 5),
        (9, 4, 20),
        (9, 2, 20),
        (8, 4, 20),
        (4, 2, 5),
        (3, 3, 7),
    ],
)
def test_deleted_entry_of_another_term_is_known_to_be_missing(index: int, term: int, first_index: int) -> None:
    terms = {5: 1, 6: 1, 7: 2, 8: 3, 9: 3, 10: 3, 11: 5, 12: 5}.get
    found = contains(CHAIN, "old", index, term, first_index=first_index, commit_index=30, term_at=terms)
    assert found is False
    assert contains(CHAIN, "old", 3, 1, first_index=20, commit_index=30, term_at=terms) is None


@pytest.mark.parametrize(
    ("has_committed", "has_end", "expected"),
    [
        (True, True, Response.STOP),
        (None, True, Response.STOP),
        (True, False, Response.WAIT),
        (True, None, Response.WAIT),
        (None, False, Response.WAIT),
        (None, None, Response.WAIT),
        (False, False, Response.STAY),
        (False, None, Response.STAY),
    ],
)
def test_store_stops_for_continuing_log_only_if_its_end_is_there(
    has_committed: bool | None, has_end: bool | None, expected: Response
) -> None:
    assert respond(has_committed=has_committed, has_end=has_end) is expected


Entries: TypeAlias = tuple[tuple[str, int], ...]
"""Log and term of each entry of a store; entries with one log, term and index are the same."""


def logs(log_uuid: str, longest: int, terms: int) -> list[Entries]:
    found = (row for count in range(longest + 1) for row in itertools.product(range(1, terms + 1), repeat=count))
    return [tuple((log_uuid, term) for term in row) for row in found if list(row) == sorted(row)]


def match(one: Entries, other: Entries) -> bool:
    """Whether two logs have Raft's property of Log Matching: equal entries have equal entries before them."""
    same = [this == that for this, that in zip(one, other, strict=False)]
    return same == sorted(same, reverse=True)


def rank(entries: Entries) -> tuple[int, int]:
    return (entries[-1][1] if entries else -1), len(entries) - 1


def response_to(
    chain: Ancestors, new: Entries, log_uuid: str, old: Entries, committed: int, first: int = 0
) -> Response:
    """Return the reaction of a store with ``committed`` entries to a log whose first entry is at ``first``."""

    def has(count: int) -> bool | None:
        term = old[count - 1][1] if count else -1
        log = {"first_index": first, "commit_index": len(new) - 1, "term_at": lambda index: new[index][1]}
        return contains(chain, log_uuid, count - 1, term, **log)  # type: ignore[arg-type]

    return respond(has_committed=has(committed), has_end=has(len(old)))


def test_no_pair_of_logs_stops_store_whose_entries_new_log_lacks() -> None:
    all_logs, stopped = logs("old", 4, 3), 0
    for point, old in itertools.product(all_logs, repeat=2):
        if not match(point, old):
            continue
        last_term, last_index = rank(point)
        chain = (AncestorLog("old", last_index, last_term, 7),)
        for added, committed in itertools.product(range(3), range(len(old) + 1)):
            new = (*point, *[("new", max(last_term, 1) + 1)] * added)  # the old log may have entries of this term too
            lacks_end, lacks_committed = old != point[: len(old)], old[:committed] != point[:committed]
            found = response_to(chain, new, "old", old, committed)
            assert (found is Response.STOP) == (not lacks_end), (new, old, committed)
            assert (found is Response.STAY) == lacks_committed, (new, old, committed)
            stopped += found is Response.STOP
            for first in range(1, len(new) + 1):  # deleted entries
                found = response_to(chain, new, "old", old, committed, first)
                assert found is not Response.STOP or not lacks_end
                assert found is not Response.STAY or lacks_committed
                assert found is Response.WAIT or not 0 < len(old) <= min(first, len(point)) or lacks_committed
    assert stopped > 100


def continued_again(first: Entries, entries: Entries) -> Ancestors:
    """Return the chain of a recovery of log "new", which continued "old" up to ``first``, by one survivor."""
    (last_term, last_index), (term, index) = rank(first), rank(entries)
    survivor = answer("n2", log_uuid="new", chain=(AncestorLog("old", last_index, last_term, 1),))
    action = decided("n0,n1", after_retiring(replace(survivor, end=end(term, index, -1, check=2))))
    assert isinstance(action, TakeRecord)
    return action.record.continues


def test_log_that_continues_two_claims_no_entry_that_it_lacks() -> None:
    """The second recovery has a survivor that the first one's log never reached, or that follows it in part."""
    all_logs, capped = logs("old", 3, 2), set()
    for first, never_reached in itertools.product(all_logs, repeat=2):
        if not match(first, never_reached) or rank(never_reached) > rank(first):
            continue
        middle = (*first, ("new", 3), ("new", 3))
        for entries in (never_reached, *(middle[:count] for count in range(len(middle) + 1))):
            chain = continued_again(first, entries)
            if chain[0].index != len(first) - 1:
                capped.add(chain[0].index)
                assert chain[0] == replace(chain[1], log_uuid="old"), "index, term and check are those of the point"
            new = (*entries, ("newest", 4))
            for log_uuid, old in [*(("old", each) for each in all_logs), ("new", middle), ("new", middle[:-1])]:
                if not match(old, first) or not match(old, never_reached):
                    continue
                found = response_to(chain, new, log_uuid, old, len(old))
                has_all = old == entries[: len(old)]
                assert found is (Response.STOP if has_all else Response.STAY), (chain, entries, log_uuid, old)
    assert capped == {-1, 0, 1, 2}


def histories(random: Random, steps: int, nodes: int = 5) -> tuple[list[Entries], list[int]]:
    """Return logs and numbers of committed entries of the members of a group, after this many random events."""
    entries: list[Entries] = [()] * nodes
    terms, committed, leaders = [0] * nodes, [0] * nodes, [0] * nodes
    for _ in range(steps):
        node = random.randrange(nodes)
        if random.random() < 0.16:
            term = max(terms) + 1
            asked = [each for each in range(nodes) if each == node or random.random() < 0.6]
            ready = [each for each in asked if rank(entries[each]) <= rank(entries[node])]
            for each in asked:
                terms[each], leaders[each] = term, 0
            if len(ready) > nodes // 2:
                leaders[node], entries[node] = term, (*entries[node], ("old", term))
        elif (term := leaders[node]) and random.random() < 0.25:
            entries[node] += (("old", term),)
        elif term:
            peer = random.randrange(nodes)
            if peer == node or terms[peer] > term:
                continue
            terms[peer], leaders[peer] = term, 0
            count = random.randint(0, len(entries[node]))
            if entries[peer][:count] != entries[node][:count]:
                entries[peer] = entries[node][:count]
            has = [sum(log[:end] == entries[node][:end] for log in entries) for end in range(len(entries[node]) + 1)]
            done = [end for end, log in enumerate(entries[node], 1) if log[1] == term and has[end] > nodes // 2]
            committed[node] = max([committed[node], *done])
            committed[peer] = max(committed[peer], min(committed[node], count))
    return entries, committed


@pytest.mark.parametrize("seed", range(4))
def test_random_histories_stop_no_store_with_entry_that_new_log_lacks(seed: int) -> None:
    random, seen = Random(seed), set()
    for _ in range(500):
        entries, committed = histories(random, random.randint(15, 60))
        continues = random.randrange(len(entries))  # whichever survivor a recovery chose
        point = entries[continues]
        last_term, last_index = rank(point)
        chain, new = (AncestorLog("old", last_index, last_term, 7),), (*point, ("new", last_term + 1))
        for old, count in zip(entries, committed, strict=True):
            found = response_to(chain, new, "old", old, count)
            seen.add(found)
            assert (found is Response.STOP) == (old == point[: len(old)])
            assert (found is Response.STAY) == (old[:count] != point[:count])
    assert seen == set(Response)


def test_log_starts_above_highest_term_of_its_survivors() -> None:
    ends = {"n1": end(9, 12, term=9), "n2": end(3, 9, term=11)}
    action = decided("n0", *(after_retiring(answer(node, end=ends[node])) for node in ends))
    assert isinstance(action, TakeRecord)
    assert (action.record.voter.node_id, action.record.term) == ("n1", 11)


def test_reader_follows_ancestors_only_up_to_the_end_of_the_link() -> None:
    assert follows(CHAIN, "old", 9)
    assert follows(CHAIN, "older", 3)
    assert not follows(CHAIN, "old", 10)
    assert not follows(CHAIN, "another", 1)

"""``recover --lost`` where survivors have holes: filled, or accepted as a loss, before a record names the best end."""

from __future__ import annotations

import itertools

import pytest

from dledger_core import recovery
from dledger_core.errors import RecoveryRefusedError
from dledger_core.ids import NodeId
from dledger_core.lineage import retired, taken, with_end
from dledger_core.recovery import (
    Action,
    CutLog,
    FillHoles,
    Hole,
    Holes,
    KnownMember,
    Refused,
    RetireLog,
    SurvivorAnswer,
    TakeRecord,
    preview,
)
from tests.test_lineage import NODES, after_retiring, answer, end

LOST = frozenset({NODES[0], *NODES[3:]})
N1, N2 = NODES[1:3]
FIVE = tuple(KnownMember(node, f"store of {node}", f"host:{node}", True) for node in NODES)


def decided(*answers: SurvivorAnswer, accepts_loss: bool = False, tried: Holes | None = None) -> Action:
    numbers = itertools.count()
    found = {each.node_id: each for each in answers}
    return recovery.decide(LOST, found, lambda: f"new {next(numbers)}", accepts_loss=accepts_loss, tried=tried)


def survivor(node: str, *holes: Hole, last_index: int = 9) -> SurvivorAnswer:
    return after_retiring(answer(node, members=FIVE, end=end(3, last_index, 5), holes=holes))


def test_holes_are_filled_after_all_retired_their_log_and_before_a_record() -> None:
    live = answer("n1", members=FIVE, holes=(Hole(4, 5),))
    assert decided(live, answer("n2", members=FIVE)) == RetireLog("old", (N1, N2))
    one, two = survivor("n1", Hole(4, 5)), survivor("n2", Hole(7, 9))
    action = decided(one, two)
    assert action == FillHoles("old", (N1, N2), (N1, N2))
    progress = decided(survivor("n1"), two, tried={N1: one.holes, N2: two.holes})
    assert progress == FillHoles("old", (N2,), (N1, N2)), "the attempt filled some, so another one may fill more"
    assert isinstance(decided(survivor("n1"), survivor("n2")), TakeRecord)


def test_unfilled_hole_needs_consent() -> None:
    one, two = survivor("n1", Hole(4, 5)), survivor("n2", last_index=3)
    tried = {N1: one.holes}
    refused = decided(one, two, tried=tried)
    assert isinstance(refused, Refused)
    assert "dledger recover --lost n0,n3,n4 --accept-loss" in refused.remedy
    assert decided(one, two, accepts_loss=True) == FillHoles("old", (N1,), (N1, N2)), "consent is not the first choice"
    assert decided(one, two, tried=tried, accepts_loss=True) == CutLog((N1,), 4)


def test_hole_of_a_store_that_does_not_continue_stops_nothing() -> None:
    one, two = survivor("n1", Hole(4, 5)), survivor("n2", last_index=12)
    action = decided(one, two, tried={N1: one.holes})
    assert isinstance(action, TakeRecord)
    assert action.record.voter.node_id == N2


def test_dry_run_shows_holes_and_who_may_fill_them() -> None:
    one, two = answer("n1", holes=(Hole(2, 3), Hole(4, 6))), answer("n2", holes=(Hole(5, 6),))
    rows = preview(LOST, {N1: one, N2: two})["survivors"]
    assert [row["holes"] for row in rows] == [
        [{"start": 2, "end": 3, "filled_by": [N2]}, {"start": 4, "end": 6, "filled_by": []}],
        [{"start": 5, "end": 6, "filled_by": []}],
    ]


def test_end_changes_only_while_no_record_names_it() -> None:
    one, two = survivor("n1"), survivor("n2", last_index=8)
    assert with_end(one.state, end(3, 4)).retired.end == end(3, 4)
    with pytest.raises(RecoveryRefusedError):
        with_end(None, end())
    action = decided(one, two)
    assert isinstance(action, TakeRecord)
    voter, learner = (taken(each.state, each.node_id, action.record) for each in (one, two))
    with pytest.raises(RecoveryRefusedError):
        with_end(voter, end(3, 4))
    assert with_end(learner, end(3, 4)).retired.end == end(3, 4), "a learner gets its end from the voter"


def test_answer_of_an_older_node_has_no_holes() -> None:
    fields = survivor("n1", Hole(4, 5)).to_fields()
    found = SurvivorAnswer.from_fields(fields)
    assert found is not None
    assert found.holes == (Hole(4, 5),)
    del fields["holes"]
    older = SurvivorAnswer.from_fields(fields)
    assert older is not None
    assert older.holes == ()
    assert retired(older.state, "old", "store of n1", end()) == older.state
    assert NodeId("n1") == older.node_id

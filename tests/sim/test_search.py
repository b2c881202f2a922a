"""All interleavings of the real decisions of votes, floors and recoveries in small groups; see ``search``.

Each control switches one rule off; a search that finds nothing then would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from dledger_core import lineage, recovery
from dledger_core.ids import NO_INDEX, NO_TERM
from dledger_core.raft import floor, state
from dledger_core.raft.floor import Floor
from dledger_core.raft.progress import Progress
from dledger_core.raft.state import RaftState
from dledger_core.server.replica import peer_watermarks
from dledger_core.server.replica.peer_watermarks import PeerWatermarks
from dledger_core.storage.files.acknowledged_file import Remembered
from dledger_core.storage.tables.tables import LogTables
from tests.sim.search import producers
from tests.sim.search.recoveries import FORGOTTEN, FORKED, STOPPED, Recoveries, Recovery
from tests.sim.search.votes import LOST, MINORITY, NEEDLESS, STUCK, TWO_LEADERS, Votes

STATES_MAX = 600_000
"""End of each search of a soak run: about a minute."""

Switch: TypeAlias = Callable[[pytest.MonkeyPatch], None]

# --- votes, floors and memory --------------------------------------------------------------------------------------

ON_TWO = ("0 appends", "0 sends 1 entries to 1")
"""The first leader has sent its first entry to one of the two others."""
SET_BACK_WHILE_RECOVERING = (
    *("0 appends", "0 syncs", "0 sends 1 entries to 1", "0 sends 1 entries to 2"),
    *("0 loses its end after 0", "start 0", "0 and 1 attach", "0 and 2 attach"),
    *("1 is elected in term 2 by (2,)", "copy of 0", "1 appends", "1 syncs", "1 sends 2 entries to 2", "1 appends"),
)
"""Node 0 has a floor (1, ∞), and entries of term 2 that it may get are not on its copy."""


@pytest.mark.parametrize(
    ("size", "states"),
    [
        pytest.param({"entries": 1, "power": 1}, 20_000, id="power losses"),
        pytest.param({"entries": 1, "power": 1, "forgets": False}, 10_000, id="power losses and memory"),
        pytest.param({"entries": 1, "lost_ends": 1}, 5_000, id="a lost end"),
        pytest.param({"entries": 1, "set_back": 1}, 5_000, id="a disk set back"),
        pytest.param({"entries": 1, "forgotten": 1}, 10_000, id="a forgotten end"),
    ],
)
def test_no_order_of_steps_elects_leader_without_acknowledged_entry(size: dict[str, Any], states: int) -> None:
    found = Votes(**{"terms": 2, "power": 0} | size).run()
    assert (found.violation, found.is_complete) == ("", True), found.steps
    assert found.states > states


def test_no_order_of_steps_loses_entry_when_recovering_member_loses_its_end_again() -> None:
    found = Votes(terms=3, entries=3, power=0, set_back=1, lost_ends=1).run(*SET_BACK_WHILE_RECOVERING)
    assert (found.violation, found.is_complete) == ("", True), found.steps


@pytest.mark.soak
@pytest.mark.parametrize(
    "size",
    [
        {"power": 1},
        {"power": 2, "entries": 1},
        {"power": 1, "forgets": False},
        {"lost_ends": 1},
        {"lost_ends": 2, "entries": 1, "terms": 3},
        {"lost_ends": 1, "power": 1, "entries": 1},
        {"lost_ends": 1, "set_back": 1, "entries": 1},
        {"lost_ends": 1, "forgotten": 1, "entries": 1},
        {"set_back": 1},
        {"set_back": 1, "entries": 1, "terms": 3},
        {"forgotten": 1},
        {"forgotten": 1, "entries": 1, "terms": 3},
        {"forgotten": 1, "entries": 1, "partly": True},
        {"nodes": 4, "set_back": 1, "entries": 1},
        {"nodes": 4, "forgotten": 1, "entries": 1},
        {"nodes": 4, "lost_ends": 1, "entries": 1},
        {"nodes": 4, "power": 1, "entries": 1},
    ],
    ids=lambda size: " ".join(f"{count} {name}" for name, count in size.items()),
)
def test_larger_search_elects_no_leader_without_acknowledged_entry(size: dict[str, Any]) -> None:
    found = Votes(**{"terms": 2, "power": 0} | size).run(states_max=STATES_MAX)
    assert found.violation == "", found.steps


def without_start_rule(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RaftState, "is_starting", False)


def with_one_value(patch: pytest.MonkeyPatch) -> None:
    """A vote in a later term takes the place of the acknowledgement."""

    def one_value(known: Remembered, **changes: Any) -> Remembered:
        found = replace(known, **changes)
        is_later = found.term > found.acknowledged[0]
        return replace(found, acknowledged=(NO_TERM, NO_INDEX)) if is_later else found

    patch.setattr(peer_watermarks, "replace", one_value)


def with_one_term(patch: pytest.MonkeyPatch) -> None:
    """An acknowledgement counts in its own term only: in a later one no entry is known to be committed."""
    check = PeerWatermarks.check
    patch.setattr(
        PeerWatermarks, "check", lambda self, group, theirs, log, _: check(self, group, theirs, log, NO_INDEX)
    )


def with_kept_match(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "ends_at", lambda *_: False)


def with_free_vote(patch: pytest.MonkeyPatch) -> None:
    """The vote of T + 1 is free after a floor (T, ∞)."""
    vote = RaftState.vote
    patch.setattr(RaftState, "vote", lambda self, member: None if member == self.member else vote(self, member))


def with_lowered_floor(patch: pytest.MonkeyPatch) -> None:
    for module in (floor, state, peer_watermarks):
        patch.setattr(module, "higher", lambda before, new: new or before)


def with_first_floor(patch: pytest.MonkeyPatch) -> None:
    """A member that recovers and loses its end again keeps its floor."""
    for module in (floor, state, peer_watermarks):
        patch.setattr(module, "higher", lambda before, new: before or new)


def with_open_hint(patch: pytest.MonkeyPatch) -> None:
    """A leader with less of its term than a follower gets (T, ∞)."""
    patch.setattr(peer_watermarks, "Floor", lambda term, _: Floor(term))


@pytest.mark.parametrize(
    ("switch", "size", "after", "violations"),
    [
        (without_start_rule, {"entries": 1, "forgotten": 1}, (), {LOST}),
        (without_start_rule, {"entries": 1, "set_back": 1}, (), {LOST, TWO_LEADERS}),
        (with_one_value, {"terms": 3, "entries": 1, "forgotten": 1}, ON_TWO, {LOST}),
        (with_one_term, {"terms": 3, "entries": 1, "forgotten": 1}, ON_TWO, {LOST}),
        (with_free_vote, {"set_back": 1}, (*ON_TWO, "0 appends", "0 sends 2 entries to 2", "copy of 1"), {TWO_LEADERS}),
        (with_kept_match, {"entries": 1, "set_back": 1}, (), {MINORITY}),
        (with_lowered_floor, {"forgotten": 1}, (*ON_TWO, "0 appends"), {LOST}),
        (
            with_first_floor,
            {"terms": 3, "entries": 3, "set_back": 1, "lost_ends": 1},
            SET_BACK_WHILE_RECOVERING,
            {LOST},
        ),
        (with_open_hint, {"terms": 1, "power": 1, "forgets": False}, (), {NEEDLESS, STUCK}),
    ],
)
def test_search_finds_loss_without_rule_of_votes(
    switch: Switch, size: dict[str, Any], after: tuple[str, ...], violations: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch(monkeypatch)
    assert Votes(**{"terms": 2, "power": 0} | size).run(*after).violation in violations


# --- recoveries and returns ------------------------------------------------------------------------------------------

FIRST = frozenset({0})
"""The first site is called lost: the other side of the network, a majority or not."""
ONE, TWO_AT_ONCE = (Recovery(FIRST),), (Recovery(FIRST, operators=2),)
ONE_AFTER_THE_OTHER = (Recovery(FIRST), Recovery(None))


@pytest.mark.parametrize(
    ("weights", "recoveries", "size", "states"),
    [
        pytest.param((2, 1), ONE, {"entries": 2}, 1_000, id="a cut-off majority of 3"),
        pytest.param((3, 1, 1), ONE, {}, 5_000, id="a cut-off majority of 5"),
        pytest.param((1, 1, 1), ONE, {"lost_ends": 1}, 5_000, id="a lost node and a lost end"),
        pytest.param((3, 1, 1), TWO_AT_ONCE, {"terms": 0, "entries": 1}, 10_000, id="two at once"),
        pytest.param((3, 1, 1), ONE_AFTER_THE_OTHER, {}, 20_000, id="in order"),
    ],
)
def test_no_order_of_steps_of_recoveries_loses_entry_that_survivor_knows(
    weights: tuple[int, ...], recoveries: tuple[Recovery, ...], size: dict[str, int], states: int
) -> None:
    found = Recoveries(weights, recoveries, **{"terms": 2, "entries": 1} | size).run()
    assert (found.violation, found.is_complete) == ("", True), found.steps
    assert found.states > states


@pytest.mark.soak
@pytest.mark.parametrize(
    ("weights", "recoveries", "size"),
    [
        ((2, 1), ONE, {"terms": 4, "entries": 3}),
        ((3, 1, 1), ONE, {"terms": 3, "entries": 2}),
        ((3, 1, 1), ONE, {"terms": 2, "entries": 2, "lost_ends": 1}),
        ((3, 1, 1), TWO_AT_ONCE, {"terms": 1, "entries": 1}),
        ((3, 1, 1), ONE_AFTER_THE_OTHER, {"terms": 2, "entries": 2}),
        ((1, 1, 1), ONE, {"terms": 3, "entries": 2, "lost_ends": 1}),
        ((1, 1, 1), TWO_AT_ONCE, {"terms": 2, "entries": 1, "lost_ends": 1}),
        ((2, 1, 1), ONE, {"terms": 2, "entries": 2, "lost_ends": 1}),
        ((2, 1, 1), ONE_AFTER_THE_OTHER, {"terms": 2, "entries": 1, "lost_ends": 1}),
        ((4, 1, 1, 1), ONE, {"terms": 2, "entries": 1}),
    ],
    ids=str,
)
def test_larger_search_of_recoveries_loses_no_entry_that_survivor_knows(
    weights: tuple[int, ...], recoveries: tuple[Recovery, ...], size: dict[str, int]
) -> None:
    found = Recoveries(weights, recoveries, **size).run(states_max=STATES_MAX)
    assert found.violation == "", found.steps


def with_best_end_of_all(patch: pytest.MonkeyPatch) -> None:
    """The best end continues, whatever a survivor knows to be committed."""
    patch.setattr(recovery, "best_of", lambda ends: max(sorted(ends), key=lambda node: ends[node].rank))


def with_stop_by_index(patch: pytest.MonkeyPatch) -> None:
    def by_index(chain: lineage.Ancestors, log_uuid: str, index: int, term: int, **_: Any) -> bool:
        return lineage.follows(chain, log_uuid, index)

    patch.setattr(lineage, "contains", by_index)


def with_uncapped_chain(patch: pytest.MonkeyPatch) -> None:
    """Two rules prevent this loss: the cap, which readers need as well, and the term of the link."""

    def by_own_terms(chain: lineage.Ancestors, log_uuid: str, index: int, term: int, **log: Any) -> bool | None:
        if not lineage.follows(chain, log_uuid, index):
            return False
        return index < 0 or (log["term_at"](index) == term if index <= log["commit_index"] else None)

    patch.setattr(recovery, "extended", lambda chain, point: (*chain, point))
    patch.setattr(lineage, "contains", by_own_terms)


def with_fork_by_end(patch: pytest.MonkeyPatch) -> None:
    """An entry that was never committed forks the new log too."""
    respond = lineage.respond
    patch.setattr(
        lineage,
        "respond",
        lambda has_committed, has_end: respond(has_committed=has_committed and has_end, has_end=has_end),
    )


FIGURE_8 = ("1 is elected in term 1 by (0,)", "1 appends", "2 is elected in term 2 by (0,)", "2 appends")
"""Two leaders, each with an entry that no other one has (the paper's figure 8)."""


@pytest.mark.parametrize(
    ("switch", "weights", "recoveries", "size", "after", "violation"),
    [
        (with_best_end_of_all, (3, 1, 1), ONE, {"terms": 4, "entries": 2}, (*FIGURE_8, "2 sends 0 to 1"), FORGOTTEN),
        (with_stop_by_index, (2, 1), ONE, {}, (), STOPPED),
        (with_uncapped_chain, (3, 1, 1), ONE_AFTER_THE_OTHER, {}, (), STOPPED),
        (with_fork_by_end, (2, 1), ONE, {}, (), FORKED),
    ],
)
def test_search_finds_loss_without_rule_of_recoveries(
    switch: Switch,
    weights: tuple[int, ...],
    recoveries: tuple[Recovery, ...],
    size: dict[str, int],
    after: tuple[str, ...],
    violation: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    switch(monkeypatch)
    assert Recoveries(weights, recoveries, **{"terms": 2, "entries": 1} | size).run(*after).violation == violation


# --- tables -----------------------------------------------------------------------------------------------------------


def test_no_order_of_losses_acknowledges_another_entry_to_producer() -> None:
    found = producers.run(entries=8)
    assert (found.violation, found.is_complete) == ("", True), found.steps


def test_search_finds_wrong_acknowledgement_where_tables_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LogTables, "forget_after", lambda *_: None)
    assert producers.run().violation == producers.OTHER_ENTRY

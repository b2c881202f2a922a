"""All interleavings of the real decisions of votes, floors and recoveries in small groups; see ``search``.

Each control switches one rule off; a search that finds nothing then would prove nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeAlias

import pytest

from dledger_core.ids import NO_INDEX, NO_TERM
from dledger_core.raft import floor, state
from dledger_core.raft.floor import Floor
from dledger_core.raft.progress import Progress
from dledger_core.raft.state import RaftState
from dledger_core.server.replica import acknowledged
from dledger_core.server.replica.acknowledged import Acknowledged
from dledger_core.storage.files.acknowledged_file import Remembered
from tests.sim.search.votes import LOST, MINORITY, NEEDLESS, STUCK, TWO_LEADERS, Votes

Switch: TypeAlias = Callable[[pytest.MonkeyPatch], None]

# --- votes, floors and memory --------------------------------------------------------------------------------------


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
    found = Votes(**{"terms": 2, "power": 0} | size).run(states_max=2_000_000)
    assert found.violation == "", found.steps


def without_start_rule(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RaftState, "is_starting", False)


def with_one_value(patch: pytest.MonkeyPatch) -> None:
    """A vote in a later term takes the place of the acknowledgement."""
    remember = Acknowledged._remember

    def one_value(self: Acknowledged, store: str, found: Remembered) -> None:
        is_later = found.term > found.acknowledged[0]
        remember(self, store, replace(found, acknowledged=(NO_TERM, NO_INDEX)) if is_later else found)

    patch.setattr(Acknowledged, "_remember", one_value)


def with_one_term(patch: pytest.MonkeyPatch) -> None:
    """An acknowledgement counts in its own term only: in a later one no entry is known to be committed."""
    check = Acknowledged.check
    patch.setattr(Acknowledged, "check", lambda self, group, theirs, log, _: check(self, group, theirs, log, NO_INDEX))


def with_kept_match(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Progress, "ends_at", lambda *_: False)


def with_lowered_floor(patch: pytest.MonkeyPatch) -> None:
    for module in (floor, state, acknowledged):
        patch.setattr(module, "higher", lambda before, new: new or before)


def with_open_hint(patch: pytest.MonkeyPatch) -> None:
    """A leader with less of its term than a follower gets (T, ∞)."""
    patch.setattr(acknowledged, "Floor", lambda term, _: Floor(term))


@pytest.mark.parametrize(
    ("switch", "size", "after", "violations"),
    [
        (without_start_rule, {"entries": 1, "forgotten": 1}, (), {LOST}),
        (without_start_rule, {"entries": 1, "set_back": 1}, (), {LOST, TWO_LEADERS}),
        (with_one_value, {"terms": 3, "entries": 1, "forgotten": 1}, (), {LOST}),
        (with_one_term, {"terms": 3, "entries": 1, "forgotten": 1}, (), {LOST}),
        (with_kept_match, {"entries": 1, "set_back": 1}, (), {MINORITY}),
        (with_lowered_floor, {"forgotten": 1}, ("0 appends", "0 sends 1 entries to 1", "0 appends"), {LOST}),
        (with_open_hint, {"terms": 1, "power": 1, "forgets": False}, (), {NEEDLESS, STUCK}),
    ],
)
def test_search_finds_loss_without_rule_of_votes(
    switch: Switch, size: dict[str, Any], after: tuple[str, ...], violations: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    switch(monkeypatch)
    assert Votes(**{"terms": 2, "power": 0} | size).run(*after).violation in violations

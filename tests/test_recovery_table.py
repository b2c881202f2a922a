"""The guide's table of what to type, for all combinations of 1, 2, 3 and 5 voters, by the real decisions."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

import pytest

from dledger_core.ids import NodeId
from dledger_core.lineage import LogEnd, completed, retired, taken, with_end
from dledger_core.recovery import (
    CompleteRecord,
    CutLog,
    Electable,
    FillHoles,
    Hole,
    Holes,
    KnownMember,
    Recovered,
    Refused,
    RetireLog,
    SurvivorAnswer,
    TakeRecord,
    Unanswered,
    decide,
    holes_of,
)
from tests.support.soak_record import ROOT

STATES: Final = ("healthy", "recovering", "lost", "cut off", "damaged")
COMBINATIONS: Final = [
    found for count in (1, 2, 3, 5) for found in itertools.combinations_with_replacement(STATES, count)
]
COLUMNS: Final = ("healthy", "cut off", "lost", "others left", "what to type")


@dataclass(frozen=True)
class Row:
    """A row of the table: its cells by column."""

    cells: dict[str, str]

    def fits(self, combination: tuple[str, ...]) -> bool:
        voters, lost, cut_off = len(combination), combination.count("lost"), combination.count("cut off")
        words = {
            "healthy": {"a majority" if 2 * combination.count("healthy") > voters else "no majority"},
            "cut off": {"any", "some" if cut_off else "none"},
            "lost": {"any", "some" if 0 < lost < voters else "all" if lost else "none"},
            "others left": {"any", "some" if voters > lost + cut_off else "none"},
        }
        return all(self.cells[column] in words[column] for column in COLUMNS[:-1])


def rows() -> list[Row]:
    lines = (ROOT / "dledger_core/server/README.md").read_text().splitlines()
    start = lines.index("| " + " | ".join(COLUMNS) + " |") + 2
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[start:])
    return [
        Row(dict(zip(COLUMNS, (cell.strip() for cell in line.strip("|").split("|")), strict=True))) for line in table
    ]


def test_table_has_one_row_for_each_of_181_combinations() -> None:
    assert len(COMBINATIONS) == 181
    found = {combination: sum(row.fits(combination) for row in rows()) for combination in COMBINATIONS}
    # A majority of one is lost or not: the group without any node left has a row of its own.
    assert {combination: count for combination, count in found.items() if count != 1} == {}


ENDS: Final = {
    "healthy": LogEnd(term=3, last_term=3, last_index=9, commit_index=7, ranges=((1, 0), (3, 5))),
    "recovering": LogEnd(
        term=3, last_term=3, last_index=6, commit_index=5, is_recovering=True, ranges=((1, 0), (3, 5))
    ),
    "damaged": LogEnd(term=3, last_term=3, last_index=9, commit_index=7, ranges=((1, 0), (3, 5))),
}


class Stores:
    """The stores of a group: they answer as nodes do, and change as the command asks."""

    def __init__(self, combination: tuple[str, ...], first_hole: int) -> None:
        nodes = [NodeId(f"n{number}") for number in range(len(combination))]
        self.lost = frozenset(node for node, state in zip(nodes, combination, strict=True) if state == "lost")
        self.cut_off = tuple(node for node, state in zip(nodes, combination, strict=True) if state == "cut off")
        members = tuple(KnownMember(node, f"store of {node}", f"host:{node}", True) for node in nodes)
        self.answers = {
            node: SurvivorAnswer(
                node_id=node,
                log_uuid="old",
                store=f"store of {node}",
                members=members,
                end=ENDS[state],
                # No two have the same hole, so that each entry is somewhere, unless one store is left.
                holes=(Hole(first_hole + at, first_hole + at + 1),) if state == "damaged" else (),
                reason="its store is being repaired" if state == "damaged" else "",
            )
            for at, (node, state) in enumerate(zip(nodes, combination, strict=True))
            if state in ENDS
        }
        self.names = map("new {}".format, itertools.count())

    def fill(self, action: FillHoles) -> None:
        """Fill the holes of each store that another one has no hole in."""
        for node in action.nodes:
            others = [answer for name, answer in self.answers.items() if name != node]
            left = tuple(hole for hole in self.answers[node].holes if not any(has(other, hole) for other in others))
            self.answers[node] = replace(self.answers[node], holes=left)

    def run(self, lost: frozenset[NodeId], *, accepts_loss: bool = False) -> object:
        """Carry a recovery out; return its last action."""
        tried: Holes | None = None
        for _ in range(12):
            action = decide(lost, self.answers, self.names.__next__, accepts_loss=accepts_loss, tried=tried)
            match action:
                case RetireLog(log, nodes):
                    for node in nodes:
                        answer = self.answers[node]
                        assert answer.end is not None
                        state = retired(answer.state, log, str(answer.store), answer.end)
                        self.answers[node] = replace(answer, state=state, reason="")
                case FillHoles():
                    tried = holes_of(lost, self.answers)
                    self.fill(action)
                case CutLog((node,), start):
                    answer = self.answers[node]
                    assert answer.end is not None
                    end = replace(answer.end, last_index=start - 1, last_term=1, commit_index=start - 1, ranges=())
                    self.answers[node] = replace(answer, end=end, holes=(), state=with_end(answer.state, end))
                case TakeRecord(record, nodes):
                    for node in nodes:
                        answer = self.answers[node]
                        self.answers[node] = replace(answer, state=taken(answer.state, node, record))
                case CompleteRecord(record, _):
                    for survivor in record.survivors:
                        answer = self.answers[survivor.node_id]
                        state = completed(answer.state, record.log_uuid)
                        assert answer.end is not None
                        assert answer.end.rank <= (record.point.term, record.point.index)
                    return Recovered(record.log_uuid, record.continues) if state.is_complete else None
                case _:
                    return action
        raise AssertionError("the recovery does not end")


def has(answer: SurvivorAnswer, hole: Hole) -> bool:
    reaches = answer.end is not None and answer.end.last_index >= hole.end - 1
    return reaches and not any(other.start < hole.end and hole.start < other.end for other in answer.holes)


def cases() -> Iterator[object]:
    for combination in COMBINATIONS:
        yield pytest.param(combination, id="-".join(state.replace(" ", "_") for state in combination))


@pytest.mark.parametrize("combination", list(cases()))
def test_command_needs_what_the_table_says(combination: tuple[str, ...]) -> None:
    stores = Stores(combination, first_hole=1)
    (typed,) = (row.cells["what to type"] for row in rows() if row.fits(combination))
    done = stores.run(stores.lost)
    if typed.startswith(("nothing: a leader", "`dledger member replace")):
        assert isinstance(done, Electable)
        assert all(combination[int(node[1:])] == "healthy" for node in done.nodes)
        assert bool(stores.lost) == ("replace" in typed)
    elif typed.startswith("nothing yet"):
        left = any(state in ENDS for state in combination)
        assert done == Unanswered(stores.cut_off) if left else isinstance(done, Refused)
    elif typed.startswith("`dledger restore"):
        assert isinstance(done, Refused)
    else:
        assert typed == ("`dledger recover --lost n0,n1`" if stores.lost else "`dledger recover`")
        holes = any(not any(has(other, hole) for other in stores.answers.values()) for hole in all_holes(combination))
        if holes:
            assert isinstance(done, Refused), "nothing is cut without --accept-loss"
            assert isinstance(stores.run(stores.lost, accepts_loss=True), Recovered)
        else:
            assert isinstance(done, Recovered)
            best = max(ENDS[state].rank for state in combination if state in ENDS)
            assert (done.chain[-1].term, done.chain[-1].index) == best


def all_holes(combination: tuple[str, ...]) -> list[Hole]:
    return [hole for answer in Stores(combination, first_hole=1).answers.values() for hole in answer.holes]

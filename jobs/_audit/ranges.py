"""Digests of one range from all its replicas, compared. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from jobs._audit.model import OTHER

__all__ = ["RangeJudgement", "RangeRow", "judge_range"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RangeRow:
    """One range as one replica has it.

    Attributes:
        replica: its name.
        content: digest of index, term, magic and body; empty if the range could not be digested.
        layout: digest of position, mark and CRC.
        damaged: how many bodies do not match their CRC.
        problem: empty, or the kind of a gap: damaged, gone, unread.
        reason: for people.
        index_wrong: ranges of entries about which its index file is wrong.
    """

    replica: str
    content: bytes = b""
    layout: bytes = b""
    damaged: int = 0
    problem: str = ""
    reason: str = ""
    index_wrong: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class RangeJudgement:
    """What follows for the range.

    Attributes:
        drill: it has to be read entry by entry.
        layout: those whose layout alone differs from the majority's; all, joined by commas, if there is none.
        unread: why replicas take no part.
        gone: those that deleted the range while the audit ran.
    """

    drill: bool = False
    layout: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()


def judge_range(rows: Sequence[RangeRow]) -> RangeJudgement:
    """Compares the digests that the replicas of a section gave for one range."""
    unread = tuple(f"{row.replica}: {row.reason}" for row in rows if row.problem == "unread")
    gone = tuple(row.replica for row in rows if row.problem == "gone")
    readable = [row for row in rows if row.problem in ("", "damaged")]
    damaged = any(row.problem or row.damaged for row in readable)
    if damaged or len({row.content for row in readable}) > 1:
        return RangeJudgement(True, (), unread, gone)
    here = [row for row in readable if not row.replica.startswith(OTHER)]
    there = [row for row in readable if row.replica.startswith(OTHER)]
    return RangeJudgement(False, _layout_differs(here) + _layout_differs(there), unread, gone)


def _layout_differs(rows: Sequence[RangeRow]) -> tuple[str, ...]:
    """Compares the layouts within one cluster; two clusters never lay out their entries alike."""
    layouts = Counter(row.layout for row in rows)
    if len(layouts) < 2:
        return ()
    layout, count = layouts.most_common(1)[0]
    if 2 * count > len(rows):
        return tuple(row.replica for row in rows if row.layout != layout)
    return (",".join(row.replica for row in rows),)

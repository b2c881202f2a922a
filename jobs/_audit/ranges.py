"""Digests of one range from all its replicas, compared. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

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
    """

    replica: str
    content: bytes = b""
    layout: bytes = b""
    damaged: int = 0
    problem: str = ""
    reason: str = ""


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
    layouts = Counter(row.layout for row in readable)
    if len(layouts) < 2:
        return RangeJudgement(False, (), unread, gone)
    layout, count = layouts.most_common(1)[0]
    if 2 * count > len(readable):
        return RangeJudgement(False, tuple(r.replica for r in readable if r.layout != layout), unread, gone)
    return RangeJudgement(False, (",".join(row.replica for row in readable),), unread, gone)

"""Who is right at one index: the entries that the replicas hold there, compared. Pure.

A majority of the readable entries is right. Above what is known to be committed the highest term is right, however few
hold it: an entry of a later term can only be there if the earlier term's entry was never committed. Two clusters are
not voted on together if each agrees within itself: neither outvotes the other, and their terms have nothing in common.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from jobs._audit.model import OTHER, Class

__all__ = ["NOTHING", "Judgement", "Seen", "State", "judge"]


class State(IntEnum):
    """What a replica has at an index."""

    MISSING = 0
    PRESENT = 1
    DAMAGED = 2
    UNREAD = 3


@dataclass(frozen=True, slots=True)
class Seen:
    """One replica's entry at one index.

    Attributes:
        state: whether there is one.
        term: its term.
        magic: data, control or membership.
        position: where it lies.
        size: bytes of the record.
        crc: CRC-32 of the body, computed now.
        digest: digest of the body.
        irregular: its term is above the next entry's or below the previous one's on the same replica.
        reason: why it could not be read.
    """

    state: State
    term: int = -1
    magic: int = 0
    position: int = -1
    size: int = 0
    crc: int = 0
    digest: bytes = b""
    irregular: bool = False
    reason: str = ""

    @property
    def content(self) -> tuple[int, int, int, bytes]:
        """What must be equal on all replicas."""
        return self.term, self.magic, self.size, self.digest

    def to_json(self) -> dict[str, Any]:
        """Returns the evidence of this replica."""
        if self.state is not State.PRESENT:
            shown: dict[str, Any] = {"state": self.state.name.lower()}
            return shown | ({"reason": self.reason} if self.reason else {})
        return {"term": self.term, "position": self.position, "size": self.size, "crc": f"{self.crc:08x}"}


NOTHING = Seen(State.MISSING)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What is wrong with ``replicas`` at an index; more than one only where nobody can say which of them is right."""

    kind: Class
    replicas: tuple[str, ...]
    right: tuple[str, ...] = ()


def judge(seen: Mapping[str, Seen], *, committed: bool) -> list[Judgement]:
    """Returns what is wrong at one index that all of these replicas should hold.

    Args:
        seen: by replica's name.
        committed: whether the index is at or below the lowest recorded commit index.
    """
    present = {name: entry for name, entry in seen.items() if entry.state is State.PRESENT}
    right, wrong = _divide(present, committed=committed)
    here, there = _sides(present)
    apart = bool(wrong and here and there)

    def agreeing(name: str) -> tuple[str, ...]:
        return (there if name.startswith(OTHER) else here) if apart else right

    found = [Judgement(Class.CORRUPT, (n,), agreeing(n)) for n, e in seen.items() if e.state is State.DAMAGED]
    found += [Judgement(Class.INDEX_GAP, (n,), agreeing(n)) for n, e in seen.items() if e.state is State.MISSING]
    if not wrong:
        if present and all(entry.irregular for entry in present.values()):
            found += [Judgement(Class.TERM_REGRESSION, (name,)) for name in present]
        return found
    if apart or not right:
        kind = Class.DIVERGED_COMMITTED if committed else Class.DIVERGED_UNKNOWN
        return [*found, Judgement(kind, there, here) if apart else Judgement(kind, tuple(wrong))]
    right_term = present[right[0]].term
    found += [
        Judgement(_class_of(entry, right_term, committed=committed), (name,), right) for name, entry in wrong.items()
    ]
    return found


def _sides(present: Mapping[str, Seen]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the replicas of two clusters that differ and agree within themselves; nobody if it is not so."""
    here = tuple(name for name in present if not name.startswith(OTHER))
    there = tuple(name for name in present if name.startswith(OTHER))
    agreed = all(len({present[name].content for name in side}) == 1 for side in (here, there))
    return (here, there) if agreed else ((), ())


def _divide(present: Mapping[str, Seen], *, committed: bool) -> tuple[tuple[str, ...], dict[str, Seen]]:
    """Returns (who is right, who is not); nobody is right where it cannot be decided."""
    if len({entry.content for entry in present.values()}) <= 1:
        return tuple(present), {}
    votes = {name: entry for name, entry in present.items() if not entry.irregular} or dict(present)
    if not committed:
        highest = max(entry.term for entry in votes.values())
        votes = {name: entry for name, entry in votes.items() if entry.term == highest}
    content, count = Counter(entry.content for entry in votes.values()).most_common(1)[0]
    if 2 * count <= len(votes):
        return (), dict(present)
    right = tuple(name for name, entry in present.items() if entry.content == content)
    return right, {name: entry for name, entry in present.items() if name not in right}


def _class_of(entry: Seen, right_term: int, *, committed: bool) -> Class:
    if entry.irregular and entry.term != right_term:
        return Class.TERM_REGRESSION
    if committed:
        return Class.DIVERGED_COMMITTED
    return Class.DIVERGED_UNCOMMITTED if entry.term < right_term else Class.DIVERGED_UNKNOWN

"""Where a Java group's log ends, and how far it is safe to read: Java tells neither its end nor its commit index.

The end is found by asking for entries (INDEX_OUT_OF_RANGE = behind it). It counts as safe once it was seen a while ago
and since then one leader led in one term, and the entry before it still has its term: then by Raft's log matching
everything before it is unchanged, too. That is no proof of a commit: see dledger_core/rocketmq/remoting/README.md.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeAlias

__all__ = ["EndObservation", "Probe", "SafeEndTracker", "first_index", "last_end"]

Probe: TypeAlias = Callable[[int], Awaitable[int | None]]
"""Returns the term of the entry at an index, None if the log does not hold it."""


@dataclass(frozen=True, slots=True)
class EndObservation:
    """The log was seen to end at ``end``, its last entry being of ``term``."""

    at: float
    end: int
    term: int


class SafeEndTracker:
    """Which sighted end is old enough; without I/O and without a clock of its own.

    Args:
        lag_s: how old.

    Attributes:
        safe_end: everything before it may be served; -1 until an end was old enough.
    """

    def __init__(self, lag_s: float) -> None:
        self._lag_s = lag_s
        self._leader: tuple[str, int] | None = None
        self._observations: deque[EndObservation] = deque()
        self.safe_end = -1

    def saw(self, leader_id: str, sighting: EndObservation) -> None:
        """Takes note of an end; another leader or term, and an end that went back, make the clock start again."""
        leader = (leader_id, sighting.term)
        if leader != self._leader or (self._observations and sighting.end < self._observations[-1].end):
            self._observations.clear()
            self._leader = leader
        if not self._observations or sighting.end > self._observations[-1].end:
            self._observations.append(sighting)
        self.safe_end = min(self.safe_end, sighting.end)  # nothing is served that is not there

    def due(self, now: float) -> EndObservation | None:
        """Returns the newest sighting that is old enough and goes further than what is safe already."""
        found = None
        for sighting in self._observations:
            if sighting.at + self._lag_s <= now and sighting.end > self.safe_end:
                found = sighting
        return found

    def confirm(self, sighting: EndObservation, term: int | None) -> None:
        """Makes a due sighting's end safe if the entry before it still has its term; else the clock starts again."""
        if sighting.end and term != sighting.term:
            self._observations.clear()
            return
        self.safe_end = max(self.safe_end, sighting.end)
        while self._observations and self._observations[0].end < sighting.end:
            self._observations.popleft()

    def proved(self, end: int) -> None:
        """Takes note that everything before ``end`` is held by a majority."""
        self.safe_end = max(self.safe_end, end)


async def last_end(probe: Probe, guess: int, first: int) -> tuple[int, int]:
    """Finds the index behind the last entry.

    Args:
        probe: asks for an entry.
        guess: where the log ended before; looked at first.
        first: an index that is not behind the end.

    Returns:
        The end and the term of the entry before it, -1 if there is none.
    """
    low, low_term, step = guess, -1, 1
    high: int | None = None
    while high is None:  # outwards in steps that double
        term = await probe(low + step - 1)
        if term is None:
            high = low + step - 1
        else:
            low, low_term, step = low + step, term, step * 2
    low, low_term = await _bisect(probe, low, low_term, high)
    if low > guess or low <= first:
        return low, low_term
    term = await probe(low - 1)
    if term is not None:
        return low, term
    return await _bisect(probe, first, -1, low - 1)  # the log was cut since it was seen last


async def _bisect(probe: Probe, low: int, low_term: int, high: int) -> tuple[int, int]:
    """Finds the end in [low, high], where ``high`` is no entry and the one before ``low`` is of ``low_term``."""
    while low < high:
        middle = (low + high) // 2
        term = await probe(middle)
        if term is None:
            high = middle
        else:
            low, low_term = middle + 1, term
    return low, low_term


async def first_index(is_gone: Callable[[int], Awaitable[bool]], guess: int, end: int) -> int:
    """Finds the first index that retention has not deleted; looks at ``guess`` first, which was one before."""
    if guess >= end or not await is_gone(guess):
        return min(guess, end)
    low, high = guess + 1, end
    while low < high:
        middle = (low + high) // 2
        if await is_gone(middle):
            low = middle + 1
        else:
            high = middle
    return low

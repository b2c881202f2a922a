"""How much one micro-batch of a stream takes: at most so many bytes, at least so many entries; pure arithmetic."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from spark_connector.reading.planning import shares

__all__ = ["MinimumDelay", "ends_within_bytes", "last_within"]


def last_within(start: int, end: int, most: int, position: Callable[[int], int]) -> int:
    """Returns the last index so that [start, it) lies in ``most`` bytes of the log, but at least ``start + 1``.

    Guesses from the mean size of an entry, and halves the range in every other step, so that entries of very
    different sizes do no harm: entries of one size take five looks, any others at most twice the logarithm.

    Args:
        start: first index, below ``end``.
        end: index behind the last one.
        most: bytes of records with their headers.
        position: returns where the record at an index of [start, end] begins; positions only grow.
    """
    base, top = position(start), position(end)
    goal = base + most
    if top <= goal:
        return end
    low, low_at, high, high_at, halve = start, base, end, top, False
    while high - low > 1:
        ahead = (high - low) // 2 if halve else (goal - low_at) * (high - low) // (high_at - low_at)
        middle = min(max(low + ahead, low + 1), high - 1)
        at = position(middle)
        if at <= goal:
            low, low_at = middle, at
        else:
            high, high_at = middle, at
        halve = not halve
    return max(low, start + 1)


def ends_within_bytes(
    starts: Mapping[str, int], ends: Mapping[str, int], most: int, position: Callable[[str, int], int]
) -> dict[str, int]:
    """Returns the end of each group for a batch of at most ``most`` bytes.

    The limit is shared in proportion to the backlog in bytes. Every group with a backlog moves on by at least one
    entry; the batch exceeds the limit only by entries that are larger than their group's share.

    Args:
        starts: per group the next index.
        ends: per group the end of what can be read; none below its start.
        most: bytes of records with their headers.
        position: returns where the record at an index of a group begins, or where the one before it ends.
    """
    behind = [group for group in starts if ends[group] > starts[group]]
    backlog = {group: position(group, ends[group]) - position(group, starts[group]) for group in behind}
    found = dict(ends)
    for group, share in shares(backlog, most).items():

        def position_in(index: int, group: str = group) -> int:
            return position(group, index)

        found[group] = last_within(starts[group], ends[group], share, position_in)
    return found


class MinimumDelay:
    """Holds a micro-batch back until it has ``least`` entries or the last one is ``delay_ms`` ago.

    The first micro-batch of a run is not held back.
    """

    def __init__(self, least: int | None, delay_ms: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._least = least
        self._delay_s = delay_ms / 1000
        self._clock = clock
        self._last: float | None = None

    def holds(self, backlog: int) -> bool:
        """Whether a micro-batch of ``backlog`` entries should wait; if not, counts it as taken now if not empty."""
        now = self._clock()
        early = self._last is not None and now - self._last < self._delay_s
        if self._least is not None and backlog < self._least and early:
            return True
        if backlog:
            self._last = now
        return False

"""Append times, and the clocks of peers that they can be compared with."""

from __future__ import annotations

from collections.abc import Callable


class AppendClock:
    """Append time of new entries: in office the wall clock when it began, plus monotonic time since.

    So a wall clock that jumps while this node leads changes nothing. Times of entries never decrease either way, see
    ``Staging.place``.

    Args:
        wall_ms: the wall clock, ms since the epoch.
        monotonic_ms: a clock that never jumps.
    """

    def __init__(self, wall_ms: Callable[[], int], monotonic_ms: Callable[[], int]) -> None:
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms
        self._ahead_ms: int | None = None

    def now_ms(self) -> int:
        """Return the append time of an entry that is appended now, ms since the epoch."""
        return self._wall_ms() if self._ahead_ms is None else self._ahead_ms + self._monotonic_ms()

    def lead(self) -> None:
        """Start an office."""
        # Once per leadership: a clock that an operator sets while this node leads would otherwise move all append times
        # (test_append_time_follows_no_jump_of_a_leaders_clock).
        if self._ahead_ms is None:
            self._ahead_ms = self._wall_ms() - self._monotonic_ms()

    def follow(self) -> None:
        """End the office."""
        self._ahead_ms = None


class ClockComparison:
    """Compares a peer's wall clock with this node's.

    A frame that arrives late looks like a clock that is behind, so the smallest difference of many frames counts.

    Args:
        limit_ms: differences up to this are normal.
        period_ms: time in which frames are compared before a verdict.
    """

    def __init__(self, limit_ms: int, period_ms: int) -> None:
        self._limit_ms = limit_ms
        self._period_ms = period_ms
        self._since_ms: int | None = None
        self._smallest_ms = 0
        self._differs = False

    def observe(self, peer_ms: int, wall_ms: int, monotonic_ms: int) -> int | None:
        """Compare the clocks; return the ms by which the peer's is ahead, when it begins to differ; otherwise None."""
        difference_ms = peer_ms - wall_ms
        if self._since_ms is None:
            self._since_ms, self._smallest_ms = monotonic_ms, difference_ms
            return None
        # One late frame is no wrong clock (test_clocks_that_differ_for_a_while_are_reported_once).
        self._smallest_ms = min(self._smallest_ms, difference_ms, key=abs)
        if monotonic_ms - self._since_ms < self._period_ms:
            return None
        before, self._differs = self._differs, abs(self._smallest_ms) > self._limit_ms
        self._since_ms = None
        return self._smallest_ms if self._differs and not before else None

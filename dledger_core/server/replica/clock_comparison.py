"""Comparison of this node's wall clock with those of its peers."""

from __future__ import annotations


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

"""Append times of a log's new entries."""

from __future__ import annotations

from collections.abc import Callable


class AppendClock:
    """Append time of new entries: the wall clock at the start of a leadership, plus monotonic time since.

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
        """Reset for a new leadership."""
        # One sample of the wall clock for a whole leadership: a second one would follow a jump
        # (test_append_time_follows_no_jump_of_a_leaders_clock).
        if self._ahead_ms is None:
            self._ahead_ms = self._wall_ms() - self._monotonic_ms()

    def follow(self) -> None:
        """End the leadership."""
        self._ahead_ms = None

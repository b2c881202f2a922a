"""A token bucket: how much of something may happen at once, and at which rate it may go on."""

from __future__ import annotations


class TokenBucket:
    """Tokens that come back at a rate; has no clock of its own.

    Args:
        per_s: tokens that come back per second.
        burst: tokens at most.
        now: seconds of a monotonic clock.
    """

    __slots__ = ("_burst", "_level", "_per_s", "_since")

    def __init__(self, per_s: float, burst: int, now: float) -> None:
        self._per_s = per_s
        self._burst = burst
        self._level = float(burst)
        self._since = now

    def take(self, now: float, tokens: int = 1) -> float:
        """Take tokens and return 0, or take none and return the seconds until there are enough."""
        self._level = min(self._burst, self._level + (now - self._since) * self._per_s)
        self._since = now
        if self._level < tokens:
            return (tokens - self._level) / self._per_s
        self._level -= tokens
        return 0.0

    def is_full(self, now: float) -> bool:
        """Whether nothing was taken lately."""
        return self._level + (now - self._since) * self._per_s >= self._burst

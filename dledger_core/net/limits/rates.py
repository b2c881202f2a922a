"""Limits on how often something happens: token buckets, and lines of logs that a stranger can cause.

Nothing here has a clock of its own except ``BurstFilter``; ``now`` is in seconds of a monotonic clock.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Final

KEYS_MAX: Final = 4096
LINES_MAX: Final = 50
"""Lines of one kind at once, and in one period."""
PERIOD_S: Final = 10.0


class TokenBucket:
    """How much of something may happen at once, and at which rate it may go on.

    Args:
        per_s: tokens that come back per second.
        burst: tokens at most.
        now: the time.
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


class TokenBuckets:
    """A bucket for each key.

    Args:
        per_s: tokens that come back to each per second.
        burst: tokens of each at most.
    """

    def __init__(self, per_s: float, burst: int) -> None:
        self._per_s = per_s
        self._burst = burst
        self._buckets: dict[Hashable, TokenBucket] = {}

    def take(self, key: Hashable, now: float, tokens: int = 1) -> float:
        """Take tokens of a key and return 0, or take none and return the seconds until there are enough."""
        bucket = self._buckets.get(key)
        if bucket is None:
            if len(self._buckets) >= KEYS_MAX:
                self._forget(now)
            bucket = self._buckets[key] = TokenBucket(self._per_s, self._burst, now)
        return bucket.take(now, tokens)

    def _forget(self, now: float) -> None:
        # Keys may be a stranger's: the table has a limit of its own (``test_many_keys_leave_no_unlimited_table``).
        self._buckets = {key: bucket for key, bucket in self._buckets.items() if not bucket.is_full(now)}
        # Half of the table at once, so that ever new keys cost little each.
        for key in list(self._buckets)[: -KEYS_MAX // 2]:
            del self._buckets[key]


class LineLimit:
    """Decides which lines of a log are written, and counts the others, so that none disappears silently.

    Args:
        per_s: tokens that come back to each kind of line per second.
        burst: tokens of each kind at most.
    """

    def __init__(self, per_s: float, burst: int) -> None:
        self._buckets = TokenBuckets(per_s, burst)
        self._left_out: Counter[Hashable] = Counter()

    def admit(self, kind: Hashable, now: float, tokens: int = 1) -> int | None:
        """Return how many lines of this kind were left out before this one, or None to leave it out too."""
        if self._buckets.take(kind, now, tokens):
            self._left_out[kind] += 1
            return None
        return self._left_out.pop(kind, 0)


class BurstFilter(logging.Filter):
    """Limits the lines of each kind, so that a port that anyone can reach does not fill the disk with its log.

    A kind is a message before its arguments are filled in, so what a stranger sends makes no new kinds.

    Args:
        lines_max: lines of a kind at once, and in one period.
        period_s: the period.
        clock: a monotonic clock.
    """

    def __init__(
        self, lines_max: int = LINES_MAX, period_s: float = PERIOD_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        super().__init__()
        self._limit = LineLimit(lines_max / period_s, lines_max)
        self._clock = clock

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the line; the first one after some that were not says how many."""
        kind = str(record.msg)
        left_out = self._limit.admit(kind, self._clock())
        if left_out:
            record.msg = f"{kind} ({left_out} more like this were not logged)"
        return left_out is not None

"""Keeps the reading of one node below a byte rate. Pure: clock and sleep are given."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Final

__all__ = ["RateLimiter"]

BURST_S: Final = 1.0
"""How much unused time may be made up for later."""


class RateLimiter:
    """Makes its caller wait after each read so long that the average stays below the rate. Not thread-safe."""

    def __init__(
        self,
        bytes_per_second: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._paid_until = clock()

    def take(self, nbytes: int) -> None:
        """Takes note of bytes that were just read, and waits until the next ones are due."""
        now = self._clock()
        self._paid_until = max(self._paid_until, now - BURST_S) + nbytes / self._rate
        if self._paid_until > now:
            self._sleep(self._paid_until - now)

"""Simulated time: events in a heap, run in order, nothing else moves the clock."""

from __future__ import annotations

import heapq
from collections.abc import Callable


class VirtualTime:
    """Events by time, and by order of arrival where the time is the same."""

    def __init__(self) -> None:
        self.now = 0
        self.events = 0
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._sequence = 0

    def after(self, delay: int, action: Callable[[], None]) -> None:
        """Runs ``action`` ``delay`` units from now."""
        self._sequence += 1
        heapq.heappush(self._heap, (self.now + delay, self._sequence, action))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Runs events until ``done`` says so; it is asked before each."""
        while not done():
            self.now, _, action = heapq.heappop(self._heap)
            self.events += 1
            action()

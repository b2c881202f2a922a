"""Simulated time: events in a heap, run in order, nothing else moves the clock; and coroutines that wait in it."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Coroutine, Generator
from typing import Any

Resume = Callable[[object, BaseException | None], None]


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
        """Runs events until ``done``, which is called before each, returns True."""
        while not done():
            self.now, _, action = heapq.heappop(self._heap)
            self.events += 1
            action()


class Wait:
    """The only awaitable of a coroutine in ``run_task``: ``begin`` gets the function that resumes it."""

    def __init__(self, begin: Callable[[Resume], None]) -> None:
        self.begin = begin

    def __await__(self) -> Generator[Wait, Any, Any]:
        return (yield self)


def run_task(
    coroutine: Coroutine[Wait, Any, Any],
    alive: Callable[[], bool],
    on_end: Callable[[object, BaseException | None], None],
) -> None:
    """Runs a coroutine up to its first wait, and on from there in later events.

    Args:
        coroutine: awaits nothing but ``Wait``.
        alive: asked before each step; once it returns False, the coroutine is closed and ``on_end`` is not called.
        on_end: gets the result, or the error.
    """

    def step(value: object, error: BaseException | None) -> None:
        if not alive():
            coroutine.close()
            return
        try:
            wait = coroutine.send(value) if error is None else coroutine.throw(error)
        except StopIteration as end:
            on_end(end.value, None)
        except Exception as failure:  # noqa: BLE001 - ``on_end`` knows which errors are expected
            on_end(None, failure)
        else:
            wait.begin(step)

    step(None, None)

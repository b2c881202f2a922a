"""How coroutines wait for a replica, which itself knows callbacks only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from typing import TypeVar

__all__ = ["Progress", "answer_within", "wait_any"]

T = TypeVar("T")


class Progress:
    """Wakes coroutines that wait for any progress."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, timeout_s: float) -> None:
        """Waits until ``wake`` is called or the time is over."""
        await wait_any((self,), timeout_s)

    def add(self, waiter: asyncio.Future[None]) -> None:
        """Ends ``waiter`` with the next ``wake``."""
        self._waiters.add(waiter)

    def discard(self, waiter: asyncio.Future[None]) -> None:
        """Forgets ``waiter``, whether it was added or not."""
        self._waiters.discard(waiter)

    def wake(self) -> None:
        """Wakes all who wait."""
        if self._waiters:
            waiters, self._waiters = self._waiters, set()
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


async def wait_any(progresses: Collection[Progress], timeout_s: float) -> None:
    """Waits until ``wake`` of any of them is called or the time is over."""
    waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    for progress in progresses:
        progress.add(waiter)
    try:
        async with asyncio.timeout(timeout_s):
            await waiter
    except TimeoutError:
        pass
    finally:
        for progress in progresses:
            progress.discard(waiter)


async def answer_within(
    timeout_s: float, ask: Callable[[Callable[[T | None], None]], int], forget: Callable[[int], None]
) -> T | None:
    """Returns what the reply given to ``ask`` gets, or None after ``timeout_s``; ``forget`` ends the question."""
    waiter: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()

    def reply(answer: T | None) -> None:
        if not waiter.done():
            waiter.set_result(answer)

    number = ask(reply)
    try:
        async with asyncio.timeout(timeout_s):
            return await waiter
    except TimeoutError:
        return None
    finally:
        forget(number)

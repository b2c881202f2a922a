"""Coroutines that wait for a change of a replica, which itself calls callbacks only."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol, TypeVar

T = TypeVar("T")


class ChangeSignal:
    """Wakes all waiting coroutines at any change."""

    def __init__(self) -> None:
        self._waiters: set[asyncio.Future[None]] = set()

    def __len__(self) -> int:
        return len(self._waiters)

    async def wait(self, timeout_s: float) -> None:
        """Wait until ``notify`` is called or the timeout expires."""
        await wait_woken(timeout_s, self)

    def add(self, waiter: asyncio.Future[None]) -> None:
        """Complete ``waiter`` with the next ``notify``."""
        self._waiters.add(waiter)

    def discard(self, waiter: asyncio.Future[None]) -> None:
        """Remove ``waiter``, whether it was added or not."""
        self._waiters.discard(waiter)

    def notify(self) -> None:
        """Wake all waiting coroutines."""
        if self._waiters:
            # First exchanged: a waiter that runs may wait again, for the next change.
            waiters, self._waiters = self._waiters, set()
            for waiter in waiters:
                wake(waiter)


class WakesWaiters(Protocol):
    """A source of changes that completes the futures of waiting coroutines."""

    def add(self, waiter: asyncio.Future[None]) -> None:
        """Complete ``waiter`` with the next change."""

    def discard(self, waiter: asyncio.Future[None]) -> None:
        """Remove ``waiter``, whether it was added or not."""


async def wait_woken(timeout_s: float, source: WakesWaiters) -> None:
    """Wait for a change or until the timeout expires. Thousands may wait, so a wait has few objects."""
    loop = asyncio.get_running_loop()
    waiter: asyncio.Future[None] = loop.create_future()
    timer = loop.call_later(timeout_s, wake, waiter)
    source.add(waiter)
    try:
        await waiter
    finally:
        timer.cancel()
        source.discard(waiter)


def wake(waiter: asyncio.Future[None]) -> None:
    """Complete a future unless it is done."""
    if not waiter.done():
        waiter.set_result(None)


async def response_within(
    timeout_s: float, ask: Callable[[Callable[[T | None], None]], int], forget: Callable[[int], None]
) -> T | None:
    """Return the argument of the callback that ``ask`` gets, None after ``timeout_s``; then call ``forget``."""
    waiter: asyncio.Future[T | None] = asyncio.get_running_loop().create_future()

    def reply(response: T | None) -> None:
        if not waiter.done():
            waiter.set_result(response)

    number = ask(reply)
    try:
        async with asyncio.timeout(timeout_s):
            return await waiter
    except TimeoutError:
        return None
    finally:
        forget(number)

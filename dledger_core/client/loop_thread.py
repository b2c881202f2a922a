"""A thread that runs an event loop for callers in other threads."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import uvloop

__all__ = ["LoopThread"]

_T = TypeVar("_T")
_LOG = logging.getLogger(__name__)
END_S: Final = 10.0
"""How long ``close`` waits for the thread: a socket that nobody closed can keep uvloop's loop from ending."""


class LoopThread:
    """Runs coroutines of other threads; thread-safe. Every future it hands out ends, whenever it is closed.

    Args:
        name: of the thread, a daemon.
    """

    def __init__(self, name: str) -> None:
        self._loop = uvloop.new_event_loop()
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T] | None:
        """Starts a coroutine; None, and the coroutine untouched, once the thread is to end."""
        with self._lock:  # else the loop could stop between the look and the start, and the future would never end
            return None if self._closing else asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Runs ``last``, cancels whatever else is under way, and ends the thread, if it ends soon. Repeatable."""
        with self._lock:
            if self._closing or self.is_current:
                return
            self._closing = True
            ended = asyncio.run_coroutine_threadsafe(last(), self._loop)
        try:
            ended.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(END_S)
            if self._thread.is_alive():
                _LOG.warning("the thread %s has nothing left to do and does not end; going on", self._thread.name)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()

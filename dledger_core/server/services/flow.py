"""What one client connection may keep a node busy with, so that a greedy or stuck client hurts nobody else."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any, Final

from dledger_core.errors import BusyError
from dledger_core.net.connection import Connection
from dledger_core.server.services.budget import RETRY_AFTER_MS

__all__ = ["ClientFlow"]

CONNECTION_BYTES_MAX: Final = 64 << 20
"""Bytes of unanswered appends of one connection, above which it is not read from."""
UNSENT_BYTES_MAX: Final = 8 << 20
"""Bytes of answers that the client has not taken, above which it is not read from."""
ANSWERS_AT_ONCE: Final = 4
"""Large answers of one connection that may be in memory at once; each has at most 16 MiB."""
REQUESTS_MAX: Final = 1024
"""Requests of one connection that may be waited for at once; more are answered BUSY."""


class ClientFlow:
    """Bounds of one connection; lives on its event loop."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._held = 0
        self._unsent = False
        self._paused = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._room = asyncio.Semaphore(ANSWERS_AT_ONCE)

    @property
    def tasks(self) -> set[asyncio.Task[None]]:
        """What is being done for the client."""
        return self._tasks

    def hold(self, nbytes: int) -> None:
        """An append came in and waits for its answer."""
        self._held += nbytes
        self._update()

    def release(self, nbytes: int) -> None:
        """An append was answered."""
        self._held -= nbytes
        self._update()

    def check_unsent(self) -> None:
        """Stops reading requests from a client that does not take its answers."""
        if not self._unsent and self._connection.write_buffer_bytes > UNSENT_BYTES_MAX:
            self._unsent = True
            self._update()
            self._track(self._until_sent())

    async def _until_sent(self) -> None:
        await self._connection.drained()
        self._unsent = False
        self._update()

    def _update(self) -> None:
        pause = self._unsent or self._held > CONNECTION_BYTES_MAX
        if pause != self._paused:
            self._paused = pause
            if pause:
                self._connection.pause_reading()
            else:
                self._connection.resume_reading()

    def start(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs ``work``, which answers a request, until the connection closes; raises BusyError above the bound."""
        if len(self._tasks) >= REQUESTS_MAX:
            work.close()
            raise BusyError(
                f"{REQUESTS_MAX} requests of this connection are not answered yet",
                "",
                f"retry after {RETRY_AFTER_MS} ms",
                {"retry_after_ms": RETRY_AFTER_MS},
            )
        self._track(work)

    def _track(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    @contextlib.asynccontextmanager
    async def room(self) -> AsyncIterator[None]:
        """Waits until another large answer may be made; leave it when the answer was handed to the connection."""
        async with self._room:
            yield

    def close(self) -> None:
        """Cancels what is being done for the client."""
        for task in self._tasks:
            task.cancel()

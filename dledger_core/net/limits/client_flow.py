"""Flow control: limits on the memory and the work that one connection of a client may occupy."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import AsyncIterator, Collection, Coroutine, Iterator
from typing import Any, Final

from dledger_core.config import Limits
from dledger_core.errors import BusyError, DLedgerError, invariant
from dledger_core.net.connection import Connection
from dledger_core.net.limits.quotas import Quota, Tenant

Share = tuple[Quota, int]
"""A quota, and how much of it a request takes."""
STARTED_S: Final = 0.0001
"""Time that a request with a task of its own costs the event loop later, roughly."""


class ClientFlow:
    """One client connection's share; lives on its event loop. A greedy or stuck client must not slow down others.

    Args:
        connection: the client's.
        limits: the node's limits.
        tenant: the share of its principal.
        refused: counts the client's requests that are answered with an error, by its name.
    """

    def __init__(
        self,
        connection: Connection,
        limits: Limits,
        tenant: Tenant | None = None,
        refused: Counter[str] | None = None,
    ) -> None:
        self._connection = connection
        self.tenant = tenant
        self.refused = Counter() if refused is None else refused
        self._limits = limits
        self._unanswered = 0
        self._unsent = False
        self._paused = False
        self._tasks: dict[asyncio.Task[None], Share | None] = {}
        self._slots = asyncio.Semaphore(limits.large_responses_max)

    @property
    def tasks(self) -> Collection[asyncio.Task[None]]:
        """The client's requests in progress."""
        return self._tasks.keys()

    def hold(self, nbytes: int) -> None:
        """Count an append that waits for its response; raise QuotaExceededError."""
        # The quota first: what it refuses must leave nothing counted.
        if self.tenant is not None:
            self.tenant[Quota.APPEND_BYTES].take(nbytes)
        self._unanswered += nbytes
        self._update()

    def release(self, nbytes: int) -> None:
        """Count an append's response."""
        if self.tenant is not None:
            self.tenant[Quota.APPEND_BYTES].give(nbytes)
        self._unanswered -= nbytes
        invariant(self._unanswered >= 0, "an append has two responses", bytes=nbytes)
        self._update()

    @contextlib.contextmanager
    def lend_response(self, nbytes: int) -> Iterator[None]:
        """Count a response until the socket took it; raise QuotaExceededError."""
        if self.tenant is None:
            yield
        else:
            with self.tenant[Quota.RESPONSE_BYTES].lend(nbytes):
                yield

    def check_unsent(self) -> None:
        """Stop reading requests from a client that does not receive its responses."""
        # Otherwise its requests, each within the limits, pile up responses without end
        # (``test_client_that_reads_no_responses_occupies_little_memory``).
        if not self._unsent and self._connection.write_buffer_bytes > self._limits.connection_unsent_bytes:
            self._unsent = True
            self._update()
            self._track(self._until_sent())

    async def _until_sent(self) -> None:
        await self._connection.drained()
        self._unsent = False
        self._update()

    def _update(self) -> None:
        pause = self._unsent or self._unanswered > self._limits.connection_append_bytes
        if pause != self._paused:
            self._paused = pause
            if pause:
                self._connection.pause_reading()
            else:
                self._connection.resume_reading()

    def start(self, work: Coroutine[Any, Any, None], share: Share | None = None) -> None:
        """Run ``work``, which sends a response, until the connection closes.

        Args:
            work: a coroutine that has not started.
            share: the principal's share that it takes until it ends.

        Raises:
            BusyError: the connection has too many requests in progress.
            QuotaExceededError: the principal has taken its share.
        """
        try:
            self._check_requests()
            if self.tenant is not None and share is not None:
                quota, amount = share
                self.tenant[quota].take(amount)
        except DLedgerError:
            work.close()
            raise
        self._connection.use_turn(STARTED_S)
        self._track(work, share)

    def _check_requests(self) -> None:
        limits = self._limits
        if len(self._tasks) >= limits.connection_requests:
            raise BusyError(
                f"{limits.connection_requests} requests of this connection wait for their response",
                "",
                f"retry after {limits.retry_after_ms} ms",
                {"retry_after_ms": limits.retry_after_ms},
            )

    def _track(self, work: Coroutine[Any, Any, None], share: Share | None = None) -> None:
        task = asyncio.create_task(work)
        self._tasks[task] = share
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        share = self._tasks.pop(task)
        if self.tenant is not None and share is not None:
            quota, amount = share
            self.tenant[quota].give(amount)

    @contextlib.asynccontextmanager
    async def large_response(self) -> AsyncIterator[None]:
        """Wait for a slot for a large response; leave the context when the connection has the response."""
        async with self._slots:
            yield

    def close(self) -> None:
        """Cancel the client's requests."""
        for task in list(self._tasks):
            task.cancel()

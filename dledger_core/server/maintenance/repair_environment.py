"""What repairs take from the world around them: time, work beside the loop, the disk's order, what other nodes hold.

A node's repairs get ``EventLoopRepairs``. Whoever drives them without threads and without a clock gives an environment
of its own, as for ``Environment``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from concurrent.futures import Executor
from functools import partial
from typing import Protocol, TypeVar

from dledger_core.config import Peer
from dledger_core.errors import CorruptRecordError
from dledger_core.server.maintenance.peer_records import PeerSource, Source
from dledger_core.server.replica.replica import Replica

__all__ = ["EventLoopRepairs", "RepairEnvironment"]

T = TypeVar("T")


class RepairEnvironment(Protocol):
    """The surroundings of repairs."""

    def now(self) -> float:
        """Returns the seconds of a clock that never goes back."""

    async def sleep(self, seconds: float) -> None:
        """Waits."""

    async def beside(self, function: Callable[[], T]) -> T:
        """Returns what a function returns that may take long."""

    async def on_disk(self, replica: Replica, job: Callable[[], T]) -> T:
        """Returns what a job returns that writes to an open log, in its turn among the other writes.

        A write that fails stops the replica, as any other does; then this never returns.

        Raises:
            CorruptRecordError: the job raised it.
        """

    async def progress(self, replica: Replica, timeout_s: float) -> None:
        """Waits until something changed in a replica, or the time is over."""

    def source(self, peer: Peer) -> Source:
        """Returns access to another node, not connected yet."""


class EventLoopRepairs:
    """The running event loop, threads beside it, real connections.

    Args:
        executor: for what may take long; None = the loop's own.
    """

    def __init__(self, executor: Executor | None = None) -> None:
        self._executor = executor

    def now(self) -> float:
        """See ``RepairEnvironment``."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """See ``RepairEnvironment``."""
        await asyncio.sleep(seconds)

    async def beside(self, function: Callable[[], T]) -> T:
        """See ``RepairEnvironment``."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def on_disk(self, replica: Replica, job: Callable[[], T]) -> T:
        """See ``RepairEnvironment``."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def answer(function: Callable[[], None]) -> None:
            if not done.done():
                function()

        def work() -> None:
            outcome: Callable[[], None]
            try:
                outcome = partial(done.set_result, job())
            except CorruptRecordError as error:
                outcome = partial(done.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(answer, outcome)

        replica.run_on_disk(work)
        return await done

    async def progress(self, replica: Replica, timeout_s: float) -> None:
        """See ``RepairEnvironment``."""
        await replica.wait_progress(timeout_s)

    def source(self, peer: Peer) -> Source:
        """See ``RepairEnvironment``."""
        return PeerSource(peer)

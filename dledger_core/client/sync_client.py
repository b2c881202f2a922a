"""SyncLogClient: a log client for programs without asyncio, on an event loop and a thread of its own."""

from __future__ import annotations

import asyncio
import logging
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import wraps
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

import uvloop

from dledger_core.client.async_client import AsyncLogClient
from dledger_core.client.forks import FORKS
from dledger_core.config import Peer
from dledger_core.errors import ConfigError

_P = ParamSpec("_P")
_T = TypeVar("_T")
_C = TypeVar("_C", bound="SyncLogClient")
_LOG = logging.getLogger(__name__)

SIGNAL_S: Final = 1.0
"""Longest time that a call does not notice Ctrl-C."""
END_S: Final = 10.0
"""Longest time that closing waits for the thread: an open socket can keep uvloop's loop from ending."""


class LoopThread:
    """Runs coroutines of other threads; thread-safe. Each future that it returns completes, also when it is closed.

    Args:
        name: of the thread, a daemon.
        end_s: longest time that ``close`` waits for the thread.
    """

    def __init__(self, name: str, *, end_s: float = END_S) -> None:
        self._loop = uvloop.new_event_loop()
        self._end_s = end_s
        self._lock = threading.Lock()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_current(self) -> bool:
        """Whether the caller is this thread."""
        return threading.current_thread() is self._thread

    def submit(self, work: Coroutine[Any, Any, _T]) -> Future[_T] | None:
        """Start a coroutine; return None and leave the coroutine alone once the thread is closing."""
        # Under the lock, otherwise the loop could stop between check and submit, and the future would never complete.
        with self._lock:
            return None if self._closing else asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self, last: Callable[[], Coroutine[Any, Any, None]]) -> None:
        """Run ``last``, cancel all other tasks and stop the thread; stop waiting after ``end_s``. Idempotent."""
        with self._lock:
            if self._closing or self.is_current:
                return
            self._closing = True
            ended = asyncio.run_coroutine_threadsafe(last(), self._loop)
        try:
            ended.result()
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(self._end_s)
            if self._thread.is_alive():
                _LOG.warning("thread did not stop in time, abandoning it: thread=%s", self._thread.name)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
        self._loop.close()


def _blocking(
    method: Callable[Concatenate[AsyncLogClient, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[SyncLogClient, _P], _T]:
    """Return a method with this signature that waits for the result of the coroutine method."""

    @wraps(method)
    def call(self: SyncLogClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        return self.call(method(self.in_loop, *args, **kwargs))

    return call


def _iterating(
    method: Callable[Concatenate[AsyncLogClient, _P], AsyncGenerator[_T, None]],
) -> Callable[Concatenate[SyncLogClient, _P], Iterator[_T]]:
    """Return a method with this signature that iterates over what the asynchronous generator yields."""

    @wraps(method)
    def iterate(self: SyncLogClient, /, *args: _P.args, **kwargs: _P.kwargs) -> Iterator[_T]:
        return self._iterate(method(self.in_loop, *args, **kwargs))

    return iterate


def _result(future: Future[_T]) -> _T:
    """Wait in intervals: a signal just before a wait does not interrupt it and is only handled after it."""
    while True:
        try:
            return future.result(SIGNAL_S)
        except TimeoutError:
            if future.done():
                return future.result()


def _shut_down(thread: LoopThread, client: AsyncLogClient, forks: int) -> None:
    """Close the client's connections and stop its thread; a forked child has no such thread."""
    if FORKS.count == forks:
        thread.close(client.close)


class SyncLogClient:
    """A client of one group for programs without asyncio; thread-safe.

    It owns a daemon thread: use it as a context manager, or call ``close``. After a fork the child needs its own.

    Args:
        client: its asynchronous client, which no other loop uses.

    Attributes:
        in_loop: the asynchronous client, for coroutines that run with ``call``.
    """

    def __init__(self, client: AsyncLogClient) -> None:
        self.in_loop = client
        self._forks = FORKS.count
        self._thread = LoopThread(f"dledger-client-{client.group}")
        self._finalizer = weakref.finalize(self, _shut_down, self._thread, client, self._forks)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The group's nodes."""
        return self.in_loop.peers

    @property
    def log_uuid(self) -> str | None:
        """See ``AsyncLogClient.log_uuid``."""
        return self.in_loop.log_uuid

    @property
    def group(self) -> str:
        """The group's name."""
        return self.in_loop.group

    def __enter__(self: _C) -> _C:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a client cannot be pickled", "", "send the peers string and make a client there")

    def close(self) -> None:
        """Close all connections and stop the thread; calls of other threads are cancelled. Idempotent."""
        self._finalizer()

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Run a coroutine of ``in_loop`` on the client's loop and return its result.

        Raises:
            ConfigError: the client is closed, was made before a fork, or this is its own thread.
        """
        reason, remedy, future = "", "", None
        if FORKS.count != self._forks:
            reason, remedy = "a client cannot be used after fork", "make a new one in the child process"
        elif self._thread.is_current:
            reason, remedy = "a client's own thread cannot wait for it", "use AsyncClient there"
        elif (future := self._thread.submit(work)) is None:
            reason, remedy = "the client is closed", "make a new one"
        if future is None:
            work.close()
            raise ConfigError(reason, "", remedy)
        try:
            return _result(future)
        except BaseException:
            future.cancel()  # Ctrl-C must stop the request too
            raise

    append = _blocking(AsyncLogClient.append)
    append_attempt = _blocking(AsyncLogClient.append_attempt)
    fetch = _blocking(AsyncLogClient.fetch)
    read = _blocking(AsyncLogClient.read)
    records = _blocking(AsyncLogClient.records)
    get = _blocking(AsyncLogClient.get)
    fetch_at = _blocking(AsyncLogClient.fetch_at)
    read_at = _blocking(AsyncLogClient.read_at)
    offset_for_time = _blocking(AsyncLogClient.offset_for_time)
    split_points = _blocking(AsyncLogClient.split_points)
    pin = _blocking(AsyncLogClient.pin)
    digest = _blocking(AsyncLogClient.digest)
    producer = _blocking(AsyncLogClient.producer)
    expire_producer = _blocking(AsyncLogClient.expire_producer)
    transaction = _blocking(AsyncLogClient.transaction)
    commit_transaction = _blocking(AsyncLogClient.commit_transaction)
    abort_transaction = _blocking(AsyncLogClient.abort_transaction)
    bounds = _blocking(AsyncLogClient.bounds)
    metadata = _blocking(AsyncLogClient.metadata)
    groups = _blocking(AsyncLogClient.groups)
    wait_for_entries = _blocking(AsyncLogClient.wait_for_entries)
    describe = _blocking(AsyncLogClient.describe)
    transfer_leadership = _blocking(AsyncLogClient.transfer_leadership)
    archivable_ranges = _blocking(AsyncLogClient.archivable_ranges)
    prove_archived = _blocking(AsyncLogClient.prove_archived)
    archived_ranges = _blocking(AsyncLogClient.archived_ranges)
    end_archive = _blocking(AsyncLogClient.end_archive)
    members = _blocking(AsyncLogClient.members)
    add_member = _blocking(AsyncLogClient.add_member)
    remove_member = _blocking(AsyncLogClient.remove_member)
    promote_member = _blocking(AsyncLogClient.promote_member)
    replace_member = _blocking(AsyncLogClient.replace_member)

    role_changes = _iterating(AsyncLogClient.role_changes)
    tail = _iterating(AsyncLogClient.tail)

    def _iterate(self, found: AsyncGenerator[_T, None]) -> Iterator[_T]:
        waits = set[asyncio.Task[Any] | None]()

        async def following() -> _T | None:
            waits.add(wait := asyncio.current_task())
            try:
                return await anext(found, None)
            finally:
                waits.discard(wait)

        async def close() -> None:
            # An interrupt may have come after the wait was submitted and before its future could be cancelled.
            for wait in filter(None, list(waits)):
                wait.cancel()
                await asyncio.wait((wait,))
            await found.aclose()

        try:
            while (value := self.call(following())) is not None:
                yield value
        finally:
            # Garbage collection may close it in the client's own thread, which cannot wait for itself.
            if self._finalizer.alive and not self._thread.is_current:
                self.call(close())

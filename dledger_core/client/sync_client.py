"""Client: the same as AsyncClient for programs without asyncio, on a loop and a thread of its own."""

from __future__ import annotations

import asyncio
import os
import weakref
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from datetime import datetime
from typing import Any, Final, NoReturn, TypeVar

import pyarrow as pa

from dledger_core.client.appending import Bodies
from dledger_core.client.async_client import TAIL_WAIT_MS, AsyncClient
from dledger_core.client.loop_thread import LoopThread
from dledger_core.client.reading import END_OF_LOG, READ_BYTES, Consistency
from dledger_core.client.results import (
    AppendResult,
    AttemptResult,
    DigestReport,
    Entry,
    LogBounds,
    Metadata,
    PositionFetch,
    ProducerState,
    RoleChange,
    TransactionState,
)
from dledger_core.client.routing.cluster_view import ReadFrom
from dledger_core.config import Peer
from dledger_core.control import Part, TransactionId
from dledger_core.errors import ConfigError
from dledger_core.record import Fetch, Isolation
from dledger_core.rocketmq.client.options import JavaOptions

__all__ = ["Client"]

_T = TypeVar("_T")

SIGNAL_S: Final = 1.0
"""How long Ctrl-C may go unnoticed in a call."""


def _result(future: Future[_T]) -> _T:
    """Waits in turns: a signal that comes just before a wait does not end it, and is seen only after it."""
    while True:
        try:
            return future.result(SIGNAL_S)
        except TimeoutError:
            if future.done():
                return future.result()


def _shut_down(thread: LoopThread, client: AsyncClient, pid: int) -> None:
    """Closes the client's connections and ends its thread; in a forked child there is nothing to end."""
    if os.getpid() == pid:
        thread.close(client.close)


class Client:
    """A client of one group for programs without asyncio; thread-safe.

    Arguments, results and errors are AsyncClient's. It owns a daemon thread: use it as a context manager or call
    ``close``. After a fork the child has to make its own.
    """

    def __init__(
        self,
        peers: str | Sequence[Peer],
        group: str = "default",
        *,
        timeout_ms: int = 10_000,
        retry_timeout_ms: int | None = None,
        connect_timeout_ms: int | None = None,
        protocol: str = "dledger",
        java: JavaOptions | None = None,
    ) -> None:
        self.in_loop = AsyncClient(
            peers,
            group,
            timeout_ms=timeout_ms,
            retry_timeout_ms=retry_timeout_ms,
            connect_timeout_ms=connect_timeout_ms,
            protocol=protocol,
            java=java,
        )
        self._pid = os.getpid()
        self._thread = LoopThread(f"dledger-client-{group}")
        self._finalizer = weakref.finalize(self, _shut_down, self._thread, self.in_loop, self._pid)

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The nodes."""
        return self.in_loop.peers

    @property
    def group(self) -> str:
        """The group's name."""
        return self.in_loop.group

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a client cannot be pickled", "", "send the peers string and make a client there")

    def close(self) -> None:
        """Closes all connections and ends the thread; calls of other threads are cancelled. Repeatable."""
        self._finalizer()

    def call(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Runs a coroutine of ``in_loop`` on the client's loop and returns its result.

        Raises:
            ConfigError: the client is closed, was made before a fork, or this is its own thread.
        """
        reason, remedy, future = "", "", None
        if os.getpid() != self._pid:
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
            future.cancel()  # Ctrl-C: nothing shall go on behind the caller's back
            raise

    # --- as AsyncClient -------------------------------------------------------------------------------------------

    def append(
        self, bodies: Bodies, *, producer_id: str | None = None, epoch: int = 0, sequence: int | None = None
    ) -> AppendResult:
        """See ``AsyncClient.append``."""
        return self.call(self.in_loop.append(bodies, producer_id=producer_id, epoch=epoch, sequence=sequence))

    def append_attempt(self, bodies: Bodies, *, transaction: TransactionId, attempt: str) -> AttemptResult:
        """See ``AsyncClient.append_attempt``."""
        return self.call(self.in_loop.append_attempt(bodies, transaction=transaction, attempt=attempt))

    def fetch(
        self,
        start: int,
        end: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        consistency: Consistency = "committed",
        isolation: Isolation = "read_committed",
        wait_ms: int = 0,
        min_commit: int = -1,
        min_end: int = -1,
        read_from: ReadFrom = "any",
        spread: int | None = None,
    ) -> Fetch:
        """See ``AsyncClient.fetch``."""
        return self.call(
            self.in_loop.fetch(
                start,
                end,
                max_bytes=max_bytes,
                node=node,
                consistency=consistency,
                isolation=isolation,
                wait_ms=wait_ms,
                min_commit=min_commit,
                min_end=min_end,
                read_from=read_from,
                spread=spread,
            )
        )

    def read(
        self,
        start: int,
        end: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        consistency: Consistency = "committed",
        isolation: Isolation = "read_committed",
    ) -> pa.RecordBatch:
        """See ``AsyncClient.read``."""
        return self.fetch(
            start, end, max_bytes=max_bytes, node=node, consistency=consistency, isolation=isolation
        ).batch

    def records(
        self,
        start: int,
        end: int,
        *,
        node: str | None = None,
        max_bytes: int = READ_BYTES,
        min_commit: int = -1,
        min_end: int = -1,
    ) -> Fetch:
        """See ``AsyncClient.records``."""
        return self.call(
            self.in_loop.records(start, end, node=node, max_bytes=max_bytes, min_commit=min_commit, min_end=min_end)
        )

    def get(self, index: int) -> Entry:
        """See ``AsyncClient.get``."""
        return self.call(self.in_loop.get(index))

    def fetch_at(
        self,
        position: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        isolation: Isolation = "read_committed",
    ) -> PositionFetch:
        """See ``AsyncClient.fetch_at``."""
        return self.call(self.in_loop.fetch_at(position, max_bytes=max_bytes, node=node, isolation=isolation))

    def read_at(
        self,
        position: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        isolation: Isolation = "read_committed",
    ) -> pa.RecordBatch:
        """See ``AsyncClient.read_at``."""
        return self.fetch_at(position, max_bytes=max_bytes, node=node, isolation=isolation).batch

    def tail(
        self, start: int, *, max_bytes: int = READ_BYTES, isolation: Isolation = "read_committed"
    ) -> Iterator[pa.RecordBatch]:
        """See ``AsyncClient.tail``."""
        while True:
            found = self.fetch(start, END_OF_LOG, max_bytes=max_bytes, isolation=isolation, wait_ms=TAIL_WAIT_MS)
            start = max(start, found.next_index)
            if found.batch.num_rows:
                yield found.batch

    def offset_for_time(self, timestamp: datetime | int, *, min_commit: int = -1) -> int:
        """See ``AsyncClient.offset_for_time``."""
        return self.call(self.in_loop.offset_for_time(timestamp, min_commit=min_commit))

    def pin(self, name: str, start: int, seconds: float) -> tuple[str, ...]:
        """See ``AsyncClient.pin``."""
        return self.call(self.in_loop.pin(name, start, seconds))

    def digest(self, start: int, end: int, *, span: int, node: str | None = None, min_end: int = -1) -> DigestReport:
        """See ``AsyncClient.digest``."""
        return self.call(self.in_loop.digest(start, end, span=span, node=node, min_end=min_end))

    def producer(self, producer_id: str) -> ProducerState:
        """See ``AsyncClient.producer``."""
        return self.call(self.in_loop.producer(producer_id))

    def transaction(self, transaction: TransactionId) -> TransactionState:
        """See ``AsyncClient.transaction``."""
        return self.call(self.in_loop.transaction(transaction))

    def commit_transaction(
        self, transaction: TransactionId, parts: Sequence[Part], input_id: str = ""
    ) -> TransactionState:
        """See ``AsyncClient.commit_transaction``."""
        return self.call(self.in_loop.commit_transaction(transaction, parts, input_id))

    def abort_transaction(self, transaction: TransactionId) -> TransactionState:
        """See ``AsyncClient.abort_transaction``."""
        return self.call(self.in_loop.abort_transaction(transaction))

    def metadata(self, *, space: bool = False) -> Metadata:
        """See ``AsyncClient.metadata``."""
        return self.call(self.in_loop.metadata(space=space))

    def bounds(self, *, isolation: Isolation = "read_committed", min_end: int = -1, wait_ms: int = 0) -> LogBounds:
        """See ``AsyncClient.bounds``."""
        return self.call(self.in_loop.bounds(isolation=isolation, min_end=min_end, wait_ms=wait_ms))

    def groups(self) -> dict[str, str | None]:
        """See ``AsyncClient.groups``."""
        return self.call(self.in_loop.groups())

    def wait_for_entries(
        self, seen: Mapping[str, int], *, wait_ms: int, isolation: Isolation = "read_committed"
    ) -> frozenset[str]:
        """See ``AsyncClient.wait_for_entries``."""
        return self.call(self.in_loop.wait_for_entries(seen, wait_ms=wait_ms, isolation=isolation))

    def describe(self, table: str, node: str | None = None) -> pa.RecordBatch:
        """See ``AsyncClient.describe``."""
        return self.call(self.in_loop.describe(table, node))

    def role_changes(self) -> Iterator[RoleChange]:
        """See ``AsyncClient.role_changes``."""
        changes, waits = self.in_loop.role_changes(), set[asyncio.Task[Any] | None]()

        async def following() -> RoleChange:
            waits.add(wait := asyncio.current_task())
            try:
                return await anext(changes)
            finally:
                waits.discard(wait)

        async def close() -> None:
            # An interrupt may have come when the wait was handed over and its future was not here yet to cancel it.
            for wait in filter(None, list(waits)):
                wait.cancel()
                await asyncio.wait((wait,))
            await changes.aclose()

        try:
            while True:
                yield self.call(following())
        finally:
            if self._finalizer.alive:
                self.call(close())

    def transfer_leadership(self, node_id: str) -> None:
        """See ``AsyncClient.transfer_leadership``."""
        self.call(self.in_loop.transfer_leadership(node_id))

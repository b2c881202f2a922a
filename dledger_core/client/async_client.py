"""AsyncLogClient: a log client that checks its use, for asyncio programs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from functools import wraps
from typing import Any, Concatenate, Final, NoReturn, ParamSpec, TypeVar

import pyarrow as pa

from dledger_core.client.forks import FORKS
from dledger_core.client.protocol import END_OF_LOG, READ_BYTES, Consistency, LogClient, OptionalOperations, RoleChange
from dledger_core.client.routing.channel import ClosedError
from dledger_core.config import Peer
from dledger_core.errors import ConfigError, UnsupportedError
from dledger_core.record import Isolation

_P = ParamSpec("_P")
_T = TypeVar("_T")
_C = TypeVar("_C", bound="AsyncLogClient")

TAIL_WAIT_MS: Final = 5_000


def _forwarded(
    method: Callable[Concatenate[Any, _P], Coroutine[Any, Any, _T]],
) -> Callable[Concatenate[AsyncLogClient, _P], Coroutine[Any, Any, _T]]:
    """Return a method with this signature that checks the client and calls the log's method of the same name."""
    name = method.__name__

    @wraps(method)
    async def call(self: AsyncLogClient, /, *args: _P.args, **kwargs: _P.kwargs) -> _T:
        self._check_usable()
        result: _T = await self._operation(name)(*args, **kwargs)
        return result

    return call


class AsyncLogClient:
    """A client of one group; it finds and follows the leader and retries requests that are safe to repeat.

    It belongs to one event loop and one process. Reads are monotonic: a read never shows less of the log than an
    earlier response proved committed, unless ``node`` names one replica.

    Args:
        log: the implementation for the group's protocol.
    """

    def __init__(self, log: LogClient) -> None:
        self._log = log
        self._forks = FORKS.count
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The group's nodes."""
        return self._log.peers

    @property
    def group(self) -> str:
        """The group's name."""
        return self._log.group

    @property
    def log_uuid(self) -> str | None:
        """Identity of the log that requests are for, None while it is not known and for a Java group."""
        found: str | None = getattr(self._log, "log_uuid", None)
        return found

    @property
    def protocol(self) -> str:
        """Name of the wire protocol."""
        return self._log.protocol

    async def __aenter__(self: _C) -> _C:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a client cannot be pickled", "", "send the peers string and make a client there")

    async def close(self) -> None:
        """Close all connections and cancel calls in progress. Idempotent."""
        if not self._closed:
            self._closed = True
            await self._log.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError
        if FORKS.count != self._forks:
            raise ConfigError("a client cannot be used after fork", "", "make a new one in the child process")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ConfigError("the client belongs to another event loop", "", "make one per event loop, or use Client")

    def _operation(self, name: str) -> Callable[..., Any]:
        operation: Callable[..., Any] | None = getattr(self._log, name, None)
        if operation is None:
            raise UnsupportedError.of(name, self._log.protocol, self._log.group)
        return operation

    append = _forwarded(LogClient.append)
    append_columns = _forwarded(OptionalOperations.append_columns)
    append_attempt = _forwarded(OptionalOperations.append_attempt)
    fetch = _forwarded(LogClient.fetch)
    records = _forwarded(LogClient.records)
    get = _forwarded(LogClient.get)
    fetch_at = _forwarded(OptionalOperations.fetch_at)
    offset_for_time = _forwarded(OptionalOperations.offset_for_time)
    split_points = _forwarded(OptionalOperations.split_points)
    pin = _forwarded(OptionalOperations.pin)
    digest = _forwarded(OptionalOperations.digest)
    producer = _forwarded(OptionalOperations.producer)
    expire_producer = _forwarded(OptionalOperations.expire_producer)
    transaction = _forwarded(OptionalOperations.transaction)
    commit_transaction = _forwarded(OptionalOperations.commit_transaction)
    abort_transaction = _forwarded(OptionalOperations.abort_transaction)
    bounds = _forwarded(LogClient.bounds)
    metadata = _forwarded(LogClient.metadata)
    groups = _forwarded(LogClient.groups)
    wait_for_entries = _forwarded(OptionalOperations.wait_for_entries)
    describe = _forwarded(OptionalOperations.describe)
    transfer_leadership = _forwarded(LogClient.transfer_leadership)
    archivable_ranges = _forwarded(OptionalOperations.archivable_ranges)
    prove_archived = _forwarded(OptionalOperations.prove_archived)
    archived_ranges = _forwarded(OptionalOperations.archived_ranges)
    end_archive = _forwarded(OptionalOperations.end_archive)
    members = _forwarded(OptionalOperations.members)
    add_member = _forwarded(OptionalOperations.add_member)
    remove_member = _forwarded(OptionalOperations.remove_member)
    promote_member = _forwarded(OptionalOperations.promote_member)
    replace_member = _forwarded(OptionalOperations.replace_member)

    async def role_changes(self) -> AsyncGenerator[RoleChange, None]:
        """Yield the role of each node, then every change of it, without end; unreachable is a role too."""
        self._check_usable()
        changes = self._operation("role_changes")()
        try:
            async for change in changes:
                yield change
        finally:
            await changes.aclose()

    async def read(
        self,
        start: int,
        end: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        consistency: Consistency = "committed",
        isolation: Isolation = "read_committed",
        columns: Sequence[str] | None = None,
    ) -> pa.RecordBatch:
        """Return ``fetch(...).batch``; it may end before ``end`` when ``max_bytes`` is reached."""
        found = await self.fetch(
            start,
            end,
            max_bytes=max_bytes,
            node=node,
            consistency=consistency,
            isolation=isolation,
            columns=columns,
        )
        return found.batch

    async def read_at(
        self,
        position: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        isolation: Isolation = "read_committed",
    ) -> pa.RecordBatch:
        """Return ``fetch_at(...).batch``; messages of the commitlog prefix have no index, term or timestamp."""
        return (await self.fetch_at(position, max_bytes=max_bytes, node=node, isolation=isolation)).batch

    async def tail(
        self,
        start: int,
        end: int | None = None,
        *,
        max_bytes: int = READ_BYTES,
        isolation: Isolation = "read_committed",
        columns: Sequence[str] | None = None,
    ) -> AsyncGenerator[pa.RecordBatch, None]:
        """Yield committed entries from ``start`` on as they arrive, up to ``end`` (exclusive); no batch is empty.

        Without ``end`` it never stops. The end of ``bounds`` is there already: then a replica that lags is waited for.
        """
        stop, known = (END_OF_LOG, -1) if end is None else (end, end - 1)
        while start < stop:
            found = await self.fetch(
                start,
                stop,
                max_bytes=max_bytes,
                isolation=isolation,
                wait_ms=TAIL_WAIT_MS,
                min_commit=known,
                columns=columns,
            )
            start = max(start, found.next_index)
            if found.batch.num_rows:
                yield found.batch

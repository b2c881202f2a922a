"""Appends of a client: checked against the limits; small ones of one loop iteration are joined into one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final, TypeAlias

import numpy as np

from dledger_core.client.protocol import AppendResult, Bodies
from dledger_core.config import BATCH_BYTES_MAX, RECORD_BYTES_MAX
from dledger_core.control import fingerprint
from dledger_core.errors import BadRequestError, DLedgerError
from dledger_core.record import HEADER_BYTES, Columns

COALESCED_BYTES_MAX: Final = 1 << 20

Send: TypeAlias = Callable[[Columns], Awaitable[AppendResult]]


def columns_of(bodies: Bodies) -> Columns:
    """Return the bodies as columns that one append can carry.

    Raises:
        BadRequestError: the bodies are empty, one is null or not bytes, or they exceed a limit.
    """
    if isinstance(bodies, (bytes, bytearray, memoryview, str)):
        raise BadRequestError("one body instead of a sequence of bodies", "bodies", "pass a list: append([body])")
    return check_columns(Columns.from_bodies(bodies))


def check_columns(columns: Columns) -> Columns:
    """Return ``columns`` if one append can carry them, otherwise raise BadRequestError."""
    if not columns.count:
        raise BadRequestError("nothing to append", "bodies", "pass at least one body")
    largest = int(columns.lengths.max()) + HEADER_BYTES
    if largest > RECORD_BYTES_MAX:
        row = int(columns.lengths.argmax())
        raise BadRequestError(
            "a body is too large",
            f"row {row}",
            f"a record has at most {RECORD_BYTES_MAX} bytes, {HEADER_BYTES} of them its header",
            {"record_bytes": largest, "limit": RECORD_BYTES_MAX},
        )
    if columns.record_bytes > BATCH_BYTES_MAX:
        ends = np.cumsum(columns.lengths, dtype=np.int64) + HEADER_BYTES * np.arange(1, columns.count + 1)
        row = int(np.searchsorted(ends, BATCH_BYTES_MAX, side="right"))
        raise BadRequestError(
            "an append is too large",
            f"row {row}",
            f"append the rows before it first: a batch has at most {BATCH_BYTES_MAX} bytes of records",
            {"batch_bytes": columns.record_bytes, "limit": BATCH_BYTES_MAX},
        )
    return columns


def fingerprint_of(bodies: Bodies) -> int:
    """Return a number that identifies bodies by their content, in any order; sums of it identify their union."""
    columns = Columns.from_bodies(bodies)
    return fingerprint(columns.lengths, columns.crcs)


class AppendBatcher:
    """Joins the plain appends of one loop iteration into as few requests of at most 1 MiB as possible.

    A request is cancelled once all its callers have been cancelled.

    Invariant: an append is in one request at a time, and is sent again only after a BadRequestError, which a leader
    raises before it appends anything (``test_bad_or_cancelled_append_does_not_fail_shared_others``).

    Args:
        send: appends columns as one request.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._pending: list[tuple[Columns, asyncio.Future[AppendResult]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def requests(self) -> int:
        """Requests in flight."""
        return len(self._tasks)

    async def append(self, columns: Columns) -> AppendResult:
        """Append ``columns``, perhaps together with others; cancelling one caller does not affect the others."""
        if columns.record_bytes >= COALESCED_BYTES_MAX:
            return await self._send(columns)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[AppendResult] = loop.create_future()
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append((columns, future))
        return await future

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        start, nbytes = 0, 0
        for row, (columns, _) in enumerate(pending):
            if nbytes and nbytes + columns.record_bytes > COALESCED_BYTES_MAX:
                self._spawn(pending[start:row])
                start, nbytes = row, 0
            nbytes += columns.record_bytes
        self._spawn(pending[start:])

    def _spawn(self, group: list[tuple[Columns, asyncio.Future[AppendResult]]]) -> None:
        live = [(columns, future) for columns, future in group if not future.done()]
        if live:
            task = asyncio.create_task(self._append_group(live))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            left = len(live)

            def caller_done(future: asyncio.Future[AppendResult]) -> None:
                nonlocal left
                left -= future.cancelled()
                if left == 0:
                    task.cancel()

            for _, future in live:
                future.add_done_callback(caller_done)

    async def _append_group(self, group: list[tuple[Columns, asyncio.Future[AppendResult]]]) -> None:
        try:
            result = await self._send(Columns.join([columns for columns, _ in group]))
        except DLedgerError as error:
            if isinstance(error, BadRequestError) and len(group) > 1:
                for pair in group:  # only one append is wrong, so each is sent alone
                    self._spawn([pair])
                return
            for _, future in group:
                if not future.done():
                    future.set_exception(type(error)(*error.args))
            return
        except asyncio.CancelledError:
            for _, future in group:
                future.cancel()
            raise
        first = result.first_index
        for columns, future in group:
            if not future.done():
                future.set_result(AppendResult(first, first + columns.count - 1, result.term))
            first += columns.count

    async def close(self) -> None:
        """Cancel all appends in progress."""
        for _, future in self._pending:
            future.cancel()
        self._pending = []
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

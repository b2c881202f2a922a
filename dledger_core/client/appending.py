"""Appends on their way out: checked against the bounds, and small ones of one moment joined into one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import numpy as np
import pyarrow as pa

from dledger_core.checksum import Buffer
from dledger_core.client.results import AppendResult
from dledger_core.config import BATCH_BYTES_MAX, RECORD_BYTES_MAX
from dledger_core.errors import BadRequestError, DLedgerError
from dledger_core.record import HEADER_BYTES, Columns

__all__ = ["AppendBatcher", "Bodies", "check_columns", "columns_of"]

COALESCED_BYTES_MAX: Final = 1 << 20

Bodies: TypeAlias = Sequence[Buffer] | pa.Array | pa.ChunkedArray
Send: TypeAlias = Callable[[Columns], Awaitable[AppendResult]]


def columns_of(bodies: Bodies) -> Columns:
    """Returns the bodies as columns, checked against the bounds.

    Raises:
        BadRequestError: empty, a body is null or no bytes, or above a bound.
    """
    if isinstance(bodies, (bytes, bytearray, memoryview, str)):
        raise BadRequestError("one body instead of a sequence of bodies", "bodies", "pass a list: append([body])")
    return check_columns(Columns.from_bodies(bodies))


def check_columns(columns: Columns) -> Columns:
    """Returns ``columns`` if one append can carry them, else raises BadRequestError."""
    if not columns.count:
        raise BadRequestError("nothing to append", "bodies", "pass at least one body")
    largest = int(columns.lengths.max()) + HEADER_BYTES
    if largest > RECORD_BYTES_MAX:
        row = int(columns.lengths.argmax())
        raise BadRequestError(
            "a body is too large",
            f"row {row}",
            f"a record has at most {RECORD_BYTES_MAX} bytes, {HEADER_BYTES} of them its header",
            {"record_bytes": largest, "bound": RECORD_BYTES_MAX},
        )
    if columns.record_bytes > BATCH_BYTES_MAX:
        ends = np.cumsum(columns.lengths, dtype=np.int64) + HEADER_BYTES * np.arange(1, columns.count + 1)
        row = int(np.searchsorted(ends, BATCH_BYTES_MAX, side="right"))
        raise BadRequestError(
            "an append is too large",
            f"row {row}",
            f"append the rows before it first: a batch has at most {BATCH_BYTES_MAX} bytes of records",
            {"batch_bytes": columns.record_bytes, "bound": BATCH_BYTES_MAX},
        )
    return columns


class AppendBatcher:
    """Joins the plain appends of one turn of the loop into as few requests as their bound (1 MiB) allows.

    A request that everybody who shares it has given up is given up too.

    Args:
        send: appends columns as one request.
    """

    def __init__(self, send: Send) -> None:
        self._send = send
        self._gathered: list[tuple[Columns, asyncio.Future[AppendResult]]] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def append(self, columns: Columns) -> AppendResult:
        """Appends ``columns``, perhaps together with others; a cancelled caller leaves the others alone."""
        if columns.record_bytes >= COALESCED_BYTES_MAX:
            return await self._send(columns)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[AppendResult] = loop.create_future()
        if not self._gathered:
            loop.call_soon(self._flush)
        self._gathered.append((columns, future))
        return await future

    def _flush(self) -> None:
        gathered, self._gathered = self._gathered, []
        start, nbytes = 0, 0
        for place, (columns, _) in enumerate(gathered):
            if nbytes and nbytes + columns.record_bytes > COALESCED_BYTES_MAX:
                self._spawn(gathered[start:place])
                start, nbytes = place, 0
            nbytes += columns.record_bytes
        self._spawn(gathered[start:])

    def _spawn(self, group: list[tuple[Columns, asyncio.Future[AppendResult]]]) -> None:
        live = [(columns, future) for columns, future in group if not future.done()]
        if live:
            task = asyncio.create_task(self._append_group(live))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            left = len(live)

            def gave_up(future: asyncio.Future[AppendResult]) -> None:
                nonlocal left
                left -= future.cancelled()
                if left == 0:
                    task.cancel()

            for _, future in live:
                future.add_done_callback(gave_up)

    async def _append_group(self, group: list[tuple[Columns, asyncio.Future[AppendResult]]]) -> None:
        try:
            result = await self._send(Columns.join([columns for columns, _ in group]))
        except DLedgerError as error:
            if isinstance(error, BadRequestError) and len(group) > 1:
                for pair in group:  # one of them is at fault; the others shall not suffer
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
        """Cancels what is under way."""
        for _, future in self._gathered:
            future.cancel()
        self._gathered = []
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

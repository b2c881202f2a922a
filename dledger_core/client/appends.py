"""Appends of a client: checked against the limits; small ones of one loop iteration are sent in one request."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np

from dledger_core.client.protocol import AppendResult, Bodies
from dledger_core.config import BATCH_BYTES_MAX, RECORD_BYTES_MAX
from dledger_core.control import fingerprint
from dledger_core.errors import BadRequestError, DLedgerError, UnknownFeatureError
from dledger_core.net import messages
from dledger_core.record import HEADER_BYTES, Columns

COALESCED_BYTES_MAX: Final = 1 << 20

_NOTHING_APPENDED: Final = (BadRequestError, UnknownFeatureError)
TOGETHER_MAX: Final = 64
"""Appends of producers in one request: each is a row of its header, which a node limits to 4 KiB."""
TOGETHER_ID_BYTES_MAX: Final = 1536
"""Bytes of their ids: the header still fits with the highest numbers."""


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
    if columns.count == 1 and columns.record_bytes <= RECORD_BYTES_MAX:  # a single append: numpy takes 4 µs
        return columns
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


@dataclass(slots=True, eq=False)
class Append:
    """One append that waits for its result.

    Attributes:
        columns: its entries.
        request: the fields of a producer's append; None = a plain one.
        future: done with the result.
    """

    columns: Columns
    request: messages.AppendRequest | None
    future: asyncio.Future[AppendResult]


Send: TypeAlias = Callable[[Sequence[Append]], Awaitable[Sequence[AppendResult | None]]]
"""Sends appends as one request and returns the result of each; None = it failed, without effect on the others."""


class AppendBatcher:
    """Sends the appends of one loop iteration in as few requests as possible: of at most 1 MiB and ``most`` appends.

    A request is cancelled once all its callers have been cancelled.

    Invariant: an append is in one request at a time. It is sent again only alone, and only after an error that a leader
    raises before it appends anything (``test_bad_or_cancelled_append_does_not_fail_shared_others``).

    Args:
        send: sends appends as one request.
        most: appends of one request.
        id_bytes: bytes of the producer ids of one request.
    """

    def __init__(self, send: Send, most: int = 1 << 20, id_bytes: int = 0) -> None:
        self._send = send
        self._most = most
        self._id_bytes = id_bytes
        self._pending: list[Append] = []
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def requests(self) -> int:
        """Requests in flight."""
        return len(self._tasks)

    async def append(self, columns: Columns, request: messages.AppendRequest | None = None) -> AppendResult:
        """Append ``columns``, perhaps together with others; cancelling one caller does not affect the others."""
        loop = asyncio.get_running_loop()
        append = Append(columns, request, loop.create_future())
        if not self._pending:
            loop.call_soon(self._flush)
        self._pending.append(append)
        return await append.future

    def _flush(self) -> None:
        pending, self._pending = self._pending, []
        start, nbytes, id_bytes = 0, 0, 0
        for row, append in enumerate(pending):
            size, id_size = (
                append.columns.record_bytes,
                0 if append.request is None else len((append.request.producer_id or "").encode()),
            )
            if row - start >= self._most or (
                row > start and (nbytes + size > COALESCED_BYTES_MAX or id_bytes + id_size > self._id_bytes)
            ):
                self._spawn(pending[start:row])
                start, nbytes, id_bytes = row, 0, 0
            nbytes += size
            id_bytes += id_size
        self._spawn(pending[start:])

    def _spawn(self, appends: Sequence[Append]) -> None:
        live = [append for append in appends if not append.future.done()]
        if live:
            task = asyncio.create_task(self._append(live))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            left = len(live)

            def caller_done(future: asyncio.Future[AppendResult]) -> None:
                nonlocal left
                left -= future.cancelled()
                if left == 0:
                    task.cancel()

            for append in live:
                append.future.add_done_callback(caller_done)

    async def _append(self, appends: Sequence[Append]) -> None:
        results: Sequence[AppendResult | None]
        try:
            results = await self._send(appends)
        except DLedgerError as error:
            if len(appends) == 1 or not isinstance(error, _NOTHING_APPENDED):
                for append in appends:
                    if not append.future.done():
                        append.future.set_exception(type(error)(*error.args))
                return
            results = [None] * len(appends)
        except asyncio.CancelledError:
            for append in appends:
                append.future.cancel()
            raise
        for append, result in zip(appends, results, strict=True):
            if result is None:
                self._spawn([append])  # only some of them are wrong, so each is sent alone
            elif not append.future.done():
                append.future.set_result(result)

    async def close(self) -> None:
        """Cancel all appends in progress."""
        for append in self._pending:
            append.future.cancel()
        self._pending = []
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

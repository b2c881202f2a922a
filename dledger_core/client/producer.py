"""Idempotent producers: they count the sequence, so every append can be retried safely."""

from __future__ import annotations

import asyncio
import contextlib

from dledger_core.client.appends import columns_of
from dledger_core.client.async_client import AsyncLogClient
from dledger_core.client.protocol import AppendResult, Bodies
from dledger_core.client.routing.retry import is_unknown
from dledger_core.client.sync_client import SyncLogClient
from dledger_core.control import column_crc
from dledger_core.errors import DLedgerError, FencedError, ProducerError, SequenceConflictError
from dledger_core.record import Columns


class AsyncProducer:
    """A producer of one group.

    It continues after the last append of this producer id and epoch in the log. Its appends are sent one at a time, in
    call order. If the outcome of an append stays unknown after the client's own retries, calling ``append`` again with
    the same bodies completes it without a duplicate. A cancelled append may have been appended: its request
    continues, and the next call first waits for the outcome; with the same bodies it returns it.

    Invariant: at most one append is in flight, and a sequence number never names two different appends: the log
    recognizes a repeat by its number alone, and would drop the second one as a repeat of the first
    (``test_producer_continues_after_unknown_append``).

    Args:
        client: the client to append with.
        producer_id: unique to this stream of appends, kept over restarts of the program. Two programs with one id and
            one epoch are not fenced.
        epoch: a higher one fences instances with a lower one.
        once: the id is used once, for a job that never runs again: the log remembers it for a day instead of seven.
    """

    def __init__(self, client: AsyncLogClient, producer_id: str, epoch: int = 0, *, once: bool = False) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.once = once
        self._client = client
        self._lock = asyncio.Lock()
        self._sequence: int | None = None
        self._unknown_crc: int | None = None
        self._request: asyncio.Future[AppendResult] | None = None

    async def append(self, bodies: Bodies) -> AppendResult:
        """Append bodies as one batch; arguments and errors as ``AsyncClient.append``."""
        columns = columns_of(bodies)
        crc = column_crc(columns.crcs)
        async with self._lock:
            cancelled_crc, finished = self._unknown_crc, await self._finished()
            if finished is not None and cancelled_crc == crc:
                return finished
            unknown = self._unknown_crc not in (None, crc)
            if unknown:
                # Not a retry of the append whose outcome is unknown: first ask the log for the next sequence.
                self._sequence = None
            try:
                return await self._append(columns, crc)
            except SequenceConflictError:
                if not unknown:
                    raise
                return await self._append(columns, crc)  # the earlier append arrived after the log was asked

    async def _append(self, columns: Columns, crc: int) -> AppendResult:
        if self._sequence is None:
            self._sequence = await self._next_sequence()
        self._unknown_crc = crc  # before the await: a cancelled append has an unknown outcome too
        self._request = asyncio.ensure_future(
            self._client.append_columns(
                columns, producer_id=self.producer_id, epoch=self.epoch, sequence=self._sequence, once=self.once
            )
        )
        self._request.add_done_callback(_retrieve)
        return await self._outcome(self._request)

    async def _finished(self) -> AppendResult | None:
        """Return the result of a cancelled append; None if there is none, or if it failed."""
        if self._request is not None:
            with contextlib.suppress(DLedgerError):
                return await self._outcome(self._request)
        return None

    async def _outcome(self, request: asyncio.Future[AppendResult]) -> AppendResult:
        """Wait for a request, which continues if the caller is cancelled."""
        try:
            result = await asyncio.shield(request)
        except DLedgerError as error:
            self._request = None
            if not is_unknown(error):
                self._unknown_crc = None
            if isinstance(error, ProducerError):
                self._sequence = None  # the log knows another next sequence
            raise
        except asyncio.CancelledError:
            if request.cancelled():
                self._request = None
            raise
        self._request = self._unknown_crc = None
        if self._sequence is not None:
            self._sequence += 1
        return result

    async def _next_sequence(self) -> int:
        state = await self._client.producer(self.producer_id)
        if state.known and state.epoch > self.epoch:
            values = {"producer_id": self.producer_id, "epoch": self.epoch, "current": state.epoch}
            raise FencedError("a newer epoch of this producer exists", "", "stop this instance", values)
        return state.next_sequence if state.known and state.epoch == self.epoch else 0


def _retrieve(request: asyncio.Future[AppendResult]) -> None:
    """Mark the error of a request as seen: after a cancellation perhaps no other caller waits for it."""
    if not request.cancelled():
        request.exception()


class Producer:
    """AsyncProducer for programs without asyncio; thread-safe.

    Args:
        client: the client to append with.
        producer_id: unique to this stream of appends, kept over restarts of the program. Two programs with one id and
            one epoch are not fenced.
        epoch: a higher one fences instances with a lower one.
        once: the id is used once, for a job that never runs again: the log remembers it for a day instead of seven.
    """

    def __init__(self, client: SyncLogClient, producer_id: str, epoch: int = 0, *, once: bool = False) -> None:
        self._client = client
        self._producer = AsyncProducer(client.in_loop, producer_id, epoch, once=once)

    @property
    def producer_id(self) -> str:
        """The producer's id."""
        return self._producer.producer_id

    @property
    def epoch(self) -> int:
        """The producer's epoch."""
        return self._producer.epoch

    def append(self, bodies: Bodies) -> AppendResult:
        """Append bodies as one batch; arguments and errors as ``Client.append``."""
        return self._client.call(self._producer.append(bodies))

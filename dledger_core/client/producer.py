"""Idempotent producers: they count the sequence, so every append can be retried safely."""

from __future__ import annotations

import asyncio

from dledger_core.client.appends import columns_of
from dledger_core.client.async_client import AsyncLogClient
from dledger_core.client.protocol import AppendResult, Bodies
from dledger_core.client.routing.retry import is_unknown
from dledger_core.client.sync_client import SyncLogClient
from dledger_core.control import column_crc
from dledger_core.errors import DLedgerError, FencedError


class AsyncProducer:
    """A producer of one group.

    It continues after the last append of this producer id and epoch in the log. Its appends are sent one at a time, in
    call order. If the outcome of an append stays unknown after the client's own retries, calling ``append`` again with
    the same bodies completes it without a duplicate.

    Args:
        client: the client to append with.
        producer_id: unique to this stream of appends, kept over restarts of the program.
        epoch: a higher one fences instances with a lower one.
    """

    def __init__(self, client: AsyncLogClient, producer_id: str, epoch: int = 0) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self._client = client
        self._lock = asyncio.Lock()
        self._sequence: int | None = None
        self._unknown_crc: int | None = None

    async def append(self, bodies: Bodies) -> AppendResult:
        """Append bodies as one batch; arguments and errors as ``AsyncClient.append``."""
        columns = columns_of(bodies)
        crc = column_crc(columns.crcs)
        async with self._lock:
            if self._unknown_crc not in (None, crc):
                # Not a retry of the append whose outcome is unknown: first ask the log for the next sequence.
                self._sequence = None
            if self._sequence is None:
                self._sequence = await self._next_sequence()
            self._unknown_crc = crc  # before the await: a cancelled append has an unknown outcome too
            try:
                result = await self._client.append_columns(
                    columns, producer_id=self.producer_id, epoch=self.epoch, sequence=self._sequence
                )
            except DLedgerError as error:
                if not is_unknown(error):
                    self._unknown_crc = None
                raise
            self._unknown_crc = None
            self._sequence += 1
            return result

    async def _next_sequence(self) -> int:
        state = await self._client.producer(self.producer_id)
        if state.known and state.epoch > self.epoch:
            values = {"producer_id": self.producer_id, "epoch": self.epoch, "current": state.epoch}
            raise FencedError("a newer epoch of this producer exists", "", "stop this instance", values)
        return state.next_sequence if state.known and state.epoch == self.epoch else 0


class Producer:
    """AsyncProducer for programs without asyncio; thread-safe.

    Args:
        client: the client to append with.
        producer_id: unique to this stream of appends, kept over restarts of the program.
        epoch: a higher one fences instances with a lower one.
    """

    def __init__(self, client: SyncLogClient, producer_id: str, epoch: int = 0) -> None:
        self._client = client
        self._producer = AsyncProducer(client.in_loop, producer_id, epoch)

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

"""Reads by position: where RocketMQ's offsets point, in the log or in the CommitLog that it goes on behind."""

from __future__ import annotations

import asyncio
import contextlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.client.reading import END_OF_LOG, READ_BYTES, Consistency
from dledger_core.client.results import PositionFetch
from dledger_core.client.routing.replica_reads import NEWEST_TIMEOUT_S
from dledger_core.errors import BadRequestError, CorruptRecordError, DLedgerError, ProtocolError
from dledger_core.net.codec import int_field, parse_records
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.record import HEADER_BYTES, READ_SCHEMA, Fetch, Isolation

__all__ = ["PositionReads", "ending_behind"]

_T = TypeVar("_T")


class PositionReads(ABC):
    """The part of ``AsyncClient`` that reads by position."""

    @abstractmethod
    async def _ask_replica(self, request: dict[str, Any], decode: Callable[[Frame], _T], node: str | None) -> _T: ...

    @abstractmethod
    async def _ask_leader(self, request: dict[str, Any]) -> Frame: ...

    @abstractmethod
    async def fetch(
        self, start: int, end: int, *, max_bytes: int, node: str | None, consistency: Consistency, isolation: Isolation
    ) -> Fetch:
        """See ``AsyncClient``."""

    async def fetch_at(
        self,
        position: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        isolation: Isolation = "read_committed",
    ) -> PositionFetch:
        """Reads what lies at a position and behind it: entries of the log, or messages of the CommitLog before it.

        Args:
            position: of a byte of the log. In the log it may lie inside an entry, as RocketMQ's offsets do (entry's
                position + 48); in the CommitLog it is a message's own.
            max_bytes: bound on what is looked at; at least one entry is.
            node: read from this node only.
            isolation: as for ``fetch``.

        Returns:
            What was found, of the log or of the CommitLog, and where to go on. Nothing where nothing is committed yet;
            what comes then may lie before ``position``, if that is further behind the log's end.

        Raises:
            IndexOutOfRangeError: before what is still held, or where no message of the CommitLog begins.
            CorruptRecordError: the message is damaged, wherever it was read.
        """
        if position < 0 or max_bytes < 1:
            values = {"position": position, "max_bytes": max_bytes}
            raise BadRequestError("a read's numbers are out of range", "", "the first position is 0", values)
        request = {"t": Type.AT, "position": int(position), "max": int(max_bytes)}
        found = await self._ask_replica(request, lambda frame: _decode(frame, position), node)
        if isinstance(found, PositionFetch):
            return found
        how: dict[str, Any] = {"node": node, "isolation": isolation, "consistency": "committed"}
        if node is not None:
            return await self._from(found, position, max_bytes, how)
        read = await self.fetch(found, END_OF_LOG, max_bytes=max_bytes, **how)
        batch = ending_behind(read.batch, position)
        if batch.num_rows:
            return PositionFetch(batch, None, read.next_index)
        # A follower may not have heard of the newest commit, and its end is no answer about what lies behind it.
        with contextlib.suppress(DLedgerError, TimeoutError):
            async with asyncio.timeout(NEWEST_TIMEOUT_S):
                newest = _decode(await self._ask_leader(dict(request)), position)
                if isinstance(newest, int):
                    return await self._from(newest, position, max_bytes, how | {"consistency": "linearizable"})
        return await self._from(read.next_index, position, max_bytes, how)

    async def _from(self, index: int, position: int, max_bytes: int, how: dict[str, Any]) -> PositionFetch:
        """Reads from an index on what ends behind a position; the index may be one of a replica that is behind."""
        read: Fetch = await self.fetch(index, END_OF_LOG, max_bytes=max_bytes, **how)
        batch = ending_behind(read.batch, position)
        while not batch.num_rows and read.next_index > index:
            index = read.next_index
            read = await self.fetch(index, END_OF_LOG, max_bytes=READ_BYTES, **how)
            batch = ending_behind(read.batch, position)
        return PositionFetch(batch, None, read.next_index)

    async def read_at(
        self,
        position: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        isolation: Isolation = "read_committed",
    ) -> pa.RecordBatch:
        """Returns ``fetch_at(...).batch``; messages of the CommitLog have neither index nor term nor timestamp."""
        return (await self.fetch_at(position, max_bytes=max_bytes, node=node, isolation=isolation)).batch


def _decode(frame: Frame, position: int) -> PositionFetch | int:
    """Returns what AT_OK holds: messages of the CommitLog, or the index from which on the log is to be read."""
    header = frame.header
    if header.get("index") is not None:
        return int_field(header, "index", 0)
    n, next_position = int_field(header, "n", 1), int_field(header, "next", 0)
    found = parse_records(frame.payload, n)
    first = next_position - found.nbytes
    if first < position:
        raise ProtocolError("a read by position answers another one", "", "", {"position": position, "first": first})
    offsets = np.zeros(n + 1, np.int32)
    np.cumsum(found.sizes, out=offsets[1:])
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(found.data)]
    columns = {field.name: pa.nulls(n, field.type) for field in READ_SCHEMA}
    columns |= {"position": pa.array(first + offsets[:-1].astype(np.int64))}
    columns |= {"body": pa.Array.from_buffers(pa.binary(), n, buffers)}
    batch = pa.RecordBatch.from_pydict(columns, READ_SCHEMA)
    _check(batch)
    return PositionFetch(batch, next_position, None)


def _check(batch: pa.RecordBatch) -> None:
    # Few clients read a CommitLog: the others need not load what reads messages.
    from dledger_core.rocketmq.store.commit_log import message_faults

    wrong = message_faults(batch) != 0
    if wrong.any():
        position = batch.column("position")[int(wrong.argmax())].as_py()
        raise CorruptRecordError("a message of the CommitLog arrived damaged", "", "retry", {"position": position})


def ending_behind(batch: pa.RecordBatch, position: int) -> pa.RecordBatch:
    """Returns the entries of a log that end behind a position."""
    if not batch.num_rows:
        return batch
    sizes = np.asarray(pc.binary_length(batch.column("body"))) + HEADER_BYTES
    ends = np.asarray(batch.column("position")) + sizes
    return batch.slice(int(np.searchsorted(ends, position, side="right")))

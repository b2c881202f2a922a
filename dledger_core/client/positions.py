"""Reads by position: where RocketMQ's offsets point, in the log or in the CommitLog that it goes on behind."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.client.reading import END_OF_LOG, READ_BYTES, Isolation
from dledger_core.client.results import Fetch, PositionFetch
from dledger_core.errors import BadRequestError, CorruptRecordError, ProtocolError
from dledger_core.net.codec import int_field, parse_records
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.record import HEADER_BYTES, READ_SCHEMA

__all__ = ["PositionReads"]

_T = TypeVar("_T")


class PositionReads(ABC):
    """The part of ``AsyncClient`` that reads by position."""

    @abstractmethod
    async def _ask_replica(self, request: dict[str, Any], decode: Callable[[Frame], _T], node: str | None) -> _T: ...

    @abstractmethod
    async def fetch(self, start: int, end: int, *, max_bytes: int, node: str | None, isolation: Isolation) -> Fetch:
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
            What was found, of the log or of the CommitLog, and where to go on. Nothing where nothing is committed yet.

        Raises:
            IndexOutOfRangeError: before what is still held, or where no message of the CommitLog begins.
            CorruptRecordError: the message is damaged, wherever it was read.
        """
        if position < 0 or max_bytes < 1:
            values = {"position": position, "max_bytes": max_bytes}
            raise BadRequestError("a read's numbers are out of range", "", "the first position is 0", values)
        found = await self._ask_replica(
            {"t": Type.AT, "position": int(position), "max": int(max_bytes)},
            lambda frame: _decode(frame, position),
            node,
        )
        if isinstance(found, PositionFetch):
            return found
        while True:
            read = await self.fetch(found, END_OF_LOG, max_bytes=max_bytes, node=node, isolation=isolation)
            batch = _behind(read.batch, position)
            if batch.num_rows or read.next_index <= found:
                return PositionFetch(batch, None, read.next_index)
            found = read.next_index  # the replica that was asked for the place knows less of the log than this one

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
    from dledger_core.rocketmq.classic_log import wrong_messages

    wrong = wrong_messages(batch)
    if wrong.any():
        position = batch.column("position")[int(wrong.argmax())].as_py()
        raise CorruptRecordError("a message of the CommitLog arrived damaged", "", "retry", {"position": position})


def _behind(batch: pa.RecordBatch, position: int) -> pa.RecordBatch:
    """Returns the entries that end behind a position."""
    if not batch.num_rows:
        return batch
    sizes = np.asarray(pc.binary_length(batch.column("body"))) + HEADER_BYTES
    ends = np.asarray(batch.column("position")) + sizes
    return batch.slice(int(np.searchsorted(ends, position, side="right")))

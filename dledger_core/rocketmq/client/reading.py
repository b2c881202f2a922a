"""Reading a Java group: one entry a request, many requests in flight, Arrow out."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias

import pyarrow as pa

from dledger_core.errors import IndexOutOfRangeError, ProtocolError
from dledger_core.record import HEADER_BYTES, MAGIC_DATA, READ_SCHEMA, RECORD_SCHEMA
from dledger_core.rocketmq.remoting.responses import WireEntry

__all__ = ["PROBE_MARK", "Get", "batch_of", "is_probe", "read_entries"]

Get: TypeAlias = Callable[[int], Awaitable[WireEntry]]
PROBE_MARK: Final = b"dledger-commit-probe \xd6\x1f\x8c\x03\x9a\xe4\x42\x57\x00 "
"""How the body of a probe entry begins; rows of such entries are left out."""
_GUESSED_BYTES: Final = 1024
_IN_FLIGHT_BYTES: Final = 16 << 20


def is_probe(body: bytes) -> bool:
    """Whether an entry was appended only to learn how far the log is committed."""
    return body.startswith(PROBE_MARK)


async def read_entries(get: Get, start: int, end: int, *, max_bytes: int, in_flight: int) -> list[WireEntry]:
    """Reads entries from ``start`` on, one at least if there is any, ``max_bytes`` of records about.

    Stops without an error where the log ends. Memory: what is in flight is bounded by the size of what came so far.

    Raises:
        IndexOutOfRangeError: the log does not hold ``start`` any more.
        ProtocolError: terms go back: the log was rewritten meanwhile.
    """
    found: list[WireEntry] = []
    nbytes, largest, following = 0, _GUESSED_BYTES, start
    window: deque[asyncio.Task[WireEntry]] = deque()
    try:
        while True:
            wanted = min(in_flight, max(1, (max_bytes - nbytes) // largest), max(1, _IN_FLIGHT_BYTES // largest))
            while following < end and len(window) < wanted:
                window.append(asyncio.ensure_future(get(following)))
                following += 1
            if not window:
                return found
            try:
                entry = await window.popleft()
            except IndexOutOfRangeError:
                if found:
                    return found
                raise
            if found and entry.term < found[-1].term:
                values = {"index": entry.index, "term": entry.term, "before": found[-1].term}
                raise ProtocolError("terms go back: the log was rewritten while it was read", "", "read again", values)
            found.append(entry)
            size = HEADER_BYTES + len(entry.body)
            nbytes, largest = nbytes + size, max(largest, size)
            if nbytes >= max_bytes:
                return found
    finally:
        for task in window:
            task.cancel()
        await asyncio.gather(*window, return_exceptions=True)


def batch_of(entries: Sequence[WireEntry], *, records: bool) -> pa.RecordBatch:
    """Returns entries as rows: data entries without probes, or with ``records`` all of them and their magic."""
    rows = entries if records else [e for e in entries if e.magic == MAGIC_DATA and not is_probe(e.body)]
    schema = RECORD_SCHEMA if records else READ_SCHEMA
    columns = {
        "index": [entry.index for entry in rows],
        "term": [entry.term for entry in rows],
        "position": [entry.position for entry in rows],
        "timestamp": [None] * len(rows),  # Java does not write append times
        "body": [entry.body for entry in rows],
        "magic": [entry.magic for entry in rows],
    }
    return pa.RecordBatch.from_arrays([pa.array(columns[f.name], f.type) for f in schema], schema=schema)

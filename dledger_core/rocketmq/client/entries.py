"""Appends and reads of a Java group: one entry per request, many requests in flight."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import pyarrow as pa

from dledger_core.client.results import AppendResult
from dledger_core.errors import DLedgerError, IndexOutOfRangeError, ProtocolError
from dledger_core.record import HEADER_BYTES, MAGIC_DATA, READ_SCHEMA, RECORD_SCHEMA
from dledger_core.rocketmq.remoting.messages import AppendResponse, WireEntry

AppendOne: TypeAlias = Callable[[bytes], Awaitable[AppendResponse]]
Get: TypeAlias = Callable[[int], Awaitable[WireEntry]]
PROBE_PREFIX: Final = b"dledger-commit-probe \xd6\x1f\x8c\x03\x9a\xe4\x42\x57\x00 "
"""First bytes of a probe entry's body; reads skip such entries."""
_GUESSED_BYTES: Final = 1024
_IN_FLIGHT_BYTES: Final = 16 << 20


@dataclass(slots=True)
class _Acknowledged:
    """Index and term of each acknowledged body, and the failures that stopped the rest."""

    indexes: list[int]
    terms: list[int]
    failures: list[DLedgerError] = field(default_factory=list)


async def append_all(append_one: AppendOne, bodies: Sequence[bytes], in_flight: int) -> AppendResult:
    """Append bodies with ``in_flight`` requests at once; 1 keeps their order.

    After a failure no further request is sent and those in flight are awaited. The error's values count the
    acknowledged bodies: ``appended`` out of ``bodies``, indexes ``first_index`` to ``last_index``.

    Raises:
        DLedgerError: the first failure.
    """
    done = _Acknowledged([-1] * len(bodies), [-1] * len(bodies))
    rows = iter(range(len(bodies)))
    workers = min(in_flight, len(bodies))
    await asyncio.gather(*(_work(append_one, bodies, rows, done) for _ in range(workers)))
    if done.failures:
        raise _with_count(done.failures[0], [index for index in done.indexes if index >= 0], len(bodies))
    first, last = min(done.indexes), max(done.indexes)
    plain = done.indexes == list(range(first, last + 1))
    return AppendResult(first, last, max(done.terms), () if plain else tuple(done.indexes))


async def _work(append_one: AppendOne, bodies: Sequence[bytes], rows: Iterator[int], done: _Acknowledged) -> None:
    for row in rows:
        if done.failures:
            return
        try:
            response = await append_one(bodies[row])
        except DLedgerError as error:
            done.failures.append(error)
            return
        done.indexes[row], done.terms[row] = response.index, response.term


def _with_count(error: DLedgerError, done: Sequence[int], bodies: int) -> DLedgerError:
    values = error.values | {"appended": len(done), "bodies": bodies}
    if done:
        values |= {"first_index": min(done), "last_index": max(done)}
    return type(error)(error.what, error.where, error.remedy, values)


def is_probe(body: bytes) -> bool:
    """Whether an entry was appended only to learn the commit index."""
    return body.startswith(PROBE_PREFIX)


async def read_entries(get: Get, start: int, end: int, *, max_bytes: int, in_flight: int) -> list[WireEntry]:
    """Read entries from ``start`` on: at least one if there is any, about ``max_bytes`` of records.

    Stops without an error at the end of the log. The largest entry so far limits the number of requests in flight.

    Raises:
        IndexOutOfRangeError: the entry at ``start`` is deleted.
        ProtocolError: terms decrease: the log was rewritten during the read.
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
                raise ProtocolError("terms decrease: the log was rewritten during the read", "", "read again", values)
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
    """Return entries as rows: data entries without probes, or with ``records`` all of them and their magic."""
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

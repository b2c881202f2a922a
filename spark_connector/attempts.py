"""The sink's transaction, as task and driver take part in it.

A task attempt appends its rows under a uuid of its own, as parts of the transaction (query id, batch id). What it
has appended it reports to the driver, whose ``commit`` lists the parts of the winning attempts in one control entry
per group. An append whose outcome is unknown is simply made again: what is not listed loses.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage

from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.control import Part, TransactionId
from dledger_core.errors import DLedgerError
from spark_connector.errors import SchemaError
from spark_connector.logs import client_for, retrying
from spark_connector.options import DLedgerOptions
from spark_connector.sink_rows import SinkShape, bodies_by_group

if TYPE_CHECKING:
    from dledger_core import Client
    from dledger_core.client import AttemptResult

__all__ = ["AttemptMessage", "abort_attempts", "commit_attempts", "write_attempt"]

_ENTRY_OVERHEAD: Final = 48
_IN_FLIGHT_BYTES: Final = 8 << 20


@dataclass
class AttemptMessage(WriterCommitMessage):
    """What a task attempt tells the driver.

    Attributes:
        transaction: the transaction it took part in.
        parts: per group the ranges it appended.
        committed: groups whose transaction was committed before this attempt, by an earlier run of the micro-batch.
    """

    transaction: TransactionId
    parts: dict[str, list[Part]] = field(default_factory=dict)
    committed: set[str] = field(default_factory=set)


def write_attempt(
    batches: Iterable[pa.RecordBatch], shape: SinkShape, options: DLedgerOptions, transaction: TransactionId
) -> AttemptMessage:
    """Appends a task's rows and returns the message for the driver; runs on executors."""
    message = AttemptMessage(transaction)
    writers: dict[str, _GroupAttempt] = {}
    attempt, row = str(uuid.uuid4()), 0
    try:
        for batch in batches:
            for group, bodies in bodies_by_group(batch, shape, row):
                if group in message.committed:
                    continue
                if group not in writers:
                    client = client_for(options, group)
                    if _is_committed(client, options, transaction):
                        message.committed.add(group)
                        continue
                    writers[group] = _GroupAttempt(client, options, transaction, attempt)
                writers[group].add(bodies, row)
            row += batch.num_rows
        message.parts = {group: writer.finish() for group, writer in writers.items()}
    finally:
        for writer in writers.values():
            writer.cancel()
    return message


def commit_attempts(messages: Sequence[WriterCommitMessage | None], options: DLedgerOptions) -> None:
    """Commits the transaction in every group that the winning attempts wrote to; repeatable; runs on the driver."""
    found = [message for message in messages if isinstance(message, AttemptMessage)]
    committed = set().union(*(message.committed for message in found))
    parts: dict[str, list[Part]] = {}
    for message in found:
        for group, ranges in message.parts.items():
            parts.setdefault(group, []).extend(ranges)
    for group in sorted(set(parts) - committed):
        if parts[group]:
            commit = partial(client_for(options, group).commit_transaction, found[0].transaction, sorted(parts[group]))
            retrying(commit, options.fetch_retry_ms, unknown_outcome=True)


def abort_attempts(
    messages: Sequence[WriterCommitMessage | None],
    group: str | None,
    transaction: TransactionId,
    options: DLedgerOptions,
) -> None:
    """Aborts the transaction where it is open; a group nobody reported is left to the leader's timeout."""
    groups = {name for message in messages if isinstance(message, AttemptMessage) for name in message.parts}
    for name in sorted(groups | ({group} if group is not None else set())):
        client = client_for(options, name)
        state = retrying(partial(client.transaction, transaction), options.fetch_retry_ms, unknown_outcome=True)
        if state.state == "open":
            abort = partial(client.abort_transaction, transaction)
            retrying(abort, options.fetch_retry_ms, unknown_outcome=True)


def _is_committed(client: Client, options: DLedgerOptions, transaction: TransactionId) -> bool:
    state = retrying(lambda: client.transaction(transaction), options.fetch_retry_ms, unknown_outcome=True)
    return bool(state.state == "committed")


class _GroupAttempt:
    """Collects a group's bodies into appends of about ``appendMaxBytes`` and sends them in order.

    Up to ``_IN_FLIGHT_BYTES`` are under way at once. Rows must lie in the log in the order of the task: appends are
    sent in order, and where a retry overtook another append, all from there on are appended again, one by one; the
    first copies are not listed and so they lose.
    """

    def __init__(self, client: Client, options: DLedgerOptions, transaction: TransactionId, attempt: str) -> None:
        self._client = client
        self._options = options
        self._transaction = transaction
        self._attempt = attempt
        self._collected: list[pa.Array] = []
        self._bytes = 0
        self._in_flight: deque[_Append] = deque()
        self._in_flight_bytes = 0
        self._parts: list[Part] = []

    def add(self, bodies: pa.Array, first_row: int) -> None:
        for piece in _pieces(bodies, self._options.append_max_bytes, first_row):
            size = _bytes_of(piece)
            if self._collected and self._bytes + size > self._options.append_max_bytes:
                self._send()
            self._collected.append(piece)
            self._bytes += size

    def finish(self) -> list[Part]:
        """Sends the rest and returns the parts once all are committed."""
        if self._collected:
            self._send()
        while self._in_flight:
            self._take()
        return self._parts

    def cancel(self) -> None:
        """Gives up what is under way; after ``finish`` there is nothing."""
        for append in self._in_flight:
            self._client.call(_cancelled(append.task))
        self._in_flight.clear()

    def _send(self) -> None:
        bodies = pa.concat_arrays(self._collected) if len(self._collected) > 1 else self._collected[0]
        size, self._collected, self._bytes = self._bytes, [], 0
        while self._in_flight and self._in_flight_bytes + size > _IN_FLIGHT_BYTES:
            self._take()
        work = self._client.in_loop.append_attempt(bodies, transaction=self._transaction, attempt=self._attempt)
        # Tasks of a loop start in the order they are made, so the requests leave in this order.
        self._in_flight.append(_Append(self._client.call(_started(work)), bodies, size))
        self._in_flight_bytes += size

    def _take(self) -> None:
        """Takes the result of the oldest append under way."""
        append = self._in_flight.popleft()
        self._in_flight_bytes -= append.size
        result = self._result_of(append)
        overtaken = result is None or not self._follows(result)
        if result is None or overtaken:
            result = self._append_again(append)
        self._parts.append(Part(result.first_index, result.last_index, result.rows, result.crc))
        while overtaken and self._in_flight:
            self._take()

    def _follows(self, result: AttemptResult) -> bool:
        return not self._parts or result.first_index > self._parts[-1].last

    def _result_of(self, append: _Append) -> AttemptResult | None:
        """Waits for an append; None if it failed in a way that another try may mend."""
        try:
            return self._client.call(_result(append.task))
        except DLedgerError as error:
            if not (error.retriable or error.outcome_unknown):
                raise
            return None

    def _append_again(self, append: _Append) -> AttemptResult:
        def again() -> AttemptResult:
            return self._client.append_attempt(append.bodies, transaction=self._transaction, attempt=self._attempt)

        return retrying(again, self._options.fetch_retry_ms, unknown_outcome=True)


def _bytes_of(bodies: pa.Array) -> int:
    offsets = np.frombuffer(bodies.buffers()[1], np.int64, len(bodies) + 1, bodies.offset * 8)
    return int(offsets[-1] - offsets[0]) + _ENTRY_OVERHEAD * len(bodies)


def _pieces(bodies: pa.Array, most: int, first_row: int) -> Iterator[pa.Array]:
    """Cuts large_binary bodies into pieces of at most ``most`` bytes, or of one body."""
    if not len(bodies):
        return
    offsets = np.frombuffer(bodies.buffers()[1], np.int64, len(bodies) + 1, bodies.offset * 8)
    ends = offsets[1:] - offsets[0] + _ENTRY_OVERHEAD * np.arange(1, len(bodies) + 1)
    start = 0
    while start < len(bodies):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        if stop == start + 1 and int(ends[start]) - before > RECORD_BYTES_MAX:
            raise SchemaError(
                f"row {first_row + start} of the task makes a record of {int(ends[start]) - before} bytes",
                "body",
                f"a record has at most {RECORD_BYTES_MAX} bytes",
            )
        yield bodies.slice(start, stop - start)
        start = stop


@dataclass(frozen=True, slots=True)
class _Append:
    """An append under way."""

    task: asyncio.Task[AttemptResult]
    bodies: pa.Array
    size: int


async def _started(work: Coroutine[Any, Any, AttemptResult]) -> asyncio.Task[AttemptResult]:
    return asyncio.ensure_future(work)


async def _result(task: asyncio.Task[AttemptResult]) -> AttemptResult:
    return await task


async def _cancelled(task: asyncio.Task[AttemptResult]) -> None:
    task.cancel()
    await asyncio.wait([task])

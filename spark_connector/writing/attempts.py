"""A task attempt of the sink: appends its rows under a uuid of its own, as parts of the micro-batch's transaction.

What it has appended it reports to the driver, whose commit lists the parts of the winning attempts (``committing``).
An append whose outcome is unknown is simply made again: what is not listed loses.
"""

from __future__ import annotations

import asyncio
import uuid
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.taskcontext import TaskContext

from dledger_core import HEADER_BYTES, AttemptResult, BadRequestError, Client, Part, TransactionError, TransactionId
from spark_connector.connections import client_for
from spark_connector.errors import SchemaError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.rows import GroupRows, SinkShape, rows_by_group

__all__ = ["AttemptMessage", "CommittedBefore", "write_attempt"]

_IN_FLIGHT_BYTES: Final = 8 << 20


@dataclass
class CommittedBefore:
    """A group in which an attempt found its transaction committed, so that it wrote nothing.

    Attributes:
        input_id: what the committed micro-batch was made of, if its writer said so.
        newest: the newest micro-batch that the query has committed there.
        rows: how many rows were committed.
        skipped: how many rows this attempt had for the group.
    """

    input_id: str
    newest: int
    rows: int
    skipped: int = 0


@dataclass
class AttemptMessage(WriterCommitMessage):
    """What a task attempt tells the driver.

    Attributes:
        transaction: the transaction it took part in.
        parts: per group the ranges it appended.
        committed: groups whose transaction was committed before, by an earlier run of the micro-batch.
    """

    transaction: TransactionId
    parts: dict[str, list[Part]] = field(default_factory=dict)
    committed: dict[str, CommittedBefore] = field(default_factory=dict)


def write_attempt(
    batches: Iterable[pa.RecordBatch], shape: SinkShape, options: DLedgerOptions, transaction: TransactionId
) -> AttemptMessage:
    """Appends a task's rows and returns the message for the driver; runs on executors.

    Raises:
        SchemaError: a row that cannot be written.
        FencedError: a newer run of the query writes.
        DLedgerError: the servers refused, or did not answer in ``fetchRetryMs``.
    """
    attempt, first_row = _Attempt(options, transaction), 0
    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    try:
        for batch in batches:
            for rows in rows_by_group(batch, shape, first_row, partition):
                if len(rows.bodies):
                    attempt.write(rows)
            first_row += batch.num_rows
        return attempt.finish()
    finally:
        attempt.cancel()


class _Attempt:
    """One attempt's writers, one per group."""

    def __init__(self, options: DLedgerOptions, transaction: TransactionId) -> None:
        self._options = options
        self._uuid = str(uuid.uuid4())
        self._writers: dict[str, _GroupWriter] = {}
        self._message = AttemptMessage(transaction)

    def write(self, rows: GroupRows) -> None:
        group = rows.group
        if group not in self._writers and group not in self._message.committed:
            client = client_for(self._options, group)
            if not self._note_if_committed(group, client):
                transaction = self._message.transaction
                self._writers[group] = _GroupWriter(client, self._options, transaction, self._uuid)
        if group in self._writers:
            self._unless_committed(group, rows)
        if group in self._message.committed:
            self._message.committed[group].skipped += len(rows.bodies)

    def finish(self) -> AttemptMessage:
        """Sends the rest and returns the message once everything is committed."""
        for group in list(self._writers):
            self._unless_committed(group, None)
        return self._message

    def cancel(self) -> None:
        for writer in self._writers.values():
            writer.cancel()

    def _unless_committed(self, group: str, rows: GroupRows | None) -> None:
        """Appends rows, or the rest; the transaction may be committed meanwhile, by another run or another attempt."""
        writer = self._writers[group]
        try:
            if rows is None:
                self._message.parts[group] = writer.finish()
            else:
                writer.add(rows)
        except TransactionError:
            del self._writers[group]
            writer.cancel()
            if not self._note_if_committed(group, client_for(self._options, group)):
                raise
            self._message.committed[group].skipped += writer.rows

    def _note_if_committed(self, group: str, client: Client) -> bool:
        """Notes the group if the transaction is committed.

        Raises:
            FencedError: this run was retired by a newer one.
        """
        found = client.transaction(self._message.transaction)
        if found.state == "committed":
            count = sum(part.rows for part in found.parts)
            self._message.committed[group] = CommittedBefore(found.input_id, found.newest, count)
        return group in self._message.committed


class _GroupWriter:
    """Collects a group's bodies into appends of about ``appendMaxBytes`` and sends them in order.

    Up to ``_IN_FLIGHT_BYTES`` are under way at once. Rows must lie in the log in the order of the task: appends are
    sent in order, and where a retry overtook another append, all from there on are appended again, one by one; the
    first copies are not listed and so they lose.
    """

    def __init__(self, client: Client, options: DLedgerOptions, transaction: TransactionId, attempt: str) -> None:
        self.rows = 0
        self._client = client
        self._options = options
        self._transaction = transaction
        self._attempt = attempt
        self._collected: list[pa.Array] = []
        self._numbers: tuple[int, int] = (0, 0)
        self._bytes = 0
        self._in_flight: deque[_Append] = deque()
        self._in_flight_bytes = 0
        self._parts: list[Part] = []

    def add(self, rows: GroupRows) -> None:
        self.rows += len(rows.bodies)
        for start, stop, size in _pieces(rows.bodies, self._options.append_max_bytes):
            if self._collected and self._bytes + size > self._options.append_max_bytes:
                self._send()
            first = self._numbers[0] if self._collected else int(rows.numbers[start])
            self._numbers = first, int(rows.numbers[stop - 1])
            self._collected.append(rows.bodies.slice(start, stop - start))
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
        self._in_flight.append(_Append(self._client.call(_started(work)), bodies, size, self._numbers))
        self._in_flight_bytes += size

    def _take(self) -> None:
        """Takes the result of the oldest append under way."""
        append = self._in_flight.popleft()
        self._in_flight_bytes -= append.size
        result = self._result_of(append)
        overtaken = not self._follows(result)
        if overtaken:
            result = self._client.append_attempt(append.bodies, transaction=self._transaction, attempt=self._attempt)
        self._parts.append(Part(result.first_index, result.last_index, result.rows, result.crc))
        while overtaken and self._in_flight:
            self._take()

    def _follows(self, result: AttemptResult) -> bool:
        return not self._parts or result.first_index > self._parts[-1].last

    def _result_of(self, append: _Append) -> AttemptResult:
        """Wait for an append in flight."""
        try:
            return self._client.call(_result(append.task))
        except BadRequestError as error:
            first, last = append.numbers
            raise SchemaError(f"{error.what} (rows {first} to {last} of the task)", error.where, error.remedy) from None


def _pieces(bodies: pa.Array, most: int) -> Iterator[tuple[int, int, int]]:
    """Yields (start, stop, bytes of their records): pieces of at most ``most`` bytes, or of one body."""
    offsets = np.frombuffer(bodies.buffers()[1], np.int64, len(bodies) + 1, bodies.offset * 8)
    ends = offsets[1:] - offsets[0] + HEADER_BYTES * np.arange(1, len(bodies) + 1)
    start, before = 0, 0
    while start < len(bodies):
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield start, stop, int(ends[stop - 1]) - before
        start, before = stop, int(ends[stop - 1])


@dataclass(frozen=True, slots=True)
class _Append:
    """An append under way; ``numbers`` are those of its first and last row."""

    task: asyncio.Task[AttemptResult]
    bodies: pa.Array
    size: int
    numbers: tuple[int, int]


async def _started(work: Coroutine[Any, Any, AttemptResult]) -> asyncio.Task[AttemptResult]:
    return asyncio.ensure_future(work)


async def _result(task: asyncio.Task[AttemptResult]) -> AttemptResult:
    return await task


async def _cancelled(task: asyncio.Task[AttemptResult]) -> None:
    task.cancel()
    await asyncio.wait([task])

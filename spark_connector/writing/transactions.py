"""The transaction of a micro-batch: task attempts append its parts, the driver commits those of the winning attempts.

Spark guarantees neither row order nor chunk boundaries between attempts of a task, so appends cannot be deduplicated by
content or sequence. Instead each attempt appends under its own uuid and reports its index ranges to the driver, whose
commit lists the ranges of the winning attempts. So an append with an unknown outcome is repeated: ranges that are not
listed are orphaned, and read_committed skips them.

A micro-batch that an earlier run of the query has committed is replayed without writing. It must be the same
micro-batch: two queries with one id (from a copied checkpoint, or one restored from an old backup) would otherwise drop
each other's rows. Spark's offset log distinguishes them, so the commit records a digest of its entry.

A transaction is atomic in one group, not across groups: no coordinator spans them. A replay commits the remaining
groups, so all groups are checked before the first commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import uuid
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.taskcontext import TaskContext

from dledger_core import (
    HEADER_BYTES,
    AttemptResult,
    BadRequestError,
    Client,
    DLedgerError,
    FencedError,
    Part,
    TransactionError,
    TransactionId,
    UnreachableError,
)
from spark_connector.connections import client_for
from spark_connector.errors import OptionError, SchemaError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.rows import GroupRows, SinkShape, rows_by_group

__all__ = ["AttemptMessage", "CommittedBefore", "abort_attempts", "check_target", "commit_attempts", "write_attempt"]

_log = logging.getLogger("spark_connector")
_IN_FLIGHT_BYTES: Final = 8 << 20
_ABORT_MS: Final = 5_000


@dataclass
class CommittedBefore:
    """A group whose transaction an attempt found committed, so that it wrote nothing.

    Attributes:
        input_id: digest of the input of the committed micro-batch, if recorded.
        newest: the newest micro-batch of the query that is committed there.
        rows: number of committed rows.
        skipped: number of rows that this attempt had for the group.
    """

    input_id: str
    newest: int
    rows: int
    skipped: int = 0


@dataclass
class AttemptMessage(WriterCommitMessage):
    """Message of a finished task attempt for the driver.

    Attributes:
        transaction: the transaction of the micro-batch.
        parts: per group the appended ranges.
        committed: groups whose transaction an earlier execution of the micro-batch has committed.
        logs: uuid of the log of each group that the attempt wrote to.
    """

    transaction: TransactionId
    parts: dict[str, list[Part]] = field(default_factory=dict)
    committed: dict[str, CommittedBefore] = field(default_factory=dict)
    logs: dict[str, str | None] = field(default_factory=dict)


def write_attempt(
    batches: Iterable[pa.RecordBatch], shape: SinkShape, options: DLedgerOptions, transaction: TransactionId
) -> AttemptMessage:
    """Append a task's rows and returns the message for the driver; runs on executors.

    Raises:
        SchemaError: a row that cannot be written.
        FencedError: a newer run of the query writes.
        DLedgerError: the servers rejected an append, or did not respond within ``fetchRetryMs``.
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
    """The writers of one attempt, one per group.

    A group has either a writer or a committed transaction, never both: an attempt that found its transaction committed
    must append nothing more there.
    """

    def __init__(self, options: DLedgerOptions, transaction: TransactionId) -> None:
        self._options = options
        self._uuid = str(uuid.uuid4())
        self._writers: dict[str, _GroupWriter] = {}
        self._message = AttemptMessage(transaction)

    def write(self, rows: GroupRows) -> None:
        """Append rows, unless the transaction of their group is committed.

        The state is asked once per group, before the first append: a replayed micro-batch must not write again.
        """
        group = rows.group
        assert not (group in self._writers and group in self._message.committed)
        if group not in self._writers and group not in self._message.committed:
            client = self._client(group)
            if not self._note_if_committed(group, client):
                transaction = self._message.transaction
                self._writers[group] = _GroupWriter(client, self._options, transaction, self._uuid)
        if group in self._writers:
            self._unless_committed(group, rows)
        if group in self._message.committed:
            self._message.committed[group].skipped += len(rows.bodies)

    def finish(self) -> AttemptMessage:
        """Send the remaining rows and return the message once all appends are committed."""
        for group in list(self._writers):
            self._unless_committed(group, None)
            self._message.logs[group] = self._client(group).log_uuid
        return self._message

    def _client(self, group: str) -> Client:
        transaction = self._message.transaction
        return client_for(self._options, group, run=transaction.run_id or transaction.query_id)

    def cancel(self) -> None:
        for writer in self._writers.values():
            writer.cancel()

    def _unless_committed(self, group: str, rows: GroupRows | None) -> None:
        """Append rows, or finish if None; count them as skipped if the transaction is committed meanwhile.

        Another run of the query, or the commit with a speculative attempt of this task, can end the transaction at any
        time. The node then rejects the append; only a committed transaction excuses that.
        """
        writer = self._writers[group]
        try:
            if rows is None:
                self._message.parts[group] = writer.finish()
            else:
                writer.add(rows)
        except TransactionError:
            del self._writers[group]
            writer.cancel()
            if not self._note_if_committed(group, self._client(group)):
                raise
            self._message.committed[group].skipped += writer.rows

    def _note_if_committed(self, group: str, client: Client) -> bool:
        """Record the group if its transaction is committed; return whether it is.

        Raises:
            FencedError: a newer run of the query has fenced this one.
        """
        found = client.transaction(self._message.transaction)
        if found.state == "committed":
            count = sum(part.rows for part in found.parts)
            self._message.committed[group] = CommittedBefore(found.input_id, found.newest, count)
        return group in self._message.committed


class _GroupWriter:
    """Collects a group's bodies into appends of about ``appendMaxBytes`` and sends them in order.

    Up to ``_IN_FLIGHT_BYTES`` are in flight, because one append at a time would wait a round trip each. The log must
    contain the rows in the order of the task. Appends are sent in order, but after a retry a later append may come
    first in the log. Then all appends from there on are repeated one by one; their first copies are not listed and so
    they are orphaned.
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
        for start, stop, size in _chunks(rows.bodies, self._options.append_max_bytes):
            if self._collected and self._bytes + size > self._options.append_max_bytes:
                self._send()
            first = self._numbers[0] if self._collected else int(rows.numbers[start])
            self._numbers = first, int(rows.numbers[stop - 1])
            self._collected.append(rows.bodies.slice(start, stop - start))
            self._bytes += size

    def finish(self) -> list[Part]:
        """Send the remaining bodies and return the parts once all are committed."""
        if self._collected:
            self._send()
        while self._in_flight:
            self._take()
        return self._parts

    def cancel(self) -> None:
        """Cancel the appends in flight; after ``finish`` there are none.

        A task that failed must not keep sending. The parts it appended stay orphaned, because its message is lost.
        """
        for append in self._in_flight:
            self._client.call(_cancelled(append.task))
        self._in_flight.clear()

    def _send(self) -> None:
        bodies = pa.concat_arrays(self._collected) if len(self._collected) > 1 else self._collected[0]
        size, self._collected, self._bytes = self._bytes, [], 0
        while self._in_flight and self._in_flight_bytes + size > _IN_FLIGHT_BYTES:
            self._take()
        work = self._client.in_loop.append_attempt(bodies, transaction=self._transaction, attempt=self._attempt)
        # An event loop starts tasks in the order of their creation, so the requests leave in this order.
        self._in_flight.append(_Append(self._client.call(_started(work)), bodies, size, self._numbers))
        self._in_flight_bytes += size

    def _take(self) -> None:
        """Await the oldest append in flight and record its part."""
        append = self._in_flight.popleft()
        self._in_flight_bytes -= append.size
        assert self._in_flight_bytes >= 0
        result = self._result_of(append)
        overtaken = not self._follows(result)
        if overtaken:
            result = self._client.append_attempt(append.bodies, transaction=self._transaction, attempt=self._attempt)
        # Readers return the parts in log order, which must be the order of the task.
        assert self._follows(result), "a repeated append is after all earlier ones"
        assert result.rows == len(append.bodies)
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


def _chunks(bodies: pa.Array, most: int) -> Iterator[tuple[int, int, int]]:
    """Yield (start, stop, bytes of their records): chunks of at most ``most`` bytes, or of one body."""
    offsets = np.frombuffer(bodies.buffers()[1], np.int64, len(bodies) + 1, bodies.offset * 8)
    ends = offsets[1:] - offsets[0] + HEADER_BYTES * np.arange(1, len(bodies) + 1)
    start, before = 0, 0
    while start < len(bodies):
        stop = max(start + 1, int(np.searchsorted(ends, before + most, side="right")))
        yield start, stop, int(ends[stop - 1]) - before
        start, before = stop, int(ends[stop - 1])


@dataclass(frozen=True, slots=True)
class _Append:
    """An append in flight; ``numbers`` are those of its first and last row."""

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


def check_target(options: DLedgerOptions, group: str | None, *, started: bool | None) -> None:
    """Check that the servers respond and host the group (None: rows name it).

    Args:
        options: the options of the write.
        group: the target.
        started: whether the query has written before. Then nothing is checked, because its tasks may wait for servers
            that restart. None if unknown.

    Raises:
        OptionError: no node hosts the group.
        UnreachableError: no node answers.
    """
    if started:
        return
    try:
        hosted = client_for(options, group or "default", planning=started is False).groups()
    except UnreachableError as error:
        remedy = error.remedy or "start the nodes, or correct the option peers"
        raise UnreachableError(error.what, options.peers, remedy) from None
    if group is not None and group not in hosted:
        remedy = f"the nodes host {', '.join(sorted(hosted))}"
        raise OptionError(f"no node hosts the group {group!r}", options.peers, remedy)


def commit_attempts(
    messages: Sequence[WriterCommitMessage | None], options: DLedgerOptions, input_id: str = ""
) -> None:
    """Commit the transaction in every group that the winning attempts wrote to. Idempotent.

    Args:
        messages: of the winning attempts.
        options: the options of the write.
        input_id: digest of the input of the micro-batch, empty if unknown.

    Raises:
        FencedError: a newer run, or another query with the same id, writes.
        TransactionError: the transaction was aborted meanwhile.
    """
    found = [message for message in messages if isinstance(message, AttemptMessage)]
    before: dict[str, list[CommittedBefore]] = {}
    parts: dict[str, list[Part]] = {}
    for message in found:
        for group, committed in message.committed.items():
            before.setdefault(group, []).append(committed)
        for group, ranges in message.parts.items():
            parts.setdefault(group, []).extend(ranges)
    for group, reports in before.items():
        _check_replay(found[0].transaction, group, reports, input_id)
    # A group in which one attempt found the transaction committed needs no second commit; parts that another attempt
    # appended there before are orphaned.
    logs = {group: log for message in found for group, log in message.logs.items()}
    pending = {group: sorted(ranges) for group, ranges in sorted(parts.items()) if ranges and group not in before}
    if len(pending) > 1:
        _check_open(found[0].transaction, pending, logs, options)
    done: list[str] = []
    for group, ranges in pending.items():
        try:
            client = client_for(options, group, log=logs.get(group))
            client.commit_transaction(found[0].transaction, ranges, input_id)
        except DLedgerError as error:
            raise _with_committed_groups(error, group, done) from None
        done.append(group)


def _check_replay(transaction: TransactionId, group: str, reports: list[CommittedBefore], input_id: str) -> None:
    """Raise if the committed micro-batch belongs to another query with the same id.

    Without both digests only a newer committed micro-batch proves another query, because Spark never goes back.
    """
    known = reports[0]
    same = known.input_id == input_id if known.input_id and input_id else known.newest <= transaction.batch_id
    if not same:
        raise FencedError(
            f"micro-batch {transaction.batch_id} of query {transaction.query_id} was committed with other input",
            f"group {group!r}",
            "two queries have one id: a checkpoint was copied, or restored from a backup; stop the other query, or "
            "start this one with a new checkpoint",
            {"newest": known.newest},
        )
    rows = sum(report.skipped for report in reports)
    if rows != known.rows:
        _log.warning(
            "replay of a non-deterministic query, its first rows stay: group=%s batch_id=%d committed_rows=%d rows=%d",
            *(group, transaction.batch_id, known.rows, rows),
        )


def _check_open(
    transaction: TransactionId, groups: Iterable[str], logs: Mapping[str, str | None], options: DLedgerOptions
) -> None:
    """Ask every group before the first commit: an aborted transaction must be found while no row is visible."""
    for group in groups:
        state = client_for(options, group, log=logs.get(group)).transaction(transaction).state
        if state not in ("open", "committed"):
            raise TransactionError(
                f"the transaction is {state}: it was open for longer than the transaction timeout of the servers",
                f"group {group!r}",
                "write again in smaller batches, or raise transaction-timeout-ms of the servers; no row is visible",
            )


def _with_committed_groups(error: DLedgerError, group: str, done: list[str]) -> DLedgerError:
    """Return the error with the groups that are already committed."""
    where = f"group {group!r}" + (f"; already visible in {', '.join(done)}" if done else "")
    return type(error)(error.what, where, error.remedy, error.values)


def abort_attempts(
    messages: Sequence[WriterCommitMessage | None],
    options: DLedgerOptions,
    group: str | None,
    transaction: TransactionId | None = None,
) -> None:
    """Abort the transaction in every group, so that readers need not wait for the leader's timeout.

    This is a hint: committed transactions stay, and so do those of a newer run. It raises nothing, because the error
    that led here is the one to show.

    Args:
        messages: of finished tasks.
        options: the options of the write.
        group: the target; None = rows name it, so it may be any.
        transaction: the transaction; None = that of a message. Without either, nothing is done.
    """
    known = [message.transaction for message in messages if isinstance(message, AttemptMessage)]
    if transaction is None and not known:
        return
    options = options.model_copy(update={"fetch_retry_ms": min(_ABORT_MS, options.fetch_retry_ms)})
    try:
        for name in [group] if group is not None else client_for(options, "default").groups():
            with contextlib.suppress(FencedError):  # a newer run owns the query
                client_for(options, name).abort_transaction(transaction or known[0])
    except DLedgerError as error:
        _log.warning("abort failed, the leader aborts the transaction after its timeout: error=%s", error)

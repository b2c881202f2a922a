"""The transaction of a micro-batch: task attempts append its parts, the driver commits those of the winning attempts.

Spark guarantees neither row order nor chunk boundaries between attempts of a task, so appends cannot be deduplicated by
content or sequence. Instead each attempt appends under its own uuid and reports its index ranges to the driver, whose
commit lists the ranges of the winning attempts. So an append with an unknown outcome is repeated: ranges that are not
listed are orphaned, and read_committed skips them.

A micro-batch that an earlier run of the query has committed is replayed without writing. It must be the same
micro-batch: two queries with one id (from a copied checkpoint, or one restored from an old backup) would otherwise drop
each other's rows. So the log remembers the fingerprint of the committed rows, and a replay compares its own with it.
For the same reason a query that no group knows must start at micro-batch 0.

``df.write`` with ``txnAppId`` and ``txnVersion`` is such a micro-batch too: the application is the query, the version
its number, which may start anywhere, and a version below the newest committed one is skipped, as Delta does.

A transaction is atomic in one group, not across groups: no coordinator spans them. A replay commits the remaining
groups, so all groups are checked before the first commit.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
import uuid
from collections import deque
from collections.abc import Coroutine, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Final, TypeVar

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import WriterCommitMessage
from pyspark.taskcontext import TaskContext

from dledger_core import (
    AttemptResult,
    BadRequestError,
    Client,
    DLedgerError,
    FencedError,
    Part,
    TransactionError,
    TransactionId,
    TransactionState,
    UnreachableError,
)
from dledger_core.client import fingerprint_of, fingerprint_sum
from dledger_core.record import HEADER_BYTES
from spark_connector.connections import announced, client_for, hosted_groups
from spark_connector.errors import OptionError, SchemaError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.rows import GroupRows, SinkShape, rows_by_group

__all__ = [
    "AttemptMessage",
    "CommittedBefore",
    "abort_attempts",
    "begin_query",
    "check_target",
    "commit_attempts",
    "write_attempt",
]

_log = logging.getLogger("spark_connector")
_IN_FLIGHT_BYTES: Final = 8 << 20
# Spark reports the error of a query after its abort, so an unreachable node may delay that by seconds only.
_ABORT_MS: Final = 5_000
_ABORTS_AT_ONCE: Final = 16
_ABORTS_S: Final = 20.0
"""Of all groups together: a driver that fails must not wait for each of thousands of groups."""
_LATE_S: Final = 2.5
"""Spark ends the Python worker of a cancelled task after two seconds (``spark.python.task.killTimeout``)."""
RENEW_S: Final = 60.0
"""Well below the servers' transaction timeout (15 minutes by default)."""
_T = TypeVar("_T")


@dataclass
class CommittedBefore:
    """A group whose transaction an attempt found committed, so that it wrote nothing.

    Attributes:
        rows: number of rows that the log has of the micro-batch.
        fingerprint: of those rows.
        skipped: number of rows that this attempt had for the group.
        skipped_fingerprint: of its rows.
        newest: a later micro-batch that is committed, if the log does not remember the content of this one; else -1.
    """

    rows: int
    fingerprint: int
    skipped: int = 0
    skipped_fingerprint: int = 0
    newest: int = -1


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
    batches: Iterable[pa.RecordBatch],
    shape: SinkShape,
    options: DLedgerOptions,
    transaction: TransactionId,
    *,
    once: bool = False,
) -> AttemptMessage:
    """Append a task's rows and returns the message for the driver; runs on executors.

    Args:
        batches: the rows.
        shape: their columns.
        options: the options of the write.
        transaction: the transaction of the micro-batch.
        once: whether the query id is used for this transaction only.

    Raises:
        SchemaError: a row that cannot be written.
        FencedError: a newer run of the query writes.
        QueryUnknownError: no group knows the query, and it does not start at micro-batch 0.
        DLedgerError: the servers rejected an append, or did not respond within ``fetchRetryMs``.
    """
    attempt, first_row = _Attempt(options, transaction, once=once), 0
    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    try:
        # Before the first row: another task may have appended already, and while this one computes its rows only a
        # renewal keeps the transaction open (test_running_task_renews_its_transaction).
        attempt.renew(shape.group)
        for batch in batches:
            for rows in rows_by_group(batch, shape, first_row, partition):
                if len(rows.bodies):
                    attempt.write(rows)
            first_row += batch.num_rows
        return attempt.finish()
    finally:
        # Also after an error: an append of a failed attempt would run on in the worker, which Spark uses for other
        # tasks (test_failed_attempt_leaves_no_request_in_flight_and_can_be_aborted).
        attempt.cancel()


class _Attempt:
    """The writers of one attempt, one per group.

    A group has either a writer or a committed transaction, never both: an attempt that found its transaction committed
    must append nothing more there. A transaction that is committed while the attempt writes fails it. Either a
    duplicate of the task has won, or Spark runs the task again, which then compares all its rows.
    """

    def __init__(self, options: DLedgerOptions, transaction: TransactionId, *, once: bool) -> None:
        self._options = options
        self._one_time = once
        # New for each attempt: Spark may run a task again with its rows in another order and in other chunks, so the
        # parts of two attempts are never interchangeable
        # (test_shuffled_task_retry_and_replayed_batch_write_each_row_once).
        self._uuid = str(uuid.uuid4())
        self._writers: dict[str, _GroupWriter] = {}
        self._renewals: dict[str, asyncio.Task[None]] = {}
        self._elsewhere: int | None = None
        self._message = AttemptMessage(transaction)

    def write(self, rows: GroupRows) -> None:
        """Append rows, unless the transaction of their group is committed.

        The state is asked once per group, before the first append: a replayed micro-batch must not write again.
        """
        group = rows.group
        if group not in self._writers and group not in self._message.committed:
            self._begin(group)
        if group in self._writers:
            self._writers[group].add(rows)
        else:
            before = self._message.committed[group]
            before.skipped += len(rows.bodies)
            prints = before.skipped_fingerprint, fingerprint_of(rows.bodies)
            before.skipped_fingerprint = fingerprint_sum(prints)

    def finish(self) -> AttemptMessage:
        """Send the remaining rows and return the message once all appends are committed."""
        for group, writer in self._writers.items():
            self._message.parts[group] = writer.finish()
            # The commit names the log that has the parts. If the group was created again meanwhile, the nodes refuse
            # the commit with OTHER_LOG: the new log does not contain the rows.
            self._message.logs[group] = self._client(group).log_uuid
        return self._message

    def renew(self, group: str | None) -> None:
        """Keep the transaction of a group active while this task runs, also between appends; None = of no group."""
        if group is not None and group not in self._renewals:
            client, transaction = self._client(group), self._message.transaction
            self._renewals[group] = client.call(_started(_renewing(client, transaction)))

    def cancel(self) -> None:
        """Stop all that is in flight; after ``finish`` there are no appends."""
        for writer in self._writers.values():
            writer.cancel()
        for group, renewal in self._renewals.items():
            self._client(group).call(_cancelled(renewal))

    def _begin(self, group: str) -> None:
        """Make the writer of a group, or record that its transaction is committed.

        Raises:
            FencedError: a newer run of the query has fenced this one.
        """
        client, transaction = self._client(group), self._message.transaction
        # A node answers this question with FENCED to a run that a newer one has retired. Otherwise the older run would
        # find the rows of the newer one committed and report them as its own
        # (test_older_of_two_drivers_on_one_checkpoint_is_fenced).
        found = client.transaction(transaction)
        # Spark runs a micro-batch again if its entry in the commit log is missing, and expects that the sink recognizes
        # it. Without this check the replay would be refused, and the query could never continue
        # (test_shuffled_task_retry_and_replayed_batch_write_each_row_once, test_driver_that_dies).
        if found.state == "committed":
            self._message.committed[group] = CommittedBefore(found.rows, found.fingerprint)
            return
        # A query that is new here but not at its first micro-batch comes from a restored checkpoint, or writes to
        # another cluster than before. If it were admitted, its earlier rows would be missing there, without an error
        # (test_query_meets_group_for_first_time_at_later_micro_batch).
        is_new = transaction.batch_id > 0 and found.newest < 0
        if self._options.txn_app_id is not None:
            # An application that starts again after a crash repeats its older versions. Their rows are in the log, so
            # an error here would stop it permanently (Delta's rule for txnVersion;
            # test_version_of_application_is_written_once).
            if transaction.batch_id < found.newest:
                self._message.committed[group] = CommittedBefore(0, 0, newest=found.newest)
                return
            elsewhere = 0 if is_new else -1  # a new application may start at any version
        else:
            # Only a group that does not know the query asks what the others know of it.
            elsewhere = self._newest_elsewhere(group) if is_new else -1
        self._writers[group] = _GroupWriter(
            client, self._options, transaction, self._uuid, once=self._one_time, elsewhere=elsewhere
        )
        self.renew(group)

    def _newest_elsewhere(self, group: str) -> int:
        """Return the newest micro-batch of the query that any group of the nodes has committed, -1 if there is none.

        The option ``firstBatchId`` names the one at which a query may start that no group knows.
        """
        if self._elsewhere is None:
            transaction = self._message.transaction
            others = [self._client(name) for name in self._client(group).groups()]
            newest = [client.transaction(transaction).newest for client in others]
            starts_here = self._options.first_batch_id == transaction.batch_id
            self._elsewhere = max([*newest, transaction.batch_id - 1 if starts_here else -1])
        return self._elsewhere

    def _client(self, group: str) -> Client:
        transaction = self._message.transaction
        return client_for(self._options, group, run=transaction.run_id or transaction.query_id)


class _GroupWriter:
    """Collects a group's bodies into appends of about ``appendMaxBytes`` and sends them in order.

    Up to ``_IN_FLIGHT_BYTES`` are in flight, because one append at a time would wait a round trip each. The log must
    contain the rows in the order of the task. Appends are sent in order, but after a retry a later append may come
    first in the log. Then all appends from there on are repeated one by one; their first copies are not listed and so
    they are orphaned.
    """

    def __init__(
        self,
        client: Client,
        options: DLedgerOptions,
        transaction: TransactionId,
        attempt: str,
        *,
        once: bool,
        elsewhere: int,
    ) -> None:
        self._client = client
        self._options = options
        self._about: dict[str, Any] = {"transaction": transaction, "attempt": attempt}
        self._about |= {"once": once, "elsewhere": elsewhere}
        self._collected: list[pa.Array] = []
        self._numbers: tuple[int, int] = (0, 0)
        self._bytes = 0
        self._in_flight: deque[_Append] = deque()
        self._in_flight_bytes = 0
        self._parts: list[Part] = []

    def add(self, rows: GroupRows) -> None:
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
        # The client repeats an append with an unknown outcome, without a sequence number: the commit lists the range of
        # one copy, and any other copy is orphaned (test_failover_in_middle_of_task).
        work = self._client.in_loop.append_attempt(bodies, **self._about)
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
            result = self._client.append_attempt(append.bodies, **self._about)
        # Readers return the parts in log order, which must be the order of the task.
        assert self._follows(result), "a repeated append is after all earlier ones"
        assert result.rows == len(append.bodies)
        self._parts.append(Part(result.first_index, result.last_index, result.rows, result.crc))
        # The repeated append is now last in the log, so it has overtaken all that are in flight. New appends have to
        # wait: each one sent before these are repeated would have to be repeated too.
        while overtaken and self._in_flight:
            self._take()

    def _follows(self, result: AttemptResult) -> bool:
        # Readers return parts in log order. Without this comparison they would return the rows of a late append after
        # rows that it precedes in the task (test_rows_keep_order_when_append_is_overtaken).
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
        # searchsorted returns `start` for a body above the limit. An append takes such a body alone; without the
        # maximum the loop would not end.
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


async def _renewing(client: Client, transaction: TransactionId) -> None:
    """Ask for the transaction's state periodically, which counts as its activity; errors are those of the appends."""
    while True:
        await asyncio.sleep(RENEW_S)
        with contextlib.suppress(DLedgerError):
            await client.in_loop.transaction(transaction)


async def _started(work: Coroutine[Any, Any, _T]) -> asyncio.Task[_T]:
    return asyncio.ensure_future(work)


async def _result(task: asyncio.Task[AttemptResult]) -> AttemptResult:
    return await task


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    # `cancel` only requests the end of the task. The caller may report the failure as soon as this returns, and Spark
    # aborts then: no append may leave after that (test_failed_attempt_leaves_no_request_in_flight_and_can_be_aborted).
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
    # The nodes may restart at the same time as the query. Its tasks wait for them; a check within seconds would fail
    # the query instead (test_unreachable_servers_fail_query_and_not_abort).
    if started:
        return
    try:
        with announced(options):
            hosted = hosted_groups(options, group or "default")
    except UnreachableError as error:
        remedy = error.remedy or "start the nodes, or correct the option peers"
        raise UnreachableError(error.what, options.peers, remedy) from None
    if group is not None and group not in hosted:
        remedy = f"the nodes host {', '.join(sorted(hosted))}"
        raise OptionError(f"no node hosts the group {group!r}", options.peers, remedy)


def commit_attempts(messages: Sequence[WriterCommitMessage | None], options: DLedgerOptions) -> bool:
    """Commit the transaction in every group that the winning attempts wrote to. Idempotent.

    Args:
        messages: of the winning attempts.
        options: the options of the write.

    Returns:
        Whether any group has rows of the micro-batch.

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
    # Without this comparison the sink would drop the rows of a copied checkpoint silently
    # (test_copied_checkpoint_loses_no_rows_wherever_it_is). It covers all tasks together, because a replay may divide
    # the rows in another way (test_replay_with_same_content_is_skipped_however_it_is_divided), and precedes the first
    # commit, because after it rows are visible.
    for group, reports in before.items():
        _check_replay(found[0].transaction, group, reports, options)
    # A group in which one attempt found the transaction committed needs no second commit; parts that another attempt
    # appended there before are orphaned.
    logs = {group: log for message in found for group, log in message.logs.items()}
    pending = {group: sorted(ranges) for group, ranges in sorted(parts.items()) if ranges and group not in before}
    # Without this check a group that comes first would show its rows although another one cannot commit
    # (test_several_groups_commit_only_if_all_can). A single group needs no question: its commit is atomic.
    if len(pending) > 1:
        _check_open(found[0].transaction, pending, logs, options)
    done: list[str] = []
    for group, ranges in pending.items():
        try:
            client_for(options, group, log=logs.get(group)).commit_transaction(found[0].transaction, ranges)
        except DLedgerError as error:
            raise _with_committed_groups(error, group, done) from None
        done.append(group)
    return bool(before or done)


def begin_query(messages: Sequence[WriterCommitMessage | None], options: DLedgerOptions, group: str | None) -> None:
    """Make a query known to a log whose first micro-batch has no rows: the next ones could not start there.

    Args:
        messages: of its tasks.
        options: the options of the write.
        group: the target; None = rows name it, and any group may keep the query.
    """
    transaction = next((message.transaction for message in messages if isinstance(message, AttemptMessage)), None)
    if transaction is not None:
        # One group is enough: a task that writes to another group later asks all groups. The first micro-batch of a
        # query that reads this source is always empty (test_query_whose_first_micro_batch_is_empty_is_known).
        hosted = hosted_groups(options, group or "default")
        name = group or min(hosted)
        client_for(options, name, log=hosted.get(name)).commit_transaction(transaction, [])


def _check_replay(
    transaction: TransactionId, group: str, reports: list[CommittedBefore], options: DLedgerOptions
) -> None:
    """Raise if the committed micro-batch has other rows: those of another query, or rows that are not deterministic.

    Their order and places may differ, their number and content may not.
    """
    committed, newest = (reports[0].rows, reports[0].fingerprint), max(report.newest for report in reports)
    rows = sum(report.skipped for report in reports)
    if newest >= 0:
        _log.warning(
            "txnVersion is older than the newest committed one, its rows are skipped: group=%s version=%d newest=%d "
            "rows=%d",
            *(group, transaction.batch_id, newest, rows),
        )
        return
    # Count and content: a copied checkpoint often has the same number of rows. A sum of hashes, because Spark
    # guarantees no order (test_replay_with_other_content_is_an_error_or_skipped_by_option).
    if committed == (rows, fingerprint_sum(report.skipped_fingerprint for report in reports)):
        return
    # Rows made with rand() or current_timestamp() differ in each execution, and only the user can distinguish them from
    # the rows of another query (test_replay_with_other_content_is_an_error_or_skipped_by_option).
    if options.on_replay_mismatch == "skip":
        _log.warning(
            "replay has other rows, the committed ones stay: group=%s batch_id=%d committed_rows=%d rows=%d",
            *(group, transaction.batch_id, committed[0], rows),
        )
        return
    if options.txn_app_id is None:
        what = f"micro-batch {transaction.batch_id} of query {transaction.query_id} was committed with other rows"
        cause = (
            "two queries have one id (a checkpoint was copied, or restored from a backup): stop the other query, or "
            "start this one with a new checkpoint"
        )
    else:
        what = f"txnVersion {options.txn_version} of txnAppId {options.txn_app_id!r} was committed with other rows"
        cause = "another application has this txnAppId, or its versions have started again: use a new txnAppId"
    raise FencedError(
        what,
        f"group {group!r}",
        f"{cause}. If its rows differ each time they are computed, set onReplayMismatch=skip",
        {"committed_rows": committed[0], "rows": rows},
    )


def _check_open(
    transaction: TransactionId, groups: Iterable[str], logs: Mapping[str, str | None], options: DLedgerOptions
) -> None:
    """Ask every group before the first commit: an aborted transaction must be found while no row is visible."""
    for group in groups:
        state = client_for(options, group, log=logs.get(group)).transaction(transaction).state
        # `committed` passes: this commit may be a repeat, and the log compares its parts with the committed ones
        # (test_commit_shows_winners_and_orphans_all_other_attempts).
        if state not in ("open", "committed"):
            raise TransactionError(
                f"the transaction is {state}: it was aborted, or inactive for longer than the servers' timeout",
                f"group {group!r}",
                "write again, or raise transaction-timeout-ms of the servers; no row is visible",
            )


def _with_committed_groups(error: DLedgerError, group: str, done: list[str]) -> DLedgerError:
    """Return the error with the groups that are already committed."""
    where = f"group {group!r}" + (f"; already visible in {', '.join(done)}" if done else "")
    # df.write is not replayed, so its user has to know in which groups the rows are visible.
    remedy = error.remedy
    if error.outcome_unknown:
        remedy = (
            "a restarted query writes nothing twice; before another df.write, read the group: its rows may be there"
        )
    return type(error)(error.what, where, remedy, error.values)


def abort_attempts(
    options: DLedgerOptions, group: str | None, transaction: TransactionId, *, once: bool = False
) -> None:
    """Abort the transaction in every group that the write may target, so that readers need not wait for the timeout.

    It is final for the run: a task that appends later is refused, also in a group to which none has appended before.
    Committed transactions stay, and so do those of a newer run. It raises nothing, because the error that led here is
    the one to show.

    Args:
        options: the options of the write.
        group: the target; None = rows name it, so it may be any.
        transaction: the transaction; without a query id its batch id and the start of its run id name it. Then a group
            knows it only by an append of the run, so the abort is repeated until late tasks have ended.
        once: whether the query id is used for this transaction only.
    """
    options = options.model_copy(update={"fetch_retry_ms": min(_ABORT_MS, options.fetch_retry_ms)})
    deadline = time.monotonic() + _ABORTS_S

    def abort_in(name: str) -> TransactionState | DLedgerError | None:
        try:
            if time.monotonic() > deadline:
                raise UnreachableError(f"the abort was given up after {_ABORTS_S:.0f} s")
            return client_for(options, name).abort_transaction(transaction, once=once)
        # The transaction of a newer run must stay open: this driver may be one that was replaced and ends late
        # (test_abort_of_stopped_query_unblocks_readers_and_replay).
        except FencedError:  # a newer run owns the query
            return None
        except DLedgerError as error:
            return error

    try:
        # No message of a failed task says which groups it has appended to. A group that is left out would hold back its
        # readers (test_abort_is_final_in_all_groups_after_leader_change).
        names = [group] if group is not None else list(hosted_groups(options))
    except DLedgerError as error:
        _warn_of_open([], transaction, options, error)
        return
    late_end = time.monotonic() + _LATE_S
    with ThreadPoolExecutor(_ABORTS_AT_ONCE) as pool:
        while names:
            found = dict(zip(names, pool.map(abort_in, names), strict=True))
            failed = {name: error for name, error in found.items() if isinstance(error, DLedgerError)}
            if failed:
                _warn_of_open(list(failed), transaction, options, next(iter(failed.values())))
            names = [
                name
                for name, state in found.items()
                if isinstance(state, TransactionState) and state.state == "unknown"
            ]
            # With the id of the query the abort refuses every later append of the run. Without it a node finds the
            # query by an append only, and tasks append until Spark has ended their workers
            # (test_abort_without_query_id_waits_for_a_late_task, test_failed_stream_does_not_block_readers).
            if transaction.query_id or time.monotonic() > late_end:
                return
            time.sleep(_LATE_S / 10)


def _warn_of_open(
    groups: Sequence[str], transaction: TransactionId, options: DLedgerOptions, error: DLedgerError
) -> None:
    """Log that readers wait, and the command that ends it."""
    query, group = transaction.query_id or "QUERY_ID", groups[0] if groups else "GROUP"
    _log.warning(
        "abort failed, so readers with read_committed may wait until the leader's timeout (15 minutes by default): "
        "groups=%s error=%s\nwhen the nodes respond, end it at once in each group%s:\n"
        "    dledger transaction abort %s --group %s --peers '%s'",
        ",".join(groups) or "unknown",
        error,
        "" if transaction.query_id else " (dledger transaction list shows the query)",
        *(query, group, options.peers),
    )

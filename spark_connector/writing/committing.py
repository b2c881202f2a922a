"""The driver's part in the transaction of the sink: checks before the tasks start, commit, abort.

A micro-batch that an earlier run of the query has committed is replayed without writing. It must be the same
micro-batch: two queries with one id (from a copied checkpoint, or one restored from an old backup) would otherwise drop
each other's rows. Spark's offset log distinguishes them, so the commit records a digest of its entry.

A transaction is atomic in one group, not across groups: no coordinator spans them. A replay commits the remaining
groups, so all groups are checked before the first commit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from typing import Final

from pyspark.sql.datasource import WriterCommitMessage

from dledger_core import DLedgerError, FencedError, Part, TransactionError, TransactionId, UnreachableError
from spark_connector.connections import client_for
from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.attempts import AttemptMessage, CommittedBefore

__all__ = ["abort_attempts", "check_target", "commit_attempts"]

_log = logging.getLogger("spark_connector")
_ABORT_MS: Final = 5_000


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
    pending = {group: sorted(ranges) for group, ranges in sorted(parts.items()) if ranges and group not in before}
    if len(pending) > 1:
        _check_open(found[0].transaction, pending, options)
    done: list[str] = []
    for group, ranges in pending.items():
        try:
            client_for(options, group).commit_transaction(found[0].transaction, ranges, input_id)
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


def _check_open(transaction: TransactionId, parts: dict[str, list[Part]], options: DLedgerOptions) -> None:
    """Ask every group before the first commit: an aborted transaction must be found while no row is visible."""
    for group in parts:
        state = client_for(options, group).transaction(transaction).state
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

"""The driver's part in the sink's transaction: checks before the tasks start, commit, abort.

A micro-batch that an earlier run of the query has committed is replayed without writing anything. It must be the same
micro-batch: two queries with one id (a checkpoint that was copied, or restored from an old copy) would otherwise drop
each other's rows. Spark's offset log tells them apart, so its digest is kept with the commit.
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
        started: the query has written before, so nothing is checked: its tasks wait for servers that restart. None if
            that is unknown.

    Raises:
        OptionError: no node hosts the group.
        UnreachableError: no node answers.
    """
    if started:
        return
    try:
        hosted = client_for(options, group or "default", planning=started is False).groups()
    except UnreachableError as error:
        where = f"option 'peers' = {options.peers!r}"
        raise UnreachableError(error.what, where, error.remedy or "start the nodes, or correct the option") from None
    if group is not None and group not in hosted:
        remedy = f"the nodes host {', '.join(sorted(hosted))}"
        raise OptionError(f"no node hosts the group {group!r}", "group", remedy)


def commit_attempts(
    messages: Sequence[WriterCommitMessage | None], options: DLedgerOptions, input_id: str = ""
) -> None:
    """Commits the transaction in every group that the winning attempts wrote to; repeatable.

    Args:
        messages: of the winning attempts.
        options: the options of the write.
        input_id: what the micro-batch was made of, if that is known.

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
    pending = {group: sorted(ranges) for group, ranges in sorted(parts.items()) if ranges and group not in before}
    if len(pending) > 1:
        _check_open(found[0].transaction, pending, options)
    done: list[str] = []
    for group, ranges in pending.items():
        try:
            client_for(options, group).commit_transaction(found[0].transaction, ranges, input_id)
        except DLedgerError as error:
            raise _in_part(error, group, done) from None
        done.append(group)


def _check_replay(transaction: TransactionId, group: str, reports: list[CommittedBefore], input_id: str) -> None:
    """Makes sure that what is committed is this micro-batch, and not one of another query with the same id."""
    known = reports[0]
    same = known.input_id == input_id if known.input_id and input_id else known.newest <= transaction.batch_id
    if not same:
        raise FencedError(
            f"micro-batch {transaction.batch_id} of query {transaction.query_id} was committed with other input",
            f"group {group!r}",
            "two queries have one id: a checkpoint was copied, or restored from an old copy. Stop the other query, or "
            "start this one with a new checkpoint",
            {"newest": known.newest},
        )
    rows = sum(report.skipped for report in reports)
    if rows != known.rows:
        _log.warning(
            "group %s: micro-batch %d was committed before with %d rows, its replay has %d: the query is not "
            "deterministic; the rows committed first stay",
            *(group, transaction.batch_id, known.rows, rows),
        )


def _check_open(transaction: TransactionId, parts: dict[str, list[Part]], options: DLedgerOptions) -> None:
    """Asks every group before the first one is committed: what cannot be committed is found while nothing is."""
    for group in parts:
        state = client_for(options, group).transaction(transaction).state
        if state not in ("open", "committed"):
            raise TransactionError(
                f"the transaction is {state}: it was open for longer than the servers allow",
                f"group {group!r}",
                "write again, in smaller pieces, or raise the servers' transaction-timeout-ms; nothing is visible",
            )


def _in_part(error: DLedgerError, group: str, done: list[str]) -> DLedgerError:
    """Returns the error with the groups in which the rows are visible nevertheless."""
    where = f"group {group!r}" + (f"; already visible in {', '.join(done)}" if done else "")
    return type(error)(error.what, where, error.remedy, error.values)


def abort_attempts(
    messages: Sequence[WriterCommitMessage | None],
    options: DLedgerOptions,
    group: str | None,
    transaction: TransactionId | None = None,
) -> None:
    """Aborts the transaction wherever it is open, so that readers need not wait for the leader's timeout.

    It is a hint: what is committed stays, and so does what a newer run of the query has begun. It raises nothing:
    something else has failed before, and that is what the user should see.

    Args:
        messages: of tasks that finished.
        options: the options of the write.
        group: the target; None = rows named it, so it may be any.
        transaction: the transaction; None = what a message says. Without either nothing is known and nothing done.
    """
    known = [message.transaction for message in messages if isinstance(message, AttemptMessage)]
    if transaction is None and not known:
        return
    options = options.model_copy(update={"fetch_retry_ms": min(_ABORT_MS, options.fetch_retry_ms)})
    try:
        for name in [group] if group is not None else client_for(options, "default").groups():
            with contextlib.suppress(FencedError):  # a newer run has taken over
                client_for(options, name).abort_transaction(transaction or known[0])
    except DLedgerError as error:
        _log.warning("the transaction could not be aborted, its leader will do it after a while: %s", error)

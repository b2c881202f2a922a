"""The batch and the stream sink: ``df.write`` and each micro-batch are one transaction in every group they write to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext

from dledger_core import TransactionId
from spark_connector.errors import OptionError, brief
from spark_connector.offsets import has_committed
from spark_connector.options import DLedgerOptions
from spark_connector.writing.rows import sink_shape
from spark_connector.writing.transactions import (
    AttemptMessage,
    abort_attempts,
    begin_query,
    check_target,
    commit_attempts,
    write_attempt,
)


class DLedgerBatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame completely or not at all; tasks and commit use pickled copies of this object.

    The transaction has an id of its own, so no earlier write can have committed it; with ``txnAppId`` and
    ``txnVersion`` it has theirs. Its run is the write in either case: it makes an abort final for this write alone, and
    with security only an operator may abort a transaction without naming its run.
    """

    def __init__(self, options: DLedgerOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("a log cannot be overwritten", "", "use .mode('append'), in SQL INSERT INTO")
        self._options = options
        self._shape = sink_shape(schema, options)
        # Chosen here, on the driver: every task, the commit and the abort receive a copy of it. An id per task would be
        # a transaction per task, and readers would see a part of a failed write
        # (test_batch_write_is_one_transaction_while_leader_is_killed).
        write_id = f"write-{uuid.uuid4()}"
        self._one_time = options.txn_app_id is None or options.txn_version is None
        if options.txn_app_id is None or options.txn_version is None:
            self._transaction = TransactionId(write_id, 0, write_id)
        else:
            self._transaction = TransactionId(f"txn-{options.txn_app_id}", options.txn_version, write_id)
        # Spark makes the writer when it plans the query, so a wrong name is one error before the first task
        # (test_unknown_target_group_is_rejected_before_query).
        check_target(options, self._shape.group, started=False)

    @brief
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append a task's rows."""
        return write_attempt(iterator, self._shape, self._options, self._transaction, once=self._one_time)

    @brief
    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make all rows visible."""
        commit_attempts(messages, self._options)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort the transaction in every group, unless it is committed."""
        abort_attempts(self._options, self._shape.group, self._transaction, once=self._one_time)


class DLedgerStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches exactly once.

    Spark makes one writer to plan a micro-batch and another one to commit it, so shared data travels in the messages.
    The query id and batch id identify the transaction, which makes the commit of a replay idempotent.

    Args:
        options: the options of the write.
        schema: the columns.
        overwrite: rejected.
        label: names the query, for an abort that knows neither its id nor its run.
        checkpoint: the checkpoint location of the query, if set as an option.
    """

    def __init__(
        self, options: DLedgerOptions, schema: StructType, overwrite: bool, label: str, checkpoint: str = ""
    ) -> None:
        if overwrite:
            raise OptionError("a log cannot be overwritten", "", "use outputMode('append')")
        self._options = options
        self._shape = sink_shape(schema, options)
        self._label = label
        check_target(options, self._shape.group, started=has_committed(checkpoint))

    @brief
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append a task's rows; writes nothing if the micro-batch was committed before."""
        return write_attempt(iterator, self._shape, self._options, _transaction_of_task(self._label))

    @brief
    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Commit the transaction in every group; a repeated call changes nothing."""
        # A first micro-batch without rows leaves nothing in any log. The second one would be refused, because no group
        # knows the query (test_query_whose_first_micro_batch_is_empty_is_known).
        if not commit_attempts(messages, self._options) and batchId == 0:
            begin_query(messages, self._options, self._shape.group)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - as above
        """Abort the rows of finished and failed tasks, unless they are committed or a newer run owns the query.

        Spark calls this when a task failed permanently, when the query is stopped during a micro-batch, and after a
        ``commit`` that raised. If no task has finished, no message names the transaction: then it is the only open one
        of this batch id whose run has this query's label.
        """
        # DataSourceStreamWriter.abort receives no query id, and messages of finished tasks only
        # (test_failed_stream_does_not_block_readers).
        named = next((message.transaction for message in messages if isinstance(message, AttemptMessage)), None)
        transaction = named or TransactionId("", batchId, f"{self._label}/")
        abort_attempts(self._options, self._shape.group, transaction)


def _transaction_of_task(label: str) -> TransactionId:
    """Return the transaction of the micro-batch that the current task belongs to.

    The run id is its fence token: a new run of the query fences tasks of the old one that still append.
    """
    context = TaskContext.get()
    assert context is not None
    # Spark passes neither id to DataSourceStreamWriter.write. Both are local properties of the job that executes a
    # micro-batch, and the group of this job is the id of the run. A restart has a new run and fences tasks of the
    # earlier one (test_older_of_two_drivers_is_fenced_and_each_row_arrives_once).
    query_id = context.getLocalProperty("sql.streaming.queryId")
    batch_id = context.getLocalProperty("streaming.sql.batchId")
    assert query_id is not None
    assert batch_id is not None
    return TransactionId(query_id, int(batch_id), f"{label}/{context.getLocalProperty('spark.jobGroup.id') or ''}")

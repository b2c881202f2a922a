"""The batch and the stream sink: ``df.write`` and each micro-batch are one transaction in every group they write to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext

from dledger_core import TransactionId
from spark_connector.errors import OptionError
from spark_connector.offsets import has_committed
from spark_connector.options import DLedgerOptions
from spark_connector.writing.rows import sink_shape
from spark_connector.writing.transactions import (
    abort_attempts,
    begin_query,
    check_target,
    commit_attempts,
    write_attempt,
)


class DLedgerBatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame completely or not at all; tasks and commit use pickled copies of this object.

    The transaction has an id of its own, so no earlier write can have committed it.
    """

    def __init__(self, options: DLedgerOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("a log cannot be overwritten", "", "use .mode('append')")
        self._options = options
        self._shape = sink_shape(schema, options)
        self._transaction = TransactionId(f"write-{uuid.uuid4()}", 0, "")
        check_target(options, self._shape.group, started=False)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append a task's rows."""
        return write_attempt(iterator, self._shape, self._options, self._transaction, once=True)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Make all rows visible."""
        commit_attempts(messages, self._options)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Abort the transaction in every group, unless it is committed."""
        abort_attempts(self._options, self._shape.group, self._transaction)


class DLedgerStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches exactly once.

    Spark makes one writer to plan a micro-batch and another one to commit it, so shared data travels in the messages.
    The query id and batch id identify the transaction, which makes the commit of a replay idempotent.

    Args:
        options: the options of the write.
        schema: the columns.
        overwrite: rejected.
        run_id: names this run of the query: it fences tasks of older runs that still append.
        checkpoint: the checkpoint location of the query, if set as an option.
    """

    def __init__(
        self, options: DLedgerOptions, schema: StructType, overwrite: bool, run_id: str, checkpoint: str = ""
    ) -> None:
        if overwrite:
            raise OptionError("a log cannot be overwritten", "", "use outputMode('append')")
        self._options = options
        self._shape = sink_shape(schema, options)
        self._run_id = run_id
        check_target(options, self._shape.group, started=has_committed(checkpoint))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Append a task's rows; writes nothing if the micro-batch was committed before."""
        return write_attempt(iterator, self._shape, self._options, _transaction_of_task(self._run_id))

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Commit the transaction in every group; a repeated call changes nothing."""
        if not commit_attempts(messages, self._options) and batchId == 0:
            begin_query(messages, self._options, self._shape.group)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - as above
        """Abort the rows of finished and failed tasks, unless they are committed or a newer run owns the query.

        Spark calls this when a task failed permanently, when the query is stopped during a micro-batch, and after a
        ``commit`` that raised. No task need have finished: the run and the batch id name the transaction.
        """
        abort_attempts(self._options, self._shape.group, TransactionId("", batchId, self._run_id))


def _transaction_of_task(run_id: str) -> TransactionId:
    """Return the transaction of the micro-batch that the current task belongs to."""
    context = TaskContext.get()
    assert context is not None
    query_id = context.getLocalProperty("sql.streaming.queryId")
    batch_id = context.getLocalProperty("streaming.sql.batchId")
    assert query_id is not None
    assert batch_id is not None
    return TransactionId(query_id, int(batch_id), run_id)

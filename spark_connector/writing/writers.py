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
from spark_connector.options import DLedgerOptions
from spark_connector.spark_checkpoint import has_committed, input_of
from spark_connector.writing.attempts import write_attempt
from spark_connector.writing.committing import abort_attempts, check_target, commit_attempts
from spark_connector.writing.rows import sink_shape


class DLedgerBatchWriter(DataSourceArrowWriter):
    """Writes a DataFrame whole or not at all; the same object, pickled, serves tasks and commit."""

    def __init__(self, options: DLedgerOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("a log cannot be overwritten", "mode", "use .mode('append')")
        self._options = options
        self._shape = sink_shape(schema, options)
        self._transaction = TransactionId(f"write-{uuid.uuid4()}", 0, "")
        check_target(options, self._shape.group, started=False)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Appends a task's rows."""
        return write_attempt(iterator, self._shape, self._options, self._transaction)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Makes all rows visible."""
        commit_attempts(messages, self._options)

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Gives the transaction up wherever it may have begun, unless it is committed."""
        abort_attempts(messages, self._options, self._shape.group, self._transaction)


class DLedgerStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches exactly once.

    Spark makes one writer to plan a micro-batch and another one to commit it; what they share travels in the messages.

    Args:
        options: the options of the write.
        schema: the columns.
        overwrite: Spark's; refused.
        checkpoint: the query's checkpoint location, if it was given as an option.
    """

    def __init__(self, options: DLedgerOptions, schema: StructType, overwrite: bool, checkpoint: str = "") -> None:
        if overwrite:
            raise OptionError("a log cannot be overwritten", "outputMode", "use outputMode('append')")
        self._options = options
        self._shape = sink_shape(schema, options)
        self._checkpoint = checkpoint
        check_target(options, self._shape.group, started=has_committed(checkpoint))

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Appends a task's rows; writes nothing if the micro-batch was committed before."""
        return write_attempt(iterator, self._shape, self._options, _transaction_of_task())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Commits the transaction in every group; a repeated call changes nothing."""
        commit_attempts(messages, self._options, input_of(self._checkpoint, batchId))

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - as above
        """Aborts what finished tasks have written, unless it is committed or a newer run has taken over.

        Spark calls this when a task failed for good, when the query is stopped in the middle, and also after a
        ``commit`` that raised. Only a finished task's message tells which transaction it was. Without one it stays open
        until the query is restarted, or the leader aborts it (15 minutes by default): until then readers with
        ``read_committed`` see the log up to its first entry.
        """
        abort_attempts(messages, self._options, self._shape.group)


def _transaction_of_task() -> TransactionId:
    context = TaskContext.get()
    assert context is not None
    query_id = context.getLocalProperty("sql.streaming.queryId")
    batch_id = context.getLocalProperty("streaming.sql.batchId")
    assert query_id is not None
    assert batch_id is not None
    return TransactionId(query_id, int(batch_id), context.getLocalProperty("spark.jobGroup.id") or "")

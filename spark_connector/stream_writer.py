"""The stream sink: each micro-batch is one transaction in each group it writes to."""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext

from dledger_core.control import TransactionId
from spark_connector.attempts import commit_attempts, write_attempt
from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions
from spark_connector.sink_rows import sink_shape

__all__ = ["DLedgerStreamWriter"]


class DLedgerStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches exactly once.

    Spark makes one writer to plan a micro-batch and another one to commit it; what they share travels in the messages.
    """

    def __init__(self, options: DLedgerOptions, schema: StructType, overwrite: bool) -> None:
        if overwrite:
            raise OptionError("a log cannot be overwritten", "outputMode", "use outputMode('append')")
        self._options = options
        self._shape = sink_shape(schema, options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Appends a task's rows; writes nothing if the micro-batch was committed before."""
        return write_attempt(iterator, self._shape, self._options, _transaction_of_task())

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Commits the transaction in every group; a repeated call changes nothing."""
        commit_attempts(messages, self._options)

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - as above
        """Does nothing, on purpose.

        Spark calls this when a task failed for good, when the query is stopped in the middle, and also after a
        ``commit`` that raised. The leader never aborts what is committed, so rows cannot be lost; but an abort names
        only query and micro-batch, and it may come late from a driver that was replaced: then it would end the
        transaction of the run that replays this micro-batch. Spark gives no ids here either, they are known only if
        some task had finished.

        So an open transaction stays until the replay of its micro-batch, which a restart from the checkpoint begins
        with, commits it, or until the leader aborts it: after 15 minutes by log time, that is, by the append time of
        the group's newest entry, so in a group that nobody writes to it stays open. Until then readers with
        ``read_committed`` see the log up to its first entry, and nothing appended later.
        """


def _transaction_of_task() -> TransactionId:
    context = TaskContext.get()
    assert context is not None
    query_id = context.getLocalProperty("sql.streaming.queryId")
    batch_id = context.getLocalProperty("streaming.sql.batchId")
    assert query_id is not None
    assert batch_id is not None
    return TransactionId(query_id, int(batch_id), context.getLocalProperty("spark.jobGroup.id") or "")

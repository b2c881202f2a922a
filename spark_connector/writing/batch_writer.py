"""The batch sink: ``df.write`` is one transaction in each group it writes to."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from dledger_core import TransactionId
from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.attempts import write_attempt
from spark_connector.writing.committing import abort_attempts, check_target, commit_attempts
from spark_connector.writing.sink_rows import sink_shape

__all__ = ["DLedgerBatchWriter"]


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

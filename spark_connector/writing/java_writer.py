"""The sink into a Java group: at least once, because Java knows neither transactions nor producers.

Rows are visible as they are appended: those of a failed task, and of a micro-batch that is replayed, lie in the log
again. Several entries are under way at once, so their order in the log may differ from that of the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import DataSourceArrowWriter, DataSourceStreamArrowWriter, WriterCommitMessage
from pyspark.sql.types import StructType
from pyspark.taskcontext import TaskContext

from dledger_core.errors import UnknownGroupError
from spark_connector.connections import client_for
from spark_connector.errors import OptionError
from spark_connector.options import DLedgerOptions
from spark_connector.writing.sink_rows import SinkShape, rows_by_group, sink_shape

__all__ = ["JavaBatchWriter", "JavaStreamWriter"]

_log = logging.getLogger("spark_connector")
_ROWS_MAX: Final = 1_000
_BATCH_BYTES_MAX: Final = 7 << 20


@dataclass
class _Appended(WriterCommitMessage):
    """How many rows a task has appended."""

    rows: int = 0


def _shape_of(schema: StructType, options: DLedgerOptions, overwrite: bool) -> SinkShape:
    """Checks the target once before the tasks start."""
    if overwrite:
        raise OptionError("a log cannot be overwritten", "mode", "append to it")
    shape = sink_shape(schema, options)
    if shape.group is not None:
        hosted = client_for(options, shape.group, planning=True).groups()
        if shape.group not in hosted:
            raise OptionError(f"no node serves the group {shape.group!r}", "group", "name the Java group's own name")
    return shape


def _append(batches: Iterator[pa.RecordBatch], shape: SinkShape, options: DLedgerOptions) -> _Appended:
    context = TaskContext.get()
    partition = context.partitionId() if context is not None else 0
    appended, first_row = _Appended(), 0
    for batch in batches:
        for rows in rows_by_group(batch, shape, first_row, partition):
            client = client_for(options, rows.group)
            for bodies in _pieces(rows.bodies):
                try:
                    client.append(bodies)
                except UnknownGroupError as error:
                    raise OptionError(f"no node serves the group {rows.group!r}", "group", str(error)) from None
                appended.rows += len(bodies)
        first_row += batch.num_rows
    return appended


def _pieces(bodies: pa.Array) -> Iterator[pa.Array]:
    """Cuts bodies into what one append takes: few rows, so that an error tells closely how far it came."""
    start = 0
    while start < len(bodies):
        count = min(_ROWS_MAX, len(bodies) - start)
        while count > 1 and bodies.slice(start, count).nbytes > _BATCH_BYTES_MAX:
            count = (count + 1) // 2
        yield bodies.slice(start, count)
        start += count


class JavaBatchWriter(DataSourceArrowWriter):
    """Appends a DataFrame's rows; those of tasks that are tried again twice."""

    def __init__(self, options: DLedgerOptions, schema: StructType, overwrite: bool) -> None:
        self._options = options
        self._shape = _shape_of(schema, options, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Appends a task's rows."""
        return _append(iterator, self._shape, self._options)

    def commit(self, messages: list[WriterCommitMessage | None]) -> None:
        """Does nothing: the rows are visible already."""

    def abort(self, messages: list[WriterCommitMessage | None]) -> None:
        """Says what stays."""
        _say_what_stays(messages)


class JavaStreamWriter(DataSourceStreamArrowWriter):
    """Appends a micro-batch's rows; again when it is replayed."""

    def __init__(self, options: DLedgerOptions, schema: StructType, overwrite: bool) -> None:
        self._options = options
        self._shape = _shape_of(schema, options, overwrite)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Appends a task's rows."""
        return _append(iterator, self._shape, self._options)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - Spark's name
        """Does nothing: the rows are visible already."""

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803 - as above
        """Says what stays."""
        _say_what_stays(messages)


def _say_what_stays(messages: list[WriterCommitMessage | None]) -> None:
    rows = sum(message.rows for message in messages if isinstance(message, _Appended))
    _log.warning("the write failed: %d rows of finished tasks, and some of others, stay in the Java group", rows)

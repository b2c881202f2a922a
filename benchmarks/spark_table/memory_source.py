"""A Python data source that reads rows from memory and drops written ones: the limit of Spark's Python path in the same
run. It has the log's columns and its partitions, and batches of about 4 MiB.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)

from dledger_core.rocketmq import encode_messages
from spark_connector.columns import ddl_of
from spark_connector.messages import MESSAGE_SCHEMA, decoded
from spark_connector.reading.admission import ReadAllAvailable, ReadLimit, SupportsTriggerAvailableNow
from spark_connector.schemas import ENTRY_SCHEMA

BATCH_BYTES = 4 << 20
RECORD_OVERHEAD = 48
ROWS_TO_SPLIT = 10_000
SCHEMA = "group string, index long, term long, position long, timestamp timestamp, body binary"
ARROW = pa.schema(
    [
        ("group", pa.string()),
        ("index", pa.int64()),
        ("term", pa.int64()),
        ("position", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("body", pa.binary()),
    ]
)


def random_bodies(rows: int, size: int) -> pa.Array:
    """Return random bodies as large_binary."""
    offsets = pa.py_buffer(np.arange(rows + 1, dtype=np.int64) * size)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), rows, [None, offsets, pa.py_buffer(os.urandom(rows * size))]
    )


def random_messages(rows: int, size: int) -> pa.Array:
    """Return RocketMQ messages with bodies of ``size`` bytes."""
    keys = pa.array(np.arange(rows)).cast(pa.string())
    return encode_messages(topic=pa.repeat("orders", rows), queue_id=0, keys=keys, body=random_bodies(rows, size))


@cache
def constant_columns(size: int) -> tuple[int, tuple[pa.Array, ...]]:
    """Returns the rows of a batch and what is made only once: group, term, timestamp and four columns of bodies."""
    rows = BATCH_BYTES // (size + RECORD_OVERHEAD)
    bodies = [random_bodies(rows, size).cast(pa.binary()) for _ in range(4)]
    times = pa.array(np.full(rows, 1_700_000_000_000_000)).cast(pa.timestamp("us", tz="UTC"))
    return rows, (pa.repeat("default", rows), pa.array(np.full(rows, 7)), times, *bodies)


def batches(start: int, end: int, size: int) -> Iterator[pa.RecordBatch]:
    """Yields rows [start, end) of bodies of ``size`` bytes."""
    rows, (group, term, times, *bodies) = constant_columns(size)
    for number, at in enumerate(range(start, end, rows)):
        count = min(rows, end - at)
        indexes = np.arange(at, at + count)
        positions = indexes * (size + RECORD_OVERHEAD)
        constant = [column.slice(0, count) for column in (group, term, times, bodies[number % 4])]
        columns = [constant[0], pa.array(indexes), constant[1], pa.array(positions), *constant[2:]]
        yield pa.RecordBatch.from_arrays(columns, schema=ARROW)


@cache
def ready_messages(size: int) -> pa.RecordBatch:
    """Returns a batch of decoded messages with bodies of ``size`` bytes."""
    message = len(random_messages(1, size)[0].as_buffer())
    rows = BATCH_BYTES // (message + RECORD_OVERHEAD)
    numbers, times = pa.array(np.arange(rows)), pa.array(np.full(rows, 1_700_000_000_000_000))
    entries = {"index": numbers, "term": numbers, "position": numbers, "timestamp": times.cast(ARROW.field(4).type)}
    entries["body"] = random_messages(rows, size).cast(pa.binary())
    names = [name for name in MESSAGE_SCHEMA.names if name not in ENTRY_SCHEMA.names[:-1]]
    (batch,) = decoded(pa.RecordBatch.from_pydict(entries), names, fail=False, group="messages")
    columns = dict(zip(batch.schema.names, batch.columns, strict=True))
    columns |= {"group": pa.repeat("messages", rows), "queue_offset": pa.nulls(rows, pa.int64())}
    schema = MESSAGE_SCHEMA
    return pa.RecordBatch.from_arrays([columns[field.name].cast(field.type) for field in schema], schema=schema)


def message_batches(start: int, end: int, size: int) -> Iterator[pa.RecordBatch]:
    """Yields as many rows of messages as there are in [start, end)."""
    ready = ready_messages(size)
    for at in range(start, end, ready.num_rows):
        yield ready.slice(0, min(ready.num_rows, end - at))


class Rows(InputPartition):
    """Rows [start, end)."""

    def __init__(self, start: int, end: int) -> None:
        super().__init__(None)
        self.start, self.end = start, end


def split(start: int, end: int) -> list[InputPartition]:
    """Returns two halves, or a single partition where a second one costs more than it brings."""
    middle = (start + end) // 2 if end - start >= ROWS_TO_SPLIT else end
    return [Rows(low, high) for low, high in ((start, middle), (middle, end)) if low < high]


class MemorySource(DataSource):
    """``format("memory")`` with the options ``rows`` and ``bytes``; a stream may have ``perSecond`` instead of rows.

    With ``messages`` a batch read has the columns of ``decode = message``, each batch decoded once and kept.
    """

    @classmethod
    def name(cls) -> str:
        return "memory"

    def schema(self) -> str:
        return ddl_of(MESSAGE_SCHEMA) if "messages" in self.options else SCHEMA

    def reader(self, schema: Any) -> DataSourceReader:
        return MemoryReader(self.options)

    def streamReader(self, schema: Any) -> DataSourceStreamReader:
        return MemoryStreamReader(self.options)

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        return MemoryWriter()


class MemoryReader(DataSourceReader):
    def __init__(self, options: Any) -> None:
        self.rows, self.size = int(options["rows"]), int(options["bytes"])
        self.batches = message_batches if "messages" in options else batches

    def partitions(self) -> list[InputPartition]:
        return split(0, self.rows)

    def read(self, partition: Rows) -> Iterator[pa.RecordBatch]:
        return self.batches(partition.start, partition.end, self.size)


class MemoryStreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: Any) -> None:
        self.rows, self.size = int(options.get("rows", 0)), int(options["bytes"])
        self.per_second = float(options.get("perSecond", 0))
        self.began = time.time()

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadAllAvailable()

    def prepareForTriggerAvailableNow(self) -> None:
        """There is an end anyway."""

    def initialOffset(self) -> dict[str, int]:
        return {"next": 0}

    def latestOffset(
        self, start: dict[str, int] | None = None, limit: ReadLimit | None = None
    ) -> dict[str, int]:  # Spark 4.1 passes neither
        return {"next": int((time.time() - self.began) * self.per_second) if self.per_second else self.rows}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[InputPartition]:
        return split(start["next"], end["next"])

    def read(self, partition: Rows) -> Iterator[pa.RecordBatch]:
        return batches(partition.start, partition.end, self.size)


class MemoryWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()

"""The executor's side of a read: ranges in, Arrow batches of the exact schema out.

A partition carries everything an executor needs. The next chunk is fetched while Spark takes the present one, so
network and JVM work at the same time and two chunks at most are in memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from dledger_core.record import READ_SCHEMA
from spark_connector.errors import LossPolicy, RetentionError
from spark_connector.logs import Chunk, Log, open_log
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.schema import arrow_schema

__all__ = ["RangesPartition", "read_partition"]

_BATCH_BYTES_MAX: Final = 8 << 20
_NOTHING: Final = pa.RecordBatch.from_pylist([], schema=READ_SCHEMA)


@dataclass(init=False)
class RangesPartition(InputPartition):
    """What one task reads.

    Attributes:
        ranges: half-open index ranges, in order.
        number: the partition's number, which spreads tasks over the replicas.
    """

    ranges: tuple[Range, ...]
    number: int

    def __init__(self, ranges: tuple[Range, ...], number: int) -> None:
        super().__init__(None)
        self.ranges = ranges
        self.number = number


def read_partition(partition: RangesPartition | None, options: DLedgerOptions) -> Iterator[pa.RecordBatch]:
    """Yields the partition's entries as batches of 1-8 MB where there is as much; nothing for None."""
    if partition is None:
        return
    policy = LossPolicy(options.fail_on_data_loss)
    schema = arrow_schema(options.decode)
    with ThreadPoolExecutor(1, "dledger-prefetch") as pool:
        for part in partition.ranges:
            log = open_log(options, part.group)
            for chunk in _prefetched(pool, log, part, partition.number, policy):
                if chunk.batch.num_rows:
                    yield from _slices(_finish(chunk.batch, part, options, schema))


def _prefetched(pool: ThreadPoolExecutor, log: Log, part: Range, number: int, policy: LossPolicy) -> Iterator[Chunk]:
    start = part.start
    pending = pool.submit(log.chunk, part, start, number)
    while True:
        try:
            chunk = pending.result()
        except RetentionError as error:
            policy.report(error)
            chunk = Chunk(_NOTHING, error.end)
        start = chunk.next_index
        if start < part.end:
            pending = pool.submit(log.chunk, part, start, number)
        yield chunk
        if start >= part.end:
            return


def _finish(batch: pa.RecordBatch, part: Range, options: DLedgerOptions, schema: pa.Schema) -> pa.RecordBatch:
    """Adds the group, decodes messages and casts to what Spark checks for."""
    columns = {name: batch.column(name) for name in ("index", "term", "position", "timestamp", "body")}
    columns["group"] = pa.repeat(pa.scalar(part.group), batch.num_rows)
    if options.decode == "message":
        from dledger_core.rocketmq import decode_messages

        decoded = decode_messages(
            columns["body"], [name for name in schema.names if name not in columns or name == "body"]
        )
        columns |= {name: decoded.column(name) for name in decoded.schema.names}
        if part.log is not None:  # a broker assigns queue offsets; in our logs the rebuild does
            columns["queue_offset"] = pa.nulls(batch.num_rows, pa.int64())
    arrays = [columns[field.name].cast(field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cuts what grew too large, as decompressed messages can."""
    pieces = min(batch.num_rows, -(-batch.nbytes // _BATCH_BYTES_MAX))
    rows = -(-batch.num_rows // max(1, pieces))
    for at in range(0, batch.num_rows, rows):
        yield batch.slice(at, rows)

"""The executor's side of a read: ranges in, Arrow batches of the exact schema out.

A partition carries everything an executor needs. The next chunks are fetched while Spark takes the present one, so
network and JVM work at the same time, a pause of either is bridged, and three chunks at most are in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from dledger_core import READ_SCHEMA, empty_batch
from spark_connector.decoding import rows_of
from spark_connector.errors import LossPolicy, RetentionError
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.reading.logs import Chunk, Log, open_log
from spark_connector.reading.pinning import Pin
from spark_connector.schema import schema_for

__all__ = ["RangesPartition", "read_partition"]

_AHEAD: Final = 2
"""Chunks that are fetched ahead of the one that Spark takes."""
_BATCH_BYTES_MIN: Final = 1 << 20
_BATCH_BYTES_MAX: Final = 8 << 20
_NOTHING: Final = empty_batch(READ_SCHEMA)


@dataclass(init=False)
class RangesPartition(InputPartition):
    """What one task reads.

    Attributes:
        ranges: half-open index ranges, in order.
        number: the partition's number, which spreads tasks over the replicas.
        pin_ms: how long a pin holds; 0 = nothing is pinned.
        held_since: epoch seconds at which the driver pinned the ranges.
    """

    ranges: tuple[Range, ...]
    number: int
    pin_ms: int
    held_since: float

    def __init__(self, ranges: tuple[Range, ...], number: int, pin_ms: int = 0, held_since: float = 0.0) -> None:
        super().__init__(None)
        self.ranges = ranges
        self.number = number
        self.pin_ms = pin_ms
        self.held_since = held_since


def read_partition(partition: RangesPartition | None, options: DLedgerOptions) -> Iterator[pa.RecordBatch]:
    """Yields the partition's entries as batches of 1-8 MB where there is as much; nothing for None."""
    if partition is not None:
        for batch in _gathered(_batches(partition, options)):
            yield from _slices(batch)


def _batches(partition: RangesPartition, options: DLedgerOptions) -> Iterator[pa.RecordBatch]:
    policy = LossPolicy(options.fail_on_data_loss)
    schema = schema_for(options.decode, options.protocol, options.columns)
    pool = ThreadPoolExecutor(1, "dledger-prefetch")
    try:
        for part in partition.ranges:
            log = open_log(options, part.group)
            pin = Pin(partition.pin_ms, partition.held_since)
            pin.renew(log, part.start)
            for chunk in _prefetched(pool, log, part, partition.number, policy):
                pin.renew(log, chunk.next_index)
                if chunk.batch.num_rows:
                    yield from rows_of(chunk.batch, part, options, schema)
            pin.release(log)
    finally:
        pool.shutdown(cancel_futures=True)


def _prefetched(pool: ThreadPoolExecutor, log: Log, part: Range, number: int, policy: LossPolicy) -> Iterator[Chunk]:
    """Yields the chunks of a range; ``pool`` has a single thread, so each finds the one before it done."""

    def fetched(before: Future[Chunk] | None) -> Chunk:
        start = part.start if before is None else before.result().next_index
        if start >= part.end:
            return Chunk(_NOTHING, start)
        try:
            return log.chunk(part, start, number)
        except RetentionError as error:
            policy.report(error)
            return Chunk(_NOTHING, error.end)

    ahead: deque[Future[Chunk]] = deque([pool.submit(fetched, None)])
    while True:
        while len(ahead) <= _AHEAD:
            ahead.append(pool.submit(fetched, ahead[-1]))
        chunk = ahead.popleft().result()
        yield chunk
        if chunk.next_index >= part.end:
            return


def _gathered(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Joins neighbours that are small, as many short ranges, losers or filters make them."""
    held: list[pa.RecordBatch] = []
    nbytes = 0
    for batch in batches:
        held.append(batch)
        nbytes += batch.nbytes
        if nbytes >= _BATCH_BYTES_MIN:
            yield _joined(held)
            held, nbytes = [], 0
    if held:
        yield _joined(held)


def _joined(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cuts what grew too large, as decompressed messages can."""
    pieces = min(batch.num_rows, -(-batch.nbytes // _BATCH_BYTES_MAX))
    rows = -(-batch.num_rows // max(1, pieces))
    for at in range(0, batch.num_rows, rows):
        yield batch.slice(at, rows)

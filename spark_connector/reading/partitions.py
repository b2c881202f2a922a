"""The executor's side of a read: ranges in, Arrow batches of the exact schema out.

A partition contains everything that an executor needs. The next chunks are fetched while Spark processes the current
one, so network and JVM work in parallel. At most three chunks are in memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import pyarrow as pa
from pyspark.sql.datasource import InputPartition

from dledger_core import READ_SCHEMA
from dledger_core.client import NODE_HEALTH
from dledger_core.record import empty_batch
from spark_connector.columns import needed_columns, rows_of, schema_for, with_names
from spark_connector.errors import LossPolicy, RetentionError
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.reading.logs import Chunk, Log, Pin, check_history
from spark_connector.reading.opening import open_log

__all__ = ["RangesPartition", "read_partition"]

# A Python worker has no other limit of its memory (test_chunks_come_in_order_and_at_most_three_are_in_memory,
# test_memory_of_reader_is_bounded_whatever_backlog).
_AHEAD: Final = 2
"""Number of chunks to fetch ahead."""
_BATCH_BYTES_MIN: Final = 1 << 20
_BATCH_BYTES_MAX: Final = 8 << 20
_NOTHING: Final = empty_batch(READ_SCHEMA)


@dataclass(init=False)
class RangesPartition(InputPartition):
    """The ranges that one task reads.

    Attributes:
        ranges: half-open index ranges, in order.
        replica: number of the replica to read the first range from; each further range starts at the next one.
        pin_ms: duration of a pin; 0 = no pins.
        pinned_at: epoch seconds at which the driver pinned the ranges.
        unresponsive: addresses of the nodes that hang or fail, as the driver sees it.
    """

    ranges: tuple[Range, ...]
    replica: int
    pin_ms: int
    pinned_at: float
    unresponsive: tuple[str, ...]

    def __init__(
        self,
        ranges: tuple[Range, ...],
        replica: int,
        pin_ms: int = 0,
        pinned_at: float = 0.0,
        unresponsive: tuple[str, ...] = (),
    ) -> None:
        super().__init__(None)
        self.ranges = ranges
        self.replica = replica
        self.pin_ms = pin_ms
        self.pinned_at = pinned_at
        self.unresponsive = unresponsive


OpenLog = Callable[[DLedgerOptions, Range], Log]


def _open_planned(options: DLedgerOptions, part: Range) -> Log:
    """Open the log that was planned: a client of this process may know an earlier one of the group."""
    return open_log(options, part.group, log=part.log)


def read_partition(
    partition: RangesPartition | None, options: DLedgerOptions, open_log: OpenLog = _open_planned
) -> Iterator[pa.RecordBatch]:
    """Yield the entries of a partition as batches of 1-8 MB where possible; nothing for None."""
    if partition is not None:
        for batch in _joined(_batches(partition, options, open_log)):
            yield from _slices(with_names(batch, options.columns))


def _batches(partition: RangesPartition, options: DLedgerOptions, open_log: OpenLog) -> Iterator[pa.RecordBatch]:
    policy = LossPolicy(options.fail_on_data_loss)
    schema = schema_for(options.decode, options.protocol, options.columns)
    columns = needed_columns(schema, options)
    # Otherwise each Python worker would wait for a hung node once.
    NODE_HEALTH.missed(*partition.unresponsive)
    pool = ThreadPoolExecutor(1, "dledger-prefetch")
    try:
        for replica, part in enumerate(partition.ranges, partition.replica):
            log = open_log(options, part)
            pin = Pin(partition.pin_ms, partition.pinned_at, options.on_pin_failure)
            # The task may have waited for a core longer than the driver's pin lasts, so the pin comes before the first
            # read. Rows leave the task while it reads, so the history is compared before the first one
            # (test_copy_of_store_with_its_own_later_history_serves_no_row).
            pin.renew(log, part.start)
            check_history(log, part)
            for chunk in _prefetched(pool, log, part, replica, policy, columns):
                # The pin moves with the reader, so that retention can delete entries that were read.
                pin.renew(log, chunk.next_index)
                if chunk.batch.num_rows:
                    yield from rows_of(chunk.batch, part, options, schema)
            pin.release(log)
    finally:
        # A task with LIMIT closes this generator early; without this the worker would read on for it
        # (test_prefetch_stops_with_task).
        pool.shutdown(cancel_futures=True)


def _prefetched(
    pool: ThreadPoolExecutor, log: Log, part: Range, replica: int, policy: LossPolicy, columns: tuple[str, ...] | None
) -> Iterator[Chunk]:
    """Yield the chunks of a range. The single thread of ``pool`` finishes a chunk before it starts the next one."""

    def fetched(previous: Future[Chunk] | None) -> Chunk:
        # `result` repeats the error of the previous chunk, so an error arrives after all rows before it and no chunk
        # follows it (test_error_comes_after_earlier_chunks).
        start = part.start if previous is None else previous.result().next_index
        if start >= part.end:
            return Chunk(_NOTHING, start)
        try:
            return log.read(part, start, replica, columns=columns)
        except RetentionError as error:
            policy.report(error)
            # The loss was accepted: continue at the first stored entry (test_entries_deleted_between_plan_and_read).
            return Chunk(_NOTHING, error.end)

    ahead: deque[Future[Chunk]] = deque([pool.submit(fetched, None)])
    while True:
        while len(ahead) <= _AHEAD:
            ahead.append(pool.submit(fetched, ahead[-1]))
        chunk = ahead.popleft().result()
        yield chunk
        if chunk.next_index >= part.end:
            return


def _joined(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Join small batches, which come from short ranges, orphaned attempts or filters."""
    small: list[pa.RecordBatch] = []
    nbytes = 0
    for batch in batches:
        small.append(batch)
        nbytes += batch.nbytes
        if nbytes >= _BATCH_BYTES_MIN:
            yield _concatenated(small)
            small, nbytes = [], 0
    if small:
        yield _concatenated(small)


def _concatenated(batches: list[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def _slices(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Split a batch that is too large, as one of decompressed messages can be."""
    slices = min(batch.num_rows, -(-batch.nbytes // _BATCH_BYTES_MAX))
    rows = -(-batch.num_rows // max(1, slices))
    for at in range(0, batch.num_rows, rows):
        yield batch.slice(at, rows)

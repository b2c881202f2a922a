"""Reads a store directory in tasks, each a range of its entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np
import pyarrow as pa

from dledger_core.record import MAGIC_DATA
from jobs._rebuild.runs import RUN_SCHEMA, run_batches
from jobs._rebuild.units import RECORD, UNIT_SCHEMA, EntryRules, Units, units_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from dledger_core.record import Records
    from spark_connector.reading.logs import StoreLog
    from spark_connector.reading.planning import Range

__all__ = ["RUNS", "UNITS", "Product", "read_store"]

_RANGE_ENTRIES: Final = 1 << 20
"""Entries of one task, at most. Each task costs some 100 ms, most of it in jobs that look at what it returned."""
_READ_BYTES: Final = 16 << 20
"""A batch costs some 2 ms, however many messages it has; what is larger no longer fits the processor's caches."""


@dataclass(frozen=True)
class Product:
    """What tasks make of the units that they read.

    Attributes:
        schema: columns of what they return.
        make: turns a task's batches of units into it.
        narrow: only what says where units stand in their queues is needed.
    """

    schema: str
    make: Callable[[Iterator[Units]], Iterator[pa.RecordBatch]]
    narrow: bool = False


def _batches_of(batches: Iterator[Units]) -> Iterator[pa.RecordBatch]:
    return (units.batch for units in batches)


UNITS: Final = Product(UNIT_SCHEMA, _batches_of)
RUNS: Final = Product(RUN_SCHEMA, run_batches, narrow=True)


def read_store(
    spark: SparkSession,
    options: dict[str, str],
    group: str,
    bounds: tuple[int, int],
    rules: EntryRules,
    product: Product,
) -> DataFrame:
    """Returns what tasks make of the entries of a store directory.

    Args:
        spark: the session.
        options: options of the data source, with ``path``.
        group: name the rows carry.
        bounds: indexes [start, end).
        rules: how to read them.
        product: what of them.
    """
    start, end = bounds
    cores = max(1, spark.sparkContext.defaultParallelism)
    rounds = -(-(end - start) // (cores * _RANGE_ENTRIES))
    width = max(1, -(-(end - start) // max(1, cores * rounds)))  # all cores end at about the same time
    tasks = -(-(end - start) // width)
    starts = spark.range(start, start + tasks * width, width, max(1, tasks))
    return starts.mapInArrow(_store_reader(options, group, width, end, rules, product), product.schema)


def _store_reader(
    options: dict[str, str], group: str, width: int, end: int, rules: EntryRules, product: Product
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    rules = replace(rules, narrow=product.narrow)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from spark_connector.options import DLedgerOptions
        from spark_connector.reading.logs import StoreLog
        from spark_connector.reading.planning import Range

        log = StoreLog(DLedgerOptions.for_reading(options))
        for batch in batches:
            for first in batch.column(0).to_pylist():
                part = Range(group, first, min(first + width, end))
                yield from product.make(units_of(_entries(log, part), rules))

    return read


def _entries(log: StoreLog, part: Range) -> Iterator[pa.RecordBatch]:
    """Hidden entries, too: the plan has said which these are, so that all passes leave out the same ones."""
    at = part.start
    while at < part.end:
        records = log.records(part, at, _READ_BYTES)
        at += records.count
        yield _entry_batch(records, part.group)


def _entry_batch(records: Records, group: str) -> pa.RecordBatch:
    """The data entries with their headers: to cut out the bodies would copy all of them."""
    headers = records.headers
    offsets = pa.py_buffer(np.append(records.starts, records.nbytes).astype(np.int32))
    columns = {
        "group": pa.repeat(pa.scalar(group), records.count),
        "index": pa.array(headers["index"].astype(np.int64)),
        "position": pa.array(headers["position"].astype(np.int64)),
        RECORD: pa.Array.from_buffers(pa.binary(), records.count, [None, offsets, pa.py_buffer(records.data)]),
    }
    batch, data = pa.RecordBatch.from_pydict(columns), headers["magic"] == MAGIC_DATA
    return batch if data.all() else batch.filter(pa.array(data))

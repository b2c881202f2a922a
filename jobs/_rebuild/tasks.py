"""Reads a store directory in tasks, each a range of its entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from jobs._rebuild.runs import RUN_SCHEMA, run_batches
from jobs._rebuild.units import UNIT_SCHEMA, EntryRules, unit_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["RUNS", "UNITS", "Product", "read_store"]

_RANGE_ENTRIES: Final = 1 << 18
"""Entries of one task, at most."""
_BATCH: Final = {"fetchMaxBytes": str(16 << 20), "isolation": "read_uncommitted"}
"""A batch costs some 3 ms, however many messages it has: with 4 MB of 1 KB messages that is a third of the time. The
plan has said which entries are hidden: whatever a log does meanwhile, all passes leave out the same."""


@dataclass(frozen=True)
class Product:
    """What tasks make of the units that they read.

    Attributes:
        schema: columns of what they return.
        make: turns a task's batches of units into it.
        narrow: only what says where units stand in their queues is needed.
    """

    schema: str
    make: Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]
    narrow: bool = False


UNITS: Final = Product(UNIT_SCHEMA, iter)
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
    width = max(1, min(_RANGE_ENTRIES, -(-(end - start) // max(1, spark.sparkContext.defaultParallelism))))
    tasks = -(-(end - start) // width)
    starts = spark.range(start, start + tasks * width, width, max(1, tasks))
    return starts.mapInArrow(_store_reader(options, group, width, end, rules, product), product.schema)


def _store_reader(
    options: dict[str, str], group: str, width: int, end: int, rules: EntryRules, product: Product
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    rules = replace(rules, narrow=product.narrow)

    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from spark_connector.options import DLedgerOptions
        from spark_connector.reading.logs import open_log
        from spark_connector.reading.planning import Range

        log = open_log(DLedgerOptions.for_reading(options | _BATCH))
        for batch in batches:
            for first in batch.column(0).to_pylist():
                part = Range(group, first, min(first + width, end))
                yield from product.make(unit_batches(_entries(log.chunk, part), rules))

    return read


def _entries(chunk: Callable[..., Any], part: Any) -> Iterator[pa.RecordBatch]:
    at = part.start
    while at < part.end:
        found = chunk(part, at, 0)
        at = found.next_index
        if found.batch.num_rows:
            yield found.batch.append_column("group", pa.repeat(pa.scalar(part.group), found.batch.num_rows))

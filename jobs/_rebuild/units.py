"""From the entries of a log to the units of its consume queues, as DataFrame transformations.

Nothing is collected: a queue's offsets come from counts per index range and queue, their prefix sums, and the order
inside each range. So the work of one task is bounded by a range, not by the log or by its longest queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.rocketmq import consume_queue_columns

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = [
    "RANGE_ENTRIES",
    "TABLE_COLUMNS",
    "TABLE_SCHEMA",
    "UNIT_ARROW",
    "UNIT_SCHEMA",
    "assign_offsets",
    "claim_slots",
    "keep_one",
    "read_store",
    "unit_batches",
]

RANGE_ENTRIES: Final = 1 << 18
"""Entries of one range: as many as one task sorts at a time."""

_HEADER_BYTES: Final = 48
_TRANSACTION_MASK: Final = 0xC
_TRANSACTION_COMMIT: Final = 0x8
_QUEUE: Final = ("group", "topic", "queue_id")

TABLE_SCHEMA: Final = (
    "`group` string, topic string, queue_id int, queue_offset bigint, position bigint, size int, tags_code bigint, "
    "store_timestamp timestamp, index bigint"
)
TABLE_COLUMNS: Final = tuple(column.split()[0].strip("`") for column in TABLE_SCHEMA.split(","))
UNIT_SCHEMA: Final = TABLE_SCHEMA + ", skipped string"
"""Columns of ``unit_batches``; ``skipped`` is null for a unit, else why the entry is none."""
UNIT_ARROW: Final = pa.schema(
    [
        ("group", pa.string()),
        ("topic", pa.string()),
        ("queue_id", pa.int32()),
        ("queue_offset", pa.int64()),
        ("position", pa.int64()),
        ("size", pa.int32()),
        ("tags_code", pa.int64()),
        ("store_timestamp", pa.timestamp("us", tz="UTC")),
        ("index", pa.int64()),
        ("skipped", pa.string()),
    ]
)
"""UNIT_SCHEMA as Arrow has it."""


def unit_batches(batches: Iterable[pa.RecordBatch], header_bytes: int = _HEADER_BYTES) -> Iterator[pa.RecordBatch]:
    """Turns batches of entries (group, index, position, body) into batches of units, one row per entry.

    Args:
        batches: the entries.
        header_bytes: how far a message begins behind its entry's position; 0 in a classic CommitLog.
    """
    for batch in batches:
        columns = consume_queue_columns(batch.column("body"))
        transaction = np.asarray(columns.column("sys_flag").fill_null(0)) & _TRANSACTION_MASK
        pending = pa.array((transaction != 0) & (transaction != _TRANSACTION_COMMIT))
        skipped = pc.if_else(pending, "prepared_or_rolled_back", pa.scalar(None, pa.string()))
        skipped = pc.if_else(columns.column("error").is_valid(), "not_messages", skipped)
        position = pa.array(np.asarray(batch.column("position")) + header_bytes)
        found: dict[str, Any] = {"group": batch.column("group"), "index": batch.column("index"), "position": position}
        found |= {name: columns.column(name) for name in columns.schema.names if name in TABLE_COLUMNS}
        found["skipped"] = skipped
        yield pa.RecordBatch.from_pydict({name: found[name] for name in (*TABLE_COLUMNS, "skipped")})


def read_store(spark: SparkSession, options: dict[str, str], group: str, start: int, end: int) -> DataFrame:
    """Returns the units of entries [start, end) of a store directory, each range read by one task.

    Args:
        spark: the session.
        options: options of the data source, with ``path``.
        group: name the rows carry.
        start: first index.
        end: index behind the last.
    """
    width = max(1, min(RANGE_ENTRIES, -(-(end - start) // max(1, spark.sparkContext.defaultParallelism))))
    tasks = -(-(end - start) // width)
    starts = spark.range(start, start + tasks * width, width, max(1, tasks))
    return starts.mapInArrow(_store_reader(options, group, width, end), UNIT_SCHEMA)


def _store_reader(
    options: dict[str, str], group: str, width: int, end: int
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    def read(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from spark_connector.options import DLedgerOptions
        from spark_connector.reading.logs import open_log
        from spark_connector.reading.planning import Range

        log = open_log(DLedgerOptions.for_reading(options))
        for batch in batches:
            for first in batch.column(0).to_pylist():
                yield from unit_batches(_entries(log.chunk, Range(group, first, min(first + width, end))))

    return read


def _entries(chunk: Callable[..., Any], part: Any) -> Iterator[pa.RecordBatch]:
    at = part.start
    while at < part.end:
        found = chunk(part, at, 0)
        at = found.next_index
        if found.batch.num_rows:
            yield found.batch.append_column("group", pa.repeat(pa.scalar(part.group), found.batch.num_rows))


def assign_offsets(units: DataFrame, range_entries: int = RANGE_ENTRIES) -> DataFrame:
    """Gives each unit its queue_offset: the number of earlier units, by index, of the same group, topic and queue.

    Args:
        units: rows of TABLE_COLUMNS, ``queue_offset`` is replaced.
        range_entries: indexes of one range.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    ranged = units.withColumn("range", f.floor(f.col("index") / f.lit(range_entries)))
    counts = ranged.groupBy(*_QUEUE, "range").agg(f.count("*").alias("units"))
    earlier = Window.partitionBy(*_QUEUE).orderBy("range").rowsBetween(Window.unboundedPreceding, -1)
    bases = counts.select(
        *_QUEUE, "range", f.coalesce(f.sum("units").over(earlier), f.lit(0).cast("bigint")).alias("base")
    )
    inside = Window.partitionBy(*_QUEUE, "range").orderBy("index")
    numbered = ranged.withColumn("number", f.row_number().over(inside) - 1)
    placed = numbered.join(bases, [*_QUEUE, "range"])
    return placed.withColumn("queue_offset", f.col("base") + f.col("number")).select(*TABLE_COLUMNS)


def claim_slots(units: DataFrame, on_duplicate: str) -> DataFrame:
    """Says for each unit who else claims its slot: a broker may have given a queue offset out twice.

    Args:
        units: rows of TABLE_COLUMNS with queue_offset.
        on_duplicate: who keeps the slot, ``first`` or ``last`` in the order of the log.

    Returns:
        The rows with ``claim`` (1 = keeps the slot) and ``claims`` (how many there are).
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = f.col("position").asc() if on_duplicate == "first" else f.col("position").desc()
    slot = Window.partitionBy(*_QUEUE, "queue_offset")
    claimed = units.withColumn("claim", f.row_number().over(slot.orderBy(order)))
    return claimed.withColumn("claims", f.count("*").over(slot))


def keep_one(units: DataFrame, on_duplicate: str) -> DataFrame:
    """Keeps one unit for each slot, as ``claim_slots`` says."""
    return claim_slots(units, on_duplicate).where("claim = 1").select(*TABLE_COLUMNS)

"""The slot of each unit in its queue, from ranges of queue offsets: a few rows per batch and queue for any log size.

In a native log the offset of a unit is the number of earlier units of its queue: the count of all earlier batches
(prefix sums over the ranges) plus its number in its own batch. In a broker's log the message contains its offset. Most
queues are monotonic then, and offsets are slots. A queue is *non_monotonic* if a broker assigned offsets twice. Each of
its units gets

- whether a running broker serves it: it is the last one in the log with this queue offset;
- its slot in RocketMQ's own rebuild, which reads the log in order and leaves out a unit whose offset is below the end
  of the queue so far; a unit with offset 0 is always appended at the end.

A queue is *renumbered* if messages name it more than once as a further queue. Its offsets ran ahead of its slots, so
its units are numbered contiguously, as in a running broker's files and in its rebuild.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import pyarrow as pa

from .units import NAMED_AGAIN, UNIT_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame


class Queue(NamedTuple):
    """A queue in the table.

    Attributes:
        low: its lowest queue offset.
        end: the end (exclusive) of its queue offsets.
        rows: number of its units.
        slots: number of different queue offsets of these.
        non_monotonic: whether a broker assigned offsets of it twice, or out of order.
    """

    low: int
    end: int
    rows: int
    slots: int
    non_monotonic: bool


_NONE: Final = Queue(0, 0, 0, 0, non_monotonic=False)
Queues = dict[tuple[str, str, int], Queue]
"""By group, topic and queue id."""


def advanced(queues: Queues, found: Iterable[Mapping[str, Any]]) -> Queues:
    """Return the queues after a micro-batch.

    Args:
        queues: before it.
        found: rows of ``queues_of``.
    """
    after = dict(queues)
    for row in found:
        key = row["group"], row["topic"], row["queue_id"]
        before = queues.get(key, _NONE)
        begin = max(before.end, row["high"])
        low = begin if row["low"] is None else row["low"]
        after[key] = Queue(
            min(low, before.low) if before.rows else low,
            begin + row["fresh"],
            before.rows + row["given"] + row["fresh"],
            before.slots + row["slots"] + row["fresh"],
            before.non_monotonic or row["non_monotonic"],
        )
    return after


def summary_of(queues: Queues, batch_topics: tuple[str, ...]) -> dict[str, Any]:
    """Count rows, slots and queues for the job's summary.

    Args:
        queues: all of them.
        batch_topics: their queues may have holes, as a message there takes several queue offsets.
    """
    rows = sum(queue.rows for queue in queues.values())
    slots = sum(queue.slots for queue in queues.values())
    dense = (queue.slots == queue.end - queue.low or key[1] in batch_topics for key, queue in queues.items())
    return {"queues": len(queues), "rows": rows, "slots": slots, "dense": all(dense), "duplicate_slots": rows - slots}


QUEUE: Final = ["group", "topic", "queue_id"]
_RANGE: Final = [*QUEUE, "part", "range_id"]
_FLOORS: Final = "`group` string, topic string, queue_id int, part bigint, range_id bigint, floor bigint, ahead bigint"

# One text, not a chain of calls: Spark analyses every call, which takes longer than the query.
# Units without a broker's offset have no low and high: they sort first, and no maximum includes them.
_QUEUES: Final = """
    WITH spans AS (
        SELECT *, CASE WHEN given THEN first END AS low, CASE WHEN given THEN first + units END AS high
        FROM (SELECT *, carried AND skipped IS NULL AS given FROM {ranges} WHERE skipped IS NULL OR skipped = {again})
    ),
    steps AS (
        SELECT *,
            max(high) OVER (
                PARTITION BY `group`, topic, queue_id ORDER BY position ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS before,
            max(high) OVER (
                PARTITION BY `group`, topic, queue_id ORDER BY low ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS below
        FROM spans
    ),
    queues AS (
        SELECT `group`, topic, queue_id,
            min(low) AS low,
            coalesce(max(high), 0) AS high,
            coalesce(bool_or(low < before), false) AS non_monotonic,
            bool_or(skipped IS NOT NULL) AS renumbered,
            coalesce(sum(CASE WHEN given THEN units END), 0) AS given,
            coalesce(sum(CASE WHEN given THEN greatest(0, high - greatest(low, below)) END), 0) AS slots,
            coalesce(sum(CASE WHEN NOT carried THEN units END), 0) AS fresh
        FROM steps
        GROUP BY `group`, topic, queue_id
    )
    SELECT `group`, topic, queue_id, renumbered, given, fresh, low,
        non_monotonic AND NOT renumbered AS non_monotonic,
        CASE WHEN renumbered THEN low + given ELSE high END AS high,
        CASE WHEN renumbered THEN given ELSE slots END AS slots
    FROM queues
"""


@dataclass(frozen=True)
class UnitCounts:
    """The numbers of units of all queues by the origin of their offset.

    Attributes:
        given: units whose offset a broker assigned.
        assigned: units whose offset is assigned here.
        odd: queues that are non_monotonic or renumbered.
    """

    given: int
    assigned: int
    odd: int


def queues_of(ranges: DataFrame) -> DataFrame:
    """Return a row for each queue of a micro-batch.

    ``given`` and ``fresh`` are its numbers of units with and without a broker's offset; ``low``, ``high`` and ``slots``
    are the range and the number of the broker's offsets. ``non_monotonic`` and ``renumbered``: see the module.
    """
    return ranges.sparkSession.sql(_QUEUES, again=NAMED_AGAIN, ranges=ranges)


def count_units(queues: Iterable[Mapping[str, Any]]) -> UnitCounts:
    """Count the units of all queues."""
    given = assigned = odd = 0
    for row in queues:
        given, assigned = given + row["given"], assigned + row["fresh"]
        odd += row["non_monotonic"] or row["renumbered"]
    return UnitCounts(given, assigned, odd)


def place(
    units: DataFrame, ranges: DataFrame, queues: DataFrame, counts: UnitCounts, bases: DataFrame | None = None
) -> DataFrame:
    """Return the rows of the table: the units with ``queue_offset``, ``broker_serves`` and ``rebuild_slot``.

    Args:
        units: columns of UNIT_SCHEMA; evaluated once per kind: assigned, monotonic and others.
        ranges: of these units.
        queues: of these ranges.
        counts: of these queues.
        bases: columns of a queue and ``base``: the end of its offsets in the table.
    """
    parts = []
    if counts.assigned:
        parts.append(_assigned(units.where("not carried"), ranges, queues, bases))
    given = units.where("carried") if counts.assigned else units
    if counts.odd:
        others = queues.where("non_monotonic or renumbered").select(*QUEUE, "renumbered")
        parts.append(_monotonic(given.join(others, QUEUE, "left_anti")))
        parts.append(_replayed(given.join(others, QUEUE, "left_semi"), ranges.join(others, QUEUE)))
    elif counts.given or not parts:
        parts.append(_monotonic(given))
    placed = parts[0]
    for part in parts[1:]:
        placed = placed.unionByName(part)
    return placed


def _row(units: DataFrame, offset: Column, serves: Column, slot: Column) -> DataFrame:
    placed = units.withColumns({"queue_offset": offset, "broker_serves": serves, "rebuild_slot": slot})
    return placed.select(*UNIT_COLUMNS.names, "broker_serves", "rebuild_slot")


def _monotonic(units: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return _row(units, f.col("queue_offset"), f.lit(True), f.col("queue_offset"))


def _assigned(units: DataFrame, ranges: DataFrame, queues: DataFrame, bases: DataFrame | None) -> DataFrame:
    from pyspark.sql import functions as f

    placed = units.join(_first_offsets(ranges, queues, bases), [*QUEUE, "part"], "left")
    offset = f.coalesce(f.col("base"), _changed()) + f.col("number")
    return _row(placed, offset, f.lit(True), offset)


def _first_offsets(ranges: DataFrame, queues: DataFrame, bases: DataFrame | None) -> DataFrame:
    """Return the offset of the first unit of each queue in each part of the log.

    Offsets continue after those in the table and those that a broker assigned. Columns: the
    queue, ``part``, ``base``.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    def units_where(condition: Column) -> Column:
        return f.sum(f.when(condition, f.col("units")).otherwise(0))

    counts = ranges.where("skipped is null").groupBy(*QUEUE, "part").agg(
        units_where(~f.col("carried")).alias("fresh_here"), units_where(f.col("carried")).alias("given_here")
    )  # fmt: skip
    earlier = Window.partitionBy(*QUEUE).orderBy("part").rowsBetween(Window.unboundedPreceding, -1)
    before = counts.withColumn("before", f.coalesce(f.sum("fresh_here").over(earlier), f.lit(0)))
    known = before.join(queues.select(*QUEUE, "high"), QUEUE)
    base = f.col("high")
    if bases is not None:
        known = known.join(bases, QUEUE, "left")
        base = f.greatest("high", f.coalesce("base", f.lit(0)))
    return known.select(*QUEUE, "part", (base + f.col("before") - f.col("given_here")).alias("base"))


def _changed() -> Column:
    """Raise for a row that Spark lost and read again in another batch."""
    from pyspark.sql import functions as f

    return f.raise_error(f.lit("the log was read in other batches the second time")).cast("bigint")


def _replayed(units: DataFrame, ranges: DataFrame) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    given = ranges.where("skipped is null and carried").repartition(*QUEUE)
    floors = given.sortWithinPartitions(*QUEUE, "position").mapInArrow(_floors, _FLOORS)
    placed = units.join(floors.withColumn("known", f.lit(True)), _RANGE, "left")
    renumbered, floor = f.col("ahead").isNotNull(), f.col("floor")
    q = f.col("queue_offset") - f.coalesce("ahead", f.lit(0))
    slot = Window.partitionBy(*QUEUE, "queue_offset")
    serves = renumbered | (f.col("position") == f.max("position").over(slot))
    kept = f.when(renumbered | floor.isNull() | (q >= floor), q)
    rebuilt = f.when((q == 0) & ~renumbered, f.coalesce(floor, f.lit(0))).otherwise(kept)
    return _row(placed, q, serves, f.when(f.col("known"), rebuilt).otherwise(_changed()))


def _floors(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add to each range the end of its queue before it, in RocketMQ's rebuild; null for the first one.

    In a renumbered queue also add the distance of the range's offsets ahead of its slots. The rows come sorted by queue
    and position.
    """
    queue: tuple[Any, ...] = ()
    end: int | None = None
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in (*QUEUE, "first", "units", "renumbered")]
        floors: list[int | None] = []
        aheads: list[int | None] = []
        for *this, first, units, renumbered in zip(*columns, strict=True):
            if tuple(this) != queue:
                queue, end = tuple(this), None
            floors.append(end)
            begin = first if end is None else end
            aheads.append(first - begin if renumbered else None)
            end = begin + units if renumbered or first == 0 else max(first + units, begin)
        kept = [batch.column(name) for name in _RANGE]
        found = [pa.array(floors, pa.int64()), pa.array(aheads, pa.int64())]
        yield pa.RecordBatch.from_arrays([*kept, *found], names=[*_RANGE, "floor", "ahead"])

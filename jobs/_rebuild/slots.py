"""Which slot of its queue each unit has, worked out from runs: a few rows per batch and queue, whatever the log's size.

In our logs a unit's offset is the number of earlier units of its queue: the count of all earlier batches (prefix sums
over the runs) plus its number in its own batch. In a broker's log the message carries its offset. Most queues then go
straight up, and nothing is left to do. Where a broker gave offsets out twice the queue is *tangled*, and for each of
its units is found out

- whether a running broker serves it: it is the last one in the log with this queue offset;
- which slot it has in RocketMQ's own rebuild. That goes through the log in order and leaves out a unit whose offset
  lies below the queue's end so far; but one with offset 0 is always appended, at the end.

Where messages name one of their further queues more than once the queue is *packed*: its offsets ran ahead of its
slots, so its units are numbered one behind the other, as a running broker's files and its rebuild have them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from jobs._rebuild.dispatch import NAMED_AGAIN
from jobs._rebuild.units import UNIT_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["QUEUE", "UnitCounts", "count_units", "place", "queues_of"]

QUEUE: Final = ["group", "topic", "queue_id"]
_RUN: Final = [*QUEUE, "part", "run"]
_FLOORS: Final = "`group` string, topic string, queue_id int, part bigint, run bigint, floor bigint, ahead bigint"

# One text, not a chain of calls: Spark's analyser would look at every link, which takes longer than the query.
# What a broker did not give has no bounds: it sorts first, and no maximum sees it.
_QUEUES: Final = """
    WITH spans AS (
        SELECT *, CASE WHEN given THEN first END AS low, CASE WHEN given THEN first + units END AS high
        FROM (SELECT *, carried AND skipped IS NULL AS given FROM {runs} WHERE skipped IS NULL OR skipped = {again})
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
            coalesce(bool_or(low < before), false) AS tangled,
            bool_or(skipped IS NOT NULL) AS packed,
            coalesce(sum(CASE WHEN given THEN units END), 0) AS given,
            coalesce(sum(CASE WHEN given THEN greatest(0, high - greatest(low, below)) END), 0) AS slots,
            coalesce(sum(CASE WHEN NOT carried THEN units END), 0) AS fresh
        FROM steps
        GROUP BY `group`, topic, queue_id
    )
    SELECT `group`, topic, queue_id, packed, given, fresh, low,
        tangled AND NOT packed AS tangled,
        CASE WHEN packed THEN low + given ELSE high END AS high,
        CASE WHEN packed THEN given ELSE slots END AS slots
    FROM queues
"""


@dataclass(frozen=True)
class UnitCounts:
    """How many units of all queues together have their offset from where.

    Attributes:
        given: units whose offset a broker gave.
        assigned: units whose offset is assigned here.
        odd: queues that are tangled or packed.
    """

    given: int
    assigned: int
    odd: int


def queues_of(runs: DataFrame) -> DataFrame:
    """Return a row for each queue of a micro-batch.

    ``given`` and ``fresh`` are its numbers of units with a broker's offset and without one; ``low``, ``high`` and
    ``slots`` are the range and the number of the offsets given. ``tangled`` and ``packed``: see the module.
    """
    return runs.sparkSession.sql(_QUEUES, again=NAMED_AGAIN, runs=runs)


def count_units(queues: Iterable[Mapping[str, Any]]) -> UnitCounts:
    """Count the units of all queues."""
    given = assigned = odd = 0
    for row in queues:
        given, assigned = given + row["given"], assigned + row["fresh"]
        odd += row["tangled"] or row["packed"]
    return UnitCounts(given, assigned, odd)


def place(
    units: DataFrame, runs: DataFrame, queues: DataFrame, counts: UnitCounts, bases: DataFrame | None = None
) -> DataFrame:
    """Return the rows of the table: the units with ``queue_offset``, ``broker_serves`` and ``rebuild_slot``.

    Args:
        units: columns of UNIT_SCHEMA; evaluated as often as there are kinds of them: assigned, straight and others.
        runs: of these units.
        queues: of these runs.
        counts: of these queues.
        bases: columns of a queue and ``base``: the offset behind those that a table holds of it already.
    """
    parts = []
    if counts.assigned:
        parts.append(_assigned(units.where("not carried"), runs, queues, bases))
    given = units.where("carried") if counts.assigned else units
    if counts.odd:
        others = queues.where("tangled or packed").select(*QUEUE, "packed")
        parts.append(_straight(given.join(others, QUEUE, "left_anti")))
        parts.append(_replayed(given.join(others, QUEUE, "left_semi"), runs.join(others, QUEUE)))
    elif counts.given or not parts:
        parts.append(_straight(given))
    placed = parts[0]
    for part in parts[1:]:
        placed = placed.unionByName(part)
    return placed


def _row(units: DataFrame, offset: Column, serves: Column, slot: Column) -> DataFrame:
    placed = units.withColumns({"queue_offset": offset, "broker_serves": serves, "rebuild_slot": slot})
    return placed.select(*UNIT_COLUMNS.names, "broker_serves", "rebuild_slot")


def _straight(units: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return _row(units, f.col("queue_offset"), f.lit(True), f.col("queue_offset"))


def _assigned(units: DataFrame, runs: DataFrame, queues: DataFrame, bases: DataFrame | None) -> DataFrame:
    from pyspark.sql import functions as f

    placed = units.join(_first_offsets(runs, queues, bases), [*QUEUE, "part"], "left")
    offset = f.coalesce(f.col("base"), _changed()) + f.col("number")
    return _row(placed, offset, f.lit(True), offset)


def _first_offsets(runs: DataFrame, queues: DataFrame, bases: DataFrame | None) -> DataFrame:
    """Return for each queue and part of the log the offset that the queue's first unit in the part would get.

    Offsets go on behind the table's, and behind those that a broker gave. Columns: the queue's, ``part``, ``base``.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    def units_where(condition: Column) -> Column:
        return f.sum(f.when(condition, f.col("units")).otherwise(0))

    counts = runs.where("skipped is null").groupBy(*QUEUE, "part").agg(
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
    """Fail where rows that Spark had lost were read again, in other batches."""
    from pyspark.sql import functions as f

    return f.raise_error(f.lit("the log was read in other batches the second time")).cast("bigint")


def _replayed(units: DataFrame, runs: DataFrame) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    given = runs.where("skipped is null and carried").repartition(*QUEUE)
    floors = given.sortWithinPartitions(*QUEUE, "position").mapInArrow(_floors, _FLOORS)
    placed = units.join(floors.withColumn("known", f.lit(True)), _RUN, "left")
    packed, floor = f.col("ahead").isNotNull(), f.col("floor")
    q = f.col("queue_offset") - f.coalesce("ahead", f.lit(0))
    slot = Window.partitionBy(*QUEUE, "queue_offset")
    serves = packed | (f.col("position") == f.max("position").over(slot))
    kept = f.when(packed | floor.isNull() | (q >= floor), q)
    rebuilt = f.when((q == 0) & ~packed, f.coalesce(floor, f.lit(0))).otherwise(kept)
    return _row(placed, q, serves, f.when(f.col("known"), rebuilt).otherwise(_changed()))


def _floors(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Add to each run where its queue ended before it, in RocketMQ's rebuild; null at the queue's begin.

    Of a packed queue also how far the run's offsets are ahead of its slots. The rows come sorted by queue and position.
    """
    queue: tuple[Any, ...] = ()
    end: int | None = None
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in (*QUEUE, "first", "units", "packed")]
        floors: list[int | None] = []
        aheads: list[int | None] = []
        for *this, first, units, packed in zip(*columns, strict=True):
            if tuple(this) != queue:
                queue, end = tuple(this), None
            floors.append(end)
            begin = first if end is None else end
            aheads.append(first - begin if packed else None)
            end = begin + units if packed or first == 0 else max(first + units, begin)
        kept = [batch.column(name) for name in _RUN]
        found = [pa.array(floors, pa.int64()), pa.array(aheads, pa.int64())]
        yield pa.RecordBatch.from_arrays([*kept, *found], names=[*_RUN, "floor", "ahead"])

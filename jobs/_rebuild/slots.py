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

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa

from jobs._rebuild.dispatch import NAMED_AGAIN
from jobs._rebuild.runs import RUN_SCHEMA
from jobs._rebuild.units import UNIT_COLUMNS

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame

__all__ = ["QueueFacts", "facts_of", "facts_row", "first_offsets", "place", "queues_of", "runs_of"]

_QUEUE: Final = ["group", "topic", "queue_id"]
_RUN: Final = [*_QUEUE, "part", "run"]
_FLOORS: Final = "`group` string, topic string, queue_id int, part bigint, run bigint, floor bigint, ahead bigint"

# One text each, not a chain of calls: Spark's analyser would look at every link, which takes longer than the query.
# What was not told has no bounds: it sorts first, and no maximum sees it.
_QUEUES: Final = """
    WITH spans AS (
        SELECT *, CASE WHEN told THEN first END AS low, CASE WHEN told THEN first + units END AS high
        FROM (SELECT *, carried AND skipped IS NULL AS told FROM {runs} WHERE skipped IS NULL OR skipped = {again})
    ),
    steps AS (
        SELECT *,
            max(high) OVER (
                PARTITION BY `group`, topic, queue_id ORDER BY position
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS before,
            max(high) OVER (
                PARTITION BY `group`, topic, queue_id ORDER BY low, position
                ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING
            ) AS below
        FROM spans
    ),
    queues AS (
        SELECT `group`, topic, queue_id,
            min(low) AS low,
            coalesce(max(high), 0) AS high,
            coalesce(bool_or(low < before), false) AS tangled,
            bool_or(skipped IS NOT NULL) AS packed,
            coalesce(sum(CASE WHEN told THEN units END), 0) AS told,
            coalesce(sum(CASE WHEN NOT carried THEN units END), 0) AS fresh,
            coalesce(sum(CASE WHEN carried
                THEN greatest(0, high - greatest(low, coalesce(below, low))) END), 0) AS slots
        FROM steps
        GROUP BY `group`, topic, queue_id
    )
    SELECT `group`, topic, queue_id, low, packed, told, fresh,
        tangled AND NOT packed AS tangled,
        CASE WHEN packed THEN told ELSE slots END AS slots,
        CASE WHEN packed THEN low + told ELSE high END AS high
    FROM queues
"""
_FACTS: Final = """
    SELECT
        coalesce(sum(told + fresh), 0) AS units,
        coalesce(sum(slots + fresh), 0) AS slots,
        coalesce(count_if(tangled), 0) AS tangled,
        coalesce(count_if(packed), 0) AS packed,
        coalesce(sum(fresh), 0) AS assigned,
        count(*) AS queues,
        coalesce(bool_and(coalesce(slots = high - low, true) OR batched), true) AS dense
    FROM {queues}
"""


@dataclass(frozen=True)
class QueueFacts:
    """What the runs say about all queues together.

    Attributes:
        units: number of units.
        slots: number of slots that they are in.
        queues: number of queues.
        dense: no queue has a hole that ought not to have any.
        tangled: queues where offsets do not only go up.
        packed: queues whose offsets ran ahead of their slots.
        assigned: units whose offsets are assigned here.
    """

    units: int
    slots: int
    queues: int
    dense: bool
    tangled: int
    packed: int
    assigned: int

    @property
    def straight(self) -> bool:
        """Each unit's slot is the queue offset that it carries, or is to be assigned."""
        return not self.tangled and not self.packed


def runs_of(units: DataFrame) -> DataFrame:
    """Returns the runs of units that were read already, as tasks would make them."""
    from pyspark.sql import functions as f

    runs = units.groupBy(*_RUN, "carried", "skipped").agg(
        f.min("queue_offset").alias("first"), f.min("position").alias("position"), f.count("*").alias("units")
    )
    return runs.select(*(column.split()[0].strip("`") for column in RUN_SCHEMA.split(", ")))


def queues_of(runs: DataFrame) -> DataFrame:
    """Returns a row for each queue: how many units and slots it has, how far it reaches, is it tangled or packed."""
    return runs.sparkSession.sql(_QUEUES, again=NAMED_AGAIN, runs=runs)


def facts_of(queues: DataFrame) -> QueueFacts:
    """Sums the queues up."""
    row = facts_row(queues, ()).first()
    assert row is not None
    return QueueFacts(**row.asDict())


def facts_row(queues: DataFrame, batch_topics: Sequence[str]) -> DataFrame:
    """Returns what QueueFacts says, as a single row.

    Args:
        queues: from ``queues_of``.
        batch_topics: their queues may have holes, as a message there takes several queue offsets.
    """
    from pyspark.sql import functions as f

    batched = queues.withColumn("batched", f.col("topic").isin(list(batch_topics)))
    return queues.sparkSession.sql(_FACTS, queues=batched)


def place(
    units: DataFrame, runs: DataFrame, queues: DataFrame, facts: QueueFacts, bases: DataFrame | None = None
) -> DataFrame:
    """Returns the rows of the table: the units with ``queue_offset``, ``broker_serves`` and ``rebuild_slot``.

    Args:
        units: from ``unit_batches``, evaluated as often as there are kinds of them: assigned, straight and others.
        runs: of these units.
        queues: of these runs.
        facts: of these queues.
        bases: columns of a queue and ``base``: the offset behind what a table holds of it already.
    """
    units = units.where("skipped is null").drop("skipped")
    parts = []
    if facts.assigned:
        parts.append(_assigned(units.where("not carried"), runs, queues, bases))
    told = units.where("carried")
    if not facts.straight:
        others = queues.where("tangled or packed").select(*_QUEUE, "packed")
        parts.append(_straight(told.join(others, _QUEUE, "left_anti")))
        parts.append(_replayed(told.join(others, _QUEUE, "left_semi"), runs.join(others, _QUEUE)))
    elif facts.units > facts.assigned or not parts:
        parts.append(_straight(told))
    placed = parts[0]
    for part in parts[1:]:
        placed = placed.unionByName(part)
    return placed


def _row(units: DataFrame, offset: Column, serves: Column, slot: Column) -> DataFrame:
    placed = units.withColumns({"queue_offset": offset, "broker_serves": serves, "rebuild_slot": slot})
    return placed.select(*UNIT_COLUMNS, "broker_serves", "rebuild_slot")


def _straight(units: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return _row(units, f.col("queue_offset"), f.lit(True), f.col("queue_offset"))


def first_offsets(runs: DataFrame, queues: DataFrame, bases: DataFrame | None = None) -> DataFrame:
    """Returns for each queue and part of the log the offset that the queue's first unit in the part would get.

    Offsets go on behind the table's, and behind those that a broker gave. Columns: the queue's, ``part``, ``base``.
    """
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    counts = runs.where("skipped is null").groupBy(*_QUEUE, "part").agg(
        f.sum(f.when(~f.col("carried"), f.col("units")).otherwise(0)).alias("fresh_here"),
        f.sum(f.when(f.col("carried"), f.col("units")).otherwise(0)).alias("told_here"),
    )  # fmt: skip
    earlier = Window.partitionBy(*_QUEUE).orderBy("part").rowsBetween(Window.unboundedPreceding, -1)
    before = counts.withColumn("before", f.coalesce(f.sum("fresh_here").over(earlier), f.lit(0)))
    known = before.join(queues.select(*_QUEUE, "high"), _QUEUE)
    base = f.col("high")
    if bases is not None:
        known = known.join(bases, _QUEUE, "left")
        base = f.greatest("high", f.coalesce("base", f.lit(0)))
    return known.select(*_QUEUE, "part", (base + f.col("before") - f.col("told_here")).alias("base"))


def _assigned(units: DataFrame, runs: DataFrame, queues: DataFrame, bases: DataFrame | None) -> DataFrame:
    from pyspark.sql import functions as f

    placed = units.join(first_offsets(runs, queues, bases), [*_QUEUE, "part"], "left")
    changed = f.raise_error(f.lit("the log was read in other batches the second time"))
    offset = f.coalesce(f.col("base"), changed.cast("bigint")) + f.col("number")
    return _row(placed, offset, f.lit(True), offset)


def _replayed(units: DataFrame, runs: DataFrame) -> DataFrame:
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    told = runs.where("skipped is null and carried").repartition(*_QUEUE)
    floors = told.sortWithinPartitions(*_QUEUE, "position").mapInArrow(_floors, _FLOORS)
    placed = units.join(floors.withColumn("known", f.lit(True)), _RUN, "left")
    packed, floor = f.col("ahead").isNotNull(), f.col("floor")
    q = f.col("queue_offset") - f.coalesce("ahead", f.lit(0))
    slot = Window.partitionBy(*_QUEUE, "queue_offset")
    serves = packed | (f.col("position") == f.max("position").over(slot))
    kept = f.when(packed | floor.isNull() | (q >= floor), q)
    rebuilt = f.when((q == 0) & ~packed, f.coalesce(floor, f.lit(0))).otherwise(kept)
    changed = f.raise_error(f.lit("the log was read in other batches the second time")).cast("bigint")
    return _row(placed, q, serves, f.when(f.col("known"), rebuilt).otherwise(changed))


def _floors(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Adds to each run where its queue ended before it, in RocketMQ's rebuild; null at the queue's begin.

    Of a packed queue also how far the run's offsets are ahead of its slots. The rows come sorted by queue and position.
    """
    queue: tuple[Any, ...] = ()
    end: int | None = None
    for batch in batches:
        columns = [batch.column(name).to_pylist() for name in (*_QUEUE, "first", "units", "packed")]
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

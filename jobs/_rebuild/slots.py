"""The slot of each unit in its queue, from ranges of queue offsets: a few rows per batch and queue for any log size.

In a native log the offset of a unit is the number of earlier units of its queue: the count of all earlier batches
(prefix sums over the ranges) plus its number in its own batch. In a broker's log the message contains its offset. Most
queues are monotonic then, and offsets are slots. A queue is *non_monotonic* if a broker assigned offsets twice. Each of
its units gets

- whether a running broker serves it;
- its slot in RocketMQ's own rebuild, which reads the log in order and appends each unit at the end of its queue, also
  after a hole, except one whose offset is below that end: it is left out. A unit with offset 0 is always appended.

A broker assigns an offset twice for two reasons. Two producers sent at once (apache/rocketmq#2865): the broker treats
the second message as its rebuild does, and its counter counted both, so the next offsets are skipped. Or it lost the
end of the queue and continued from there: the later units replaced the earlier ones, and no offset is skipped. A
skipped range of the same size after the repeated one tells them apart.

A queue is *renumbered* if messages name it more than once as a further queue. Its offsets ran ahead of its slots, so
its units are numbered contiguously, as in a running broker's files and in its rebuild.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from dledger_core.rocketmq import NAMED_AGAIN, STAYS, moves_of, replay

from .units import UNIT_COLUMNS

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
_SLOTS: Final = "`group` string, topic string, queue_id int, position bigint, slot bigint"
_REPLAYED: Final = """
    `group` string, topic string, queue_id int, part bigint, range_id bigint,
    floor bigint, shift bigint, served_floor bigint, served_shift bigint, renumbered boolean
"""

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
        coalesce(bool_or(low > before), false) AS holes,
            bool_or(skipped IS NOT NULL) AS renumbered,
            coalesce(sum(CASE WHEN given THEN units END), 0) AS given,
            coalesce(sum(CASE WHEN given THEN greatest(0, high - greatest(low, below)) END), 0) AS slots,
            coalesce(sum(CASE WHEN NOT carried THEN units END), 0) AS fresh
        FROM steps
        GROUP BY `group`, topic, queue_id
    )
    SELECT `group`, topic, queue_id, renumbered, given, fresh, low, holes,
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
        odd: queues that are non_monotonic or renumbered, or have holes.
    """

    given: int
    assigned: int
    odd: int


def queues_of(ranges: DataFrame, batch_topics: tuple[str, ...] = ()) -> DataFrame:
    """Return a row for each queue of a micro-batch.

    ``given`` and ``fresh`` are its numbers of units with and without a broker's offset; ``low``, ``high`` and ``slots``
    are the range and the number of the broker's offsets. ``non_monotonic`` and ``renumbered``: see the module.
    ``holes``: offsets are missing; not in queues of ``batch_topics``, where one message takes several.
    """
    from pyspark.sql import functions as f

    queues = ranges.sparkSession.sql(_QUEUES, again=NAMED_AGAIN, ranges=ranges)
    return queues.withColumn("holes", f.col("holes") & ~f.col("topic").isin(*batch_topics)) if batch_topics else queues


def count_units(queues: Iterable[Mapping[str, Any]]) -> UnitCounts:
    """Count the units of all queues."""
    given = assigned = odd = 0
    for row in queues:
        given, assigned = given + row["given"], assigned + row["fresh"]
        odd += row["non_monotonic"] or row["renumbered"] or row["holes"]
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
        others = queues.where("non_monotonic or renumbered or holes").select(*QUEUE, "renumbered")
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
    replayed = given.sortWithinPartitions(*QUEUE, "position").mapInArrow(_replay, _REPLAYED)
    placed = units.join(replayed, _RANGE, "left")
    q, renumbered = f.col("queue_offset"), f.col("renumbered")
    rebuilt = f.when(q >= f.col("floor"), q - f.col("shift"))
    placed = placed.withColumn("served", f.when(q >= f.col("served_floor"), q - f.col("served_shift")))
    newest = f.max("position").over(Window.partitionBy(*QUEUE, "served"))
    serves = f.col("served").isNotNull() & (f.col("position") == newest)
    offset = f.when(renumbered, rebuilt).otherwise(q)
    return _row(placed, offset, serves, f.when(renumbered.isNotNull(), rebuilt).otherwise(_changed()))


def _replay(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield for each range the lowest offset that gets a slot, and its distance to that slot: of a rebuild, and served.

    The rows come sorted by queue and position.
    """
    queue: tuple[Any, ...] = ()
    rows: list[dict[str, Any]] = []
    for batch in batches:
        for row in batch.to_pylist():
            this = tuple(row[name] for name in QUEUE)
            if this != queue and rows:
                yield _replayed_queue(rows)
                rows = []
            queue = this
            rows.append(row)
    if rows:
        yield _replayed_queue(rows)


def _replayed_queue(rows: list[dict[str, Any]]) -> pa.RecordBatch:
    ranges = [(row["first"], row["units"]) for row in rows]
    renumbered = rows[0]["renumbered"]
    rebuilt = replay(ranges, [STAYS] * len(ranges), renumbered=renumbered)
    served = replay(ranges, moves_of(ranges), renumbered=renumbered)
    columns = [pa.array([row[name] for row in rows]) for name in _RANGE]
    columns[2] = columns[2].cast(pa.int32())
    columns += [
        pa.array(list(column), pa.int64()) for found in (rebuilt, served) for column in zip(*found, strict=True)
    ]
    names = [*_RANGE, "floor", "shift", "served_floor", "served_shift", "renumbered"]
    return pa.RecordBatch.from_arrays([*columns, pa.array([renumbered] * len(rows))], names=names)


def kept_in(rows: DataFrame, on_duplicate: str) -> DataFrame:
    """Return the unit of each slot of the files, with ``queue_offset`` = slot; see ``file_slots``."""
    from pyspark.sql import functions as f

    kept = file_slots(rows, on_duplicate).where("slot is not null")
    return kept.withColumn("queue_offset", f.col("slot")).drop("slot")


def file_slots(rows: DataFrame, on_duplicate: str) -> DataFrame:
    """Add ``slot``, the slot in files as RocketMQ's rebuild (``first``) or a running broker (``last``) has them.

    It is null for messages that they leave out. A hole in the log stays a hole, so consumers' offsets stay correct.

    Args:
        rows: of the table.
        on_duplicate: ``first`` or ``last``.
    """
    from pyspark.sql import functions as f

    last = on_duplicate == "last"

    def place_queue(queue: pa.Table) -> pa.Table:
        return file_slots_of(queue, last=last)

    repeating = rows.where("not broker_serves or rebuild_slot is null or rebuild_slot > queue_offset")
    repeating = repeating.select(*QUEUE).distinct()
    plain = rows.join(repeating, QUEUE, "left_anti").withColumn("slot", f.col("queue_offset"))
    others = rows.join(repeating, QUEUE, "left_semi")
    slots = others.select(*QUEUE, "position", "queue_offset").groupBy(*QUEUE).applyInArrow(place_queue, _SLOTS)
    return plain.unionByName(others.join(slots, [*QUEUE, "position"]))


def file_slots_of(queue: pa.Table, *, last: bool) -> pa.Table:
    """Return the slot of each unit of a queue whose offsets a broker assigned twice."""
    queue = queue.sort_by("position")
    offsets = np.asarray(queue["queue_offset"])
    breaks = np.ones(len(offsets), np.bool_)
    breaks[1:] = (offsets[1:] != offsets[:-1] + 1) | (offsets[:-1] == 0)
    begins = np.flatnonzero(breaks)
    units = np.diff(np.append(begins, len(offsets)))
    ranges = list(zip(offsets[begins].tolist(), units.tolist(), strict=True))
    moves = moves_of(ranges)
    if not last:
        moves = [each._replace(replaces=False) for each in moves]
    floors, shifts = (np.repeat(np.array(column), units) for column in zip(*replay(ranges, moves), strict=True))
    slots = offsets - shifts
    kept = offsets >= floors
    if last:  # of several units in a slot the last one stays
        newest = {slot: at for at, slot in enumerate(slots.tolist()) if kept[at]}
        kept[:] = False
        kept[list(newest.values())] = True
    return queue.select([*QUEUE, "position"]).append_column("slot", pa.array(slots, mask=~kept))

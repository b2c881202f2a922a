"""Compares a broker's consume queues, in files or in RocksDB, with the log, and classifies every difference.

A unit is matched with the message that it points at, not with the slot alone. So a lost unit is distinguished from the
later units that moved up. Units that point before the log's first message are left over by retention and not a
difference; nor are those of messages that a running broker appended after the log was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dledger_core import ConfigError
from dledger_core.rocketmq import SCHEDULE_TOPIC, queues_in_rocksdb, require_rocksdb

from .broker import Consumers
from .files import DIRECTORY
from .slots import file_slots
from .stored_queues import FOUND, PARTS, StoredQueues, stored_queues

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

__all__ = ["CAUSES", "Comparison", "LogEnd", "check_compared", "compare"]

CAUSES: Final = {
    "CQ_MISSING": "the message is in the log, its unit is not in the files: it was never indexed, or its unit was lost",
    "CQ_EXTRA": "the files point at a position without a message of this queue in the log",
    "CQ_WRONG_POSITION": "the message of the slot is in the log, its unit points to another position",
    "CQ_WRONG_SIZE": "the unit's size is not the message's",
    "CQ_WRONG_TAG": "the unit's tags code is not the message's: a filter by tag misses it",
    "CQ_EXT_MISSING": "the unit is an address into consumequeue_ext without a unit: the broker does not filter by tag",
    "CQ_ORDER": "the message is indexed in a slot that is not its queue offset: units before it were lost",
    "CQ_DUPLICATE_OFFSET": "the broker assigned this queue offset more than once; the files serve one message only",
}
"""Cause of each class of difference."""

_REBUILD: Final = (
    "rebuild the queue with --files, stop the broker and replace its directory; RocketMQ 5.3.3's own rebuild needs "
    "recheckReputOffsetFromCq=true in broker.conf, deleting consumequeue/ alone rebuilds nothing"
)
_REBUILD_ROCKSDB: Final = (
    "write the queues with --files, stop the broker, replace its directory consumequeue, and start it with "
    "storeType=default in broker.conf"
)
"""The same where the queues are in RocksDB, which is never written."""
_NEXT: Final = {
    "CQ_MISSING": f"consumers do not get the message: {_REBUILD}",
    "CQ_EXTRA": f"check that this is the broker of that log; if its log was truncated, {_REBUILD}",
    "CQ_WRONG_POSITION": f"consumers get another message or none: {_REBUILD}",
    "CQ_WRONG_SIZE": f"consumers get a truncated message or none: {_REBUILD}",
    "CQ_WRONG_TAG": _REBUILD,
    "CQ_EXT_MISSING": f"consumers get messages of other tags: {_REBUILD}; these files have plain tags codes, which a "
    "broker with enableConsumeQueueExt=true reads too",
    "CQ_ORDER": f"consumers' offsets mean other messages than on the other brokers: {_REBUILD}",
    "CQ_DUPLICATE_OFFSET": "see duplicates in the summary: the lost messages, their consumers, and how to restore them",
}
"""Next step for each class of difference."""

_DELAYED: Final = {
    "cause": "a delayed message's tags code is its delivery time, and the unit's is another one: the broker has, or "
    "had when it stored the message, its own messageDelayLevel",
    "next": f"run the job with the broker's messageDelayLevel as --delay-levels; if they still differ, {_REBUILD}",
}
"""Of CQ_WRONG_TAG in queues of delayed messages."""

_NEWER: Final = "newer"
"""Class of a unit whose message was appended after the log was read: not a difference."""
_GROUPS_MAX: Final = 50
_FINDINGS_MAX: Final = 1000
_QUEUE: Final = ["topic", "queue_id"]
_DIFFERENCE: Final = ["kind", *_QUEUE, "slot", "expected", "found"]


@dataclass(frozen=True)
class LogEnd:
    """The end of a log that a broker may append to.

    Attributes:
        read: end of the read positions.
        now: returns the present end.
    """

    read: int
    now: Callable[[], int]


@dataclass(frozen=True)
class Comparison:
    """The result of a comparison.

    Attributes:
        directory: the consumequeue directory.
        noun: ``file``, or ``queue`` of a database.
        parts: number of files or queues read.
        counts: differing slots per class.
        newer: units of messages that were appended after the log was read.
        unindexed: messages that a broker has not written to its database yet; it does when it starts again.
        findings: ranges of slots [start, end) with class, topic, queue_id, count, first positions, cause and next step.
    """

    directory: str
    noun: str
    parts: int
    counts: dict[str, int]
    newer: int
    unindexed: int
    findings: tuple[dict[str, Any], ...]

    def summary(self) -> dict[str, Any]:
        """Return the fields of the JSON summary."""
        return {
            "directory": self.directory,
            f"{self.noun}s": self.parts,
            "differences": self.counts,
            "newer_units": self.newer,
            **({} if self.noun == "file" else {"unindexed_messages": self.unindexed}),
            "findings": list(self.findings),
            "findings_cut": len(self.findings) >= _FINDINGS_MAX,
        }


def check_compared(directory: str) -> str:
    """Return the directory of the topics: ``directory`` or its ``consumequeue``.

    Raises:
        ConfigError: it is not a local directory, or its queues are in RocksDB and the binding is not installed.
    """
    path = Path(directory).absolute()
    if not path.is_dir():
        raise ConfigError(f"--compare {directory} is not a directory", "", "name a broker's store or its consumequeue")
    path = path / DIRECTORY if (path / DIRECTORY).is_dir() else path
    if queues_in_rocksdb(path):
        require_rocksdb()
    return str(path)


def compare(
    spark: SparkSession,
    rows: DataFrame,
    directory: str,
    on_duplicate: str = "first",
    consumers: Consumers | None = None,
    log_end: LogEnd | None = None,
) -> Comparison:
    """Compare the queues in ``directory`` with the messages of one group's log.

    Args:
        spark: the session.
        rows: of the table.
        directory: from ``check_compared``; the executors must share it.
        on_duplicate: the expected message of a slot with several, ``first`` or ``last``.
        consumers: the consumers' offsets, for lost messages.
        log_end: end of the log of the rows; None: it does not change.
    """
    from pyspark import StorageLevel

    stored = stored_queues(directory)
    parts, unindexed = stored.parts(), 0
    if stored.indexed_end is not None:
        unindexed = rows.where(rows["position"] >= stored.indexed_end).count()
        rows = rows.where(rows["position"] < stored.indexed_end)
    claims = _claims(rows, on_duplicate).persist(StorageLevel.MEMORY_AND_DISK)
    found = _found(spark, stored, parts).persist(StorageLevel.MEMORY_AND_DISK)
    added = _added(found, log_end)
    differences = _differences(claims, found, added).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        counts = {row["kind"]: row["count"] for row in differences.groupBy("kind").count().collect()}
        newer = counts.pop(_NEWER, 0)
        ranges = tuple(_with_consumers(each, consumers or {}) for each in _ranges(differences))
    finally:
        for frame in (differences, found, claims):
            frame.unpersist()
    if stored.indexed_end is not None:
        ranges = tuple({**each, "next": each["next"].replace(_REBUILD, _REBUILD_ROCKSDB)} for each in ranges)
    return Comparison(directory, stored.noun, len(parts), dict(sorted(counts.items())), newer, unindexed, ranges)


def _added(found: DataFrame, log_end: LogEnd | None) -> tuple[int, int]:
    """Return the positions [start, end) appended after the log was read, to which units may point."""
    from pyspark.sql import functions as f

    if log_end is None:
        return 0, 0
    newest = found.agg(f.max("position")).first()  # reads all units before the end of the log
    assert newest is not None
    if newest[0] is None or newest[0] < log_end.read:
        return 0, 0
    return log_end.read, log_end.now()


def _claims(rows: DataFrame, on_duplicate: str) -> DataFrame:
    """Return all messages: whether each is expected in its slot (``kept``), and shares it with others (``twice``)."""
    from pyspark.sql import functions as f

    columns = ["position", "queue_offset", "size", "tags_code", "slot"]
    slots = rows.where("not broker_serves").select(*_QUEUE, "queue_offset").distinct()
    known = file_slots(rows, on_duplicate).select(*_QUEUE, *columns)
    known = known.join(slots.withColumn("several", f.lit(True)), [*_QUEUE, "queue_offset"], "left")
    twice, slot = f.col("several").isNotNull(), f.col("slot")
    known = known.withColumns({"twice": twice, "kept": slot.isNotNull() | ~twice})
    own = f.coalesce(slot, "queue_offset")
    known = known.withColumns({"offset": f.col("queue_offset"), "queue_offset": own})
    return known.drop("several", "slot")


def _with_consumers(found: dict[str, Any], consumers: Consumers) -> dict[str, Any]:
    """Add to lost messages the offsets of the consumer groups."""
    offsets = consumers.get((found["topic"], found["queue_id"]))
    if found["kind"] != "CQ_MISSING" or not offsets:
        return found
    return {**found, "consumers": dict(sorted(offsets.items())[:_GROUPS_MAX])}


def _found(spark: SparkSession, stored: StoredQueues, parts: list[tuple[str, int, int, str]]) -> DataFrame:
    listed = spark.createDataFrame(parts, PARTS)
    tasks = max(1, min(len(parts), 4 * spark.sparkContext.defaultParallelism))
    return listed.repartition(tasks).mapInArrow(stored.read, FOUND)


def _differences(claims: DataFrame, found: DataFrame, added: tuple[int, int]) -> DataFrame:
    from pyspark.sql import functions as f

    joined = claims.join(found, [*_QUEUE, "position"], "full_outer")
    indexed = joined.where("kept is not null and slot is not null")
    wrong_tag = ~f.col("lost_tags") & (f.col("tags_code") != f.col("found_tags"))
    in_place = f.col("slot").isin(f.col("queue_offset"), f.col("offset"))  # in its slot, or in that of its offset
    kinds = f.array(
        f.when(~in_place, "CQ_ORDER"),
        f.when(in_place & (f.col("size") != f.col("found_size")), "CQ_WRONG_SIZE"),
        f.when(in_place & wrong_tag, "CQ_WRONG_TAG"),
        f.when(in_place & f.col("lost_tags"), "CQ_EXT_MISSING"),
    )
    moved = indexed.withColumn("kind", f.explode(f.array_compact(kinds)))
    # In a slot that is not the message's own, the rebuild has another message: the two positions show the shift.
    in_slot = _kept(claims).withColumnRenamed("expected", "own")
    moved = moved.join(in_slot, [*_QUEUE, "slot"], "left").withColumn("found", f.col("position"))
    moved = moved.withColumn("expected", f.when(f.col("kind") == "CQ_ORDER", f.col("own")).otherwise(f.col("position")))
    unmatched = _unmatched(claims, joined, added)
    duplicated = _duplicated(claims, found)
    missing = _missing(joined, unmatched, duplicated)
    duplicated = duplicated.withColumn("kind", f.lit("CQ_DUPLICATE_OFFSET"))
    parts = [part.select(*_DIFFERENCE) for part in (moved, unmatched, duplicated, missing)]
    return parts[0].unionByName(parts[1]).unionByName(parts[2]).unionByName(parts[3])


def _kept(claims: DataFrame) -> DataFrame:
    from pyspark.sql import functions as f

    return claims.where("kept").select(
        *_QUEUE, f.col("queue_offset").alias("slot"), f.col("position").alias("expected")
    )


def _unmatched(claims: DataFrame, joined: DataFrame, added: tuple[int, int]) -> DataFrame:
    """Return the units without a message of their queue, also those in the ``added`` positions."""
    from pyspark.sql import functions as f

    begin = claims.agg(f.min("position").alias("begin"))
    lost = joined.where("kept is null").select(*_QUEUE, "slot", f.col("position").alias("found"))
    lost = lost.join(_kept(claims), [*_QUEUE, "slot"], "left").crossJoin(f.broadcast(begin))
    leftover = f.col("expected").isNull() & (f.col("found") < f.col("begin"))
    newer = (f.col("found") >= added[0]) & (f.col("found") < added[1])
    kind: Column = f.when(f.col("expected").isNotNull(), "CQ_WRONG_POSITION").when(newer, _NEWER).otherwise("CQ_EXTRA")
    return lost.where(~f.coalesce(leftover, f.lit(False))).withColumn("kind", kind)


def _duplicated(claims: DataFrame, found: DataFrame) -> DataFrame:
    """Return the slots with several messages, and the one that the files serve."""
    from pyspark.sql import functions as f

    own = f.max(f.when(f.col("kept"), f.col("queue_offset")))
    several = claims.where("twice").groupBy(*_QUEUE, "offset")
    positions = several.agg(
        f.sort_array(f.collect_list("position")).alias("positions"), f.coalesce(own, "offset").alias("slot")
    )
    served = found.select(*_QUEUE, "slot", f.col("position").alias("served"))
    joined = positions.join(served, [*_QUEUE, "slot"], "left")
    found_one = f.when(f.array_contains("positions", f.col("served")), f.col("served"))
    return joined.withColumn("found", found_one).withColumn("expected", f.col("positions")[0])


def _missing(joined: DataFrame, unmatched: DataFrame, duplicated: DataFrame) -> DataFrame:
    """Return the messages without a unit in their queue, unless another difference explains the slot."""
    from pyspark.sql import functions as f

    lost = joined.where("kept and slot is null").drop("slot")
    lost = lost.withColumn("slot", f.col("queue_offset")).withColumn("expected", f.col("position"))
    explained = unmatched.where("kind = 'CQ_WRONG_POSITION'").select(*_QUEUE, "slot")
    explained = explained.unionByName(duplicated.where("found is not null").select(*_QUEUE, "slot"))
    served = joined.where("twice and slot is not null").select(*_QUEUE, "offset").distinct()
    lost = lost.join(explained, [*_QUEUE, "slot"], "left_anti").join(served, [*_QUEUE, "offset"], "left_anti")
    return lost.withColumn("kind", f.lit("CQ_MISSING")).withColumn("found", f.lit(None).cast("bigint"))


def _ranges(differences: DataFrame) -> tuple[dict[str, Any], ...]:
    """Join adjacent slots of one class and queue."""
    from pyspark.sql import Window
    from pyspark.sql import functions as f

    order = Window.partitionBy("kind", *_QUEUE).orderBy("slot")
    islands = differences.where(f.col("kind") != _NEWER).withColumn(
        "island", f.col("slot") - f.row_number().over(order)
    )
    ranges = islands.groupBy("kind", *_QUEUE, "island").agg(
        f.min("slot").alias("start"),
        (f.max("slot") + 1).alias("end"),
        f.count("*").alias("count"),
        f.min_by("expected", "slot").alias("expected_position"),
        f.min_by("found", "slot").alias("found_position"),
    )
    rows = ranges.drop("island").orderBy("kind", *_QUEUE, "start").limit(_FINDINGS_MAX).collect()
    return tuple({**row.asDict(), **_meaning(row["kind"], row["topic"])} for row in rows)


def _meaning(kind: str, topic: str) -> dict[str, str]:
    if (kind, topic) == ("CQ_WRONG_TAG", SCHEDULE_TOPIC):
        return _DELAYED
    return {"cause": CAUSES[kind], "next": _NEXT[kind]}

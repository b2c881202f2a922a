"""Keeps a table of consume queues up to date: a stream over the log, each micro-batch one Delta transaction.

A queue goes on behind the highest offset in the very version of the table that the micro-batch extends; each commit
says where the queues end. The transaction carries the query's id and the micro-batch's number, so one that is run
again after a crash writes nothing. The table remembers the query's id: with another checkpoint it would hold messages
twice, so that is refused.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from dledger_core.cli import stop_requests
from dledger_core.errors import ConfigError
from jobs._cli import progress
from jobs._rebuild.queue_ends import ENDS_SCHEMA, Ends, advanced, ends_at, to_metadata
from jobs._rebuild.slots import facts_of, place, queues_of, runs_of
from jobs._rebuild.units import UNIT_SCHEMA, EntryRules, unit_batches

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = ["OWNER", "check_extendable", "check_trigger", "extend", "follow", "owner_of"]

OWNER: Final = "dledger.rebuild.query"
"""Table property: id of the streaming query that the table belongs to."""

_INTERVAL: Final = re.compile(r"^\d+(\.\d+)?\s*(milliseconds?|seconds?|minutes?|hours?)$")
_POLL_S: Final = 1
_STOP_PATIENCE_S: Final = 30


def check_trigger(trigger: str) -> None:
    """Raises ConfigError unless it is ``available-now`` or an interval."""
    if trigger != "available-now" and not _INTERVAL.match(trigger):
        raise ConfigError(f"wrong trigger {trigger!r}", "--trigger", 'use available-now or "10 seconds"')


def owner_of(spark: SparkSession, table: str) -> str | None:
    """Returns the id of the query that keeps the table, None if there is no table or it was rebuilt as a whole."""
    from delta.tables import DeltaTable

    if not DeltaTable.isDeltaTable(spark, table):
        return None
    properties = DeltaTable.forPath(spark, table).detail().select("properties").first()
    assert properties is not None
    return dict(properties[0]).get(OWNER)


def check_extendable(spark: SparkSession, table: str) -> None:
    """Raises ConfigError if there is a table that no stream began."""
    from delta.tables import DeltaTable

    if DeltaTable.isDeltaTable(spark, table) and owner_of(spark, table) is None:
        raise ConfigError(f"{table} was rebuilt as a whole", "--table", "name a new directory, with --checkpoint")


def follow(
    spark: SparkSession,
    source: dict[str, str],
    table: str,
    checkpoint: str,
    trigger: str,
    make_table: Callable[[SparkSession, str, dict[str, str]], None],
    rules: EntryRules,
) -> dict[str, Any]:
    """Runs the stream until the available entries are read, or until a signal stops it.

    Args:
        spark: the session, with the data source registered.
        source: options of the data source.
        table: directory of the Delta table.
        checkpoint: directory of the query's checkpoint.
        trigger: ``available-now`` or an interval.
        make_table: makes the table with properties, if it is absent.
        rules: how entries are read.

    Returns:
        ``batches`` and ``exit_reason`` for the summary.
    """
    entries = spark.readStream.format("dledger").options(**source, startingOffsets="earliest").load()
    done: list[int] = []

    def take(batch: DataFrame, number: int) -> None:
        query = str(batch.sparkSession.sparkContext.getLocalProperty("sql.streaming.queryId"))
        extend(batch, number, query, table, make_table, rules)
        done.append(number)
        progress(f"micro-batch {number} is in the table")

    writer = entries.select("group", "index", "position", "body").writeStream.foreachBatch(take)
    writer = writer.option("checkpointLocation", checkpoint)
    once = trigger == "available-now"
    writer = writer.trigger(availableNow=True) if once else writer.trigger(processingTime=trigger)
    with stop_requests() as stop:
        query = writer.start()
        try:
            stopped = _wait(query, done, stop)
        finally:
            query.stop()
    return {"batches": len(done), "exit_reason": "stopped" if stopped else "available data read"}


def _wait(query: StreamingQuery, done: list[int], stop: threading.Event) -> bool:
    """Returns whether a signal came; the micro-batch in hand is finished first, if that does not take long."""
    while not query.awaitTermination(_POLL_S):
        if stop.is_set():
            progress("stopping after the micro-batch in hand")
            finished, deadline = len(done), time.monotonic() + _STOP_PATIENCE_S
            while query.status["isTriggerActive"] and len(done) == finished and time.monotonic() < deadline:
                if query.awaitTermination(_POLL_S):
                    break
            return True
    return False


def extend(
    entries: DataFrame,
    number: int,
    query: str,
    table: str,
    make_table: Callable[[SparkSession, str, dict[str, str]], None],
    rules: EntryRules,
) -> None:
    """Adds the units of a micro-batch to the table.

    Args:
        entries: columns group, index, position, body.
        number: of the micro-batch.
        query: id of the streaming query.
        table: directory of the Delta table.
        make_table: makes the table with properties, if it is absent.
        rules: how entries are read.

    Raises:
        ConfigError: the table belongs to another query, or is gone; or queue offsets of a broker come in pieces.
    """
    from pyspark import StorageLevel

    spark = entries.sparkSession
    _check_owner(spark, table, query, number, make_table)
    ends, before = ends_at(spark, table)
    units = entries.mapInArrow(partial(unit_batches, rules=rules), UNIT_SCHEMA).persist(StorageLevel.MEMORY_AND_DISK)
    runs = runs_of(units).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        queues = queues_of(runs)
        facts = facts_of(queues)
        if not facts.units:  # the stream's first micro-batch is always empty
            return
        if facts.units > facts.assigned:
            _check_first(before, runs)
        bases = spark.createDataFrame([(*queue, end) for queue, end in ends.items()], ENDS_SCHEMA)
        placed = place(units, runs, queues, facts, bases)
        counted = queues.select("group", "topic", "queue_id", "high", "fresh").collect()
        _append(placed, table, query, number, advanced(ends, (row.asDict() for row in counted)))
    finally:
        runs.unpersist()
        units.unpersist()


def _append(placed: DataFrame, table: str, query: str, number: int, ends: Ends) -> None:
    writer = placed.write.format("delta").mode("append").option("txnAppId", query).option("txnVersion", str(number))
    metadata = to_metadata(ends)
    (writer if metadata is None else writer.option("userMetadata", metadata)).save(table)


def _check_owner(
    spark: SparkSession,
    table: str,
    query: str,
    number: int,
    make_table: Callable[[SparkSession, str, dict[str, str]], None],
) -> None:
    from delta.tables import DeltaTable

    if number == 0 and not DeltaTable.isDeltaTable(spark, table):
        make_table(spark, table, {OWNER: query})
    if owner_of(spark, table) != query:
        raise ConfigError(
            f"{table} was not made with this checkpoint",
            "--table, --checkpoint",
            "give the table's own checkpoint, or a new table and a new checkpoint",
        )


def _check_first(before: DataFrame, runs: DataFrame) -> None:
    """Which messages a broker serves depends on all of its offsets: they must come in one micro-batch."""
    from pyspark.sql import functions as f

    begin = runs.where("carried and skipped is null").agg(f.min("position")).first()
    assert begin is not None
    if before.where(f.col("position") < begin[0]).limit(1).count():
        remedy = "rebuild it as a whole, without --checkpoint"
        raise ConfigError("a broker's queue offsets come after entries that are in the table", "--checkpoint", remedy)

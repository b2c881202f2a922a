"""Rebuilds the consume queues of a log into a Delta table: one row per message and queue slot.

Usage::

    python jobs/rebuild_consume_queue.py --peers 'n0-127.0.0.1:40911;…' --table DIR
    python jobs/rebuild_consume_queue.py --store /var/rocketmq/store/dledger-n0 --table DIR
    spark-submit jobs/rebuild_consume_queue.py …

The table holds group, topic, queue_id, queue_offset, position, size, tags_code, store_timestamp and index.
``position`` and ``size`` are those of a RocketMQ consume queue unit: they address the message itself, which begins 48
bytes behind its entry, for our own logs as for a broker's. In a broker's log the queue offset is the one the broker
wrote into the message; in ours it is assigned here, in index order. Control entries have no row, nor do prepared and
rolled-back messages and entries that are no message.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # started as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click

from dledger_core.errors import ConfigError
from jobs._cli import (
    EXIT_FINDING,
    EXIT_OK,
    Outcome,
    connection_options,
    dry_run_option,
    not_available,
    parse_groups,
    progress,
    run_job,
)
from jobs._consume_queue import (
    TABLE_COLUMNS,
    TABLE_SCHEMA,
    UNIT_SCHEMA,
    assign_offsets,
    keep_one,
    read_store,
    unit_batches,
)
from jobs._session import check_versions, spark_session

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["RebuildPlan", "command", "main", "rebuild"]

_LATER = ("--commitlog", "--checkpoint", "--trigger", "--files", "--consume-queue-file-size", "--compare")


@dataclass(frozen=True, kw_only=True)
class RebuildPlan:
    """What to read and where to write it.

    Attributes:
        source: options of the data source.
        ranges: per group the indexes [start, end), fixed before Spark reads.
        foreign: the log was written by a broker, which assigned the queue offsets.
        table: directory of the Delta table.
        on_duplicate: which message keeps a slot that two claim, ``first`` or ``last``.
    """

    source: dict[str, str]
    ranges: dict[str, tuple[int, int]]
    foreign: bool
    table: str
    on_duplicate: str = "first"


def _later_options(command: Any) -> Any:
    for name in _LATER:
        command = click.option(name, hidden=True)(command)
    return command


@click.command()
@click.option("--peers", help="The servers: n0-host:port;n1-host:port;…")
@click.option("--groups", help="Logs to read, separated by commas.  [default: default]")
@click.option("--store", metavar="DIR", help="Instead of servers: a node's store directory, ours or a broker's.")
@click.option("--table", required=True, metavar="DELTA", help="Directory of the Delta table; made, or replaced whole.")
@click.option(
    "--on-duplicate",
    type=click.Choice(["first", "last"]),
    default="first",
    show_default=True,
    help="Which message keeps a slot that a broker gave out twice.",
)
@click.option(
    "--until",
    type=click.Choice(["committed", "end"]),
    default="end",
    show_default=True,
    help="How far to read a store: to its recorded commit index or to its last entry. Servers give what is committed.",
)
@_later_options
@dry_run_option
@connection_options
def command(
    peers: str | None,
    groups: str | None,
    store: str | None,
    table: str,
    on_duplicate: str,
    until: str,
    dry_run: bool,
    **later: str | None,
) -> Outcome:
    """Rebuilds consume queues from a log into a Delta table.

    One row per message: group, topic, queue_id, queue_offset, position, size, tags_code, store_timestamp, index.
    POSITION and SIZE are those of a RocketMQ consume queue unit, for our own logs too: where the message itself
    begins (48 bytes behind its entry) and its length. QUEUE_OFFSET is read from the message in a broker's log and
    assigned in index order, from the log's first entry on, in ours.

    Exit code 1 if a queue has holes, a slot is claimed twice or a broker's log holds what is no message.
    """
    for name, value in later.items():
        if value is not None:
            raise not_available("--" + name.replace("_", "-"))
    if bool(peers) == bool(store):
        raise ConfigError("give exactly one of --peers and --store", "", "see --help")
    if store and groups:
        raise ConfigError("a store holds one group", "--groups", "leave it out")
    check_versions()
    table = _checked_table(table)
    plan = _plan(peers, groups, store, table, on_duplicate, until)
    if dry_run:
        return Outcome({"status": "ok", "dry_run": True, "table": table, **_extent(plan)})
    with spark_session("dledger-rebuild-consume-queue") as spark:
        return rebuild(spark, plan)


def _checked_table(table: str) -> str:
    """Returns the table's absolute path; refuses a directory that holds something other than a Delta table."""
    if "://" in table:
        return table
    directory = Path(table).absolute()
    if directory.is_file():
        raise ConfigError(f"{table} is a file", "--table", "name a directory")
    if directory.is_dir() and any(directory.iterdir()) and not (directory / "_delta_log").is_dir():
        raise ConfigError(f"{table} holds files and is no Delta table", "--table", "name a new or empty directory")
    return str(directory)


def _plan(
    peers: str | None, groups: str | None, store: str | None, table: str, on_duplicate: str, until: str
) -> RebuildPlan:
    """Fixes what will be read, so that every pass over the log sees the same entries."""
    from spark_connector.options import DLedgerOptions
    from spark_connector.tracking import Tracker

    source = {"path": store} if store else {"peers": str(peers), "groups": ",".join(parse_groups(groups or "default"))}
    bounds = Tracker(DLedgerOptions.for_reading(source)).bounds()
    ranges = {group: (view.first, view.end) for group, view in sorted(bounds.items())}
    foreign = False
    if store:
        [(group, view)] = bounds.items()
        foreign = view.log is None
        if until == "end":
            ranges[group] = (view.first, _store_end(store))
    return RebuildPlan(source=source, ranges=ranges, foreign=foreign, table=table, on_duplicate=on_duplicate)


def _store_end(store: str) -> int:
    from dledger_core import open_store

    return int(open_store(store).last_index) + 1


def _extent(plan: RebuildPlan) -> dict[str, Any]:
    groups = {group: {"start": start, "end": end} for group, (start, end) in plan.ranges.items()}
    only = next(iter(groups.values())) if len(groups) == 1 else {}
    return {**only, "groups": groups}


def rebuild(spark: SparkSession, plan: RebuildPlan) -> Outcome:
    """Runs the rebuild in a session; the table is replaced in one Delta transaction."""
    from pyspark import StorageLevel

    _make_table(spark, plan.table)
    for group, (start, end) in plan.ranges.items():
        progress(f"reading group {group}: entries {start} to {end}")
    units = _read(spark, plan).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        skipped = {row["skipped"]: row["count"] for row in units.groupBy("skipped").count().collect()}
        claimed = skipped.pop(None, 0)
        progress(f"{claimed} messages; assigning slots")
        placed = units.where("skipped is null").drop("skipped")
        placed = keep_one(placed, plan.on_duplicate) if plan.foreign else assign_offsets(placed)
        # A plain overwrite would forget the table's clustering; replacing every row does not.
        placed.write.format("delta").mode("overwrite").option("replaceWhere", "true").save(plan.table)
    finally:
        units.unpersist()
    return _outcome(spark, plan, claimed, skipped)


def _read(spark: SparkSession, plan: RebuildPlan) -> DataFrame:
    if "path" in plan.source:
        [(group, (start, end))] = plan.ranges.items()
        return read_store(spark, plan.source, group, start, end)
    import json

    from spark_connector import register

    register(spark)
    starts, ends = ({group: bounds[i] for group, bounds in plan.ranges.items()} for i in (0, 1))
    options = {**plan.source, "startingOffsets": json.dumps(starts), "endingOffsets": json.dumps(ends)}
    entries = spark.read.format("dledger").options(**options).load().select("group", "index", "position", "body")
    return entries.mapInArrow(unit_batches, UNIT_SCHEMA)


def _make_table(spark: SparkSession, table: str) -> None:
    """Makes the table clustered by queue if it is absent; refuses one with other columns."""
    from delta.tables import DeltaTable

    if DeltaTable.isDeltaTable(spark, table):
        columns = tuple(spark.read.format("delta").load(table).columns)
        if columns != TABLE_COLUMNS:
            found = {"columns": ",".join(columns)}
            raise ConfigError(f"{table} is a table of something else", "--table", "name another directory", found)
        return
    schema = spark.createDataFrame([], TABLE_SCHEMA).schema
    builder = DeltaTable.createIfNotExists(spark).location(table).addColumns(schema)
    builder.clusterBy("topic", "queue_id").execute()


def _outcome(spark: SparkSession, plan: RebuildPlan, claimed: int, skipped: dict[str, int]) -> Outcome:
    """Reads the written table back and says what it holds."""
    from pyspark.sql import functions as f

    offset = f.col("queue_offset")
    queues = (
        spark.read.format("delta")
        .load(plan.table)
        .groupBy("group", "topic", "queue_id")
        .agg(f.count("*").alias("rows"), (f.max(offset) - f.min(offset) + 1).alias("slots"))
    )
    row = queues.agg(
        f.count("*").alias("queues"),
        f.coalesce(f.sum("rows"), f.lit(0)).alias("rows"),
        f.coalesce(f.bool_and(f.col("rows") == f.col("slots")), f.lit(True)).alias("without_holes"),
    ).first()
    assert row is not None
    duplicates = claimed - row["rows"]
    dense = bool(row["without_holes"])
    summary = {
        "rows": row["rows"],
        "queues": row["queues"],
        **_extent(plan),
        "dense": dense,
        "duplicate_slots": duplicates,
        "skipped": {name: skipped.get(name, 0) for name in ("not_messages", "prepared_or_rolled_back")},
        "queue_offsets": "read" if plan.foreign else "assigned",
        "table": plan.table,
    }
    damaged = plan.foreign and skipped.get("not_messages", 0) > 0
    return Outcome(summary, EXIT_OK if dense and not duplicates and not damaged else EXIT_FINDING)


def main() -> None:
    """Runs the job."""
    run_job(command)


if __name__ == "__main__":
    main()

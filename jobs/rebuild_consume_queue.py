"""Rebuilds the consume queues of a log into a Delta table: one row per message and queue slot.

Usage::

    python jobs/rebuild_consume_queue.py --peers 'n0-127.0.0.1:40911;…' --table DIR
    python jobs/rebuild_consume_queue.py --peers 'n0-127.0.0.1:40911;…' --table DIR --checkpoint DIR
    python jobs/rebuild_consume_queue.py --store /var/rocketmq/store/dledger-n0 --table DIR --files DIR
    python jobs/rebuild_consume_queue.py --commitlog /var/rocketmq/store/commitlog --table DIR
    spark-submit jobs/rebuild_consume_queue.py …

The table holds group, topic, queue_id, queue_offset, position, size, tags_code, store_timestamp and index.
``position`` and ``size`` are those of a RocketMQ consume queue unit: they address the message itself, which begins 48
bytes behind its entry, for our own logs as for a broker's. In a broker's log the queue offset is the one the broker
wrote into the message; in ours it is assigned here, in index order. Control entries have no row, nor do prepared and
rolled-back messages and entries that are no message. Messages of a classic CommitLog have no index.
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
from dledger_core.rocketmq.commit_log import ClassicFile, classic_files
from jobs._checkpoint import check_resume
from jobs._cli import (
    EXIT_FINDING,
    EXIT_OK,
    Outcome,
    connection_options,
    dry_run_option,
    parse_groups,
    progress,
    run_job,
    verbose_option,
)
from jobs._directories import check_apart, check_checkpoint
from jobs._failures import naming_all_nodes
from jobs._rebuild.classic import DAMAGED, group_of, preceding, read_classic
from jobs._rebuild.compare import check_compared, compare
from jobs._rebuild.files import FOLDER, check_target, whole_units, write_files
from jobs._rebuild.incremental import check_extendable, check_trigger, follow, owner_of
from jobs._rebuild.table import checked_table, make_table, queue_facts
from jobs._rebuild.units import (
    TABLE_COLUMNS,
    UNIT_SCHEMA,
    assign_offsets,
    claim_slots,
    read_store,
    unit_batches,
)
from jobs._session import check_versions, spark_session
from jobs._settings import VERBOSE
from jobs._stopping import run_stoppable

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["RebuildPlan", "command", "main", "rebuild"]

_EXAMPLES = """Examples:

\b
  # a live cluster, again and again, only what is new
  rebuild_consume_queue.py --peers 'n0-host:40911;n1-host:40911' --table queues --checkpoint queues.checkpoint
  # a stopped broker's store, and RocketMQ's own files beside it
  rebuild_consume_queue.py --store store/dledger-n0 --table queues --files rebuilt
  # what did the broker's own queues lose?
  rebuild_consume_queue.py --store store/dledger-n0 --table queues --compare store
  # classic CommitLog first, DLedger after; leave --store out for a classic log alone
  rebuild_consume_queue.py --commitlog store/commitlog --store store/dledger-n0 --table queues
"""


@dataclass(frozen=True, kw_only=True)
class RebuildPlan:
    """What to read and where to write it.

    Attributes:
        source: options of the data source; empty for a classic CommitLog alone.
        ranges: per group the indexes [start, end), fixed before Spark reads.
        foreign: the log was written by a broker, which assigned the queue offsets.
        table: directory of the Delta table.
        on_duplicate: which message keeps a slot that two claim, ``first`` or ``last``.
        classic: files of a classic CommitLog, read before the entries.
        files: directory to write RocketMQ's consumequeue files to.
        file_bytes: size of such a file.
        compared: consumequeue folder to compare with.
        checkpoint: directory of the stream's checkpoint; None for a full rebuild.
        trigger: ``available-now`` or an interval, with a checkpoint.
    """

    source: dict[str, str]
    ranges: dict[str, tuple[int, int]]
    foreign: bool
    table: str
    on_duplicate: str = "first"
    classic: tuple[ClassicFile, ...] = ()
    files: str | None = None
    file_bytes: int = 6_000_000
    compared: str | None = None
    checkpoint: str | None = None
    trigger: str = "available-now"


@click.command(epilog=_EXAMPLES)
@click.option("--peers", help="The servers: n0-host:port;n1-host:port;…")
@click.option("--groups", help="Logs to read, separated by commas.  [default: default]")
@click.option("--store", metavar="DIR", help="Instead of servers: a node's store directory, ours or a broker's.")
@click.option(
    "--commitlog", metavar="DIR", help="The classic RocketMQ CommitLog that precedes the store; alone: a classic log."
)
@click.option("--table", required=True, metavar="DELTA", help="Directory of the Delta table; made, or replaced whole.")
@click.option(
    "--checkpoint", metavar="DIR", help="With --peers: read on where the last run ended, and add to the table."
)
@click.option("--trigger", help='With --checkpoint: available-now or "10 seconds".  [default: available-now]')
@click.option("--files", metavar="DIR", help="Write RocketMQ's consumequeue/<topic>/<queue>/ files below DIR too.")
@click.option(
    "--consume-queue-file-size",
    type=click.IntRange(min=20, max=1 << 30),
    default=6_000_000,
    show_default=True,
    help="RocketMQ's mappedFileSizeConsumeQueue.",
)
@click.option(
    "--compare",
    "compared",
    metavar="DIR",
    help="Report every difference from the consumequeue files below DIR; they are not changed.",
)
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
@verbose_option
@dry_run_option
@connection_options
def command(**options: Any) -> Outcome:
    """Rebuilds consume queues from a log into a Delta table.

    One row per message: group, topic, queue_id, queue_offset, position, size, tags_code, store_timestamp, index.
    POSITION and SIZE are those of a RocketMQ consume queue unit, for our own logs too: where the message itself
    begins (48 bytes behind its entry) and its length. QUEUE_OFFSET is read from the message in a broker's log and
    assigned in index order, from the log's first entry on, in ours.

    Exit code 1 if a queue has holes, a slot is claimed twice, a broker's log holds what is no message, or --compare
    finds a difference.
    """
    plan = _plan(options)
    if options["dry_run"]:
        return Outcome({"status": "ok", "dry_run": True, "table": plan.table, **_extent(plan)})
    settings = VERBOSE if options["verbose"] else None
    session = spark_session("dledger-rebuild-consume-queue", settings=settings)
    with session as spark, naming_all_nodes(plan.source, "start them and run the same command again"):
        if plan.checkpoint is None:
            return run_stoppable(spark, lambda: rebuild(spark, plan))
        return _extend(spark, plan, plan.checkpoint)


def _check_combination(options: dict[str, Any]) -> None:
    """Refuses options that make no sense together, before anything is opened."""
    peers, store, commitlog = (options[name] for name in ("peers", "store", "commitlog"))
    if bool(peers) == bool(store or commitlog):
        raise ConfigError("give exactly one of --peers and --store", "", "see --help; --commitlog goes with --store")
    if not peers and options["groups"]:
        raise ConfigError("a store holds one group", "--groups", "leave it out")
    if options["trigger"] and not options["checkpoint"]:
        raise ConfigError("--trigger needs --checkpoint", "--trigger", "name a checkpoint directory, or leave it out")
    one_log = not peers or len(parse_groups(options["groups"] or "default")) == 1
    for name in ("files", "compared"):
        if options[name] and not one_log:
            flag = "--files" if name == "files" else "--compare"
            raise ConfigError("consume queue files are of one group", f"--groups, {flag}", "name one group")
    if options["checkpoint"]:
        _check_incremental(options)
    files = f"{options['files']}/{FOLDER}" if options["files"] else None
    written = {"--table": options["table"], "--checkpoint": options["checkpoint"], "--files": files}
    check_apart(written, {"--store": store, "--commitlog": commitlog, "--compare": options["compared"]})


def _check_incremental(options: dict[str, Any]) -> None:
    if not options["peers"]:
        raise ConfigError("--checkpoint works with --peers only", "--checkpoint", "a store is rebuilt as a whole")
    check_trigger(options["trigger"] or "available-now")
    check_checkpoint(options["checkpoint"])
    if (options["files"] or options["compared"]) and (options["trigger"] or "available-now") != "available-now":
        raise ConfigError("a stream without end writes no files", "--files, --compare", "use --trigger available-now")


def _plan(options: dict[str, Any]) -> RebuildPlan:
    """Fixes what will be read, so that every pass over the log sees the same entries."""
    _check_combination(options)
    check_versions()
    written = {
        "table": checked_table(options["table"]),
        "on_duplicate": options["on_duplicate"],
        "files": check_target(options["files"]) if options["files"] else None,
        "file_bytes": whole_units(options["consume_queue_file_size"]),
        "compared": check_compared(options["compared"]) if options["compared"] else None,
        "checkpoint": options["checkpoint"],
        "trigger": options["trigger"] or "available-now",
    }
    peers, store, commitlog = (options[name] for name in ("peers", "store", "commitlog"))
    if not peers and not store:
        return RebuildPlan(
            source={}, ranges={group_of(commitlog): (0, 0)}, foreign=True, classic=classic_files(commitlog), **written
        )
    return _log_plan(peers, options["groups"], store, commitlog, options["until"], written)


def _log_plan(
    peers: str | None, groups: str | None, store: str | None, commitlog: str | None, until: str, written: dict[str, Any]
) -> RebuildPlan:
    """The plan for a log with entries: servers, or a store that a classic CommitLog may precede."""
    from spark_connector.options import DLedgerOptions
    from spark_connector.reading.tracking import Tracker

    source = {"path": store} if store else {"peers": str(peers), "groups": ",".join(parse_groups(groups or "default"))}
    tracker = Tracker(DLedgerOptions.for_reading(source))
    bounds = tracker.bounds()
    if written["checkpoint"]:
        check_resume(written["checkpoint"], tracker)
    ranges = {group: (view.first, view.end) for group, view in sorted(bounds.items())}
    foreign = False
    classic: tuple[ClassicFile, ...] = ()
    if store:
        [(group, view)] = bounds.items()
        foreign = view.log is None
        if until == "end":
            ranges[group] = (view.first, _store_end(store))
        if commitlog and not foreign:
            raise ConfigError("the store was not written by a broker", "--commitlog", "leave it out")
        classic = preceding(commitlog, store) if commitlog else ()
    return RebuildPlan(source=source, ranges=ranges, foreign=foreign, classic=classic, **written)


def _store_end(store: str) -> int:
    from dledger_core import open_store

    return int(open_store(store).last_index) + 1


def _extent(plan: RebuildPlan) -> dict[str, Any]:
    groups = {group: {"start": start, "end": end} for group, (start, end) in plan.ranges.items()}
    only = next(iter(groups.values())) if len(groups) == 1 else {}
    classic = {}
    if plan.classic:
        places = {"files": len(plan.classic), "start": plan.classic[0].position, "end": plan.classic[-1].end}
        classic = {"commitlog": places}
    return {**only, "groups": groups, **classic}


def rebuild(spark: SparkSession, plan: RebuildPlan) -> Outcome:
    """Runs the rebuild in a session; the table is replaced in one Delta transaction."""
    from pyspark import StorageLevel

    if owner_of(spark, plan.table) is not None:
        remedy = "give its --checkpoint, or name another table"
        raise ConfigError(f"{plan.table} is kept up to date by a stream", "--table", remedy)
    make_table(spark, plan.table)
    for group, (start, end) in plan.ranges.items():
        progress(f"reading group {group}: entries {start} to {end}, {len(plan.classic)} classic files")
    units = _read(spark, plan).persist(StorageLevel.MEMORY_AND_DISK)
    try:
        skipped = {row["skipped"]: row["count"] for row in units.groupBy("skipped").count().collect()}
        claimed = skipped.pop(None, 0)
        progress(f"{claimed} messages; assigning slots")
        claims = _claims(units.where("skipped is null").drop("skipped"), plan)
        kept = claims.where("claim = 1").select(*TABLE_COLUMNS)
        # A plain overwrite would forget the table's clustering; replacing every row does not.
        kept.write.format("delta").mode("overwrite").option("replaceWhere", "true").save(plan.table)
        found = queue_facts(spark, plan.table) | {
            "skipped": {name: skipped.get(name, 0) for name in ("not_messages", "prepared_or_rolled_back")}
        }
        found["duplicate_slots"] = claimed - found["rows"]
        if plan.classic:
            found["damaged_files"] = _damaged_files(units)
        found |= _files_and_differences(spark, plan, claims)
    finally:
        units.unpersist()
    return _outcome(plan, found)


def _claims(units: DataFrame, plan: RebuildPlan) -> DataFrame:
    """The units with their offsets, and whether each keeps its slot."""
    from pyspark.sql import functions as f

    if plan.foreign:
        return claim_slots(units, plan.on_duplicate)
    return assign_offsets(units).withColumns({"claim": f.lit(1), "claims": f.lit(1)})


def _damaged_files(units: DataFrame) -> list[int]:
    """Positions where a classic file goes on with neither a message nor a BLANK; at most one for each file."""
    rows = units.where(f"skipped = '{DAMAGED}'").select("position").orderBy("position").collect()
    return [row["position"] for row in rows]


def _files_and_differences(spark: SparkSession, plan: RebuildPlan, claims: DataFrame) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if plan.files is not None:
        progress(f"writing consume queue files below {plan.files}")
        kept = spark.read.format("delta").load(plan.table)
        found["files"] = write_files(kept, plan.files, plan.file_bytes).summary()
    if plan.compared is not None:
        progress(f"comparing with {plan.compared}")
        found["compare"] = compare(spark, claims, plan.compared).summary()
    return found


def _extend(spark: SparkSession, plan: RebuildPlan, checkpoint: str) -> Outcome:
    """Adds what is new in the log to the table."""
    from pyspark.sql import functions as f

    from spark_connector import register

    register(spark)
    check_extendable(spark, plan.table)
    ran = follow(spark, plan.source, plan.table, checkpoint, plan.trigger, make_table)
    if owner_of(spark, plan.table) is None:  # no entry was there yet
        return Outcome({"status": "ok", "rows": 0, "queues": 0, "table": plan.table, **ran})

    def finish() -> dict[str, Any]:
        found = queue_facts(spark, plan.table)
        if ran["exit_reason"] == "stopped":
            return found
        rows = spark.read.format("delta").load(plan.table).withColumns({"claim": f.lit(1), "claims": f.lit(1)})
        return found | _files_and_differences(spark, plan, rows)

    return _outcome(plan, run_stoppable(spark, finish) | {"duplicate_slots": 0, "checkpoint": checkpoint, **ran})


def _read(spark: SparkSession, plan: RebuildPlan) -> DataFrame:
    if not plan.classic:
        return _read_entries(spark, plan)
    [group] = plan.ranges
    classic = read_classic(spark, plan.classic, group, closed=bool(plan.source))
    return classic.unionByName(_read_entries(spark, plan)) if plan.source else classic


def _read_entries(spark: SparkSession, plan: RebuildPlan) -> DataFrame:
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


def _outcome(plan: RebuildPlan, found: dict[str, Any]) -> Outcome:
    extent = _extent(plan) if plan.checkpoint is None else {}  # a stream goes on behind what was there at its start
    summary = found | extent | {"queue_offsets": "read" if plan.foreign else "assigned", "table": plan.table}
    problems = (
        not found["dense"],
        found["duplicate_slots"] > 0,
        plan.foreign and found["skipped"]["not_messages"] > 0,
        found.get("damaged_files"),
        found.get("files", {}).get("refused_queues"),
        found.get("compare", {}).get("differences"),
    )
    return Outcome(summary, EXIT_FINDING if any(problems) else EXIT_OK)


def main() -> None:
    """Runs the job."""
    run_job(command)


if __name__ == "__main__":
    main()

"""Rebuilds the consume queues of a log into a Delta table: one row per message and queue slot.

Usage::

    python jobs/rebuild_consume_queue.py --peers 'n0-127.0.0.1:40911;…' --table DIR
    python jobs/rebuild_consume_queue.py --peers 'n0-127.0.0.1:40911;…' --table DIR --checkpoint DIR
    python jobs/rebuild_consume_queue.py --store /var/rocketmq/store/dledger-n0 --table DIR --files DIR
    python jobs/rebuild_consume_queue.py --commitlog /var/rocketmq/store/commitlog --table DIR
    spark-submit jobs/rebuild_consume_queue.py …

The table has the columns of ``TABLE_SCHEMA``. ``position`` and ``size`` are those of a RocketMQ consume queue unit:
they address the message itself, which starts 48 bytes after its entry, in native logs as in a broker's. In a broker's
log the queue offset is read from the message; in a native log it is assigned here, in index order. Control entries have
no row, nor do prepared and rolled-back messages and other bodies. Messages of a classic CommitLog have no index.
"""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any

if __package__ in (None, ""):  # started as a script: run the package's module, which finds its parts
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import_module(f"{Path(__file__).resolve().parent.name}.rebuild_consume_queue").main()

import click

from dledger_core.cli import examples
from spark_connector import check_spark

from ._cli import (
    EXIT_FINDING,
    EXIT_OK,
    Outcome,
    archive_options,
    dry_run_option,
    format_option,
    naming_all_nodes,
    node_access_options,
    progress,
    run_job,
    servers_options,
    servers_or_stores,
    verbose_option,
)
from ._rebuild.broker import deleted_topics, duplicates, without_topics
from ._rebuild.compare import compare
from ._rebuild.files import DIRECTORY, other_file_bytes, write_files
from ._rebuild.indexes import write_indexes
from ._rebuild.plan import RebuildOptions, RebuildPlan, plan_for
from ._rebuild.report import Slot, counted, expected_units, not_consumed, page, problems_of, verdict_of
from ._rebuild.slots import Queues, kept_in, summary_of
from ._rebuild.stored_queues import stored_queues
from ._rebuild.table import Table, TableStream
from ._rebuild.units import DAMAGED, DAMAGED_MESSAGE, IMPOSSIBLE, PENDING, STRANGE
from ._report.drill_down import Fields
from ._session import check_versions, run_stoppable, spark_session
from ._table_history import TableHistory

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

__all__ = ["command", "main", "rebuild"]


@click.command(
    epilog=examples(
        "# a live cluster, incrementally: each run adds the new entries",
        "rebuild_consume_queue.py --peers 'n0-host:40911;n1-host:40911' --table queues --checkpoint queues.checkpoint",
        "# from the first archived entry on: entries that retention has deleted are read from the archive",
        "rebuild_consume_queue.py --peers 'n0-host:40911;n1-host:40911' --archive true --table queues",
        "# a stopped broker's store, and RocketMQ's own files too",
        "rebuild_consume_queue.py --store store/dledger-n0 --table queues --files rebuilt",
        "# compare with the broker's own queues, with a report page",
        "rebuild_consume_queue.py --store store/dledger-n0 --table queues --compare store --report queues.html",
        "# the index files too, which a killed broker loses: compared with its own, and new ones to replace them",
        "rebuild_consume_queue.py --store store/dledger-n0 --table queues --compare store --indexes rebuilt",
        "# classic CommitLog first, DLedger after; leave --store out for a classic log alone",
        "rebuild_consume_queue.py --commitlog store/commitlog --store store/dledger-n0 --table queues",
    )
)
@servers_options(doing="read")
@node_access_options
@click.option("--store", metavar="DIR", help="Read a store directory of a node or a broker, without servers.")
@click.option(
    "--commitlog", metavar="DIR", help="Read the classic RocketMQ CommitLog that precedes the store, or it alone."
)
@archive_options(doing="With --peers: read entries that the nodes have deleted from the archive")
@click.option("--table", required=True, metavar="DELTA", help="Directory of the Delta table; created if missing.")
@click.option("--checkpoint", metavar="DIR", help="Spark checkpoint: continue after the last run.")
@click.option(
    "--trigger",
    help='With --checkpoint: "10 seconds" between micro-batches.  [default: available-now]',
)
@click.option("--files", metavar="DIR", help="Also write RocketMQ's consumequeue/<topic>/<queue>/ files below DIR.")
@click.option(
    "--consume-queue-file-size",
    type=click.IntRange(min=20, max=1 << 30),
    default=6_000_000,
    show_default=True,
    help="Size of a consume queue file in bytes, RocketMQ's mappedFileSizeConsumeQueue.",
)
@click.option(
    "--compare",
    "compared",
    metavar="DIR",
    help="Report every difference from a broker's consume queues below DIR, in files or in RocksDB; change nothing.",
)
@click.option(
    "--indexes",
    metavar="DIR",
    help="Also write RocketMQ's index/ files, for queries by key, below DIR; with --compare, compare the broker's.",
)
@click.option(
    "--broker-conf",
    metavar="FILE",
    help="With --indexes: the broker's configuration, for the size of its index files.",
)
@click.option("--report", metavar="FILE.html", help="With --compare: write a report as one HTML page.")
@click.option(
    "--on-duplicate",
    type=click.Choice(["first", "last"]),
    default="first",
    show_default=True,
    help="Message to keep, with --files and --compare, if a broker assigned a slot twice.",
)
@click.option(
    "--until",
    type=click.Choice(["committed", "end"]),
    default="end",
    show_default=True,
    help="End of a read from a store: its recorded commit index, or its last entry. Servers return committed entries.",
)
@click.option(
    "--multi-dispatch/--no-multi-dispatch",
    default=True,
    show_default=True,
    help="Also add messages to the queues that INNER_MULTI_DISPATCH names (%LMQ% and others).",
)
@click.option(
    "--delay-levels",
    metavar="TEXT",
    help='messageDelayLevel of the broker, as "1s 5s 10s 2h", for the tags codes of delayed messages.  '
    "[default: RocketMQ's]",
)
@click.option(
    "--broker-end-index",
    type=click.IntRange(min=0),
    metavar="INDEX",
    help="With --peers, for a converted log: end of the entries whose queue offsets a broker assigned.",
)
@format_option
@verbose_option
@dry_run_option
def command(**options: Any) -> Outcome:
    """Rebuild consume queues from a log into a Delta table.

    One row per message and queue: group, topic, queue_id, queue_offset, position, size, tags_code, store_timestamp,
    index, keys, msg_id, born_timestamp, committed (true or null), broker_serves, rebuild_slot. POSITION and SIZE are
    those of a RocketMQ consume queue unit, in native logs too: start of the message itself (48 bytes after its entry)
    and its length. QUEUE_OFFSET is read from the message in a broker's log, and assigned in index order, from the
    first entry on, in a native log. If a broker assigned an offset twice, BROKER_SERVES marks the message that it
    serves, and REBUILD_SLOT is null for those that RocketMQ's own rebuild leaves out.

    A store is read to its last entry, committed or not, as a broker does; --until committed ends at its recorded commit
    index. Entries of aborted and open transactions and of losing attempts are left out.

    Exit code 1 if a queue has holes or a slot with two messages, if a broker's log has other bodies or lost its end, if
    a message does not match its CRC, or if --compare finds a difference.
    """
    given = RebuildOptions.parse(servers_or_stores(options, "store", "commitlog"))
    check_versions()
    plan = plan_for(given)
    for note in plan.notes:
        progress(f"warning: {note}")
    _warn_of_file_size(plan)
    if given.dry_run:
        return Outcome({"status": "ok", "dry_run": True, "table": plan.table, **plan.extent()})
    session = spark_session("dledger-rebuild-consume-queue", verbose=given.verbose)
    with session as spark, naming_all_nodes(plan.source, "start them and run the same command again"):
        return rebuild(spark, plan)


def _warn_of_file_size(plan: RebuildPlan) -> None:
    """Warn if consume queue files of another size are next to the files to write: a broker needs its own size."""
    if plan.files is None:
        return
    near = [Path(place) / DIRECTORY for place in (plan.root, str(Path(plan.files).parent)) if place is not None]
    other = other_file_bytes(plan.file_bytes, [Path(plan.compared), *near] if plan.compared else near)
    if other is not None:
        what = f"--files writes files of {plan.file_bytes} bytes, and those in {other[0]} have {other[1]}"
        progress(f"warning: {what}; use --consume-queue-file-size {other[1]} for that broker")


def rebuild(spark: SparkSession, plan: RebuildPlan) -> Outcome:
    """Run a plan in a session."""
    check_spark(spark)
    began, expected = datetime.now(UTC), dict[Slot, Fields]()
    table = Table(spark, plan.table)
    table.check(kept=plan.checkpoint is not None)
    if plan.checkpoint is not None:
        TableHistory(spark, plan.table, plan.checkpoint).check_appends()
    stream, stopping = TableStream(spark, plan), Event()
    for group, (start, end) in plan.ranges.items():
        progress(f"reading group {group}: entries {start} to {end}, {len(plan.classic)} classic files")

    def work() -> dict[str, Any]:
        stream.run(stopping)
        if stopping.is_set() or not table.exists():  # with a checkpoint the first entry creates the table
            return summary_of({}, ())
        found = summary_of(stream.queues, plan.batch_topics) | _explained(spark, plan, table, stream.queues)
        if plan.report is not None:
            expected.update(expected_units(kept_in(table.rows(), plan.on_duplicate), found["compare"]["findings"]))
        return found

    summary = _summary(plan, run_stoppable(spark, work, stopping), stream)
    problems = problems_of(plan, summary)
    verdict = verdict_of(problems)
    if plan.report is not None and "compare" in summary:
        Path(plan.report).write_text(page(plan, summary, expected, problems, began), encoding="utf-8")
        progress(f"report: {plan.report}")
    lost = bool(not_consumed(summary))  # the worst comes first
    progress(f"{verdict}: {', '.join([*problems[:lost], counted(summary), *problems[lost:]])}")
    return Outcome({"verdict": verdict} | summary, EXIT_FINDING if problems else EXIT_OK)


def _explained(spark: SparkSession, plan: RebuildPlan, table: Table, queues: Queues) -> dict[str, Any]:
    """Write and compare files, and explain duplicate slots; return the fields of the summary."""
    found: dict[str, Any] = {"batch_topics": list(plan.batch_topics)} if plan.batch_topics else {}
    duplicated = any(queue.non_monotonic for queue in queues.values())
    if plan.indexes is not None:
        progress(f"writing index files below {plan.indexes}")
        found |= write_indexes(plan)
    if not (duplicated or plan.files or plan.compared):
        return found
    rows = table.rows()
    if duplicated:
        found["duplicates"] = duplicates(rows, plan.consumers)
    if plan.files or plan.compared:
        rows = _without_deleted(rows, plan, queues, found)
    if plan.files is not None:
        progress(f"writing consume queue files below {plan.files}")
        kept = without_topics(kept_in(rows, plan.on_duplicate), plan.batch_topics)
        found["files"] = write_files(kept, plan.files, plan.file_bytes).summary()
    if plan.compared is not None:
        progress(f"comparing with {plan.compared}")
        # A slave without the topic's configuration keeps plain queues of it.
        elsewhere = tuple(topic for topic in plan.batch_topics if not (Path(plan.compared) / topic).is_dir())
        compared = compare(
            spark, without_topics(rows, elsewhere), plan.compared, plan.on_duplicate, plan.consumers, plan.log_end
        )
        found["compare"] = compared.summary()
        if compared.unindexed:
            messages = f"{compared.unindexed:,} messages have no unit in the database of consume queues yet"
            progress(f"note: {messages}: a broker keeps the newest ones in memory, and writes them again at its start")
    return found


def _without_deleted(rows: DataFrame, plan: RebuildPlan, queues: Queues, found: dict[str, Any]) -> DataFrame:
    """Leave out and report the topics that were deleted on the broker: their messages are in the log until it ends."""
    stored = {topic for topic, *_ in stored_queues(plan.compared).parts()} if plan.compared else set()
    deleted = deleted_topics(plan.root, plan.topics, {topic for _, topic, _ in queues}, stored)
    if not deleted:
        return rows
    counts = {topic: sum(queue.rows for (_, each, _), queue in queues.items() if each == topic) for topic in deleted}
    found["deleted_topics"] = counts
    messages = f"{sum(counts.values()):,} messages of {len(deleted):,} deleted topics, which topics.json does not have"
    remedy = "create it (mqadmin updateTopic -t TOPIC -c CLUSTER) and run the same command again"
    progress(f"{messages}, are in the table only; to get the queues of one back, {remedy}")
    return without_topics(rows, deleted)


def _summary(plan: RebuildPlan, found: dict[str, Any], stream: TableStream) -> dict[str, Any]:
    skipped = {reason: stream.skipped[reason] for reason in (STRANGE, IMPOSSIBLE, PENDING)}
    summary = found | plan.extent() | {
        "skipped": skipped,
        **{f"{reason}_at": stream.places[reason] for reason in (STRANGE, IMPOSSIBLE) if skipped[reason]},
        "damaged_files": stream.places.get(DAMAGED, []),
        "damaged_messages": stream.skipped[DAMAGED_MESSAGE],
        "damaged_messages_at": stream.places.get(DAMAGED_MESSAGE, []),
        "queue_offsets": "read" if plan.foreign else "assigned",
        "table": plan.table,
    }  # fmt: skip
    if plan.lost is not None:
        summary["lost_end"] = [{"group": group, "recorded_end": plan.lost[1]} for group in plan.ranges]
    if plan.checkpoint is None:
        summary["optimize_s"] = stream.optimize_s
    else:
        summary |= {"checkpoint": plan.checkpoint, "batches": stream.batches}
    return summary


def main() -> None:
    """Run the job."""
    run_job(command)


if __name__ == "__main__":
    main()

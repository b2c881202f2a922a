"""Streams logs into a Delta table, each entry exactly once.

Delta's sink remembers which micro-batch of which query it holds, and the checkpoint says how far each log is read: a
run that was killed anywhere goes on without loss and without doubles. The table has the source's columns.

Usage::

    python jobs/ingest.py --peers 'n0-127.0.0.1:40911;…' --table DIR --checkpoint DIR [--decode message]
    spark-submit jobs/ingest.py …
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if __package__ in (None, ""):  # started as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click

from dledger_core.errors import ConfigError
from jobs._checkpoint import check_resume
from jobs._cli import (
    EXIT_OK,
    MORE_FROM_SPARK,
    Outcome,
    dry_run_option,
    parse_groups,
    progress,
    run_job,
    security_options,
    stop_requests,
    verbose_option,
)
from jobs._directories import check_apart, check_checkpoint, check_table
from jobs._failures import find_failure
from jobs._java import java_options, without_waiting
from jobs._lag import LagOutputs, lag_options
from jobs._session import check_versions, spark_session
from jobs._settings import VERBOSE

if TYPE_CHECKING:
    import threading

    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from spark_connector import LagReport

__all__ = ["IngestPlan", "command", "main"]

_POLL_S: Final = 1
_STOP_PATIENCE_S: Final = 120.0
_INTERVAL: Final = re.compile(r"\s*\d+\s*(milliseconds?|seconds?|minutes?|hours?)\s*\Z")
_REPORT_EVERY_S: Final = 2.0
_GO_ON: Final = "start them and run the same command again: it goes on where the checkpoint ends"


@dataclass(frozen=True, kw_only=True)
class IngestPlan:
    """What to read and where to write it.

    Attributes:
        source: options of the data source.
        table: directory of the Delta table.
        checkpoint: directory of the query's checkpoint.
        trigger: ``available-now`` or an interval like ``10 seconds``.
        lag: where to write how far it is behind.
    """

    source: dict[str, str]
    table: str
    checkpoint: str
    trigger: str
    lag: LagOutputs = field(default_factory=LagOutputs)


@dataclass
class _Totals:
    """What the micro-batches so far add up to."""

    rows: int = 0
    batches: set[int] = field(default_factory=set)
    start: dict[str, int] = field(default_factory=dict)
    end: dict[str, int] = field(default_factory=dict)
    lag: dict[str, LagReport] = field(default_factory=dict)

    def take(self, query: StreamingQuery) -> bool:
        """Adds the micro-batches that ended since the last call; returns whether there were any with rows."""
        from spark_connector import lag_reports

        grown = False
        for report in query.recentProgress:
            number = int(report["batchId"])
            if number in self.batches or not report["sources"]:
                continue
            source = report["sources"][0]
            end = _next_indexes(source["endOffset"])
            if not end or "addBatch" not in report["durationMs"]:
                continue  # no micro-batch ran, Spark only says that the query is idle
            self.batches.add(number)
            self.rows += int(report["numInputRows"])
            grown = grown or int(report["numInputRows"]) > 0
            for group, index in (_next_indexes(source["startOffset"]) or end).items():
                self.start.setdefault(group, index)
            self.end = end
            self.lag |= {told.group: told for told in lag_reports(report)}
        return grown

    def behind(self) -> str:
        """Says how far all groups together are behind, and how long the oldest unread entry has waited."""
        records = sum(told.lag_records or 0 for told in self.lag.values())
        size = sum(told.lag_bytes or 0 for told in self.lag.values())
        waited = max((told.lag_seconds or 0.0 for told in self.lag.values()), default=0.0)
        return f"{records:,} records behind ({size:,} bytes, {waited:.1f} s)"

    def _ahead(self, group: str, end: int) -> dict[str, Any]:
        told = self.lag.get(group)
        if told is None:
            return {"latest": end}
        lag = {"records": told.lag_records, "bytes": told.lag_bytes, "seconds": told.lag_seconds}
        return {"latest": told.end_index, "lag": lag}

    def summary(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "batches": len(self.batches),
            "offsets": {
                group: {"from": self.start.get(group, end), "to": end, **self._ahead(group, end)}
                for group, end in sorted(self.end.items())
            },
            "losses": max((told.losses for told in self.lag.values()), default=0),
            "lost_records": max((told.lost_records for told in self.lag.values()), default=0),
        }


_EXAMPLES = """Examples:

\b
  # what is there now, then end; run it again for what is new
  ingest.py --peers 'n0-host:40911;n1-host:40911' --table events --checkpoint events.checkpoint
  # go on for ever, a micro-batch every ten seconds
  ingest.py --peers 'n0-host:40911;n1-host:40911' --table events --checkpoint events.checkpoint --trigger '10 seconds'
  # two logs of RocketMQ messages, from an index of one and the end of the other
  ingest.py --peers 'n0-host:40911;n1-host:40911' --groups a,b --decode message \\
    --starting-offsets '{"a": 7, "b": -1}' --table messages --checkpoint messages.checkpoint
  # a live group of Java nodes; the column committed is null, see dledger_core/remoting/README.md
  ingest.py --peers 'n0-host:40911;n1-host:40911' --protocol dledger-java --groups g --table events --checkpoint c
"""


@click.command(epilog=_EXAMPLES)
@click.option("--peers", required=True, help="The servers: n0-host:port;n1-host:port;…")
@click.option("--groups", default="default", show_default=True, help="Logs to read, separated by commas.")
@click.option("--table", required=True, metavar="DELTA", help="Directory of the Delta table; made if absent.")
@click.option("--checkpoint", required=True, metavar="DIR", help="Directory that remembers how far the logs are read.")
@click.option(
    "--decode",
    type=click.Choice(["none", "message"]),
    default="none",
    show_default=True,
    help="message: the fields of RocketMQ messages as columns.",
)
@click.option(
    "--starting-offsets",
    default="earliest",
    show_default=True,
    help="For a new checkpoint: earliest, latest, JSON per group, or @FILE.",
)
@click.option("--trigger", default="available-now", show_default=True, help='available-now or "10 seconds".')
@click.option(
    "--max-offsets-per-trigger", type=click.IntRange(min=1), help="At most this many indexes in a micro-batch."
)
@click.option(
    "--max-bytes-per-trigger", type=click.IntRange(min=1), help="At most this many bytes of the logs in a micro-batch."
)
@click.option(
    "--fail-on-data-loss/--no-fail-on-data-loss",
    default=True,
    show_default=True,
    help="End where entries are gone that should have been read, or go on and say so.",
)
@click.option(
    "--retry-for",
    type=click.IntRange(1, 86_400),
    default=15,
    show_default=True,
    metavar="SECONDS",
    help="How long to go on trying when no node answers in mid-stream.",
)
@lag_options
@verbose_option
@dry_run_option
@java_options
@security_options
def command(
    peers: str,
    groups: str,
    table: str,
    checkpoint: str,
    decode: str,
    starting_offsets: str,
    trigger: str,
    max_offsets_per_trigger: int | None,
    max_bytes_per_trigger: int | None,
    fail_on_data_loss: bool,
    retry_for: int,
    lag: LagOutputs,
    java: dict[str, str],
    verbose: bool,
    dry_run: bool,
) -> Outcome:
    """Streams logs into a Delta table, each entry exactly once."""
    check_versions()
    limits = {"maxOffsetsPerTrigger": max_offsets_per_trigger, "maxBytesPerTrigger": max_bytes_per_trigger}
    source = {
        "peers": peers,
        "groups": ",".join(parse_groups(groups)),
        "decode": decode,
        "startingOffsets": starting_offsets,
        "failOnDataLoss": str(fail_on_data_loss).lower(),
        "fetchRetryMs": str(retry_for * 1000),
        **java,
        **{name: str(value) for name, value in limits.items() if value is not None},
    }
    plan = IngestPlan(source=source, table=table, checkpoint=checkpoint, trigger=trigger, lag=lag)
    available = _check(plan)
    if dry_run:
        return Outcome({"status": "ok", "dry_run": True, "available": available, "table": table})
    with spark_session("dledger-ingest", settings=VERBOSE if verbose else None) as spark:
        return _run(spark, plan)


def _check(plan: IngestPlan) -> dict[str, dict[str, int]]:
    """Checks options and reachability before a JVM starts; returns what can be read per group."""
    from spark_connector.options import DLedgerOptions
    from spark_connector.reading.tracking import Tracker

    if plan.trigger != "available-now" and not _INTERVAL.match(plan.trigger):
        raise ConfigError(f"wrong trigger {plan.trigger!r}", "--trigger", 'use available-now or "10 seconds"')
    check_table(plan.table)
    check_checkpoint(plan.checkpoint)
    written = {"--table": plan.table, "--checkpoint": plan.checkpoint}
    check_apart(written)
    plan.lag.check(written)
    tracker = Tracker(DLedgerOptions.for_reading(without_waiting(plan.source)))
    bounds = tracker.bounds()
    check_resume(plan.checkpoint, tracker)
    return {group: {"start": view.first_index, "end": view.end} for group, view in sorted(bounds.items())}


def _run(spark: SparkSession, plan: IngestPlan) -> Outcome:
    from pyspark.errors import StreamingQueryException

    from spark_connector import register

    register(spark)
    _check_columns(spark, plan)
    began = time.monotonic()
    totals, exit_code = _Totals(), EXIT_OK
    with stop_requests() as stop, plan.lag.watch(spark):
        query = _start(spark, plan)
        try:
            ended: dict[str, Any] = {"exit_reason": _follow(query, totals, stop)}
        except StreamingQueryException as error:
            ended, exit_code = _failure(error, plan.source)
        finally:
            query.stop()
    totals.take(query)
    ended["duration_s"] = round(time.monotonic() - began, 3)
    ended |= {"query_id": str(query.id), "table": plan.table, "checkpoint": plan.checkpoint}
    return Outcome(totals.summary() | ended, exit_code)


def _check_columns(spark: SparkSession, plan: IngestPlan) -> None:
    """Refuses a table with other columns than the source's."""
    from delta.tables import DeltaTable

    from spark_connector.schema import schema_for

    if not DeltaTable.isDeltaTable(spark, plan.table):
        return
    found, wanted = (
        spark.read.format("delta").load(plan.table).columns,
        schema_for(plan.source["decode"], plan.source.get("protocol", "dledger")).names,
    )
    if found and found != wanted:
        values = {"columns": ",".join(found)}
        remedy = "name another directory, or give the --decode that the table was made with"
        raise ConfigError(f"{plan.table} is a table of something else", "--table", remedy, values)


def _start(spark: SparkSession, plan: IngestPlan) -> StreamingQuery:
    rows = spark.readStream.format("dledger").options(**plan.source).load()
    writer = rows.writeStream.format("delta").outputMode("append").option("checkpointLocation", plan.checkpoint)
    if plan.trigger == "available-now":
        writer = writer.trigger(availableNow=True)
    else:
        writer = writer.trigger(processingTime=plan.trigger)
    return writer.start(plan.table)


def _follow(query: StreamingQuery, totals: _Totals, stop: threading.Event) -> str:
    """Reports until the query ends or is asked to stop; the micro-batch in hand is finished first."""
    reported = 0.0
    while not query.awaitTermination(_POLL_S):
        if totals.take(query) and time.monotonic() - reported >= _REPORT_EVERY_S:
            reported = time.monotonic()
            progress(f"{totals.rows} rows in {len(totals.batches)} micro-batches, {totals.behind()}")
        if stop.is_set():
            progress("stopping after the micro-batch in hand")
            _finish_batch(query)
            return "stopped"
    return "available data read"


def _finish_batch(query: StreamingQuery) -> None:
    last = _batch_number(query)
    deadline = time.monotonic() + _STOP_PATIENCE_S
    while query.isActive and query.status["isTriggerActive"] and time.monotonic() < deadline:
        if _batch_number(query) != last:
            return
        query.awaitTermination(_POLL_S)


def _batch_number(query: StreamingQuery) -> int:
    last = query.lastProgress
    return -1 if last is None else int(last["batchId"])


def _next_indexes(offset: Any) -> dict[str, int]:
    """Returns the index per group of an offset in Spark's progress."""
    from spark_connector import StreamOffset

    found = StreamOffset.from_text(offset)
    return {} if found is None else found.next_indexes


def _failure(error: Exception, source: dict[str, str]) -> tuple[dict[str, Any], int]:
    """Reports why the query failed; returns the summary's part and the exit code."""
    failure = find_failure(error)
    message = failure.line(source, _GO_ON)
    if failure.name is None:
        message = f"[STREAM_FAILED] {message}; {MORE_FROM_SPARK}"
    progress(f"error: {message}")
    name = failure.name or "STREAM_FAILED"
    return {"status": "error", "error": name, "message": message, "exit_reason": "failed"}, failure.exit_code


def main(run: Callable[..., Any] = run_job) -> None:
    """Runs the job."""
    run(command)


if __name__ == "__main__":
    main()

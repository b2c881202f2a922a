"""Streams logs, of servers or in a directory, into a Delta table, each entry exactly once.

Delta's sink records the micro-batches of a query, and the Spark checkpoint records the next index of each log. So a
killed run continues without loss and without duplicates. The table has the columns of the source, and may have others.

Usage::

    python jobs/ingest.py --peers 'n0-127.0.0.1:40911;…' --table DIR --checkpoint DIR [--decode message]
    python jobs/ingest.py --path /var/lib/broker/store --table DIR --checkpoint DIR --decode message
    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 jobs/ingest.py …
"""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

if __package__ in (None, ""):  # started as a script: run the package's module, which finds its parts
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import_module(f"{Path(__file__).resolve().parent.name}.ingest").main()

import click
from click.core import ParameterSource
from pydantic import AfterValidator, BeforeValidator, model_validator

from dledger_core import ConfigError
from dledger_core.cli import DurationType, examples, stop_requests
from dledger_core.config import parse_groups
from spark_connector import LagReport, StreamOffset, lag_reports, planned_offset, register
from spark_connector.columns import schema_for
from spark_connector.monitoring.outputs import parse_target
from spark_connector.options import DLedgerOptions

from ._cli import (
    EXIT_INCOMPLETE,
    EXIT_OK,
    NodeAccess,
    Outcome,
    dry_run_option,
    find_failure,
    format_option,
    node_access_options,
    progress,
    run_job,
    servers_options,
    servers_or_stores,
    verbose_option,
)
from ._directories import check_apart, check_checkpoint, check_file, check_table
from ._ingest.columns import TargetTable
from ._ingest.compaction import Compaction
from ._ingest.dead_letters import DEAD_LETTERS, MessagesAndDeadLetters
from ._ingest.source_options import passed_on, source_options
from ._session import (
    AVAILABLE_NOW,
    check_resume,
    check_versions,
    follow,
    parse_trigger,
    spark_session,
    with_short_errors,
)
from ._table_history import TableHistory

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery


__all__ = ["IngestOptions", "command", "main"]

_REPORT_EVERY_S: Final = 2.0
_CONTINUE: Final = "start them and run the same command again: it continues where the checkpoint ends"
_OF_SERVERS: Final = frozenset(
    {"peers", "client_config", *NodeAccess.model_fields, "protocol", "safety_lag", "commit_probe"}
    | {"groupsPattern", "discoveryInterval", "pinFor", "onPinFailure", "readFrom", "fetchTimeoutMs"}
)
"""Parameters of the command without a meaning where a directory is read."""


class IngestOptions(NodeAccess):
    """The command's options."""

    peers: str | None
    path: str | None
    groups: Annotated[tuple[str, ...], BeforeValidator(lambda text: parse_groups(text, "--groups"))] | None
    table: Annotated[str, AfterValidator(check_table)]
    checkpoint: Annotated[str, AfterValidator(check_checkpoint)]
    decode: Literal["none", "message"]
    starting_offsets: str
    trigger: Annotated[dict[str, Any], BeforeValidator(parse_trigger)]
    max_offsets_per_trigger: int | None
    max_bytes_per_trigger: int | None
    fail_on_data_loss: bool
    retry_for: int
    protocol: str
    safety_lag: str | None
    commit_probe: bool
    lag_json: Annotated[str, AfterValidator(lambda path: check_file(path, "--lag-json"))] | None
    lag_prometheus: str | None
    dead_letters: Annotated[str, AfterValidator(lambda path: check_table(path, "--dead-letters"))] | None
    optimize_every: float | None
    passed_on: dict[str, str]
    insecure: bool
    verbose: bool
    dry_run: bool

    @model_validator(mode="after")
    def _check_dead_letters(self) -> Self:
        if self.dead_letters is not None and self.decode != "message":
            raise ConfigError("--dead-letters: bodies that are not decoded cannot fail", "", "add --decode message")
        if self.dead_letters is not None and self.passed_on.get("onDecodeError", "column").lower() != "column":
            raise ConfigError("--dead-letters has no effect with --on-decode-error fail", "", "leave one of them out")
        return self

    def source(self) -> dict[str, str]:
        """Return the options of the data source."""
        given = {
            "groups": None if self.groups is None else ",".join(self.groups),
            "maxOffsetsPerTrigger": self.max_offsets_per_trigger,
            "maxBytesPerTrigger": self.max_bytes_per_trigger,
            "protocol": None if self.protocol == "dledger" else self.protocol,
            "safetyLag": self.safety_lag,
            "commitProbe": "true" if self.commit_probe else None,
            "peers": self.peers,
            "path": self.path,
        }
        return {
            "decode": self.decode,
            "startingOffsets": self.starting_offsets,
            "failOnDataLoss": str(self.fail_on_data_loss).lower(),
            "fetchRetryMs": str(self.retry_for * 1000),
            **{name: str(value) for name, value in given.items() if value is not None},
            **self.passed_on,
            **self.access.of_source,
        }

    def check_tables(self, spark: SparkSession | None = None) -> list[str] | None:
        """Check the columns of both tables; return those to write to the table, None if that needs a session."""
        columns = TargetTable("--table", self.table, schema_for(self.decode, self.protocol)).columns(spark)
        if self.dead_letters is None:
            return columns
        found = TargetTable("--dead-letters", self.dead_letters, DEAD_LETTERS).columns(spark)
        return columns if found is not None else None

    def lag_outputs(self) -> dict[str, Any]:
        """Return the given outputs of ``spark_connector.monitor``."""
        outputs = {"json": self.lag_json, "prometheus": self.lag_prometheus}
        return {name: target for name, target in outputs.items() if target is not None}


def _no_lag_table(_context: click.Context, _parameter: click.Parameter, value: str | None) -> None:
    if value is not None:
        remedy = "write --lag-json FILE, and append it to a table with spark.read.json"
        raise ConfigError("--lag-table was withdrawn in 0.3.0", "", remedy)


@dataclass
class _Totals:
    """The sum of the micro-batches so far."""

    rows: int = 0
    batches: set[int] = field(default_factory=set)
    start: dict[str, int | None] = field(default_factory=dict)
    lag: dict[str, LagReport] = field(default_factory=dict)
    reported: float = 0.0

    def add(self, query: StreamingQuery) -> None:
        """Add the micro-batches that ended since the last call, and report progress periodically."""
        before = self.rows
        for batch in query.recentProgress:
            reports = lag_reports(batch)
            # A report without addBatch is of an idle query, not of a micro-batch.
            if not reports or batch["batchId"] in self.batches or "addBatch" not in batch["durationMs"]:
                continue
            self.batches.add(batch["batchId"])
            self.rows += reports[0].rows or 0
            for report in reports:
                self.start.setdefault(report.group, report.start_index)
                self.lag[report.group] = report
        if self.rows > before and time.monotonic() - self.reported >= _REPORT_EVERY_S:
            self.reported = time.monotonic()
            progress(f"{self.rows} rows in {len(self.batches)} micro-batches, {self._lag()}")

    def add_uncounted(self, history: TableHistory, query_id: str) -> None:
        """Add the rows of a table of which Spark counts none."""
        # That is where Delta computes a column or renames one, as in a table with capitals
        # (test_rows_are_counted_where_delta_computes_columns).
        if self.batches and not self.rows:
            self.rows = history.rows_added(query_id, self.batches)

    def _lag(self) -> str:
        if any(report.lag_bytes is None for report in self.lag.values()):
            return "lag unknown"
        records = sum(report.lag_records or 0 for report in self.lag.values())
        size = sum(report.lag_bytes or 0 for report in self.lag.values())
        waited = max((report.lag_seconds or 0.0 for report in self.lag.values()), default=0.0)
        if any(report.by_position for report in self.lag.values()):
            return f"{size:,} bytes behind ({waited:.1f} s)"
        return f"{records:,} records behind ({size:,} bytes, {waited:.1f} s)"

    def summary(self) -> dict[str, Any]:
        """Return the fields of the summary."""
        return {
            "rows": self.rows,
            "batches": len(self.batches),
            "offsets": {
                group: {
                    "from": self.start[group],
                    "to": report.next_index,
                    "latest": report.end_index,
                    "lag": {"records": report.lag_records, "bytes": report.lag_bytes, "seconds": report.lag_seconds},
                }
                for group, report in sorted(self.lag.items())
            },
            "losses": max((report.losses for report in self.lag.values()), default=0),
            "lost_records": max((report.lost_records for report in self.lag.values()), default=0),
        }


_EXAMPLES = examples(
    "# read the available entries, then exit; run it again for new ones",
    "ingest.py --peers 'n0-host:40911;n1-host:40911' --table events --checkpoint events.checkpoint",
    "# run until it is stopped, a micro-batch every ten seconds",
    "ingest.py --peers 'n0-host:40911;n1-host:40911' --table events --checkpoint c --trigger '10 seconds'",
    "# two logs of RocketMQ messages, from an index of one and the end of the other",
    "ingest.py --peers 'n0-host:40911;n1-host:40911' --groups a,b --decode message \\",
    """  --starting-offsets '{"a": 7, "b": -1}' --table messages --checkpoint messages.checkpoint""",
    "# bodies that are not messages go to a table of their own; small files are compacted",
    "ingest.py --peers 'n0-host:40911;n1-host:40911' --decode message --table messages --checkpoint c \\",
    "  --trigger '10 seconds' --dead-letters dead_letters --optimize-every 1h",
    "# a broker's directory, running or stopped: a classic CommitLog, a DLedger store, or both; each hour again",
    "ingest.py --path /var/lib/broker/store --decode message --table messages --checkpoint c",
    "# a live group of Java nodes; the column committed is null, see dledger_core/rocketmq/remoting/README.md",
    "ingest.py --peers 'n0-host:40911;n1-host:40911' --protocol dledger-java --groups g --table events --checkpoint c",
)


@click.command(epilog=_EXAMPLES)
@servers_options(doing="read")
@node_access_options
@click.option(
    "--path",
    metavar="DIR",
    help="Read a directory without servers: of a broker, a store, or a classic CommitLog; also while it is in use.",
)
@click.option("--table", required=True, metavar="DELTA", help="Directory of the Delta table; created if missing.")
@click.option(
    "--checkpoint", required=True, metavar="DIR", help="Directory of the Spark checkpoint, which records the progress."
)
@click.option(
    "--decode",
    type=click.Choice(["none", "message"]),
    default="none",
    show_default=True,
    help="With message, decode the bodies as RocketMQ messages into columns.",
)
@click.option(
    "--starting-offsets",
    default="earliest",
    show_default=True,
    help="Start of a new checkpoint: earliest, latest, JSON per group, or @FILE.",
)
@click.option(
    "--trigger",
    default=AVAILABLE_NOW,
    show_default=True,
    help='Interval of micro-batches as "10 seconds", or available-now.',
)
@click.option(
    "--dead-letters",
    metavar="DELTA",
    help="With --decode message, write bodies that cannot be decoded to this Delta table instead.",
)
@click.option(
    "--optimize-every",
    type=DurationType(1),
    metavar="TIME",
    help="Compact the table with Delta's OPTIMIZE, during the query or after its end, if the last one is this old.",
)
@click.option("--max-offsets-per-trigger", type=click.IntRange(min=1), help="Limit of the indexes in a micro-batch.")
@click.option(
    "--max-bytes-per-trigger", type=click.IntRange(min=1), help="Limit of the bytes of the logs in a micro-batch."
)
@click.option(
    "--fail-on-data-loss/--no-fail-on-data-loss",
    default=True,
    show_default=True,
    help="Fail if unread entries were deleted, or continue and report the loss.",
)
@click.option(
    "--retry-for",
    type=click.IntRange(1, 86_400),
    default=120,
    show_default=True,
    metavar="SECONDS",
    help="Total timeout of retries when no node responds.",
)
@click.option("--lag-json", metavar="FILE", help="Append the lag to this file, one JSON object per line.")
@click.option(
    "--lag-prometheus", metavar="TARGET", help="Serve the lag as metrics on a port or host:port, or write a .prom file."
)
@click.option(
    "--insecure", is_flag=True, help="Allow --lag-prometheus on a host that other machines reach, in plaintext."
)
@click.option("--lag-table", hidden=True, expose_value=False, callback=_no_lag_table)
@click.option(
    "--protocol",
    type=click.Choice(["dledger", "dledger-java"]),
    default="dledger",
    show_default=True,
    help="Protocol of the servers; dledger-java for Java nodes.",
)
@click.option(
    "--safety-lag", metavar="TIME", help="With dledger-java, read up to the end observed this long ago.  [default: 10s]"
)
@click.option("--commit-probe", is_flag=True, help="With dledger-java, append a probe entry to find the committed end.")
@source_options
@format_option
@verbose_option
@dry_run_option
def command(**given: Any) -> Outcome:
    """Stream logs into a Delta table, each entry exactly once."""
    check_versions()
    options = IngestOptions.parse(_chosen(given))
    _check_limits(options)
    available, starts = _check(options)
    columns = options.check_tables()
    if options.dry_run:
        return Outcome({"status": "ok", "dry_run": True, "available": available, "table": options.table})
    with spark_session("dledger-ingest", verbose=options.verbose) as spark, stop_requests() as stop:
        columns = options.check_tables(spark) if columns is None else columns
        assert columns is not None, "Spark can read both tables"
        history = TableHistory(spark, options.table, options.checkpoint)
        history.check(list(available), starts)
        if options.dead_letters is not None:
            TableHistory(spark, options.dead_letters, options.checkpoint, "--dead-letters").check_start(starts)
        return _run(spark, options, columns, history, stop)


def _chosen(given: dict[str, Any]) -> dict[str, Any]:
    """Return the values of ``IngestOptions``; with a pattern only groups of the command line count."""
    source = passed_on(given)
    chosen = servers_or_stores(given, "path") | {"passed_on": source}
    if chosen["path"]:
        _refuse_of_servers()
        return chosen | dict.fromkeys(NodeAccess.model_fields)  # the environment may have some
    origin = click.get_current_context().get_parameter_source("groups")
    if "groupsPattern" in source and origin is not ParameterSource.COMMANDLINE:
        return chosen | {"groups": None}
    return chosen | {"groups": "default" if chosen["groups"] is None else chosen["groups"]}


def _refuse_of_servers() -> None:
    """Raise ConfigError if the command line has an option about servers next to ``--path``."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = str(parameter.name)
        if name in _OF_SERVERS and context.get_parameter_source(name) is ParameterSource.COMMANDLINE:
            what = f"{parameter.opts[0]} has no effect with --path, which is read without servers"
            raise ConfigError(what, "", "leave one of them out")


def _check_limits(options: IngestOptions) -> None:
    """Raise ConfigError for a limit that would end a run early.

    Spark 4.1 ends a run with available-now after one micro-batch (test_reader_of_spark_4_1_starts_where_it_was).
    """
    from spark_connector.reading.admission import PASSES_START  # needs PySpark

    given: dict[str, int | str | None] = {
        "--max-offsets-per-trigger": options.max_offsets_per_trigger,
        "--max-bytes-per-trigger": options.max_bytes_per_trigger,
        "--min-offsets-per-trigger": options.passed_on.get("minOffsetsPerTrigger"),
    }
    limit = next((name for name, value in given.items() if value is not None), None)
    if limit is not None and "availableNow" in options.trigger and not PASSES_START:
        what = f"{limit} with --trigger available-now needs PySpark 4.2"
        raise ConfigError(what, "", 'leave it out, or add --trigger "10 seconds"')


def _check(options: IngestOptions) -> tuple[dict[str, dict[str, int]], dict[str, int]]:
    """Check options and reachability before a JVM starts.

    Returns:
        Per group the readable range; and the first index of each group that the checkpoint does not have.
    """
    outputs = {"--table": options.table, "--dead-letters": options.dead_letters, "--checkpoint": options.checkpoint}
    check_apart(outputs, {"--path": options.path})
    target = None if options.lag_prometheus is None else parse_target(options.lag_prometheus, insecure=options.insecure)
    if isinstance(target, str):
        check_file(target, "--lag-prometheus")
    source = options.source()
    if options.protocol != "dledger":  # check a Java group without the safety lag and without a probe
        source = {name: value for name, value in source.items() if name != "commitProbe"}
        source["isolation"] = "read_uncommitted"
    from spark_connector.reading.readers import DLedgerStreamReader  # needs PySpark

    reader = DLedgerStreamReader(DLedgerOptions.for_reading(source))
    bounds = reader.tracker.bounds()
    check_resume(options.checkpoint, reader.tracker)
    available = {group: {"start": view.first_index, "end": view.end} for group, view in sorted(bounds.items())}
    known = planned_offset(options.checkpoint)
    if known is None:
        return available, StreamOffset.from_json(reader.initialOffset()).next_indexes
    return available, {group: view.first_index for group, view in bounds.items() if group not in known.groups}


def _run(
    spark: SparkSession, options: IngestOptions, columns: list[str], history: TableHistory, stop: threading.Event
) -> Outcome:
    from pyspark.errors import StreamingQueryException

    from spark_connector import monitor

    register(spark)
    began = time.monotonic()
    totals, outcome = _Totals(), Outcome({"exit_reason": "available data read"})
    with ExitStack() as stack:
        if options.lag_outputs():
            stack.enter_context(monitor(spark, log=False, insecure=options.insecure, **options.lag_outputs()))
        compaction = None
        if options.optimize_every is not None:
            since = history.seconds_since("OPTIMIZE", options.optimize_every)
            compaction = Compaction(spark, options.table, options.optimize_every, since)
        tables = None
        if options.dead_letters is not None:
            tables = MessagesAndDeadLetters(options.table, columns, options.dead_letters)
        query = _start(spark, options, columns, tables)

        def report() -> None:
            totals.add(query)
            if compaction is not None:
                compaction.run_if_due()

        try:
            if follow(query, stop, report):
                outcome = Outcome({"status": "stopped", "exit_reason": "stopped"}, EXIT_INCOMPLETE)
        except StreamingQueryException as error:
            outcome = _failed(error, options.source())
        finally:
            query.stop()
        totals.add(query)
        if compaction is not None:
            if outcome.exit_code == EXIT_OK:
                compaction.run_if_due()
            else:
                stop.set()
            compaction.end(stop)
    totals.add_uncounted(history, str(query.id))
    more: dict[str, Any] = {"query_id": str(query.id), "table": options.table, "checkpoint": options.checkpoint}
    if tables is not None:
        more |= {"dead_letters": tables.count}
    if compaction is not None:
        more |= {"optimize": {"files_removed": compaction.removed, "files_added": compaction.added}}
    more["duration_s"] = round(time.monotonic() - began, 3)
    return Outcome({**totals.summary(), **outcome.summary, **more}, outcome.exit_code)


def _start(
    spark: SparkSession, options: IngestOptions, columns: list[str], tables: MessagesAndDeadLetters | None
) -> StreamingQuery:
    """Start the query; without dead letters Delta's sink writes the table, without a second read of the rows."""
    source = spark.readStream.format("dledger").options(**options.source())
    if tables is None:
        writer = source.load().select(*columns).writeStream.format("delta").option("path", options.table)
    else:
        rows = source.schema(tables.schema(schema_for(options.decode, options.protocol))).load()
        writer = rows.writeStream.foreachBatch(with_short_errors(tables.write))
    query = (
        writer.outputMode("append").trigger(**options.trigger).option("checkpointLocation", options.checkpoint).start()
    )
    if tables is not None:
        tables.query.set_result(str(query.id))
    return query


def _failed(error: Exception, source: dict[str, str]) -> Outcome:
    """Report the failure of the query."""
    failure = find_failure(error)
    if failure is None:
        raise error
    message = failure.line(source, _CONTINUE)
    progress(f"error: {message}")
    summary = {"status": "error", "error": failure.name, "message": message, "exit_reason": "failed"}
    return Outcome(summary, failure.exit_code)


def main() -> None:
    """Run the job."""
    run_job(command)


if __name__ == "__main__":
    main()

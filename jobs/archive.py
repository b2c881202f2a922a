"""Proves a Delta table equal to a log, range by range, and lets the log record what is proved: its archive.

Retention then deletes proved ranges only, and ``format("dledger")`` with the option ``archive`` reads archive and log
as one log. The leader records only what equals its own files. The job needs no Spark checkpoint: its progress is in the
log.

Usage::

    python jobs/archive.py --peers 'n0-127.0.0.1:40911;…' --table DIR --write
    spark-submit --packages io.delta:delta-spark_4.2_2.13:4.4.0 jobs/archive.py …

The last line of stdout is a JSON summary. Exit codes: 0 all that the log offers is proved, 1 findings, 2 the table does
not have all rows yet, or the job was stopped, 3 usage or I/O error.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Self
from uuid import uuid4

if __package__ in (None, ""):  # started as a script: run the package's module, which finds its parts
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import_module(f"{Path(__file__).resolve().parent.name}.archive").main()

import click
import pyarrow as pa
from pydantic import AfterValidator, BeforeValidator, model_validator

from dledger_core import Client, ConfigError, RowsDigest, rows_digest
from dledger_core.archive import ArchiveTable, read_storage
from dledger_core.cli import DurationType, asked_peers, examples, peers_option, variable_of
from dledger_core.config import check_group_name
from spark_connector import register

from ._archive.proving import Digests, Finding, Proved, Proving, Write, retried
from ._cli import (
    EXIT_FINDING,
    EXIT_INCOMPLETE,
    EXIT_OK,
    NodeAccess,
    Outcome,
    dry_run_option,
    format_option,
    node_access_options,
    progress,
    run_job,
    verbose_option,
)
from ._directories import check_apart, check_file, check_table
from ._report.page import Place, ReportedFinding, render_page
from ._session import check_versions, run_stoppable, spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["ArchiveOptions", "command", "main"]


class ArchiveOptions(NodeAccess):
    """The command's options."""

    peers: str
    group: Annotated[str, AfterValidator(check_group_name)]
    table: Annotated[str, AfterValidator(check_table)] | None
    every: float | None
    until: int | None
    verify: bool
    write: bool
    end: bool
    storage: Annotated[dict[str, str], BeforeValidator(lambda path: read_storage(path, "--storage") if path else {})]
    findings: Annotated[str, AfterValidator(lambda path: check_table(path, "--findings"))] | None
    report: Annotated[str, AfterValidator(lambda path: check_file(path, "--report"))] | None
    verbose: bool
    dry_run: bool

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.end:
            if self.every or self.until is not None or self.verify or self.write:
                raise ConfigError("--end ends the archive, and does nothing else", "", "leave the other options out")
        elif self.table is None:
            raise ConfigError("missing --table", "", "name the archive")
        check_apart({"--table": self.table, "--findings": self.findings})
        if self.verify and (self.every or self.until is not None):
            raise ConfigError("--verify reads all that is recorded, once", "", "leave --every and --until out")
        return self

    def client(self) -> Client:
        """Return a client of the group."""
        return Client(self.peers, self.group, **self.access.of_client)


_FINDINGS: Final = pa.schema(
    [
        ("run_id", pa.string()),
        ("found_at", pa.timestamp("us", tz="UTC")),
        ("group", pa.string()),
        ("table", pa.string()),
        ("kind", pa.string()),
        ("start", pa.int64()),
        ("end", pa.int64()),
        ("rows", pa.int64()),
        ("meaning", pa.string()),
        ("next_step", pa.string()),
    ]
)
"""Columns of the table of ``--findings``."""

_EXAMPLES = examples(
    "# from nothing to a proved archive: write what the table lacks from the log, prove it, and continue",
    "archive.py --peers 'n0-host:40911;n1-host:40911' --table /data/events --write --every 10m",
    "# prove a table that ingest fills",
    "archive.py --peers 'n0-host:40911;n1-host:40911' --table /data/events --every 10m",
    "# read all that was proved again: does the table still have it?",
    "archive.py --peers 'n0-host:40911;n1-host:40911' --table /data/events --verify --report verify.html",
    "# no archive any longer: retention deletes by its own rules again",
    "archive.py --peers 'n0-host:40911;n1-host:40911' --end",
)


@click.command(epilog=_EXAMPLES)
@peers_option(required=False, asks_local=True)
@click.option(
    "--group", envvar=variable_of("group"), show_envvar=True, default="default", show_default=True, help="The log."
)
@node_access_options
@click.option("--table", metavar="DELTA", help="Location of the Delta table; with --write created if missing.")
@click.option(
    "--every",
    type=DurationType(1),
    metavar="TIME",
    help="Run until it is stopped, with this pause: 10m.  [default: once]",
)
@click.option(
    "--until",
    type=click.IntRange(min=0),
    metavar="INDEX",
    help="Prove everything below this index, also ranges that are neither full nor an hour old.",
)
@click.option("--verify", is_flag=True, help="Hash all recorded ranges again and compare them with the log's record.")
@click.option("--write", is_flag=True, help="Replace rows that are missing or wrong by those of the log.")
@click.option("--end", is_flag=True, help="End the archive: retention no longer waits for it.")
@click.option(
    "--storage", metavar="FILE", help="JSON file with deltalake's options for the location, such as credentials."
)
@click.option("--findings", metavar="DELTA", help="Append the findings to this Delta table, created if missing.")
@click.option("--report", metavar="FILE.html", help="Write the findings as one HTML page.")
@format_option
@verbose_option
@dry_run_option
def command(**given: Any) -> Outcome:
    """Prove that a Delta table equals a log, so that retention deletes only what it has."""
    options = ArchiveOptions.parse(given | {"peers": asked_peers(given["peers"])})
    with options.client() as client:
        if options.end:
            if not options.dry_run:
                client.end_archive()
            return Outcome({"status": "ok", "dry_run": options.dry_run, "group": options.group, "archive": None})
        assert options.table is not None, "checked with the options"
        table = ArchiveTable(options.table, options.storage)
        if options.dry_run:
            return _plan(client, table, options)
        check_versions()
        if not options.write:
            table.check()
        with spark_session("dledger-archive", verbose=options.verbose) as spark:
            stopping = threading.Event()
            done = run_stoppable(spark, lambda: _run(spark, client, table, options, stopping), stopping)
            if options.findings is not None and done.findings:
                found = spark.createDataFrame(_findings_table(done, options))
                found.write.format("delta").mode("append").save(options.findings)
    return _outcome(done, options)


def _plan(client: Client, table: ArchiveTable, options: ArchiveOptions) -> Outcome:
    if not options.write:
        table.check()
    offered = client.archivable_ranges(until=options.until)
    ranges = [{"start": one.start, "end": one.end, "bytes": one.nbytes} for one in offered.ranges]
    more = {"archived_end": offered.start, "visible_end": offered.visible_end, "ranges": ranges}
    return Outcome({"status": "ok", "dry_run": True, "table": options.table, **more})


def _run(
    spark: SparkSession, client: Client, table: ArchiveTable, options: ArchiveOptions, stopping: threading.Event
) -> Proved:
    register(spark)
    write = table_writer(spark, options, table) if options.write else None
    if write is not None and not _exists(spark, table.uri):
        first = client.archivable_ranges().start
        write(first, first)  # makes the table, without rows
    table.check()
    at_once = max(2, 2 * spark.sparkContext.defaultParallelism)
    proving = Proving(client, table, table_digests(spark, options), write, at_once)
    if options.verify:
        return proving.verify()
    while True:
        done = proving.prove(options.until)
        if done.ranges or done.behind is not None:
            behind = "" if done.behind is None else f"; the table has no rows from {done.behind} on yet"
            progress(f"{done.ranges} ranges with {done.rows} rows proved, up to index {done.end}{behind}")
        if options.every is None or done.findings or stopping.wait(options.every):
            return done


def _exists(spark: SparkSession, table: str) -> bool:
    from delta.tables import DeltaTable

    return DeltaTable.isDeltaTable(spark, table)


def table_digests(spark: SparkSession, options: ArchiveOptions) -> Digests:
    """Return the function that computes digests in executors, a task for each range."""
    uri, storage, group = str(options.table), options.storage, options.group

    def digests(ranges: Sequence[tuple[int, int]]) -> Sequence[RowsDigest]:
        ranges = list(ranges)

        def run(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            table = ArchiveTable(uri, storage)
            for number in (number for batch in batches for number in batch.column(0).to_pylist()):
                found = rows_digest(table.rows(group, *ranges[number]))
                yield pa.RecordBatch.from_pydict({"number": [number], "rows": [found.rows], "digest": [found.digest]})

        numbers = spark.range(0, len(ranges), 1, len(ranges))
        found = numbers.mapInArrow(run, "number long, rows long, digest binary").toArrow().sort_by("number").to_pylist()
        return [RowsDigest(row["rows"], row["digest"]) for row in found]

    return digests


def table_writer(spark: SparkSession, options: ArchiveOptions, table: ArchiveTable) -> Write:
    """Return the function that replaces rows of the table by those of the log, in one commit of Delta."""

    def write(start: int, end: int) -> None:
        group = options.group
        rows = spark.read.format("dledger").options(peers=options.peers, groups=group, **options.access.of_source)
        bounds = {"startingOffsets": json.dumps({group: start}), "endingOffsets": json.dumps({group: end})}
        where = f"`group` = '{group}' AND `index` >= {start} AND `index` < {end}"
        writer = rows.options(**bounds).load().write.format("delta").mode("overwrite").option("replaceWhere", where)
        retried(lambda: writer.option("userMetadata", "dledger-archive --write").save(table.uri), table)

    return write


def _findings_table(done: Proved, options: ArchiveOptions) -> pa.Table:
    run = {"run_id": str(uuid4()), "found_at": datetime.now(UTC), "group": options.group, "table": options.table}
    return pa.Table.from_pylist([run | asdict(one) for one in done.findings], _FINDINGS)


def _outcome(done: Proved, options: ArchiveOptions) -> Outcome:
    findings = [asdict(one) for one in done.findings]
    summary = {
        "status": "findings" if findings else "behind" if done.behind is not None else "ok",
        "group": options.group,
        "table": options.table,
        "ranges": done.ranges,
        "rows": done.rows,
        "written_indexes": done.written,
        "archived_end": done.end,
        "behind": done.behind,
        "findings": findings,
    }
    for one in done.findings:
        progress(f"{one.kind} [{one.start}, {one.end}), {one.rows} rows: {one.meaning}; {one.next_step}")
    if done.behind is not None:
        progress(f"the table has no rows from index {done.behind} on yet: run the job again, or with --write")
    if options.report is not None:
        Path(options.report).write_text(_page(done, options), encoding="utf-8")
        progress(f"report: {options.report}")
    code = EXIT_FINDING if findings else EXIT_INCOMPLETE if done.behind is not None else EXIT_OK
    return Outcome(summary, code)


def _page(done: Proved, options: ArchiveOptions) -> str:
    return render_page(
        "page.html",
        [_reported(one, options) for one in done.findings],
        title="Archive, compared with the log",
        verdict="INCONSISTENT" if done.findings else "INCOMPLETE" if done.behind is not None else "CONSISTENT",
        meaning="the table is not equal to the log" if done.findings else "what was compared is equal",
        lines=[f"{done.ranges:,} ranges with {done.rows:,} rows are equal, up to index {done.end}."],
        subject="table",
        more_in="in the JSON summary",
        run=[
            ("ended", f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"),
            ("group", options.group),
            ("table", options.table),
        ],
    )


def _reported(one: Finding, options: ArchiveOptions) -> ReportedFinding:
    return ReportedFinding(
        kind=one.kind,
        severity="critical" if one.kind == "lost" else "error",
        subject=options.group,
        extent=f"[{one.start}, {one.end})",
        affected=f"{one.rows:,} rows",
        meaning=one.meaning,
        next_step=one.next_step,
        place=Place(str(options.table), None, one.next_step),
    )


def main() -> None:
    """Run the job."""
    run_job(command)


if __name__ == "__main__":
    main()

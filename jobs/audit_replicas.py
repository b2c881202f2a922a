"""Compares the replicas of a log: are they equal, how much was compared, and what exactly differs where.

Two passes. First each replica's digests of fixed ranges, computed where the data lies; then only the ranges that
differ, entry by entry, with a majority vote and a second look. Every run adds to the Delta tables ``audit_runs``,
``audit_ranges`` and ``audit_findings``. Nothing is ever written to a replica.

Usage::

    python jobs/audit_replicas.py --peers 'n0-127.0.0.1:40911;…' --table DIR
    spark-submit jobs/audit_replicas.py --replica n0=DIR --replica n1=DIR --replica n2=DIR --table DIR

The last line of stdout is a JSON summary with verdict, compared, coverage and findings. Exit codes: 0 CONSISTENT,
1 INCONSISTENT, 2 INCOMPLETE, 3 usage or I/O error.
"""

from __future__ import annotations

import sys
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if __package__ in (None, ""):  # started as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click
import pyarrow as pa
import pyarrow.compute as pc
from pydantic import ValidationError

from dledger_core import ConfigError, parse_groups, parse_peers
from dledger_core.cli import DurationType
from jobs._audit import passes
from jobs._audit.compare import bytes_read, compare_digests, compared_by_replica, of_ranges, proven_by_replica
from jobs._audit.model import DIGESTS, OTHER, Options, Replica, Verdict
from jobs._audit.page import page
from jobs._audit.plan import (
    Snapshot,
    chain_of,
    of_replicas,
    plan_ranges,
    reading_tasks,
    sections,
    steps,
    trust_proven,
)
from jobs._audit.report import findings_table, report_groups, runs_table, summarize
from jobs._audit.snapshot import CLASSIC_GROUP, STORE_GROUP, node_replicas, parse_replicas, stored_logs
from jobs._cli import (
    EXIT_FINDING,
    EXIT_INCOMPLETE,
    EXIT_OK,
    Outcome,
    StoppedError,
    dry_run_option,
    progress,
    run_job,
    verbose_option,
)
from jobs._directories import check_apart, check_audit_directory, check_file
from jobs._session import check_versions, spark_session
from jobs._stopping import run_stoppable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["command", "main"]

STEP_BYTES: Final = 16 << 30
STEP_S: Final = 30
"""With a byte rate: about how long a step reads."""
_EXIT: Final = {
    Verdict.CONSISTENT: EXIT_OK,
    Verdict.INCONSISTENT: EXIT_FINDING,
    Verdict.INCOMPLETE: EXIT_INCOMPLETE,
}


_EXAMPLES = """Examples:

\b
  # the nodes of a live cluster, with a report page
  audit_replicas.py --peers 'n0-host:40911;n1-host:40911;n2-host:40911' --table audit --report audit.html
  # store directories as they are, native or a broker's
  audit_replicas.py --replica a=/data/n0/default/dledger-n0 --replica b=/data/n1/default/dledger-n1 --table audit
  # the CommitLogs of a master and its slave: are they aligned, as an upgrade to DLedger needs them?
  audit_replicas.py --replica master=/data/store/commitlog --replica slave=/mnt/slave/store/commitlog --table audit
  # every day: trust what was read within a month, but read a thirtieth of it again, the longest unread first
  audit_replicas.py --peers 'n0-host:40911;n1-host:40911;n2-host:40911' --table audit --skip-proven 30d
"""


@click.command(epilog=_EXAMPLES)
@click.option("--peers", help="The servers: n0-host:port;n1-host:port;…")
@click.option("--groups", help="Logs to audit, separated by commas; with --peers.  [default: default]")
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="NAME=DIR",
    help="A store, a classic CommitLog, or a broker's storePathRootDir with either or both; at least two.",
)
@click.option("--against", metavar="PEERS", help="Compare with the nodes of another cluster too, at common indexes.")
@click.option("--table", metavar="DIR", help="Directory of the Delta tables; made if absent.")
@click.option(
    "--mode",
    type=click.Choice(["quick", "digest", "full"]),
    default="digest",
    show_default=True,
    help="quick: digests of both ends and a random sample; digest: of everything; full: every entry compared too.",
)
@click.option(
    "--skip-proven", type=DurationType(), metavar="AGE", help="Trust ranges proven equal that recently: 12h, 7d."
)
@click.option(
    "--reread-share",
    "reread_percent",
    type=click.IntRange(0, 100),
    metavar="PERCENT",
    help="How many of the trusted ranges to read again all the same, the longest unread first."
    "  [default: so many that all are within AGE, and about as many each day, at least 1]",
)
@click.option(
    "--resume", metavar="RUN_ID", help="Resume a run that was killed; ranges that it read are not read again."
)
@click.option(
    "--max-bytes-per-second",
    "rate",
    type=click.IntRange(min=1),
    metavar="N",
    help="Read no more than that from one node, all tasks together.",
)
@click.option("--report", metavar="FILE.html", help="Write a report as one HTML page.")
@verbose_option
@dry_run_option
def command(
    peers: str | None,
    groups: str | None,
    replicas: tuple[str, ...],
    against: str | None,
    table: str | None,
    dry_run: bool,
    verbose: bool,
    **more: Any,
) -> Outcome:
    """Compares the replicas of a log and reports where they differ."""
    if table is None and not dry_run:
        raise ConfigError("there is no place for the result", "--table", "name a directory, or use --dry-run")
    if table is not None:
        check_audit_directory(table)
    stores = {f"--replica {name}": directory for name, _, directory in (text.partition("=") for text in replicas)}
    check_apart({"--table": table}, stores)
    check_apart({"--report": more["report"]}, stores)
    options = _options(table=None if dry_run else table, against=against or "", **more)
    check_versions()
    snapshot = _snapshot(peers, groups, replicas, against)
    run = _Run()
    with spark_session("dledger-audit", verbose=verbose) as spark:
        try:
            summary, shown = run_stoppable(spark, lambda: _audit(spark, snapshot, options, run))
        except StoppedError:
            if options.table is not None:
                progress(f"resume it with --resume {run.run_id}")
            raise
    if options.report is not None:
        Path(options.report).write_text(shown, encoding="utf-8")
        progress(f"report: {options.report}")
    verdict = Verdict(summary["verdict"])
    progress(f"{verdict}: {summary['coverage_percent']} % compared, {len(summary['findings'])} findings")
    return Outcome(summary, _EXIT[verdict])


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: its id, and when it began."""

    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    began: float = field(default_factory=time.monotonic)


def _audit(spark: SparkSession, snapshot: Snapshot, options: Options, run: _Run) -> tuple[dict[str, Any], str]:
    """Plans, reads digests, compares, judges and reports; returns the JSON summary and the report page."""
    progress(f"run {run.run_id}")
    for group, replicas in snapshot.items():
        for part in sections(replicas):
            names = ", ".join(replica.name for replica in part.replicas)
            progress(f"group {group}: [{part.start}, {part.end}) on {names}")
    ranges = plan_ranges(snapshot, mode=options.mode, seed=options.resume or run.run_id, rate=options.rate)
    ranges = _without_proven(spark, ranges, snapshot, options, run)
    digests = _digests(spark, ranges, snapshot, options, run)
    results = _second_pass(spark, ranges, compare_digests(digests), snapshot, options)
    compared = pa.concat_tables([compared_by_replica(digests), proven_by_replica(ranges)])
    reports, findings = report_groups(snapshot, results, compared, run.run_id)
    if options.table is not None:
        progress(f"writing {options.table}")
        facts = {"run_id": run.run_id, "started_at": run.started_at, "mode": options.mode}
        took = {"duration_s": time.monotonic() - run.began}
        passes.append(spark, findings_table(findings, run.run_id, run.started_at), f"{options.table}/audit_findings")
        # Written last: a run that is listed is complete.
        passes.append(spark, runs_table(reports, findings, **facts, **took), f"{options.table}/audit_runs")
    read = bytes_read(digests, run.run_id)
    duration = time.monotonic() - run.began
    summary = summarize(snapshot, reports, findings) | {
        "run_id": run.run_id,
        "mode": options.mode,
        "started_at": run.started_at.isoformat(),
        "duration_s": round(duration, 3),
        "table": options.table,
        "resumed": options.resume,
        "cost": {
            "bytes_read": read,
            "bytes_read_second_pass": pc.sum(results["read_bytes"]).as_py() or 0,
            "bytes_per_second": round(sum(read.values()) / duration) if duration else None,
            "max_bytes_per_second": options.rate,
            "bytes_written_to_replicas": 0,
        },
    }
    logs = {replica.log_uuid for replicas in snapshot.values() for replica in replicas if replica.log_uuid}
    versions = ", ".join(f"{name} {version(name)}" for name in ("dledger", "pyspark", "delta-spark"))
    frame = options.shown() | {"versions": versions, "log": ", ".join(sorted(logs)) or "not recorded"}
    return summary, page(summary, ranges, frame) if options.report is not None else ""


def _without_proven(spark: SparkSession, ranges: pa.Table, snapshot: Snapshot, options: Options, run: _Run) -> pa.Table:
    """Marks the ranges that need not be read, with --skip-proven."""
    age = options.skip_proven
    earlier = None if age is None or options.table is None else passes.earlier_digests(spark, options.table)
    if age is None or earlier is None:
        return ranges
    digests = earlier.where(earlier["read_at"] >= run.started_at - age).toArrow()
    percent = options.reread_percent
    ranges = trust_proven(ranges, digests, snapshot, age=age, now=run.started_at, percent=percent)
    proven = ranges.num_rows - ranges["proven_at"].null_count
    progress(f"{proven} ranges were proven before, {ranges.num_rows - proven} are read")
    return ranges


def _digests(spark: SparkSession, ranges: pa.Table, snapshot: Snapshot, options: Options, run: _Run) -> pa.Table:
    """Reads the digests of all ranges that are not proven, in steps that survive a kill."""
    held = _held(spark, ranges, snapshot, options)
    keys = set(zip(*(held[name].to_pylist() for name in ("group", "replica", "start", "end")), strict=True))
    if keys:
        progress(f"{len(keys)} digests were read by run {options.resume}")
    rate, resumes = options.rate, options.resume or ""
    tasks = reading_tasks(ranges, snapshot, cores=spark.sparkContext.defaultParallelism, rate=rate, held=keys)
    nodes = len({task.replica.name for task in tasks})
    work = list(steps(tasks, rate * STEP_S * nodes if rate else STEP_BYTES))
    found = [held]
    for number, step in enumerate(work):
        if len(work) > 1:
            progress(f"step {number + 1} of {len(work)}")
        found.append(passes.digest_pass(spark, step, run.run_id, resumes=resumes, rate=rate))
        if options.table is not None:
            passes.append(spark, found[-1], f"{options.table}/audit_ranges")
    return pa.concat_tables(found)


def _held(spark: SparkSession, ranges: pa.Table, snapshot: Snapshot, options: Options) -> pa.Table:
    """Returns the digests of these ranges and replicas that the resumed run has read, and those that it resumed."""
    if options.table is None or options.resume is None:
        return DIGESTS.empty_table()
    earlier = passes.earlier_digests(spark, options.table)
    if earlier is None:
        raise ConfigError(f"{options.table} records no run to resume", "--resume", "leave it out")
    runs = earlier.select("run_id", "resumes").distinct().toArrow()
    chain = chain_of(
        dict(zip(*(runs[name].to_pylist() for name in ("run_id", "resumes")), strict=True)), options.resume
    )
    replicas = [replica for found in snapshot.values() for replica in found]
    digests = of_replicas(earlier.where(earlier["run_id"].isin(chain)).toArrow(), replicas)
    digests = digests.filter(pc.is_in(digests["problem"], pa.array(["", "damaged"])))
    unproven = ranges.filter(pc.is_null(ranges["proven_at"]))
    return of_ranges(digests, unproven).select(DIGESTS.names).cast(DIGESTS)


def _second_pass(
    spark: SparkSession, ranges: pa.Table, results: pa.Table, snapshot: Snapshot, options: Options
) -> pa.Table:
    """Compares ranges that differ entry by entry, in mode ``full`` all that were read; returns all results."""
    full = options.mode == "full"
    chosen = ranges.filter(pc.is_null(ranges["proven_at"]))
    wanted = chosen if full else of_ranges(chosen, results.filter(results["drill"]))
    found = [results]
    if wanted.num_rows:
        progress(f"{wanted.num_rows} of {chosen.num_rows} ranges are read entry by entry")
        by_name = {(r.group, r.name): r for replicas in snapshot.values() for r in replicas}
        parts = [
            (tuple(by_name[row["group"], name] for name in row["replicas"]), row["start"], row["end"])
            for row in wanted.to_pylist()
        ]
        found.append(passes.entry_pass(spark, parts, options.rate))
    if full and not options.rate:
        everyone = [replica for replicas in snapshot.values() for replica in replicas]
        stores = [one for one in everyone if one.reachable and not one.live and not one.block_bytes]
        found.append(passes.index_pass(spark, stores))
    return pa.concat_tables(found)


def _options(**given: Any) -> Options:
    """Checks options before anything is opened."""
    try:
        options = Options(**given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        option = "--" + str(first["loc"][0]).replace("_", "-")
        raise ConfigError(f"wrong value {first['input']!r}: {first['msg']}", option, "see --help") from None
    if options.table is None and (options.skip_proven is not None or options.resume is not None):
        option = "--skip-proven" if options.skip_proven is not None else "--resume"
        raise ConfigError("earlier runs are recorded in the tables", option, "give --table, without --dry-run")
    if options.report is not None:
        check_file(options.report, "--report")
    return options


def _snapshot(
    peers: str | None, groups: str | None, stores: Sequence[str], against: str | None
) -> dict[str, tuple[Replica, ...]]:
    """Returns the replicas by group, as they are now; checks options before a JVM starts."""
    if (peers is None) == (not stores):
        raise ConfigError("what to audit is not clear", "--peers, --replica", "give one of them")
    for given in filter(None, (peers, against)):
        parse_peers(given)
    if peers is not None:
        if against == peers:
            raise ConfigError("a cluster cannot be compared with itself", "--against", "name another cluster's peers")
        found = {group: node_replicas(peers, group) for group in parse_groups(groups or "default", "--groups")}
    else:
        if groups is not None:
            raise ConfigError("a store holds one group", "--groups", "leave it out with --replica")
        found = stored_logs(parse_replicas(stores))
    if against is None:
        return found
    if peers is None and {STORE_GROUP, CLASSIC_GROUP} & set(found):
        raise ConfigError("these stores do not record their group", "--against", "give --peers and --groups")
    return {group: (*here, *node_replicas(against, group, prefix=OTHER)) for group, here in found.items()}


def main() -> None:
    """Runs the job."""
    run_job(command)


if __name__ == "__main__":
    main()

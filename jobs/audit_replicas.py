"""Compares the replicas of a log: whether they are equal, how much was compared, and each difference.

The first pass compares digests of fixed ranges, computed where the data is stored. The second pass compares the ranges
that differ entry by entry, with a majority vote and a second read. Every run adds to the Delta tables ``audit_runs``,
``audit_ranges`` and ``audit_findings``. The audit never writes to a replica. Its steps are in ``_audit``.

Usage::

    python jobs/audit_replicas.py --peers 'n0-127.0.0.1:40911;…' --table DIR
    spark-submit jobs/audit_replicas.py --replica n0=DIR --replica n1=DIR --replica n2=DIR --table DIR

The last line of stdout is a JSON summary with verdict, compared, coverage and findings. Exit codes: 0 CONSISTENT,
1 INCONSISTENT, 2 INCOMPLETE or no node answers, 3 usage or I/O error.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any, Final

if __package__ in (None, ""):  # started as a script: run the package's module, which finds its parts
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    import_module(f"{Path(__file__).resolve().parent.name}.audit_replicas").main()

import click

from dledger_core import ConfigError
from dledger_core.archive import FROM_LOG
from dledger_core.cli import DurationType

from ._audit.archives import take_archives
from ._audit.model import Options, Verdict
from ._audit.pipeline import Audit
from ._audit.replicas import take_snapshot
from ._cli import (
    EXIT_FINDING,
    EXIT_INCOMPLETE,
    EXIT_OK,
    Outcome,
    StoppedError,
    archive_options,
    dry_run_option,
    format_option,
    node_access_options,
    progress,
    run_job,
    servers_options,
    servers_or_stores,
    verbose_option,
)
from ._directories import check_apart, check_audit_directory, check_file
from ._session import check_versions, run_stoppable, spark_session

__all__ = ["command", "main"]

_EXIT: Final = {
    Verdict.CONSISTENT: EXIT_OK,
    Verdict.INCONSISTENT: EXIT_FINDING,
    Verdict.INCOMPLETE: EXIT_INCOMPLETE,
}

_EXAMPLES = """Examples:

\b
  # the nodes of a live cluster, with a report page
  audit_replicas.py --peers 'n0-host:40911;n1-host:40911;n2-host:40911' --table audit --report audit.html
  # store directories, native or of a broker
  audit_replicas.py --replica a=/data/n0/default/dledger-n0 --replica b=/data/n1/default/dledger-n1 --table audit
  # the CommitLogs of a master and its slave: are they aligned, as an upgrade to DLedger needs them?
  audit_replicas.py --replica master=/data/store/commitlog --replica slave=/mnt/slave/store/commitlog --table audit
  # and the Delta table that dledger-archive has proven: also entries that retention has deleted
  audit_replicas.py --peers 'n0-host:40911;n1-host:40911;n2-host:40911' --archive true --table audit
  # every day: trust the ranges read within a month, but read a thirtieth of them again, oldest first
  audit_replicas.py --peers 'n0-host:40911;n1-host:40911;n2-host:40911' --table audit --skip-proven 30d
"""


@click.command(epilog=_EXAMPLES)
@servers_options(doing="audit")
@node_access_options
@click.option(
    "--replica",
    "replicas",
    multiple=True,
    metavar="NAME=DIR",
    help="Audit a store, a classic CommitLog, or a broker's storePathRootDir with either or both. One alone is"
    " checked for damage.",
)
@click.option("--against", metavar="PEERS", help="Also compare with the nodes of another cluster, at common indexes.")
@archive_options(doing="Also compare the archive, a Delta table")
@click.option("--table", metavar="DIR", help="Directory of the Delta tables; created if missing.")
@click.option(
    "--mode",
    type=click.Choice(["quick", "digest", "full"]),
    default="digest",
    show_default=True,
    help="quick: digests of both ends and a random sample; digest: of all ranges; full: also every entry.",
)
@click.option(
    "--skip-proven",
    type=DurationType(),
    metavar="AGE",
    help="Trust ranges that were proven equal within this age: 12h, 7d.",
)
@click.option(
    "--reread-share",
    type=click.IntRange(0, 100),
    metavar="PERCENT",
    help="Share of the trusted ranges to read again, oldest first."
    "  [default: enough to keep all within AGE, spread evenly, at least 1]",
)
@click.option("--resume", metavar="RUN_ID", help="Resume a killed run without reading its finished ranges again.")
@click.option(
    "--max-bytes-per-second",
    type=click.IntRange(min=1),
    metavar="N",
    help="Limit of the bytes read from one node, all tasks together  [default: no limit].",
)
@click.option("--report", metavar="FILE.html", help="Write a report as one HTML page.")
@click.option("--opaque", is_flag=True, help="Take bodies as bytes: do not check the RocketMQ messages in them.")
@format_option
@verbose_option
@dry_run_option
def command(**given: Any) -> Outcome:
    """Compare the replicas of a log and report where they differ; all stored entries, visible to readers or not."""
    check_versions()
    options = Options.parse(servers_or_stores(given, "replicas"))
    _check(options)
    if options.dry_run:
        options = options.model_copy(update={"table": None})
    snapshot = take_snapshot(options)
    audit = Audit(snapshot, options, take_archives(options, snapshot))
    with spark_session("dledger-audit", verbose=options.verbose) as spark:
        try:
            summary, page = run_stoppable(spark, lambda: audit.execute(spark))
        except StoppedError:
            if options.table is not None:
                progress(f"resume it with --resume {audit.run_id}")
            raise
    if options.report is not None:
        Path(options.report).write_text(page, encoding="utf-8")
        progress(f"report: {options.report}")
    verdict = Verdict(summary["verdict"])
    progress(f"{verdict}: {summary['coverage_percent']} % compared, {len(summary['findings'])} findings")
    return Outcome(summary, _EXIT[verdict])


def _check(options: Options) -> None:
    """Check the directories and the options that need each other, before anything is opened."""
    if options.table is None and not options.dry_run:
        raise ConfigError("missing --table", "", "name a directory for the result, or use --dry-run")
    for option, value in (("--skip-proven", options.skip_proven), ("--resume", options.resume)):
        if value is not None and (options.table is None or options.dry_run):
            raise ConfigError(f"{option} needs the tables of earlier runs", "", "give --table, without --dry-run")
    if options.table is not None:
        check_audit_directory(options.table)
    archive = options.archive if options.archive != FROM_LOG else None
    check_apart({"--table": options.table, "--report": options.report}, {"--archive": archive})
    stores = {f"--replica {name}": path for name, _, path in (text.partition("=") for text in options.replicas)}
    check_apart({"--table": options.table}, stores)
    check_apart({"--report": options.report}, stores)
    if options.report is not None:
        check_file(options.report, "--report")


def main() -> None:
    """Run the job."""
    run_job(command)


if __name__ == "__main__":
    main()

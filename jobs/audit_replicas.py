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
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

if __package__ in (None, ""):  # started as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click

from dledger_core.config import parse_peers
from dledger_core.errors import ConfigError
from jobs._audit.classic import CLASSIC_GROUP
from jobs._audit.model import OTHER, Replica, Verdict
from jobs._audit.options import Options, parse_age, parse_run_id
from jobs._audit.run import Audit
from jobs._audit.snapshot import STORE_GROUP, node_replicas, parse_replicas, stored_logs
from jobs._cli import (
    EXIT_FINDING,
    EXIT_INCOMPLETE,
    EXIT_OK,
    Outcome,
    StoppedError,
    connection_options,
    dry_run_option,
    parse_groups,
    progress,
    run_job,
    verbose_option,
)
from jobs._directories import check_apart, check_audit_directory, check_file
from jobs._session import check_versions, spark_session
from jobs._settings import VERBOSE
from jobs._stopping import run_stoppable

__all__ = ["command", "main"]

_EXIT: Final = {
    Verdict.CONSISTENT: EXIT_OK,
    Verdict.INCONSISTENT: EXIT_FINDING,
    Verdict.INCOMPLETE: EXIT_INCOMPLETE,
}


_EXAMPLES = """Examples:

\b
  # the nodes of a live cluster, with a page for people
  audit_replicas.py --peers 'n0-host:40911;n1-host:40911;n2-host:40911' --table audit --report audit.html
  # store directories as they lie there, ours or a broker's
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
@click.option("--skip-proven", metavar="AGE", help="Trust ranges proven equal that recently: 12h, 7d.")
@click.option(
    "--reread-share",
    type=click.IntRange(0, 100),
    metavar="PERCENT",
    help="How many of the trusted ranges to read again all the same, the longest unread first."
    "  [default: so many that all are within AGE, and about as many each day, at least 1]",
)
@click.option("--resume", metavar="RUN_ID", help="Go on with a run that was killed; what it read is not read again.")
@click.option(
    "--max-bytes-per-second",
    type=click.IntRange(min=1),
    metavar="N",
    help="Read no more than that from one node, all tasks together.",
)
@click.option("--report", metavar="FILE.html", help="Write a report for people.")
@verbose_option
@dry_run_option
@connection_options
def command(
    peers: str | None,
    groups: str | None,
    replicas: tuple[str, ...],
    against: str | None,
    table: str | None,
    dry_run: bool,
    **more: Any,
) -> Outcome:
    """Compares the replicas of a log and says where they differ."""
    if table is None and not dry_run:
        raise ConfigError("there is no place for the result", "--table", "name a directory, or use --dry-run")
    if table is not None:
        check_audit_directory(table)
    stores = {f"--replica {name}": directory for name, _, directory in (text.partition("=") for text in replicas)}
    check_apart({"--table": table}, stores)
    check_apart({"--report": more["report"]}, stores)
    options = _options(None if dry_run else table, against, more)
    check_versions()
    snapshot = _snapshot(peers, groups, replicas, against)
    audit = Audit(snapshot, options)
    threading.Thread(target=_load_ahead, name="audit-load").start()
    with spark_session("dledger-audit", settings=VERBOSE if more["verbose"] else None) as spark:
        try:
            summary = run_stoppable(spark, lambda: audit.run(spark), audit.stopping)
        except StoppedError:
            if options.table is not None:
                progress(f"go on with --resume {audit.run_id}")
            raise
    if options.report is not None:
        Path(options.report).write_text(audit.page(summary), encoding="utf-8")
        progress(f"report: {options.report}")
    verdict = Verdict(summary["verdict"])
    progress(f"{verdict}: {summary['coverage_percent']} % compared, {len(summary['findings'])} findings")
    return Outcome(summary, _EXIT[verdict])


def _load_ahead() -> None:
    """Loads, while a session starts, what a job needs later and takes a fifth of a second."""
    with suppress(Exception):  # whoever needs it says what is missing
        import deltalake  # noqa: F401
        import pyarrow.dataset  # noqa: F401

        import spark_connector.connections  # noqa: F401


def _options(table: str | None, against: str | None, more: dict[str, Any]) -> Options:
    """Checks options before anything is opened."""
    age, resume, report = more["skip_proven"], more["resume"], more["report"]
    if table is None and (age is not None or resume is not None):
        given = "--skip-proven" if age is not None else "--resume"
        raise ConfigError("earlier runs are recorded in the tables", given, "give --table, without --dry-run")
    if report is not None:
        check_file(report, "--report")
    return Options(
        mode=more["mode"],
        table=table,
        skip_proven=None if age is None else parse_age(age),
        reread_percent=more["reread_share"],
        resume=None if resume is None else parse_run_id(resume),
        rate=more["max_bytes_per_second"],
        report=report,
        against=against or "",
    )


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
        found = {group: node_replicas(peers, group) for group in parse_groups(groups or "default")}
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

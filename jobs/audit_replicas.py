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
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if __package__ in (None, ""):  # started as a script: make the project importable
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import click

from dledger_core.config import parse_peers
from dledger_core.errors import ConfigError
from jobs._audit import plan, tables
from jobs._audit.model import Class, Finding, Replica, Verdict
from jobs._audit.passes import (
    RangeKey,
    compared_by_replica,
    digest_pass,
    drill_pass,
    index_pass,
    suspect_ranges,
    watched,
)
from jobs._audit.ranges import RangeRow, judge_range
from jobs._audit.report import GroupReport, coverage_of, merge_findings, summarize
from jobs._audit.snapshot import node_replicas, parse_replicas, store_replicas
from jobs._cli import (
    EXIT_FINDING,
    EXIT_INCOMPLETE,
    EXIT_OK,
    Outcome,
    connection_options,
    dry_run_option,
    not_available,
    parse_groups,
    progress,
    run_job,
)
from jobs._session import check_versions, spark_session
from jobs._stopping import run_stoppable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["command", "main"]

_EXIT: Final = {
    Verdict.CONSISTENT: EXIT_OK,
    Verdict.INCONSISTENT: EXIT_FINDING,
    Verdict.INCOMPLETE: EXIT_INCOMPLETE,
}
_TASKS_PER_CORE: Final = 4
_LATER: Final = ("against", "skip_proven", "resume", "max_bytes_per_second", "report")


@click.command()
@click.option("--peers", help="The servers: n0-host:port;n1-host:port;…")
@click.option("--groups", help="Logs to audit, separated by commas; with --peers.  [default: default]")
@click.option("--replica", "replicas", multiple=True, metavar="NAME=DIR", help="A store directory; at least two.")
@click.option("--table", metavar="DIR", help="Directory of the Delta tables; made if absent.")
@click.option(
    "--mode",
    type=click.Choice(["quick", "digest", "full"]),
    default="digest",
    show_default=True,
    help="quick: digests of both ends and a random sample; digest: of everything; full: every entry compared too.",
)
@click.option("--against", hidden=True)
@click.option("--skip-proven", hidden=True)
@click.option("--resume", hidden=True)
@click.option("--max-bytes-per-second", hidden=True)
@click.option("--report", hidden=True)
@dry_run_option
@connection_options
def command(
    peers: str | None,
    groups: str | None,
    replicas: tuple[str, ...],
    table: str | None,
    mode: str,
    dry_run: bool,
    **later: str | None,
) -> Outcome:
    """Compares the replicas of a log and says where they differ."""
    for name in _LATER:
        if later.get(name) is not None:
            raise not_available(f"--{name.replace('_', '-')}")
    if table is None and not dry_run:
        raise ConfigError("there is no place for the result", "--table", "name a directory, or use --dry-run")
    if table is not None:
        tables.check_directory(table)
    check_versions()
    snapshot = _snapshot(peers, groups, replicas)
    audit = _Audit(snapshot, mode, None if dry_run else table)
    with spark_session("dledger-audit") as spark:
        return run_stoppable(spark, lambda: audit.run(spark))


def _snapshot(peers: str | None, groups: str | None, stores: Sequence[str]) -> dict[str, tuple[Replica, ...]]:
    """Returns the replicas by group, as they are now; checks options before a JVM starts."""
    if (peers is None) == (not stores):
        raise ConfigError("what to audit is not clear", "--peers, --replica", "give one of them")
    if peers is not None:
        parse_peers(peers)
        return {group: node_replicas(peers, group) for group in parse_groups(groups or "default")}
    if groups is not None:
        raise ConfigError("a store holds one group", "--groups", "leave it out with --replica")
    found = store_replicas(parse_replicas(stores))
    return {found[0].group: found}


@dataclass
class _Audit:
    """One run."""

    snapshot: dict[str, tuple[Replica, ...]]
    mode: str
    table: str | None
    run_id: str = field(default_factory=lambda: uuid.uuid4().hex)
    began: float = field(default_factory=time.monotonic)
    started_at: datetime = field(default_factory=lambda: datetime.now(UTC))

    def run(self, spark: SparkSession) -> Outcome:
        parts = {group: plan.sections(replicas) for group, replicas in self.snapshot.items()}
        for group, sections in parts.items():
            for part in sections:
                names = ", ".join(replica.name for replica in part.replicas)
                progress(f"group {group}: [{part.start}, {part.end}) on {names}")
        chosen, tasks = self._plan(spark, parts)
        ranges = digest_pass(spark, tasks, self.run_id).persist()
        try:
            with watched(spark, "digests"):
                suspects = suspect_ranges(ranges)
            compared = compared_by_replica(ranges)
            reports = self._reports(spark, parts, chosen, suspects, compared)
            if self.table is not None:
                self._write(spark, ranges, reports)
        finally:
            ranges.unpersist()
        return self._outcome(reports)

    def _plan(
        self, spark: SparkSession, parts: dict[str, list[plan.Section]]
    ) -> tuple[dict[RangeKey, plan.Section], list[plan.DigestTask]]:
        """Returns the ranges to compare and the tasks that digest them."""
        chosen: dict[RangeKey, plan.Section] = {}
        tasks: list[plan.DigestTask] = []
        wanted = _TASKS_PER_CORE * spark.sparkContext.defaultParallelism
        for group, sections in parts.items():
            span = plan.choose_span(sum(part.end - part.start for part in sections))
            picked = plan.sample(sections, span, self.run_id) if self.mode == "quick" else sections
            tasks += plan.digest_tasks(picked, span, wanted)
            for part in picked:
                for start, end in plan.aligned(part.start, part.end, span):
                    chosen[group, start, end] = plan.Section(start, end, part.replicas)
        return chosen, tasks

    def _reports(
        self,
        spark: SparkSession,
        parts: dict[str, list[plan.Section]],
        chosen: dict[RangeKey, plan.Section],
        suspects: dict[RangeKey, list[RangeRow]],
        compared: Iterable[Any],
    ) -> list[GroupReport]:
        findings: dict[str, list[Finding]] = defaultdict(list)
        reasons: dict[str, list[str]] = defaultdict(list)
        doubtful: list[RangeKey] = []
        for key, rows in suspects.items():
            judged = judge_range(rows)
            doubtful += [key] if judged.drill else []
            reasons[key[0]] += judged.unread
            findings[key[0]] += [_range_finding(Class.LAYOUT_DIFFERS, key, names) for names in judged.layout]
            findings[key[0]] += [_range_finding(Class.RETENTION_SKEW, key, name) for name in judged.gone]
        if self.mode == "full":
            doubtful = list(chosen)
        cleared: dict[str, int] = defaultdict(int)
        if doubtful:
            progress(f"{len(doubtful)} of {len(chosen)} ranges are read entry by entry")
            for key, drilled in zip(doubtful, drill_pass(spark, [chosen[key] for key in doubtful]), strict=True):
                findings[key[0]] += drilled.findings
                reasons[key[0]] += drilled.unread
                cleared[key[0]] += drilled.cleared
        if self.mode == "full":
            stores = [r for replicas in self.snapshot.values() for r in replicas if r.reachable and not r.live]
            for finding in index_pass(spark, stores):
                findings[finding.group].append(finding)
        return [
            _report_of(
                group, self.snapshot[group], parts[group], findings[group], reasons[group], cleared[group], compared
            )
            for group in self.snapshot
        ]

    def _write(self, spark: SparkSession, ranges: Any, reports: list[GroupReport]) -> None:
        assert self.table is not None
        progress(f"writing {self.table}")
        facts = tables.RunFacts(self.run_id, self.mode, self.started_at, time.monotonic() - self.began)
        tables.write_ranges(ranges, self.table)
        found = merge_findings(finding for report in reports for finding in report.findings)
        tables.write_findings(spark, self.table, facts, found)
        tables.write_runs(spark, self.table, facts, reports)

    def _outcome(self, reports: list[GroupReport]) -> Outcome:
        summary = summarize(reports)
        summary |= {
            "run_id": self.run_id,
            "mode": self.mode,
            "started_at": self.started_at.isoformat(),
            "duration_s": round(time.monotonic() - self.began, 3),
            "table": self.table,
        }
        verdict = Verdict(summary["verdict"])
        progress(f"{verdict}: {summary['coverage_percent']} % compared, {len(summary['findings'])} findings")
        return Outcome(summary, _EXIT[verdict])


def _range_finding(kind: Class, key: RangeKey, names: str) -> Finding:
    group, start, end = key
    return Finding(kind=kind, group=group, replica=names, start=start, end=end, count=end - start)


def _report_of(
    group: str,
    replicas: tuple[Replica, ...],
    parts: list[plan.Section],
    findings: list[Finding],
    reasons: list[str],
    cleared: int,
    compared: Iterable[Any],
) -> GroupReport:
    usable = [replica for replica in replicas if replica.reachable]
    unreachable = [f"{replica.name}: {replica.error}" for replica in replicas if not replica.reachable]
    lonely = [f"only {len(usable)} replica can be read, so nothing was compared"] if len(usable) < 2 else []
    common = plan.common_range(replicas)
    partly = tuple(
        (part.start, part.end, tuple(replica.name for replica in part.replicas))
        for part in parts
        if len(part.replicas) < len(usable)
    )
    done = [(one.replica, one.entries, one.nbytes) for one in compared if one.group == group]
    return GroupReport(
        group=group,
        replicas=replicas,
        compared=common,
        partly=partly,
        coverage=coverage_of(replicas, done),
        findings=tuple(merge_findings([*findings, *plan.end_findings(replicas)])),
        incomplete=tuple(dict.fromkeys([*unreachable, *lonely, *reasons])),
        cleared=cleared,
    )


def main() -> None:
    """Runs the job."""
    run_job(command)


if __name__ == "__main__":
    main()

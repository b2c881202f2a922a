"""From results to the report: coverage, a report of each group, the JSON summary, rows for the tables. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import pyarrow as pa

from jobs._audit.judge import end_findings, findings_of, merge_findings, verdict_of
from jobs._audit.model import FINDINGS, RUNS, Class, Finding, Replica, Severity, Verdict
from jobs._audit.plan import Section, Snapshot, common_range, sections

__all__ = [
    "Coverage",
    "GroupReport",
    "alignment",
    "alignment_note",
    "coverage_of",
    "findings_table",
    "report_groups",
    "runs_table",
    "summarize",
]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of one replica was compared with another; bytes are those of bodies.

    ``entries_eligible`` is None for a replica that could not be asked.
    """

    entries_compared: int = 0
    entries_eligible: int | None = None
    bytes_compared: int = 0

    @property
    def percent(self) -> float:
        """Share of the entries; 100 for an empty log."""
        if self.entries_eligible is None:
            return 0.0
        if not self.entries_eligible:
            return 100.0
        return round(100 * self.entries_compared / self.entries_eligible, 3)

    @property
    def bytes_eligible(self) -> int | None:
        """Exact where all entries were compared, else scaled up from those that were."""
        if not self.entries_eligible or self.entries_compared == self.entries_eligible:
            return self.bytes_compared
        if not self.entries_compared:
            return None
        return round(self.bytes_compared * self.entries_eligible / self.entries_compared)

    def plus(self, other: Coverage) -> Coverage:
        """Returns the coverage of both together."""
        known = [n for n in (self.entries_eligible, other.entries_eligible) if n is not None]
        return Coverage(
            self.entries_compared + other.entries_compared,
            sum(known) if known else None,
            self.bytes_compared + other.bytes_compared,
        )

    def to_json(self) -> dict[str, Any]:
        """Returns the map of the JSON summary."""
        return {
            "entries_compared": self.entries_compared,
            "entries_eligible": self.entries_eligible,
            "bytes_compared": self.bytes_compared,
            "bytes_eligible": self.bytes_eligible,
            "percent": self.percent,
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """The audit of one group.

    Attributes:
        group: its name.
        replicas: the snapshot.
        compared: [start, end) at which all reachable replicas were compared.
        partly: ranges that only some replicas hold, compared among those: (start, end, names).
        coverage: by replica.
        findings: merged, worst first.
        incomplete: why not everything that could be was compared; empty = complete.
        cleared: entries that a second look found equal.
        provenance: what coverage rests on: read now, by a run before, or proven on a date.
        notes: further facts.
        alignment: of classic CommitLogs: whether they are equal to their ends.
    """

    group: str
    replicas: tuple[Replica, ...]
    compared: tuple[int, int] = (0, 0)
    partly: tuple[tuple[int, int, tuple[str, ...]], ...] = ()
    coverage: dict[str, Coverage] = field(default_factory=dict)
    findings: tuple[Finding, ...] = ()
    incomplete: tuple[str, ...] = ()
    cleared: int = 0
    provenance: tuple[dict[str, Any], ...] = ()
    notes: tuple[str, ...] = ()
    alignment: dict[str, Any] | None = None

    @property
    def verdict(self) -> Verdict:
        """The group's verdict."""
        return verdict_of(self.findings, self.incomplete)

    def to_json(self) -> dict[str, Any]:
        """Returns the map of the JSON summary."""
        return {
            "group": self.group,
            "verdict": self.verdict.value,
            "compared": {"start": self.compared[0], "end": self.compared[1]},
            "partly_compared": [{"start": s, "end": e, "replicas": list(names)} for s, e, names in self.partly],
            "coverage": {name: coverage.to_json() for name, coverage in self.coverage.items()},
            "incomplete": list(self.incomplete),
            "cleared_by_second_look": self.cleared,
            "provenance": list(self.provenance),
            "notes": list(self.notes),
            **({"alignment": self.alignment} if self.alignment is not None else {}),
        }


def coverage_of(replicas: Sequence[Replica], compared: Iterable[tuple[str, int, int]]) -> dict[str, Coverage]:
    """Returns the coverage by replica.

    Args:
        replicas: the snapshot.
        compared: (replica, entries, bytes) of ranges that were read and compared.
    """
    found = {}
    read = list(compared)
    for replica in replicas:
        entries = sum(count for name, count, _ in read if name == replica.name)
        nbytes = sum(count for name, _, count in read if name == replica.name)
        eligible = max(0, replica.end - replica.first_index) if replica.reachable else None
        found[replica.name] = Coverage(entries, eligible, nbytes)
    return found


def report_groups(snapshot: Snapshot, results: pa.Table, compared: pa.Table, run_id: str) -> list[GroupReport]:
    """Returns the report of each group.

    Args:
        snapshot: the replicas.
        results: of all comparisons (RESULTS).
        compared: entries and bytes compared now or before, as ``compare.compared_by_replica`` gives them.
        run_id: this run.
    """
    findings = findings_of(results)
    rows = results.to_pylist()
    done = compared.sort_by([(name, "ascending") for name in ("replica", "run_id", "first")]).to_pylist()
    return [
        _report(
            group,
            replicas,
            [finding for finding in findings if finding.group == group],
            [row for row in rows if row["group"] == group],
            [one for one in done if one["group"] == group],
            run_id,
        )
        for group, replicas in snapshot.items()
    ]


def _report(
    group: str,
    replicas: tuple[Replica, ...],
    found: list[Finding],
    results: list[dict[str, Any]],
    done: list[dict[str, Any]],
    run_id: str,
) -> GroupReport:
    parts = sections(replicas)
    usable = [replica for replica in replicas if replica.reachable]
    unreachable = [f"{replica.name}: {replica.error}" for replica in replicas if not replica.reachable]
    lonely = [f"only {len(usable)} replica can be read, so nothing was compared"] if len(usable) < 2 else []
    unread = [reason for row in results for reason in row["unread"]]
    ends = [f for side in (False, True) for f in end_findings([r for r in replicas if r.other is side])]
    findings = merge_findings([*found, *ends])
    aligned = alignment(replicas, findings)
    return GroupReport(
        group=group,
        replicas=replicas,
        compared=common_range(replicas),
        partly=tuple(
            (part.start, part.end, tuple(replica.name for replica in part.replicas))
            for part in parts
            if len(part.replicas) < len(usable)
        ),
        coverage=coverage_of(replicas, [(one["replica"], one["entries"], one["bytes"]) for one in done]),
        findings=tuple(findings),
        incomplete=tuple(dict.fromkeys([*unreachable, *lonely, *_apart(parts, usable), *unread])),
        cleared=sum(row["cleared"] for row in results),
        provenance=tuple(_provenance(one, run_id) for one in done),
        notes=(*_notes(usable), *([alignment_note(aligned)] if aligned else [])),
        alignment=aligned,
    )


def _apart(parts: Iterable[Section], usable: Sequence[Replica]) -> list[str]:
    """Returns a reason if two clusters hold no entry in common: then they were not compared."""
    both = any(len({replica.other for replica in part.replicas}) == 2 for part in parts)
    if both or not any(r.other for r in usable) or not any(r.end > r.first_index for r in usable):
        return []
    return ["the two clusters have no index in common, so they were not compared with each other"]


def _notes(usable: Sequence[Replica]) -> list[str]:
    here = {replica.log_uuid for replica in usable if not replica.other}
    there = {replica.log_uuid for replica in usable if replica.other}
    if not there:
        return []
    names = [", ".join(sorted(uuid or "not recorded" for uuid in side)) for side in (here, there)]
    if here == there:
        return [f"both clusters hold the same log ({names[0]})"]
    left_out = "layouts, and the first entry, which holds the log's identity, are not"
    return [f"the clusters hold two logs, {names[0]} and {names[1]}: entries are compared by index; {left_out}"]


def _provenance(one: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    kind = "read now" if one["run_id"] == run_id else f"read by run {one['run_id']}"
    if not one["run_id"]:
        kind = f"proven on {one['first'].date().isoformat()}"
    moments = {name: one[name].isoformat(timespec="seconds") for name in ("first", "last")}
    return {"replica": one["replica"], "kind": kind, "entries": one["entries"], "bytes": one["bytes"]} | moments


def alignment(replicas: Sequence[Replica], findings: Sequence[Finding]) -> dict[str, Any] | None:
    """Returns whether CommitLogs are equal to their ends, as an upgrade to DLedger needs them; None for other logs."""
    if not replicas or not all(replica.block_bytes for replica in replicas):
        return None
    ends = {replica.name: replica.end_position for replica in replicas}
    differ = any(
        f.severity in (Severity.CRITICAL, Severity.ERROR) or f.kind is Class.DIVERGED_UNKNOWN for f in findings
    )
    return {
        "aligned": len(set(ends.values())) == 1 and not differ,
        "end_positions": ends,
        "first_positions": {replica.name: replica.first_index * replica.block_bytes for replica in replicas},
        "block_bytes": replicas[0].block_bytes,
    }


def alignment_note(found: Mapping[str, Any]) -> str:
    """Returns the alignment in words."""
    unit = f"in a CommitLog an index counts blocks: position = index x {found['block_bytes']:,}"
    ends = found["end_positions"]
    last = max(ends.values())
    if found["aligned"]:
        return f"aligned: all end at position {last:,} and are equal byte for byte; {unit}"
    if len(set(ends.values())) == 1:
        return f"not aligned: they end alike and differ before; {unit}"
    behind = ", ".join(f"{name} by {last - end:,} bytes" for name, end in ends.items() if end < last)
    remedy = "before an upgrade to DLedger forbid writes on the master, let its slaves catch up, and audit again"
    return f"not aligned: {behind} behind the longest; {remedy}; {unit}"


def findings_table(reports: Sequence[GroupReport], run_id: str, found_at: datetime) -> pa.Table:
    """Returns the findings of a run (FINDINGS)."""
    found = merge_findings(finding for report in reports for finding in report.findings)
    run = {"run_id": run_id, "found_at": found_at}
    return pa.Table.from_pylist([run | finding.to_row() for finding in found], FINDINGS)


def runs_table(reports: Sequence[GroupReport], **run: Any) -> pa.Table:
    """Returns a row per group (RUNS).

    Args:
        reports: of the groups.
        run: the columns run_id, started_at, duration_s and mode.
    """
    rows = [
        run
        | {
            "group": report.group,
            "verdict": report.verdict.value,
            "compared_start": report.compared[0],
            "compared_end": report.compared[1],
            "entries_compared": sum(part.entries_compared for part in report.coverage.values()),
            "bytes_compared": sum(part.bytes_compared for part in report.coverage.values()),
            "findings": len(report.findings),
            "report": json.dumps(report.to_json()),
        }
        for report in reports
    ]
    return pa.Table.from_pylist(rows, RUNS)


def summarize(reports: Sequence[GroupReport]) -> dict[str, Any]:
    """Returns the JSON summary of all groups, without what belongs to the run (id, mode, duration)."""
    findings = merge_findings(finding for report in reports for finding in report.findings)
    incomplete = [f"{report.group}: {reason}" for report in reports for reason in report.incomplete]
    coverage: dict[str, Coverage] = {}
    for report in reports:
        for name, part in report.coverage.items():
            coverage[name] = coverage[name].plus(part) if name in coverage else part
    total = Coverage()
    for part in coverage.values():
        total = total.plus(part)
    complete = all(part.entries_eligible is not None for part in coverage.values())
    return {
        "verdict": verdict_of(findings, incomplete).value,
        "compared": {
            "start": min((report.compared[0] for report in reports), default=0),
            "end": max((report.compared[1] for report in reports), default=0),
        },
        "coverage": {name: part.to_json() for name, part in coverage.items()},
        "coverage_percent": total.percent
        if complete
        else min((part.percent for part in coverage.values()), default=0.0),
        "findings": [finding.to_json() for finding in findings],
        "incomplete": incomplete,
        "cleared_by_second_look": sum(report.cleared for report in reports),
        "replicas": [replica.to_json() for report in reports for replica in report.replicas],
        "groups": [report.to_json() for report in reports],
    }

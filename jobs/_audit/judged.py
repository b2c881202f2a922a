"""From suspect ranges and second looks to a group's report. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from jobs._audit import plan
from jobs._audit.classic import alignment, alignment_note
from jobs._audit.compared import Compared, RangeKey
from jobs._audit.drill import Drilled
from jobs._audit.model import Class, Finding, Replica, Severity
from jobs._audit.ranges import RangeRow, judge_range
from jobs._audit.report import GroupReport, coverage_of, merge_findings

__all__ = ["Judged", "judge_suspects", "report_of"]


@dataclass
class Judged:
    """What was found, by group; ``doubtful`` are the ranges to read entry by entry."""

    findings: dict[str, list[Finding]] = field(default_factory=lambda: defaultdict(list))
    reasons: dict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    cleared: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    doubtful: list[RangeKey] = field(default_factory=list)

    def found(self, group: str) -> list[Finding]:
        """Returns the findings, merged, without the index's disagreement with entries that are wrong themselves."""
        explained = [f for f in self.findings[group] if f.severity in (Severity.CRITICAL, Severity.WARNING)]
        explained = [f for f in explained if f.kind is not Class.LAYOUT_DIFFERS]
        kept: list[Finding] = []
        for finding in merge_findings(self.findings[group]):
            kept += _beside(finding, explained) if finding.kind is Class.INDEX_MISMATCH else [finding]
        return merge_findings(kept)

    def add_drilled(self, group: str, drilled: Drilled) -> None:
        """Takes over what the second pass found in one range."""
        self.findings[group] += drilled.findings
        self.reasons[group] += drilled.unread
        self.cleared[group] += drilled.cleared


def judge_suspects(suspects: Mapping[RangeKey, Sequence[RangeRow]]) -> Judged:
    """Judges the ranges that are not simply equal everywhere."""
    judged = Judged()
    for key, rows in suspects.items():
        group, start, end = key
        one = judge_range(rows)
        judged.doubtful += [key] if one.drill else []
        judged.reasons[group] += one.unread
        judged.findings[group] += [_of(Class.LAYOUT_DIFFERS, group, names, start, end) for names in one.layout]
        judged.findings[group] += [_of(Class.RETENTION_SKEW, group, name, start, end) for name in one.gone]
        judged.findings[group] += [
            _of(Class.INDEX_MISMATCH, group, row.replica, low, high) for row in rows for low, high in row.index_wrong
        ]
    return judged


def _beside(finding: Finding, others: Sequence[Finding]) -> list[Finding]:
    """Returns what is left of a finding outside those of others on the same replica."""
    left = [(finding.start, finding.end)]
    for other in others:
        if finding.replica in other.replica.split(","):
            left = [piece for s, e in left for piece in ((s, min(e, other.start)), (max(s, other.end), e))]
            left = [(s, e) for s, e in left if s < e]
    return [_of(finding.kind, finding.group, finding.replica, s, e) for s, e in left]


def _of(kind: Class, group: str, names: str, start: int, end: int) -> Finding:
    return Finding(kind=kind, group=group, replica=names, start=start, end=end, count=end - start)


def report_of(
    group: str,
    replicas: tuple[Replica, ...],
    parts: list[plan.Section],
    judged: Judged,
    done: Sequence[Compared],
    run_id: str,
) -> GroupReport:
    """Returns the report of one group."""
    usable = [replica for replica in replicas if replica.reachable]
    unreachable = [f"{replica.name}: {replica.error}" for replica in replicas if not replica.reachable]
    lonely = [f"only {len(usable)} replica can be read, so nothing was compared"] if len(usable) < 2 else []
    partly = tuple(
        (part.start, part.end, tuple(replica.name for replica in part.replicas))
        for part in parts
        if len(part.replicas) < len(usable)
    )
    ends = [
        finding
        for side in (False, True)
        for finding in plan.end_findings([replica for replica in replicas if replica.other is side])
    ]
    findings = merge_findings([*judged.found(group), *ends])
    found_alignment = alignment(replicas, findings)
    return GroupReport(
        group=group,
        replicas=replicas,
        compared=plan.common_range(replicas),
        partly=partly,
        coverage=coverage_of(replicas, [(one.replica, one.entries, one.nbytes) for one in done]),
        findings=tuple(findings),
        incomplete=tuple(dict.fromkeys([*unreachable, *lonely, *_apart(parts, usable), *judged.reasons[group]])),
        cleared=judged.cleared[group],
        provenance=tuple(_provenance(one, run_id) for one in sorted(done, key=_order)),
        notes=(*_notes(usable), *([alignment_note(found_alignment)] if found_alignment else [])),
        alignment=found_alignment,
    )


def _apart(parts: Iterable[plan.Section], usable: Sequence[Replica]) -> list[str]:
    """Says so if two clusters hold no entry in common: then they were not compared."""
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


def _provenance(one: Compared, run_id: str) -> dict[str, Any]:
    kind = "read now" if one.run_id == run_id else f"read by run {one.run_id}"
    if not one.run_id and one.first is not None:
        kind = f"proven on {one.first.date().isoformat()}"
    return {
        "replica": one.replica,
        "kind": kind,
        "entries": one.entries,
        "bytes": one.nbytes,
        "first": _iso(one.first),
        "last": _iso(one.last),
    }


def _order(one: Compared) -> tuple[str, str, str]:
    return one.replica, one.run_id, _iso(one.first) or ""


def _iso(moment: datetime | None) -> str | None:
    return None if moment is None else moment.isoformat(timespec="seconds")

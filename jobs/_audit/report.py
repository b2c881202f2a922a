"""From findings and digests to what is reported: merged findings, coverage, the verdict, the JSON summary. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

from jobs._audit.model import Class, Finding, Replica, Severity, Verdict

__all__ = ["Coverage", "GroupReport", "coverage_of", "merge_findings", "summarize", "verdict_of"]

_INCONSISTENT: Final = frozenset({Severity.CRITICAL, Severity.ERROR})
_ORDER: Final = list(Severity)


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
        compared: [start, end) of what all reachable replicas were compared at.
        partly: ranges that only some replicas hold, compared among those: (start, end, names).
        coverage: by replica.
        findings: merged, worst first.
        incomplete: why not everything that could be was compared; empty = complete.
        cleared: suspects that a second look cleared.
        provenance: what coverage rests on: read now, by a run before, or proven on a date.
        notes: what else a reader should know.
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


def verdict_of(findings: Iterable[Finding], incomplete: Sequence[str]) -> Verdict:
    """Returns the verdict: a real difference outweighs what could not be compared, and that outweighs equality."""
    found = list(findings)
    if any(finding.severity in _INCONSISTENT for finding in found):
        return Verdict.INCONSISTENT
    if incomplete or any(finding.kind is Class.DIVERGED_UNKNOWN for finding in found):
        return Verdict.INCOMPLETE
    return Verdict.CONSISTENT


def merge_findings(findings: Iterable[Finding]) -> list[Finding]:
    """Joins neighbouring ranges of the same class and replica; the evidence is the first one's. Worst come first."""
    merged: list[Finding] = []
    for finding in sorted(findings, key=lambda f: (f.group, f.kind, f.replica, f.start, f.end)):
        last = merged[-1] if merged else None
        same = last is not None and (last.group, last.kind, last.replica) == (
            finding.group,
            finding.kind,
            finding.replica,
        )
        if last is not None and same and finding.start <= last.end:
            if finding.end > last.end:
                merged[-1] = replace(
                    last, end=finding.end, count=last.count + finding.end - max(finding.start, last.end)
                )
        else:
            merged.append(finding)
    return sorted(merged, key=lambda f: (_ORDER.index(f.severity), f.group, f.start, f.kind, f.replica))


def coverage_of(
    replicas: Sequence[Replica], compared: Iterable[tuple[str, int, int]], *, extra: Iterable[str] = ()
) -> dict[str, Coverage]:
    """Returns the coverage by replica.

    Args:
        replicas: the snapshot.
        compared: (replica, entries, bytes) of what was read and compared.
        extra: names that belong in the table though nothing of them was read.
    """
    done: dict[str, tuple[int, int]] = {}
    for name, entries, nbytes in compared:
        before = done.get(name, (0, 0))
        done[name] = before[0] + entries, before[1] + nbytes
    found = {}
    for replica in replicas:
        entries, nbytes = done.get(replica.name, (0, 0))
        eligible = max(0, replica.end - replica.first_index) if replica.reachable else None
        found[replica.name] = Coverage(entries, eligible, nbytes)
    return found | {name: Coverage() for name in extra if name not in found}


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

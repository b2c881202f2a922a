"""From results to the report: coverage, the JSON summary, rows of the tables, and the page. Pure, except the page."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from itertools import zip_longest
from typing import Any, Final

import pyarrow as pa

from dledger_core.record import merge_ranges

from .._report.drill_down import RangeDiff
from .._report.page import COLORS, Place, ReportedFinding, render_page
from .._report.templates import half_open
from .judge import committed_end, end_findings, findings_of, merge_findings, verdict_of
from .model import FINDINGS, RUNS, AuditedReplica, AuditFinding, Class, Severity, Snapshot
from .places import place_of
from .plan import Section, common_range, sections
from .range_diff import diff_findings

Report = dict[str, Any]
"""One group in the JSON summary."""


def report_groups(
    snapshot: Snapshot, results: pa.Table, compared: pa.Table, covered: pa.Table, run_id: str
) -> tuple[list[Report], list[AuditFinding]]:
    """Return the report of each group, and the findings of all of them, merged, worst first.

    Args:
        snapshot: the replicas.
        results: of all comparisons (RESULTS).
        compared: entries and bytes compared now or before, from ``digests.compared_by_replica``.
        covered: the compared ranges (COVERED).
        run_id: this run.
    """
    sides = [[r for r in replicas if r.other is side] for replicas in snapshot.values() for side in (False, True)]
    findings = merge_findings([*findings_of(results), *(finding for side in sides for finding in end_findings(side))])
    rows = results.select(["group", "unread", "cleared"]).to_pylist()
    done = compared.sort_by([(name, "ascending") for name in ("replica", "run_id", "first")]).to_pylist()
    parts = covered.to_pylist()
    reports = [
        _report(
            group,
            replicas,
            [finding for finding in findings if finding.group == group],
            [row for row in rows if row["group"] == group],
            [one for one in done if one["group"] == group],
            run_id,
        )
        | {"ranges": _ranges(replicas, [one for one in parts if one["group"] == group])}
        for group, replicas in snapshot.items()
    ]
    return reports, findings


def _report(
    group: str,
    replicas: tuple[AuditedReplica, ...],
    findings: list[AuditFinding],
    results: list[dict[str, Any]],
    done: list[dict[str, Any]],
    run_id: str,
) -> Report:
    archive = next((replica for replica in replicas if replica.table), None)
    nodes = tuple(replica for replica in replicas if not replica.table)
    parts, (start, end) = sections(nodes), common_range(nodes)
    usable = [replica for replica in nodes if replica.reachable]
    incomplete = [f"{replica.name}: {replica.error}" for replica in replicas if not replica.reachable]
    if len(usable) < 2:
        incomplete += _alone(usable, archive)
    incomplete += [*_apart(parts, usable), *(reason for row in results for reason in row["unread"])]
    incomplete = list(dict.fromkeys(incomplete))
    aligned = alignment(nodes, findings)
    return {
        "group": group,
        "verdict": verdict_of(findings, incomplete).value,
        "compared": {"start": start, "end": end},
        "partly_compared": [
            {"start": part.start, "end": part.end, "replicas": [replica.name for replica in part.replicas]}
            for part in parts
            if len(part.replicas) < len(usable)
        ],
        "coverage": {
            replica.name: coverage(
                sum(one["entries"] for one in done if one["replica"] == replica.name),
                _eligible(replica, usable),
                sum(one["bytes"] for one in done if one["replica"] == replica.name),
            )
            for replica in replicas
        },
        "incomplete": incomplete,
        "cleared_by_second_look": sum(row["cleared"] for row in results),
        "provenance": [_provenance(one, run_id) for one in done],
        "notes": [
            *_notes(usable),
            *([alignment_note(aligned)] if aligned else []),
            *([_archive_note(archive)] if archive is not None else []),
        ],
        **({"alignment": aligned} if aligned else {}),
    }


def _alone(usable: Sequence[AuditedReplica], archive: AuditedReplica | None) -> list[str]:
    """Return why the entries of one replica were not compared; an archive may have some or all of them."""
    if archive is None or not usable:
        return [f"only {len(usable)} replica can be read, so no entries were compared"]
    [replica] = usable
    if archive.first_index <= replica.first_index and replica.end <= archive.end:
        return []
    outside = f"entries outside of {half_open(archive.first_index, archive.end)}, which the archive has"
    return [f"only 1 replica can be read, so its {outside}, were not compared"]


def _archive_note(archive: AuditedReplica) -> str:
    extent = half_open(archive.first_index, archive.end)
    return (
        f"the archive {archive.table} has {len(archive.recorded):,} proven ranges, {extent}; rows outside do not count"
    )


def _eligible(replica: AuditedReplica, usable: Sequence[AuditedReplica]) -> int | None:
    if not replica.reachable:
        return None
    end = replica.end if replica.table else expected_end(replica, usable)
    return max(0, end - replica.first_index)


def _ranges(replicas: Sequence[AuditedReplica], covered: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the ranges of each replica with their state; the rest is ``not compared``."""
    found: list[dict[str, Any]] = []
    for replica in (one for one in replicas if one.reachable):
        own = [one for one in covered if one["replica"] == replica.name]
        at = replica.first_index
        for start, end in [*merge_ranges((one["start"], one["end"]) for one in own), (replica.last_index + 1,) * 2]:
            if at < start:
                found.append({"replica": replica.name, "start": at, "end": start, "state": "not compared"})
            at = max(at, end)
        found += [{name: one[name] for name in ("replica", "start", "end", "state")} for one in own]
    return sorted(found, key=lambda one: (one["replica"], one["start"]))


def expected_end(replica: AuditedReplica, replicas: Sequence[AuditedReplica]) -> int:
    """Return the end of the entries that a replica should contain, by its own files and by the lowest commit index."""
    own = [named[1] for named in (replica.damaged, replica.missing) if named is not None]
    committed = 0 if replica.commit_index is None else replica.commit_index + 1
    return max(replica.end, committed, committed_end(replicas), *own)


def coverage(compared: int, eligible: int | None, nbytes: int) -> dict[str, Any]:
    """Return the compared part of a replica; bytes are those of bodies.

    Args:
        compared: entries.
        eligible: its entries; None for an unreachable replica.
        nbytes: bytes compared. The eligible bytes are exact if all entries were compared, else scaled up.
    """
    percent = 0.0 if eligible is None else round(100 * compared / eligible, 3) if eligible else 100.0
    all_bytes = round(nbytes * eligible / compared) if eligible and compared else None if eligible else nbytes
    return {
        "entries_compared": compared,
        "entries_eligible": eligible,
        "bytes_compared": nbytes,
        "bytes_eligible": all_bytes,
        "percent": percent,
    }


def _sum(parts: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the coverage of several groups, or replicas, together."""
    rows = list(parts)
    known = [row["entries_eligible"] for row in rows if row["entries_eligible"] is not None]
    entries, nbytes = (sum(row[name] for row in rows) for name in ("entries_compared", "bytes_compared"))
    return coverage(entries, sum(known) if known else None, nbytes)


def _apart(parts: Iterable[Section], usable: Sequence[AuditedReplica]) -> list[str]:
    """Return a reason if two clusters have no index in common, so that they were not compared."""
    both = any(len({replica.other for replica in part.replicas}) == 2 for part in parts)
    if both or not any(r.other for r in usable) or not any(r.end > r.first_index for r in usable):
        return []
    return ["the two clusters have no index in common, so they were not compared with each other"]


def _notes(usable: Sequence[AuditedReplica]) -> list[str]:
    here, there = ({replica.log_uuid for replica in usable if replica.other is side} for side in (False, True))
    if not there:
        return []
    names = [", ".join(sorted(uuid or "not recorded" for uuid in side)) for side in (here, there)]
    if here == there:
        return [f"both clusters have the same log ({names[0]})"]
    left_out = "layouts, and the first entry, which contains the log's uuid, are not"
    return [f"the clusters have two logs, {names[0]} and {names[1]}: entries are compared by index; {left_out}"]


def _provenance(one: Mapping[str, Any], run_id: str) -> dict[str, Any]:
    kind = "read now" if one["run_id"] == run_id else f"read by run {one['run_id']}"
    if not one["run_id"]:
        kind = f"proven on {one['first'].date().isoformat()}"
    moments = {name: one[name].isoformat(timespec="seconds") for name in ("first", "last")}
    return {"replica": one["replica"], "kind": kind, "entries": one["entries"], "bytes": one["bytes"]} | moments


def alignment(replicas: Sequence[AuditedReplica], findings: Sequence[AuditFinding]) -> dict[str, Any] | None:
    """Return whether CommitLogs are equal to their ends, as an upgrade to DLedger requires; None for other logs."""
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
    """Return the alignment in words."""
    unit = f"in a CommitLog an index counts blocks: position = index x {found['block_bytes']}"
    ends = found["end_positions"]
    last = max(ends.values())
    if found["aligned"]:
        return f"aligned: all end at position {last} and are equal byte for byte; {unit}"
    if len(set(ends.values())) == 1:
        return f"not aligned: they have the same end and differ before it; {unit}"
    shorter = ", ".join(f"{name} by {last - end} bytes" for name, end in ends.items() if end < last)
    remedy = "before an upgrade to DLedger reject writes on the master, let its slaves catch up, and audit again"
    return f"not aligned: {shorter} behind the longest; {remedy}; {unit}"


def findings_table(findings: Iterable[AuditFinding], run_id: str, found_at: datetime) -> pa.Table:
    """Return the findings of a run (FINDINGS)."""
    run = {"run_id": run_id, "found_at": found_at}
    return pa.Table.from_pylist([run | finding.to_row() for finding in findings], FINDINGS)


def runs_table(reports: Sequence[Report], findings: Sequence[AuditFinding], **run: Any) -> pa.Table:
    """Return a row per group (RUNS).

    Args:
        reports: of the groups.
        findings: of all groups.
        run: the columns run_id, started_at, duration_s and mode.
    """
    rows = [
        run
        | {"group": report["group"], "verdict": report["verdict"], "report": json.dumps(report)}
        | {f"compared_{name}": report["compared"][name] for name in ("start", "end")}
        | {name: _sum(report["coverage"].values())[name] for name in ("entries_compared", "bytes_compared")}
        | {"findings": sum(finding.group == report["group"] for finding in findings)}
        for report in reports
    ]
    return pa.Table.from_pylist(rows, RUNS)


def summarize(snapshot: Snapshot, reports: Sequence[Report], findings: Sequence[AuditFinding]) -> dict[str, Any]:
    """Return the JSON summary of all groups, without the data of the run (id, mode, duration)."""
    incomplete = [f"{report['group']}: {reason}" for report in reports for reason in report["incomplete"]]
    names = dict.fromkeys(name for report in reports for name in report["coverage"])
    by_name = {name: _sum(r["coverage"][name] for r in reports if name in r["coverage"]) for name in names}
    complete = all(part["entries_eligible"] is not None for part in by_name.values())
    least = min((part["percent"] for part in by_name.values()), default=0.0)
    return {
        "verdict": verdict_of(findings, incomplete).value,
        "compared": {
            "start": min((report["compared"]["start"] for report in reports), default=0),
            "end": max((report["compared"]["end"] for report in reports), default=0),
        },
        "coverage": by_name,
        "coverage_percent": _sum(by_name.values())["percent"] if complete else least,
        "findings": [finding.to_json() for finding in findings],
        "incomplete": incomplete,
        "cleared_by_second_look": sum(report["cleared_by_second_look"] for report in reports),
        "replicas": [replica.to_json() for replicas in snapshot.values() for replica in replicas],
        "groups": list(reports),
    }


_FINDING_KEYS: Final = {"class", "severity", "replica", "start", "end", "count", "group", "meaning", "next_step"}
"""Keys of every finding in the JSON summary; the others are its evidence."""
_SHOWN_BY_ENTRIES: Final = {"index", "replicas", "first_difference", "places", "disagree"}
_DIFFS_MAX: Final = 20
"""Findings whose entries the page shows on all replicas; the worst ones come first."""
_MEANINGS: Final = {
    "CONSISTENT": "Everything that could be compared is equal.",
    "INCONSISTENT": "Replicas differ, or one is damaged.",
    "INCOMPLETE": "Not everything was compared, so this does not prove that the replicas are equal.",
}
_WIDTH_MIN: Final = 0.65
"""Minimum width of a finding in the picture, in percent: one entry of a million must be visible."""
_TICKS: Final = 5


def page(summary: Mapping[str, Any], frame: Mapping[str, Any], storage: Mapping[str, str] | None = None) -> str:
    """Return the report; the entries of the worst findings are read from the replicas again.

    Args:
        summary: the JSON summary.
        frame: options and versions.
        storage: options of ``deltalake`` for the archive.
    """
    diffs = diff_findings(summary, range(min(_DIFFS_MAX, len(summary["findings"]))), storage)
    replicas = {(one["group"], one["name"]): one for one in summary["replicas"]}
    findings = []
    for finding, diff in zip_longest(summary["findings"], diffs):
        replica = replicas[finding["group"], finding["replica"].partition(",")[0]]
        others = [
            str(one["where"])
            for (group, name), one in replicas.items()
            if (group, one["kind"]) == (finding["group"], "store") and name != replica["name"]
        ]
        findings.append(_reported(finding, diff, place_of(finding, replica, diff, others)))
    pictures = {
        report["group"]: _picture(
            [one for one in summary["replicas"] if one["group"] == report["group"]],
            report["ranges"],
            [one for one in summary["findings"] if one["group"] == report["group"]],
        )
        for report in summary["groups"]
    }
    counts = Counter(finding["severity"] for finding in summary["findings"])
    counted = ", ".join(f"{count:,} {severity}" for severity, count in counts.items())
    began = f"{summary['started_at'][:19].replace('T', ' ')} UTC"
    return render_page(
        "audit.html",
        findings,
        title="Audit of replicas",
        verdict=summary["verdict"],
        meaning=_MEANINGS[summary["verdict"]],
        lines=[
            f"{summary['coverage_percent']} % of the entries were compared. Findings: {counted or 'none'}.",
            *(f"Left out: {reason}" for reason in summary["incomplete"]),
        ],
        subject="replica",
        more_in="in the table audit_findings",
        run=[("run", summary["run_id"]), ("started", began), ("took", f"{summary['duration_s']} s"), *frame.items()],
        summary=summary,
        pictures=pictures,
    )


def _reported(finding: Mapping[str, Any], diff: RangeDiff | None, place: Place) -> ReportedFinding:
    """Return a finding for the page; evidence that the entries themselves show is left out."""
    evidence = {name: value for name, value in finding.items() if name not in _FINDING_KEYS}
    if diff is not None and diff.bodies:
        evidence = {name: value for name, value in evidence.items() if name not in _SHOWN_BY_ENTRIES}
    messages = [fields for fields in diff.fields.values() if fields.get("topic")] if diff is not None else []
    count = finding["count"]
    return ReportedFinding(
        kind=finding["class"],
        severity=finding["severity"],
        subject=finding["replica"].replace(",", ", "),
        extent=half_open(finding["start"], finding["end"]),
        affected=f"{count:,} {'entry' if count == 1 else 'entries'}",
        meaning=finding["meaning"],
        next_step=finding["next_step"],
        place=place,
        message=_message(messages[0]) if messages else "",
        facts=tuple(evidence.items()),
        diff=diff,
    )


def _message(fields: Mapping[str, Any]) -> str:
    names = ("topic", "queue_id", "queue_offset", "tags", "keys", "text")
    return ", ".join(f"{name} {fields[name]}" for name in names if fields.get(name) not in (None, ""))


def _picture(
    replicas: list[dict[str, Any]], ranges: list[dict[str, Any]], findings: list[dict[str, Any]]
) -> dict[str, Any]:
    """Return each replica's log from left to right, in percent of the width: ranges compared, and findings."""
    usable = [one for one in replicas if one["reachable"]]
    low = min((one["first_index"] for one in usable), default=0)
    high = max([low + 1, *(one["last_index"] + 1 for one in usable), *(finding["end"] for finding in findings)])

    def box(start: int, end: int, kind: str, title: str, least: float = 0.0) -> dict[str, Any]:
        left, right = (100 * min(1.0, max(0.0, (index - low) / (high - low))) for index in (start, end))
        missing = max(0.0, least - (right - left))
        shown = {"left": f"{left - missing / 2:.3f}%", "width": f"{max(0.0, right - left) + missing:.3f}%"}
        return shown | {"kind": kind, "title": title}

    def boxes(one: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        for each in (each for each in ranges if each["replica"] == one["name"]):
            yield box(
                each["start"], each["end"], each["state"], f"{half_open(each['start'], each['end'])} {each['state']}"
            )
        for finding in reversed(findings):  # the worst come last, on top
            if one["name"] in finding["replica"].split(","):
                title = f"{finding['class']} {half_open(finding['start'], finding['end'])}"
                yield box(finding["start"], finding["end"], finding["severity"], title, _WIDTH_MIN)

    kinds = {each["state"] for each in ranges} | {finding["severity"] for finding in findings}
    ticks = sorted({low + (high - low) * tick // (_TICKS - 1) for tick in range(_TICKS)})
    return {
        "rows": [(one["name"], list(boxes(one)) if one["reachable"] else None) for one in replicas],
        "ticks": ticks,
        "kinds": [kind for kind in COLORS if kind in kinds],
    }

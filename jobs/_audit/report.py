"""From results to the report: coverage, a report of each group, the JSON summary, rows for the tables. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from jobs._audit.judge import end_findings, findings_of, merge_findings, verdict_of
from jobs._audit.model import FINDINGS, RUNS, Class, Finding, Replica, Severity
from jobs._audit.plan import Section, Snapshot, common_range, sections

__all__ = ["alignment", "alignment_note", "coverage", "findings_table", "report_groups", "runs_table", "summarize"]

Report = dict[str, Any]
"""One group in the JSON summary."""


def report_groups(
    snapshot: Snapshot, results: pa.Table, compared: pa.Table, run_id: str
) -> tuple[list[Report], list[Finding]]:
    """Returns the report of each group, and the findings of all of them, merged, worst first.

    Args:
        snapshot: the replicas.
        results: of all comparisons (RESULTS).
        compared: entries and bytes compared now or before, as ``compare.compared_by_replica`` gives them.
        run_id: this run.
    """
    sides = [[r for r in replicas if r.other is side] for replicas in snapshot.values() for side in (False, True)]
    findings = merge_findings([*findings_of(results), *(finding for side in sides for finding in end_findings(side))])
    rows = results.select(["group", "unread", "cleared"]).to_pylist()
    done = compared.sort_by([(name, "ascending") for name in ("replica", "run_id", "first")]).to_pylist()
    reports = [
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
    return reports, findings


def _report(
    group: str,
    replicas: tuple[Replica, ...],
    findings: list[Finding],
    results: list[dict[str, Any]],
    done: list[dict[str, Any]],
    run_id: str,
) -> Report:
    parts, (start, end) = sections(replicas), common_range(replicas)
    usable = [replica for replica in replicas if replica.reachable]
    incomplete = [f"{replica.name}: {replica.error}" for replica in replicas if not replica.reachable]
    if len(usable) < 2:
        incomplete.append(f"only {len(usable)} replica can be read, so nothing was compared")
    incomplete += [*_apart(parts, usable), *(reason for row in results for reason in row["unread"])]
    incomplete = list(dict.fromkeys(incomplete))
    aligned = alignment(replicas, findings)
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
                max(0, replica.end - replica.first_index) if replica.reachable else None,
                sum(one["bytes"] for one in done if one["replica"] == replica.name),
            )
            for replica in replicas
        },
        "incomplete": incomplete,
        "cleared_by_second_look": sum(row["cleared"] for row in results),
        "provenance": [_provenance(one, run_id) for one in done],
        "notes": [*_notes(usable), *([alignment_note(aligned)] if aligned else [])],
        **({"alignment": aligned} if aligned else {}),
    }


def coverage(compared: int, eligible: int | None, nbytes: int) -> dict[str, Any]:
    """Returns how much of a replica was compared with another one; bytes are those of bodies.

    Args:
        compared: entries.
        eligible: entries that it holds; None for a replica that could not be asked.
        nbytes: bytes compared. Those eligible are exact where all entries were compared, else scaled up.
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
    """Returns the coverage of several groups, or replicas, together."""
    rows = list(parts)
    known = [row["entries_eligible"] for row in rows if row["entries_eligible"] is not None]
    entries, nbytes = (sum(row[name] for row in rows) for name in ("entries_compared", "bytes_compared"))
    return coverage(entries, sum(known) if known else None, nbytes)


def _apart(parts: Iterable[Section], usable: Sequence[Replica]) -> list[str]:
    """Returns a reason if two clusters hold no entry in common: then they were not compared."""
    both = any(len({replica.other for replica in part.replicas}) == 2 for part in parts)
    if both or not any(r.other for r in usable) or not any(r.end > r.first_index for r in usable):
        return []
    return ["the two clusters have no index in common, so they were not compared with each other"]


def _notes(usable: Sequence[Replica]) -> list[str]:
    here, there = ({replica.log_uuid for replica in usable if replica.other is side} for side in (False, True))
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


def findings_table(findings: Iterable[Finding], run_id: str, found_at: datetime) -> pa.Table:
    """Returns the findings of a run (FINDINGS)."""
    run = {"run_id": run_id, "found_at": found_at}
    return pa.Table.from_pylist([run | finding.to_row() for finding in findings], FINDINGS)


def runs_table(reports: Sequence[Report], findings: Sequence[Finding], **run: Any) -> pa.Table:
    """Returns a row per group (RUNS).

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


def summarize(snapshot: Snapshot, reports: Sequence[Report], findings: Sequence[Finding]) -> dict[str, Any]:
    """Returns the JSON summary of all groups, without the facts of the run (id, mode, duration)."""
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

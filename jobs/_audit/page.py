"""The audit's report for people: one HTML file that needs nothing else. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, Final

from jobs._audit.model import Finding
from jobs._audit.picture import COLORS, Stretch, picture
from jobs._audit.report import GroupReport

__all__ = ["page"]

_FINDINGS_SHOWN: Final = 200
_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2430; max-width: 1000px; margin: 0 auto; padding: 24px; }
h1 { font-size: 24px; margin: 0; } h2 { font-size: 18px; margin: 32px 0 8px; }
h3 { font-size: 15px; margin: 20px 0 6px; }
.verdict { padding: 18px 22px; border-radius: 8px; color: #fff; }
.verdict p { margin: 4px 0 0; } .CONSISTENT { background: #1f7a4f; } .INCONSISTENT { background: #b3261e; }
.INCOMPLETE { background: #9a6700; }
table { border-collapse: collapse; width: 100%; margin: 6px 0; }
th, td { text-align: left; vertical-align: top; padding: 5px 12px 5px 0; border-bottom: 1px solid #e3e6eb; }
th { color: #566072; font-weight: 600; } td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; }
td { overflow-wrap: anywhere; }
.finding { border-left: 5px solid; padding: 2px 0 2px 14px; margin: 16px 0; } .finding p { margin: 3px 0; }
.legend span { display: inline-block; margin-right: 16px; }
.legend i { display: inline-block; width: 12px; height: 12px;
margin-right: 5px; border-radius: 2px; } svg { width: 100%; } .tick, .away { font-size: 11px; fill: #566072; }
.name { font-size: 13px; fill: #1d2430; } .axis { stroke: #b8bfca; } .quiet { color: #566072; }
"""
_SAID: Final = {
    "CONSISTENT": "Everything that could be compared is equal.",
    "INCONSISTENT": "Replicas differ, or one is damaged. The findings below say where and what to do.",
    "INCOMPLETE": "Not everything was compared, so this is no proof that the replicas are equal.",
}


def page(
    summary: Mapping[str, Any],
    reports: Sequence[GroupReport],
    stretches: Mapping[str, Sequence[Stretch]],
    frame: Mapping[str, Any],
) -> str:
    """Returns the report.

    Args:
        summary: the JSON summary.
        reports: the groups.
        stretches: what was compared, by group.
        frame: options and versions.
    """
    parts = [_verdict(summary), _frame(summary, frame)]
    for report in reports:
        parts += _group(report, stretches.get(report.group, ()))
    parts.append(_cost(summary))
    title = f"Audit: {summary['verdict']}"
    return (
        f'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head><body>\n" + "\n".join(parts) + "\n</body></html>\n"
    )


def _verdict(summary: Mapping[str, Any]) -> str:
    verdict = summary["verdict"]
    count = len(summary["findings"])
    facts = f"{summary['coverage_percent']} % compared, {count} finding{'' if count == 1 else 's'}, "
    facts += f"{summary['started_at'][:19].replace('T', ' ')} UTC, {summary['duration_s']} s"
    reasons = "".join(f"<p>Left out: {escape(reason)}</p>" for reason in summary["incomplete"])
    said = escape(_SAID[verdict])
    return f'<div class="verdict {verdict}"><h1>{verdict}</h1><p>{said}</p><p>{escape(facts)}</p>{reasons}</div>'


def _frame(summary: Mapping[str, Any], frame: Mapping[str, Any]) -> str:
    rows = [("run", summary["run_id"]), *frame.items()]
    replicas = [
        (
            r["group"],
            r["name"],
            f"{r['kind']} {r['role'] or ''}",
            _n(r["first_index"]),
            _n(r["commit_index"]),
            _n(r["last_index"]),
            r["where"],
        )
        for r in summary["replicas"]
    ]
    columns = ("group", "replica", "kind", "#first index", "#commit index", "#last index", "where")
    return "<h2>What was audited</h2>" + _table((), rows) + _table(columns, replicas)


def _group(report: GroupReport, stretches: Sequence[Stretch]) -> list[str]:
    start, end = report.compared
    parts = [f"<h2>Group {escape(report.group)}: {report.verdict}</h2>"]
    parts.append(f"<p>Compared on all replicas: [{start:,}, {end:,}).</p>")
    parts += [f"<p>{escape(note)}.</p>" for note in report.notes]
    parts += [
        f"<p>[{low:,}, {high:,}) is held by {escape(', '.join(names))} alone and was compared among them.</p>"
        for low, high, names in report.partly
    ]
    parts += [picture(report.replicas, stretches, report.findings), _legend(), "<h3>Coverage</h3>"]
    coverage = [
        (name, _n(c.entries_compared), _n(c.entries_eligible), f"{c.percent} %", _n(c.bytes_compared))
        for name, c in report.coverage.items()
    ]
    parts.append(_table(("replica", "#entries compared", "#eligible", "#share", "#bytes of bodies"), coverage))
    rests = [
        (p["replica"], p["kind"], _n(p["entries"]), _n(p["bytes"]), p["first"], p["last"]) for p in report.provenance
    ]
    parts.append("<h3>What this rests on</h3>")
    parts.append(_table(("replica", "how", "#entries", "#bytes", "first read", "last read"), rests))
    parts.append(f"<h3>Findings</h3><p>{report.cleared} suspects were cleared by a second look.</p>")
    parts += [_finding(finding) for finding in report.findings[:_FINDINGS_SHOWN]] or ["<p>None.</p>"]
    more = len(report.findings) - _FINDINGS_SHOWN
    return [*parts, f"<p>{more} more are in the table audit_findings.</p>"] if more > 0 else parts


def _finding(finding: Finding) -> str:
    meaning, next_step = finding.explanation
    evidence = dict(finding.evidence)
    seen = evidence.pop("replicas", None)
    shown = _evidence(evidence)
    if isinstance(seen, dict):
        rows = [(name, *_entry(one)) for name, one in seen.items()]
        shown = _table(("replica", "#term", "#position", "#size", "crc", "state"), rows) + shown
    entries = "entry" if finding.count == 1 else "entries"
    return (
        f'<div class="finding" style="border-color: {COLORS[finding.severity.value]}">'
        f"<p><b>{finding.kind}</b> ({finding.severity}) on <b>{escape(finding.replica.replace(',', ', '))}</b>, "
        f"[{finding.start:,}, {finding.end:,}), {finding.count:,} {entries}</p>"
        f"<p>Meaning: {escape(meaning)}.</p><p>Next step: {escape(next_step)}.</p>{shown}</div>"
    )


def _evidence(evidence: Mapping[str, Any]) -> str:
    """Returns facts as rows; what is told of several things, as a table of them."""
    plain = {name: value for name, value in evidence.items() if not isinstance(value, dict)}
    shown = _table((), [(name, _said(value)) for name, value in plain.items()]) if plain else ""
    for name, several in evidence.items():
        if not isinstance(several, dict):
            continue
        if all(isinstance(one, dict) for one in several.values()):
            columns = list(dict.fromkeys(key for one in several.values() for key in one))
            rows = [(of, *(_said(one.get(key)) for key in columns)) for of, one in several.items()]
            shown += _table((name, *columns), rows)
        else:
            shown += _table((name, ""), [(key, _said(value)) for key, value in several.items()])
    return shown


def _said(value: Any) -> str | None:
    match value:
        case bool() | dict():
            return json.dumps(value)
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(str(_said(one)) for one in value)
        case _:
            return None if value is None else str(value)


def _entry(one: Mapping[str, Any]) -> tuple[object, ...]:
    state = one.get("state", "readable")
    reason = f": {one['reason']}" if one.get("reason") else ""
    return one.get("term"), _n(one.get("position")), _n(one.get("size")), one.get("crc"), state + reason


def _cost(summary: Mapping[str, Any]) -> str:
    cost = summary["cost"]
    rows: list[tuple[object, ...]] = [
        (f"read from {name}", f"{nbytes:,} bytes") for name, nbytes in cost["bytes_read"].items()
    ]
    rows.append(("read again, entry by entry", f"{cost['bytes_read_second_pass']:,} bytes of bodies"))
    rows.append(("rate, start of Spark's jobs included", f"{cost['bytes_per_second'] or 0:,} bytes/s"))
    limit = cost["max_bytes_per_second"]
    rows.append(("limit for each node", "none" if limit is None else f"{limit:,} bytes/s"))
    rows.append(("written to replicas", "nothing: they are opened for reading only"))
    return "<h2>Cost</h2>" + _table((), rows)


def _legend() -> str:
    items = "".join(f'<span><i style="background: {color}"></i>{escape(name)}</span>' for name, color in COLORS.items())
    return f'<p class="legend quiet">{items}</p>'


def _table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Returns a table; a column whose name begins with # holds numbers."""
    kinds = ['class="n"' if name.startswith("#") else "" for name in columns]
    head = "".join(f"<th {kind}>{escape(n.lstrip('#'))}</th>" for kind, n in zip(kinds, columns, strict=True))
    body = ""
    for row in rows:
        marks = kinds or ['class="quiet"', *[""] * (len(row) - 1)]
        cells = zip(marks, row, strict=True)
        body += "<tr>" + "".join(f"<td {k}>{escape('-' if v is None else str(v))}</td>" for k, v in cells) + "</tr>"
    return f"<table>{f'<tr>{head}</tr>' if columns else ''}{body}</table>"


def _n(value: int | None) -> str | None:
    return None if value is None else f"{value:,}"

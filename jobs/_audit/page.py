"""The audit's report as one HTML file that needs nothing else: ``page.html`` filled with the JSON summary. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from dledger_core import merge_ranges

__all__ = ["page"]

_FACTS: Final = {"class", "severity", "replica", "start", "end", "count", "group", "meaning", "next_step"}
"""Keys of every finding in the JSON summary; the others are its evidence."""
_FINDINGS_SHOWN: Final = 200
_MARK_MIN: Final = 0.65
"""The least width of a finding in the picture, in percent: one entry of a million must be visible."""
_TICKS: Final = 5


def page(summary: Mapping[str, Any], ranges: pa.Table, frame: Mapping[str, Any]) -> str:
    """Returns the report.

    Args:
        summary: the JSON summary.
        ranges: the compared ranges (RANGES).
        frame: options and versions.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters |= {"shown": _shown, "evidence": _evidence}
    rows = ranges.to_pylist()
    pictures = {
        report["group"]: _picture(
            [one for one in summary["replicas"] if one["group"] == report["group"]],
            [row for row in rows if row["group"] == report["group"]],
            [one for one in summary["findings"] if one["group"] == report["group"]],
        )
        for report in summary["groups"]
    }
    template = environment.get_template("page.html")
    return str(template.render(summary=summary, frame=frame, pictures=pictures, findings_shown=_FINDINGS_SHOWN))


def _shown(value: Any) -> str:
    """Returns the text of a cell: numbers with separators, lists joined, ``-`` for None."""
    match value:
        case None:
            return "-"
        case bool() | dict():
            return json.dumps(value)
        case int():
            return f"{value:,}"
        case list():
            return ", ".join(map(_shown, value))
    return str(value)


def _evidence(finding: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in finding.items() if name not in _FACTS}


def _picture(
    replicas: list[dict[str, Any]], ranges: list[dict[str, Any]], findings: list[dict[str, Any]]
) -> dict[str, Any]:
    """Returns each replica's log from left to right, in percent of the width: ranges compared, and findings."""
    usable = [one for one in replicas if one["reachable"]]
    low = min((one["first_index"] for one in usable), default=0)
    high = max([low + 1, *(one["last_index"] + 1 for one in usable), *(finding["end"] for finding in findings)])

    def box(start: int, end: int, kind: str, title: str, least: float = 0.0) -> dict[str, Any]:
        left, right = (100 * min(1.0, max(0.0, (index - low) / (high - low))) for index in (start, end))
        missing = max(0.0, least - (right - left))
        shown = {"left": f"{left - missing / 2:.3f}%", "width": f"{max(0.0, right - left) + missing:.3f}%"}
        return shown | {"kind": kind, "title": title}

    def boxes(one: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
        first, end = one["first_index"], one["last_index"] + 1
        yield box(first, end, "not compared", f"[{first:,}, {end:,}) held, not compared")
        for kind, proven in (("proven before", True), ("read now", False)):
            mine = [r for r in ranges if one["name"] in r["replicas"] and (r["proven_at"] is not None) is proven]
            for start, end in merge_ranges((r["start"], r["end"]) for r in mine):
                yield box(start, end, kind, f"[{start:,}, {end:,}) {kind}")
        for finding in reversed(findings):  # the worst come last, on top
            if one["name"] in finding["replica"].split(","):
                title = f"{finding['class']} [{finding['start']:,}, {finding['end']:,})"
                yield box(finding["start"], finding["end"], finding["severity"], title, _MARK_MIN)

    ticks = sorted({low + (high - low) * tick // (_TICKS - 1) for tick in range(_TICKS)})
    return {
        "rows": [(one["name"], list(boxes(one)) if one["reachable"] else None) for one in replicas],
        "ticks": [(index, f"{100 * (index - low) / (high - low):.3f}%") for index in ticks],
    }

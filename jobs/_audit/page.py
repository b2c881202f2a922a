"""The audit's report as one HTML file that needs nothing else, drawn from ``page.html``. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from jobs._audit.model import Finding, Replica, Severity
from jobs._audit.report import GroupReport

__all__ = ["page"]

_MEANINGS: Final = {
    "CONSISTENT": "Everything that could be compared is equal.",
    "INCONSISTENT": "Replicas differ, or one is damaged. The findings below say where and what to do.",
    "INCOMPLETE": "Not everything was compared, so this is no proof that the replicas are equal.",
}
_COLORS: Final = {
    "read now": "#2e9e6b",
    "proven before": "#a5d8bf",
    "not compared": "#d8dce2",
    Severity.CRITICAL.value: "#c62828",
    Severity.ERROR.value: "#e0661f",
    Severity.WARNING.value: "#e8b100",
    Severity.INFO.value: "#5b8def",
}
_FINDINGS_SHOWN: Final = 200
_LEFT: Final = 150
_WIDTH: Final = 760
_ROW: Final = 46
_BAR: Final = 18
_MARK_MIN: Final = 5.0
_TICKS: Final = 5


def page(summary: Mapping[str, Any], reports: Sequence[GroupReport], ranges: pa.Table, frame: Mapping[str, Any]) -> str:
    """Returns the report.

    Args:
        summary: the JSON summary.
        reports: the groups.
        ranges: what was compared (RANGES).
        frame: options and versions.
    """
    loader = FileSystemLoader(Path(__file__).parent)
    environment = Environment(loader=loader, autoescape=True, undefined=StrictUndefined, trim_blocks=True)
    environment.filters["shown"] = _shown
    rows = ranges.to_pylist()
    return str(
        environment.get_template("page.html").render(
            summary=summary,
            meaning=_MEANINGS[summary["verdict"]],
            frame=list(frame.items()),
            reports=reports,
            pictures={r.group: _picture(r, [row for row in rows if row["group"] == r.group]) for r in reports},
            colors=_COLORS,
            findings_shown=_FINDINGS_SHOWN,
        )
    )


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


# --- the picture --------------------------------------------------------------------------------------------------


class _Box(NamedTuple):
    """A rectangle of the picture; its title is shown under the pointer."""

    x: float
    y: float
    width: float
    height: float
    rx: int
    color: str
    title: str


@dataclass(frozen=True, slots=True)
class _Axis:
    low: int
    high: int

    def at(self, index: int) -> float:
        share = (index - self.low) / (self.high - self.low)
        return _LEFT + _WIDTH * min(1.0, max(0.0, share))


def _picture(report: GroupReport, ranges: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns each replica's log from left to right: what was compared and what was found."""
    usable = [replica for replica in report.replicas if replica.reachable]
    low = min((replica.first_index for replica in usable), default=0)
    high = max([low + 1, *(r.end for r in usable), *(f.end for f in report.findings)])
    axis = _Axis(low, high)
    ticks = sorted({low + (high - low) * tick // (_TICKS - 1) for tick in range(_TICKS)})
    return {
        "left": _LEFT,
        "right": _LEFT + _WIDTH,
        "width": _LEFT + _WIDTH + 30,
        "height": _ROW * len(report.replicas) + 30,
        "base": _ROW * len(report.replicas) + 6,
        "ticks": [(index, round(axis.at(index), 1)) for index in ticks],
        "rows": [
            {
                "name": replica.name,
                "reachable": replica.reachable,
                "middle": row * _ROW + 16 + _BAR / 2 + 4,
                "bars": _boxes(replica, row * _ROW + 16, axis, ranges, report.findings),
            }
            for row, replica in enumerate(report.replicas)
        ],
    }


def _boxes(
    replica: Replica, y: int, axis: _Axis, ranges: Sequence[Mapping[str, Any]], findings: Sequence[Finding]
) -> list[_Box]:
    boxes = [_bar(axis, replica.first_index, replica.end, y, "not compared", "held, not compared")]
    mine = [row for row in ranges if replica.name in row["replicas"]]
    for kind, proven in (("proven before", True), ("read now", False)):
        chosen = [(row["start"], row["end"]) for row in mine if (row["proven_at"] is not None) is proven]
        boxes += [_bar(axis, start, end, y, kind, kind) for start, end in _joined(chosen)]
    found = [finding for finding in findings if replica.name in finding.replica.split(",")]
    return boxes + [_mark(axis, finding, y) for finding in reversed(found)]  # the worst come last, on top


def _joined(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for start, end in sorted(ranges):
        if found and found[-1][1] >= start:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def _bar(axis: _Axis, start: int, end: int, y: int, kind: str, title: str) -> _Box:
    x, width = axis.at(start), max(0.0, axis.at(end) - axis.at(start))
    return _Box(round(x, 1), y, round(width, 1), _BAR, 0, _COLORS[kind], f"[{start:,}, {end:,}) {title}")


def _mark(axis: _Axis, finding: Finding, y: int) -> _Box:
    x, width = axis.at(finding.start), axis.at(finding.end) - axis.at(finding.start)
    x, width = x - max(0.0, _MARK_MIN - width) / 2, max(width, _MARK_MIN)
    top, height = (y - 6, _BAR + 12) if finding.severity is not Severity.INFO else (y + _BAR, 5)
    title = f"{finding.kind.value} [{finding.start:,}, {finding.end:,})"
    return _Box(round(x, 1), top, round(width, 1), height, 2, _COLORS[finding.severity.value], title)

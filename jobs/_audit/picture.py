"""The picture of a group's audit: each replica's log from left to right, what was compared and what was found. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Final

from jobs._audit.model import Finding, Replica, Severity

__all__ = ["COLORS", "Stretch", "picture"]

COLORS: Final = {
    "read now": "#2e9e6b",
    "proven before": "#a5d8bf",
    "not compared": "#d8dce2",
    Severity.CRITICAL.value: "#c62828",
    Severity.ERROR.value: "#e0661f",
    Severity.WARNING.value: "#e8b100",
    Severity.INFO.value: "#5b8def",
}
_LEFT: Final = 150
_WIDTH: Final = 760
_ROW: Final = 46
_BAR: Final = 18
_MARK_MIN: Final = 5.0
_TICKS: Final = 5


@dataclass(frozen=True, slots=True)
class Stretch:
    """Entries [start, end) that were compared on these replicas; ``kind`` is one of the first two colours."""

    start: int
    end: int
    names: frozenset[str]
    kind: str


def picture(replicas: Sequence[Replica], stretches: Sequence[Stretch], findings: Sequence[Finding]) -> str:
    """Returns an SVG element."""
    usable = [replica for replica in replicas if replica.reachable]
    low = min((replica.first_index for replica in usable), default=0)
    high = max([low + 1, *(r.end for r in usable), *(f.end for f in findings)])
    axis = _Axis(low, high)
    height = _ROW * len(replicas) + 30
    parts = [f'<svg viewBox="0 0 {_LEFT + _WIDTH + 30} {height}" role="img" aria-label="coverage along the log">']
    for row, replica in enumerate(replicas):
        parts += _row(replica, row * _ROW + 16, axis, stretches, findings)
    base = _ROW * len(replicas) + 6
    parts.append(f'<line class="axis" x1="{_LEFT}" y1="{base}" x2="{_LEFT + _WIDTH}" y2="{base}"/>')
    for index in sorted({low + (high - low) * tick // (_TICKS - 1) for tick in range(_TICKS)}):
        x = axis.at(index)
        parts.append(f'<text class="tick" x="{x:.1f}" y="{base + 16}" text-anchor="middle">{index:,}</text>')
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True, slots=True)
class _Axis:
    low: int
    high: int

    def at(self, index: int) -> float:
        share = (index - self.low) / (self.high - self.low)
        return _LEFT + _WIDTH * min(1.0, max(0.0, share))


def _row(replica: Replica, y: int, axis: _Axis, stretches: Sequence[Stretch], findings: Sequence[Finding]) -> list[str]:
    middle = y + _BAR / 2 + 4
    parts = [f'<text class="name" x="{_LEFT - 12}" y="{middle}" text-anchor="end">{escape(replica.name)}</text>']
    if not replica.reachable:
        return [*parts, f'<text class="away" x="{_LEFT}" y="{middle}">could not be read</text>']
    parts.append(_bar(axis, replica.first_index, replica.end, y, "not compared", "held, not compared"))
    for kind in ("proven before", "read now"):
        for start, end in _joined([s for s in stretches if s.kind == kind and replica.name in s.names]):
            parts.append(_bar(axis, start, end, y, kind, kind))
    mine = [finding for finding in findings if replica.name in finding.replica.split(",")]
    return parts + [_mark(axis, finding, y) for finding in reversed(mine)]  # the worst come last, on top


def _joined(stretches: Sequence[Stretch]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for one in sorted(stretches, key=lambda stretch: stretch.start):
        if found and found[-1][1] >= one.start:
            found[-1] = found[-1][0], max(found[-1][1], one.end)
        else:
            found.append((one.start, one.end))
    return found


def _bar(axis: _Axis, start: int, end: int, y: int, kind: str, said: str) -> str:
    x, width = axis.at(start), max(0.0, axis.at(end) - axis.at(start))
    title = f"<title>[{start:,}, {end:,}) {escape(said)}</title>"
    return f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_BAR}" fill="{COLORS[kind]}">{title}</rect>'


def _mark(axis: _Axis, finding: Finding, y: int) -> str:
    x, width = axis.at(finding.start), axis.at(finding.end) - axis.at(finding.start)
    x, width = x - max(0.0, _MARK_MIN - width) / 2, max(width, _MARK_MIN)
    title = f"<title>{finding.kind} [{finding.start:,}, {finding.end:,})</title>"
    color = COLORS[finding.severity.value]
    top, tall = (y - 6, _BAR + 12) if finding.severity is not Severity.INFO else (y + _BAR, 5)
    return f'<rect x="{x:.1f}" y="{top}" width="{width:.1f}" height="{tall}" rx="2" fill="{color}">{title}</rect>'

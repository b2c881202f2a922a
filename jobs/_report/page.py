"""The page of a report: verdict, places and commands, findings in detail, coverage, versions; one HTML file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from .drill_down import RangeDiff
from .templates import render

__all__ = ["COLORS", "VERDICT_COLORS", "Place", "ReportedFinding", "render_page"]

COLORS: Final = {
    "read now": ("#0b5a87", "#4aa8d8"),
    "proven before": ("#5899c4", "#2f7ba6"),
    "not compared": ("#8a93a0", "#66707e"),
    "critical": ("#8c1212", "#ff6b5e"),
    "error": ("#c9480b", "#ffa04d"),
    "warning": ("#b8860b", "#ffd96b"),
    "info": ("#7a5cc0", "#b9a3ea"),
}
"""Color of each state of a range and of each severity, for light and for dark pages.

They differ in brightness too, so that they differ for readers who do not see red or green.
"""
VERDICT_COLORS: Final = {
    "CONSISTENT": ("#0b5a87", "#0f5f8a"),
    "INCONSISTENT": ("#8c1212", "#a32020"),
    "INCOMPLETE": ("#535c6b", "#4d5665"),
}
"""Color of each verdict, behind white text: that of equal ranges, of critical findings, of ranges not compared."""
_PLACES_MAX: Final = 50
_FINDINGS_MAX: Final = 200


@dataclass(frozen=True)
class Place:
    """Location of a finding, and the command that shows or repairs it.

    Attributes:
        file: path, or the address of a node.
        position: offset in the log or in the file; None if it has none.
        command: to run.
    """

    file: str
    position: int | None
    command: str


@dataclass(frozen=True, kw_only=True)
class ReportedFinding:
    """A finding as the page shows it.

    Attributes:
        kind: its class.
        severity: critical, error, warning or info.
        subject: the replicas, or the queue.
        extent: the affected range.
        affected: the number of affected entries or slots, in words.
        meaning: its explanation.
        next_step: the recommended action.
        place: where it is.
        show: the command that shows the finding, where that of its place repairs it.
        message: the affected message in words; empty if there is none, or none can be read.
        facts: further names and values; a value may be a mapping.
        diff: the entry on all replicas; None if it was not read.
    """

    kind: str
    severity: str
    subject: str
    extent: str
    affected: str
    meaning: str
    next_step: str
    place: Place
    show: str = ""
    message: str = ""
    facts: tuple[tuple[str, Any], ...] = ()
    diff: RangeDiff | None = None


def render_page(template: str, findings: Sequence[ReportedFinding], **values: Any) -> str:
    """Return a page.

    Args:
        template: a template that extends ``page.html``.
        findings: worst first.
        values: of the template; all of them need ``title``, ``verdict``, ``meaning``, ``lines`` and ``run``.
    """
    limits = {"places_max": _PLACES_MAX, "findings_max": _FINDINGS_MAX}
    return render(template, findings=findings, colors=COLORS, verdict_colors=VERDICT_COLORS, **limits, **values)

"""The figures of all systems side by side, as a Markdown table."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

DLEDGER, KAFKA, MEMORY = "DLedger", "Kafka", "in memory"
SYSTEMS = (DLEDGER, KAFKA, MEMORY)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table: what was measured, and the runs of each system; a figure is their median.

    Attributes:
        to_reach: the goal of our figure, in words.
    """

    name: str
    unit: str
    runs: Mapping[str, Sequence[float]]
    to_reach: str = ""

    def row(self) -> str:
        figures = {name: statistics.median(runs) for name, runs in self.runs.items() if runs}
        cells = [shown(figures[name], self.unit) if name in figures else "" for name in SYSTEMS]
        ours = figures.get(DLEDGER)
        ratios = [f"{ours / value:.2f} x {name}" for name, value in figures.items() if ours and name != DLEDGER]
        return f"| {self.name} | {' | '.join(cells)} | {'; '.join(ratios)} | {self.to_reach} |"


def shown(value: float, unit: str) -> str:
    return f"{value / 1e6:.2f} M/s" if unit == "rows/s" else f"{value:.2f} {unit}"


def markdown(about: Mapping[str, Any], lines: Sequence[Line], left_out: Mapping[str, str]) -> str:
    """Return the table, after the facts that its numbers depend on and the parts that are left out."""
    head = ["# Speed of the Spark connector", "", *(f"- {name}: {value}" for name, value in about.items())]
    head += [f"- left out: {what}: {why}" for what, why in left_out.items()]
    head += ["", f"| | {' | '.join(SYSTEMS)} | ratio | to reach |", "|---" * (len(SYSTEMS) + 3) + "|"]
    return "\n".join([*head, *(line.row() for line in lines)]) + "\n"

"""The results next to their goals: as JSON for machines and as a Markdown table for readers."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

__all__ = ["DLEDGER", "KAFKA", "MEMORY", "SYSTEMS", "Line", "Report", "Run", "Target"]

DLEDGER, KAFKA, MEMORY = "dledger", "kafka", "memory"
SYSTEMS = {DLEDGER: "DLedger", KAFKA: "Kafka", MEMORY: "in memory"}

Verdict = Literal["reached", "missed", "not measured"]


@dataclass(frozen=True, slots=True)
class Target:
    """The goal of one of our numbers.

    Attributes:
        bound: a factor of another system's figure, or the figure itself.
        against: the other system; None = ``bound`` is the figure.
        most: the goal is an upper limit, not a lower one.
    """

    bound: float
    against: str | None = None
    most: bool = False

    def verdict(self, figures: dict[str, float]) -> Verdict:
        """Compares our figure with the bound."""
        ours, other = figures.get(DLEDGER), 1.0 if self.against is None else figures.get(self.against)
        if ours is None or other is None:
            return "not measured"
        reached = ours <= self.bound * other if self.most else ours >= self.bound * other
        return "reached" if reached else "missed"

    def text(self, unit: str) -> str:
        """Returns the target in words."""
        sign = "≤" if self.most else "≥"
        if self.against is None:
            return f"{sign} {shown(self.bound, unit)}"
        return f"{sign} {self.bound:g} x {SYSTEMS.get(self.against, self.against)}"


@dataclass(frozen=True, slots=True)
class Run:
    """One run.

    Attributes:
        value: its figure, in the line's unit.
        cpu_ns_per_row: CPU time by who took it, where rows were counted.
    """

    value: float
    cpu_ns_per_row: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Line:
    """One line of the table.

    Attributes:
        name: what was measured.
        unit: of the figures.
        runs: per system its runs; the figure is their median.
        targets: what ours is to be.
        note: how to read it.
    """

    name: str
    unit: str
    runs: dict[str, list[Run]]
    targets: tuple[Target, ...] = ()
    note: str = ""

    @property
    def figures(self) -> dict[str, float]:
        """The median per system."""
        return {name: statistics.median(run.value for run in runs) for name, runs in self.runs.items() if runs}

    @property
    def verdicts(self) -> list[Verdict]:
        """One per target."""
        return [target.verdict(self.figures) for target in self.targets]

    def to_json(self) -> dict[str, Any]:
        """Returns the line with its runs."""
        figures = self.figures
        ours = figures.get(DLEDGER)
        ratios = {name: round(ours / value, 3) for name, value in figures.items() if ours and value and name != DLEDGER}
        pairs = zip(self.targets, self.verdicts, strict=True)
        targets = [{**asdict(target), "verdict": verdict} for target, verdict in pairs]
        cpu = {name: _median_cpu(runs) for name, runs in self.runs.items() if runs}
        runs = {name: [round(run.value, 4) for run in runs] for name, runs in self.runs.items()}
        return {
            "name": self.name,
            "unit": self.unit,
            "median": figures,
            "ratio": ratios,
            "targets": targets,
            "cpu_ns_per_row": {name: parts for name, parts in cpu.items() if parts},
            "runs": runs,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class Report:
    """The table.

    Attributes:
        about: date, command, machine, versions.
        left_out: the missing measurements, with the reason.
    """

    about: dict[str, Any]
    lines: list[Line]
    left_out: dict[str, str]

    def write(self, path: Path) -> None:
        """Writes ``path`` as JSON and the table next to it, as ``.md``."""
        path.parent.mkdir(parents=True, exist_ok=True)
        content = {**self.about, "left_out": self.left_out, "lines": [line.to_json() for line in self.lines]}
        path.write_text(json.dumps(content, indent=1) + "\n")
        path.with_suffix(".md").write_text(self.markdown())

    def markdown(self) -> str:
        """Returns the report as people read it."""
        head = ["# Speed of the Spark connector", ""]
        head += [f"- {name}: {value}" for name, value in self.about.items()]
        head += [f"- left out: {what}: {why}" for what, why in self.left_out.items()]
        names = list(SYSTEMS.values())
        rows = ["", f"| | {' | '.join(names)} | to reach | ratio | verdict |", "|---" * (len(names) + 4) + "|"]
        rows += [self._row(line) for line in self.lines]
        notes = [f"- {line.name}: {line.note}" for line in self.lines if line.note]
        costs = [row for line in self.lines for row in _cpu_rows(line)]
        if costs:
            costs = ["", "CPU time per row in ns, by who took it", "", "| | | ns |", "|---|---|---|", *costs]
        return "\n".join([*head, *rows, *(["", *notes] if notes else []), *costs]) + "\n"

    def _row(self, line: Line) -> str:
        figures = line.figures
        cells = [shown(figures[name], line.unit) if name in figures else "" for name in SYSTEMS]
        targets = "; ".join(target.text(line.unit) for target in line.targets)
        ratios = line.to_json()["ratio"]
        ratio = "; ".join(f"{value:.2f} x {SYSTEMS.get(name, name)}" for name, value in ratios.items())
        return f"| {line.name} | {' | '.join(cells)} | {targets} | {ratio} | {'; '.join(line.verdicts)} |"


def _median_cpu(runs: list[Run]) -> dict[str, int]:
    kinds = {kind for run in runs for kind in run.cpu_ns_per_row}
    return {kind: round(statistics.median(run.cpu_ns_per_row.get(kind, 0) for run in runs)) for kind in sorted(kinds)}


def _cpu_rows(line: Line) -> list[str]:
    rows = []
    for system, runs in line.runs.items():
        parts = _median_cpu(runs)
        if parts:
            text = ", ".join(f"{kind} {value}" for kind, value in parts.items())
            rows.append(f"| {line.name} | {SYSTEMS.get(system, system)} | {text} |")
    return rows


def shown(value: float, unit: str) -> str:
    """Returns a figure with its unit as people write it."""
    if unit == "rows/s":
        return f"{value / 1e6:.2f} M/s"
    if unit == "MiB":
        return f"{value:.0f} MiB"
    return f"{value:.2f} {unit}"

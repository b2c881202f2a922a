"""The picture of a run: one panel per question, all over log time."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from PIL import Image

PLOT: Final = Path(__file__).with_name("soak.png")
COLORS: Final = 64


def save_plot(row: dict[str, Any], path: Path) -> None:
    """Draw a line of the record into a small PNG."""
    figure = Figure(figsize=(11, 11.5), layout="constrained")
    panels = figure.subplots(4, 2, sharex=True)
    (memory, start), (producers, queries), (appends, reads), (tables, disk) = panels
    drawn = _Run(row)

    drawn.lines(memory, {f"rss {node} MiB": node for node in ("n0", "n1")})
    drawn.lines(memory, {"rss n2 MiB": "n2, which starts again and again"}, alpha=0.5)
    drawn.title(memory, "Memory of each node", "MiB (RSS)")
    drawn.starts(start)
    drawn.title(start, "Start of n2, from the new process to the served store", "s")
    drawn.lines(producers, {"producers rows": "producers", "producers used once rows": "of them used once"})
    drawn.title(producers, "Table of producers, which expire after 7 days, or 1", "rows")
    drawn.lines(
        queries,
        {
            "queries rows": "queries",
            "queries used once rows": "of them used once",
            "open transactions rows": "open transactions",
        },
    )
    drawn.title(queries, "Table of queries: streams are known for 400 days", "rows")
    drawn.lines(appends, {"plain append p50 ms": "plain p50", "producer append p50 ms": "producers p50"})
    drawn.lines(appends, {"plain append p99 ms": "plain p99", "producer append p99 ms": "producers p99"})
    drawn.quarters(appends, "plain append p99 ms", "plain p99 of each quarter")
    drawn.title(appends, "Appends, 4 KiB plain or small ones of producers", "ms")
    drawn.lines(reads, {"read p50 ms": "p50", "read p99 ms": "p99"})
    drawn.quarters(reads, "read p99 ms", "p99 of each quarter")
    drawn.title(reads, "Reads of 64 KiB from anywhere, any node", "ms")
    drawn.lines(tables, {"tables MiB": "file of the tables, MiB", "load": "load of the machine"})
    drawn.title(tables, "File of the tables; load of the machine, 2 cores", "")
    drawn.lines(disk, {"disk MiB": "on the disk, MiB", "segments": "data files"})
    drawn.title(disk, "Store of n0, with entries of 2 days", "")

    for panel in panels[-1]:
        panel.set_xlabel("days of log time")
    figure.suptitle(
        f"{row['producers']:,} producers and {row['queries']:,} queries in {row['minutes']:g} minutes "
        f"= {row['days']:.0f} days of log time"
    )
    drawn_png = io.BytesIO()
    figure.savefig(drawn_png, dpi=85, format="png")
    Image.open(drawn_png).convert("RGB").quantize(COLORS).save(path, optimize=True)


class _Run:
    """Draws the columns of one line of the record."""

    def __init__(self, row: dict[str, Any]) -> None:
        self._samples: dict[str, list[float | None]] = row["samples"]
        self._starts: list[dict[str, Any]] = row["starts"]
        self._quarters: list[dict[str, float]] = row["quarters"]
        self._days: float = row["days"]

    @property
    def _borders(self) -> Sequence[float]:
        count = len(self._quarters)
        return [self._days * number / count for number in range(count + 1)]

    def lines(self, axes: Axes, names: dict[str, str], alpha: float = 1.0) -> None:
        """Draw columns of samples; ``names`` are those of the columns, with their legends."""
        for column, name in names.items():
            values = [float("nan") if value is None else value for value in self._samples.get(column, [])]
            axes.plot(self._samples["day"][: len(values)], values, label=name, linewidth=1.4, alpha=alpha)

    def quarters(self, axes: Axes, name: str, legend: str) -> None:
        """Draw a figure of the quarters as one level each."""
        values = [quarter.get(name, float("nan")) for quarter in self._quarters]
        axes.stairs(values, self._borders, label=legend, color="black", linewidth=1.6)

    def starts(self, axes: Axes) -> None:
        """Draw how long the starts took."""
        for killed, name, marker in ((False, "after a stop", "o"), (True, "after kill -9", "x")):
            found = [each for each in self._starts if each["killed"] == killed]
            axes.plot([each["day"] for each in found], [each["took_s"] for each in found], marker, label=name)

    def title(self, axes: Axes, title: str, unit: str) -> None:
        """Name the panel, and show where each quarter begins."""
        axes.set_title(title, fontsize=10, loc="left")
        axes.set_ylabel(unit)
        axes.set_xlim(0, self._days)
        axes.set_ylim(bottom=0, top=1.25 * axes.get_ylim()[1])
        for border in self._borders[1:-1]:
            axes.axvline(border, color="0.8", linewidth=0.8, zorder=0)
        axes.legend(fontsize=8, frameon=False, ncols=3, loc="upper left")

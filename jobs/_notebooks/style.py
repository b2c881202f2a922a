"""Style of plots: colours, labels that any font can show, figures that are shown once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC
from functools import cache
from typing import Any, Final

import matplotlib.dates as mdates
import matplotlib.pyplot as plt
import numpy as np
import numpy.typing as npt
from matplotlib import font_manager, ft2font
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = [
    "ATTENTION",
    "COLORS",
    "NEUTRAL",
    "OTHER",
    "QUEUES_MAX",
    "SOFT",
    "TAG_COLORS",
    "TOPICS_MAX",
    "WARNING",
    "WIDTH",
    "bucket_of",
    "colors_of",
    "draw_steps",
    "finished",
    "label",
    "labels",
    "new_figure",
    "row_height",
]

COLORS: Final = ("#3b6ea5", "#5a9e6f", "#7d6bb0", "#a6763c", "#c27ba0", "#2f4b7c", "#8fa83d")
"""Topics. Red and amber are not among them: they mean a problem in every plot."""
TAG_COLORS: Final = ("#0b4f4a", "#14746d", "#2a9d8f", "#6fbfb5", "#a5d8d1", "#cfe9e5")
OTHER: Final = "#b8bec7"
NEUTRAL: Final = "#64748b"
SOFT: Final = "#57606a"
"""Text next to bars and dots."""
ATTENTION: Final = "#e0a000"
WARNING: Final = "#c62828"
WIDTH: Final = 10.0
"""Inches of a plot."""
QUEUES_MAX: Final = 30
TOPICS_MAX: Final = 6
_LABEL_MAX: Final = 28
_START: Final = 4
"""Characters of a name's start that are kept where only its end tells it from another one."""
_INK: Final = "#30363d"
_STEPS_MAX: Final = 120
_BUCKETS_S: Final = (
    *(0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800),
    *(3600, 2 * 3600, 3 * 3600, 6 * 3600, 12 * 3600, 86400, 7 * 86400, 28 * 86400),
)


def new_figure(width: float, height: float, columns: int = 1) -> tuple[Figure, Any]:
    """Return a figure and its axes, without a frame around."""
    figure, axes = plt.subplots(1, columns, figsize=(width, height), layout="constrained")
    for one in [axes] if isinstance(axes, Axes) else axes:
        one.spines[["top", "right"]].set_visible(False)
        one.tick_params(colors=_INK, length=3)
    return figure, axes


def finished(figure: Figure) -> Figure:
    """Return the figure, which a notebook then shows once, as the cell's result."""
    plt.close(figure)
    return figure


def row_height(rows: int) -> float:
    """Return the height of a figure with this many rows."""
    return max(1.6, 0.8 + 0.27 * rows)


@cache
def _known() -> frozenset[int]:
    """Return the characters of the label font."""
    path = font_manager.findfont(font_manager.FontProperties())
    return frozenset(ft2font.FT2Font(path).get_charmap())


def label(text: str | None, longest: int = _LABEL_MAX) -> str:
    """Return a text for a label: shortened in the middle, unknown characters escaped, no formula."""
    if text is None:
        return "(none)"
    if len(text) > longest:
        keep = (longest - 1) // 2
        text = f"{text[:keep]}…{text[-keep:]}"
    shown = "".join(c if ord(c) in _known() and c.isprintable() else f"\\u{ord(c):04x}" for c in text)
    return shown.replace("$", r"\$")


def labels(names: Sequence[str | None], longest: int = _LABEL_MAX) -> dict[str | None, str]:
    """Return a label for each name; names whose labels would be equal show their ends, or get numbers."""
    found: dict[str | None, str] = {}
    used: set[str] = set()
    first = Counter(label(name, longest) for name in dict.fromkeys(names))
    for name in dict.fromkeys(names):
        text = label(name, longest)
        if first[text] > 1 and name is not None:
            text = label(name[:_START] + "…" + name[_START + 1 - longest :], longest)
        number, shown = 1, text
        while shown in used:
            number += 1
            shown = f"{text} ({number})"
        used.add(shown)
        found[name] = shown
    return found


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name; the names after the last colour share a grey."""
    return {name: COLORS[number] if number < len(COLORS) else OTHER for number, name in enumerate(names)}


def bucket_of(span_s: float) -> float:
    """Return a width of time buckets, in seconds, that divides a time span into at most 120 of them."""
    return next((one for one in _BUCKETS_S if span_s / one <= _STEPS_MAX), span_s / _STEPS_MAX)


def draw_steps(
    figure: Figure,
    axes: Axes,
    edges: npt.NDArray[np.datetime64],
    series: Mapping[str, tuple[npt.NDArray[np.float64], str]],
) -> None:
    """Draw stacked steps over time, with a legend next to them if there are several.

    Args:
        figure: gets the legend.
        axes: to draw on.
        edges: of the buckets, one more than values.
        series: values and color by label, the lowest first.
    """
    below = np.zeros(len(edges) - 1)
    for name, (values, color) in series.items():
        if values.any():
            axes.stairs(below + values, edges, baseline=below, fill=True, color=color, label=name)
            below = below + values
    locator = mdates.AutoDateLocator()  # type: ignore[no-untyped-call]
    axes.xaxis.set_major_locator(locator)
    axes.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
    axes.set_xlim(edges[0], edges[-1])
    axes.set_ylim(bottom=0)
    handles, shown = axes.get_legend_handles_labels()
    if len(handles) > 1:
        figure.legend(handles[::-1], shown[::-1], loc="outside right upper", frameon=False, fontsize=8)

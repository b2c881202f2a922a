"""Style of plots: colours, labels that any font can show, figures that are shown once."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, Final

import matplotlib.pyplot as plt
from matplotlib import font_manager, ft2font
from matplotlib.axes import Axes
from matplotlib.figure import Figure

__all__ = ["COLORS", "OTHER", "colors_of", "finished", "label", "new_figure", "row_height"]

COLORS: Final = ("#3b6ea5", "#e0a03b", "#5a9e6f", "#b5525c", "#7d6bb0", "#4fa8b8", "#a6763c", "#c27ba0")
OTHER: Final = "#b8bec7"
_LABEL_MAX: Final = 28
_INK: Final = "#30363d"


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


def colors_of(names: Sequence[str]) -> dict[str, str]:
    """Return a colour for each name; the names after the last colour share a grey."""
    return {name: COLORS[number] if number < len(COLORS) else OTHER for number, name in enumerate(names)}

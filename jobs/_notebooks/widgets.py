"""Sliders and search fields, where ipywidgets is installed; elsewhere, and in HTML to share, the view without them."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Mapping
from html import escape
from typing import Any, Final

import pandas as pd
import pyarrow.compute as pc
from matplotlib.figure import Figure

from .log_plots import plot_over_time
from .log_sample import Log

__all__ = ["Interactive", "browser", "time_range"]

_STEPS: Final = 200
_ROWS: Final = 10
_ANY: Final = "(any)"


class Interactive:
    """A view with controls.

    Args:
        view: shown before a control is moved, and where no control can be shown.
        update: returns the views for the values of the controls, by name.
        controls: returns the controls by name, given the module ipywidgets; empty = there is nothing to choose.
    """

    def __init__(
        self, view: Any, update: Callable[..., list[Any]], controls: Callable[[Any], Mapping[str, Any]]
    ) -> None:
        self.view: Final = view
        self._update = update
        self._controls = controls

    def widget(self) -> Any | None:
        """Return the controls with the view below them; None where ipywidgets is not installed."""
        try:
            import ipywidgets
        except ImportError:
            return None
        controls = dict(self._controls(ipywidgets))
        if not controls:
            return None
        # Not an Output widget: nbclient sends messages for these while it waits for a reply, and can miss the reply.
        shown = ipywidgets.HTML()

        def refresh(_: object = None) -> None:
            values = {name: control.value for name, control in controls.items()}
            shown.value = "".join(_html(each) for each in self._update(**values))

        for control in controls.values():
            control.observe(refresh, "value")
        refresh()
        return ipywidgets.VBox([*controls.values(), shown])

    def __repr__(self) -> str:
        return repr(self.view)

    def _repr_mimebundle_(self, **_: Any) -> dict[str, Any]:
        bundle = {"text/plain": repr(self), "text/html": _html(self.view)}
        widget = self.widget()
        return bundle if widget is None else widget._repr_mimebundle_() | bundle


def _html(view: Any) -> str:
    if isinstance(view, Figure):
        content = io.BytesIO()
        view.savefig(content, format="png")
        return f'<img alt="{escape(view.axes[0].get_title())}" src="data:image/png;base64,{_base64(content)}">'
    return str(view._repr_html_())


def _base64(content: io.BytesIO) -> str:
    return base64.b64encode(content.getvalue()).decode()


def time_range(log: Log) -> Interactive:
    """Return the entries over time; with a slider that chooses a range, and the first entries of that range.

    Args:
        log: the sample.
    """
    times = pc.min_max(log.table[log.time_column])

    def controls(widgets: Any) -> Mapping[str, Any]:
        if not times["min"].is_valid or times["min"] == times["max"]:
            return {}
        steps = pd.date_range(times["min"].as_py(), times["max"].as_py(), periods=_STEPS).ceil("us")
        options = [(f"{step:%Y-%m-%d %H:%M:%S}", step) for step in steps]
        layout = {"width": "95%"}
        slider = widgets.SelectionRangeSlider(
            options=options, index=(0, _STEPS - 1), description="time (UTC)", continuous_update=False, layout=layout
        )
        return {"chosen": slider}

    def update(chosen: tuple[pd.Timestamp, pd.Timestamp]) -> list[Any]:
        found = log.between(*chosen)
        return [plot_over_time(found, log.time_column), found.head(_ROWS)]

    return Interactive(plot_over_time(log), update, controls)


def browser(log: Log) -> Interactive:
    """Return the last entries; with a slider along the log, a search field and a choice of topics.

    Args:
        log: the sample.
    """
    topics = sorted(topic for topic in pc.unique(log.table["topic"]).to_pylist() if topic is not None)

    def controls(widgets: Any) -> Mapping[str, Any]:
        if not len(log):
            return {}
        last = max(0, len(log) - _ROWS)
        layout = {"width": "95%"}
        return {
            "start": widgets.IntSlider(value=last, max=last, description="row", continuous_update=False, layout=layout),
            "text": widgets.Text(description="search", continuous_update=False),
            "topic": widgets.Dropdown(options=[_ANY, *topics], description="topic"),
        }

    def update(start: int, text: str, topic: str) -> list[Any]:
        if text or topic != _ANY:
            return [log.search(text, topic=None if topic == _ANY else topic)]
        return [log.head(_ROWS, skip=start)]

    return Interactive(log.tail(_ROWS), update, controls)

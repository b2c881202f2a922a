"""The plots of ``explore_log.ipynb``: entries over time and per queue."""

from __future__ import annotations

from collections import Counter
from typing import Any, Final

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from .log_sample import Log
from .note import Note
from .style import (
    NEUTRAL,
    OTHER,
    QUEUES_MAX,
    SOFT,
    TOPICS_MAX,
    WIDTH,
    bucket_of,
    colors_of,
    draw_steps,
    finished,
    labels,
    new_figure,
    row_height,
)

__all__ = ["plot_over_time", "plot_per_queue"]

_PLAIN: Final = "(no message)"


def plot_over_time(log: Log, by: str | None = None) -> Figure | Note:
    """Return stacked steps: entries over time, by topic; a sentence if there are fewer than two different times.

    Args:
        log: the sample.
        by: the time: ``time`` (of the append, or of the message's storing), ``born_timestamp`` or ``store_timestamp``.
            None = ``log.time_column``.
    """
    if not len(log):
        return log.nothing()
    by = by or log.time_column
    table = log.table.select([by, "topic"]).filter(pc.is_valid(log.table[by]))
    if not table.num_rows:
        return Note("The entries have no times: Java DLedger records none, and the bodies are not RocketMQ messages.")
    moments = np.asarray(table[by].cast(pa.int64()))
    span = (int(moments.max()) - int(moments.min())) / 1_000_000
    if not span:
        when = pd.Timestamp(table[by][0].as_py())
        what = "One entry has a time:" if len(moments) == 1 else f"All {len(moments):,} entries have one time:"
        return Note(f"{what} {when:%Y-%m-%d %H:%M:%S.%f} UTC.")
    return _steps(log, table["topic"].to_pylist(), moments, bucket_of(span), by)


def _steps(log: Log, topics: list[str | None], moments: Any, bucket_s: float, by: str) -> Figure:
    bucket = max(1, round(bucket_s * 1_000_000))
    places = moments // bucket
    first, last = int(places.min()), int(places.max())
    edges = (np.arange(first, last + 2) * bucket).astype("datetime64[us]")
    names = _topics(topics)
    shown, colors, named = names[:TOPICS_MAX], colors_of(names), labels(names)
    column = np.array(topics, dtype=object)
    series = {named[name]: (_counts(places[column == name], first, last), colors[name]) for name in shown}
    rest = ~np.isin(column, shown) & (column != None)  # noqa: E711  (an array of objects)
    series["other topics"] = (_counts(places[rest], first, last), OTHER)
    series[_PLAIN] = (_counts(places[column == None], first, last), NEUTRAL)  # noqa: E711
    figure, axes = new_figure(WIDTH, 3.6)
    draw_steps(figure, axes, edges, series)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    part = "" if log.complete else ", of the sample"
    axes.set(title=f"Entries per {_duration(bucket_s)}{part}", ylabel="entries", xlabel=f"{_TIMES[by]} (UTC)")
    return finished(figure)


_TIMES: Final = {"born_timestamp": "time of birth", "store_timestamp": "time of storing", "time": "time of append"}


def _counts(places: Any, first: int, last: int) -> Any:
    return np.bincount(places - first, minlength=last - first + 1).astype(float)


def _duration(seconds: float) -> str:
    for unit, size in (("day", 86400), ("hour", 3600), ("minute", 60), ("second", 1)):
        if seconds >= size:
            count = round(seconds / size)
            return unit if count == 1 else f"{count} {unit}s"
    return "millisecond" if seconds == 0.001 else f"{seconds * 1000:g} ms"


def _topics(topics: list[str | None]) -> list[str]:
    """Topics, those with the most entries first."""
    counts = Counter(topic for topic in topics if topic is not None)
    return sorted(counts, key=lambda topic: (-counts[topic], topic))


def plot_per_queue(log: Log) -> Figure | Note:
    """Return bars: messages of each queue in the sample, those with the most first."""
    if not len(log):
        return log.nothing()
    table = log.table.select(["topic", "queue_id"])
    table = table.filter(pc.is_valid(table["topic"]))
    if not table.num_rows:
        return Note(f"None of the {len(log):,} entries is a RocketMQ message, so there are no queues.")
    rows = table.group_by(["topic", "queue_id"]).aggregate([([], "count_all")]).to_pylist()
    rows.sort(key=lambda row: (-row["count_all"], row["topic"], row["queue_id"]))
    names = _topics(table["topic"].to_pylist())
    colors, named, shown = colors_of(names), labels(names), rows[:QUEUES_MAX]
    figure, axes = new_figure(WIDTH, row_height(len(shown)))
    places = np.arange(len(shown))
    axes.barh(places, [row["count_all"] for row in shown], color=[colors[row["topic"]] for row in shown])
    for place, row in zip(places, shown, strict=True):
        axes.text(row["count_all"], place, f" {row['count_all']:,}", va="center", fontsize=8, color=SOFT)
    axes.set_yticks(places, [f"{named[row['topic']]} / {row['queue_id']}" for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12, y=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    more = f", {len(shown)} of {len(rows)} queues" if len(rows) > len(shown) else ""
    axes.set(title=f"Messages per queue{'' if log.complete else ', of the sample'}{more}", xlabel="messages")
    return finished(figure)

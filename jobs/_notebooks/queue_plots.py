"""The plots of ``consume_queues.ipynb``: depth, rates, skew, tags, and messages that wait for consumers."""

from __future__ import annotations

import math
from collections import defaultdict
from typing import Any, Final

import numpy as np
import pyarrow as pa
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dledger_core.rocketmq import QueueStatistics

from .facts import size_text
from .note import Note
from .style import (
    ATTENTION,
    NEUTRAL,
    OTHER,
    QUEUES_MAX,
    SOFT,
    TAG_COLORS,
    TOPICS_MAX,
    WARNING,
    WIDTH,
    colors_of,
    draw_steps,
    finished,
    labels,
    new_figure,
    row_height,
)

__all__ = ["plot_depth", "plot_rates", "plot_skew", "plot_tags", "plot_waiting"]

NO_CONSUMERS: Final = "No consumer group has recorded offsets here: config/consumerOffset.json is missing or empty."
_TAGS_MAX: Final = 6
_BARS_MAX: Final = 240
_EVEN: Final = 1.1
"""Ratio to its even share above which a queue is shown in another color."""


def _topics(statistics: QueueStatistics) -> list[str]:
    """Topics, those with the most messages first: the order of colors in all plots."""
    totals: dict[str, int] = defaultdict(int)
    for row in statistics.queues.to_pylist():
        totals[row["topic"]] += row["messages"]
    return sorted(totals, key=lambda topic: (-totals[topic], topic))


def plot_depth(statistics: QueueStatistics) -> Figure | Note:
    """Return bars: messages of each queue, the deepest first; duplicate queue offsets in red."""
    rows = sorted(statistics.queues.to_pylist(), key=lambda row: -row["messages"])
    if not rows:
        return Note("The log has no message of a queue.")
    shown, colors = rows[:QUEUES_MAX], colors_of(_topics(statistics))
    figure, axes = new_figure(WIDTH, row_height(len(shown)))
    positions = np.arange(len(shown))
    counts = [row["messages"] for row in shown]
    axes.barh(positions, counts, color=[colors[row["topic"]] for row in shown])
    spare = [row["spare"] for row in shown]
    if any(spare):
        left = [count - twice for count, twice in zip(counts, spare, strict=True)]
        axes.barh(positions, spare, left=left, color=WARNING, label="duplicate queue offset")
        axes.legend(frameon=False, loc="lower right")
    for y, row in zip(positions, shown, strict=True):
        offsets = f"{row['first_offset']:,} to {row['end_offset'] - 1:,}"
        text = f" {row['messages']:,}  ({size_text(row['bytes'])}, offsets {offsets})"
        axes.text(row["messages"], y, text, va="center", fontsize=8, color=SOFT)
    named = labels([row["topic"] for row in shown])
    axes.set_yticks(positions, [f"{named[row['topic']]} / {row['queue_id']}" for row in shown], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.28, y=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    more = f", the deepest {len(shown)} of {len(rows)}" if len(rows) > len(shown) else ""
    axes.set(title=f"Messages per queue{more}", xlabel="messages")
    return finished(figure)


def plot_rates(statistics: QueueStatistics, bucket_seconds: float) -> Figure | Note:
    """Return stacked steps: messages per second over time, by topic.

    Args:
        statistics: of a log.
        bucket_seconds: of the statistics; several are joined if there would be too many.
    """
    rates = statistics.rates
    if not rates.num_rows:
        return Note("The log has no message with a time.")
    names = _topics(statistics)
    shown, colors = names[:TOPICS_MAX], colors_of(names)
    moments = np.asarray(rates["time"].cast(pa.int64()))
    span = (int(moments.max()) - int(moments.min())) / 1_000_000
    bucket_seconds *= max(1, math.ceil(span / bucket_seconds / _BARS_MAX))
    bucket = round(bucket_seconds * 1_000_000)
    times = moments // bucket
    first, last = int(times.min()), int(times.max())
    series = {name: np.zeros(last - first + 1) for name in [*shown, "other"]}
    for topic, time, count in zip(rates["topic"].to_pylist(), times, rates["messages"].to_pylist(), strict=True):
        series[topic if topic in shown else "other"][time - first] += count / bucket_seconds
    edges = (np.arange(first, last + 2) * bucket).astype("datetime64[us]")
    figure, axes = new_figure(WIDTH, 3.6)
    named = labels(names)
    draw_steps(
        figure,
        axes,
        edges,
        {
            named.get(name, name): (values, OTHER if name == "other" else colors[name])
            for name, values in series.items()
        },
    )
    axes.set(title="Messages stored per second", ylabel="messages / s", xlabel="time of storing (UTC)")
    return finished(figure)


def plot_skew(statistics: QueueStatistics) -> Figure | Note:
    """Return a dot per queue: its messages against an even share of its topic, the most uneven topic first."""
    topics = statistics.skew()["topic"].to_pylist()[:QUEUES_MAX]
    if not topics:
        return Note("No topic has more than one queue.")
    counts: dict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in statistics.queues.to_pylist():
        counts[row["topic"]].append((row["queue_id"], row["messages"]))
    figure, axes = new_figure(WIDTH, row_height(len(topics)) + 0.5)
    for y, topic in enumerate(topics):
        _skew_row(axes, y, counts[topic])
    axes.axvline(1, color=SOFT, linewidth=1, linestyle="--", zorder=0)
    named = labels(topics)
    axes.set_yticks(range(len(topics)), [f"{named[topic]} ({len(counts[topic])})" for topic in topics], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.08, y=0.12)
    axes.set_xlim(left=0)
    axes.set(title="Skew: a queue's messages, 1 = an even share of its topic", xlabel="times an even share")
    return finished(figure)


def _skew_row(axes: Axes, y: int, queues: list[tuple[int, int]]) -> None:
    even = sum(count for _, count in queues) / len(queues)
    shares = [count / even for _, count in queues]
    axes.plot([min(shares), max(shares)], [y, y], color=OTHER, linewidth=2, zorder=1)
    axes.scatter(shares, [y] * len(shares), s=30, color=[_share_color(share) for share in shares], zorder=2)
    queue, count = max(queues, key=lambda one: one[1])
    if max(shares) > _EVEN:
        text = f"  queue {queue}: {count:,}"
        axes.text(max(shares), y, text, va="center", fontsize=8, color=SOFT)


def _share_color(share: float) -> str:
    return WARNING if share > 2 else ATTENTION if share > _EVEN else NEUTRAL


def plot_tags(statistics: QueueStatistics) -> Figure | Note:
    """Return bars per topic, split by tag: the most frequent ones, all others, and none."""
    names = _topics(statistics)[:QUEUES_MAX]
    if not names:
        return Note("The log has no message of a queue.")
    counts: dict[str, dict[str | None, int]] = {name: {} for name in names}
    totals: dict[str, int] = defaultdict(int)
    for row in statistics.tags.to_pylist():
        if row["topic"] in counts:
            counts[row["topic"]][row["tags"]] = row["messages"]
            if row["tags"] is not None:
                totals[row["tags"]] += row["messages"]
    tags = sorted(totals, key=lambda tag: (-totals[tag], tag))
    named = labels(tags, 20)
    groups: list[tuple[str, str, set[str | None]]] = [
        (named[tag], TAG_COLORS[number], {tag}) for number, tag in enumerate(tags[:_TAGS_MAX])
    ]
    groups += [(f"{len(tags) - _TAGS_MAX} other tags", "#7f8894", set(tags[_TAGS_MAX:])), ("no tag", OTHER, {None})]
    figure, axes = new_figure(WIDTH, row_height(len(names)))
    left = np.zeros(len(names))
    for name_of_tag, color, members in groups:
        values = np.array([sum(count for tag, count in counts[name].items() if tag in members) for name in names])
        if values.any():
            axes.barh(np.arange(len(names)), values, left=left, color=color, label=name_of_tag)
            left = left + values
    axes.set_yticks(range(len(names)), list(labels(names).values()), fontsize=8)
    axes.invert_yaxis()
    axes.margins(y=0.02)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="Tags per topic", xlabel="messages")
    figure.legend(loc="outside right upper", frameon=False, fontsize=8)
    return finished(figure)


def plot_waiting(lag: pa.Table | None) -> Figure | Note:
    """Return bars: messages that wait for each consumer group, by topic."""
    totals: dict[tuple[str, str], int] = defaultdict(int)
    for row in lag.to_pylist() if lag is not None else ():
        totals[row["consumer"], row["topic"]] += row["waiting"]
    shown: list[tuple[Any, int]] = sorted(totals.items(), key=lambda one: (-one[1], one[0]))[:QUEUES_MAX]
    if not shown:
        return Note(
            "No consumer group has recorded offsets here: there is no config/consumerOffset.json, or it is empty."
        )
    figure, axes = new_figure(WIDTH, row_height(len(shown)))
    waiting = [count for _, count in shown]
    axes.barh(range(len(shown)), waiting, color=NEUTRAL)
    for y, count in enumerate(waiting):
        axes.text(count, y, f" {count:,}", va="center", fontsize=8, color=SOFT)
    consumers, topics = (labels([key[part] for key, _ in shown], 22) for part in (0, 1))
    names = [f"{consumers[consumer]}  ←  {topics[topic]}" for (consumer, topic), _ in shown]
    axes.set_yticks(range(len(shown)), names, fontsize=8)
    axes.invert_yaxis()
    axes.set_xlim(0, max(1, *waiting) * 1.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="Messages that wait for a consumer group", xlabel="messages")
    return finished(figure)

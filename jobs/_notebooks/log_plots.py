"""What ``explore_log.ipynb`` shows: events per hour and queue, seconds from append to Delta; and its own appends."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import fields
from datetime import UTC
from typing import TYPE_CHECKING, Final

import matplotlib.dates as mdates
import numpy as np
import pandas as pd
import pyarrow as pa
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from dledger_core import Client, NodeStatus
from dledger_core.rocketmq import encode_messages
from jobs._notebooks.style import COLORS, OTHER, finished, label, new_figure, row_height

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

__all__ = ["append_messages", "latency_seconds", "nodes_table", "plot_latency", "plot_per_hour", "plot_per_queue"]

_BATCH: Final = 500


def nodes_table(client: Client) -> pd.DataFrame:
    """Return a row per node, as it describes itself."""
    names = [field.name for field in fields(NodeStatus)]
    return pd.DataFrame([{name: getattr(node, name) for name in names} for node in client.metadata().nodes])


def append_messages(client: Client, messages: pa.Table, pause_s: float = 0.0) -> None:
    """Append rows of messages, in requests of 500.

    Args:
        client: of the group.
        messages: columns as ``encode_messages`` takes them.
        pause_s: rest after each request.
    """
    for batch in messages.combine_chunks().to_batches(_BATCH):
        client.append(encode_messages(**{name: batch[name] for name in batch.schema.names}))
        time.sleep(pause_s)


def latency_seconds(table: DataFrame, since: pd.Timestamp) -> pd.Series[float]:
    """Return for each row of a Delta table the seconds from its append until the file that holds it was written.

    Args:
        table: rows that the ingest job wrote, or a query like it.
        since: rows appended before are left out.
    """
    from pyspark.sql import functions as f

    written = f.col("_metadata.file_modification_time").cast("double")
    rows = table.where(f.col("timestamp") >= f.lit(since.to_pydatetime()))
    seconds: pd.Series[float] = rows.select((written - f.col("timestamp").cast("double")).alias("s")).toPandas()["s"]
    return seconds


def plot_latency(seconds: Sequence[float]) -> Figure:
    """Return a histogram with the median."""
    figure, axes = new_figure(8.0, 3.0)
    axes.hist(seconds, bins=20, color=COLORS[0])
    if len(seconds):
        median = float(np.median(np.asarray(seconds)))
        axes.axvline(median, color="#c62828", label=f"median {median:.2f} s")
        axes.legend(frameon=False)
    axes.set(title="Append to Delta", xlabel="seconds", ylabel="events")
    axes.set_xlim(left=0)
    return finished(figure)


def plot_per_hour(counts: pd.DataFrame, names: Mapping[int, str]) -> Figure:
    """Return stacked steps.

    Args:
        counts: columns hour, queue_id, count.
        names: what to call queues.
    """
    figure, axes = new_figure(11.0, 3.6)
    if len(counts):
        table = counts.pivot(index="hour", columns="queue_id", values="count").asfreq("h").fillna(0)
        hours = [*table.index, table.index[-1] + pd.Timedelta(hours=1)]
        edges = np.array([hour.to_datetime64() for hour in hours])
        below = np.zeros(len(table))
        for place, queue in enumerate(table.columns):
            values = table[queue].to_numpy()
            color = COLORS[place] if place < len(COLORS) else OTHER
            said = label(names.get(int(queue), f"queue {queue}"))
            axes.stairs(below + values, edges, baseline=below, fill=True, color=color, label=said)
            below = below + values
        locator = mdates.AutoDateLocator()  # type: ignore[no-untyped-call]
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(mdates.ConciseDateFormatter(locator, tz=UTC))  # type: ignore[no-untyped-call]
        figure.legend(title="queue", loc="outside right upper", frameon=False, fontsize=8)
    axes.set_ylim(bottom=0)
    axes.set(title="Events per hour", ylabel="events")
    return finished(figure)


def plot_per_queue(counts: pd.DataFrame, names: Mapping[int, str]) -> Figure:
    """Return bars.

    Args:
        counts: columns topic, queue_id, count.
        names: what to call queues.
    """
    figure, axes = new_figure(8.0, row_height(len(counts)))
    places = np.arange(len(counts))
    axes.barh(places, counts["count"], color=COLORS[0])
    for place, count in zip(places, counts["count"], strict=True):
        axes.text(count, place, f" {count:,}", va="center", fontsize=8, color="#57606a")
    queues = zip(counts["topic"], counts["queue_id"], strict=True)
    axes.set_yticks(places, [f"{label(topic)} / {names.get(queue, queue)}" for topic, queue in queues], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set(title="Events per queue", xlabel="events")
    return finished(figure)

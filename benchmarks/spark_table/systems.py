"""The compared systems: our log, an in-memory source, and (in ``kafka``) Kafka, behind one small interface.

Each system holds a log of ``rows(size)`` random bodies of ``size`` bytes, reads it with two partitions, and takes rows.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Protocol

import pyarrow as pa

from benchmarks.spark_table.memory_source import random_bodies, random_messages
from benchmarks.spark_table.report import DLEDGER, MEMORY
from dledger_core import Client, LocalCluster

APPEND_BYTES = 1 << 20
IN_FLIGHT = 4
DISTINCT = 16
"""Requests until bodies repeat: fewer would fit a Parquet dictionary, which costs the writer more than plain bodies."""
TRICKLE = """
import struct, sys, time
from dledger_core import Client
peers, group, rate, seconds = sys.argv[1], sys.argv[2], float(sys.argv[3]), float(sys.argv[4])
with Client(peers, group) as client:
    began, number = time.time(), 0
    while number < int(rate * seconds):
        time.sleep(max(0.01, began + number / rate - time.time()) if number else 0)
        due = min(int(rate * seconds), max(number, int((time.time() - began) * rate)) + 1)
        times = [int((began + each / rate) * 1e9) for each in range(number, due)]
        client.append([struct.pack(">q", each) + bytes(92) for each in times])
        number = due
"""
"""Appends what is due at least every 10 ms. A body begins with the time at which it was due."""


class System(Protocol):
    """A log, or what stands for one."""

    name: str
    stored: tuple[str, ...]
    """Columns that go to Delta: place in the log, one small number, time, body."""

    def fill(self) -> None:
        """Appends what is going to be read."""

    def prepare_sink(self) -> None:
        """Makes the log that ``write`` writes to, where that is needed."""

    def read(self, size: int, **options: str) -> Any:
        """Returns a frame over the whole log, or what options of its source choose."""

    def stream(self, size: int) -> Any:
        """Returns a stream from the log's beginning."""

    def write(self, frame: Any) -> None:
        """Writes the frame's column ``body`` to another log."""

    def one_row(self) -> Any:
        """Returns a stream over a log of a single row."""

    def trickle(self, rate: float, seconds: float) -> tuple[Any, subprocess.Popen[bytes] | None]:
        """Returns a stream over a new log, and the process that appends to it from now on."""


class Ledger(System):
    """Three nodes as they are started by default: acknowledged when on disk at a majority."""

    name = DLEDGER
    stored = ("index", "term", "timestamp", "body")

    def __init__(self, spark: Any, cluster: LocalCluster, rows: dict[int, int]) -> None:
        self._spark, self._cluster, self._rows = spark, cluster, rows
        self._trickles = iter([group for group in cluster.groups if group.startswith("trickle")])

    @staticmethod
    def groups(sizes: list[int], trickles: int) -> list[str]:
        """Returns the groups that the cluster has to host."""
        return [
            *(f"full{size}" for size in sizes),
            *(f"messages{size}" for size in sizes),
            "one",
            "sink",
            *(f"trickle{n}" for n in range(trickles)),
        ]

    def fill(self) -> None:
        """Appends what is going to be read."""
        for size, rows in self._rows.items():
            self.append(f"full{size}", rows, size)
        self.append("one", 1, 100)

    def fill_messages(self, rows: int, size: int) -> None:
        """Appends messages with bodies of ``size`` bytes to a group of their own."""
        self.append(f"messages{size}", rows, size, random_messages)

    def append(self, group: str, rows: int, size: int, make: Callable[[int, int], pa.Array] = random_bodies) -> None:
        """Appends from a client, in requests of 1 MiB, four of them in flight."""
        piece = max(1, min(rows, APPEND_BYTES // (size + 48)))
        bodies = make(min(rows, DISTINCT * piece), size)

        async def fill(client: Any) -> None:
            for at in range(0, rows, piece * IN_FLIGHT):
                starts = range(at, min(at + piece * IN_FLIGHT, rows), piece)
                pieces = [bodies.slice(low % (DISTINCT * piece), min(piece, rows - low)) for low in starts]
                await asyncio.gather(*map(client.append, pieces))

        with Client(self._cluster.peers, group) as client:
            client.call(fill(client.in_loop))

    def _options(self, group: str) -> dict[str, str]:
        return {"peers": self._cluster.peers, "groups": group, "startingOffsets": "earliest"}

    def read(self, size: int, **options: str) -> Any:
        return self._spark.read.format("dledger").options(**self._options(f"full{size}") | options).load()

    def read_messages(self, size: int, decode: str, columns: str | None = None) -> Any:
        """Returns a frame over the messages; None = all columns."""
        source = self._spark.read.format("dledger").options(**self._options(f"messages{size}"), decode=decode)
        return (source if columns is None else source.schema(columns)).load()

    def stream(self, size: int) -> Any:
        return self._spark.readStream.format("dledger").options(**self._options(f"full{size}")).load()

    def one_row(self) -> Any:
        return self._spark.readStream.format("dledger").options(**self._options("one")).load()

    def write(self, frame: Any) -> None:
        frame.write.format("dledger").options(peers=self._cluster.peers, group="sink").mode("append").save()

    def trickle(self, rate: float, seconds: float) -> tuple[Any, subprocess.Popen[bytes] | None]:
        group = next(self._trickles)
        command = [sys.executable, "-c", TRICKLE, self._cluster.peers, group, str(rate), str(seconds)]
        frame = self._spark.readStream.format("dledger").options(**self._options(group)).load()
        frame = frame.withColumn("sent_ms", _clock_in("body"))
        return frame, subprocess.Popen(command)


class Memory(System):
    """No log at all."""

    name = MEMORY
    stored = ("index", "term", "timestamp", "body")

    def __init__(self, spark: Any, rows: dict[int, int]) -> None:
        self._spark, self._rows = spark, rows

    def fill(self) -> None:
        """Has nothing to fill."""

    def read(self, size: int, **options: str) -> Any:
        return self._spark.read.format("memory").options(rows=self._rows[size], bytes=size).load()

    def stream(self, size: int) -> Any:
        return self._spark.readStream.format("memory").options(rows=self._rows[size], bytes=size).load()

    def one_row(self) -> Any:
        return self._spark.readStream.format("memory").options(rows=1, bytes=100).load()

    def write(self, frame: Any) -> None:
        frame.write.format("memory").mode("append").save()

    def trickle(self, rate: float, seconds: float) -> tuple[Any, subprocess.Popen[bytes] | None]:
        return self._spark.readStream.format("memory").options(perSecond=rate, bytes=100).load(), None


def _clock_in(column: str) -> Any:
    """The producer's clock in ms, which leads the body."""
    from pyspark.sql import functions as f

    return f.conv(f.hex(f.substring(f.col(column), 1, 8)), 16, 10).cast("long") / 1e6

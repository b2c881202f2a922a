"""Kafka as the bar: acks=all from the page cache (its default), Spark's own connector at its best settings."""

from __future__ import annotations

import subprocess
from typing import Any

from benchmarks.spark_table.brokers import Brokers
from benchmarks.spark_table.report import KAFKA
from benchmarks.spark_table.systems import System

PRODUCER = {"kafka.acks": "all", "kafka.batch.size": "1048576", "kafka.linger.ms": "5"}


class Kafka(System):
    """Three brokers; topics of one partition, which ``minPartitions`` splits for two cores."""

    name = KAFKA
    stored = ("offset", "partition", "timestamp", "value")

    def __init__(self, spark: Any, brokers: Brokers, rows: dict[int, int]) -> None:
        self._spark, self._brokers, self._rows = spark, brokers, rows
        self._trickles = 0

    @staticmethod
    def settings(brokers: Brokers) -> dict[str, str]:
        """Return the settings of a session that reads and writes Kafka."""
        return {"spark.jars": ",".join(map(str, brokers.spark_jars))}

    def fill(self) -> None:
        """Write the rows that are read later, with Spark's own sink."""
        for name, rows, size in [("one", 1, 100), *((f"full{size}", rows, size) for size, rows in self._rows.items())]:
            self._brokers.make_topic(name)
            self._write(self._spark.read.format("memory").options(rows=rows, bytes=size).load(), name)

    def prepare_sink(self) -> None:
        """Makes the topic that ``write`` writes to."""
        self._brokers.make_topic("sink")

    def _write(self, frame: Any, topic: str) -> None:
        target = {"kafka.bootstrap.servers": self._brokers.address, "topic": topic, **PRODUCER}
        frame.selectExpr("body as value").write.format("kafka").options(**target).save()

    def _options(self, topic: str) -> dict[str, str]:
        where = {"kafka.bootstrap.servers": self._brokers.address, "subscribe": topic}
        return {**where, "startingOffsets": "earliest", "minPartitions": "2"}

    def read(self, size: int, **options: str) -> Any:
        return self._spark.read.format("kafka").options(**self._options(f"full{size}") | options).load()

    def stream(self, size: int) -> Any:
        return self._spark.readStream.format("kafka").options(**self._options(f"full{size}")).load()

    def one_row(self) -> Any:
        return self._spark.readStream.format("kafka").options(**self._options("one")).load()

    def write(self, frame: Any) -> None:
        self._write(frame, "sink")

    def trickle(self, rate: float, seconds: float) -> tuple[Any, subprocess.Popen[bytes] | None]:
        self._trickles += 1
        topic = f"trickle{self._trickles}"
        self._brokers.make_topic(topic)
        frame = self._spark.readStream.format("kafka").options(**self._options(topic)).load()
        # The record's timestamp is the producer's clock.
        frame = frame.selectExpr(*self.stored, "cast(timestamp as double) * 1000 as sent_ms")
        what = ["--topic", topic, "--num-records", str(int(rate * seconds)), "--record-size", "100"]
        how = ["--throughput", f"{rate:g}", "--producer-props", f"bootstrap.servers={self._brokers.address}"]
        tool = "org.apache.kafka.tools.ProducerPerformance"
        return frame, self._brokers.start(tool, *what, *how, "acks=all", "linger.ms=0")

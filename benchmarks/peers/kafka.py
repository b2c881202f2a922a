"""Apache Kafka: three brokers, driven by its Java producer; with and without a sync before the acknowledgement."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any, Self

from benchmarks.lines import Load
from benchmarks.peers import WARM_UP, NotRunError, Process, Side
from benchmarks.peers.java import compiled
from benchmarks.spark_table.brokers import Brokers, MissingError, java, resolve

ARTIFACTS = (
    ("org.apache.kafka", "kafka_2.13", "4.4.0"),
    ("org.apache.kafka", "kafka-tools", "4.4.0"),
    ("org.apache.logging.log4j", "log4j-slf4j-impl", "2.25.4"),
)
SETTINGS = (
    "Kafka 4.4, three brokers that are controllers too, heap 1 GiB; topics of 3 replicas, min.insync.replicas=2, {sync}"
    "all else default. Client: its Java producer, acks=all, no compression, batch.size=1 MiB. Separate singles: a "
    "producer for each one in flight. Joined singles: one producer, linger.ms=0. Requests of 1 MiB: one producer, "
    "linger.ms=5 (the default), records up to its buffer.memory of 64 MiB in flight, so their latency is that of the "
    "client's queue. Groups are partitions of one topic."
)
FLUSH_MESSAGES = {"kafka_fsync": 1, "kafka_page": 0}


class Kafka:
    """Three brokers, for both sides."""

    SIDES = (
        Side("kafka_fsync", "Kafka, fsync", SETTINGS.format(sync="flush.messages=1, ")),
        Side("kafka_page", "Kafka, page cache", SETTINGS.format(sync="acknowledged from the page cache, ")),
    )

    def __init__(self, programs: Path, directory: Path) -> None:
        self._programs, self._directory = programs, directory
        self._stack = contextlib.ExitStack()

    @staticmethod
    def fetch(programs: Path) -> Path:
        """Return the directory of the jars, fetched on first use.

        Raises:
            MissingError: as ``resolve``.
        """
        home = os.environ.get("KAFKA_HOME")
        return Path(home) / "libs" if home else resolve(programs / "kafka", ARTIFACTS)

    def __enter__(self) -> Self:
        try:
            jars = self.fetch(self._programs)
            with contextlib.ExitStack() as stack:
                classes = compiled("KafkaLoad", jars, self._directory)
                brokers = stack.enter_context(Brokers(self._directory, jars))
                self._loads = {}
                for side, flush_messages in FLUSH_MESSAGES.items():
                    command = [java(), "-Xmx512m", "-cp", f"{classes}:{jars}/*", "KafkaLoad"]
                    log = self._directory / f"{side}.log"
                    load = Process([*command, brokers.address, flush_messages], log, asked=True)
                    stack.callback(load.stop)
                    for each in WARM_UP:
                        load.measure(each)
                    self._loads[side] = load
                self._stack = stack.pop_all()
        except MissingError as error:
            raise NotRunError(str(error)) from None
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def measure(self, side: str, load: Load) -> dict[str, Any]:
        """Return the figures of one measurement."""
        return self._loads[side].measure(load)

"""How fast Spark reads a log and writes to one, beside an in-memory source of the same rows.

Method: one Spark session ``local[2]``, a cluster of three nodes on the same machine, bodies of one size. Each figure
is the median of ``--rounds`` runs after a warm-up; rates are rows by the wall time of the action, and the rows are
so many that Spark's fixed start does not count. The ceiling is a Python data source that yields the same rows from
memory in the same run, so ``ratio`` says what the log costs and can be compared between machines and loads.

* memory: the in-memory source -> noop; memory columns has the log's six columns, memory body only the body
* read: the log -> noop
* sink: the in-memory bodies -> the log, one transaction; memory write is the same rows into a Python sink that drops
  them

Run: ``python -m tests.benchmarks.bench_spark [--rows N] [--body-bytes 100] [--rounds 5]``. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceReader,
    InputPartition,
    WriterCommitMessage,
)

BATCH_ROWS = 20_000


class MemorySource(DataSource):
    """Yields one Arrow batch again and again; writes to nowhere."""

    @classmethod
    def name(cls) -> str:
        return "memory"

    def schema(self) -> str:
        if self.options.get("columns") == "all":
            return "group string, index long, term long, position long, timestamp timestamp, body binary"
        return "body binary"

    def reader(self, schema: Any) -> DataSourceReader:
        return MemoryReader(self.options)

    def writer(self, schema: Any, overwrite: bool) -> DataSourceArrowWriter:
        return MemoryWriter()


class MemoryReader(DataSourceReader):
    def __init__(self, options: Any) -> None:
        self.rows, self.body_bytes = int(options["rows"]), int(options["bodybytes"])
        self.all = options.get("columns") == "all"

    def partitions(self) -> list[InputPartition]:
        return [InputPartition(self.rows // 2)] * 2

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        batch = pa.record_batch({"body": bodies(self.body_bytes).cast(pa.binary())})
        if self.all:
            numbers = pa.array(np.arange(BATCH_ROWS))
            columns = {"group": pa.repeat("default", BATCH_ROWS)}
            columns |= dict.fromkeys(("index", "term", "position"), numbers)
            columns["timestamp"] = numbers.cast(pa.timestamp("us", tz="UTC"))
            batch = pa.record_batch({**columns, "body": batch.column("body")})
        for at in range(0, partition.value, BATCH_ROWS):
            yield batch.slice(0, min(BATCH_ROWS, partition.value - at))


class MemoryWriter(DataSourceArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


def bodies(body_bytes: int) -> pa.Array:
    """Returns one batch of random bodies."""
    offsets = np.arange(BATCH_ROWS + 1, dtype=np.int64) * body_bytes
    data = pa.py_buffer(os.urandom(BATCH_ROWS * body_bytes))
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), BATCH_ROWS, [None, pa.py_buffer(offsets), data])


def median_seconds(work: Callable[[], object], rounds: int) -> float:
    """Runs ``work`` once to warm up, then ``rounds`` times."""
    took = []
    for _ in range(rounds + 1):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return statistics.median(took[1:])


def fill(peers: str, rows: int, body_bytes: int) -> None:
    """Appends ``rows`` bodies."""
    from dledger_core import Client

    batch = bodies(body_bytes)
    with Client(peers, "full") as client:
        for at in range(0, rows, BATCH_ROWS // 4):
            client.append(batch.slice(0, min(BATCH_ROWS // 4, rows - at)))


def measure(spark: Any, peers: str, options: argparse.Namespace) -> dict[str, float]:
    """Returns the seconds of each kind of run."""
    from spark_connector import register

    register(spark)
    spark.dataSource.register(MemorySource)
    memory = spark.read.format("memory").options(rows=options.rows, bodyBytes=options.body_bytes)
    narrow = memory.load()
    wide = memory.option("columns", "all").load()
    log = spark.read.format("dledger").options(peers=peers, groups="full", minPartitions=2).load()
    runs = {
        "memory columns": lambda: wide.write.format("noop").mode("overwrite").save(),
        "memory body": lambda: narrow.write.format("noop").mode("overwrite").save(),
        "read": lambda: log.write.format("noop").mode("overwrite").save(),
        "memory write": lambda: narrow.write.format("memory").mode("append").save(),
        "sink": lambda: (
            narrow.write.format("dledger").options(peers=peers, group="sink", **options.sink).mode("append").save()
        ),
    }
    return {name: median_seconds(run, options.rounds) for name, run in runs.items() if name in options.only}


def main() -> None:
    """Runs and prints."""
    from dledger_core import LocalCluster
    from jobs._session import spark_session

    kinds = ["memory columns", "memory body", "read", "memory write", "sink"]
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4_000_000)
    parser.add_argument("--body-bytes", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="*", default=kinds, choices=kinds)
    parser.add_argument("--sink", type=json.loads, default={}, help="options of the sink as JSON")
    options = parser.parse_args()
    settings = {"spark.master": "local[2]"}
    with LocalCluster(3, groups=("full", "sink")) as cluster, spark_session("bench", settings=settings) as spark:
        fill(cluster.peers, options.rows, options.body_bytes)
        took = measure(spark, cluster.peers, options)
    rates = {name: round(options.rows / seconds) for name, seconds in took.items()}
    ratios = {
        f"{name} / {ceiling}": round(rates[name] / rates[ceiling], 2)
        for name, ceiling in (("read", "memory columns"), ("sink", "memory write"))
        if name in rates and ceiling in rates
    }
    report = {"rows": options.rows, "body_bytes": options.body_bytes, "rows_per_s": rates, "ratio": ratios}
    sys.stdout.write(json.dumps(report) + "\n")


if __name__ == "__main__":
    main()

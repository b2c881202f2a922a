"""A program for ``spark-submit``: reads, streams and writes logs, and tells where its tasks ran.

Arguments: peers, the group to read, the group to write, a directory that driver and tasks see, and, where tasks are
tried twice (speculation), a second group to read and one to write: there one task stands still after its last row
until its twin has won. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.taskcontext import TaskContext

import spark_connector
from spark_connector import register

PATIENCE_S = 200.0


def where(_: Iterator[int]) -> Iterator[tuple[str, str, int]]:
    """Where a task runs, and where it has the connector from."""
    yield str(Path.cwd()), str(spark_connector.__file__), os.getpid()


def straggling(directory: Path) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Passes rows on; of partition 0 the first attempt does not end, and the second waits until the first has begun."""

    def await_file(path: Path) -> None:
        until = time.monotonic() + PATIENCE_S
        while not path.exists() and time.monotonic() < until:
            time.sleep(0.01)

    def passing(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        if context.partitionId() != 0:
            yield from batches
            return
        attempt = context.attemptNumber()
        if attempt > 0:
            await_file(directory / "attempt-0")
        yield from batches
        (directory / f"attempt-{attempt}").touch()
        if attempt == 0:
            await_file(directory / "never")

    return passing


def read(spark: Any, peers: str, source: str) -> list[int]:
    rows = spark.read.format("dledger").options(peers=peers, groups=source, minPartitions=4).load()
    return list(rows.selectExpr("count(*)", "sum(length(body))", "count(DISTINCT index)").first())


def stream(spark: Any, peers: str, source: str, target: str, checkpoint: Path) -> None:
    rows = spark.readStream.format("dledger").options(peers=peers, groups=source, startingOffsets="earliest").load()
    _finish(rows.selectExpr("concat(cast('streamed-' as binary), body) AS body"), peers, target, checkpoint)


def stream_with_a_straggler(spark: Any, peers: str, source: str, target: str, directory: Path) -> list[str]:
    """Returns the attempts of the task that had two."""
    reading = {"peers": peers, "groups": source, "startingOffsets": "earliest", "minPartitions": "2"}
    rows = spark.readStream.format("dledger").options(**reading).load().select("body")
    passed = rows.mapInArrow(straggling(directory), rows.schema)
    _finish(passed, peers, target, directory / "straggler", appendMaxBytes="5000")
    return sorted(path.name for path in directory.glob("attempt-*"))


def _finish(rows: Any, peers: str, target: str, checkpoint: Path, **options: str) -> None:
    writer = rows.writeStream.format("dledger").options(peers=peers, group=target, **options)
    writer.option("checkpointLocation", str(checkpoint)).trigger(availableNow=True).start().awaitTermination()


def main(peers: str, source: str, target: str, directory: str, *twice: str) -> None:
    with SparkSession.builder.getOrCreate() as spark:
        register(spark)
        told: dict[str, Any] = {"read": read(spark, peers, source), "driver": spark_connector.__file__}
        told["tasks"] = spark.sparkContext.parallelize(range(8), 4).mapPartitions(where).collect()
        stream(spark, peers, source, target, Path(directory, "checkpoint"))
        written = spark.range(0, 1000, 1, 4).selectExpr("concat('written-', id) AS body")
        written.write.format("dledger").options(peers=peers, group=target).mode("append").save()
        if twice:
            told["attempts"] = stream_with_a_straggler(spark, peers, *twice, Path(directory))
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

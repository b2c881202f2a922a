"""A program for ``spark-submit`` with speculation: one task stands still after its last row until its twin has won.

Arguments: peers, the group to read, the group to write, a directory that all tasks see. Prints one JSON line: the
attempts of the task that had two.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession
from pyspark.taskcontext import TaskContext

from spark_connector import register

PATIENCE_S = 200.0


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


def main(peers: str, source: str, target: str, directory: str) -> None:
    with SparkSession.builder.getOrCreate() as spark:
        register(spark)
        reading = {"peers": peers, "groups": source, "startingOffsets": "earliest", "minPartitions": "2"}
        rows = spark.readStream.format("dledger").options(**reading).load().select("body")
        passed = rows.mapInArrow(straggling(Path(directory)), rows.schema)
        writer = passed.writeStream.format("dledger").options(peers=peers, group=target, appendMaxBytes="5000")
        writer = writer.option("checkpointLocation", f"{directory}/checkpoint")
        writer.trigger(availableNow=True).start().awaitTermination()
    attempts = sorted(path.name for path in Path(directory).glob("attempt-*"))
    sys.stdout.write(json.dumps({"attempts": attempts}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

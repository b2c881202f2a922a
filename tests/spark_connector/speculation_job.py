"""A program for ``spark-submit`` with speculation: one task stalls after its last row until its duplicate has won.

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

from dledger_core import Client
from spark_connector import register

WAIT_S = 200.0
APPENDED = 3300
"""Of the 4,000 rows: all of the other partition, and most of those that the attempt which will lose has passed on."""


def wait_for(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + WAIT_S
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)


def straggling(directory: Path, peers: str, target: str) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """Passes rows on; of partition 0 the first attempt does not end, and the second waits until the first has begun."""

    def passing(batches: Iterator[Any]) -> Iterator[Any]:
        context = TaskContext.get()
        assert context is not None
        attempt = context.attemptNumber()
        if context.partitionId() == 0 and attempt > 0:
            wait_for((directory / "attempt-0").exists)
        yield from batches
        if context.partitionId() != 0:
            return
        if attempt == 0:
            with Client(peers, target) as client:  # rows may still be in flight to the sink
                wait_for(lambda: max(node.commit_index for node in client.metadata().nodes) >= APPENDED)
        (directory / f"attempt-{attempt}").touch()
        if attempt == 0:
            wait_for((directory / "never").exists)

    return passing


def main(peers: str, source: str, target: str, directory: str) -> None:
    with SparkSession.builder.getOrCreate() as spark:
        register(spark)
        reading = {"peers": peers, "groups": source, "startingOffsets": "earliest", "minPartitions": "2"}
        rows = spark.readStream.format("dledger").options(**reading).load().select("body")
        passed = rows.mapInArrow(straggling(Path(directory), peers, target), rows.schema)
        writer = passed.writeStream.format("dledger").options(peers=peers, group=target, appendMaxBytes="5000")
        writer = writer.option("checkpointLocation", f"{directory}/checkpoint")
        writer.trigger(availableNow=True).start().awaitTermination()
    attempts = sorted(path.name for path in Path(directory).glob("attempt-*"))
    sys.stdout.write(json.dumps({"attempts": attempts}) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

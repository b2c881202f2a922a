"""A program for ``spark-submit``: reads, streams and writes logs, and tells where its tasks ran.

Arguments: peers, the group to read, the group to write, a directory for the checkpoint. Prints one JSON line.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

import spark_connector
from spark_connector import register


def where(_: Iterator[int]) -> Iterator[tuple[str, str, int]]:
    """Return the host of a task, and the path of its connector."""
    yield str(Path.cwd()), str(spark_connector.__file__), os.getpid()


def stream(spark: Any, peers: str, source: str, target: str, checkpoint: str) -> None:
    rows = spark.readStream.format("dledger").options(peers=peers, groups=source, startingOffsets="earliest").load()
    writer = rows.selectExpr("concat(cast('streamed-' as binary), body) AS body").writeStream.format("dledger")
    writer = writer.options(peers=peers, group=target, checkpointLocation=checkpoint)
    writer.trigger(availableNow=True).start().awaitTermination()


def main(peers: str, source: str, target: str, directory: str) -> None:
    with SparkSession.builder.getOrCreate() as spark:
        register(spark)
        rows = spark.read.format("dledger").options(peers=peers, groups=source, minPartitions=4).load()
        read = rows.selectExpr("count(*)", "sum(length(body))", "count(DISTINCT index)").first()
        tasks = spark.sparkContext.parallelize(range(8), 4).mapPartitions(where).collect()
        stream(spark, peers, source, target, f"{directory}/checkpoint")
        written = spark.range(0, 1000, 1, 4).selectExpr("concat('written-', id) AS body")
        written.write.format("dledger").options(peers=peers, group=target).mode("append").save()
        told = {"read": list(read), "tasks": tasks, "driver": spark_connector.__file__}
        sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

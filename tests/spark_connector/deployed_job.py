"""A program for a Spark of several processes: reads, streams and writes logs, and prints one JSON line.

Arguments: the URL of a Spark Connect server (empty for ``spark-submit``), peers, the group to read, the group to write,
a directory.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

import spark_connector
from spark_connector import monitor, register


def where(_: Iterator[int]) -> Iterator[tuple[str, str]]:
    """Return the directory of a task, and the path of its connector."""
    yield str(Path.cwd()), str(spark_connector.__file__)


def run(spark: Any, peers: str, source: str, target: str, directory: str) -> dict[str, Any]:
    rows = spark.read.format("dledger").options(peers=peers, groups=source, minPartitions=4).load()
    told = {"kind": type(spark).__module__, "driver": spark_connector.__file__}
    told["read"] = list(rows.selectExpr("count(*)", "sum(length(body))", "count(DISTINCT index)").first())
    try:
        spark.read.format("dledger").option("peers", "nonsense").load().count()
    except PySparkException as error:
        told["wrong"] = str(error)
    options = {"peers": peers, "groups": source, "startingOffsets": "earliest", "maxOffsetsPerTrigger": 20_000}
    streamed = spark.readStream.format("dledger").options(**options).load()
    writer = streamed.selectExpr("concat(cast('streamed-' as binary), body) AS body").writeStream.format("dledger")
    writer = writer.options(peers=peers, group=target, checkpointLocation=f"{directory}/checkpoint")
    file = Path(directory, "lag.jsonl")
    with monitor(spark, log=False, json=file):
        writer.trigger(availableNow=True).start().awaitTermination()
    told["lag"] = [json.loads(line)["lag_records"] for line in file.read_text().splitlines()]
    written = spark.range(0, 1000, 1, 4).selectExpr("concat('written-', id) AS body")
    written.write.format("dledger").options(peers=peers, group=target).mode("append").save()
    return told


def main(url: str, *arguments: str) -> None:
    builder = SparkSession.builder.remote(url) if url else SparkSession.builder
    spark = builder.getOrCreate()
    try:
        register(spark)
        told = run(spark, *arguments)
        if not url:
            told["tasks"] = spark.sparkContext.parallelize(range(8), 4).mapPartitions(where).collect()
    finally:
        spark.stop()
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""A client of Spark Connect: reads, streams and writes logs, watches the lag, and uses wrong options.

Arguments: the server's URL, peers, the group to read, the group to write, a directory. Prints one JSON line.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from pyspark.errors import PySparkException
from pyspark.sql import SparkSession

from spark_connector import monitor, register
from spark_connector.errors import SparkVersionError


def stream(spark: Any, peers: str, source: str, target: str, directory: str) -> list[dict[str, Any]]:
    """Log to log in bounded micro-batches; return the reports of the listener."""
    rows = spark.readStream.format("dledger").options(peers=peers, groups=source, startingOffsets="earliest")
    rows = rows.option("maxOffsetsPerTrigger", 600).load()
    writer = rows.selectExpr("concat(cast('streamed-' as binary), body) AS body").writeStream.format("dledger")
    writer = writer.options(peers=peers, group=target, checkpointLocation=f"{directory}/checkpoint")
    file = Path(directory, "lag.jsonl")
    with monitor(spark, log=False, json=file):
        writer.trigger(availableNow=True).start().awaitTermination()
    return [json.loads(line) for line in file.read_text().splitlines()]


def error_of(call: Any) -> str:
    try:
        call()
    except PySparkException as error:
        return str(error)
    return "no error"


def error_of_another_version(spark: Any) -> str:
    """What ``register`` says where the server runs another Spark."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spark, "version", "4.1.1")
        try:
            register(spark)
        except SparkVersionError as error:
            return str(error)
    return "no error"


def main(url: str, peers: str, source: str, target: str, directory: str) -> None:
    spark = SparkSession.builder.remote(url).getOrCreate()
    try:
        register(spark)
        rows = spark.read.format("dledger").options(peers=peers, groups=source).load()
        read = rows.selectExpr("count(*)", "sum(length(body))").first()
        spark.sql(f"CREATE TEMPORARY VIEW log USING dledger OPTIONS (peers '{peers}', groups '{source}')")
        by_sql = spark.sql("SELECT max(index) - min(index) + 1 FROM log").first()
        told = {
            "kind": type(spark).__module__,
            "read": list(read),
            "by_sql": list(by_sql),
            "lag": stream(spark, peers, source, target, directory),
            "version": error_of_another_version(spark),
            "wrong": error_of(lambda: spark.read.format("dledger").option("peers", "nonsense").load().count()),
        }
        written = spark.range(0, 1000, 1, 2).selectExpr("concat('written-', id) AS body")
        written.write.format("dledger").options(peers=peers, group=target).mode("append").save()
    finally:
        spark.stop()
    sys.stdout.write(json.dumps(told) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])

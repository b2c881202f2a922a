"""Loads the classes that the tests' JVMs load: SQL, Parquet, Delta, a Python source, a stream.

Run by ``.ci/spark`` under a JVM that writes them to an archive when it ends: ``python -m tests.support.spark_classes
DIRECTORY``.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition

from jobs._session import spark_session

JVM_END_S = 300.0


class Reader(DataSourceReader):
    def read(self, partition: InputPartition) -> Iterator[tuple[int]]:
        yield from ((number,) for number in range(10))


class Numbers(DataSource):
    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> str:
        return "number long"

    def reader(self, schema: Any) -> DataSourceReader:
        return Reader()


def work(spark: SparkSession, directory: str) -> None:
    spark.dataSource.register(Numbers)
    numbers = spark.read.format("numbers").load()
    numbers.write.format("delta").save(f"{directory}/one")
    numbers.selectExpr("number % 3 as rest", "number").groupBy("rest").sum("number").orderBy("rest").toArrow()
    stream = spark.readStream.format("delta").load(f"{directory}/one").writeStream.format("delta")
    stream = stream.option("checkpointLocation", f"{directory}/checkpoint").trigger(availableNow=True)
    stream.start(f"{directory}/two").awaitTermination()
    both = spark.read.format("delta").load(f"{directory}/two").join(numbers, "number")
    both.selectExpr("sum(number) over (order by number)").collect()


def main() -> None:
    with spark_session("classes", settings={"spark.master": "local[1]"}) as session:
        work(session, sys.argv[1])
    # Python would not wait for the JVM's end.
    gateway = SparkContext._gateway
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(JVM_END_S)


if __name__ == "__main__":
    main()

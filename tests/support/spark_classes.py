"""Loads the classes that the tests' JVMs load: SQL, Parquet, Delta, a Python source and sink, batches and streams.

Run by ``.ci/spark`` under a JVM that writes them to an archive when it ends: ``python -m tests.support.spark_classes
DIRECTORY``. Without a directory it prints Delta's jars as a class path: an archive holds no classes that a job loads
later, so the tests' JVMs find them on the class path from the start.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from typing import Any

import pyarrow as pa
from pyspark import SparkContext
from pyspark.sql import SparkSession
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceStreamReader,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.streaming.datasource import ReadLimit, SupportsTriggerAvailableNow

from jobs._session import delta_jars, spark_session

JVM_END_S = 300.0
ROWS = 10


class Reader(DataSourceReader):
    def read(self, partition: InputPartition) -> Iterator[Any]:
        yield pa.RecordBatch.from_pydict({"number": list(range(ROWS))})


class StreamReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads the same rows, in one micro-batch."""

    def prepareForTriggerAvailableNow(self) -> None:
        """Its end does not move."""

    def initialOffset(self) -> dict[str, int]:
        return {"end": 0}

    def latestOffset(self, start: dict[str, int], limit: ReadLimit) -> dict[str, int]:
        return {"end": ROWS}

    def partitions(self, start: dict[str, int], end: dict[str, int]) -> list[Any]:
        return [InputPartition(0)]

    def read(self, partition: InputPartition) -> Iterator[Any]:
        return Reader().read(partition)


class Writer(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return WriterCommitMessage()


class Numbers(DataSource):
    @classmethod
    def name(cls) -> str:
        return "numbers"

    def schema(self) -> str:
        return "number long"

    def reader(self, schema: Any) -> Any:
        return Reader()

    def streamReader(self, schema: Any) -> Any:
        return StreamReader()

    def streamWriter(self, schema: Any, overwrite: bool) -> Any:
        return Writer()


def work(spark: SparkSession, directory: str) -> None:
    spark.dataSource.register(Numbers)
    numbers = spark.read.format("numbers").load()
    numbers.write.format("delta").save(f"{directory}/one")
    numbers.selectExpr("number % 3 as rest", "number").groupBy("rest").sum("number").orderBy("rest").toArrow()
    spark.sql(f"CREATE TABLE delta.`{directory}/two` (number BIGINT) USING delta CLUSTER BY (number)")
    changed = spark.readStream.format("delta").load(f"{directory}/one")
    _run(changed.writeStream.format("delta"), directory, "two")
    _run(spark.readStream.format("numbers").load().writeStream.format("delta"), directory, "three")
    _run(spark.readStream.format("numbers").load().writeStream.format("numbers"), directory, "none")
    both = spark.read.format("delta").load(f"{directory}/two").join(numbers, "number")
    both.mapInArrow(lambda batches: batches, both.schema).selectExpr("sum(number) over (order by number)").collect()


def _run(writer: Any, directory: str, target: str) -> None:
    writer = writer.option("checkpointLocation", f"{directory}/{target} checkpoint").trigger(availableNow=True)
    writer.start(f"{directory}/{target}").awaitTermination()


def print_jars() -> None:
    warnings.simplefilter("ignore")
    SparkContext._ensure_initialized()
    sys.stdout.write(":".join(delta_jars(SparkContext._jvm)) + "\n")


def main(directory: str) -> None:
    with spark_session("classes", settings={"spark.master": "local[1]"}) as session:
        work(session, directory)
    # Python would not wait for the JVM's end.
    gateway = SparkContext._gateway
    gateway.shutdown()
    gateway.proc.stdin.close()
    gateway.proc.wait(JVM_END_S)


if __name__ == "__main__":
    main(sys.argv[1]) if sys.argv[1:] else print_jars()

"""The Spark data source ``dledger``: reads and writes replicated logs, in batches and as streams.

Usage::

    from spark_connector import monitor, register

    register(spark)
    monitor(spark, json="lag.jsonl")
    spark.readStream.format("dledger").option("peers", peers).load()

Importing it does not import PySpark, so a program can check options and versions before that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from spark_connector.columns import ddl_of
from spark_connector.errors import check_spark
from spark_connector.monitoring.lag import LagReport, lag_reports
from spark_connector.offsets import (
    LatestOffset,
    SparkCheckpoint,
    StreamOffset,
    local_path,
    planned_offset,
    read_checkpoint,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_connector.monitoring.listener import DLedgerListener, monitor

__all__ = [
    "DLedgerListener",
    "LagReport",
    "LatestOffset",
    "SparkCheckpoint",
    "StreamOffset",
    "check_spark",
    "ddl_of",
    "lag_reports",
    "local_path",
    "monitor",
    "planned_offset",
    "read_checkpoint",
    "register",
]


def register(spark: SparkSession) -> None:
    """Make ``format("dledger")`` available in the session.

    A read is divided by the parallelism that the session's cluster has now, unless ``minPartitions`` names another.

    Raises:
        SparkVersionError: PySpark is none of 4.1, 4.2 and 4.3, or the server of Spark Connect is not.
    """
    check_spark(spark)
    from spark_connector.source import data_source_of  # another PySpark may lack names that it imports

    spark.dataSource.register(data_source_of(spark))


def __getattr__(name: str) -> Any:
    if name in ("DLedgerListener", "monitor"):
        from spark_connector.monitoring import listener  # needs PySpark

        return getattr(listener, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

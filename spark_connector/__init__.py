"""The Spark data source ``dledger``: reads and writes replicated logs, in batches and as streams.

Usage::

    from spark_connector import monitor, register

    register(spark)
    monitor(spark, json="lag.jsonl")
    spark.readStream.format("dledger").option("peers", peers).load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from spark_connector.monitoring.listener import DLedgerListener, monitor
from spark_connector.monitoring.report import LagReport, lag_reports
from spark_connector.offsets import LatestOffset, StreamOffset
from spark_connector.schema import ddl_of
from spark_connector.spark_checkpoint import SparkCheckpoint, local_path, planned_offset, read_checkpoint
from spark_connector.spark_version import check_spark

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

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

    Raises:
        SparkVersionError: PySpark is not 4.2, or the server of Spark Connect is not.
    """
    check_spark(spark)
    from spark_connector.source import DLedgerDataSource  # another PySpark may lack names that it imports

    spark.dataSource.register(DLedgerDataSource)

"""The Spark data source ``dledger``: reads and writes replicated logs, in batches and as streams.

Usage::

    from spark_connector import monitor, register

    register(spark)
    monitor(spark, json="lag.jsonl")
    spark.readStream.format("dledger").option("peers", peers).load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import pyspark

from spark_connector.errors import SparkVersionError
from spark_connector.monitoring.listener import DLedgerListener, monitor
from spark_connector.monitoring.report import LagReport, lag_reports
from spark_connector.offsets import LatestOffset, StreamOffset
from spark_connector.schema import ddl_of
from spark_connector.spark_checkpoint import SparkCheckpoint, local_path, planned_offset, read_checkpoint

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "PYSPARK_VERSION",
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

PYSPARK_VERSION: Final = "4.2"


def register(spark: SparkSession) -> None:
    """Make ``format("dledger")`` available in the session.

    Raises:
        SparkVersionError: PySpark is not 4.2, or the server of Spark Connect is not.
    """
    check_spark(spark)
    from spark_connector.source import DLedgerDataSource  # another PySpark may lack names that it imports

    spark.dataSource.register(DLedgerDataSource)


def check_spark(spark: SparkSession) -> None:
    """Checks that PySpark here, and Spark where the session runs, are the version this connector was made for.

    Raises:
        SparkVersionError: one of them is not.
    """
    remedy = f"pip install 'pyspark~={PYSPARK_VERSION}.0'"
    if not pyspark.__version__.startswith(f"{PYSPARK_VERSION}."):
        what = f"PySpark {pyspark.__version__} is installed, this connector needs {PYSPARK_VERSION}"
        raise SparkVersionError(what, "Python environment", remedy)
    if not spark.version.startswith(f"{PYSPARK_VERSION}."):  # over Spark Connect another Spark may answer
        what = f"the session runs on Spark {spark.version}, this connector needs {PYSPARK_VERSION}"
        raise SparkVersionError(what, "Spark Connect server", f"start the server with Spark {PYSPARK_VERSION}")

"""The Spark data source ``dledger``: reads and writes replicated logs, in batches and as streams.

Usage::

    from spark_connector import monitor, register

    register(spark)
    monitor(spark, json="lag.jsonl")
    spark.readStream.format("dledger").option("peers", peers).load()
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from spark_connector.monitoring.lag_report import LagReport, lag_reports
    from spark_connector.monitoring.listener import DLedgerListener, monitor
    from spark_connector.offsets import LatestOffset, StreamOffset
    from spark_connector.schema import ddl_of
    from spark_connector.spark_checkpoint import SparkCheckpoint, local_path, planned_offset, read_checkpoint

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

_ON_DEMAND: Final = {
    "LatestOffset": "spark_connector.offsets",
    "StreamOffset": "spark_connector.offsets",
    "SparkCheckpoint": "spark_connector.spark_checkpoint",
    "local_path": "spark_connector.spark_checkpoint",
    "planned_offset": "spark_connector.spark_checkpoint",
    "read_checkpoint": "spark_connector.spark_checkpoint",
    "ddl_of": "spark_connector.schema",
    "DLedgerListener": "spark_connector.monitoring.listener",
    "LagReport": "spark_connector.monitoring.lag_report",
    "lag_reports": "spark_connector.monitoring.lag_report",
    "monitor": "spark_connector.monitoring.listener",
}
"""What is imported when it is first asked for: PySpark imports this package in processes that need none of it."""


def __getattr__(name: str) -> Any:
    import importlib

    if name not in _ON_DEMAND:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ON_DEMAND[name]), name)


def register(spark: SparkSession) -> None:
    """Makes ``format("dledger")`` known to the session.

    Raises:
        SparkVersionError: PySpark is not 4.2, or the server of Spark Connect is not.
    """
    check_spark(spark)
    from spark_connector.source import DLedgerDataSource

    with _found_by_stream_planners(spark):
        spark.dataSource.register(DLedgerDataSource)


@contextmanager
def _found_by_stream_planners(spark: SparkSession) -> Iterator[None]:
    """Lets the process that plans a stream import this package from where the driver has it.

    Spark 4.2.0 looks for what --py-files and addPyFile brought in a folder "streaming_job" that nobody makes. What is
    registered inside the block carries the driver's place in its PYTHONPATH; on executors, where that place may not
    exist, the files that were sent come first.
    """
    environment = getattr(getattr(spark, "_sc", None), "environment", None)
    if environment is None:  # over Spark Connect the server decides
        yield
        return
    before = environment.get("PYTHONPATH")
    places = [str(Path(__file__).parent.parent), *(before.split(os.pathsep) if before else [])]
    environment["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(places))
    try:
        yield
    finally:
        if before is None:
            del environment["PYTHONPATH"]
        else:
            environment["PYTHONPATH"] = before


def check_spark(spark: SparkSession) -> None:
    """Checks that PySpark here, and Spark where the session runs, are the version this connector was made for.

    Raises:
        SparkVersionError: one of them is not.
    """
    import pyspark

    from spark_connector.errors import SparkVersionError

    remedy = f"pip install 'pyspark~={PYSPARK_VERSION}.0'"
    if not pyspark.__version__.startswith(f"{PYSPARK_VERSION}."):
        what = f"PySpark {pyspark.__version__} is installed, this connector needs {PYSPARK_VERSION}"
        raise SparkVersionError(what, "Python environment", remedy)
    if not spark.version.startswith(f"{PYSPARK_VERSION}."):  # over Spark Connect another Spark may answer
        what = f"the session runs on Spark {spark.version}, this connector needs {PYSPARK_VERSION}"
        raise SparkVersionError(what, "Spark Connect server", f"start the server with Spark {PYSPARK_VERSION}")

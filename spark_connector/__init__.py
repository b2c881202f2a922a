"""The Spark data source ``dledger``: reads and writes replicated logs, in batches and as streams.

Usage::

    from spark_connector import register

    register(spark)
    spark.readStream.format("dledger").option("peers", peers).load()
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["PYSPARK_VERSION", "register"]

PYSPARK_VERSION: Final = "4.2"


def register(spark: SparkSession) -> None:
    """Makes ``format("dledger")`` known to the session.

    Raises:
        SparkVersionError: PySpark is not 4.2.
    """
    import pyspark

    from spark_connector.errors import SparkVersionError

    if not pyspark.__version__.startswith(f"{PYSPARK_VERSION}."):
        raise SparkVersionError(
            f"PySpark {pyspark.__version__} is installed, this connector needs {PYSPARK_VERSION}",
            "Python environment",
            f"pip install 'pyspark~={PYSPARK_VERSION}.0'",
        )
    from spark_connector.source import DLedgerDataSource

    spark.dataSource.register(DLedgerDataSource)

"""Check of the Spark version that this connector needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from dledger_core import SPARK_VERSION
from spark_connector.errors import SparkVersionError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_spark"]


def check_spark(spark: SparkSession) -> None:
    """Check the versions of the installed PySpark and of the Spark that runs the session.

    Raises:
        SparkVersionError: this connector does not support one of them.
    """
    import pyspark

    remedy = f"pip install 'pyspark~={SPARK_VERSION}.0'"
    if not pyspark.__version__.startswith(f"{SPARK_VERSION}."):
        what = f"PySpark {pyspark.__version__} is installed, this connector needs {SPARK_VERSION}"
        raise SparkVersionError(what, "", remedy)
    if not spark.version.startswith(f"{SPARK_VERSION}."):  # a Spark Connect server has a version of its own
        what = f"the session runs on Spark {spark.version}, this connector needs {SPARK_VERSION}"
        raise SparkVersionError(what, "", f"start the server with Spark {SPARK_VERSION}")

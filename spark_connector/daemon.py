"""PySpark's daemon, which forks the Python workers, with the connector loaded before it forks.

A worker that it forks imports neither Arrow nor the connector, which takes longer than most tasks of a stream: a
session of many small tasks takes a tenth less processor time. Spark starts it where the setting
``spark.python.daemon.module`` names this module and the package lies on Python's path when executors start; with
``--py-files`` it does not yet.
"""

from __future__ import annotations

import gc

from pyspark.daemon import manager

import spark_connector.reading.batch_reader
import spark_connector.reading.stream_reader
import spark_connector.source
import spark_connector.writing.stream_writer  # noqa: F401 - what workers import

__all__ = ["manager"]

if __name__ == "__main__":
    gc.freeze()  # what is loaded stays in pages that all workers share
    manager()

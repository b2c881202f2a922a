"""PySpark's daemon, which forks the Python workers, with the connector loaded before it forks.

A worker that it forks imports neither Arrow nor the connector, which takes longer than most tasks of a stream: a
session of many small tasks takes a tenth less processor time. Spark starts it where the setting
``spark.python.daemon.module`` names this module and the package lies on Python's path when executors start; with
``--py-files`` it does not yet.
"""

from __future__ import annotations

import gc
import sys
from importlib.machinery import PathFinder
from pathlib import Path

__all__ = ["manager", "without_zips"]


def without_zips(path: list[str]) -> list[str]:
    """Returns Python's path without Spark's own zips, if the installed PySpark is the one that they belong to.

    Spark puts them first, and they hold sources without bytecode, which each process would compile anew: half a second.
    """
    others = [place for place in path if not place.endswith(".zip")]
    found = PathFinder.find_spec("pyspark", others)
    if found is None or found.origin is None:
        return path
    zips = Path(found.origin).parent / "python" / "lib"
    return [place for place in path if Path(place).parent != zips]


sys.path[:] = without_zips(sys.path)

from pyspark.daemon import manager  # noqa: E402 - from where the path now says

import spark_connector.reading.batch_reader  # noqa: E402
import spark_connector.reading.stream_reader  # noqa: E402
import spark_connector.source  # noqa: E402
import spark_connector.writing.stream_writer  # noqa: E402, F401 - what workers import

if __name__ == "__main__":
    gc.freeze()  # what is loaded stays in pages that all workers share
    manager()

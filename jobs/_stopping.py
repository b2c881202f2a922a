"""Spark work that SIGTERM and Ctrl-C end cleanly.

An exception that a signal raises in the middle of a call into the JVM would leave Python's connection to it out of
step. So the work runs in a thread of its own, and the main thread waits for the work or the signal.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Event
from typing import TYPE_CHECKING, Final, TypeVar

from dledger_core.cli import say, stop_requests
from jobs._cli import StoppedError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["run_stoppable"]

_POLL_S: Final = 0.1

_Result = TypeVar("_Result")


def run_stoppable(spark: SparkSession, work: Callable[[], _Result], stopping: Event | None = None) -> _Result:
    """Run ``work``; on SIGTERM or Ctrl-C cancel its Spark jobs and raise StoppedError.

    Args:
        spark: the session that ``work`` uses.
        work: called in another thread. It must not go on after a failed Spark job.
        stopping: set on a signal, for a stream that runs no Spark job while it waits.
    """
    with stop_requests() as stop, ThreadPoolExecutor(1, "spark-job") as pool:
        future = pool.submit(work)
        while not wait([future], _POLL_S).done:
            if not stop.is_set():
                continue
            say("stopping")
            if stopping is not None:
                stopping.set()
            # A job that starts after the first call is cancelled by a later one.
            while not wait([future], _POLL_S).done:
                spark.sparkContext.cancelAllJobs()
            raise StoppedError
        return future.result()

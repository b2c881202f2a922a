"""Lets SIGTERM and Ctrl-C end a Spark job cleanly while it runs.

An exception that a signal raises in the middle of a call into the JVM leaves that connection out of step, and then the
session cannot even be stopped. So the work runs in a thread of its own, and the main thread waits for it or the signal.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Event
from typing import TYPE_CHECKING, Final, TypeVar

from jobs._cli import StoppedError, progress, stop_requests

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["run_stoppable"]

_POLL_S: Final = 0.1

_Result = TypeVar("_Result")


def run_stoppable(spark: SparkSession, work: Callable[[], _Result], stopping: Event | None = None) -> _Result:
    """Runs ``work``; on SIGTERM or Ctrl-C its Spark jobs are cancelled and StoppedError is raised.

    Args:
        spark: the session that ``work`` uses.
        work: what to do; called in another thread. It must not go on after a failed Spark job.
        stopping: set then, for what ``work`` does without Spark.
    """
    with stop_requests() as stop, ThreadPoolExecutor(1, "spark-job") as pool:
        future = pool.submit(work)
        while not wait([future], _POLL_S).done:
            if stop.is_set():
                progress("stopping")
                if stopping is not None:
                    stopping.set()
                _cancel(spark, future)
                raise StoppedError("stopped by a signal")
        return future.result()


def _cancel(spark: SparkSession, future: Future[_Result]) -> None:
    while not wait([future], _POLL_S).done:  # a job that starts after the first call is cancelled by a later one
        spark.sparkContext.cancelAllJobs()

"""The Spark session of a notebook, without the messages that Spark and Ivy print while they start."""

from __future__ import annotations

import atexit
import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import IO, TYPE_CHECKING

from spark_connector import register

from .._session import spark_session

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["spark_of"]


def spark_of(name: str) -> SparkSession:
    """Return the active session, or start one with Delta and ``format("dledger")``; it stops with this process.

    Args:
        name: of a new session's application.
    """
    from pyspark.sql import SparkSession

    active = SparkSession.getActiveSession()
    if active is None:
        active = _started(name)
    register(active)
    return active


def _started(name: str) -> SparkSession:
    stack = ExitStack()
    with tempfile.TemporaryFile() as output:
        try:
            with _stderr_to(output):
                spark = stack.enter_context(spark_session(name, announce=False))
        except BaseException:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace"))
            raise
    atexit.register(stack.close)
    return spark


@contextmanager
def _stderr_to(output: IO[bytes]) -> Iterator[None]:
    """Send what child processes write to stderr to a file; the JVM inherits it for its lifetime."""
    sys.stderr.flush()
    before = os.dup(2)
    os.dup2(output.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(before, 2)
        os.close(before)

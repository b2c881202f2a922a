"""The Spark settings that a job brings along, and which of Spark's loggers it quietens.

What the user gave always wins.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

__all__ = [
    "AT_START",
    "DELTA_EXTENSION",
    "JVM_OPTIONS",
    "LOG_LEVEL",
    "TOLD_TWICE",
    "VERBOSE",
    "defaults_for",
    "is_local",
]

DELTA_EXTENSION: Final = "io.delta.sql.DeltaSparkSessionExtension"
LOG_LEVEL: Final = "spark.log.level"
AT_START: Final = {"spark.ui.showConsoleProgress": "false"}
"""For a JVM that Python starts: Spark takes it for a shell and would show bars there."""
VERBOSE: Final = {LOG_LEVEL: "WARN"}

_EVERYWHERE: Final = {
    "spark.sql.extensions": DELTA_EXTENSION,
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.session.timeZone": "UTC",
    "spark.ui.enabled": "false",
    **AT_START,
    LOG_LEVEL: "ERROR",
}
# On one machine many small tasks cost more than they bring, and nobody else has to reach the driver.
_ONE_MACHINE: Final = {
    "spark.sql.shuffle.partitions": "4",
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    # The default one starts a program, ``readlink`` or ``chmod``, for each look at a file of a checkpoint: half of a
    # small micro-batch. On a local file system neither of them renames in one step without replacing.
    "spark.sql.streaming.checkpointFileManagerClass": (
        "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
    ),
}
_LATER: Final = 20
_TIER4: Final = {
    "InvocationThreshold": 5_000,
    "MinInvocationThreshold": 600,
    "CompileThreshold": 15_000,
    "BackEdgeThreshold": 40_000,
}
"""After how many calls, or turns of a loop, HotSpot's optimising compiler begins by default."""
JVM_OPTIONS: Final = " ".join(f"-XX:Tier4{name}={count * _LATER}" for name, count in _TIER4.items())
"""For a JVM that Python starts on one machine, and that lives for one job: optimising what plans this job took a third
of a core all the time. Loops over rows run often enough to be optimised all the same."""

TOLD_TWICE: Final = (
    "org.apache.spark.util.Utils",
    "org.apache.spark.executor.Executor",
    "org.apache.spark.scheduler.TaskSetManager",
    "org.apache.spark.sql.delta.files.DeltaFileFormatWriter",
    "org.apache.spark.sql.execution.datasources.FileFormatWriter",
    "org.apache.spark.sql.execution.datasources.v2",
    "org.apache.spark.sql.execution.streaming.runtime.MicroBatchExecution",
    "org.apache.spark.sql.execution.streaming.sources.ForeachBatchUserFuncException",
)
"""Loggers that write an exception with its stack trace and throw it on: the job itself reports it, in one line."""


def is_local(master: str) -> bool:
    """Whether driver and executors are one process: ``local``, ``local[4]``, but not ``local-cluster[…]``."""
    return master == "local" or master.startswith("local[")


def defaults_for(master: str, given: Mapping[str, str], *, started_here: bool = False) -> dict[str, str]:
    """Returns the settings to add for a master; none that was given.

    Args:
        master: Spark's, as it was found at last: an argument, the environment or ``spark-defaults.conf``.
        given: what the user set.
        started_here: this process has started the JVM, and not spark-submit.
    """
    wanted = dict(_EVERYWHERE)
    if is_local(master):
        wanted |= _ONE_MACHINE
    return {key: value for key, value in wanted.items() if key not in given}

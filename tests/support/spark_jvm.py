"""The JVM of a local Spark session, by Spark's SQL: its process, its collector."""

from __future__ import annotations

from typing import Any


def jvm_pid(spark: Any) -> int:
    """Return the process id of the JVM, which with a local master runs the tasks too."""
    return int(_call(spark, "java.lang.ProcessHandle", "current"))


def collect_garbage(spark: Any) -> None:
    """Run the JVM's garbage collector."""
    _call(spark, "java.lang.System", "gc")


def _call(spark: Any, java_class: str, method: str) -> str:
    return str(spark.sql(f"SELECT java_method('{java_class}', '{method}')").first()[0])

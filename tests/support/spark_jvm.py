"""The JVMs of Spark in tests: options for a short life; process and collector of a session's JVM, by SQL."""

from __future__ import annotations

from pathlib import Path
from typing import Any

_CLASSES = Path(__file__).resolve().parents[2] / ".venv" / "spark-classes.jsa"
"""Made by ``.ci/spark-classes``."""


def short_lived() -> list[str]:
    """Return options for a JVM that lives for seconds or minutes.

    With them a session that writes a Delta table twice takes 15 seconds of processor time instead of 38: half of these
    were the second compiler's, a tenth the loading of classes. With one compiler the JVM keeps 48 MB of compiled code
    only: a session of a run of tests fills them in minutes, and then removes and compiles methods all the time.
    """
    options = ["-XX:TieredStopAtLevel=1", "-XX:+UseSerialGC", "-XX:ReservedCodeCacheSize=240m"]
    if _CLASSES.exists():
        options += [f"-XX:SharedArchiveFile={_CLASSES}", "-Xlog:disable"]  # no warning about an archive of another Java
    return options


def short_lived_environment() -> dict[str, str]:
    """Return these options for the JVMs that Spark's scripts start, also below other processes."""
    return dict.fromkeys(("SPARK_SUBMIT_OPTS", "SPARK_DAEMON_JAVA_OPTS"), " ".join(short_lived()))


def jvm_pid(spark: Any) -> int:
    """Return the process id of the JVM, which with a local master runs the tasks too."""
    return int(_call(spark, "java.lang.ProcessHandle", "current"))


def collect_garbage(spark: Any) -> None:
    """Run the JVM's garbage collector."""
    _call(spark, "java.lang.System", "gc")


def _call(spark: Any, java_class: str, method: str) -> str:
    return str(spark.sql(f"SELECT java_method('{java_class}', '{method}')").first()[0])

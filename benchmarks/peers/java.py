"""Loads that are written in Java."""

from __future__ import annotations

import subprocess
from pathlib import Path

from benchmarks.peers import SOURCES, NotRunError
from benchmarks.spark_table.brokers import java


def compiled(name: str, jars: Path, directory: Path) -> Path:
    """Return the directory of the classes of a load.

    Raises:
        MissingError: there is no Java.
        NotRunError: there is no compiler, or it fails.
    """
    classes = directory / "classes"
    command = [java("javac"), "-cp", f"{jars}/*", "-d", classes, SOURCES / "Load.java", SOURCES / f"{name}.java"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise NotRunError("a Java without javac is not enough") from None
    if done.returncode:
        raise NotRunError(f"javac failed: {done.stderr[:300]}")
    return classes

"""Versions of Spark and Java that are tested together, the search for an installed Java, requirements of extras."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from dledger_core.errors import ConfigError

__all__ = [
    "DELTA_SPARK_VERSIONS",
    "DELTA_VERSION",
    "JAVA_VERSIONS",
    "SPARK_VERSION",
    "SPARK_VERSIONS",
    "SYSTEM_JAVA",
    "find_java",
    "install_command",
    "java_version",
]

SPARK_VERSION: Final = "4.2"
"""Major and minor version of PySpark and of Spark's servers that ``DELTA_VERSION`` needs: the default pair."""
SPARK_VERSIONS: Final = ("4.1", "4.2", "4.3")
"""Major and minor versions of PySpark and of Spark's servers on which source, sink and lag work."""
DELTA_VERSION: Final = "4.4.0"
"""Delta's version, of its package for Python and of its jar."""
DELTA_SPARK_VERSIONS: Final = ("4.1", "4.2")
"""Those of ``SPARK_VERSIONS`` for which Delta has a jar, and which its package for Python allows."""
JAVA_VERSIONS: Final = (17, 21)
"""Major versions of Java."""
SYSTEM_JAVA: Final = Path("/usr/lib/jvm")


def install_command(extra: str) -> str:
    """Return the command that installs what an extra of this package requires.

    It names the packages: ``dledger[EXTRA]`` works only where an index has this package.
    """
    return " ".join(["pip install", *(f"'{each}'" for each in _requirements(extra))])


def _requirements(extra: str) -> Iterator[str]:
    for line in importlib.metadata.requires("dledger") or ():
        requirement, _, marker = line.partition(";")
        if re.search(rf"""extra == ["']{extra}["']""", marker):
            own = re.fullmatch(r"dledger\[([\w,-]+)\]", requirement.strip())
            if own is None:
                yield requirement.strip()
            for name in own[1].split(",") if own else ():
                yield from _requirements(name)


def find_java() -> Path:
    """Return the home of a Java 17 or 21: JAVA_HOME, then ``java`` on PATH, then the homes below ``SYSTEM_JAVA``.

    Raises:
        ConfigError: no supported Java is installed; the values name the installed ones.
    """
    found: dict[str, Any] = {}
    for home in _java_homes():
        version = java_version(home)
        if version in JAVA_VERSIONS:
            return home
        if version is not None:
            found[str(home)] = version
    raise ConfigError(
        "no Java 17 or 21 found in JAVA_HOME, PATH and /usr/lib/jvm",
        "",
        "install one (Debian, Ubuntu: apt-get install openjdk-17-jre-headless) or point JAVA_HOME at it",
        found,
    )


def java_version(home: Path) -> int | None:
    """Return the major version of the Java at ``home``, or None if none runs there."""
    try:
        done = subprocess.run(
            [home / "bin" / "java", "-version"], capture_output=True, text=True, timeout=30, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    text = done.stderr.partition('version "')[2]
    major = text.removeprefix("1.").partition('"')[0].partition(".")[0]
    return int(major) if major.isdigit() else None


def _java_homes() -> Iterator[Path]:
    if os.environ.get("JAVA_HOME"):
        yield Path(os.environ["JAVA_HOME"])
    on_path = shutil.which("java")
    if on_path is not None:
        yield Path(on_path).resolve().parent.parent
    yield from sorted(SYSTEM_JAVA.glob("*"))

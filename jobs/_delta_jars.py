"""Delta's jars: fetched by Ivy at Spark's first start, and named by their recorded paths at later ones.

``spark.jars.packages`` runs Ivy at each start of Spark, which takes seconds; ``spark.jars`` does not. If the caller or
the user names jars too, Spark must merge them with Delta's, so each start fetches then.
"""

from __future__ import annotations

import fcntl
import os
import re
import shlex
import time
import zipfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Final
from uuid import uuid4

from dledger_core import ConfigError
from dledger_core.cli import say
from spark_connector import local_path

from ._cli import StoppedError

_POLL_S: Final = 0.1
DELTA_JAR: Final = "delta-spark"
"""In the name of the jar, without which the others are of no use."""
_MISSING: Final = re.compile(r"(?:unresolved dependency: |download failed: )([\w.#;\-]+)")
_NAMES_JARS: Final = re.compile(
    r"spark\.jars(?:\.packages|\.excludes)?[\s=:]|--(?:jars|packages|exclude-packages|properties-file)\b"
)
_PACKAGES: Final = re.compile(r"^[ \t]*spark\.jars\.packages[ \t]*[=: \t][ \t]*(\S.*)$", re.MULTILINE)
_ACCESS_ERROR: Final = re.compile(r"Server access error at url .*")


def fetch_failure(messages: str) -> ConfigError | None:
    """Return the error if the messages name jars that Ivy could not fetch."""
    missing = dict.fromkeys(_MISSING.findall(messages))
    if not missing:
        return None
    causes = _ACCESS_ERROR.findall(messages)
    return ConfigError(
        f"Spark's first start cannot fetch {', '.join(missing)}",
        "Maven's repositories",
        "run it once with a network, or name a repository: export "
        "PYSPARK_SUBMIT_ARGS='--repositories https://HOST/maven2 pyspark-shell'",
        {"cause": causes[0]} if causes else {},
    )


@contextmanager
def only_one_fetches(record: Path, stop: Event, *, announce: bool) -> Iterator[None]:
    """Keep other jobs of this user from fetching the same jars until the block ends: Ivy's cache has no lock.

    Raises:
        StoppedError: a signal arrived meanwhile.
    """
    with ExitStack() as stack:
        with suppress(OSError):  # a home that cannot be written, or a file system without locks
            record.parent.mkdir(parents=True, exist_ok=True)
            file = stack.enter_context(record.with_suffix(".lock").open("a"))
            waits = False
            while not _locked(file.fileno()):
                if stop.is_set():
                    raise StoppedError
                if announce and not waits:
                    say("waiting for another job, which fetches Delta's jars")
                waits = True
                time.sleep(_POLL_S)
        yield


def _locked(descriptor: int) -> bool:
    """Lock a file if no other process has locked it; raise OSError where there are no locks."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def has_own_jars(settings: Mapping[str, str]) -> bool:
    """Whether the caller or the user names jars or packages, which Spark must merge with Delta's."""
    if settings.get("spark.jars") or settings.get("spark.jars.packages"):
        return True
    return any(_NAMES_JARS.search(text) for text in (os.environ.get("PYSPARK_SUBMIT_ARGS", ""), _spark_defaults()))


def own_packages(settings: Mapping[str, str]) -> list[str]:
    """Return the packages of the caller, or of the user's file: the session's setting takes the place of that one."""
    found = settings.get("spark.jars.packages") or "".join(_PACKAGES.findall(_spark_defaults())[-1:])
    return [name.strip() for name in found.split(",") if name.strip()]


def _spark_defaults() -> str:
    """Return the content of the user's ``spark-defaults.conf``; empty if there is none."""
    import pyspark

    home = os.environ.get("SPARK_HOME") or Path(pyspark.__file__).parent
    directory = Path(os.environ.get("SPARK_CONF_DIR") or Path(home) / "conf")
    try:
        return (directory / "spark-defaults.conf").read_text(errors="replace")
    except OSError:
        return ""


def jars_record() -> Path:
    """Return the file with the paths of the jars of these versions of Spark and Delta."""
    import pyspark

    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return cache / "dledger" / f"delta-{metadata.version('delta-spark')}-spark-{pyspark.__version__}.jars"


def recorded_jars(record: Path | None) -> str:
    """Return the ``spark.jars`` that an earlier start recorded; empty without a record, or if a jar was deleted.

    Raises:
        ConfigError: a jar is not whole.
    """
    if record is None:
        return ""
    try:
        jars = record.read_text(encoding="utf-8").strip()
        are_there = all(path is not None and path.is_file() for path in map(local_path, jars.split(",")))
    except (OSError, ValueError):  # no record, or one that is damaged or belongs to another user
        return ""
    if not are_there or DELTA_JAR not in jars:
        return ""
    check_jars(jars)
    return jars


def check_jars(jars: str) -> None:
    """Raise ConfigError for a jar of ``spark.jars`` that is not whole: Ivy keeps it, and Spark starts without it."""
    for path in map(local_path, jars.split(",")):
        if path is not None and path.is_file() and not zipfile.is_zipfile(path):
            raise ConfigError(
                "a jar is not whole", str(path), f"rm {shlex.quote(str(path))}; the next start fetches it"
            )


def record_jars(record: Path, jars: str) -> None:
    """Keep the paths of jars that Ivy has fetched, if Delta's is one of them."""
    if DELTA_JAR in jars:
        with suppress(OSError):  # a home that cannot be written: the next start fetches them again
            record.parent.mkdir(parents=True, exist_ok=True)
            made = record.with_name(f"{record.name}.{uuid4().hex}")  # another job may start now
            made.write_text(jars, encoding="utf-8")
            made.replace(record)

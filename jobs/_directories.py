"""Checks of the directories a job is told to write to, before a JVM starts and before anything is written.

Of what has a scheme (``s3a://…``, ``hdfs://…``) only the names are compared; the rest is left to Spark.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Mapping
from itertools import combinations, product
from pathlib import Path, PurePath, PurePosixPath
from typing import Final

from dledger_core import ConfigError
from spark_connector import local_path

__all__ = [
    "check_apart",
    "check_audit_directory",
    "check_checkpoint",
    "check_file",
    "check_table",
    "check_writable",
]

_CHECKPOINT: Final = {"metadata", "offsets"}
_AUDIT: Final = {"audit_runs", "audit_ranges", "audit_findings"}


def check_table(directory: str, option: str = "--table") -> str:
    """Return the directory; refuse one that cannot be written or contains something other than a Delta table.

    Raises:
        ConfigError: says which and why.
    """
    found = _names(directory, option)
    if found and "_delta_log" not in found:
        raise _foreign(directory, "holds files and is no Delta table", option)
    return directory


def check_checkpoint(directory: str) -> str:
    """Return the ``--checkpoint``; refuse one that cannot be written or contains something else.

    Raises:
        ConfigError: says which and why.
    """
    found = _names(directory, "--checkpoint")
    if "_delta_log" in found or (found and not _CHECKPOINT & found):
        raise _foreign(directory, "holds files and is no checkpoint", "--checkpoint")
    return directory


def check_audit_directory(directory: str) -> None:
    """Reject an audit's ``--table`` that cannot be written or holds other things than its tables.

    Raises:
        ConfigError: says which and why.
    """
    found = _names(directory, "--table")
    if found and not _AUDIT & found:
        raise _foreign(directory, "holds files and no tables of an audit", "--table")


def check_apart(written: Mapping[str, str | None], read: Mapping[str, str | None] | None = None) -> None:
    """Reject to write to a directory that is, holds or lies in another one of the job's directories.

    Args:
        written: directories that the job writes to, by option; None where it was not given.
        read: directories that it reads.

    Raises:
        ConfigError: names both.
    """
    places = {option: _place(directory) for option, directory in written.items() if directory}
    others = {option: _place(directory) for option, directory in (read or {}).items() if directory}
    pairs = [*combinations(places.items(), 2), *product(places.items(), others.items())]
    for (option, place), (other_option, other) in pairs:
        if place.is_relative_to(other) or other.is_relative_to(place):
            outer, inner = sorted((place, other))
            what = f"{place} is given twice" if place == other else f"{inner} lies in {outer}"
            remedy = "name two directories, neither inside the other"
            raise ConfigError(what, f"{option}, {other_option}", remedy)


def check_file(path: str, option: str) -> str:
    """Return the path; refuse a file that cannot be written.

    Raises:
        ConfigError: says which.
    """
    parent = Path(path).absolute().parent
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        what = f"{path} cannot be written: {error.strerror or error}"
        raise ConfigError(what, option, "name a file in a directory you may write to") from None
    return path


def check_writable(directory: str, option: str) -> None:
    """Reject a directory that is a file or cannot be written; it may hold anything.

    Raises:
        ConfigError: says which and why.
    """
    _names(directory, option)


def _place(directory: str) -> PurePath:
    """What tells whether two directories are the same: symbolic links are followed."""
    path = local_path(directory)
    return PurePosixPath(directory) if path is None else path.resolve()


def _foreign(directory: str, what: str, option: str) -> ConfigError:
    return ConfigError(f"{directory} {what}", option, "name a new or empty directory")


def _names(directory: str, option: str) -> set[str]:
    """Return the names in the directory, none if it is absent; raises ConfigError if it cannot be written."""
    path = local_path(directory)
    if path is None:
        return set()
    try:
        existing = next(folder for folder in (path, *path.parents) if folder.exists())
        if not existing.is_dir():
            raise ConfigError(f"{existing} is a file", option, "name a directory")
        Path(tempfile.mkdtemp(prefix=".dledger-", dir=existing)).rmdir()  # permissions alone do not tell the truth
        return {entry.name for entry in path.iterdir()} if existing == path else set()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{directory} cannot be written: {reason}", option, "name a directory you may write to"
        ) from None

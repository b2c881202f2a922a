"""Checks of the directories that a job writes to, before a JVM starts and before anything is written.

Of locations with a scheme (``s3a://…``, ``hdfs://…``) only the names are compared; Spark checks the rest.
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
    """Return the directory; reject one that cannot be written or contains other files than a Delta table.

    Raises:
        ConfigError: names the directory and the reason.
    """
    found = _names(directory, option)
    if found and "_delta_log" not in found:
        raise _used(directory, "contains files other than a Delta table", option)
    return directory


def check_checkpoint(directory: str) -> str:
    """Return the ``--checkpoint``; reject one that cannot be written or contains other files.

    Raises:
        ConfigError: names the directory and the reason.
    """
    found = _names(directory, "--checkpoint")
    if "_delta_log" in found or (found and not _CHECKPOINT & found):
        raise _used(directory, "contains files other than a checkpoint", "--checkpoint")
    return directory


def check_audit_directory(directory: str) -> None:
    """Reject an audit's ``--table`` that cannot be written or contains other files than its tables.

    Raises:
        ConfigError: names the directory and the reason.
    """
    found = _names(directory, "--table")
    if found and not _AUDIT & found:
        raise _used(directory, "contains files other than the tables of an audit", "--table")


def check_apart(written: Mapping[str, str | None], read: Mapping[str, str | None] | None = None) -> None:
    """Reject a target that equals, contains or is inside another directory of the job.

    Args:
        written: directories that the job writes to, by option; None if not given.
        read: directories that the job reads.

    Raises:
        ConfigError: names both directories and options.
    """
    paths = {option: _resolved(directory) for option, directory in written.items() if directory}
    others = {option: _resolved(directory) for option, directory in (read or {}).items() if directory}
    pairs = [*combinations(paths.items(), 2), *product(paths.items(), others.items())]
    for (option, path), (other_option, other) in pairs:
        if path.is_relative_to(other) or other.is_relative_to(path):
            outer, inner = sorted((path, other))
            problem = f"are the same directory {path}" if path == other else f"overlap: {inner} is inside {outer}"
            remedy = "name two directories, neither inside the other"
            raise ConfigError(f"{option} and {other_option} {problem}", "", remedy)


def check_file(path: str, option: str) -> str:
    """Return the path; reject a file that cannot be written.

    Raises:
        ConfigError: names the file.
    """
    parent = Path(path).absolute().parent
    try:
        if Path(path).is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        with tempfile.TemporaryFile(dir=parent):
            pass
    except OSError as error:
        what = f"{option} {path} cannot be written: {error.strerror or error}"
        raise ConfigError(what, "", "name a file in a writable directory") from None
    return path


def check_writable(directory: str, option: str) -> None:
    """Reject a directory that is a file or cannot be written; it may have any content.

    Raises:
        ConfigError: names the directory and the reason.
    """
    _names(directory, option)


def _resolved(directory: str) -> PurePath:
    """Return the path without symbolic links, so that equal directories have equal paths."""
    path = local_path(directory)
    return PurePosixPath(directory) if path is None else path.resolve()


def _used(directory: str, what: str, option: str) -> ConfigError:
    return ConfigError(f"{option} {directory} {what}", "", "name a new or empty directory")


def _names(directory: str, option: str) -> set[str]:
    """Return the names in the directory, none if it is missing; raise ConfigError if it cannot be written."""
    path = local_path(directory)
    if path is None:
        return set()
    try:
        existing = next(parent for parent in (path, *path.parents) if parent.exists())
        if not existing.is_dir():
            raise ConfigError(f"{option} {existing} is a file", "", "name a directory")
        Path(tempfile.mkdtemp(prefix=".dledger-", dir=existing)).rmdir()  # permission bits alone are not conclusive
        return {entry.name for entry in path.iterdir()} if existing == path else set()
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"{option} {directory} cannot be written: {reason}", "", "name a writable directory"
        ) from None

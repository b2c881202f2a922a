"""Checks of the directories a job is told to write to, before a JVM starts and before anything is written.

Only local paths can be checked; what has a scheme (``s3a://…``, ``hdfs://…``) is left to Spark.
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Final

from dledger_core.errors import ConfigError

__all__ = ["check_audit_directory", "check_checkpoint", "check_table", "local_path"]

_SCHEME: Final = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:/")
_CHECKPOINT: Final = {"metadata", "offsets"}
_AUDIT: Final = {"audit_runs", "audit_ranges", "audit_findings"}


def local_path(directory: str) -> Path | None:
    """Returns the absolute path, None if it has a scheme."""
    return None if _SCHEME.match(directory) else Path(directory).absolute()


def check_table(directory: str) -> None:
    """Refuses a ``--table`` that cannot be written or holds something other than a Delta table.

    Raises:
        ConfigError: says which and why.
    """
    found = _names(directory, "--table")
    if found and "_delta_log" not in found:
        raise _foreign(directory, "holds files and is no Delta table", "--table")


def check_checkpoint(directory: str) -> None:
    """Refuses a ``--checkpoint`` that cannot be written or holds something other than a checkpoint.

    Raises:
        ConfigError: says which and why.
    """
    found = _names(directory, "--checkpoint")
    if "_delta_log" in found or (found and not _CHECKPOINT & found):
        raise _foreign(directory, "holds files and is no checkpoint", "--checkpoint")


def check_audit_directory(directory: str) -> None:
    """Refuses an audit's ``--table`` that cannot be written or holds other things than its tables.

    Raises:
        ConfigError: says which and why.
    """
    found = _names(directory, "--table")
    if found and not _AUDIT & found:
        raise _foreign(directory, "holds files and no tables of an audit", "--table")


def _foreign(directory: str, what: str, option: str) -> ConfigError:
    return ConfigError(f"{directory} {what}", option, "name a new or empty directory")


def _names(directory: str, option: str) -> set[str]:
    """Returns the names in the directory, none if it is absent; raises ConfigError if it cannot be written."""
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

"""Permissions of a file with a secret: a token, or the key of a certificate."""

from __future__ import annotations

import shlex
import stat
from pathlib import Path

from dledger_core.errors import ConfigError

__all__ = ["check_private", "readers_of"]


def readers_of(path: Path) -> str:
    """Return which users other than its owner can read a file, empty if none can; raise OSError.

    The group may read a file of root: so a service gets its secrets, for example from Kubernetes or systemd.
    """
    status = path.stat()
    if status.st_mode & stat.S_IROTH:
        return "every user"
    return "its group" if status.st_mode & stat.S_IRGRP and status.st_uid != 0 else ""


def check_private(path: Path) -> None:
    """Raise ConfigError if others can read a file with a secret. A missing file is reported where it is used."""
    try:
        readers = readers_of(path)
    except OSError:
        return
    if readers:
        raise ConfigError(f"{readers} can read a file with a secret", str(path), f"chmod 600 {shlex.quote(str(path))}")

"""Is somebody writing there? Locks are only looked at, never taken for longer than the look."""

from __future__ import annotations

import fcntl
import os
import struct
import sys
from pathlib import Path
from typing import Final

from dledger_core.errors import StoreBusyError
from dledger_core.storage.files.layout import Layout

__all__ = ["check_broker_idle", "check_node_idle"]

_FLOCK: Final = "hhqqi"
"""Linux's struct flock: type, whence, start, length, pid."""


def check_node_idle(layout: Layout) -> None:
    """Raises StoreBusyError if a node of ours has the store open."""
    try:
        fd = os.open(layout.lock, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(fd, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        raise StoreBusyError("a node has the store open", str(layout.root), "stop the node first") from None
    finally:
        os.close(fd)


def check_broker_idle(directory: Path) -> None:
    """Raises StoreBusyError if a RocketMQ broker runs on the directory that holds its store or CommitLog.

    A broker locks the first byte of its file ``lock`` while it runs; Linux tells without taking a lock.
    """
    path = directory / "lock"
    if sys.platform != "linux" or not path.is_file():
        return
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        asked = struct.pack(_FLOCK, fcntl.F_RDLCK, os.SEEK_SET, 0, 1, 0)
        kind, _, _, _, pid = struct.unpack(_FLOCK, fcntl.fcntl(fd, fcntl.F_GETLK, asked))
    except OSError:  # a file system without such locks
        return
    finally:
        os.close(fd)
    if kind != fcntl.F_UNLCK:
        raise StoreBusyError(
            "a RocketMQ broker runs on this store", str(directory), "stop the broker first", {"pid": pid}
        )

"""Unpacks the golden archives, on every Python we support."""

from __future__ import annotations

import tarfile
from collections.abc import Iterable
from pathlib import Path

__all__ = ["unpack"]


def unpack(archive: tarfile.TarFile, directory: Path, members: Iterable[tarfile.TarInfo] | None = None) -> None:
    """Extracts members (all by default); Python 3.11.0 to 3.11.3 do not have extraction filters yet."""
    if hasattr(tarfile, "data_filter"):
        archive.extractall(directory, members, filter="data")
    else:
        archive.extractall(directory, members)

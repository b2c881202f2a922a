"""Proves that code does not even ask to write into a directory, by Python's own audit events."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CHANGES = {
    "os.rename",
    "os.remove",
    "os.rmdir",
    "os.mkdir",
    "os.truncate",
    "os.utime",
    "os.link",
    "os.symlink",
    "os.chmod",
}
_watched: list[tuple[str, list[str]]] = []


def _hook(event: str, arguments: tuple[Any, ...]) -> None:
    if not _watched or (event != "open" and event not in _CHANGES):
        return
    paths = arguments[:2] if event in ("os.rename", "os.link") else arguments[:1]
    flags = arguments[2] if event == "open" else _WRITING
    for path in paths:
        if isinstance(path, (str, os.PathLike)) and flags & _WRITING:
            absolute = os.path.abspath(path)
            for directory, found in _watched:
                if absolute == directory or absolute.startswith(directory + os.sep):
                    found.append(f"{event} {absolute}")


@cache
def _install() -> None:
    sys.addaudithook(_hook)  # an audit hook cannot be removed


@contextmanager
def only_reading(directory: Path) -> Iterator[None]:
    """Fails if anything below ``directory`` was opened for writing, made, renamed or removed, even without effect."""
    _install()
    found: list[str] = []
    _watched.append((os.path.abspath(directory), found))
    try:
        yield
    finally:
        _watched.pop()
    assert not found, found

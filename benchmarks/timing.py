"""Steps that the benchmarks share."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path


def seconds(work: Callable[[], object]) -> float:
    """Return how long ``work`` takes."""
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def read_all(directory: Path) -> None:
    """Read all files below a directory, so that they are in the page cache."""
    for path in sorted(directory.rglob("*")):
        if path.is_file():
            with path.open("rb") as file:
                while file.read(4 << 20):
                    pass

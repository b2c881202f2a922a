"""The error of a target, and its limits: memory by tracemalloc, work by counting, never by the clock."""

from __future__ import annotations

import contextlib
import tracemalloc
from collections.abc import Callable, Iterator


class Finding(AssertionError):  # noqa: N818 - as in a report of findings
    """A bug of the program: it crashed, did not end, took too much memory, or lost data silently."""


def expect(holds: bool, message: str, **values: object) -> None:
    """Raise Finding unless ``holds``."""
    if not holds:
        shown = " ".join(f"{name}={value!r:.300}" for name, value in values.items())
        raise Finding(f"{message} ({shown})" if shown else message)


_unmeasured: list[bool] = []


@contextlib.contextmanager
def unmeasured() -> Iterator[None]:
    """Switch the memory limits off."""
    _unmeasured.append(True)
    try:
        yield
    finally:
        _unmeasured.pop()


@contextlib.contextmanager
def memory_below(limit: int | Callable[[], int]) -> Iterator[None]:
    """Raise Finding if the block takes more than ``limit`` bytes at its peak; memory of numpy and msgpack counts.

    A limit that depends on what the block does is a function, asked at its end.
    """
    if _unmeasured or tracemalloc.is_tracing():  # a block inside a block: the outer limit applies
        yield
        return
    tracemalloc.start(1)
    try:
        yield
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    limit = limit() if callable(limit) else limit
    expect(peak <= limit, "more memory than the limit", peak=peak, limit=limit)

"""SIGTERM unwinds a command like Ctrl-C, so that whoever stops us also gets the cleaning up.

Python drops what a signal's handler raises inside a destructor or a weak reference's callback, and imports have such
callbacks. So what runs for long asks before it begins whether a signal was lost.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

__all__ = ["is_terminated", "termination_unwinds"]

_came: list[int] = []


def is_terminated() -> bool:
    """Whether SIGTERM came since ``termination_unwinds`` began."""
    return bool(_came)


@contextmanager
def termination_unwinds() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt. For the main thread."""
    _came.clear()
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    _came.append(number)
    raise KeyboardInterrupt

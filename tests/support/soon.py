"""Wait for a change in another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def soon(condition: Callable[[], T], timeout_s: float = 120.0, *, every_s: float = 0.02) -> T:
    """Return the value of ``condition`` once it is true; fail the test after ``timeout_s``."""
    value = awaited(condition, timeout_s, every_s=every_s)
    assert value, "the condition stayed false"
    return value


def awaited(condition: Callable[[], T], timeout_s: float, *, every_s: float = 0.02) -> T:
    """Return the value of ``condition`` once it is true; after ``timeout_s`` what it is then."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()) and time.monotonic() < deadline:
        time.sleep(every_s)
    return value

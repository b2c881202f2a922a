"""Wait for a change in another process."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any


def soon(condition: Callable[[], Any], timeout_s: float = 120.0, *, every_s: float = 0.02) -> Any:
    """Return the value of ``condition`` once it is true; fail the test after ``timeout_s``."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "the condition stayed false"
        time.sleep(every_s)
    return value

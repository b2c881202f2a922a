"""Waiting for what another process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

__all__ = ["soon"]


def soon(condition: Callable[[], Any], timeout_s: float = 120.0, *, every_s: float = 0.02) -> Any:
    """Returns what ``condition`` says as soon as that is true; fails the test where it never is."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "this never became true"
        time.sleep(every_s)
    return value

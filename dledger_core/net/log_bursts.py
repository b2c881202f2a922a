"""A limit on log lines that a stranger can cause: a port that anyone can reach must not fill the disk with its log."""

from __future__ import annotations

import logging
import time
from typing import Final

LINES_MAX: Final = 50
"""Lines of one kind in one period."""
PERIOD_S: Final = 10.0


class BurstFilter(logging.Filter):
    """Lets a number of lines of each kind pass per period, and reports with the next one how many it left out.

    A kind is a message before its arguments are filled in, so what a stranger sends makes no new kinds.
    """

    def __init__(self, lines_max: int = LINES_MAX, period_s: float = PERIOD_S) -> None:
        super().__init__()
        self._lines_max = lines_max
        self._period_s = period_s
        self._periods: dict[str, tuple[float, int]] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        """Return whether to log the line."""
        now, kind = time.monotonic(), str(record.msg)
        began, count = self._periods.get(kind, (now, 0))
        left_out = count - self._lines_max
        if now - began >= self._period_s:
            self._periods[kind] = now, 1
            if left_out > 0:
                record.msg = f"{kind} ({left_out} more like this were not logged)"
            return True
        self._periods[kind] = began, count + 1
        return count < self._lines_max

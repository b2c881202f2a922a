"""How an idle stream waits: at one server per group, and all groups together ask only so often."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Final

from spark_connector.reading.logs import Bounds, Log

__all__ = ["GrowthWaiter"]

_THREADS_MAX: Final = 256
_REQUEST_MS_MAX: Final = 30_000
"""A server waits no longer."""


class GrowthWaiter:
    """Waits until one of several logs grows.

    A request of one group lasts as many timeouts as there are groups: so one ends in each timeout, however many
    there are, and each is answered at once when its log grows. What has not ended when ``wait`` returns counts for
    the next call.

    Args:
        logs: the logs by group; may grow.
    """

    def __init__(self, logs: Mapping[str, Log]) -> None:
        self._logs = logs
        self._threads: ThreadPoolExecutor | None = None
        self._waits: dict[str, Future[bool]] = {}

    def wait(self, known: Mapping[str, Bounds], timeout_ms: int) -> bool:
        """Waits up to ``timeout_ms`` for a log to grow; returns whether one may differ from what is known."""
        if not known:
            time.sleep(timeout_ms / 1000)
            return False
        if len(known) == 1 and not self._waits:
            [(group, bounds)] = known.items()
            return self._logs[group].wait(bounds, timeout_ms)
        deadline = time.monotonic() + timeout_ms / 1000
        grown = False
        while not grown and (left := deadline - time.monotonic()) > 0:
            self._ask(known, min(timeout_ms * len(known), _REQUEST_MS_MAX))
            done, _ = wait(self._waits.values(), left, FIRST_COMPLETED)
            grown = any(future.result() for future in done)
            self._waits = {group: future for group, future in self._waits.items() if future not in done}
        return grown

    def _ask(self, known: Mapping[str, Bounds], request_ms: int) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS_MAX, "dledger-wait")
        for group in set(known) - set(self._waits):
            self._waits[group] = self._threads.submit(self._logs[group].wait, known[group], request_ms)

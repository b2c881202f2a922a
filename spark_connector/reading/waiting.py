"""How an idle stream waits: however many groups it reads, all together ask only so often."""

from __future__ import annotations

import time
from collections.abc import Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import Final

from dledger_core import LogBounds
from spark_connector.reading.logs import Log, ServerLog

__all__ = ["EntryWaiter"]

_THREADS_MAX: Final = 256
_LOOK_MS_MAX: Final = 30_000


class EntryWaiter:
    """Waits until one of several logs grows.

    Our servers take one request for all groups. Others are looked at group by group: a look lasts as many timeouts as
    there are groups, so one ends in each timeout, however many there are. What has not ended when ``wait`` returns
    counts for the next call.

    Args:
        logs: the logs by group; may grow.
    """

    def __init__(self, logs: Mapping[str, Log]) -> None:
        self._logs = logs
        self._threads: ThreadPoolExecutor | None = None
        self._waits: dict[str, Future[bool]] = {}

    def wait(self, known: Mapping[str, LogBounds], timeout_ms: int) -> bool:
        """Waits up to ``timeout_ms`` for a log to grow; returns whether one may differ from what is known."""
        if not known:
            time.sleep(timeout_ms / 1000)
            return False
        group = next(iter(known))
        log = self._logs[group]
        if isinstance(log, ServerLog):
            return log.wait_any(known, timeout_ms)
        if len(known) == 1 and not self._waits:
            return log.wait(known[group], timeout_ms)
        deadline = time.monotonic() + timeout_ms / 1000
        grown = False
        while not grown and (left := deadline - time.monotonic()) > 0:
            self._look(known, min(timeout_ms * len(known), _LOOK_MS_MAX))
            done, _ = wait(self._waits.values(), left, FIRST_COMPLETED)
            grown = any(future.result() for future in done)
            self._waits = {group: future for group, future in self._waits.items() if future not in done}
        return grown

    def _look(self, known: Mapping[str, LogBounds], look_ms: int) -> None:
        if self._threads is None:
            self._threads = ThreadPoolExecutor(_THREADS_MAX, "dledger-wait")
        for group in set(known) - set(self._waits):
            self._waits[group] = self._threads.submit(self._logs[group].wait, known[group], look_ms)

"""Pins: planned entries are protected against retention until they are read.

Every running node keeps a pin for a limited time, in memory. A node that restarts has lost it, so retention can still
delete planned entries, which readers detect as data loss. Readers renew their pins; a pin that is not renewed expires.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from typing import Final

from dledger_core import DLedgerError
from spark_connector.reading.logs import Log

__all__ = ["Pin"]

_log = logging.getLogger(__name__)
_RENEWALS: Final = 3
"""Number of renewals within the duration of a pin."""


class Pin:
    """The pins of one reader, one per log. Not thread-safe.

    Args:
        duration_ms: duration of a pin; 0 = make no pins.
        pinned_at: epoch seconds at which the driver pinned the entries of this reader, with the same duration.
        clock: epoch seconds.
    """

    def __init__(self, duration_ms: int, pinned_at: float = 0.0, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._duration_ms = duration_ms
        self._name = f"spark-{uuid.uuid4().hex}"
        self._pinned_at = pinned_at
        self._renewed: dict[str, float] = {}

    def set(self, log: Log, start: int) -> None:
        """Pin entries from ``start`` on, and no longer those before it."""
        if not self._duration_ms:
            return
        self._renewed[log.group] = self._clock()
        self._send(log, start, self._duration_ms / 1000)

    def renew(self, log: Log, start: int) -> None:
        """Pin entries from ``start`` on if a renewal is due."""
        if not self._duration_ms:
            return
        pinned_at = self._renewed.get(log.group, self._pinned_at)
        if self._clock() - pinned_at >= self._duration_ms / 1000 / _RENEWALS:
            self.set(log, start)

    def release(self, log: Log) -> None:
        """Release the pin of a log, if there is one."""
        if self._renewed.pop(log.group, None) is not None:
            self._send(log, 0, 0.0)

    def _send(self, log: Log, start: int, seconds: float) -> None:
        try:
            log.pin(self._name, start, seconds)
        except DLedgerError as error:
            _log.warning(
                "pin failed, retention may delete entries before they are read: group=%s error=%s", log.group, error
            )

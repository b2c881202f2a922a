"""Keeps what a query has planned to read out of retention until it is read.

A pin is a promise of each node that is up, for a while: a node that starts again has forgotten it, so a loss stays
possible, and is found as before. Whoever reads renews; what nobody renews any more falls to retention.
"""

from __future__ import annotations

import logging
import time
import uuid
from typing import Final

from dledger_core import DLedgerError
from spark_connector.reading.logs import Log

__all__ = ["Pin"]

_log = logging.getLogger(__name__)
_RENEWALS: Final = 3
"""How often a pin is renewed before it would end."""


class Pin:
    """One reader's pins, a log each. Not thread-safe.

    Args:
        hold_ms: how long a pin holds that is not renewed; 0 = none is made.
        held_since: epoch seconds at which somebody else pinned what this reader needs, with the same ``hold_ms``.
    """

    def __init__(self, hold_ms: int, held_since: float = 0.0) -> None:
        self._hold_ms = hold_ms
        self._name = f"spark-{uuid.uuid4().hex}"
        self._held_since = held_since
        self._renewed: dict[str, float] = {}

    def hold(self, log: Log, start: int) -> None:
        """Keeps entries from ``start`` on, and no longer those before it."""
        if not self._hold_ms:
            return
        self._renewed[log.group] = time.time()
        self._ask(log, start, self._hold_ms / 1000)

    def renew(self, log: Log, start: int) -> None:
        """As ``hold``, if it is time; costs nothing otherwise."""
        if not self._hold_ms:
            return
        held_since = self._renewed.get(log.group, self._held_since)
        if time.time() - held_since >= self._hold_ms / 1000 / _RENEWALS:
            self.hold(log, start)

    def release(self, log: Log) -> None:
        """Gives the log's pin up, if there is one."""
        if self._renewed.pop(log.group, None) is not None:
            self._ask(log, 0, 0.0)

    def _ask(self, log: Log, start: int, seconds: float) -> None:
        try:
            log.pin(self._name, start, seconds)
        except DLedgerError as error:
            _log.warning("retention may delete what group %r is about to be read of: %s", log.group, error)

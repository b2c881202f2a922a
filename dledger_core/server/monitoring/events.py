"""The recent events of a node, for the status page: the records of its log from INFO on, the newest ones."""

from __future__ import annotations

import logging
import threading
from collections import deque
from dataclasses import dataclass
from typing import Any, Final

from dledger_core.server.monitoring.log_lines import event_of

EVENTS_MAX: Final = 200
_VALUE_MAX: Final = 300
_LOGGER: Final = "dledger_core"


@dataclass(frozen=True, slots=True)
class Event:
    """One record: seconds since the epoch, level, event and fields."""

    time_s: float
    level: str
    event: str
    fields: dict[str, Any]


class RecentEvents(logging.Handler):
    """Keeps the newest events from ``start`` to ``stop``; thread-safe, as each handler is."""

    def __init__(self, events_max: int = EVENTS_MAX) -> None:
        super().__init__(logging.INFO)
        self._events: deque[Event] = deque(maxlen=events_max)
        self._guard = threading.Lock()

    def start(self) -> None:
        """Take in the records of this package from now on."""
        logging.getLogger(_LOGGER).addHandler(self)

    def stop(self) -> None:
        """Take in no more."""
        logging.getLogger(_LOGGER).removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """See ``logging.Handler``."""
        event, fields = event_of(record)
        short = {name: value[:_VALUE_MAX] if isinstance(value, str) else value for name, value in fields.items()}
        with self._guard:
            self._events.append(Event(record.created, record.levelname.lower(), event[:_VALUE_MAX], short))

    def newest(self, groups: frozenset[str]) -> list[Event]:
        """Return the events, newest first, without those of other groups than these."""
        with self._guard:
            found = list(self._events)
        return [event for event in reversed(found) if event.fields.get("group", None) in (None, *groups)]

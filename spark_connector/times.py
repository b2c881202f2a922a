"""Times and durations as options give them."""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Final

__all__ = ["parse_duration", "parse_time"]

_UNITS: Final = (
    (1, ("ms", "millisecond", "milliseconds")),
    (1_000, ("s", "second", "seconds")),
    (60_000, ("m", "min", "minute", "minutes")),
    (3_600_000, ("h", "hour", "hours")),
    (86_400_000, ("d", "day", "days")),
)
_UNIT_MS: Final = {name: millis for millis, names in _UNITS for name in names}
_DURATION: Final = re.compile(r"(\d{1,12})\s*([a-z]+)", re.ASCII)
_MILLIS: Final = re.compile(r"\d{1,15}", re.ASCII)


def parse_time(text: str) -> int:
    """Returns the milliseconds since the epoch that ``text`` means: that number, or an ISO-8601 time.

    A time without a zone is in UTC: the session's time zone is unknown here, and a table must not depend on it.

    Raises:
        ValueError: it is neither.
    """
    text = text.strip()
    if _MILLIS.fullmatch(text):
        return int(text)
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("it must be milliseconds since the epoch, or a time like 2026-03-01T12:00:00Z") from None
    moment = moment if moment.tzinfo is not None else moment.replace(tzinfo=UTC)
    millis = round((moment - datetime(1970, 1, 1, tzinfo=UTC)).total_seconds() * 1000)
    if millis < 0:
        raise ValueError("it is before 1970")
    return millis


def parse_duration(text: str) -> int:
    """Returns the milliseconds of a duration like ``15m``, ``30s``, ``500ms``, ``1h`` or ``10 seconds``.

    Raises:
        ValueError: it is none, or zero.
    """
    found = _DURATION.fullmatch(text.strip().lower())
    millis = int(found[1]) * _UNIT_MS.get(found[2], 0) if found else 0
    if not millis:
        raise ValueError("it must be a duration like 15m, 30s, 500ms or 1h")
    return millis

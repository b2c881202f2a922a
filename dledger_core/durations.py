"""The text format of durations in options of commands, jobs and the Spark connector."""

from __future__ import annotations

import re
from typing import Final

from dledger_core.errors import ConfigError

__all__ = ["parse_duration"]

_UNIT_NAMES: Final = {
    0.001: ("ms", "millisecond", "milliseconds"),
    1.0: ("s", "second", "seconds"),
    60.0: ("m", "min", "minute", "minutes"),
    3_600.0: ("h", "hour", "hours"),
    86_400.0: ("d", "day", "days"),
    604_800.0: ("w", "week", "weeks"),
}
_UNITS: Final = {name: seconds for seconds, names in _UNIT_NAMES.items() for name in names}
_PART: Final = re.compile(r"(\d{1,12}(?:\.\d{1,9})?)\s*([a-z]+)\s*", re.ASCII)
_MAX_S: Final = 100 * 365 * 86_400.0


def parse_duration(text: str, option: str = "", *, allow_zero: bool = False) -> float:
    """Return the seconds of a duration such as ``500ms``, ``0.5 seconds``, ``15m``, ``1h 30m`` or ``7d``.

    Args:
        text: one or more numbers, each with a unit: ms, s, m, h, d, w, or the English word.
        option: the option's name, for the error.
        allow_zero: accept ``0`` (also without a unit) and ``0s``.

    Raises:
        ConfigError: malformed, zero, or longer than a century.
    """
    lowered = text.strip().lower()
    if allow_zero and lowered == "0":
        return 0.0
    prefix = f"{option}: " if option else ""
    parts = list(_PART.finditer(lowered))
    known = all(unit in _UNITS for _, unit in (part.groups() for part in parts))
    if not parts or "".join(part[0] for part in parts) != lowered or not known:
        raise ConfigError(
            f"{prefix}malformed duration {text!r}",
            "",
            "write numbers with units, such as 500ms, 0.5 seconds, 15m or 7d",
        )
    seconds = sum(float(part[1]) * _UNITS[part[2]] for part in parts)
    if seconds > _MAX_S or (seconds == 0 and not allow_zero):
        limit = "above 0" if seconds == 0 else "at most 100 years"
        raise ConfigError(f"{prefix}the duration must be {limit}, got {text!r}", "", "correct the duration")
    return seconds

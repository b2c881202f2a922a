"""What an audit was asked to do, and how its values are written on the command line. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Final

from dledger_core.errors import ConfigError

__all__ = ["Options", "parse_age", "parse_run_id"]

_UNITS: Final = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """One audit's options.

    Attributes:
        mode: quick, digest or full.
        table: directory of the Delta tables; None writes none.
        skip_proven: trust ranges proven equal that recently; None reads everything.
        reread_percent: share of the trusted ranges that is read again all the same, oldest first; None: as
            ``history.due_count`` says.
        resume: the run to go on with.
        rate: bytes per second that may be read from one node; None = no limit.
        report: where the HTML report goes.
        against: peers of another cluster, or empty.
    """

    mode: str = "digest"
    table: str | None = None
    skip_proven: timedelta | None = None
    reread_percent: int | None = None
    resume: str | None = None
    rate: int | None = None
    report: str | None = None
    against: str = ""

    def to_json(self) -> dict[str, Any]:
        """Returns those that were given, for people."""
        shown: dict[str, Any] = {"mode": self.mode, "table": self.table, "resume": self.resume}
        shown["against"] = self.against or None
        shown["max bytes per second and node"] = self.rate
        if self.skip_proven is not None:
            share = "all in turn" if self.reread_percent is None else f"{self.reread_percent} %"
            shown["skip proven"] = f"{self.skip_proven}, {share} read again"
        return {name: value for name, value in shown.items() if value is not None}


def parse_age(text: str) -> timedelta:
    """Parses an age such as 12h or 7d.

    Raises:
        ConfigError: malformed, zero, or longer than anybody keeps tables.
    """
    match = re.fullmatch(r"([1-9]\d{0,5})\s*([smhdw])", text.strip())
    if match is None:
        raise ConfigError(f"malformed age {text!r}", "--skip-proven", "write a number and s, m, h, d or w, as in 7d")
    return timedelta(**{_UNITS[match[2]]: int(match[1])})


def parse_run_id(text: str) -> str:
    """Checks the name of an earlier run.

    Raises:
        ConfigError: it cannot be one.
    """
    if re.fullmatch(r"[0-9a-f]{32}", text) is None:
        remedy = "copy the run id that the audit printed when it began"
        raise ConfigError(f"{text!r} is no run id", "--resume", remedy)
    return text

"""Places in a log, as people write them: an index, the last N, the first, the end, a position, a time."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

import click

__all__ = ["INDEX_MAX", "PLACE_HELP", "EntryPlaceType", "Place", "PlaceType"]

INDEX_MAX: Final = (1 << 63) - 1
PLACE_HELP: Final = "an index, -N for the last N, 'first', 'end', @POSITION, or a time like 2025-01-31T12:00 (UTC)"


@dataclass(frozen=True, slots=True)
class Place:
    """A place in a log.

    Attributes:
        kind: what it is given by.
        number: the index, how many entries before the end, or the position; 0 for the rest.
        time: with a zone, for ``time``.
    """

    kind: Literal["index", "last", "first", "end", "position", "time"]
    number: int = 0
    time: datetime | None = None


class PlaceType(click.ParamType[Any]):
    """Reads a place."""

    name = "PLACE"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.ParamType``."""
        if isinstance(value, Place):
            return value
        found = self._read(str(value))
        if found is None:
            self.fail(
                f"{value!r} is neither an index up to {INDEX_MAX}, -N, 'first', 'end', @POSITION, nor a time",
                param,
                ctx,
            )
        return found

    def _read(self, text: str) -> Place | None:
        if text in ("first", "end"):
            return Place("first" if text == "first" else "end")
        number = re.fullmatch(r"([-@]?)([0-9]{1,19})", text)
        if number is not None and int(number[2]) <= INDEX_MAX:
            if number[1] == "@":
                return Place("position", int(number[2]))
            return Place("last" if number[1] else "index", int(number[2]))
        if text.lstrip("-@").isdigit():
            return None  # a time without separators would be a surprise
        try:
            time = datetime.fromisoformat(text)
        except ValueError:
            return None
        return Place("time", 0, time if time.tzinfo else time.replace(tzinfo=UTC))


class EntryPlaceType(click.ParamType[Any]):
    """Reads the place of one entry: its index, or ``@POSITION``."""

    name = "INDEX"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See ``click.ParamType``."""
        if isinstance(value, Place):
            return value
        if str(value).startswith("@"):
            return PlaceType().convert(value, param, ctx)
        return Place("index", click.IntRange(0, INDEX_MAX)(value, param, ctx))

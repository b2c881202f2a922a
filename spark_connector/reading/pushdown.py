"""Filters of a batch query: the ranges and values that follow from them. Spark applies all of them again.

Index, term and append time never decrease within a log, so bounds of them are bounds of the range that is planned.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final

from pyspark.sql.datasource import (
    EqualNullSafe,
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from dledger_core import LogRange
from spark_connector.errors import OptionError
from spark_connector.reading.tracking import Tracker

__all__ = ["Pushed"]

_ALL: Final = (0, 1 << 63)
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)
_EQUAL: Final = (EqualTo, EqualNullSafe)
_COMPARED: Final = (*_EQUAL, GreaterThan, GreaterThanOrEqual, LessThan, LessThanOrEqual)
_OF_MESSAGES: Final = ("topic", "tags", "keys")


@dataclass
class Pushed:
    """The filters of one query; a row passes all of them.

    Attributes:
        groups: the groups that can have rows, None for all.
        numbers: bounds [low, high) of ``index``, ``term``, and ``timestamp`` in milliseconds since the epoch.
        values: columns of messages, and the values of which a row has one.
    """

    groups: frozenset[str] | None = None
    numbers: dict[str, tuple[int, int]] = field(default_factory=dict)
    values: list[tuple[str, tuple[str, ...]]] = field(default_factory=list)

    def take(self, given: Filter) -> None:
        """Use a filter of the query, if bounds or values follow from it."""
        if not isinstance(given, (*_COMPARED, In)) or len(given.attribute) != 1:
            return
        column = given.attribute[0].lower()
        listed = tuple(given.value) if isinstance(given, In) else (given.value,)
        if column in ("index", "term", "timestamp"):
            numbers = [number for number in map(_number, listed) if number is not None]
            if numbers and len(numbers) == len(listed):
                self._bound(column, given, min(numbers), max(numbers))
        elif not isinstance(given, (*_EQUAL, In)):
            return
        elif column == "group":
            self.groups = frozenset(listed) if self.groups is None else self.groups & frozenset(listed)
        elif column in _OF_MESSAGES:
            # A body that is not a message has none of these values and is read: ``onDecodeError`` decides about it.
            self.values.append((column, tuple(value for value in listed if value is not None)))

    def _bound(self, column: str, given: Filter, least: int, greatest: int) -> None:
        low, high = self.numbers.get(column, _ALL)
        # Spark's times are microseconds, those of entries milliseconds: the first one at or after a bound counts.
        unit = 1000 if column == "timestamp" else 1
        if not isinstance(given, (LessThan, LessThanOrEqual)):
            low = max(low, -(-(least + isinstance(given, GreaterThan)) // unit))
        if not isinstance(given, (GreaterThan, GreaterThanOrEqual)):
            high = min(high, -(-(greatest + (not isinstance(given, LessThan))) // unit))
        self.numbers[column] = low, high

    def narrowed(
        self, tracker: Tracker, starts: Mapping[str, int], ends: Mapping[str, int], bounds: Mapping[str, LogRange]
    ) -> tuple[dict[str, int], dict[str, int]]:
        """Return the part of [start, end) of each group that can have rows of the query."""
        lows, highs = {}, {}
        for group, view in bounds.items():
            low, high = self.numbers.get("index", _ALL)
            low, high = max(low, starts[group]), min(high, ends[group])
            if self.groups is not None and group not in self.groups:
                high = low
            for column, find in (("term", tracker.index_at_term), ("timestamp", tracker.index_at_time)):
                if low < high and column in self.numbers:
                    with suppress(OptionError):  # the log has no append times
                        first, end = self.numbers[column]
                        low = max(low, find(group, first, view)) if first > 0 else low
                        # An end of the options after that of the log stays, to be reported as a loss.
                        at = find(group, max(0, end), view) if end < _ALL[1] else view.end
                        high = min(high, at) if at < view.end else high
            # An empty range lies within the log, so that it is not reported as a loss.
            lows[group], highs[group] = (low, high) if low < high else (view.first_index, view.first_index)
        return lows, highs


def _number(value: Any) -> int | None:
    if isinstance(value, datetime) and value.tzinfo is not None:
        return (value - _EPOCH) // timedelta(microseconds=1)
    return value if isinstance(value, int) and not isinstance(value, bool) else None

"""Tables as a notebook shows them: complete values, in a narrow window one row below the other."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import pandas as pd
from pandas.api.types import is_numeric_dtype

from dledger_core.cli import preview

from .._report.templates import render

__all__ = ["Table", "facts_html", "readable"]

_NAMES: Final = ("topic", "tags", "keys", "consumer")
_NAME_WIDTH: Final = 40
_TIME: Final = re.compile(r"\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d[.+:\d]*")


@dataclass(frozen=True, slots=True)
class _Cell:
    text: str
    of: str = ""
    fixed: bool = False
    heading: bool = False


class Table(pd.DataFrame):
    """A DataFrame with another look; what is computed from it is a plain DataFrame."""

    def _repr_html_(self) -> str:
        names = [str(name) for name in self.columns]
        named = not isinstance(self.index, pd.RangeIndex)
        return render("rows.html", names=["", *names] if named else names, rows=list(self._cells(named=named)))

    def _cells(self, *, named: bool) -> Iterator[list[_Cell]]:
        fixed = [is_numeric_dtype(kind) for kind in self.dtypes]
        for label, row in zip(self.index, self.itertuples(index=False, name=None), strict=True):
            heading = [_Cell(str(label), heading=True)] if named else []
            cells = zip(self.columns, row, fixed, strict=True)
            texts = ((str(name), _text(value), number) for name, value, number in cells)
            yield heading + [_Cell(text, name, number or _is_time(text)) for name, text, number in texts]


def readable(table: pd.DataFrame) -> Table:
    """Return the columns that have values; times to the millisecond, long names shortened in their middle."""
    for name in table.columns:
        if isinstance(table[name].dtype, pd.DatetimeTZDtype):
            table[name] = table[name].dt.strftime("%Y-%m-%d %H:%M:%S.%f").str[:-3]
        elif name in _NAMES:
            table[name] = [None if pd.isna(text) else preview(text.encode(), _NAME_WIDTH) for text in table[name]]
    return Table(table.dropna(axis="columns", how="all"))


def _is_time(text: str) -> bool:
    return _TIME.fullmatch(text) is not None


def _text(value: Any) -> str:
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return "-"
    return f"{value:.3g}" if isinstance(value, float) and not value.is_integer() else f"{value}"


def facts_html(values: Mapping[str, str]) -> str:
    """Return names and values as HTML."""
    rows = [[_Cell(name, heading=True), _Cell(value)] for name, value in values.items()]
    return render("rows.html", names=[], rows=rows)

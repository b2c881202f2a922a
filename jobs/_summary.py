"""The summary of a job: one JSON line for programs, or tables for a terminal, and never both.

The summary has the same fields either way. In tables a nested value is a table of its own, and a long list is shown in
part; JSON has all of it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Final

from dledger_core.cli import Format, emit, say, show_result, show_rows

__all__ = ["show_summary"]

_ROWS_MAX: Final = 20
_CELL_MAX: Final = 100
_OF_ERROR: Final = {"status", "error", "message", "duration_s"}
"""Fields of a failure, whose text is on stderr already."""


def show_summary(summary: Mapping[str, Any], output: Format) -> None:
    """Write the summary to stdout."""
    if output == "json":
        emit(json.dumps(summary))
        return
    if "error" in summary and summary.keys() <= _OF_ERROR:
        return
    single, tables = {}, {}
    for name, value in _flat(summary).items():
        rows = _rows(name, value)
        if rows:
            tables[name] = rows
        elif value not in ([], {}):
            single[name] = _text(value)
    single.pop("message", None)
    show_result(single, "table")
    for name, rows in tables.items():
        show_rows(rows[:_ROWS_MAX], "table", name.replace("_", " "))
        if len(rows) > _ROWS_MAX:
            say(f"{len(rows) - _ROWS_MAX} more rows of {name}: add --format json")


def _flat(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields, with ``a.b`` for those of a nested map that has no further maps."""
    found = dict[str, Any]()
    for name, value in values.items():
        if isinstance(value, Mapping) and value and not any(isinstance(each, Mapping) for each in value.values()):
            found |= {f"{name} {key}": each for key, each in value.items()}
        else:
            found[name] = value
    return found


def _rows(name: str, value: Any) -> list[dict[str, Any]]:
    """Return a map of maps, or a list of maps, as rows with equal columns; nothing for other values."""
    if isinstance(value, Mapping):
        found = [{name.removesuffix("s"): key} | _cells(each) for key, each in value.items()]
    elif (
        isinstance(value, Sequence) and not isinstance(value, str) and any(isinstance(each, Mapping) for each in value)
    ):
        found = [_cells(each) for each in value]
    else:
        return []
    columns = dict.fromkeys(column for row in found for column in row)
    return [{column: row.get(column) for column in columns} for row in found]


def _cells(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {"value": _text(value)}
    return {name: _text(each) for name, each in _flat(value).items()}


def _text(value: Any) -> Any:
    """Return a value as a table shows it: a list as words, a map as JSON."""
    if isinstance(value, Mapping):
        text = json.dumps(value, ensure_ascii=False)
    elif isinstance(value, Sequence) and not isinstance(value, str):
        text = ", ".join(each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in value)
    else:
        return value
    return text if len(text) <= _CELL_MAX else f"{text[:_CELL_MAX]} …"

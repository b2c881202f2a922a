"""Values that fit a field of a message, and values that do not, by its table."""

from __future__ import annotations

import math
from typing import Any

from dledger_core.errors import BadRequestError
from dledger_core.net.fields import REQUIRED, Field, Table

MISSING = object()
_SOME: dict[str, list[Any]] = {
    "int": [0, 1 << 63, (1 << 64) - 1, -2],
    "str": ["", "x"],
    "bool": [True],
    "bytes": [b"x"],
    "list": [[], [1], [[1, 2, 3]], [["a", 1, 1, 1]], [[1.5, 1, 1, 1]], [[]] * 4],
    "map": [{}, {"q": 1, "b": 1, "r": "r"}, {"q": "q", "b": "b", "r": "r"}, {"q": "q", "b": 1}],
}


def wrong_values(field: Field) -> list[Any]:
    """Return values of every kind that the field rejects; MISSING too, if it is required."""
    candidates = [1.5, math.nan, math.inf, None, *(value for values in _SOME.values() for value in values)]
    found = [value for value in candidates if not field.fits(value)]
    return [*found, MISSING] if field.default is REQUIRED else found


def good_value(field: Field) -> object:
    """Return a value that fits a field."""
    if field.choices:
        return field.choices[-1]
    if field.key == "x" and field.kind == "map":
        return {"q": "query", "b": 7, "r": "run"}
    if field.key == "e":
        return BadRequestError("text", "place", "action", {"name": 1}).to_wire()
    if field.key == "seen" and field.kind == "map":
        return {"group": 3}
    if field.key == "seen" and field.kind == "list":
        return ["log", 3, 1]
    if field.key == "archive":
        return {"start": 0, "end": 5, "table": "file:///archive", "bytes": None, "ms": 3}
    if field.key == "self":
        return ["n0", "leader", 1, 0, 9, 9, 10, 500]
    if field.kind == "list" and field.low > 0:
        return next(each * field.low for each in ([1], ["x"], [True]) if field.fits(each * field.low))
    value = {"int": 5, "str": "x", "bool": True, "bytes": b"x", "list": [], "map": {}, "any": ["x", 1]}
    return value[field.kind]


def header_of(table: Table[Any]) -> dict[str, object]:
    """Return a header that fits a table."""
    return {"t": table.number} | {field.key: good_value(field) for field in table.fields}

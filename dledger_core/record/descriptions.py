"""Tables that describe a log: their columns, and rows as lists that fit into a message.

A row starts with its key, by which the rows of a table are sorted. Times are ms since the epoch in a row, and None
where unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa

_TIME: Final = pa.timestamp("us", tz="UTC")

DESCRIPTIONS: Final[dict[str, pa.Schema]] = {
    "terms": pa.schema([("first_index", pa.int64()), ("end", pa.int64()), ("term", pa.int64())]),
    "segments": pa.schema(
        [
            ("first_index", pa.int64()),
            ("end", pa.int64()),
            ("position", pa.int64()),
            ("bytes", pa.int64()),
            ("last_timestamp", _TIME),
        ]
    ),
    "producers": pa.schema(
        [
            ("producer_id", pa.string()),
            ("kind", pa.string()),
            ("epoch", pa.int64()),
            ("run_id", pa.string()),
            ("next_sequence", pa.int64()),
            ("first_index", pa.int64()),
            ("last_index", pa.int64()),
            ("last_timestamp", _TIME),
        ]
    ),
}
"""Columns per table. Ranges of indexes are [first_index, end), those of producers [first_index, last_index].

``terms`` has one row per term range, ``segments`` one per data file. ``producers`` has one row per producer (kind
``producer``: epoch, next sequence, range of its newest append) and per query that wrote transactions (kind ``query``:
its newest run, the micro-batch after its newest committed one, and the range that this one spans).
"""

_KEY_WIDTH: Final = {"terms": 1, "segments": 1, "producers": 2}


def key_of(table: str, row: Sequence[Any]) -> list[Any]:
    """Return the key of a row."""
    return list(row[: _KEY_WIDTH[table]])


def description_batch(table: str, rows: Sequence[Sequence[Any]]) -> pa.RecordBatch:
    """Return rows as a batch of the table's columns.

    Raises:
        pa.ArrowInvalid, pa.ArrowTypeError: they are not rows of this table.
    """
    schema = DESCRIPTIONS[table]
    if any(len(row) != len(schema) for row in rows):
        raise pa.ArrowInvalid(f"a row of {table} has not {len(schema)} fields")
    arrays = []
    for number, field in enumerate(schema):
        values = [row[number] for row in rows]
        if field.type == _TIME:
            values = [None if value is None else value * 1000 for value in values]
            arrays.append(pa.array(values, pa.int64()).cast(_TIME))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.RecordBatch.from_arrays(arrays, schema=schema)

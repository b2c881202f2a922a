"""Records and descriptions of a log as the Arrow batches that readers receive, and the result of a read.

Arrays are made over the records' own memory, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.record.layout import HEADER_BYTES, MAGIC_DATA, READ_SCHEMA, append_times
from dledger_core.record.ranges import inside
from dledger_core.record.records import Records, slices_of

_YEAR_10000_MS: Final = 253_402_300_800_000


def to_arrow(
    records: Records, keep: npt.NDArray[np.bool_] | None = None, schema: pa.Schema = READ_SCHEMA
) -> pa.RecordBatch:
    """Return checked records as a RecordBatch.

    Args:
        records: checked records.
        keep: bool, shape (n,): which of them; None = all.
        schema: the columns, any of FIELD_SCHEMA. Without ``body``, bodies are not touched.
    """
    rows: slice | npt.NDArray[np.bool_] = slice(None) if keep is None or bool(keep.all()) else keep
    made = [_made(field, records, rows) for field in schema]
    return pa.RecordBatch.from_arrays(made, schema=schema)


def _made(field: pa.Field, records: Records, rows: slice | npt.NDArray[np.bool_]) -> pa.Array:
    if field.name == "body":
        return _bodies(records, rows)
    if field.name == "crc":
        return _column(records.body_crcs()[rows], field.type)
    if field.name != "timestamp":
        return _column(records.column(field.name)[rows], field.type)
    millis = append_times(records.column("flags")[rows])
    unknown = (millis == 0) | (millis >= _YEAR_10000_MS)  # impossible for a clock, possible in a damaged header
    known = np.packbits(~unknown, bitorder="little") if unknown.any() else None
    return _column(millis * 1000, field.type, known)


def _bodies(records: Records, rows: slice | npt.NDArray[np.bool_]) -> pa.Array:
    lengths = records.column("length")[rows]
    if isinstance(rows, slice):
        blob = records.bodies  # gathered once, for the check and for here
    else:
        blob = slices_of([records.data], lengths.astype(np.int64), 0, records.starts[rows] + HEADER_BYTES)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, dtype=np.int32, out=offsets[1:])
    return pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(blob)])


def _column(values: npt.NDArray[Any], kind: pa.DataType, known: npt.NDArray[np.uint8] | None = None) -> pa.Array:
    """Return native, contiguous values as an array over the same memory; ``known`` has a bit for each that is one."""
    valid = None if known is None else pa.py_buffer(known)
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)])


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


Isolation = Literal["read_committed", "read_uncommitted"]
"""Whether uncommitted, open and aborted entries are left out of a read, or returned."""


@dataclass(frozen=True, slots=True)
class Fetch:
    """Entries of one read, and the ends of the log it came from.

    Attributes:
        batch: the entries; may end before the requested end.
        next_index: index at which the next read continues, after the last entry examined, also if it was left out.
        commit_index: commit index of the replica; -1 for a store that records none.
        visible_end: end of what ``read_committed`` shows.
        first_index: first index of the replica's log.
    """

    batch: pa.RecordBatch
    next_index: int
    commit_index: int
    visible_end: int
    first_index: int


def data_entries(
    records: Records, first_index: int, skip: Sequence[Any] = (), schema: pa.Schema = READ_SCHEMA
) -> pa.RecordBatch:
    """Return the data entries of checked records.

    Args:
        records: checked records.
        first_index: index of the first one.
        skip: index ranges [start, end) to leave out, sorted and disjoint.
        schema: as in ``to_arrow``.

    Raises:
        TypeError, ValueError, OverflowError: the ranges are not pairs of integers.
    """
    keep = records.column("magic") == MAGIC_DATA
    if len(skip):
        keep &= ~inside(np.arange(first_index, first_index + records.count), skip)
    return to_arrow(records, keep, schema) if keep.any() else empty_batch(schema)


# --- tables that describe a log -----------------------------------------------------------------------------------

# A row is a list that fits into a message. It starts with its key, by which the rows of a table are sorted. Times are
# ms since the epoch in a row, and None where unknown.

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
            ("once", pa.bool_()),
        ]
    ),
    "transactions": pa.schema(
        [
            ("query_id", pa.string()),
            ("batch_id", pa.int64()),
            ("run_id", pa.string()),
            ("first_index", pa.int64()),
            ("parts", pa.int64()),
            ("rows", pa.int64()),
            ("inactive_ms", pa.int64()),
        ]
    ),
}
"""Columns per table. Ranges of indexes are [first_index, end), those of producers [first_index, last_index].

``terms`` has one row per term range, ``segments`` one per data file. ``producers`` has one row per producer (kind
``producer``: epoch, next sequence, range of its newest append, whether its id is used once) and per query that wrote
transactions (kind ``query``: its newest run, the micro-batch after its newest committed one, and the range that this
one spans). ``transactions`` has one row per open transaction: its first entry, its appends and their rows, and the log
time since the newest one.
"""

_KEY_WIDTH: Final = {"terms": 1, "segments": 1, "producers": 2, "transactions": 2}


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

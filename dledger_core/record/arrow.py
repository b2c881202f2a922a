"""Records to what readers get.

Arrays are made of buffers here and looked at through them: PyArrow imports pandas when a process first makes an array
of Python's or numpy's values or the other way round, and that takes longer than a short task of a stream.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.record.layout import HEADER_BYTES, READ_SCHEMA, RECORD_SCHEMA, TIME_MASK
from dledger_core.record.records import Records
from dledger_core.record.slices import slices_of

__all__ = ["empty_batch", "integers_of", "repeated", "time_at", "to_arrow"]

_YEAR_10000_MS: Final = 253_402_300_800_000
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def to_arrow(records: Records, keep: npt.NDArray[np.bool_] | None = None, *, magic: bool = False) -> pa.RecordBatch:
    """Returns checked records as a RecordBatch of READ_SCHEMA, or RECORD_SCHEMA with ``magic``.

    Args:
        records: checked records.
        keep: bool, shape (n,): which of them; None = all.
        magic: add the column ``magic``.
    """
    headers, starts = records.headers, records.starts
    if keep is None or bool(keep.all()):
        lengths, blob = headers["length"].astype(np.int64), records.bodies  # gathered once, for the check and for here
    else:
        headers, starts = headers[keep], starts[keep]
        lengths = headers["length"].astype(np.int64)
        blob = slices_of([records.data], lengths, 0, starts + HEADER_BYTES)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    body = pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(blob)])
    millis = (headers["mark"] & np.uint64(TIME_MASK)).astype(np.int64)
    unknown = (millis == 0) | (millis >= _YEAR_10000_MS)  # no clock says so, but a damaged header may
    known = np.packbits(~unknown, bitorder="little") if unknown.any() else None
    arrays = [
        _column(headers["index"].astype(np.int64), pa.int64()),
        _column(headers["term"].astype(np.int64), pa.int64()),
        _column(headers["position"].astype(np.int64), pa.int64()),
        _column(millis * 1000, pa.timestamp("us", tz="UTC"), known),
        body,
    ]
    if magic:
        arrays.append(_column(headers["magic"].astype(np.int32), pa.int32()))
    return pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA if magic else READ_SCHEMA)


def _column(values: npt.NDArray[Any], kind: pa.DataType, known: npt.NDArray[np.uint8] | None = None) -> pa.Array:
    """Returns native, contiguous values as an array over the same memory; ``known`` has a bit for each that is one."""
    valid = None if known is None else pa.py_buffer(known)
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)])


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Returns a batch without rows."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


def repeated(text: str, rows: int) -> pa.Array:
    """Returns a string column that says the same in each of its rows."""
    data = text.encode()
    offsets = np.array([0, len(data)], np.int32)
    one = pa.Array.from_buffers(pa.string(), 1, [None, pa.py_buffer(offsets), pa.py_buffer(data)])
    return pa.repeat(one[0], rows)


def integers_of(column: pa.Array) -> npt.NDArray[Any]:
    """Returns the values of a column of integers or times as they lie in memory, those of nulls included."""
    data = np.frombuffer(column.buffers()[1] or b"", np.dtype(f"i{column.type.bit_width // 8}"))
    return data[column.offset : column.offset + len(column)]


def time_at(column: pa.Array, row: int) -> datetime | None:
    """Returns one time of a column ``timestamp``; None where it is null."""
    if not column[row].is_valid:
        return None
    return _EPOCH + timedelta(microseconds=int(integers_of(column)[row]))

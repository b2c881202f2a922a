"""Records to the Arrow batches that readers receive. Arrays are made over the records' own memory, without a copy."""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.record.layout import HEADER_BYTES, READ_SCHEMA, RECORD_SCHEMA, append_times
from dledger_core.record.records import Records
from dledger_core.record.slices import slices_of

__all__ = ["empty_batch", "to_arrow"]

_YEAR_10000_MS: Final = 253_402_300_800_000


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
    millis = append_times(headers)
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

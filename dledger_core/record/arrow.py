"""Records as the Arrow batches that readers receive, and the result of a read.

Arrays are made over the records' own memory, without a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.record.layout import HEADER_BYTES, MAGIC_DATA, READ_SCHEMA, RECORD_SCHEMA, append_times
from dledger_core.record.ranges import inside
from dledger_core.record.records import Records
from dledger_core.record.slices import slices_of

_YEAR_10000_MS: Final = 253_402_300_800_000


def to_arrow(records: Records, keep: npt.NDArray[np.bool_] | None = None, *, magic: bool = False) -> pa.RecordBatch:
    """Return checked records as a RecordBatch of READ_SCHEMA, or RECORD_SCHEMA with ``magic``.

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
    unknown = (millis == 0) | (millis >= _YEAR_10000_MS)  # impossible for a clock, possible in a damaged header
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
    """Return native, contiguous values as an array over the same memory; ``known`` has a bit for each that is one."""
    valid = None if known is None else pa.py_buffer(known)
    return pa.Array.from_buffers(kind, len(values), [valid, pa.py_buffer(values)])


def empty_batch(schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch without rows."""
    return pa.RecordBatch.from_arrays([pa.nulls(0, field.type) for field in schema], schema=schema)


Isolation = Literal["read_committed", "read_uncommitted"]


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


def data_entries(records: Records, first_index: int, skip: Sequence[Any] = ()) -> pa.RecordBatch:
    """Return the data entries of checked records, with columns of READ_SCHEMA.

    Args:
        records: checked records.
        first_index: index of the first one.
        skip: index ranges [start, end) to leave out, sorted and disjoint.

    Raises:
        TypeError, ValueError, OverflowError: the ranges are not pairs of integers.
    """
    keep = records.headers["magic"] == MAGIC_DATA
    if len(skip):
        keep &= ~inside(np.arange(first_index, first_index + records.count), skip)
    return to_arrow(records, keep) if keep.any() else empty_batch(READ_SCHEMA)

"""Records to what readers get."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.record.layout import HEADER_BYTES, READ_SCHEMA, RECORD_SCHEMA, TIME_MASK
from dledger_core.record.records import Records
from dledger_core.record.slices import slices_of

__all__ = ["to_arrow"]

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
    millis = (headers["mark"] & np.uint64(TIME_MASK)).astype(np.int64)
    unknown = (millis == 0) | (millis >= _YEAR_10000_MS)  # no clock says so, but a damaged header may
    timestamp = pa.array(millis * 1000, pa.int64(), mask=unknown)
    arrays = [
        pa.array(headers["index"].astype(np.int64)),
        pa.array(headers["term"].astype(np.int64)),
        pa.array(headers["position"].astype(np.int64)),
        pc.cast(timestamp, pa.timestamp("us", tz="UTC")),
        body,
    ]
    if magic:
        arrays.append(pa.array(headers["magic"].astype(np.int32)))
    return pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA if magic else READ_SCHEMA)

"""Arrow columns of bytes as numpy arrays, and slices of a buffer as Arrow columns.

The building blocks of the codec: read a field of every record at once, and make a column of slices of a buffer.
Callers check that slices and fields are inside the buffer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.errors import BadRequestError
from dledger_core.record import slices_of

Bytes = npt.NDArray[np.uint8]
IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_COLUMN_BYTES_MAX: Final = (1 << 31) - 1
_SHORT_CHUNK: Final = 20


@dataclass(frozen=True)
class Rows:
    """A binary column: row i is ``data[starts[i]:starts[i] + lengths[i]]``.

    Attributes:
        data: uint8, the column's bytes.
        starts: int64, shape (n,).
        lengths: int64, shape (n,).
        present: bool, shape (n,); None if no row is null.
    """

    data: Bytes
    starts: IntArray
    lengths: IntArray
    present: BoolArray | None

    def without_head(self, count: int) -> Rows:
        """Return the rows without their first ``count`` bytes; a shorter row gets a length below 0."""
        return replace(self, starts=self.starts + count, lengths=self.lengths - count) if count else self


def rows_of(array: Any, name: str = "bodies") -> Rows:
    """Return an Arrow binary or string column as rows, without a copy of its bytes.

    Raises:
        BadRequestError: another type, or more than 2 GiB.
    """
    if isinstance(array, pa.ChunkedArray):
        array = array.combine_chunks()
    try:
        array = array.cast(pa.large_binary())
    except (AttributeError, pa.ArrowNotImplementedError, pa.ArrowInvalid):
        found = getattr(array, "type", type(array).__name__)
        raise BadRequestError(
            f"a column of type {found} does not contain bytes", name, "use an Arrow binary column"
        ) from None
    if not len(array):
        empty = np.zeros(0, np.int64)
        return Rows(np.zeros(0, np.uint8), empty, empty, None)
    _, offset_buffer, data_buffer = array.buffers()
    offsets = np.frombuffer(offset_buffer, np.int64, len(array) + 1, array.offset * 8)
    first, last = int(offsets[0]), int(offsets[-1])
    if last - first > _COLUMN_BYTES_MAX:
        raise BadRequestError("a column of more than 2 GiB", name, "split it", {"bytes": last - first})
    data = np.frombuffer(data_buffer, np.uint8)[first:last] if data_buffer else np.zeros(0, np.uint8)
    present = np.asarray(array.is_valid()) if array.null_count else None
    return Rows(data, offsets[:-1] - first, np.diff(offsets), present)


def field(data: Bytes, dtype: str, at: IntArray) -> npt.NDArray[Any]:
    """Return the numbers of ``dtype`` at the byte offsets ``at``, in native byte order."""
    kind = np.dtype(dtype)
    return _everywhere(data, kind)[at].astype(kind.newbyteorder("="), copy=False)


def chunks_at(data: Bytes, width: int, at: IntArray) -> Bytes:
    """Return ``width`` bytes at each of the byte offsets ``at``, shape (n, width); a copy."""
    return field(data, f"V{width}", at).view(np.uint8).reshape(len(at), width)


def _everywhere(data: Bytes, kind: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return ``data`` read as ``kind`` at every byte offset, without a copy."""
    count = max(0, len(data) - kind.itemsize + 1)
    return np.ndarray((count,), kind, buffer=data if count else bytes(8), strides=(1,))


def join_chunks(data: Bytes, starts: IntArray, lengths: IntArray) -> Any:
    """Return the concatenation of ``data[starts[i]:starts[i] + lengths[i]]`` as a buffer."""
    total = int(lengths.sum())
    if total > _COLUMN_BYTES_MAX:
        raise BadRequestError("a column would exceed 2 GiB", "messages", "decode fewer at a time", {"bytes": total})
    if not total:
        return b""
    if bool((lengths == lengths[0]).all()):  # often so for names, tags, hosts and ids: read as numbers of that size
        return _everywhere(data, np.dtype(f"V{lengths[0]}"))[starts].view(np.uint8)
    if total <= _SHORT_CHUNK * len(lengths):  # cheaper per byte than per slice
        ends = np.cumsum(lengths)
        return data[np.arange(total) + np.repeat(starts - (ends - lengths), lengths)]
    return slices_of([data], lengths, 0, starts)


def bitmap(present: BoolArray | None) -> pa.Buffer | None:
    """Return Arrow's validity bitmap."""
    return None if present is None else pa.py_buffer(np.packbits(present, bitorder="little"))


def binary_column(blob: Any, lengths: npt.NDArray[np.integer[Any]], present: BoolArray | None = None) -> pa.BinaryArray:
    """Return the binary column whose rows are contiguous in ``blob``."""
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    buffers = [bitmap(present), pa.py_buffer(offsets), pa.py_buffer(blob)]
    return pa.Array.from_buffers(pa.binary(), len(lengths), buffers)


def text_column(data: Bytes, starts: IntArray, lengths: IntArray, present: BoolArray | None = None) -> pa.StringArray:
    """Return a string column of slices; bytes that are not UTF-8 become U+FFFD, as in Java."""
    if present is not None:
        lengths = np.where(present, lengths, 0)
    column = binary_column(join_chunks(data, starts, lengths), lengths, present)
    try:
        return column.cast(pa.string())
    except pa.ArrowInvalid:
        texts = (None if row is None else row.decode("utf-8", "replace") for row in column.to_pylist())
        return pa.array(texts, pa.string())


def constant_column(value: Any, n: int, kind: pa.DataType) -> pa.Array:
    """Return ``value`` n times."""
    return pa.repeat(pa.scalar(value, kind), n)

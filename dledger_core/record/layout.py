"""Byte layout of records and index records, magics, and where records are laid."""

from __future__ import annotations

import struct
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

__all__ = [
    "BATCH_END",
    "BLANK",
    "HEADER",
    "HEADER_BYTES",
    "HEADER_STRUCT",
    "INDEX_RECORD",
    "INDEX_RECORD_BYTES",
    "MAGIC_BLANK",
    "MAGIC_CONTROL",
    "MAGIC_DATA",
    "MAGIC_MEMBERSHIP",
    "READ_SCHEMA",
    "RECORD_SCHEMA",
    "append_time",
    "append_times",
    "ends_batch",
    "is_segment_name",
    "place",
    "segment_name",
]

MAGIC_BLANK: Final = -1
MAGIC_DATA: Final = 1
MAGIC_CONTROL: Final = 2
MAGIC_MEMBERSHIP: Final = 3
HEADER_BYTES: Final = 48
INDEX_RECORD_BYTES: Final = 32
BATCH_END: Final = 1 << 48
"""Bit of the field ``mark``: the last entry of its batch."""
_TIME_MASK: Final = BATCH_END - 1
_NAME_DIGITS: Final = 20

HEADER: Final = np.dtype(
    [
        ("magic", ">i4"),
        ("size", ">i4"),
        ("index", ">i8"),
        ("term", ">i8"),
        ("position", ">i8"),
        ("mark", ">u8"),
        ("crc", ">u4"),
        ("length", ">i4"),
    ]
)
HEADER_STRUCT: Final = struct.Struct(">iiqqqQIi")
"""HEADER for one record: magic, size, index, term, position, mark, crc, length."""
BLANK: Final = struct.Struct(">ii")
"""MAGIC_BLANK, and the bytes from there to the segment's end."""
INDEX_RECORD: Final = np.dtype(
    [("magic", ">i4"), ("position", ">i8"), ("size", ">i4"), ("index", ">i8"), ("term", ">i8")]
)
READ_SCHEMA: Final = pa.schema(
    [
        ("index", pa.int64()),
        ("term", pa.int64()),
        ("position", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("body", pa.binary()),
    ]
)
RECORD_SCHEMA: Final = READ_SCHEMA.append(pa.field("magic", pa.int32()))


def append_time(mark: int) -> int:
    """Returns the append time in the field ``mark`` of one record, in ms since the epoch; 0 if unknown."""
    return int(mark) & _TIME_MASK


def append_times(headers: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
    """Returns the append time of each record, in ms since the epoch; 0 if unknown.

    Args:
        headers: dtype HEADER, shape (n,).
    """
    return (headers["mark"] & np.uint64(_TIME_MASK)).astype(np.int64)


def ends_batch(headers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Returns which records are the last of their batch.

    Args:
        headers: dtype HEADER, shape (n,).
    """
    found: npt.NDArray[np.bool_] = (headers["mark"] & np.uint64(BATCH_END)) != 0
    return found


def segment_name(base: int) -> str:
    """Returns the name of the file whose first byte has the offset ``base``: 20 decimal digits."""
    return f"{base:0{_NAME_DIGITS}d}"


def is_segment_name(name: str) -> bool:
    """Whether ``name`` is one that ``segment_name`` makes."""
    return len(name) == _NAME_DIGITS and name.isascii() and name.isdigit()


def place(sizes: npt.NDArray[Any], position: int, segment_bytes: int) -> npt.NDArray[np.int64]:
    """Returns the position of each record when they are laid from ``position`` on.

    DLedger's rule: a record goes to the next segment unless at least 8 bytes (a BLANK) remain behind it.

    Args:
        sizes: shape (n,), bytes of each record; each at most ``segment_bytes - 8``.
        position: where the first record may begin.
        segment_bytes: size of a data file.
    """
    sizes64 = sizes.astype(np.int64)
    positions = np.empty(len(sizes64), np.int64)
    ends = np.cumsum(sizes64)
    done, base = 0, position
    while done < len(sizes64):
        before = int(ends[done - 1]) if done else 0
        limit = base - base % segment_bytes + segment_bytes - 8
        stop = int(np.searchsorted(ends, limit - base + before, side="right"))
        positions[done:stop] = ends[done:stop] - sizes64[done:stop] - before + base
        done = max(done, stop)
        base = limit + 8
    return positions

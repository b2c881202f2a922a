"""Byte layout of records and index rows, magics, and the positions of records in segments."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core import checksum
from dledger_core.checksum import Buffer
from dledger_core.errors import invariant
from dledger_core.ids import NUMBER_MAX

MAGIC_BLANK: Final = -1
MAGIC_DATA: Final = 1
"""The magic of an entry with data."""
MAGIC_CONTROL: Final = 2
"""The magic of an entry that a leader, a transaction or a producer wrote about the log itself."""
MAGIC_MEMBERSHIP: Final = 3
"""The magic of an entry with a configuration."""
HEADER_BYTES: Final = 48
"""Bytes of a record before its body."""
INDEX_RECORD_BYTES: Final = 32
BATCH_END: Final = 1 << 48
"""Bit of the field ``flags``: the last entry of its batch."""
MUST_UNDERSTAND: Final = 1 << 49
"""Bit of the field ``flags``: a node that does not know this kind of entry must not acknowledge it."""
_TIME_MASK: Final = BATCH_END - 1
_NAME_DIGITS: Final = 20

HEADER: Final = np.dtype(
    [
        ("magic", ">i4"),
        ("size", ">i4"),
        ("index", ">i8"),
        ("term", ">i8"),
        ("position", ">i8"),
        ("flags", ">u8"),
        ("crc", ">u4"),
        ("length", ">i4"),
    ]
)
"""The fields of a record before its body."""
_HEADER_STRUCT: Final = struct.Struct(">iiqqqQIi")
pack_header = _HEADER_STRUCT.pack
"""Returns the bytes of one record's header: arguments in the order of ``Header``."""
pack_index_record = struct.Struct(">iqiqq").pack
"""Returns the bytes of one row of the index: arguments in the order of ``INDEX_RECORD``."""
PREFIX: Final = struct.Struct(">ii")
"""Magic and size: the first 8 bytes of a record, and all of a BLANK, whose size reaches to the segment's end."""


@dataclass(slots=True)
class Header:
    """One record's header; ``HEADER`` has the same fields as columns."""

    magic: int
    size: int
    index: int
    term: int
    position: int
    flags: int
    crc: int
    length: int

    @classmethod
    def unpack(cls, data: Buffer, offset: int = 0) -> Header:
        """Return the header at ``offset``, as its bytes read; ``data`` has at least HEADER_BYTES there."""
        return cls(*_HEADER_STRUCT.unpack_from(data, offset))

    @property
    def is_well_formed(self) -> bool:
        """Whether magic, sizes, index and term have values that a record can have."""
        return (
            MAGIC_DATA <= self.magic <= MAGIC_MEMBERSHIP
            and self.length >= 0
            and self.size == HEADER_BYTES + self.length
            and 0 <= self.index <= NUMBER_MAX
            and 0 <= self.term <= NUMBER_MAX
        )

    @property
    def time_ms(self) -> int:
        """Append time, ms since the epoch; 0 if unknown."""
        return append_time(self.flags)


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
"""The columns of entries that a client reads."""
RECORD_SCHEMA: Final = READ_SCHEMA.append(pa.field("magic", pa.int32()))
"""The columns of entries that a store is read with."""
FIELD_SCHEMA: Final = pa.schema([*RECORD_SCHEMA, ("length", pa.int32()), ("crc", pa.uint32())])
"""All columns of entries: with the length and the CRC-32 of the body, which need no body to be sent."""


def append_time(flags: int) -> int:
    """Return the append time in the field ``flags`` of one record, in ms since the epoch; 0 if unknown."""
    return int(flags) & _TIME_MASK


def append_times(flags: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
    """Return the append times in the field ``flags`` of records, in ms since the epoch; 0 if unknown."""
    return (flags & np.uint64(_TIME_MASK)).astype(np.int64)


def ends_batch(headers: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which records are the last of their batch.

    Args:
        headers: dtype HEADER, shape (n,).
    """
    found: npt.NDArray[np.bool_] = (headers["flags"] & np.uint64(BATCH_END)) != 0
    return found


def segment_name(base: int) -> str:
    """Return the name of the file whose first byte has the offset ``base``: 20 decimal digits."""
    return f"{base:0{_NAME_DIGITS}d}"


def is_segment_name(name: str) -> bool:
    """Whether ``name`` is the name of a segment."""
    return len(name) == _NAME_DIGITS and name.isascii() and name.isdigit()


def total_and_smallest(sizes: npt.NDArray[Any]) -> tuple[int, int]:
    """Return the sum of sizes and the smallest one, 0 if there is none.

    The sum in 64 bits: sizes of 32 bits each may wrap around to the length of what contains them.

    Args:
        sizes: unsigned, shape (n,).
    """
    if len(sizes) <= checksum.FEW:
        few: list[int] = sizes.tolist()
        return sum(few), min(few, default=0)
    return int(sizes.sum(dtype=np.int64)), int(sizes.min())


def contiguous(positions: npt.NDArray[np.int64], sizes: npt.NDArray[Any]) -> Iterator[tuple[int, int]]:
    """Yield (position, bytes) of each contiguous part of consecutive records, in order.

    Args:
        positions: shape (n,), n > 0.
        sizes: shape (n,), bytes of each record.
    """
    ends = positions + sizes.astype(np.int64)
    breaks = (np.flatnonzero(positions[1:] != ends[:-1]) + 1).tolist()
    for first, stop in pairwise([0, *breaks, len(positions)]):
        yield int(positions[first]), int(ends[stop - 1] - positions[first])


def place(sizes: npt.NDArray[Any], position: int, segment_bytes: int) -> npt.NDArray[np.int64]:
    """Return the position of each record if the first one is appended at ``position``.

    DLedger's rule: a record starts the next segment unless at least 8 bytes (a BLANK) remain after it.

    Args:
        sizes: shape (n,), bytes of each record; each at most ``segment_bytes - 8``.
        position: end of the log.
        segment_bytes: size of a data file.
    """
    if len(sizes) <= checksum.FEW:
        return np.array(_place_few(sizes.tolist(), position, segment_bytes), np.int64)
    sizes64 = sizes.astype(np.int64)
    positions = np.empty(len(sizes64), np.int64)
    ends = np.cumsum(sizes64)
    done, base = 0, position
    while done < len(sizes64):
        before = int(ends[done - 1]) if done else 0
        limit = base - base % segment_bytes + segment_bytes - PREFIX.size
        stop = int(np.searchsorted(ends, limit - base + before, side="right"))
        invariant(stop > done or base % segment_bytes > 0, "a record fits no segment", bytes=int(sizes64[done]))
        positions[done:stop] = ends[done:stop] - sizes64[done:stop] - before + base
        done = max(done, stop)
        base = limit + PREFIX.size
    return positions


def _place_few(sizes: list[int], position: int, segment_bytes: int) -> list[int]:
    positions = []
    for size in sizes:
        left = segment_bytes - position % segment_bytes
        if size + PREFIX.size > left:
            invariant(size + PREFIX.size <= segment_bytes, "a record fits no segment", bytes=size)
            position += left
        positions.append(position)
        position += size
    return positions

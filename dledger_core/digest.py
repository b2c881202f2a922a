"""Digests of ranges of entries: equal digests mean equal entries, on any store; and of rows of a table.

A range's ``content`` covers index, term, magic and body; its ``layout`` covers fields that may differ between stores
with the same entries (position, flags, body CRC). Neither depends on how the range was split into reads. They are
BLAKE3, which is as hard to forge as SHA-256 and several times faster.

The digest of rows covers what a reader receives of data entries (``record.to_arrow``): it is the same for the log's
entries and for a table that has the same rows, whatever wrote the table's files and however they are divided.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
from blake3 import blake3

from dledger_core.record import READ_SCHEMA, Records

_CONTENT = np.dtype([("index", "<i8"), ("term", "<i8"), ("magic", "<i4"), ("length", "<i4")])
_LAYOUT = np.dtype([("position", "<i8"), ("flags", "<u8"), ("crc", "<u4")])


@dataclass(frozen=True, slots=True)
class RangeDigest:
    """Digest of the entries [start, end): 32 bytes of content, 32 of layout, and the number of body bytes."""

    start: int
    end: int
    nbytes: int
    content: bytes
    layout: bytes


class RangeHasher:
    """Digest of one range; records are added in order, in blocks of any size. Not thread-safe."""

    def __init__(self, start: int) -> None:
        self._start = self._end = start
        self._nbytes = 0
        self._headers, self._bodies, self._layout = blake3(), blake3(), blake3()

    def update(self, records: Records, first: int = 0, stop: int | None = None) -> None:
        """Add records that continue the previous ones; or only those from ``first`` to ``stop``, counted from 0."""
        headers = records.headers[first:stop]
        lengths = records.headers["length"]
        begin = int(lengths[:first].sum(dtype=np.int64))
        bodies = records.bodies[begin : begin + int(headers["length"].sum(dtype=np.int64))]
        content = np.empty(len(headers), _CONTENT)
        for name in _CONTENT.names or ():
            content[name] = headers[name]
        layout = np.empty(len(headers), _LAYOUT)
        for name in _LAYOUT.names or ():
            layout[name] = headers[name]
        self._headers.update(content.tobytes())
        self._bodies.update(bodies)
        self._layout.update(layout.tobytes())
        self._nbytes += len(bodies)
        self._end += len(headers)

    def digest(self) -> RangeDigest:
        """Return the digest of all records added so far."""
        content = blake3(self._headers.digest() + self._bodies.digest()).digest()
        return RangeDigest(self._start, self._end, self._nbytes, content, self._layout.digest())


_BODIES: Final = (pa.binary(), pa.large_binary(), pa.binary_view())
_NO_TIME: Final = -(1 << 63)


def _fits(column: pa.Array | pa.ChunkedArray, wanted: pa.Field) -> bool:
    """Whether a column has the type of a column of the log, and a null only where the log may have one."""
    if pa.types.is_timestamp(wanted.type):  # of any zone: all of them name the same moments
        return pa.types.is_timestamp(column.type) and column.type.unit == "us" and column.type.tz is not None
    return column.null_count == 0 and (column.type == wanted.type or (wanted.name == "body" and column.type in _BODIES))


@dataclass(frozen=True, slots=True)
class RowsDigest:
    """Number of rows, and 32 bytes over them; no bytes if a column is missing, has another type, or has a null.

    No log has such rows, so an empty digest is equal to that of no log.
    """

    rows: int
    digest: bytes


class RowsHasher:
    """Digest of rows that are added in the order of their indexes, in tables of any size. Not thread-safe."""

    def __init__(self) -> None:
        self._rows = 0
        self._differ = False
        self._columns, self._bodies = blake3(), blake3()

    def update(self, table: pa.Table | pa.RecordBatch) -> None:
        """Add rows; columns other than those of ``READ_SCHEMA`` do not count."""
        self._rows += table.num_rows
        names = table.schema.names
        self._differ |= any(
            names.count(field.name) != 1 or not _fits(table.column(field.name), field) for field in READ_SCHEMA
        )
        if self._differ or not table.num_rows:
            return
        values = np.empty((table.num_rows, len(READ_SCHEMA)), "<i8")
        for at, name in enumerate(("index", "term", "position")):
            values[:, at] = table.column(name).to_numpy()
        values[:, 3] = table.column("timestamp").cast(pa.int64()).fill_null(_NO_TIME).to_numpy()
        row, body = 0, table.column("body")
        for chunk in body.chunks if isinstance(body, pa.ChunkedArray) else (body,):
            large = chunk.cast(pa.large_binary())
            _, offset_buffer, data = large.buffers()
            offsets = np.frombuffer(offset_buffer, "<i8")[large.offset :][: len(large) + 1]
            values[row : row + len(chunk), 4] = np.diff(offsets)
            row += len(chunk)
            if data is not None:
                self._bodies.update(memoryview(data)[int(offsets[0]) : int(offsets[-1])])
        self._columns.update(values.tobytes())

    def digest(self) -> RowsDigest:
        """Return the digest of all rows added so far."""
        both = self._columns.digest() + self._bodies.digest()
        return RowsDigest(self._rows, b"" if self._differ else blake3(both).digest())


def rows_digest(table: pa.Table) -> RowsDigest:
    """Return the digest of rows that are in the order of their indexes.

    It covers the columns index, term, position, timestamp and body, which must have the types of ``READ_SCHEMA``; a
    body may be a large one or a view too. Other columns, such as the group, do not count.

    Args:
        table: the rows, of one log.
    """
    hasher = RowsHasher()
    hasher.update(table)
    return hasher.digest()


def damaged_indexes(records: Records) -> list[int]:
    """Return the indexes of records whose body does not match its CRC."""
    if records.first_bad_body() is None:
        return []
    return [int(index) for index in records.headers["index"][records.bad_bodies()]]

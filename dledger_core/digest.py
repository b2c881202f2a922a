"""Digests of ranges of entries: equal digests mean equal entries, on any store.

A range's ``content`` covers index, term, magic and body; its ``layout`` covers fields that may differ between stores
with the same entries (position, flags, body CRC). Neither depends on how the range was split into reads. They are
BLAKE3, which is as hard to forge as SHA-256 and several times faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from dledger_core.record import Records

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


def damaged_indexes(records: Records) -> list[int]:
    """Return the indexes of records whose body does not match its CRC."""
    if records.first_bad_body() is None:
        return []
    return [int(index) for index in records.headers["index"][records.bad_bodies()]]

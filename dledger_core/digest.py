"""Digests of ranges of entries: equal digests mean equal entries, whoever holds them.

A range's ``content`` covers index, term, magic and body; its ``layout`` covers what may differ between stores that
hold the same entries (position, mark, body CRC). Both are independent of how the range was read in pieces. They are
BLAKE3, which is as hard to forge as SHA-256 and several times faster.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from blake3 import blake3

from dledger_core import checksum
from dledger_core.record import Records

__all__ = ["RangeDigest", "RangeHasher", "damaged_indexes"]

_CONTENT = np.dtype([("index", "<i8"), ("term", "<i8"), ("magic", "<i4"), ("length", "<i4")])
_LAYOUT = np.dtype([("position", "<i8"), ("flags", "<u8"), ("crc", "<u4")])


@dataclass(frozen=True, slots=True)
class RangeDigest:
    """Digest of the entries [start, end): 32 bytes of content, 32 of layout, and how many body bytes they hold."""

    start: int
    end: int
    nbytes: int
    content: bytes
    layout: bytes


class RangeHasher:
    """Takes the records of one range, in order and in pieces of any size. Not thread-safe."""

    def __init__(self, start: int) -> None:
        self._start = self._end = start
        self._nbytes = 0
        self._heads, self._bodies, self._layout = blake3(), blake3(), blake3()

    def update(self, records: Records, first: int = 0, stop: int | None = None) -> None:
        """Adds records, which continue the ones before; or only those from ``first`` to ``stop``, counted from 0."""
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
        self._heads.update(content.tobytes())
        self._bodies.update(bodies)
        self._layout.update(layout.tobytes())
        self._nbytes += len(bodies)
        self._end += len(headers)

    def digest(self) -> RangeDigest:
        """Returns the digest of what was added so far."""
        content = blake3(self._heads.digest() + self._bodies.digest()).digest()
        return RangeDigest(self._start, self._end, self._nbytes, content, self._layout.digest())


def damaged_indexes(records: Records) -> list[int]:
    """Returns the indexes of records whose body does not match its CRC (CRC 0 with mark 0: not verifiable)."""
    headers = records.headers
    if records.count == 0:
        return []
    lengths = headers["length"].astype(np.int64)
    crcs = headers["crc"].astype(np.uint32)
    foreign = (headers["flags"] == 0) & (crcs == 0)
    if not foreign.any() and checksum.first_mismatch(records.bodies, lengths, crcs) is None:
        return []
    actual = checksum.crc32_column(records.bodies, lengths)
    wrong = (actual != crcs) & ~foreign
    return [int(index) for index in headers["index"][wrong]]

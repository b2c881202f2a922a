"""Offsets of the fields of message records: every limit is checked here, once, before a field is read.

``locate`` sieves a column of bodies; the rows that pass can be read without further checks.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import Buffer, crc32_column
from dledger_core.rocketmq.message import layout
from dledger_core.rocketmq.message.columns import BoolArray, Bytes, IntArray, Rows, chunks_at, field, join_chunks

_MAGIC: Final = 4
_BORN_HOST: Final = layout.BEFORE_HOSTS.itemsize
_STORE_TIMESTAMP: Final = _BORN_HOST + 8
_BEFORE_BODY: Final = layout.BEFORE_BODY.itemsize
_REASONS: Final = (
    "",
    "null",
    "shorter than a message record",
    "no message magic",
    "its size field differs from its length",
    "its body length does not fit",
    "its topic length does not fit",
    "its properties length does not fit",
)
BROKEN_FROM: Final = 5
"""From this reason on, magic and size are those of a message: the body is a damaged message."""


@dataclass(frozen=True)
class Located:
    """The located records, by the byte offsets of their parts; all arrays have shape (m,).

    Attributes:
        data: uint8, the bytes of the column.
        rows: int64: their rows in the column, ascending.
        reasons: uint8, shape (n,): 0 for a located row, otherwise its fault (``reason_text``).
        starts: offset of the record.
        sizes: bytes of the record.
        headers: dtype HEADER: the fields before the body; of IPv6 hosts only a part.
        sys_flags: int32.
        store_host: offset of the store host.
        body: offset of the body; body_bytes its length.
        topic: offset of the topic; topic_bytes its length.
        properties: offset of the properties; properties_bytes their length.
    """

    data: Bytes
    rows: IntArray
    reasons: npt.NDArray[np.uint8]
    starts: IntArray
    sizes: IntArray
    headers: npt.NDArray[Any]
    sys_flags: npt.NDArray[np.int32]
    store_host: IntArray
    body: IntArray
    body_bytes: IntArray
    topic: IntArray
    topic_bytes: IntArray
    properties: IntArray
    properties_bytes: IntArray

    @property
    def count(self) -> int:
        """Number of located records."""
        return len(self.rows)

    @property
    def complete(self) -> bool:
        """Whether every row is located."""
        return len(self.rows) == len(self.reasons)

    @property
    def born_host(self) -> IntArray:
        """Offset of the born host."""
        return self.starts + _BORN_HOST

    def number(self, name: str) -> npt.NDArray[Any]:
        """Return a field of each header, in native byte order; a copy."""
        column = self.headers[name]
        return column.astype(column.dtype.newbyteorder("="))

    def reason_texts(self) -> list[str | None]:
        """Return the fault of each row of the column, None for a located row."""
        return [_REASONS[reason] or None for reason in self.reasons.tolist()]


def reason_text(reason: int) -> str:
    """Return the meaning of a value of ``Located.reasons``; empty for 0."""
    return _REASONS[reason]


def wrong_bodies(located: Located, bodies: Buffer | None = None) -> BoolArray:
    """Return which bodies do not match the CRC in their message, shape (m,). The CRC covers a body as it is stored.

    Args:
        located: the messages.
        bodies: their bodies joined, if the caller has them.
    """
    if bodies is None:
        bodies = join_chunks(located.data, located.body, located.body_bytes)
    crcs = crc32_column(bodies, located.body_bytes) & np.uint32(layout.BODY_CRC_MASK)
    wrong: BoolArray = crcs != located.number("body_crc").astype(np.uint32)
    return wrong


class _Sieve:
    """Rows without a fault so far, with the columns computed for them."""

    def __init__(self, rows: Rows) -> None:
        n = len(rows.starts)
        self.reasons = np.zeros(n, np.uint8)
        self.columns: dict[str, Any] = {
            "rows": np.arange(n, dtype=np.int64),
            "starts": rows.starts,
            "sizes": rows.lengths,
        }

    def __getattr__(self, name: str) -> Any:
        return self.columns[name]

    def drop(self, bad: BoolArray, reason: int) -> None:
        if not bad.any():
            return
        self.reasons[self.columns["rows"][bad]] = reason
        good = ~bad
        self.columns = {name: column[good] for name, column in self.columns.items()}


def locate(rows: Rows) -> Located:
    """Find the records among ``rows``: magic, sizes and lengths must agree exactly."""
    data, sieve = rows.data, _Sieve(rows)
    if rows.present is not None:
        sieve.drop(~rows.present, 1)
    sieve.drop(sieve.sizes < layout.RECORD_BYTES_MIN, 2)
    magics = field(data, ">i4", sieve.starts + _MAGIC)
    sieve.columns["wide"] = magics == layout.MAGIC_V2
    sieve.drop((magics != layout.MAGIC_V1) & ~sieve.wide, 3)  # before the headers: bodies may be plain
    # Read the header at once: a read per field would mostly wait for memory.
    sieve.columns["headers"] = chunks_at(data, layout.HEADER.itemsize, sieve.starts).view(layout.HEADER)[:, 0]
    sieve.drop(sieve.headers["size"] != sieve.sizes, 4)
    _locate_hosts(data, sieve)
    _locate_lengths(data, sieve)
    columns = sieve.columns
    del columns["wide"], columns["end"]
    return Located(data, reasons=sieve.reasons, **columns)


def _locate_hosts(data: Bytes, sieve: _Sieve) -> None:
    flags = sieve.headers["sys_flag"].astype(np.int32)
    born = layout.IPV6_EXTRA * ((flags & layout.BORN_IPV6) != 0)
    both = born + layout.IPV6_EXTRA * ((flags & layout.STORE_IPV6) != 0)
    sieve.columns["sys_flags"] = flags
    sieve.columns["store_host"] = sieve.starts + born + _STORE_TIMESTAMP + 8
    sieve.columns["body"] = sieve.starts + both + layout.HEADER.itemsize
    sieve.columns["end"] = sieve.starts + sieve.sizes
    sieve.drop(sieve.body + 3 > sieve.end, BROKEN_FROM)
    shifted = np.flatnonzero(sieve.body - sieve.starts != layout.HEADER.itemsize)
    if len(shifted):
        headers = sieve.headers.view(np.uint8).reshape(-1, layout.HEADER.itemsize)
        headers[shifted, _STORE_TIMESTAMP : _STORE_TIMESTAMP + 8] = chunks_at(data, 8, sieve.store_host[shifted] - 8)
        headers[shifted, -_BEFORE_BODY:] = chunks_at(data, _BEFORE_BODY, sieve.body[shifted] - _BEFORE_BODY)


def _locate_lengths(data: Bytes, sieve: _Sieve) -> None:
    """Locate body, topic and properties: read a length only inside the record, and use it only if it ends there."""
    sieve.columns["body_bytes"] = sieve.headers["body_bytes"].astype(np.int64)
    sieve.columns["topic"] = sieve.body + sieve.body_bytes + 1 + sieve.wide
    sieve.drop((sieve.body_bytes < 0) | (sieve.topic + 2 > sieve.end), 5)
    narrow = field(data, ">i1", sieve.topic - 1).astype(np.int64)
    # The byte before a V1 topic length is inside the record too, so reading two bytes is safe.
    some = sieve.wide.any()
    sieve.columns["topic_bytes"] = np.where(sieve.wide, field(data, ">i2", sieve.topic - 2), narrow) if some else narrow
    sieve.drop((sieve.topic_bytes < 0) | (sieve.topic + sieve.topic_bytes + 2 > sieve.end), 6)
    sieve.columns["properties"] = sieve.topic + sieve.topic_bytes + 2
    sieve.columns["properties_bytes"] = field(data, ">i2", sieve.properties - 2).astype(np.int64)
    sieve.drop((sieve.properties_bytes < 0) | (sieve.properties + sieve.properties_bytes != sieve.end), 7)


_HEAD: Final = (
    ("total size", 4),
    ("magic", 4),
    ("body CRC", 4),
    ("queue id", 4),
    ("flag", 4),
    ("queue offset", 8),
    ("physical offset", 8),
    ("system flag", 4),
    ("born timestamp", 8),
)


def field_at(record: bytes, offset: int) -> str | None:
    """Return the field at byte ``offset`` of a message record; None for other bytes, or after its end.

    Args:
        record: the message; its lengths may be wrong.
        offset: from the start of the record.
    """
    if len(record) < layout.RECORD_BYTES_MIN or _number(record, ">i", 4) not in (layout.MAGIC_V1, layout.MAGIC_V2):
        return None
    at = 0
    for name, length in _fields(record):
        if at <= offset < at + length:
            return name if length <= 8 else f"{name}, byte {offset - at} of {length}"
        at += length
    return None


def _fields(record: bytes) -> Iterator[tuple[str, int]]:
    yield from _HEAD
    flags = _number(record, ">i", 36)
    hosts = [20 if flags & bit else 8 for bit in (layout.BORN_IPV6, layout.STORE_IPV6)]
    yield from (("born host", hosts[0]), ("store timestamp", 8), ("store host", hosts[1]))
    yield from (("reconsume times", 4), ("prepared transaction offset", 8), ("body length", 4))
    at = 48 + hosts[0] + 8 + hosts[1] + 16
    body = max(0, _number(record, ">i", at - 4))
    yield "body", body
    wide = _number(record, ">i", 4) == layout.MAGIC_V2
    width = 2 if wide else 1
    topic = max(0, _number(record, ">h" if wide else ">b", at + body))
    yield from (("topic length", width), ("topic", topic), ("properties length", 2))
    at += body + width + topic
    yield "properties", max(0, _number(record, ">h", at))


def _number(record: bytes, kind: str, at: int) -> int:
    size = struct.calcsize(kind)
    return int(struct.unpack_from(kind, record, at)[0]) if at + size <= len(record) else 0

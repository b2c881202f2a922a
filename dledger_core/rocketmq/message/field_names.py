"""Which field of a message record a byte belongs to; for people who look at a difference."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import Final

from dledger_core.rocketmq.message import layout

__all__ = ["field_at"]

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
    """Returns the field that holds byte ``offset`` of a message record; None if it is none, or ends before.

    Args:
        record: the message; lengths in it may lie.
        offset: from the record's begin.
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

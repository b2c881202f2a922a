"""Whether a located message is damaged, and which of its bytes no check covers. Nothing else decides it.

``locate`` has checked that sizes and lengths add up to the record. All evidence:

======================================================  ==================  ===========================================
evidence                                                fault               bytes that it covers
======================================================  ==================  ===========================================
sizes and lengths add up to the record                  ``Located.reasons`` size, magic, lengths: 15 (V2: 16)
the body matches its CRC                                BODY_CRC            the body, and the CRC: 4
the last property ``__CRC32#`` is that of the record    RECORD_CRC          all, where a message has it
the system flag has no unknown bits                     SYS_FLAG            2 of 4: others may or may not be set
a compressed body starts as its type does, in a log     COMPRESSION         1 of the system flag
 of a broker; other producers may store anything
ports are below 65536                                   PORT                2 of 4, twice
the topic is UTF-8 without zero bytes, and not empty    TOPIC               none
properties have a pair, and neither start nor end       PROPERTIES          the 0x01 of a single pair
 with a zero byte
its physical offset is its position (+48 in DLedger),   POSITION            8
 where a broker wrote the log
======================================================  ==================  ===========================================

A broker appends ``__CRC32#`` only with ``enabledAppendPropCRC``: 0x01, ten digits (the lowest first) and 0x02 as the
last 20 bytes, the CRC-32 of all bytes before them without its highest bit. A message that is sent again may carry the
property of the original elsewhere among its properties: that one is not its own.

Properties need not be UTF-8: a broker stores those of a batch as the client sent them. Brokers before 5.3.1 left 20
undefined bytes after the properties of multi-dispatch messages (apache/rocketmq#8350).
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import crc32_column
from dledger_core.record import slices_of
from dledger_core.rocketmq.message import layout
from dledger_core.rocketmq.message.columns import BoolArray, IntArray, chunks_at, field, join_chunks
from dledger_core.rocketmq.message.records import Located, reason_text, wrong_bodies

CRC_PROPERTY: Final = layout.CRC_PROPERTY.encode() + bytes([layout.NAME_END])
CRC_DIGITS: Final = 10
CRC_BYTES: Final = len(CRC_PROPERTY) + CRC_DIGITS + 1
_SHAPE: Final = np.frombuffer(CRC_PROPERTY + bytes(CRC_DIGITS) + b"\x02", np.uint8)
_DIGITS: Final = slice(len(CRC_PROPERTY), CRC_BYTES - 1)
_SHAPE_BYTES_WRONG_MAX: Final = 3
_DIGITS_WRONG_MAX: Final = 2
_CRC_NAME: Final = np.uint64(int.from_bytes(CRC_PROPERTY[:8], "big"))
_HIGH_HALVES: Final = np.uint64(0xF0F0F0F0F0F0F0F0)
_DIGIT_HALVES: Final = np.uint64(0x3030303030303030)
"""The digits of ASCII, without the lower half of each byte."""
_ONES: Final = np.uint64(0x0101010101010101)
_TOPS: Final = np.uint64(0x8080808080808080)
_WORD_BYTES: Final = 8

BODY_CRC: Final = 100
RECORD_CRC: Final = 101
SYS_FLAG: Final = 102
COMPRESSION: Final = 103
PORT: Final = 104
TOPIC: Final = 105
PROPERTIES: Final = 106
POSITION: Final = 107
_TEXTS: Final = {
    BODY_CRC: "its body does not match its CRC",
    RECORD_CRC: "it does not match its property __CRC32#",
    SYS_FLAG: "its system flag has unknown bits",
    COMPRESSION: "its body is not compressed as its system flag says",
    PORT: "the port of a host in it is above 65535",
    TOPIC: "its topic is empty, not UTF-8, or has zero bytes",
    PROPERTIES: "its properties are no pairs, or start or end with zero bytes",
    POSITION: "its physical offset is not its position",
}
_PORT_MAX: Final = 65535
_IPV4_HOST: Final = np.dtype([("address", "V4"), ("port", ">u4")])
_ASCII_END: Final = 0x80
_HEADS: Final = {1: b"\x04\x22\x4d\x18", 2: b"\x28\xb5\x2f\xfd"}
"""The first bytes of LZ4 frames and of zstd frames."""
_HEAD_BYTES: Final = 4
_ZLIB_METHOD: Final = 8
_ZLIB_MULTIPLE: Final = 31
_FIXED_BYTES: Final = 4 + 4 + 4 + 2
"""Size, magic, and the lengths of body and properties; the length of the topic has one or two."""
_ALWAYS_CHECKED_BYTES: Final = 2 + 2 + 2
"""Half of the system flag and of both ports."""
_RECOGNIZED_BYTES: Final = 4 + 4
"""Size and magic: bytes without them are no message."""
_POSITION_BYTES: Final = 8
_CRC_FIELD_BYTES: Final = 4

Faults = npt.NDArray[np.uint8]


def fault_text(fault: int) -> str:
    """Return the meaning of a value of ``faults``, or of ``Located.reasons``; empty for 0."""
    return _TEXTS.get(fault) or reason_text(fault)


def faults(located: Located, positions: IntArray | None = None, wrong_body: BoolArray | None = None) -> Faults:
    """Return the first fault of each located message, 0 without one; shape (m,).

    Args:
        located: the messages.
        positions: int64, shape (m,): the physical offset that each must have; -1 = any.
        wrong_body: the result of ``wrong_bodies``, if the caller has it.
    """
    found = np.zeros(located.count, np.uint8)
    if not located.count:
        return found
    for fault, wrong in (
        (COMPRESSION, _wrong_compression(located)),  # a producer may have written it: any other fault comes first
        (POSITION, None if positions is None else _wrong_positions(located, positions)),
        (PROPERTIES, _wrong_properties(located)),
        (TOPIC, _wrong_topics(located)),
        (PORT, _wrong_ports(located)),
        (SYS_FLAG, (located.sys_flags & ~np.int32(layout.SYS_FLAGS)) != 0),
        (RECORD_CRC, _wrong_crcs(located)),
        (BODY_CRC, wrong_bodies(located) if wrong_body is None else wrong_body),
    ):
        if wrong is not None and wrong.any():
            found[wrong] = fault
    return found


def own_crc_rows(located: Located) -> IntArray:
    """Return the numbers of the located messages that end with a correct CRC property."""
    rows, shapes, digits = _crc_properties(located)
    return np.asarray(rows[(shapes == 0) & (digits == 0)])


def crc_digits(located: Located, rows: IntArray, data: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """Return the ten digits, the least significant first, of the CRC over each message without its CRC property."""
    lengths = located.sizes[rows] - CRC_BYTES
    crcs = crc32_column(slices_of([data], lengths, 0, located.starts[rows]), lengths).astype(np.int64)
    digits = (crcs[:, None] & layout.BODY_CRC_MASK) // 10 ** np.arange(CRC_DIGITS, dtype=np.int64) % 10
    return (digits + ord("0")).astype(np.uint8)


def _crc_properties(located: Located) -> tuple[IntArray, IntArray, IntArray]:
    """Return the messages that may end with a CRC property, its bytes with a wrong form, and its wrong digits."""
    rows = np.flatnonzero(located.properties_bytes >= CRC_BYTES)
    starts = located.starts[rows] + located.sizes[rows] - CRC_BYTES
    names, digits = field(located.data, ">u8", starts), field(located.data, ">u8", starts + len(CRC_PROPERTY))
    near = (names == _CRC_NAME) | ((digits & _HIGH_HALVES) == _DIGIT_HALVES)  # few have either
    rows, starts = rows[near], starts[near]
    tails = chunks_at(located.data, CRC_BYTES, starts)
    right = tails == _SHAPE
    right[:, _DIGITS] = (tails[:, _DIGITS] >= ord("0")) & (tails[:, _DIGITS] <= ord("9"))
    shapes = CRC_BYTES - right.sum(axis=1)
    near = shapes <= _SHAPE_BYTES_WRONG_MAX
    rows, tails, shapes = rows[near], tails[near], shapes[near]
    if not len(rows):
        return rows, shapes, shapes
    return rows, shapes, (tails[:, _DIGITS] != crc_digits(located, rows, located.data)).sum(axis=1)


def _wrong_crcs(located: Located) -> BoolArray:
    """Return which messages differ from their CRC property. A property that only resembles one must have its digits."""
    rows, shapes, digits = _crc_properties(located)
    wrong = np.zeros(located.count, np.bool_)
    wrong[rows] = np.where(shapes == 0, digits > 0, digits <= _DIGITS_WRONG_MAX)
    return wrong


def _wrong_compression(located: Located) -> BoolArray:
    wrong = np.zeros(located.count, np.bool_)
    flags = located.sys_flags
    rows = np.flatnonzero(((flags & layout.COMPRESSED) != 0) & (located.body_bytes > 0))
    if not len(rows):
        return wrong
    kinds = (flags[rows] & layout.COMPRESSION_MASK) >> layout.COMPRESSION_SHIFT
    # A record has more than four bytes after the start of its body; those after a shorter body are in no frame.
    heads = chunks_at(located.data, _HEAD_BYTES, located.body[rows])
    zlib = ((heads[:, 0] & 0xF) == _ZLIB_METHOD) & (field(heads.reshape(-1), ">u2", 4 * np.arange(len(rows))) % 31 == 0)
    right = zlib & ((kinds == 0) | (kinds == 3))
    for kind, head in _HEADS.items():
        right |= (kinds == kind) & (heads == np.frombuffer(head, np.uint8)).all(axis=1)
    wrong[rows] = ~right
    return wrong


def _wrong_ports(located: Located) -> BoolArray:
    if not (located.sys_flags & (layout.BORN_IPV6 | layout.STORE_IPV6)).any():
        ports = [located.headers[name].view(_IPV4_HOST)["port"] for name in ("born_host", "store_host")]
    else:
        extras = [((located.sys_flags & bit) != 0) * layout.IPV6_EXTRA for bit in (layout.BORN_IPV6, layout.STORE_IPV6)]
        starts = located.born_host + extras[0] + 4, located.store_host + extras[1] + 4
        ports = [field(located.data, ">u4", at) for at in starts]
    return np.asarray((ports[0] > _PORT_MAX) | (ports[1] > _PORT_MAX))


def _wrong_topics(located: Located) -> BoolArray:
    lengths = located.topic_bytes
    text = np.frombuffer(join_chunks(located.data, located.topic, lengths), np.uint8)
    wrong: BoolArray = lengths == 0
    odd = (text == 0) | (text >= _ASCII_END)
    if not odd.any():
        return wrong
    ends, counts = np.cumsum(lengths), np.zeros(len(text) + 1, np.int64)
    np.cumsum(odd, out=counts[1:])
    for row in np.flatnonzero(counts[ends] > counts[ends - lengths]).tolist():
        topic = text[ends[row] - lengths[row] : ends[row]].tobytes()
        wrong[row] = 0 in topic or not _is_utf8(topic)
    return wrong


def _wrong_properties(located: Located) -> BoolArray:
    lengths = located.properties_bytes
    rows = np.flatnonzero(lengths > 0)
    data, starts, ends = located.data, located.properties, located.properties + lengths
    wrong = np.zeros(located.count, np.bool_)
    wrong[rows] = ~_has_pairs(located, rows)
    rows = rows[(data[starts[rows]] == 0) | (data[ends[rows] - 1] == 0)]
    wrong[rows] |= (data[starts[rows]] == 0) | ~_undefined_tail(located, rows)
    return wrong


def _undefined_tail(located: Located, rows: IntArray) -> BoolArray:
    """Return which of ``rows`` have the undefined bytes of apache/rocketmq#8350 after their properties."""
    found = np.zeros(len(rows), np.bool_)
    longer = np.flatnonzero(located.properties_bytes[rows] > CRC_BYTES)
    ends = located.properties[rows[longer]] + located.properties_bytes[rows[longer]]
    found[longer] = located.data[ends - CRC_BYTES - 1] == layout.PROPERTY_END
    return found


def _has_pairs(located: Located, rows: IntArray) -> BoolArray:
    """Return which of ``rows`` have a 0x01 in their properties: a word at a time, since it is near their start."""
    found = np.zeros(len(rows), np.bool_)
    at, ends = located.properties[rows], located.properties[rows] + located.properties_bytes[rows]
    left = np.arange(len(rows))
    while len(left):
        bytes_left = np.minimum(ends[left] - at[left], _WORD_BYTES)
        # The word that ends at most at the end; bytes before the properties are shifted out of it.
        words = field(located.data, "<u8", at[left] + bytes_left - _WORD_BYTES)
        words = words >> (8 * (_WORD_BYTES - bytes_left)).astype(np.uint64)
        found[left] = _has_name_end(words)
        at[left] += bytes_left
        left = left[~found[left] & (at[left] < ends[left])]
    return found


def _has_name_end(words: npt.NDArray[np.uint64]) -> BoolArray:
    """Return which words have a byte 0x01: it becomes 0, from which a subtraction borrows."""
    words = words ^ _ONES
    return np.asarray(((words - _ONES) & ~words & _TOPS) != 0)


def _pairs(located: Located) -> IntArray:
    """Return how many 0x01 the properties of each message have."""
    text = np.frombuffer(join_chunks(located.data, located.properties, located.properties_bytes), np.uint8)
    ends = np.cumsum(located.properties_bytes)
    return np.diff(np.searchsorted(np.flatnonzero(text == layout.NAME_END), ends), prepend=0)


def _wrong_positions(located: Located, positions: IntArray) -> BoolArray:
    return np.asarray((positions >= 0) & (located.number("physical_offset") != positions))


def text_rows(located: Located) -> IntArray:
    """Return the messages whose properties are not UTF-8, or end with a zero byte."""
    lengths = located.properties_bytes
    text = np.frombuffer(join_chunks(located.data, located.properties, lengths), np.uint8)
    ends = np.cumsum(lengths)
    counts = np.zeros(len(text) + 1, np.int64)
    np.cumsum(text >= _ASCII_END, out=counts[1:])
    wrong: BoolArray = lengths > 0
    wrong[wrong] = text[ends[wrong] - 1] == 0
    for row in np.flatnonzero((counts[ends] > counts[ends - lengths]) & ~wrong).tolist():
        wrong[row] = not _is_utf8(text[ends[row] - lengths[row] : ends[row]].tobytes())
    return np.flatnonzero(wrong)


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def covered(located: Located, positions: IntArray | None = None, *, expected: bool = True) -> tuple[IntArray, IntArray]:
    """Return how many bytes of each message a checksum covers, and how many more must agree with others.

    A change of any other byte can go unnoticed.

    Args:
        located: the messages.
        positions: as in ``faults``.
        expected: whether bytes without the magic or the size of a message are damage.
    """
    checksums = located.body_bytes + _CRC_FIELD_BYTES
    compared = np.full(located.count, _FIXED_BYTES + _ALWAYS_CHECKED_BYTES, np.int64)
    if not expected:
        compared -= _RECOGNIZED_BYTES
    compared += 1 + (located.number("magic") == layout.MAGIC_V2) + (_pairs(located) == 1)
    if expected:  # the byte of the system flag that has the type of the compression
        compared += ((located.sys_flags & layout.COMPRESSED) != 0) & (located.body_bytes > 0)
    if positions is not None:
        compared += np.where(positions >= 0, _POSITION_BYTES, 0)
    signed = own_crc_rows(located)
    compared[signed] = 0
    checksums[signed] = located.sizes[signed] - (0 if expected else _RECOGNIZED_BYTES)
    return checksums, compared

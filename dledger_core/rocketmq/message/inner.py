"""Inner batches of RocketMQ 5: messages that a broker stored in the body of one record (topics of type BatchCQ).

Consumers unwrap a record whose system flag has both INNER_BATCH and NEED_UNWRAP. Its body is contiguous messages::

    0   4  total size        8   4  CRC (unused)     16  4  body length, body
    4   4  magic (unused)    12  4  flag                 2  properties length, properties

They share the record's topic, queue, hosts, times and physical offset; the k-th one has its queue offset plus k.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import crc32_column
from dledger_core.rocketmq.message import layout
from dledger_core.rocketmq.message.columns import BoolArray, Bytes, IntArray, field, join_chunks
from dledger_core.rocketmq.message.records import Located

_UNWRAPPED: Final = layout.INNER_BATCH | layout.NEED_UNWRAP
_FLAG: Final = 12
_BODY_BYTES: Final = 16
_BODY: Final = 20
_LEAST_BYTES: Final = 22
_COUNT_MAX: Final = 32767
"""RocketMQ counts the messages of a batch in 16 bits."""
_TOPIC_BYTES_MAX: Final = 255
"""RocketMQ's longest topic; each message of a batch repeats it, so a longer one would turn few bytes into gigabytes."""
_ROW_BYTES: Final = 256
"""About the memory of the columns that the messages of a batch repeat, without the topic."""
_FEW: Final = 4
_PER_MESSAGE: Final = (
    "starts",
    "sizes",
    "headers",
    "sys_flags",
    "store_host",
    "body",
    "body_bytes",
    "topic",
    "topic_bytes",
    "properties",
    "properties_bytes",
)


@dataclass(frozen=True)
class Unwrapped:
    """Messages with those of inner batches as rows of their own.

    Attributes:
        located: the messages; of an inner message, size and start are the record's.
        of: int64, shape (m,): the located record of each message.
        origin: int64, shape (n,): the row of the column of each row.
        batch_index: int64, shape (m,): number in its inner batch, -1 without one.
        malformed: int64: messages, by number, whose inner batch cannot be unwrapped, and which are one row.
        repeated_bytes: about the memory of what inner messages repeat.
    """

    located: Located
    of: IntArray
    origin: IntArray
    batch_index: IntArray
    malformed: IntArray
    repeated_bytes: int


@dataclass(frozen=True)
class _Inner:
    """Inner messages: the record of each, its number there, and the offset of its first byte; all shape (p,)."""

    owners: IntArray
    numbers: IntArray
    starts: IntArray


def malformed_batches(located: Located) -> IntArray:
    """Return the numbers of the messages whose inner batch cannot be unwrapped."""
    rows = _batches(located)
    return _split(located, rows)[1] if len(rows) else rows


def unwrap(located: Located) -> Unwrapped | None:
    """Return the messages with those of inner batches as rows of their own; None if there is no inner batch."""
    rows = _batches(located)
    if not len(rows):
        return None
    inner, malformed = _split(located, rows)
    counts = np.ones(located.count, np.int64)
    counts[rows] = 0
    counts[malformed] = 1
    np.add.at(counts, inner.owners, 1)
    of = np.repeat(np.arange(located.count), counts)
    batch_index = np.full(len(of), -1, np.int64)
    batched = np.zeros(located.count, np.bool_)
    batched[inner.owners] = True
    batch_index[batched[of]] = inner.numbers
    every = np.ones(len(located.reasons), np.int64)
    every[located.rows] = counts
    again = np.full(located.count, -1, np.int64)
    again[malformed] = malformed
    repeated = int(((_ROW_BYTES + located.topic_bytes) * np.where(batched, counts, 0)).sum())
    return Unwrapped(
        _repeated(located, of, inner, np.flatnonzero(batch_index >= 0), np.repeat(located.reasons, every)),
        of,
        np.repeat(np.arange(len(every)), every),
        batch_index,
        np.flatnonzero(again[of] >= 0),
        repeated,
    )


def _batches(located: Located) -> IntArray:
    """Return the numbers of the messages that consumers unwrap; no client compresses one, or writes a wrong CRC."""
    wanted = (located.sys_flags & (_UNWRAPPED | layout.COMPRESSED)) == _UNWRAPPED
    rows = np.flatnonzero(wanted)
    if not len(rows):
        return rows
    lengths = located.body_bytes[rows]
    crcs = crc32_column(join_chunks(located.data, located.body[rows], lengths), lengths)
    right = (crcs & np.uint32(layout.BODY_CRC_MASK)) == located.number("body_crc")[rows].astype(np.uint32)
    return np.asarray(rows[right])


def _repeated(located: Located, of: IntArray, inner: _Inner, at: IntArray, reasons: npt.NDArray[np.uint8]) -> Located:
    """Return the record of each message, with body, properties, flag and queue offset of inner ones at ``at``."""
    data, starts = located.data, inner.starts
    columns = {name: getattr(located, name)[of] for name in _PER_MESSAGE}
    body_bytes = field(data, ">i4", starts + _BODY_BYTES).astype(np.int64)
    columns["body"][at], columns["body_bytes"][at] = starts + _BODY, body_bytes
    properties = starts + _BODY + body_bytes + 2
    columns["properties"][at] = properties
    columns["properties_bytes"][at] = field(data, ">i2", properties - 2)
    columns["headers"]["flag"][at] = field(data, ">i4", starts + _FLAG)
    with np.errstate(over="ignore"):
        columns["headers"]["queue_offset"][at] = columns["headers"]["queue_offset"][at] + inner.numbers
    return replace(located, rows=np.flatnonzero(reasons == 0), reasons=reasons, **columns)


def _split(located: Located, rows: IntArray) -> tuple[_Inner, IntArray]:
    """Return the inner messages of ``rows``, in order, and those of the rows that are malformed."""
    data, at = located.data, located.body[rows]
    owners, numbers, starts, bad = _hops(data, at, at + located.body_bytes[rows])
    ends = starts + field(data, ">i4", starts)
    bodies = field(data, ">i4", starts + _BODY_BYTES).astype(np.int64)
    fits = (bodies >= 0) & (starts + _BODY + bodies + 2 <= ends)
    lengths = field(data, ">i2", np.where(fits, starts + _BODY + bodies, starts)).astype(np.int64)
    fits &= (lengths >= 0) & (starts + _BODY + bodies + 2 + lengths == ends)
    bad[owners[~fits]] = True
    counts = np.bincount(owners, minlength=len(rows))
    bad |= (counts == 0) | (counts > _COUNT_MAX) | (located.topic_bytes[rows] > _TOPIC_BYTES_MAX)
    kept = ~bad[owners]
    order = np.lexsort((numbers[kept], owners[kept]))
    return _Inner(rows[owners[kept]][order], numbers[kept][order], starts[kept][order]), rows[bad]


def _hops(data: Bytes, at: IntArray, ends: IntArray) -> tuple[IntArray, IntArray, IntArray, BoolArray]:
    """Follow the sizes in all bodies at once: owner, number and start of each inner message, and the wrong bodies."""
    at, bad = at.copy(), np.zeros(len(at), np.bool_)
    found: list[tuple[IntArray, IntArray, IntArray]] = []
    left, number = np.flatnonzero(at < ends), 0
    while len(left) > _FEW and number <= _COUNT_MAX:
        fits = at[left] + _LEAST_BYTES <= ends[left]
        bad[left[~fits]] = True
        left = left[fits]
        sizes = field(data, ">i4", at[left]).astype(np.int64)
        fits = (sizes >= _LEAST_BYTES) & (at[left] + sizes <= ends[left])
        bad[left[~fits]] = True
        left, sizes = left[fits], sizes[fits]
        found.append((left, np.full(len(left), number), at[left]))
        at[left] += sizes
        left, number = left[at[left] < ends[left]], number + 1
    for body in left.tolist():
        starts, bad[body] = _hops_in(data, int(at[body]), int(ends[body]), number)
        found.append((np.full(len(starts), body), np.arange(number, number + len(starts)), np.array(starts, np.int64)))
    if not found:
        empty = np.zeros(0, np.int64)
        return empty, empty, empty, bad
    owners, numbers, firsts = (np.concatenate(each) for each in zip(*found, strict=True))
    return owners, numbers, firsts, bad


def _hops_in(data: Bytes, at: int, end: int, number: int) -> tuple[list[int], bool]:
    """Follow the sizes in one body, from its message ``number`` on; the second value is whether a size is wrong."""
    view = data.data
    starts: list[int] = []
    while at < end and number + len(starts) <= _COUNT_MAX:
        if at + _LEAST_BYTES > end:
            return starts, True
        (size,) = struct.unpack_from(">i", view, at)
        if size < _LEAST_BYTES or at + size > end:
            return starts, True
        starts.append(at)
        at += size
    return starts, False

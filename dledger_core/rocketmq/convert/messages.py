"""The two fields of a RocketMQ message that hold its location: queueOffset and physicalOffset.

Relocated entries get new values; every other byte stays. A message may carry a CRC over itself as its last property
(classic CommitLogs with ``enabledAppendPropCRC``): a correct CRC is updated.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.checksum import Buffer
from dledger_core.rocketmq.message import layout
from dledger_core.rocketmq.message.columns import Rows, binary_column, join_chunks
from dledger_core.rocketmq.message.integrity import CRC_DIGITS, crc_digits, own_crc_rows
from dledger_core.rocketmq.message.layout import PHYSICAL_OFFSET_AT
from dledger_core.rocketmq.message.records import Located, locate

QUEUE_OFFSET_AT: Final = 20
_PREPARED_BEFORE_BODY: Final = 12
"""The offset of the half message and the length of the body precede the body."""

_I64 = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]


@dataclass(slots=True)
class QueueCounters:
    """The next queue offset of each queue, by (topic, queue id)."""

    following: dict[tuple[bytes, int], int] = field(default_factory=dict)

    def saved(self) -> list[list[Any]]:
        """Return the counters for JSON."""
        return [[topic.hex(), queue, after] for (topic, queue), after in self.following.items()]

    @classmethod
    def restored(cls, saved: list[list[Any]]) -> QueueCounters:
        """Return the counters from the result of ``saved``."""
        return cls({(bytes.fromhex(topic), int(queue)): int(after) for topic, queue, after in saved})

    def assign(self, located: Located, kept: _Bools) -> _I64:
        """Return a queue offset for each message, in log order.

        Args:
            located: the messages.
            kept: messages that keep their offset; the others get the next one of their queue. Prepared and
                rollback messages are in no queue and get 0, as in a broker.
        """
        offsets: _I64 = located.number("queue_offset")
        queued = layout.in_queue(located.sys_flags)
        offsets[~queued & ~kept] = 0
        rows = np.flatnonzero(queued)
        if not len(rows):
            return offsets
        codes, queues = _queues(located, rows)
        order = np.argsort(codes, kind="stable")
        edges = np.flatnonzero(np.diff(codes[order])) + 1
        for group in np.split(rows[order], edges):  # once per queue
            self._assign_one(queues[int(codes[np.searchsorted(rows, group[0])])], group, kept, offsets)
        return offsets

    def _assign_one(self, queue: tuple[bytes, int], group: _I64, kept: _Bools, offsets: _I64) -> None:
        mine, base = kept[group], self.following.get(queue, 0)
        if bool(mine.any()):  # messages with a broker's offset come first in a log
            base = max(base, int(offsets[group[mine]].max()) + 1)
        fresh = group[~mine]
        offsets[fresh] = np.arange(base, base + len(fresh))
        self.following[queue] = base + len(fresh)


def _queues(located: Located, rows: _I64) -> tuple[_I64, dict[int, tuple[bytes, int]]]:
    """Return a code of the queue of each of ``rows``, and the queue of each code."""
    lengths = located.topic_bytes[rows]
    topics = binary_column(join_chunks(located.data, located.topic[rows], lengths), lengths).dictionary_encode()
    ids = pa.array(located.number("queue_id")[rows]).dictionary_encode()
    width = max(len(ids.dictionary), 1)
    codes = np.asarray(topics.indices).astype(np.int64) * width + np.asarray(ids.indices).astype(np.int64)
    names, numbers = topics.dictionary.to_pylist(), ids.dictionary.to_pylist()
    found = {int(code): (names[code // width], numbers[code % width]) for code in np.unique(codes).tolist()}
    return codes, found


def located_in(bodies: Buffer, starts: _I64, lengths: _I64) -> Located:
    """Find the bodies that are complete message records."""
    return locate(Rows(np.frombuffer(bodies, np.uint8), starts, lengths, None))


def patch(
    located: Located,
    chosen: _Bools,
    physical: _I64,
    queue_offsets: _I64 | None,
    prepared: tuple[_I64, _I64] | None = None,
) -> npt.NDArray[np.uint8]:
    """Return the column's bytes with the offsets of some messages replaced.

    Args:
        located: the messages.
        chosen: bool, shape (m,): the messages to change.
        physical: int64, shape (m,): their physical offsets.
        queue_offsets: int64, shape (m,), or None to keep the offsets.
        prepared: numbers of chosen messages, and the physical offset of the half message of each.
    """
    data = located.data.copy()
    at = located.starts[chosen]
    signed = own_crc_rows(located)
    _put(data, at + PHYSICAL_OFFSET_AT, physical[chosen])
    if queue_offsets is not None:
        _put(data, at + QUEUE_OFFSET_AT, queue_offsets[chosen])
    if prepared is not None:
        rows, half = prepared
        _put(data, located.body[rows] - _PREPARED_BEFORE_BODY, half)
    signed = signed[chosen[signed]]
    if len(signed):
        ends = located.starts[signed] + located.sizes[signed]
        digits = ends[:, None] - 1 - CRC_DIGITS + np.arange(CRC_DIGITS)
        data[digits] = crc_digits(located, signed, data)
    return data


def _put(data: npt.NDArray[np.uint8], at: _I64, numbers: _I64) -> None:
    data[at[:, None] + np.arange(8)] = numbers.astype(">i8").view(np.uint8).reshape(-1, 8)

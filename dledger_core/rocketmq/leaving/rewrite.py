"""From chunks of a source to messages of a CommitLog: at new positions, with what each message says about positions.

A message keeps all its bytes except its physical offset, the physical offset of its half message, the property
``__CRC32#`` over itself, and in a native log its queue offset, which a native server does not assign.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.checksum import Buffer
from dledger_core.errors import CorruptRecordError
from dledger_core.record import place
from dledger_core.rocketmq.convert.messages import QueueCounters, located_in, patch
from dledger_core.rocketmq.convert.parts import Chunk
from dledger_core.rocketmq.leaving.batch_queues import batch_sizes
from dledger_core.rocketmq.leaving.queue_files import Queue
from dledger_core.rocketmq.message.columns import binary_column, join_chunks
from dledger_core.rocketmq.message.decode import consume_queue_columns
from dledger_core.rocketmq.message.layout import INNER_BATCH, PHYSICAL_OFFSET_DELTA, in_queue
from dledger_core.rocketmq.message.records import Located
from dledger_core.rocketmq.store.consume_queue import BATCH_UNIT
from dledger_core.rocketmq.store.dispatch import NAMED_AGAIN, with_further_units

_I64 = npt.NDArray[np.int64]
_Bools = npt.NDArray[np.bool_]

HALF_TOPIC: Final = b"RMQ_SYS_TRANS_HALF_TOPIC"
TIMER_TOPIC: Final = b"rmq_sys_wheel_timer"
REFERRED_TOPICS: Final = (HALF_TOPIC, TIMER_TOPIC)
"""Topics whose messages others refer to by physical offset."""
_ROLLED_BACK: Final = 0xC
_BLANK_BYTES: Final = 8


@dataclass(frozen=True, slots=True)
class Messages:
    """Consecutive messages of the new CommitLog; columns have shape (n,).

    Attributes:
        data: their bytes, contiguous.
        numbers: int64: indexes in a log, numbers in a CommitLog.
        old: int64: physical offsets in the source.
        positions: int64: physical offsets in the new CommitLog.
        located: the messages in ``data``.
        after: end of the message before them.
        moved: whether they must be written: messages of a CommitLog that keeps its positions are there already.
        half_moved: number of messages whose half message has another position now.
    """

    data: Buffer
    numbers: _I64
    old: _I64
    positions: _I64
    located: Located
    after: int
    moved: bool
    half_moved: int = 0

    @property
    def sizes(self) -> _I64:
        """int64, shape (n,): bytes of each message."""
        return self.located.sizes


class References(Protocol):
    """The new positions of messages that others refer to."""

    def extend(self, old: _I64, new: _I64) -> None:
        """Add messages by their old and new positions, ascending."""

    def find(self, old: _I64) -> _I64:
        """Return the new position of each old one, -1 where the source has no such message."""


class Rewriter:
    """Gives messages contiguous positions.

    Args:
        file_bytes: size of a CommitLog file.
        position: end of the last message.
        floor: end of the classic CommitLog before the log: its last file belongs to it completely.
        queues: the next queue offsets of a native log; None = all messages have one.
        broker_end: end of the indexes whose messages have a queue offset from a broker.
    """

    def __init__(
        self,
        file_bytes: int,
        position: int,
        floor: int = 0,
        queues: QueueCounters | None = None,
        broker_end: int = 1 << 62,
    ) -> None:
        self._file_bytes = file_bytes
        self.position = position
        self._floor = floor
        self.queues = queues
        self._broker_end = broker_end

    def rewrite(
        self, chunk: Chunk, keep: _Bools, references: References | None = None, *, move: bool = True
    ) -> Messages | None:
        """Return the kept entries as messages of the new CommitLog; None if none is kept.

        Args:
            chunk: entries of a source.
            keep: bool, shape (n,).
            references: for the offset of half messages; None = leave it as it is.
            move: False = the messages of a classic CommitLog keep their positions.

        Raises:
            CorruptRecordError: a kept entry is not a message, or it does not fit a file.
        """
        numbers, kept = chunk.numbers[keep], chunk.only(keep)
        if not kept.count:
            return None
        located = located_in(kept.bodies, kept.starts, kept.lengths)
        self._check(kept, numbers, located)
        if not move:
            self.position = max(self.position, int(kept.positions[-1] + kept.lengths[-1]))
            if self.queues is not None:
                self.queues.assign(located, np.ones(located.count, np.bool_))
            at = kept.positions
            self._refer(references, located, at, at)
            return Messages(kept.bodies, numbers, at, at, located, after=int(at[0]), moved=False)
        old = kept.positions + (PHYSICAL_OFFSET_DELTA if kept.name == "log" else 0)
        after = max(self.position, self._floor)
        positions = place(kept.lengths, after, self._file_bytes)
        self.position = int(positions[-1] + kept.lengths[-1])
        offsets = None if self.queues is None else self.queues.assign(located, numbers < self._broker_end)
        self._refer(references, located, old, positions)
        everything = np.ones(located.count, np.bool_)
        prepared = self._prepared(located, references)
        data = patch(located, everything, positions, offsets, prepared)
        new = located_in(data.data, kept.starts, kept.lengths)
        half_moved = 0 if prepared is None else len(prepared[0])
        return Messages(data.data, numbers, old, positions, new, after=after, moved=True, half_moved=half_moved)

    def _check(self, kept: Chunk, numbers: _I64, located: Located) -> None:
        if not located.complete:
            row = int(np.flatnonzero(located.reasons)[0])
            raise CorruptRecordError(
                f"entry {numbers[row]} is not a RocketMQ message: {located.reason_texts()[row]}",
                "",
                f"a CommitLog has only messages; leave the entry out with --drop-damaged {numbers[row]}",
                {"index": int(numbers[row])},
            )
        largest = int(kept.lengths.max())
        if largest + _BLANK_BYTES > self._file_bytes:
            row = int(kept.lengths.argmax())
            raise CorruptRecordError(
                f"the message of entry {numbers[row]} has {largest} bytes and does not fit a CommitLog file of "
                f"{self._file_bytes}",
                "",
                "set a larger mappedFileSizeCommitLog in the file of --broker-conf",
                {"index": int(numbers[row])},
            )

    @staticmethod
    def _refer(references: References | None, located: Located, old: _I64, new: _I64) -> None:
        if references is not None:
            rows = _of_topics(located, REFERRED_TOPICS)
            references.extend(old[rows], new[rows])

    @staticmethod
    def _prepared(located: Located, references: References | None) -> tuple[_I64, _I64] | None:
        """Return the messages that name a half message which the source has, and its new positions."""
        if references is None:
            return None
        offsets: _I64 = located.number("prepared_transaction_offset")
        rows = np.flatnonzero((offsets > 0) & ~_plain(located))
        if not len(rows):
            return None
        found = references.find(offsets[rows])
        return rows[found >= 0], found[found >= 0]


def _of_topics(located: Located, topics: tuple[bytes, ...]) -> _Bools:
    """Return which messages have one of these topics."""
    found = np.zeros(located.count, np.bool_)
    for topic in topics:
        rows = np.flatnonzero(located.topic_bytes == len(topic))
        if len(rows):
            lengths = located.topic_bytes[rows]
            names = binary_column(join_chunks(located.data, located.topic[rows], lengths), lengths)
            found[rows[np.asarray(pc.equal(names, topic))]] = True
    return found


def _plain(located: Located) -> _Bools:
    """Return which messages belong to no transaction: they name no half message."""
    return np.asarray((located.sys_flags & _ROLLED_BACK) == 0)


class Units:
    """The units of messages, by queue; columns have shape (m,).

    Args:
        messages: the messages.
        delay_levels_ms: the broker's ``messageDelayLevel``.
        batch_topics: topics of type BatchCQ, whose queues have another format.
    """

    def __init__(self, messages: Messages, delay_levels_ms: tuple[int, ...], batch_topics: frozenset[str]) -> None:
        located = messages.located
        bodies = binary_column(messages.data, located.sizes)
        names = ["topic", "queue_id", "queue_offset", "size", "tags_code", "dispatch_queues", "dispatch_offsets"]
        columns = consume_queue_columns(bodies, names, delay_levels_ms=delay_levels_ms)
        flags, positions = located.sys_flags, messages.positions
        queued = in_queue(flags)
        skipped = pa.nulls(len(positions), pa.string())
        table = pa.RecordBatch.from_arrays(
            [*columns.columns, pa.array(positions), skipped], names=[*names, "position", "skipped"]
        )
        batched = np.zeros(len(positions), np.bool_)
        if batch_topics:
            batched = np.asarray(pc.is_in(table.column("topic"), pa.array(sorted(batch_topics), pa.string())))
        other = np.asarray((flags & INNER_BATCH) != 0) & ~batched
        self.in_no_queue = int((~queued).sum())
        self.of_other_queues = int((queued & other).sum())
        self._batches = self._batch_units(table, located, np.flatnonzero(queued & batched))
        table = table.filter(pa.array(queued & ~other & ~batched))
        units, _ = with_further_units(table, np.ones(table.num_rows, np.bool_))
        self._again = np.asarray(pc.equal(pc.fill_null(units.column("skipped"), ""), NAMED_AGAIN))
        self._topics = units.column("topic").dictionary_encode()
        self._queue_ids = np.asarray(units.column("queue_id")).astype(np.int64)
        self.offsets: _I64 = np.asarray(units.column("queue_offset")).astype(np.int64)
        self.positions: _I64 = np.asarray(units.column("position"))
        self.sizes = np.asarray(units.column("size"))
        self.tags_codes: _I64 = np.asarray(units.column("tags_code"))

    def by_queue(self) -> list[tuple[Queue, npt.NDArray[np.intp], bool]]:
        """Return each queue (topic, queue id) with its rows in log order, and whether a message names it again."""
        found = []
        for queue, rows in _by_queue(self._topics, self._queue_ids):
            again = self._again[rows]
            found.append((queue, rows[~again], bool(again.any())))
        return found

    def batches(self) -> list[tuple[Queue, npt.NDArray[np.void]]]:
        """Return the units of each queue of a batch topic, dtype BATCH_UNIT, in log order."""
        return self._batches

    @staticmethod
    def _batch_units(
        table: pa.RecordBatch, located: Located, rows: npt.NDArray[np.intp]
    ) -> list[tuple[Queue, npt.NDArray[np.void]]]:
        if not len(rows):
            return []
        units = np.zeros(len(rows), BATCH_UNIT)
        chosen = table.take(pa.array(rows))
        for name, column in {"physical_offset": "position", "size": "size", "tags_code": "tags_code"}.items():
            units[name] = np.asarray(chosen.column(column))
        units["queue_offset"] = np.asarray(chosen.column("queue_offset"))
        units["stored_ms"] = located.number("store_timestamp")[rows]
        units["messages"] = batch_sizes(located)[rows]
        units["compacted_offset"] = -1  # none
        topics, ids = chosen.column("topic").dictionary_encode(), np.asarray(chosen.column("queue_id"))
        return [(queue, units[found]) for queue, found in _by_queue(topics, ids.astype(np.int64))]


def _by_queue(topics: pa.DictionaryArray, queue_ids: _I64) -> list[tuple[Queue, npt.NDArray[np.intp]]]:
    """Return each queue with its rows in order."""
    if not len(queue_ids):
        return []
    ids, numbers = np.unique(queue_ids, return_inverse=True)
    codes = np.asarray(topics.indices).astype(np.int64) * len(ids) + numbers
    order = np.argsort(codes, kind="stable")
    names, found = topics.dictionary.to_pylist(), []
    for rows in np.split(order, np.flatnonzero(np.diff(codes[order])) + 1):
        code = int(codes[rows[0]])
        found.append(((names[code // len(ids)], int(ids[code % len(ids)])), rows))
    return found

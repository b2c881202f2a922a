"""Consume queues: their units on disk, the source of queue offsets, and statistics of a log's queues.

A unit takes 20 bytes, all integers big-endian::

    0   8  physical offset of the message (entry position + 48)
    8   4  size of the message record
    12  8  tags code
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.errors import CorruptRecordError
from dledger_core.record import is_segment_name
from dledger_core.rocketmq.message.decode import decode_messages, expanded_messages
from dledger_core.rocketmq.message.layout import PHYSICAL_OFFSET_DELTA, in_queue
from dledger_core.rocketmq.store.broker_json import consumer_offsets
from dledger_core.storage.files.layout import LogMeta
from dledger_core.storage.read.store_reader import StoreReader

UNIT: Final = np.dtype([("physical_offset", ">i8"), ("size", ">i4"), ("tags_code", ">i8")])
"""One slot of a consume queue file."""
UNIT_BYTES: Final = UNIT.itemsize
"""Bytes of a unit in a file."""
BATCH_UNIT: Final = np.dtype(
    [
        ("physical_offset", ">i8"),
        ("size", ">i4"),
        ("tags_code", ">i8"),
        ("stored_ms", ">i8"),
        ("queue_offset", ">i8"),
        ("messages", ">i2"),
        ("compacted_offset", ">i4"),
        ("reserved", ">i4"),
    ]
)
"""A unit of a topic of type BatchCQ: one for each record, whose messages have consecutive queue offsets."""
PREFILL: Final = np.array((0, 0x7FFFFFFF, 0), UNIT)
"""RocketMQ's content of the slots before a queue's first unit."""


def encode_units(physical_offsets: Any, sizes: Any, tags_codes: Any) -> bytes:
    """Return the units of one queue, slot by slot, 20 bytes each.

    Args:
        physical_offsets: integers, shape (n,); the entry's position + 48.
        sizes: integers, shape (n,); bytes of the message record.
        tags_codes: integers, shape (n,).
    """
    units = np.empty(len(sizes), UNIT)
    units["physical_offset"] = physical_offsets
    units["size"] = sizes
    units["tags_code"] = tags_codes
    return units.tobytes()


def decode_units(data: bytes | bytearray | memoryview) -> npt.NDArray[Any]:
    """Return the complete units in ``data``, dtype UNIT, shape (n,); a last, partial one is left out."""
    return np.frombuffer(data, UNIT, len(data) // UNIT_BYTES)


_QUEUE_ROOTS: Final = ("consumequeue", "batchconsumequeue")
_ROCKSDB_FILE: Final = "CURRENT"
"""A file in every RocksDB database."""


def queues_in_rocksdb(directory: Path) -> bool:
    """Whether a ``consumequeue`` directory is a RocksDB database (``storeType=defaultRocksDB``); see ``RocksDBQueues``.

    Consume queue files next to the database do not count: they are left over from an earlier ``storeType``.
    """
    return (directory / _ROCKSDB_FILE).is_file()


@dataclass(frozen=True, slots=True)
class QueueEnd:
    """The end of a consume queue.

    Attributes:
        slots: the slot after the last unit.
        position: physical offset of the last unit; -1 without one.
        empty_file: the last file, if it has no unit and is not the only one; a power loss may leave it, and
            RocketMQ up to 5.3.3 may not start with it (apache/rocketmq#10108).
    """

    slots: int
    position: int
    empty_file: Path | None = None


def queue_ends(directory: Path) -> dict[tuple[str, int], int]:
    """Return the slot after the last unit of each queue (topic, queue id), by its last file; see ``queue_tails``."""
    return {queue: end.slots for queue, end in queue_tails(directory).items()}


def queue_tails(directory: Path) -> dict[tuple[str, int], QueueEnd]:
    """Return the end of each queue (topic, queue id), by its last file.

    Args:
        directory: ``consumequeue``, or a topic or a queue in it. A broker may be running on it.
    """
    depth = next((at for at, each in enumerate((directory, *directory.parents[:2])) if each.name in _QUEUE_ROOTS), 0)
    last: dict[tuple[str, int], Path] = {}
    follows: set[tuple[str, int]] = set()
    for path in sorted(directory.glob("/".join(["*"] * (2 - depth) + ["[0-9]" * 20]))):
        if is_segment_name(path.name) and path.parent.name.isdecimal():
            queue = path.parent.parent.name, int(path.parent.name)
            if queue in last:
                follows.add(queue)
            last[queue] = path
    ends = {}
    for queue, path in last.items():
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile, with its topic
            slots = decode_units(path.read_bytes())
            filled = np.flatnonzero(slots["size"] > 0)
            base = int(path.name) // UNIT_BYTES
            if len(filled):
                ends[queue] = QueueEnd(base + int(filled[-1]) + 1, int(slots["physical_offset"][filled[-1]]))
            else:
                ends[queue] = QueueEnd(base, -1, path if queue in follows else None)
    return ends


def lost_units(broker: Path, queues: pa.Table) -> list[tuple[str, int, int, int]] | None:
    """Return the queues whose units a broker lacks: topic, queue id, end of its consume queue, end in the log.

    A queue without files ends at 0. The files of batch consume queues have another format and are not read.

    Args:
        broker: its directory.
        queues: of its log, from ``queue_statistics``.

    Returns:
        None if the directory has no consume queues, or they are in RocksDB.
    """
    root = broker / "consumequeue"
    if not root.is_dir() or queues_in_rocksdb(root):
        return None
    ends, lost = queue_ends(root), []
    for row in queues.select(["topic", "queue_id", "end_offset"]).to_pylist():
        queue, end = (row["topic"], row["queue_id"]), row["end_offset"]
        batch_queue = broker / "batchconsumequeue" / row["topic"] / str(row["queue_id"])
        if ends.get(queue, 0) < end and not batch_queue.is_dir():
            lost.append((*queue, ends.get(queue, 0), end))
    return lost


def broker_end_of(reader: StoreReader, meta: LogMeta | None) -> int | None:
    """Return the end of the indexes whose queue offsets come from a broker; None: all do.

    A broker that continues a store which was converted back does not know ``meta``. But its messages contain their
    position, unlike messages that native servers append.

    Args:
        reader: of the store.
        meta: identity of the store, if it is native.
    """
    if meta is None:
        return None
    index = max(meta.broker_end_index, int(reader.first_index))
    if meta.profile == "B" or index > reader.last_index:
        return meta.broker_end_index
    try:
        entry = reader.read(index, index + 1, max_bytes=1)
    except CorruptRecordError:  # any reader of the log reports it
        return meta.broker_end_index
    recorded = decode_messages(entry.column("body"), ["physical_offset"]).column("physical_offset")[0].as_py()
    return None if recorded == entry.column("position")[0].as_py() + PHYSICAL_OFFSET_DELTA else meta.broker_end_index


STATISTICS_COLUMNS: Final = (
    "topic",
    "queue_id",
    "queue_offset",
    "tags",
    "store_size",
    "store_timestamp",
    "sys_flag",
    "batch_index",
)
"""The columns of messages that ``queue_statistics`` needs."""
_QUEUE: Final = ("topic", "queue_id")
MERGE_ROWS: Final = 1 << 16
"""Rows of partial statistics that are merged at once; limits their memory."""
_SYSTEM: Final = ("RMQ_SYS_", "rmq_sys_", "SCHEDULE_TOPIC_XXXX", "TBW102", "TRANS_CHECK_MAX_TIME_TOPIC")


@dataclass(frozen=True, slots=True)
class QueueStatistics:
    """Statistics of the queues of a log.

    Attributes:
        queues: a row per queue: topic, queue_id, messages, bytes, first_offset, end_offset (exclusive),
            first_time, last_time, spare: messages that share their queue offset with another one. Sorted by topic and
            queue.
        rates: a row per queue and time: topic, queue_id, time (start of a bucket), messages, bytes.
        tags: a row per topic and tag (null = none): topic, tags, messages. Most frequent first.
        not_messages: entries that are not messages.
        in_no_queue: prepared and rolled-back messages.
    """

    queues: pa.Table
    rates: pa.Table
    tags: pa.Table
    not_messages: int
    in_no_queue: int

    def skew(self) -> pa.Table:
        """Return topics with more than one queue, the most uneven first.

        Columns: topic, queues, messages, largest (messages of the fullest queue) and skew: its ratio to an even
        distribution; 1 is even.
        """
        grouped = self.queues.group_by("topic").aggregate(
            [("queue_id", "count"), ("messages", "sum"), ("messages", "max")]
        )
        counts, totals = grouped["queue_id_count"], grouped["messages_sum"]
        skew = pc.divide(pc.multiply(grouped["messages_max"].cast(pa.float64()), counts), totals.cast(pa.float64()))
        names = {"topic": grouped["topic"], "queues": counts, "messages": totals, "largest": grouped["messages_max"]}
        table = pa.table(names | {"skew": skew})
        return table.filter(pc.greater(table["queues"], 1)).sort_by([("skew", "descending"), ("topic", "ascending")])

    def of_users(self) -> QueueStatistics:
        """Return the same without RocketMQ's own topics; retry and dead-letter topics stay."""
        queues, rates, tags = (table.filter(_users(table["topic"])) for table in (self.queues, self.rates, self.tags))
        return QueueStatistics(queues, rates, tags, self.not_messages, self.in_no_queue)


def _users(topics: pa.ChunkedArray) -> Any:
    own = [pc.starts_with(topics, name) for name in _SYSTEM]
    found = own[0]
    for one in own[1:]:
        found = pc.or_(found, one)
    return pc.invert(found)


def queue_statistics(
    batches: Iterable[pa.RecordBatch],
    bucket_seconds: float = 1.0,
    broker_end: int | None = None,
    *,
    merge_rows: int = MERGE_ROWS,
) -> QueueStatistics:
    """Count the messages of a log.

    Args:
        batches: entries in log order, with a column ``body``, as from ``StoreReader.read`` and the client; or from a
            client rows with STATISTICS_COLUMNS.
        bucket_seconds: length of a bucket of ``rates``.
        broker_end: messages from this index on have no queue offsets in the log, as in native logs: they
            continue after the broker's offsets. None = all have a broker's offset.
        merge_rows: rows of partial results that are merged at once.
    """
    counting = _Counting(max(1, int(bucket_seconds * 1_000_000)), broker_end, merge_rows)
    for batch in batches:
        counting.take(batch)
    return counting.finish()


class _Counting:
    def __init__(self, bucket_us: int, broker_end: int | None, merge_rows: int) -> None:
        self._bucket_us = bucket_us
        self._broker_end = broker_end
        self._queues = _Merged(
            _QUEUE,
            {
                "messages": "sum",
                "fresh": "sum",
                "bytes": "sum",
                "first_offset": "min",
                "last_offset": "max",
                "first": "min",
                "last": "max",
            },
            merge_rows,
        )
        self._rates = _Merged((*_QUEUE, "time"), {"messages": "sum", "bytes": "sum"}, merge_rows)
        self._tags = _Merged(("topic", "tags"), {"messages": "sum"}, merge_rows)
        self._not_messages = self._in_no_queue = 0

    def take(self, batch: pa.RecordBatch) -> None:
        messages, origin = batch, None
        if "body" in batch.schema.names:
            messages, origin = expanded_messages(batch.column("body"), STATISTICS_COLUMNS)
        found = pa.table(messages)
        late = pa.nulls(batch.num_rows, pa.bool_()) if self._broker_end is None else self._late(batch)
        late = late if origin is None else late.take(pa.array(origin))
        found = found.append_column("fresh", pc.fill_null(late, False))
        valid = found["topic"].is_valid()
        self._not_messages += found.num_rows - int(pc.sum(valid).as_py() or 0)
        found = found.filter(valid)
        queued = in_queue(np.asarray(found["sys_flag"]))
        self._in_no_queue += int((~queued).sum())
        found = found.filter(pa.array(queued))
        if not found.num_rows:
            return
        times = found["store_timestamp"].cast(pa.int64())
        start = pc.multiply(pc.divide(times, self._bucket_us), self._bucket_us).cast(found["store_timestamp"].type)
        ones, fresh = pa.repeat(pa.scalar(1, pa.int64()), found.num_rows), found["fresh"]
        offsets = pc.if_else(fresh, pa.scalar(None, pa.int64()), found["queue_offset"])
        columns = {
            "topic": found["topic"],
            "queue_id": found["queue_id"],
            "tags": found["tags"],
            "time": start,
            "messages": ones,
            "fresh": fresh.cast(pa.int64()),
            # Of an inner batch only the first message counts the record.
            "bytes": pc.if_else(pc.fill_null(pc.greater(found["batch_index"], 0), False), 0, found["store_size"]),
            "first_offset": offsets,
            "last_offset": offsets,
            "first": found["store_timestamp"],
            "last": found["store_timestamp"],
        }
        rows = pa.table(columns)
        for merged in (self._queues, self._rates, self._tags):
            merged.add(rows)

    def _late(self, batch: pa.RecordBatch) -> Any:
        return pc.greater_equal(batch.column("index"), pa.scalar(self._broker_end, pa.int64()))

    def finish(self) -> QueueStatistics:
        queues = self._queues.result()
        first, last = pc.fill_null(queues["first_offset"], 0), pc.fill_null(queues["last_offset"], -1)
        numbered = pc.subtract(queues["messages"], queues["fresh"])
        spare = pc.max_element_wise(pc.subtract(numbered, pc.subtract(pc.add(last, 1), first)), 0)
        end = pc.add(pc.add(last, 1), queues["fresh"])
        columns = {
            "topic": queues["topic"],
            "queue_id": queues["queue_id"],
            "messages": queues["messages"],
            "bytes": queues["bytes"],
            "first_offset": first,
            "end_offset": end,
            "first_time": queues["first"],
            "last_time": queues["last"],
            "spare": spare,
        }
        return QueueStatistics(
            pa.table(columns).sort_by([("topic", "ascending"), ("queue_id", "ascending")]),
            self._rates.result().sort_by([(name, "ascending") for name in ("topic", "queue_id", "time")]),
            self._tags.result().sort_by([("messages", "descending"), ("topic", "ascending"), ("tags", "ascending")]),
            self._not_messages,
            self._in_no_queue,
        )


class _Merged:
    """Groups rows incrementally; merges partial results before they grow."""

    def __init__(self, keys: Sequence[str], values: dict[str, str], merge_rows: int) -> None:
        self._merge_rows = merge_rows
        self._keys = list(keys)
        self._values = values
        self._parts: list[pa.Table] = []
        self._merged_rows = 0

    def add(self, rows: pa.Table) -> None:
        self._parts.append(self._group(rows.select([*self._keys, *self._values])))
        if sum(part.num_rows for part in self._parts) > self._merge_rows + 2 * self._merged_rows:
            self._parts = [self._group(pa.concat_tables(self._parts))]
            self._merged_rows = self._parts[0].num_rows

    def _group(self, rows: pa.Table) -> pa.Table:
        grouped = rows.group_by(self._keys).aggregate(list(self._values.items()))
        return pa.table(
            {name: grouped[name] for name in self._keys} | {n: grouped[f"{n}_{f}"] for n, f in self._values.items()}
        )

    def result(self) -> pa.Table:
        if not self._parts:
            return pa.table({name: pa.array([], _TYPES[name]) for name in (*self._keys, *self._values)})
        return self._group(pa.concat_tables(self._parts))


_TIME: Final = pa.timestamp("us", tz="UTC")
_TYPES: Final = {
    "topic": pa.string(),
    "queue_id": pa.int32(),
    "tags": pa.string(),
    "time": _TIME,
    "messages": pa.int64(),
    "fresh": pa.int64(),
    "bytes": pa.int64(),
    "first_offset": pa.int64(),
    "last_offset": pa.int64(),
    "first": _TIME,
    "last": _TIME,
}


def consumer_lag(broker: Path, queues: pa.Table) -> pa.Table:
    """Return how many messages wait for each consumer group in each queue, by the offsets that the broker recorded.

    Args:
        broker: the broker's store directory, which contains ``config/consumerOffset.json``.
        queues: from ``QueueStatistics``.

    Returns:
        Columns consumer, topic, queue_id, offset (next to consume), end_offset, waiting; most waiting first. Empty if
        the broker has recorded none.

    Raises:
        ConfigError: neither the record nor its copy can be read.
    """
    ends = {(row["topic"], row["queue_id"]): row["end_offset"] for row in queues.to_pylist()}
    rows = []
    for (topic, consumer), offsets in consumer_offsets(broker).items():
        for queue, offset in offsets.items():
            end = ends.get((topic, queue), 0)
            names = {"consumer": consumer, "topic": topic, "queue_id": queue, "offset": offset}
            rows.append(names | {"end_offset": end, "waiting": max(0, end - offset)})
    kinds = [("consumer", pa.string()), ("topic", pa.string()), ("queue_id", pa.int32())]
    kinds += [(name, pa.int64()) for name in ("offset", "end_offset", "waiting")]
    table = pa.Table.from_pylist(rows, pa.schema(kinds))
    return table.sort_by([("waiting", "descending"), ("consumer", "ascending"), ("topic", "ascending")])

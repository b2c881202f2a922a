"""Content of a log, from a sample of its entries: topics, queues, keys, times, the last entries."""

from __future__ import annotations

import contextlib
import struct
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.errors import CorruptRecordError, DLedgerError
from dledger_core.record import MAGIC_DATA, READ_SCHEMA
from dledger_core.rocketmq.message.decode import expanded_messages, rows_of_messages
from dledger_core.rocketmq.message.layout import MESSAGE_SCHEMA, PHYSICAL_OFFSET_DELTA, in_queue
from dledger_core.rocketmq.store.consume_queue import queue_ends, queues_in_rocksdb
from dledger_core.rocketmq.store.directory import Damaged, Deleted, LogDirectory, Span
from dledger_core.storage import StoreReader

SAMPLE_ENTRIES: Final = 16_384
"""Entries that are read of a larger log; a smaller one is read as a whole."""
WINDOWS: Final = 32
LAST: Final = 5
_LAST_SEARCHED: Final = 64
_WINDOW_BYTES: Final = 1 << 20
_KEYS_SHOWN: Final = 3
_KEY_INDEX_HEADER: Final = struct.Struct(">qqqqii")
"""First and last store time and physical offset, used hash slots, keys."""
_MILLIS_END: Final = 1 << 42
_COLUMNS: Final = ("topic", "queue_id", "keys", "tags", "store_timestamp")

LAST_SCHEMA: Final = pa.schema(
    [
        *(READ_SCHEMA.field(name) for name in ("index", "term", "position", "timestamp")),
        *(MESSAGE_SCHEMA.field(name) for name in ("topic", "queue_id", "tags", "keys", "store_timestamp")),
        READ_SCHEMA.field("body"),
    ]
)
"""Columns of the last entries."""

Read = Callable[[int, int], Iterator[pa.RecordBatch | Damaged | Deleted]]


@dataclass
class LogInspection:
    """Content of a sample of a log.

    Attributes:
        entries: entries of the log; of a CommitLog that was not read as a whole, about.
        sampled: entries that were read.
        nbytes: bytes of their bodies.
        messages: RocketMQ messages among them.
        topics: messages by topic.
        queues: queue ids by topic.
        keys: some keys by topic.
        since: earliest time: of the append, or of the message's storing; None if unknown.
        until: latest time.
        queued: by queue (topic, queue id) physical offset of the first message that was read, and physical offset and
            queue offset of the last one.
        last: the last entries, with the columns of LAST_SCHEMA.
        stored: physical offset and store time of the last message, also of one that ``read_committed`` hides;
            None = the last one of ``last``.
        hidden: entries of the log that ``read_committed`` hides, by ``Hidden``; neither counted nor in ``last``.
        damage: ranges that could not be read.
        deleted: ranges that retention deleted before they were read.
        complete: whether the log was read as a whole.
    """

    entries: int = 0
    sampled: int = 0
    nbytes: int = 0
    messages: int = 0
    topics: Counter[str] = field(default_factory=Counter)
    queues: defaultdict[str, set[int]] = field(default_factory=lambda: defaultdict(set))
    keys: defaultdict[str, list[str]] = field(default_factory=lambda: defaultdict(list))
    since: datetime | None = None
    until: datetime | None = None
    queued: dict[tuple[str, int], tuple[int, int, int]] = field(default_factory=dict)
    last: list[dict[str, Any]] = field(default_factory=list)
    stored: tuple[int, datetime | None] | None = None
    hidden: dict[str, int] = field(default_factory=dict)
    damage: list[str] = field(default_factory=list)
    deleted: list[str] = field(default_factory=list)
    complete: bool = True

    def take(self, found: Iterable[pa.RecordBatch | Damaged | Deleted]) -> None:
        """Count entries, and note damaged and deleted ranges between them."""
        for each in found:
            if isinstance(each, Damaged):
                self.damage += [] if str(each) in self.damage else [str(each)]
            elif isinstance(each, Deleted):
                self.deleted.append(str(each))
            else:
                self.add(each)

    def add(self, batch: pa.RecordBatch) -> None:
        """Count the entries of a batch with the columns of RECORD_SCHEMA."""
        self.sampled += batch.num_rows
        self.nbytes += pc.sum(pc.binary_length(batch.column("body"))).as_py() or 0
        found, origin = expanded_messages(batch.column("body"), _COLUMNS)
        times = batch.column("timestamp") if origin is None else batch.column("timestamp").take(pa.array(origin))
        topics = found.column("topic")
        self.messages += len(topics) - topics.null_count
        table = pa.table({"topic": topics, "queue": found.column("queue_id")}).drop_null()
        for row in table.group_by(["topic", "queue"]).aggregate([([], "count_all")]).to_pylist():
            self.topics[row["topic"]] += row["count_all"]
            self.queues[row["topic"]].add(row["queue"])
        keyed = pa.table({"topic": topics, "keys": found.column("keys")}).drop_null()
        for row in keyed.group_by("topic").aggregate([("keys", "max")]).to_pylist():
            if len(self.keys[row["topic"]]) < _KEYS_SHOWN and row["keys_max"] not in self.keys[row["topic"]]:
                self.keys[row["topic"]].append(row["keys_max"])
        self._note_queues(rows_of_messages(batch, origin), batch.column("body"), found)
        bounds = pc.min_max(pc.coalesce(times, found.column("store_timestamp")))
        if bounds["min"].is_valid:
            self.since = min(filter(None, (self.since, bounds["min"].as_py())))
            self.until = max(filter(None, (self.until, bounds["max"].as_py())))
        self._remember(batch.slice(max(0, batch.num_rows - LAST)))

    def _note_queues(self, batch: pa.RecordBatch, bodies: pa.Array, found: pa.RecordBatch) -> None:
        """Remember the first and the last message of each queue; prepared and rolled-back ones are in none."""
        queued, _ = expanded_messages(bodies, ["sys_flag", "queue_offset"])
        header = pc.if_else(batch.column("index").is_valid(), PHYSICAL_OFFSET_DELTA, 0)
        rows = pa.table(
            {
                "topic": found.column("topic"),
                "queue_id": found.column("queue_id"),
                "position": pc.add(batch.column("position"), header),
                "offset": queued.column("queue_offset"),
            }
        )
        kept = pa.array(in_queue(np.asarray(queued.column("sys_flag").fill_null(0))))
        rows = rows.filter(pc.and_(kept, found.column("topic").is_valid()))
        grouped = rows.group_by(["topic", "queue_id"], use_threads=False)
        found_in = grouped.aggregate([("position", "first"), ("position", "last"), ("offset", "last")])
        for row in found_in.to_pylist():
            queue = row["topic"], row["queue_id"]
            first = self.queued[queue][0] if queue in self.queued else row["position_first"]
            self.queued[queue] = first, row["position_last"], row["offset_last"]

    def _remember(self, batch: pa.RecordBatch) -> None:
        found, origin = expanded_messages(batch.column("body"), [*_COLUMNS, "body"])
        count = found.num_rows
        of = range(count) if origin is None else origin.tolist()
        rows = [
            {name: batch.column(name)[of[at]].as_py() for name in ("index", "term", "position", "timestamp")}
            | {name: found.column(name)[at].as_py() for name in _COLUMNS}
            | {"body": (found["body"][at] if found["topic"][at].is_valid else batch["body"][of[at]]).as_py()}
            for at in range(max(0, count - LAST), count)
        ]
        self.last = [*self.last, *rows][-LAST:]


def sample_ranges(first: int, end: int, limit: int = SAMPLE_ENTRIES) -> list[tuple[int, int]]:
    """Return the ranges of [first, end) to read for a sample of at most ``limit`` entries.

    A range with no more entries is read as a whole. Otherwise up to ``WINDOWS`` ranges of equal size are spread over
    it; the last one ends at ``end``.
    """
    if end - first <= limit:
        return [(first, end)] if first < end else []
    count = min(WINDOWS, limit)
    size = limit // count
    starts = np.linspace(first, end - size, count).astype(np.int64).tolist() if count > 1 else [end - size]
    return [(start, min(start + size, stop)) for start, stop in pairwise([*starts, end])]


def sample_positions(opened: LogDirectory) -> list[tuple[int, int]]:
    """Return the positions of a classic CommitLog to read for a sample: everything if it is small.

    Otherwise the first messages of up to ``WINDOWS`` files, and the last messages.
    """
    files = opened.classic
    if sum(file.size for file in files) <= WINDOWS * _WINDOW_BYTES:
        return [(files[0].position, files[-1].end)]
    chosen = files if len(files) <= WINDOWS else [files[at * len(files) // WINDOWS] for at in range(WINDOWS)]
    last = opened.position_of_last(SAMPLE_ENTRIES // WINDOWS)
    starts = [file.position for file in chosen if file.position + _WINDOW_BYTES <= last]
    return [*((start, start + _WINDOW_BYTES) for start in starts), (last, files[-1].end)]


def inspect_log(
    read: Read, first: int, end: int, inspection: LogInspection | None = None, *, shown_end: int | None = None
) -> LogInspection:
    """Return an inspection of the entries [first, end).

    Args:
        read: yields the entries of a range that ``read_committed`` shows, and the damage in it.
        first: first index.
        end: end (exclusive).
        inspection: of the entries before them.
        shown_end: end (exclusive) of the entries that ``read_committed`` shows; None = ``end``.
    """
    inspection = inspection or LogInspection()
    inspection.entries += end - first
    ranges = sample_ranges(first, end)
    inspection.complete &= sum(stop - start for start, stop in ranges) == end - first
    before = 0
    for start, stop in ranges:
        before = inspection.sampled
        inspection.take(read(start, stop))
    if len(ranges) > 1 and inspection.sampled - before < LAST:
        inspection.last = _last(read, first, end if shown_end is None else shown_end)
    return inspection


def _last(read: Read, first: int, end: int) -> list[dict[str, Any]]:
    """Return the last entries before ``end``; the entries at its end may be hidden."""
    start = end
    while True:
        start = max(first, start - max(_LAST_SEARCHED, end - start))
        found = LogInspection()
        found.take(read(start, end))
        if len(found.last) == LAST or start == first:
            return found.last


def inspect_directory(opened: LogDirectory) -> LogInspection:
    """Return an inspection of a classic CommitLog and of the log after it."""
    inspection = _inspect_commitlog(opened) if opened.classic else LogInspection()
    if opened.log is not None:
        _inspect_store(opened, opened.log, inspection)
        first = opened.log.first_index
        inspection.entries -= sum(gap.end - gap.start for gap in opened.log.gaps if gap.start >= first)
    inspection.damage += [text for gap in opened.gaps if (text := str(gap)) not in inspection.damage]
    return inspection


def _inspect_store(opened: LogDirectory, log: StoreReader, inspection: LogInspection) -> None:
    """Add the entries of a store; hidden ones are read too, for their damage."""
    (first, end), committed_end, shown = opened.indexes, log.committed_end(), opened.shown

    def read(start: int, stop: int) -> Iterator[pa.RecordBatch | Damaged | Deleted]:
        for found in opened.batches(Span((0, 0), (start, stop))):
            if isinstance(found, Damaged | Deleted):
                yield found
                continue
            indexes, is_data = np.asarray(found.column("index")), np.asarray(found.column("magic")) == MAGIC_DATA
            yield found.filter(pc.is_null(pa.array(shown.hidden(indexes, is_data, committed_end), pa.string())))

    aborted = sum(min(high, end) - max(low, first) for low, high in shown.orphaned(first, end))
    counts = {"aborted": aborted, "open": committed_end - shown.end, "uncommitted": end - committed_end}
    if end > first:
        with contextlib.suppress(CorruptRecordError):
            inspection.stored = log.position_of(end - 1) + PHYSICAL_OFFSET_DELTA, log.time_of(end - 1)
    inspection.hidden = {name: int(count) for name, count in counts.items() if count > 0}
    inspect_log(read, first, end, inspection, shown_end=shown.end)


def _inspect_commitlog(opened: LogDirectory) -> LogInspection:
    inspection, files, ranges = LogInspection(), opened.classic, sample_positions(opened)
    inspection.complete = ranges == [(files[0].position, files[-1].end)]
    for positions in ranges:
        inspection.take(opened.batches(Span(positions, (0, 0))))
    mean = inspection.nbytes / max(1, inspection.sampled)
    inspection.entries = (
        inspection.sampled if inspection.complete or not mean else round(sum(file.size for file in files) / mean)
    )
    return inspection


@dataclass(frozen=True, slots=True)
class QueueFiles:
    """The consume queues of a directory.

    Attributes:
        topics: number of topics.
        queues: number of queues.
        units: units in them.
    """

    topics: int
    queues: int
    units: int


def queue_files(directory: Path) -> QueueFiles | None:
    """Return the consume queues in a directory, or None if there are none.

    Args:
        directory: ``consumequeue`` itself, the broker's directory that contains it, or a topic or queue in it.
    """
    below = directory / "consumequeue"
    root = below if below.is_dir() else directory
    ends = {} if queues_in_rocksdb(root) else queue_ends(root)
    return QueueFiles(len({topic for topic, _ in ends}), len(ends), sum(ends.values())) if ends else None


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """The key index of a broker (IndexFile.java).

    Attributes:
        files: number of files.
        keys: keys in them.
        since: store time of the earliest message; None without keys.
        until: store time of the latest message.
        position: physical offset of the last message.
    """

    files: int
    keys: int
    since: datetime | None
    until: datetime | None
    position: int


def key_index(directory: Path) -> KeyIndex | None:
    """Return the key index in a directory, or None if its files are others."""
    headers = []
    for path in sorted(directory.glob("[0-9]" * 17)):
        with path.open("rb") as file:
            header = file.read(_KEY_INDEX_HEADER.size)
        if len(header) == _KEY_INDEX_HEADER.size:
            headers.append(_KEY_INDEX_HEADER.unpack(header))
    if not headers:
        return None
    begins, ends = (
        [millis for millis in column if 0 < millis < _MILLIS_END] for column in list(zip(*headers, strict=True))[:2]
    )
    return KeyIndex(
        files=len(headers),
        keys=sum(max(0, header[-1] - 1) for header in headers),  # the first slot stays empty
        since=datetime.fromtimestamp(min(begins) / 1000, UTC) if begins else None,
        until=datetime.fromtimestamp(max(ends) / 1000, UTC) if ends else None,
        position=max(header[3] for header in headers),
    )


def end_problems(opened: LogDirectory) -> list[str]:
    """Return a sentence for each problem between a CommitLog and the log after it, and after the last entry.

    Also if nothing is known about the outcome of transactions.
    """
    found = [] if opened.gap is None else [str(opened.gap)]
    if opened.unknown_outcomes is not None:
        found.append(f"entries of aborted and open transactions are shown: {opened.unknown_outcomes}")
    try:
        note = opened.check_end()
    except DLedgerError as error:
        return [*found, str(error)]
    return [*found, note] if note else found

"""Brokers of one set in controller mode compared: where their logs part, and what a restart of each one deletes.

A slave that connects to a master finds the newest epoch that starts at the same position on both, and truncates its
CommitLog at the earlier end of it. It compares epochs, never messages. So this audit takes the master that a controller
would elect, applies that rule to each other broker, and compares the bytes that the rule takes for equal: a slave that
stopped after it truncated may have old messages there, because a truncation only moves a pointer in memory and leaves
the bytes on disk (apache/rocketmq#10666). Such messages are also older than those before them in the same epoch, and
name another broker as the one that stored them; this shows them where no other broker has the range.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.errors import ConfigError, CorruptRecordError, StoreMismatchError
from dledger_core.rocketmq.broker_parts import confirm_offset
from dledger_core.rocketmq.message.decode import consume_queue_columns, decode_messages, expanded_queue_columns
from dledger_core.rocketmq.message.integrity import fault_text
from dledger_core.rocketmq.message.layout import in_queue
from dledger_core.rocketmq.store.commit_log import (
    CommitLogFile,
    FileStop,
    commit_log_files,
    message_batch,
    message_faults,
)
from dledger_core.rocketmq.store.commit_log_view import CommitLogView, StoredMessage
from dledger_core.rocketmq.store.epochs import (
    BrokerIdentity,
    ConsistentPoint,
    Epoch,
    EpochFile,
    broker_identity,
    consistent_point,
    epoch_at,
    read_epochs,
)
from dledger_core.rocketmq.store.location import locate

_CHUNK_BYTES: Final = 1 << 20
_HALF: Final = "truncation stopped half way (apache/rocketmq#10666)"
_TIME_BITS: Final = 42
_QUEUE_COLUMNS: Final = ("topic", "queue_id", "queue_offset", "sys_flag")

Kind = Literal["STALE_TAIL", "HALF_TRUNCATED", "OUT_OF_SYNC", "QUEUE_OFFSET_TWICE", "EPOCHS_CONTRADICT", "DAMAGED"]


@dataclass(frozen=True, slots=True)
class BrokerFinding:
    """A difference between brokers, or within one.

    Attributes:
        kind: ``STALE_TAIL``: messages of an old master after the point at which its successor's epoch starts.
            ``OUT_OF_SYNC``: messages that no broker of the sync state set has. ``HALF_TRUNCATED``: other messages
            where the epochs agree. ``QUEUE_OFFSET_TWICE``: messages with a queue offset that an earlier one has.
            ``EPOCHS_CONTRADICT``: epoch files that cannot all be true. ``DAMAGED``: a file or a message.
        broker: its name; several are separated by commas.
        position: first byte in the CommitLog.
        end: end (exclusive).
        epoch: of the first byte, by the broker's own file; None before its first epoch.
        messages: number of messages in the range.
        message: a sentence.
        restart: what a restart of this broker deletes.
    """

    kind: Kind
    broker: str
    position: int
    end: int
    epoch: int | None
    messages: int
    message: str
    restart: str


@dataclass(frozen=True, slots=True)
class AuditedBroker:
    """A broker, and its relation to the master.

    Attributes:
        name: its name.
        number: broker id of the controller; None if unknown.
        epochs: oldest first.
        first: first position of its CommitLog.
        end: end of its messages, as a start finds it.
        confirm_offset: as it last recorded it; None if unknown.
        in_sync: whether it is in the sync state set; None if the set is unknown.
        point: where its log parts from the master's; None for the master, and where there is no such point.
        deletes: messages that a restart deletes.
        compared: bytes that were compared with the master's.
    """

    name: str
    number: int | None
    epochs: tuple[Epoch, ...]
    first: int
    end: int
    confirm_offset: int | None
    in_sync: bool | None
    point: ConsistentPoint | None
    deletes: int
    compared: int


@dataclass(frozen=True, slots=True)
class ControllerAudit:
    """The comparison of the brokers of a set.

    Attributes:
        master: name of the broker that the others were compared with.
        brokers: all of them, in the order given.
        findings: by broker and position.
    """

    master: str
    brokers: tuple[AuditedBroker, ...]
    findings: tuple[BrokerFinding, ...]


def audit_brokers(
    brokers: Mapping[str, Path],
    *,
    in_sync: Collection[str] | None = None,
    master: str | None = None,
    start: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> ControllerAudit:
    """Compare stopped brokers of one set in controller mode; nothing is written.

    Args:
        brokers: the store directory (``storePathRootDir``) of each broker by name, two or more.
        in_sync: names of the brokers in the sync state set; None = unknown, any may be elected.
        master: the broker to compare with; None = as a controller elects: of the sync state set the one with the
            highest epoch, then with the longest log.
        start: position from which messages are read and bytes compared.
        progress: called with the number of bytes read.

    Raises:
        ConfigError: too few brokers, unknown names, or the master has no epochs.
        StoreMismatchError: a directory has no CommitLog, or is of another broker set.
        OSError: a file was deleted meanwhile.
    """
    opened = {name: _Broker.open(name, path) for name, path in brokers.items()}
    return _Audit(opened, in_sync, master, start, progress).run()


@dataclass(frozen=True)
class _Broker:
    """A broker's files."""

    name: str
    directory: Path
    identity: BrokerIdentity | None
    file: EpochFile
    confirmed: int | None
    files: tuple[CommitLogFile, ...]
    end: int

    @classmethod
    def open(cls, name: str, path: Path) -> _Broker:
        location = locate(path)
        if location.commitlog is None or location.store is not None:
            remedy = "name the storePathRootDir of a broker in controller mode"
            raise StoreMismatchError("the directory has no classic CommitLog of its own", str(path), remedy)
        root = location.broker if not location.is_commitlog else location.commitlog.parent
        files = commit_log_files(location.commitlog, gaps=True)
        end = next(each.position for each in files[-1].scan() if isinstance(each, FileStop))
        found = read_epochs(root) or EpochFile(root, ())
        confirmed = confirm_offset(root / "checkpoint")
        return cls(name, location.commitlog, broker_identity(root), found, confirmed, files, end)

    @property
    def epochs(self) -> tuple[Epoch, ...]:
        return self.file.epochs

    @property
    def first(self) -> int:
        return self.files[0].position

    @property
    def rank(self) -> tuple[int, int]:
        """The order in which a controller elects."""
        return (self.epochs[-1].number if self.epochs else -1, self.end)

    def file_at(self, position: int) -> CommitLogFile | None:
        at = bisect_right(self.files, position, key=lambda file: file.position) - 1
        return self.files[at] if at >= 0 and position < self.files[at].end else None

    def message_before(self, end: int) -> StoredMessage | None:
        """Return the message before a position; None at damage."""
        try:
            return CommitLogView(self.directory, check=False).message_before(end)
        except CorruptRecordError:
            return None

    def message_at(self, position: int) -> StoredMessage | None:
        """Return the message that has a byte at a position; None in a filler, after the end and at damage."""
        found = self.message_before(position + 1)
        return found if found is not None and position < found.position + len(found.body) else None


@dataclass(frozen=True, slots=True)
class _Pending:
    """A finding whose messages are not counted yet."""

    kind: Kind
    broker: str
    position: int
    end: int
    message: str


@dataclass
class _Queue:
    """The queue offsets of a queue that were assigned twice."""

    next_offset: int = -1
    doubled: int = 0
    position: int = 0
    end: int = 0
    offset: int = 0


@dataclass
class _Stale:
    """Messages that are older than those before them in their epoch, and that another broker stored."""

    position: int
    end: int
    messages: int


@dataclass
class _Newest:
    """The newest message of an epoch so far: its time, after the number of the epoch, and its record.

    Attributes:
        older: messages older than it are being read; their range, or None if the same broker stored them: its clock
            was set back.
    """

    time: int = 0
    body: bytes = b""
    in_older: bool = False
    older: _Stale | None = None


@dataclass
class _Scan:
    """The findings in the messages of one broker."""

    ranges: list[tuple[int, int]]
    counts: list[int]
    epochs: npt.NDArray[np.int64]
    queues: dict[tuple[str, int], _Queue] = field(default_factory=dict)
    damage: list[tuple[int, int, str]] = field(default_factory=list)
    stale: list[_Stale] = field(default_factory=list)
    newest: _Newest = field(default_factory=_Newest)

    def count(self, position: int, end: int) -> int:
        return self.counts[self.ranges.index((position, end))]


class _Audit:
    def __init__(
        self,
        brokers: dict[str, _Broker],
        in_sync: Collection[str] | None,
        master: str | None,
        start: int,
        progress: Callable[[int], None],
    ) -> None:
        self._brokers = brokers
        self._in_sync = None if in_sync is None else frozenset(in_sync)
        self._start = start
        self._progress = progress
        self._read = 0
        self._pending: list[_Pending] = []
        self._points: dict[str, ConsistentPoint | None] = {}
        self._check()
        self._master = self._elected(master)

    def run(self) -> ControllerAudit:
        compared = dict.fromkeys(self._brokers, 0)
        for each in self._brokers.values():
            self._check_file(each)
            if each is not self._master:
                self._points[each.name] = point = self._part(each, self._master)
                compared[each.name] = self._compare(each, self._master, point)
        scans = {name: self._scan(broker) for name, broker in self._brokers.items()}
        # The range of old messages that a log itself shows is complete; bytes are compared up to the shorter end only.
        kept = [each for each in self._pending if not _is_shown(each, scans[each.broker].stale)]
        findings = [self._finding(each, scans[each.broker].count(each.position, each.end)) for each in kept]
        findings += self._of_scans(scans)
        rows = tuple(self._row(each, scans, compared) for each in self._brokers.values())
        order = list(self._brokers)
        found = sorted(findings, key=lambda each: (order.index(each.broker.split(", ")[0]), each.position, each.kind))
        return ControllerAudit(self._master.name, rows, tuple(found))

    def _check(self) -> None:
        if len(self._brokers) < len(("master", "slave")):
            raise ConfigError("a single broker cannot be compared", "", "name two or more brokers of one set")
        unknown = (self._in_sync or frozenset()) - set(self._brokers)
        if unknown:
            named = ", ".join(sorted(unknown))
            raise ConfigError(f"the sync state set names unknown brokers: {named}", "", "use the names of the brokers")
        sets = {each.identity.broker: each for each in self._brokers.values() if each.identity is not None}
        if len(sets) > 1:
            named, path = ", ".join(sorted(sets)), next(iter(sets.values())).directory.parent
            remedy = "name brokers with one brokerName"
            raise StoreMismatchError(f"the brokers belong to several sets: {named}", str(path), remedy)

    def _elected(self, name: str | None) -> _Broker:
        if name is not None and name not in self._brokers:
            raise ConfigError(f"there is no broker {name!r}", "", f"use one of {', '.join(self._brokers)}")
        candidates = [each for each in self._brokers.values() if self._in_sync is None or each.name in self._in_sync]
        found = self._brokers[name] if name is not None else max(candidates, key=lambda each: each.rank, default=None)
        if found is None:
            raise ConfigError("no broker is in the sync state set", "", "name the brokers of the set")
        if not found.epochs:
            what = f"the broker {found.name} has no epochs: it was never master or slave in controller mode"
            raise ConfigError(what, str(found.file.path), "name the store directories of brokers in controller mode")
        return found

    def _add(self, kind: Kind, broker: _Broker, position: int, end: int, message: str) -> None:
        self._pending.append(_Pending(kind, broker.name, position, end, message))

    # --- epochs ---------------------------------------------------------------------------------------------------

    def _check_file(self, broker: _Broker) -> None:
        """Add what one broker's epochs say against themselves and against its log."""
        for problem in broker.file.problems:
            self._add("EPOCHS_CONTRADICT", broker, broker.end, broker.end, problem)
        if broker.epochs and broker.epochs[-1].start > broker.end:
            last = broker.epochs[-1]
            what = f"epoch {last.number} starts at position {last.start}, after the end of the log: its end is lost"
            self._add("EPOCHS_CONTRADICT", broker, broker.end, last.start, what)

    def _part(self, broker: _Broker, master: _Broker) -> ConsistentPoint | None:
        """Return where a broker's log parts from the master's, and add what is after it."""
        starts = {each.number: each.start for each in master.epochs}
        for each in broker.epochs:
            if starts.get(each.number, each.start) != each.start:
                low, high = sorted((each.start, starts[each.number]))
                where = f"at position {each.start}, on {master.name} at {starts[each.number]}"
                self._add("EPOCHS_CONTRADICT", broker, low, high, f"epoch {each.number} starts {where}")
        point = consistent_point(broker.epochs, broker.end, master.epochs, master.end)
        if point is None:
            why = f"no epoch starts at the same position as on {master.name}" if broker.epochs else "it has no epochs"
            if broker.epochs or broker.end > broker.first:
                self._add("EPOCHS_CONTRADICT", broker, broker.first, broker.end, why)
            return None
        if point.position < broker.end:
            self._add_tail(broker, master, point)
        return point

    def _add_tail(self, broker: _Broker, master: _Broker, point: ConsistentPoint) -> None:
        newer = next((each for each in master.epochs if each.number > point.epoch.number), None)
        outside = self._in_sync is not None and broker.name not in self._in_sync
        if newer is not None:
            what = f"on {master.name} epoch {newer.number} starts at position {newer.start}; these messages are of an"
            what = f"{what} old master" + (", which is not in the sync state set" if outside else "")
            self._add("STALE_TAIL", broker, point.position, broker.end, what)
        elif outside:
            what = f"the log is ahead of {master.name}, and the broker is not in the sync state set"
            self._add("OUT_OF_SYNC", broker, point.position, broker.end, what)
        else:
            what = f"the log is ahead of the master {master.name}"
            self._add("STALE_TAIL", broker, point.position, broker.end, what)

    def _restart(self, name: str) -> str:
        broker = self._brokers[name]
        if not broker.file.starts:
            return "deletes nothing: the broker does not start"
        if broker is self._master:
            return "deletes nothing while it is master"
        point = self._points[name]
        if point is None or point.position > broker.end:
            return f"deletes nothing, and the broker cannot follow {self._master.name}"
        if point.position == broker.end:
            return "deletes nothing"
        return f"deletes positions {point.position} to {broker.end - 1}"

    # --- bytes ----------------------------------------------------------------------------------------------------

    def _compare(self, broker: _Broker, master: _Broker, point: ConsistentPoint | None) -> int:
        """Compare the bytes that brokers take for equal; return their number."""
        if point is None:
            return 0
        low = max(self._start, broker.first, master.first)
        high = min(point.position, broker.end, master.end)
        first: int | None = None
        last = low
        for at, end in _chunks(broker, master, low, high):
            difference = _difference(broker, master, at, end)
            self._note(end - at)
            if difference is not None and (first is not None or _is_in_message(broker, master, difference[0])):
                first, last = difference[0] if first is None else first, difference[1]
        if first is not None:
            self._add_difference(broker, master, first, last)
        return max(0, high - low)

    def _add_difference(self, broker: _Broker, master: _Broker, first: int, last: int) -> None:
        mine, theirs = broker.message_at(first), master.message_at(first)
        for owner, found in ((broker, mine), (master, theirs)):
            fault = "no message starts here" if found is None else _fault(found)
            if fault is not None:
                position = first if found is None else found.position
                self._add("DAMAGED", owner, position, last, f"{fault}; the other copy differs from position {first} on")
                return
        assert mine is not None
        assert theirs is not None
        stale, other = (broker, master) if _stored(mine) <= _stored(theirs) else (master, broker)
        ends_in = stale.message_at(last - 1)
        end = last if ends_in is None else ends_in.end
        what = f"the epochs agree here, and the messages are others than on {other.name} and were stored earlier: a"
        what = f"{what} {_HALF}"
        self._add("HALF_TRUNCATED", stale, min(mine.position, theirs.position), end, what)

    # --- messages -------------------------------------------------------------------------------------------------

    def _scan(self, broker: _Broker) -> _Scan:
        ranges = [(each.position, each.end) for each in self._pending if each.broker == broker.name]
        scan = _Scan(ranges, [0] * len(ranges), np.array([each.start for each in broker.epochs], np.int64))
        for before, file in zip((None, *broker.files), broker.files, strict=False):
            if before is not None and before.end < file.position:
                scan.damage.append((before.end, file.position, "the files between are missing"))
            if file.end <= min([self._start, *(low for low, _ in ranges)]):
                continue
            for found in file.scan():
                if isinstance(found, FileStop):
                    # In the last file a truncation may have left any bytes after the end.
                    if file is not broker.files[-1] and not file.ends_at(found, is_open=False):
                        scan.damage.append((found.position, file.end, "neither a message nor the end of a file"))
                    continue
                self._take(scan, found)
        return scan

    def _take(self, scan: _Scan, batch: pa.RecordBatch) -> None:
        positions = np.asarray(batch.column("position"))
        self._note(batch.column("body").nbytes)
        for at, (low, high) in enumerate(scan.ranges):
            scan.counts[at] += int(np.searchsorted(positions, high)) - int(np.searchsorted(positions, low))
        kept = int(np.searchsorted(positions, self._start))
        if kept < batch.num_rows:
            _note_queues(scan.queues, batch.slice(kept))
            _note_times(scan, batch.slice(kept), positions[kept:])

    def _of_scans(self, scans: Mapping[str, _Scan]) -> Iterator[BrokerFinding]:
        doubled: dict[tuple[str, int, int, int, int], list[str]] = {}
        for name, scan in scans.items():
            for position, end, message in scan.damage:
                yield self._finding(_Pending("DAMAGED", name, position, end, message), 0)
            yield from self._stale(name, scan.stale)
            for (topic, queue), each in scan.queues.items():
                if each.doubled:
                    key = (topic, queue, each.position, each.end, each.doubled)
                    doubled.setdefault(key, []).append(name)
        for (topic, queue, position, end, count), names in doubled.items():
            offset = scans[names[0]].queues[topic, queue].offset
            what = (
                f"queue {queue} of topic {topic}: queue offsets from {offset} on are those of earlier messages, so the"
            )
            what = f"{what} queue has one message of two"
            found = self._finding(_Pending("QUEUE_OFFSET_TWICE", names[0], position, end, what), count)
            restarts = [self._restart(name) for name in names]
            if len(set(restarts)) > 1:
                restarts = ["; ".join(f"{name}: {each}" for name, each in zip(names, restarts, strict=True))]
            yield replace(found, broker=", ".join(names), restart=restarts[0])

    def _stale(self, name: str, stale: list[_Stale]) -> Iterator[BrokerFinding]:
        for each in stale:
            what = "the messages are older than those before them in their epoch, and another broker stored them: a"
            found = _Pending("HALF_TRUNCATED", name, each.position, each.end, f"{what} {_HALF}")
            yield self._finding(found, each.messages)

    def _finding(self, each: _Pending, messages: int) -> BrokerFinding:
        epoch = epoch_at(self._brokers[each.broker].epochs, each.position)
        number = None if epoch is None else epoch.number
        restart = self._restart(each.broker)
        return BrokerFinding(each.kind, each.broker, each.position, each.end, number, messages, each.message, restart)

    def _row(self, broker: _Broker, scans: Mapping[str, _Scan], compared: Mapping[str, int]) -> AuditedBroker:
        point = self._points.get(broker.name)
        deletes = 0
        if point is not None and point.position < broker.end and broker.file.starts:
            deletes = scans[broker.name].count(point.position, broker.end)
        return AuditedBroker(
            name=broker.name,
            number=None if broker.identity is None else broker.identity.number,
            epochs=broker.epochs,
            first=broker.first,
            end=broker.end,
            confirm_offset=broker.confirmed,
            in_sync=None if self._in_sync is None else broker.name in self._in_sync,
            point=point,
            deletes=deletes,
            compared=compared[broker.name],
        )

    def _note(self, nbytes: int) -> None:
        self._read += nbytes
        self._progress(self._read)


def _is_shown(found: _Pending, stale: list[_Stale]) -> bool:
    overlaps = any(found.position < each.end and each.position < found.end for each in stale)
    return found.kind == "HALF_TRUNCATED" and overlaps


def _chunks(one: _Broker, other: _Broker, low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yield ranges of [low, high) that are in one file of each broker; ranges of missing files are left out."""
    at = low
    while at < high:
        left, right = one.file_at(at), other.file_at(at)
        if left is None or right is None:
            starts = [file.position for each in (one, other) for file in each.files if file.position > at]
            at = min(starts, default=high)
            continue
        end = min(at + _CHUNK_BYTES, left.end, right.end, high)
        yield at, end
        at = end


def _difference(one: _Broker, other: _Broker, low: int, high: int) -> tuple[int, int] | None:
    """Return the first and the end of the last byte that differ in a range of one file of each."""
    left, right = (np.frombuffer(_bytes(each, low, high), np.uint8) for each in (one, other))
    size = min(len(left), len(right))
    found: npt.NDArray[np.int64] = np.flatnonzero(left[:size] != right[:size])
    return (low + int(found[0]), low + int(found[-1]) + 1) if len(found) else None


def _bytes(broker: _Broker, low: int, high: int) -> bytes:
    file = broker.file_at(low)
    return b"" if file is None else file.read(low, high)


def _is_in_message(one: _Broker, other: _Broker, position: int) -> bool:
    """Whether a byte belongs to a message; a file's filler may have bytes of earlier ones, which no program reads."""
    fillers = 0
    for each in (one, other):
        found, file = each.message_before(position + 1), each.file_at(position)
        if found is not None and file is not None:
            fillers += found.end == file.end and position >= found.position + len(found.body)
    return fillers < len((one, other))


def _fault(message: StoredMessage) -> str | None:
    [fault] = message_faults(message_batch(message.body, [len(message.body)], message.position)).tolist()
    return f"the message is damaged: {fault_text(fault)}" if fault else None


def _stored(message: StoredMessage) -> int:
    column = decode_messages(pa.array([message.body], pa.binary()), ["store_timestamp"]).column(0)
    return column.cast(pa.int64())[0].as_py() or 0


def _note_queues(queues: dict[tuple[str, int], _Queue], batch: pa.RecordBatch) -> None:
    """Add the queue offsets of messages that are not above all earlier ones of their queue."""
    found, origin = expanded_queue_columns(batch.column("body"), _QUEUE_COLUMNS)
    positions = np.asarray(batch.column("position"))
    positions = positions if origin is None else positions[origin]
    kept = np.asarray(found.column("topic").is_valid()) & in_queue(np.asarray(found.column("sys_flag").fill_null(0)))
    rows = np.flatnonzero(kept)
    if not len(rows):
        return
    found, positions = found.take(pa.array(rows)), positions[rows]
    topics = found.column("topic").dictionary_encode()
    keys = np.stack([np.asarray(topics.indices, np.int64), np.asarray(found.column("queue_id"), np.int64)], axis=1)
    names, codes = np.unique(keys, axis=0, return_inverse=True)
    order = np.argsort(codes.reshape(-1), kind="stable")
    bounds = np.searchsorted(codes.reshape(-1)[order], np.arange(len(names) + 1))
    offsets = np.asarray(found.column("queue_offset"))
    for at, (topic, queue) in enumerate(names.tolist()):
        rows = order[bounds[at] : bounds[at + 1]]
        _note_queue(
            queues.setdefault((topics.dictionary[topic].as_py(), queue), _Queue()), offsets[rows], positions[rows]
        )


def _note_queue(queue: _Queue, offsets: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> None:
    before = np.maximum.accumulate(np.concatenate([[queue.next_offset - 1], offsets]))[:-1]
    again = np.flatnonzero(offsets <= before)
    queue.next_offset = max(queue.next_offset, int(offsets.max()) + 1)
    if len(again):
        if not queue.doubled:
            queue.position, queue.offset = int(positions[again[0]]), int(offsets[again[0]])
        queue.end = int(positions[again[-1]]) + 1
        queue.doubled += len(again)


def _note_times(scan: _Scan, batch: pa.RecordBatch, positions: npt.NDArray[np.int64]) -> None:
    """Add the messages that are older than one before them in their epoch, if another broker stored that one."""
    bodies, newest = batch.column("body"), scan.newest
    times = (
        np.asarray(consume_queue_columns(bodies, ["store_timestamp"]).column(0).cast(pa.int64()).fill_null(0)) // 1000
    )
    # The number of the epoch precedes the time, so that a time counts in its epoch only.
    epochs = np.searchsorted(scan.epochs, positions, side="right")
    keyed = (epochs << _TIME_BITS) + times
    older = (keyed < np.maximum.accumulate(np.concatenate([[newest.time], keyed]))[:-1]) & (epochs > 0)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], older, [False]]).astype(np.int8)))
    for first, stop in edges.reshape(-1, 2).tolist():
        end = int(positions[stop]) if stop < len(positions) else int(positions[-1]) + len(bodies[-1].as_buffer())
        if first or not newest.in_older:
            before = bodies[first - 1].as_py() if first else newest.body
            same = _stored_by(before) == _stored_by(bodies[first].as_py())
            newest.older = None if same else _Stale(int(positions[first]), end, 0)
            scan.stale += [] if newest.older is None else [newest.older]
        if newest.older is not None:
            newest.older.end = end
            newest.older.messages += stop - first
    newest.in_older = bool(older[-1])
    newest.time = max(newest.time, int(keyed.max()))
    if not older.all():
        newest.body = bodies[int(np.flatnonzero(~older)[-1])].as_py()


def _stored_by(message: bytes) -> str | None:
    host: str | None = decode_messages(pa.array([message], pa.binary()), ["store_host"]).column(0)[0].as_py()
    return host

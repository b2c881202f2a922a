"""Out of DLedger mode: what was requested, what a first read of the source found, and the state that resumes a run."""

from __future__ import annotations

import itertools
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dledger_core.errors import StoreMismatchError
from dledger_core.rocketmq.convert.messages import QueueCounters
from dledger_core.rocketmq.convert.parts import SourceCursor
from dledger_core.rocketmq.leaving.batch_queues import BatchSlots, BatchTotals
from dledger_core.rocketmq.store.key_files import KeyFile
from dledger_core.rocketmq.store.queue_slots import STAYS, moves_of, replay
from dledger_core.storage.files.file_system import Files

Queue = tuple[str, int]
OnDuplicate = Literal["first", "last"]
_I64 = npt.NDArray[np.int64]
_SAVE_BYTES: Final = 256 << 20


@dataclass(frozen=True, slots=True)
class CommittedEntry:
    """The last entry that live nodes have committed; it identifies all before it (Log Matching).

    Attributes:
        index: of the entry; -1 = none.
        term: of the entry.
        crc: CRC-32 of its body.
    """

    index: int
    term: int
    crc: int


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveRequest:
    """Source, destination and decisions.

    Attributes:
        source: a store, or a broker's directory.
        destination: the broker's new directory.
        commitlog: the classic CommitLog that precedes the store at ``source``.
        broker_conf: the broker's configuration; None = RocketMQ's defaults and the sizes of the source's files.
        until: ``committed`` leaves out entries after the recorded commit index, ``end`` takes all; None = refuse them.
        committed: the last committed entry of a live majority; None = the one that the source records.
        replicas: stores of the other replicas, or their brokers' directories, to compare the source with.
        replica_checked: the caller has compared the replicas.
        on_duplicate: which message of a doubled queue offset its queue keeps; None = refuse.
        fill_holes: write pre-fill units for queue offsets without a message.
        drop: ranges [start, end) of entries to leave out.
        cut_tail: bytes after the last entry of a Java store may be dropped.
        drop_open: leave out the entries of open transactions of a native log.
        id_map: file for old and new message ids.
        dry_run: read and check everything, write nothing.
        verify: read both again afterwards, and compare.
        save_bytes: bytes after which the state is saved.
    """

    source: Path
    destination: Path
    commitlog: Path | None = None
    broker_conf: Path | None = None
    until: Literal["committed", "end"] | None = None
    committed: CommittedEntry | None = None
    replicas: tuple[Path, ...] = ()
    replica_checked: bool = False
    on_duplicate: OnDuplicate | None = None
    fill_holes: bool = False
    drop: tuple[tuple[int, int], ...] = ()
    cut_tail: bool = False
    drop_open: bool = False
    id_map: Path | None = None
    dry_run: bool = False
    verify: bool = False
    save_bytes: int = _SAVE_BYTES

    def saved(self) -> dict[str, Any]:
        """Return the fields that determine the result, for JSON."""
        left_out = ("dry_run", "verify", "save_bytes", "replicas", "replica_checked")
        found = {name: value for name, value in asdict(self).items() if name not in left_out}
        for name in ("source", "destination", "commitlog", "broker_conf", "id_map"):
            found[name] = found[name] and str(found[name].absolute())
        return dict(json.loads(json.dumps(found)))


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaveReport:
    """Result of a run or of its dry run.

    Attributes:
        kind: of the source.
        destination: the broker's directory.
        messages: in the new CommitLog.
        last_index: of the last converted entry; -1 = none.
        ends_because: why the conversion ends there.
        replicas_compared: other replicas with which the source was compared; 0 = the caller has compared them.
        entries_compared: converted entries that equal those of a majority.
        entries_on_few_replicas: converted entries that too few replicas have for a majority, and none differently.
        entries_left_out: entries after ``last_index``.
        control_dropped: control entries and no-ops, which a CommitLog does not have.
        hidden_dropped: entries of orphaned attempts and open transactions.
        damaged_dropped: entries in ``--drop-damaged``.
        queues: consume queues.
        units: in them.
        duplicates_left_out: messages whose slot in a queue another message has; they stay in the CommitLog.
        holes_filled: queue offsets without a message.
        in_no_queue: prepared and rolled-back messages.
        references_moved: half messages and timers that other records refer to.
        start_position: of the CommitLog.
        end_position: of the CommitLog.
        keys: in the index files.
        needed_bytes: free space that the copy takes.
        estimated_seconds: of the run, measured by the first read; None unless it is a dry run.
        verified: whether everything was read again and compared.
        resumed: an interrupted run was finished.
        dry_run: nothing was written.
        notes: remarks for the owner: parts that are not converted, and why.
    """

    kind: str
    destination: str
    messages: int
    last_index: int
    ends_because: str
    replicas_compared: int
    entries_compared: int
    entries_on_few_replicas: int
    entries_left_out: int
    control_dropped: int
    hidden_dropped: int
    damaged_dropped: int
    queues: int
    units: int
    duplicates_left_out: int
    holes_filled: int
    in_no_queue: int
    references_moved: int
    start_position: int
    end_position: int
    keys: int
    needed_bytes: int
    estimated_seconds: float | None
    verified: bool
    resumed: bool
    dry_run: bool
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Compared:
    """Result of the comparison with the other replicas.

    Attributes:
        replicas: their number; 0 = the caller has compared them.
        proven: entries that equal those of a majority.
        alone: entries that too few replicas have for a majority, and none differently.
        seconds: duration.
        notes: differences of replicas that a majority outvotes, and parts that were not compared.
    """

    replicas: int = 0
    proven: int = 0
    alone: int = 0
    seconds: float = 0.0
    notes: tuple[str, ...] = ()


@dataclass(slots=True)
class QueueRanges:
    """The queue offsets of one queue in log order, as ranges of consecutive ones: [first, number of units].

    Attributes:
        ranges: the ranges; offset 0 is one of its own, as a broker's rebuild treats it differently.
        renumbered: a message names the queue more than once, so that offsets run ahead of slots.
    """

    ranges: list[list[int]] = field(default_factory=list)
    renumbered: bool = False

    def add(self, offsets: _I64) -> None:
        """Add offsets in log order."""
        breaks = np.flatnonzero((np.diff(offsets) != 1) | (offsets[:-1] == 0)) + 1
        for begin, stop in itertools.pairwise([0, *breaks.tolist(), len(offsets)]):
            if begin == stop:
                continue
            first, units = int(offsets[begin]), stop - begin
            last = self.ranges[-1] if self.ranges else None
            if last is not None and first and last[0] and last[0] + last[1] == first:
                last[1] += units
            else:
                self.ranges.append([first, units])

    @property
    def is_plain(self) -> bool:
        """Whether each offset is its slot, and all follow each other."""
        ends = [first + units for first, units in self.ranges]
        return not self.renumbered and all(
            end == first for end, (first, _) in zip(ends[:-1], self.ranges[1:], strict=True)
        )

    def doubled(self) -> tuple[int, int] | None:
        """Return the first offsets [start, end) that were assigned before; None if there are none."""
        end = 0
        for at, (first, units) in enumerate(self.ranges):
            if at and first < end and not self.renumbered:
                return first, min(end, first + units)
            end = max(end, first + units)
        return None

    def holes(self) -> list[tuple[int, int]]:
        """Return the slots [start, end) between units for which the log has no message."""
        if self.renumbered:
            return []
        covered = sorted((self._slots(at, "last") for at in range(len(self.ranges))), key=lambda span: span[0])
        found, end = [], covered[0][0] if covered else 0
        for low, high in covered:
            if low > end:
                found.append((end, low))
            end = max(end, high)
        return found

    def _slots(self, at: int, on_duplicate: OnDuplicate) -> tuple[int, int]:
        floor, shift = self.placed(on_duplicate)[at]
        first, units = self.ranges[at]
        return max(floor, first) - shift, first + units - shift

    def placed(self, on_duplicate: OnDuplicate) -> list[tuple[int, int]]:
        """Return the lowest offset of each range that gets a slot, and how far its slots are below its offsets."""
        ranges = [(first, units) for first, units in self.ranges]
        if self.renumbered:
            return replay(ranges, [STAYS] * len(ranges), renumbered=True)
        moves = moves_of(ranges)
        if on_duplicate == "first":
            moves = [each._replace(replaces=False) for each in moves]
        return replay(ranges, moves)


class QueueSlots:
    """Slots of the units of one queue that is not plain, in log order.

    Args:
        queue: its ranges.
        on_duplicate: which unit keeps a slot.
        used: units that were placed before.
    """

    def __init__(self, queue: QueueRanges, on_duplicate: OnDuplicate, used: int = 0) -> None:
        placed = queue.placed(on_duplicate)
        counts = [units for _, units in queue.ranges]
        self._starts = np.cumsum([0, *counts])
        self._firsts = np.array([first for first, _ in queue.ranges], np.int64)
        self._floors, self._shifts = (np.array(column, np.int64) for column in zip(*placed, strict=True))
        self._lows = np.maximum(self._floors, self._firsts) - self._shifts
        self._highs = self._firsts + counts - self._shifts
        self.used = used

    def take(self, count: int) -> tuple[_I64, npt.NDArray[np.bool_]]:
        """Return the slots of the next units, and which of them keep theirs."""
        numbers = self.used + np.arange(count)
        self.used += count
        at = np.searchsorted(self._starts, numbers, side="right") - 1
        offsets = self._firsts[at] + numbers - self._starts[at]
        slots = offsets - self._shifts[at]
        kept = offsets >= self._floors[at]
        for low, high, number in zip(self._lows.tolist(), self._highs.tolist(), range(len(self._lows)), strict=True):
            kept &= (at >= number) | (slots < low) | (slots >= high)  # a later unit replaces it
        return slots, kept


@dataclass(slots=True)
class Totals:
    """Results of the first read.

    Attributes:
        queues: of each queue its ranges.
        batches: of each queue of a batch topic its units.
        messages: number of messages.
        body_bytes: bytes of the messages.
        end_position: end of the CommitLog, if it starts at 0 or where its classic part does.
        control_dropped: see ``LeaveReport``.
        hidden_dropped: see ``LeaveReport``.
        damaged_dropped: see ``LeaveReport``.
        in_no_queue: prepared and rolled-back messages.
        of_other_queues: inner batches of topics that are not of type BatchCQ.
        keys: number of keys.
        last_stored_ms: store time of the last message.
        seconds: duration of the read.
    """

    queues: dict[Queue, QueueRanges] = field(default_factory=dict)
    batches: dict[Queue, BatchTotals] = field(default_factory=dict)
    messages: int = 0
    body_bytes: int = 0
    end_position: int = 0
    control_dropped: int = 0
    hidden_dropped: int = 0
    damaged_dropped: int = 0
    in_no_queue: int = 0
    of_other_queues: int = 0
    keys: int = 0
    last_stored_ms: int = 0
    seconds: float = 0.0

    @property
    def units(self) -> int:
        """Number of units, before any is left out."""
        return sum(units for queue in self.queues.values() for _, units in queue.ranges) + self.batch_units

    @property
    def batch_units(self) -> int:
        """Number of units of batch topics, before any is left out."""
        return sum(batches.units for batches in self.batches.values())

    def saved(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        plain = {name: getattr(self, name) for name in self.__slots__ if name not in ("queues", "batches")}
        queues = [[*queue, found.renumbered, found.ranges] for queue, found in self.queues.items()]
        batches = [[*queue, asdict(found)] for queue, found in self.batches.items()]
        return plain | {"queues": queues, "batches": batches}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Totals:
        """Return the totals from the result of ``saved``."""
        queues = {
            (topic, queue_id): QueueRanges(ranges, renumbered)
            for topic, queue_id, renumbered, ranges in saved["queues"]
        }
        batches = {(topic, queue_id): BatchTotals(**found) for topic, queue_id, found in saved["batches"]}
        return cls(**(saved | {"queues": queues, "batches": batches}))


@dataclass(slots=True)
class LeaveState:
    """State of one run; everything up to it is durable.

    Attributes:
        request: the request; another one does not resume this state.
        stamp: of the source.
        started_ms: time of the start, which names index files.
        totals: of the first read.
        notes: of the checks.
        compared: with the other replicas.
        cursor: the point at which reading continues.
        position: end of the last message.
        start_position: of the CommitLog.
        counters: the next queue offsets of a native log.
        ends: slot after the last one of each queue.
        used: units placed so far of each queue that is not plain.
        batches: slots so far of each queue of a batch topic.
        keys: header of the newest index file.
        references: number of messages in the file of references.
        references_moved: see ``LeaveReport``.
        id_bytes: bytes of the id map.
        phase: ``copy``, ``rest`` (all messages are copied), or ``publish`` (everything is written).
    """

    request: dict[str, Any]
    stamp: str
    started_ms: int
    totals: Totals
    notes: list[str]
    compared: Compared = field(default_factory=Compared)
    cursor: SourceCursor = field(default_factory=SourceCursor)
    position: int = 0
    start_position: int = 0
    counters: QueueCounters = field(default_factory=QueueCounters)
    ends: dict[Queue, int] = field(default_factory=dict)
    used: dict[Queue, int] = field(default_factory=dict)
    batches: dict[Queue, BatchSlots] = field(default_factory=dict)
    keys: KeyFile = field(default_factory=KeyFile)
    references: int = 0
    references_moved: int = 0
    id_bytes: int = 0
    phase: Literal["copy", "rest", "publish"] = "copy"

    def save(self, files: Files, path: Path) -> None:
        """Replace the file, atomically and durably."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        special = {
            "version": _VERSION,
            "totals": self.totals.saved(),
            "compared": asdict(self.compared),
            "cursor": asdict(self.cursor),
            "counters": self.counters.saved(),
            "ends": [[*queue, end] for queue, end in self.ends.items()],
            "used": [[*queue, used] for queue, used in self.used.items()],
            "batches": [[*queue, asdict(slots)] for queue, slots in self.batches.items()],
            "keys": self.keys.saved(),
        }
        files.replace(path, (json.dumps(plain | special) + "\n").encode())

    @classmethod
    def load(cls, files: Files, path: Path) -> LeaveState | None:
        """Return the state of an interrupted run, or None.

        Raises:
            StoreMismatchError: the file cannot be understood.
        """
        data = files.read(path)
        if data is None:
            return None
        try:
            found = json.loads(data)
            if found["version"] != _VERSION:
                raise ValueError(f"version {found['version']}")
            return cls(
                **{name: found[name] for name in _PLAIN},
                totals=Totals.restored(found["totals"]),
                compared=Compared(**(found["compared"] | {"notes": tuple(found["compared"]["notes"])})),
                cursor=SourceCursor(**found["cursor"]),
                counters=QueueCounters.restored(found["counters"]),
                ends={(topic, queue_id): end for topic, queue_id, end in found["ends"]},
                used={(topic, queue_id): used for topic, queue_id, used in found["used"]},
                batches={
                    (topic, queue_id): BatchSlots(**(slots | {"held": tuple(slots["held"])}))
                    for topic, queue_id, slots in found["batches"]
                },
                keys=KeyFile(**found["keys"]),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise StoreMismatchError(
                f"the state of a conversion is malformed: {error}",
                str(path),
                f"remove {path.parent} and convert again",
            ) from error


_VERSION: Final = 3
_PLAIN: Final = (
    "request",
    "stamp",
    "started_ms",
    "notes",
    "position",
    "start_position",
    "references",
    "references_moved",
    "id_bytes",
    "phase",
)

"""A conversion: what was requested, how entries are kept, numbered and placed, and the state that resumes it."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import asdict, astuple, dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dledger_core.config import DATA_SEGMENT_BYTES, INDEX_SEGMENT_BYTES, StorageConfig, check_group_name, parse_peers
from dledger_core.errors import ConfigError, StoreMismatchError
from dledger_core.record import MAGIC_DATA
from dledger_core.rocketmq.convert.messages import QueueCounters
from dledger_core.rocketmq.convert.parts import Chunk, LostRange, PartName, SourceCursor
from dledger_core.rocketmq.convert.source import ConversionSource, Kind
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout

_SAVE_BYTES: Final = 64 << 20
_UUID: Final = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """Source, destination and options of a conversion.

    Attributes:
        source: a store, a CommitLog directory, or a broker's directory.
        destination: the new store's directory, ``<dir>/<group>/dledger-<self id>``.
        group: the group of the new store.
        self_id: the node of the new store.
        peers: the group's peers string.
        profile: of the new log.
        commitlog: the CommitLog that precedes the store at ``source``.
        log_uuid: the log's identity; None = from the group, the peers and the first entry, or kept.
        data_segment_bytes: size of the new data files; None = as in the source.
        index_segment_bytes: size of the new index files; None = as in the source.
        messages: correct the offsets in bodies that are message records, where entries move.
        cut_tail: bytes after the last entry of a Java store may be dropped.
        drop_open: drop the entries of open transactions, where the destination cannot contain transactions.
        salvage: take everything readable of a damaged store; the result is a log of its own.
        dry_run: read and check everything, write nothing.
        save_bytes: bytes after which the state is saved.
    """

    source: Path
    destination: Path
    group: str
    self_id: str
    peers: str
    profile: Literal["A", "B"] = "B"
    commitlog: Path | None = None
    log_uuid: str | None = None
    data_segment_bytes: int | None = None
    index_segment_bytes: int | None = None
    messages: bool = True
    cut_tail: bool = False
    drop_open: bool = False
    salvage: bool = False
    dry_run: bool = False
    save_bytes: int = _SAVE_BYTES

    def __post_init__(self) -> None:
        check_group_name(self.group)
        if self.self_id not in {peer.node_id for peer in parse_peers(self.peers)}:
            raise ConfigError(f"--self-id {self.self_id} is not in the peers string", "", "use one of its nodes")
        if self.log_uuid is not None and not _UUID.match(self.log_uuid):
            raise ConfigError(f"--log-uuid {self.log_uuid!r} is not a log uuid", "", "write 32 hexadecimal digits")
        StorageConfig(  # rejects wrong sizes
            data_segment_bytes=DATA_SEGMENT_BYTES if self.data_segment_bytes is None else self.data_segment_bytes,
            index_segment_bytes=INDEX_SEGMENT_BYTES if self.index_segment_bytes is None else self.index_segment_bytes,
        )

    def saved(self) -> dict[str, Any]:
        """Return the fields that determine the result, for JSON."""
        left_out = ("destination", "cut_tail", "dry_run", "save_bytes")
        found = {name: value for name, value in asdict(self).items() if name not in left_out}
        paths = {"source": str(self.source.absolute()), "commitlog": self.commitlog and str(self.commitlog.absolute())}
        return found | paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Result of a conversion or of its dry run.

    Attributes:
        kind: of the source.
        notes: remarks for the owner of the source.
        destination: the new store.
        profile: of the new store.
        entries: in it.
        first_index: of the first one.
        last_index: of the last one.
        body_bytes: bytes of all bodies.
        renumbered: entries have other indexes than before.
        moved: entries have other positions than before.
        control_dropped: dropped control entries.
        hidden_dropped: dropped entries of orphaned attempts.
        messages: bodies that are message records; 0 with ``--opaque``.
        messages_moved: messages with new offsets.
        messages_odd: unchanged messages, because their offset was not their position.
        term: current term.
        commit_index: recorded lower limit; -1 = none.
        log_uuid: identity of the new log; None in profile A and in an empty log.
        digest: SHA-256 over index, term, magic and body of all entries; empty in a dry run.
        resumed: an interrupted conversion was finished.
        dry_run: nothing was written.
        lost: entries that no-ops stand for, in order; only with ``salvage``.
    """

    kind: Kind
    notes: tuple[str, ...]
    destination: str
    profile: Literal["A", "B"]
    entries: int
    first_index: int
    last_index: int
    body_bytes: int
    renumbered: bool
    moved: bool
    control_dropped: int
    hidden_dropped: int
    messages: int
    messages_moved: int
    messages_odd: int
    term: int
    commit_index: int
    log_uuid: str | None
    digest: str
    resumed: bool
    dry_run: bool
    lost: tuple[LostRange, ...] = ()


@dataclass(frozen=True, slots=True)
class Step:
    """Progress of a conversion; ``total_bytes`` is an estimate."""

    phase: Literal["compare", "check", "copy", "verify"]
    entries: int
    done_bytes: int
    total_bytes: int


def store_directory(destination: Path, group: str, self_id: str) -> Path:
    """Return the store of a group's node below ``destination``, unless that is the store's directory itself."""
    name = f"dledger-{self_id}"
    return destination if destination.name == name else destination / group / name


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Entries that were contiguous in the source and still are.

    Attributes:
        part: ``commitlog`` or ``log``.
        start: number of the first entry: its index in a log, counted from 0 in a CommitLog.
        end: end of the numbers, exclusive.
        new_start: index of the first in the converted log.
        position: of the first in the source.
        new_position: of the first in the converted log.
    """

    part: PartName
    start: int
    end: int
    new_start: int
    position: int
    new_position: int


class IndexMap:
    """Source indexes to converted indexes, as ranges; entries in no range were dropped."""

    def __init__(self, ranges: list[IndexRange] | None = None) -> None:
        self.ranges = ranges if ranges is not None else []

    def add(
        self, part: PartName, numbers: npt.NDArray[np.int64], new_start: int, positions: Any, new_positions: Any
    ) -> None:
        """Add entries with the source ``numbers``; their new indexes start at ``new_start``."""
        if not len(numbers):
            return
        edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for begin, stop in itertools.pairwise(edges):
            start, end, new = int(numbers[begin]), int(numbers[stop - 1]) + 1, new_start + begin
            last = self.ranges[-1] if self.ranges else None
            if last is not None and (last.part, last.end) == (part, start):
                self.ranges[-1] = IndexRange(part, last.start, end, last.new_start, last.position, last.new_position)
            else:
                self.ranges.append(IndexRange(part, start, end, new, int(positions[begin]), int(new_positions[begin])))

    def saved(self) -> list[list[Any]]:
        """Return the ranges for JSON."""
        return [[*astuple(each)] for each in self.ranges]

    @classmethod
    def restored(cls, saved: list[list[Any]]) -> IndexMap:
        """Return the map from the result of ``saved``."""
        return cls([IndexRange(*each) for each in saved])


@dataclass(frozen=True, slots=True)
class Plan:
    """How a source becomes a store.

    Attributes:
        source: the opened source.
        profile: of the destination.
        data_segment_bytes: size of its data files.
        index_segment_bytes: size of its index files.
        keeps_positions: records keep their positions.
        drops_control: entries with another magic than 1 are dropped.
        assigns_offsets: queue offsets are assigned, because a native log contains none.
        hidden: ranges of orphaned entries, which are dropped.
        messages: correct the offsets in bodies that are message records.
        start_position: lowest position of the first record; used only if positions are not kept.
    """

    source: ConversionSource
    profile: Literal["A", "B"]
    data_segment_bytes: int
    index_segment_bytes: int
    keeps_positions: bool
    drops_control: bool
    assigns_offsets: bool
    hidden: tuple[tuple[int, int], ...]
    messages: bool
    start_position: int

    @property
    def patches(self) -> bool:
        """Whether messages may change."""
        return self.messages and not self.keeps_positions

    def kept(self, chunk: Chunk) -> npt.NDArray[np.bool_]:
        """Return which entries of a chunk are kept."""
        keep = np.ones(chunk.count, np.bool_)
        if not self.drops_control:
            return keep
        keep &= chunk.magics == MAGIC_DATA
        for start, end in self.hidden:
            if start < chunk.first + chunk.count and end > chunk.first:
                keep[max(start - chunk.first, 0) : max(end - chunk.first, 0)] = False
        return keep

    @property
    def broker_end(self) -> int:
        """End of the source indexes whose messages have a queue offset from a broker; 2^62: all have."""
        return 1 << 62 if self.source.broker_end is None else self.source.broker_end


def log_uuid_of(group: str, peers: str, index: int, term: int, crc: int, length: int) -> str:
    """Return the identity of a converted log: the same on all nodes, another one for other peers.

    Args:
        group: the group's name.
        peers: its peers string.
        index: of the first kept entry.
        term: of that entry.
        crc: CRC-32 of its body.
        length: bytes of its body.
    """
    nodes = sorted(f"{peer.node_id}-{peer.address}" for peer in parse_peers(peers))
    return hashlib.sha256(repr((group, nodes, index, term, crc, length)).encode()).hexdigest()[:32]


_VERSION = 1


@dataclass(slots=True)
class ConversionState:
    """State of one conversion; everything up to it is durable.

    Attributes:
        request: the request; another request does not resume this state.
        stamp: of the source.
        keeps_positions: whether records keep their positions.
        phase: ``copy``, ``verify`` or ``publish``.
        cursor: the point at which reading continues.
        next_index: index of the next entry to write.
        position: end of the last written record; None = no record is written.
        index_map: of the written entries.
        queues: the next queue offsets, if they are assigned.
        first: position, index, term, CRC, body length of the first written entry; empty = none.
        body_bytes: bytes of the bodies written.
        control_dropped: dropped control entries.
        hidden_dropped: dropped entries of orphaned attempts.
        messages: bodies that are message records.
        moved: messages with new offsets.
        odd: unchanged messages, because their offset was not their position.
        repositioned: an entry has another position than before.
        notes: remarks for the owner of the source.
        lost: of a salvage, as ``LostRange``.
        digest: of the finished log.
    """

    request: dict[str, Any]
    stamp: str
    keeps_positions: bool
    phase: Literal["copy", "verify", "publish"] = "copy"
    cursor: SourceCursor = field(default_factory=SourceCursor)
    next_index: int = 0
    position: int | None = None
    index_map: IndexMap = field(default_factory=IndexMap)
    queues: QueueCounters = field(default_factory=QueueCounters)
    first: tuple[int, ...] = ()
    body_bytes: int = 0
    control_dropped: int = 0
    hidden_dropped: int = 0
    messages: int = 0
    moved: int = 0
    odd: int = 0
    repositioned: bool = False
    notes: list[str] = field(default_factory=list)
    lost: list[LostRange] = field(default_factory=list)
    digest: str = ""

    def note_lost(self, chunk: Chunk) -> None:
        """Add the entries for which a chunk has no-ops to those that are lost."""
        if (more := chunk.lost) is None:
            return
        last = self.lost[-1] if self.lost else None
        if last is not None and (last.end, last.path, last.reason) == (more.start, more.path, more.reason):
            self.lost[-1] = replace(last, end=more.end)
        else:
            self.lost.append(more)

    def encode(self) -> bytes:
        """Return the file's content."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        special = {
            "version": _VERSION,
            "cursor": asdict(self.cursor),
            "index_map": self.index_map.saved(),
            "queues": self.queues.saved(),
            "first": list(self.first),
            "lost": [astuple(each) for each in self.lost],
        }
        return (json.dumps(plain | special) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> ConversionState:
        """Return the state from the result of ``encode``."""
        found = json.loads(data)
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']}")
        return cls(
            **{name: found[name] for name in _PLAIN},
            cursor=SourceCursor(**found["cursor"]),
            index_map=IndexMap.restored(found["index_map"]),
            queues=QueueCounters.restored(found["queues"]),
            first=tuple(found["first"]),
            lost=[LostRange(*each) for each in found.get("lost", ())],
        )


_PLAIN = (
    "request",
    "stamp",
    "keeps_positions",
    "phase",
    "next_index",
    "position",
    "body_bytes",
    "control_dropped",
    "hidden_dropped",
    "messages",
    "moved",
    "odd",
    "repositioned",
    "notes",
    "digest",
)


def load_state(files: Files, layout: Layout) -> ConversionState | None:
    """Return the state of an interrupted conversion, or None.

    Raises:
        StoreMismatchError: the file cannot be understood.
    """
    data = files.read(layout.converting)
    if data is None:
        return None
    try:
        return ConversionState.decode(data)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreMismatchError(
            f"the state of a conversion is malformed: {error}",
            str(layout.converting),
            f"remove {layout.root} and convert again",
        ) from error


def save_state(files: Files, layout: Layout, state: ConversionState) -> None:
    """Replace the state, atomically and durably."""
    files.replace(layout.converting, state.encode())

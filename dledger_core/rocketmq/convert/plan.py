"""A conversion: what was requested, how entries are kept, numbered and placed, and the state that resumes it."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from dledger_core.config import DATA_SEGMENT_BYTES, INDEX_SEGMENT_BYTES, StorageConfig, check_group_name, parse_peers
from dledger_core.errors import ConfigError, StoreMismatchError
from dledger_core.record import MAGIC_DATA
from dledger_core.rocketmq.convert.messages import QueueCounters
from dledger_core.rocketmq.convert.parts import Cursor, PartName, Piece
from dledger_core.rocketmq.convert.source import Kind, Source
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.layout import Layout

_SAVE_BYTES: Final = 64 << 20
_UUID: Final = re.compile(r"[0-9a-f]{32}\Z")


@dataclass(frozen=True, slots=True, kw_only=True)
class ConvertRequest:
    """What to convert into what.

    Attributes:
        source: a store, a CommitLog directory, or a broker's directory.
        destination: the new store's directory, ``<dir>/<group>/dledger-<self id>``.
        group: the group it will belong to.
        self_id: the node it will belong to.
        peers: the group's peers string.
        profile: of the new log.
        commitlog: the CommitLog that precedes the store at ``source``.
        log_uuid: the log's identity; None = from the group, the peers and the first entry, or kept.
        data_segment_bytes: size of the new data files; None = as in the source.
        index_segment_bytes: size of the new index files; None = as in the source.
        messages: bodies that are message records get their offsets right where entries move.
        cut_tail: bytes behind the last entry of a Java store may be left out.
        drop_open: leave out the entries of open transactions, where the destination cannot hold transactions.
        dry_run: read and check everything, write nothing.
        save_bytes: progress is saved at least this often.
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
    dry_run: bool = False
    save_bytes: int = _SAVE_BYTES

    def __post_init__(self) -> None:
        check_group_name(self.group)
        if self.self_id not in {peer.node_id for peer in parse_peers(self.peers)}:
            raise ConfigError(f"self-id {self.self_id} is not in the peers string", "--self-id", "use one of its nodes")
        if self.log_uuid is not None and not _UUID.match(self.log_uuid):
            raise ConfigError(f"{self.log_uuid!r} is no log uuid", "--log-uuid", "write 32 hexadecimal digits")
        StorageConfig(  # refuses wrong sizes
            data_segment_bytes=DATA_SEGMENT_BYTES if self.data_segment_bytes is None else self.data_segment_bytes,
            index_segment_bytes=INDEX_SEGMENT_BYTES if self.index_segment_bytes is None else self.index_segment_bytes,
        )

    def saved(self) -> dict[str, Any]:
        """Returns what decides about the result, for JSON."""
        left_out = ("destination", "cut_tail", "dry_run", "save_bytes")
        found = {name: value for name, value in asdict(self).items() if name not in left_out}
        paths = {"source": str(self.source.absolute()), "commitlog": self.commitlog and str(self.commitlog.absolute())}
        return found | paths


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What a conversion did, or would do.

    Attributes:
        kind: what the source is.
        notes: what the owner should know.
        destination: the new store.
        profile: of the new store.
        entries: in it.
        first_index: of the first one.
        last_index: of the last one.
        body_bytes: bytes of all bodies.
        renumbered: entries have other indexes than before.
        moved: entries lie at other positions than before.
        control_dropped: control entries left out.
        hidden_dropped: entries of transactions that did not win, left out.
        messages: bodies looked at that are message records (0 if nothing moved).
        messages_moved: of them got new offsets.
        messages_odd: of them were left as they are: their offset was not where they lay.
        term: current term.
        commit_index: recorded lower bound; -1 = none.
        log_uuid: identity of the new log; None in profile A and in an empty log.
        digest: SHA-256 over index, term, magic and body of all entries; empty in a dry run.
        resumed: an interrupted conversion was finished.
        dry_run: nothing was written.
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


@dataclass(frozen=True, slots=True)
class Step:
    """How far a conversion has come; ``total_bytes`` is an estimate."""

    phase: Literal["check", "copy", "verify"]
    entries: int
    done_bytes: int
    total_bytes: int


def store_directory(destination: Path, group: str, self_id: str) -> Path:
    """Returns the store of a group's node below ``destination``, unless that is the store's directory itself."""
    name = f"dledger-{self_id}"
    return destination if destination.name == name else destination / group / name


@dataclass(frozen=True, slots=True)
class IndexRange:
    """Entries that were one behind the other and still are.

    Attributes:
        part: ``commitlog`` or ``log``.
        start: number of the first: its index in a log, counted from 0 in a CommitLog.
        end: number behind the last one.
        new_start: index of the first in the converted log.
        position: where the first one was.
        new_position: where the first one is.
    """

    part: PartName
    start: int
    end: int
    new_start: int
    position: int
    new_position: int


class IndexMap:
    """From old indexes to new ones, as runs; entries in no run were left out."""

    def __init__(self, runs: list[IndexRange] | None = None) -> None:
        self.runs = runs if runs is not None else []

    def add(
        self, part: PartName, numbers: npt.NDArray[np.int64], new_start: int, positions: Any, new_positions: Any
    ) -> None:
        """Adds entries with the old ``numbers``, which are now ``new_start`` and following."""
        if not len(numbers):
            return
        edges = [0, *(np.flatnonzero(np.diff(numbers) != 1) + 1).tolist(), len(numbers)]
        for begin, stop in itertools.pairwise(edges):
            start, end, new = int(numbers[begin]), int(numbers[stop - 1]) + 1, new_start + begin
            last = self.runs[-1] if self.runs else None
            if last is not None and (last.part, last.end) == (part, start):
                self.runs[-1] = IndexRange(part, last.start, end, last.new_start, last.position, last.new_position)
            else:
                self.runs.append(IndexRange(part, start, end, new, int(positions[begin]), int(new_positions[begin])))

    def saved(self) -> list[list[Any]]:
        """Returns the runs for JSON."""
        return [[run.part, run.start, run.end, run.new_start, run.position, run.new_position] for run in self.runs]

    @classmethod
    def restored(cls, saved: list[list[Any]]) -> IndexMap:
        """Returns what ``saved`` gave."""
        return cls([IndexRange(*run) for run in saved])


@dataclass(frozen=True, slots=True)
class Plan:
    """How a source becomes a store.

    Attributes:
        source: what is read.
        profile: of the destination.
        data_segment_bytes: size of its data files.
        index_segment_bytes: size of its index files.
        keeps_positions: records stay where they are.
        drops_control: entries with another magic than 1 are left out.
        assigns_offsets: queue offsets are given out, because the source is a log of ours, which does not.
        hidden: ranges of entries that did not win and are left out.
        messages: bodies that are message records get their offsets right.
        start_position: where the first record may begin; counts only if positions are not kept.
    """

    source: Source
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

    def kept(self, piece: Piece) -> npt.NDArray[np.bool_]:
        """Returns which entries of a piece are kept."""
        keep = np.ones(piece.count, np.bool_)
        if not self.drops_control:
            return keep
        keep &= piece.magics == MAGIC_DATA
        for start, end in self.hidden:
            if start < piece.first + piece.count and end > piece.first:
                keep[max(start - piece.first, 0) : max(end - piece.first, 0)] = False
        return keep

    @property
    def broker_end(self) -> int:
        """Lag the last source index whose message has a queue offset from a broker; 2^62: all have."""
        return 1 << 62 if self.source.broker_end is None else self.source.broker_end


def log_uuid_of(group: str, peers: str, index: int, term: int, crc: int, length: int) -> str:
    """Returns the identity of a converted log: the same on all nodes, another one for other peers.

    Args:
        group: the group's name.
        peers: its peers string.
        index: of the first entry kept.
        term: of that entry.
        crc: CRC-32 of its body.
        length: bytes of its body.
    """
    nodes = sorted(part.strip() for part in peers.split(";") if part.strip())
    return hashlib.sha256(repr((group, nodes, index, term, crc, length)).encode()).hexdigest()[:32]


_VERSION = 1


@dataclass(slots=True)
class Progress:
    """State of one conversion; everything up to it is durable.

    Attributes:
        request: what was asked for; another request does not go on with it.
        fingerprint: of the source.
        keeps_positions: whether records stay where they are.
        phase: ``copy``, ``verify`` or ``publish``.
        cursor: where reading goes on.
        next_index: index of the next entry written.
        position: where the last record written ends; None = nothing is written.
        index_map: of what is written.
        queues: the next queue offsets, if they are given out.
        first: position, index, term, CRC, body length of the first entry written; empty = nothing is.
        body_bytes: bytes of the bodies written.
        control_dropped: control entries left out.
        hidden_dropped: entries of transactions that did not win, left out.
        messages: bodies that are message records.
        moved: messages with new offsets.
        odd: messages left as they are, because their offset is not where they were.
        repositioned: an entry lies at another position than before.
        notes: what the owner of the source should know.
        digest: of the finished log.
    """

    request: dict[str, Any]
    fingerprint: str
    keeps_positions: bool
    phase: Literal["copy", "verify", "publish"] = "copy"
    cursor: Cursor = field(default_factory=Cursor)
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
    digest: str = ""

    def encode(self) -> bytes:
        """Returns the file's content."""
        plain = {name: getattr(self, name) for name in _PLAIN}
        special = {
            "version": _VERSION,
            "cursor": asdict(self.cursor),
            "index_map": self.index_map.saved(),
            "queues": self.queues.saved(),
            "first": list(self.first),
        }
        return (json.dumps(plain | special) + "\n").encode()

    @classmethod
    def decode(cls, data: bytes) -> Progress:
        """Returns what ``encode`` gave."""
        found = json.loads(data)
        if found["version"] != _VERSION:
            raise ValueError(f"version {found['version']}")
        return cls(
            **{name: found[name] for name in _PLAIN},
            cursor=Cursor(**found["cursor"]),
            index_map=IndexMap.restored(found["index_map"]),
            queues=QueueCounters.restored(found["queues"]),
            first=tuple(found["first"]),
        )


_PLAIN = (
    "request",
    "fingerprint",
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


def load_progress(files: Files, layout: Layout) -> Progress | None:
    """Returns the state of an interrupted conversion, or None.

    Raises:
        StoreMismatchError: the file cannot be understood.
    """
    data = files.read(layout.converting)
    if data is None:
        return None
    try:
        return Progress.decode(data)
    except (ValueError, KeyError, TypeError) as error:
        raise StoreMismatchError(
            f"the state of a conversion is malformed: {error}",
            str(layout.converting),
            f"remove {layout.root} and convert again",
        ) from error


def save_progress(files: Files, layout: Layout, progress: Progress) -> None:
    """Replaces the state, atomically and durably."""
    files.replace(layout.converting, progress.encode())

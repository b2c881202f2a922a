"""Damage to what a disk holds: flipped bits, lost and misdirected sectors, wrong rows of the index.

Injected only where the log promises to get over it: in entries that are committed, that this member's durable
checkpoint vouches for (a bad record behind it is taken for a torn tail), and that nobody has deleted; on one member at
a time, in the data or in the index but not in both, so that an intact copy and a second witness remain. The append time
and the marks of a record have no witness, so no damage lies in them alone.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from dledger_core.ids import Index
from dledger_core.raft import Batch
from dledger_core.record import INDEX_RECORD, INDEX_RECORD_BYTES, segment_name
from dledger_core.storage.files.checkpoint import Checkpoint, load_checkpoint
from dledger_core.storage.files.layout import Layout
from tests.support.checkers import SafetyChecker
from tests.support.faulty_files import SECTOR, FaultyFiles, Inode

if TYPE_CHECKING:
    from tests.support.replica_sim import ReplicaSim
    from tests.support.sim_member import SimMember

UNWITNESSED = range(32, 40)
"""Bytes of a record's header: append time and marks."""
BLANK_BYTES = 8
NEAR = 200


@dataclass(frozen=True, slots=True)
class DamageMix:
    """How a run's disks go bad.

    Attributes:
        damage: how probable damage is in each turn of the nemesis.
        process_only: how often a failed write ends the process alone, and leaves the page cache.
        mark_refused: how often the disk takes nothing more after a failed write, not even the mark.
        scrub_interval: time between two background reads of a log.
        fetch_bytes: how much a peer gives at once.
    """

    damage: float = 0.0
    process_only: float = 0.0
    mark_refused: float = 0.0
    scrub_interval: int = 800
    fetch_bytes: int = 1 << 20


def draw_damage_mix(source: random.Random) -> DamageMix:
    """Draws a mix; each fault is sometimes absent."""
    return DamageMix(
        damage=source.choice((0.0, 0.05, 0.2)),
        process_only=source.choice((0.0, 0.5, 1.0)),
        mark_refused=source.choice((0.0, 0.0, 0.5)),
        scrub_interval=source.choice((300, 800)),
        fetch_bytes=source.choice((400, 1 << 20)),
    )


@dataclass(frozen=True, slots=True)
class Place:
    """Bytes to damage, what they were and what they become."""

    kind: str
    path: Path
    inode: Inode
    offset: int
    original: bytes
    content: bytes

    @property
    def _stop(self) -> int:
        return self.offset + len(self.content)

    def fits(self, others: Sequence[Place]) -> bool:
        """Whether it changes what is on the disk, and nothing that is on its way there or damaged already."""
        durable = bytes(self.inode.durable[self.offset : self._stop])
        apart = all(
            self.inode is not other.inode or self.offset >= other._stop or other.offset >= self._stop
            for other in others
        )
        return apart and self.original == durable != self.content

    def apply(self) -> None:
        """Damages the bytes, in the page cache and on the disk."""
        for copy in (self.inode.content, self.inode.durable):
            copy[self.offset : self._stop] = self.content

    def state(self, files: FaultyFiles) -> str:
        """Says whether it is ``damaged``, ``repaired`` or ``gone``; so does the disk, once it is asked."""
        held = [names.get(self.path) is self.inode for names in (files.names, files.durable_names)]
        if not any(held):
            return "gone"
        here = slice(self.offset, self._stop)
        if self.inode.content[here] != self.original:
            return "damaged"
        if self.inode.durable[here] != self.original:  # the page cache alone is whole
            if any(data is not None and at <= self.offset < at + len(data) for at, data in self.inode.pending):
                self.inode.durable[here] = self.original  # the kernel writes it back
                return "repaired"
            self.inode.content[here] = self.inode.durable[here]  # its sync failed, and the page is dropped
            return "damaged"
        return "repaired"


class Damages:
    """All that is damaged at a time; on one member."""

    def __init__(self, sim: ReplicaSim, source: random.Random) -> None:
        self._sim = sim
        self._source = source
        self._victim: SimMember | None = None
        self._places: list[Place] = []
        self._first_index = 0

    def look(self) -> None:
        """Takes note of what was repaired meanwhile."""
        if self._victim is None:
            return
        left = []
        for place in self._places:
            state = place.state(self._victim.files)
            if state == "damaged":
                left.append(place)
            else:
                self._sim.counters[f"{state}: {place.kind}"] += 1
        self._places = left
        if not left and self._victim.lost_behind is None:  # of a lost end, rows of the index may be missing still
            self._victim = None

    def on(self, member: SimMember) -> bool:
        """Whether a member holds damage."""
        self.look()
        return self._victim is member

    @property
    def any(self) -> bool:
        """Whether some member holds damage."""
        self.look()
        return self._victim is not None

    def deletable_end(self, end: int) -> int:
        """Returns how far logs may be deleted: what is damaged on one member must stay on the others."""
        return min(end, self._first_index) if self.any else end

    def strike(self) -> None:
        """Perhaps damages something on some member, if nothing is damaged now."""
        if not self._sim.damage_chance(self._sim.damage_mix.damage) or self.any or self._sim.lost_ends.unsettled:
            return
        member = self._source.choice(list(self._sim.members.values()))
        rows = self._vulnerable(member)
        if not len(rows):
            return
        struck = self._strike_rows if self._source.random() < 0.3 else self._strike_data
        places: list[Place] = []
        for _ in range(self._source.choice((1, 1, 3))):
            place = struck(member, rows)
            if place is not None and place.fits(places):
                places.append(place)
                place.apply()
                self._sim.counters[place.kind] += 1
        if places:
            self.took(member, places, int(rows["index"][0]))

    def took(self, member: SimMember, places: list[Place], first_index: int) -> None:
        """Takes note of what a member lacks from ``first_index`` on until it is repaired."""
        self._victim, self._places, self._first_index = member, places, first_index

    def _vulnerable(self, member: SimMember) -> np.ndarray:
        """Returns the index rows of some entries that may be damaged; none if there are none."""
        checkpoint, none = _durable_checkpoint(member), np.empty(0, INDEX_RECORD)
        first = max(one.first_index_max for one in self._sim.members.values())
        last = min(checkpoint.durable_index, member.disk.last_index()) if checkpoint is not None else -1
        batch = committed_batch(self._sim.checker, last)
        while last >= first and (batch is None or member.disk.term_at(Index(last)) != batch.term):
            last = (batch.first_index if batch is not None else self._sim.checker.commit_index + 1) - 1
            batch = committed_batch(self._sim.checker, last)
        if last < first:
            return none
        if last - first >= NEAR:
            first = self._source.choice((first, last + 1 - NEAR, self._source.randrange(first, last + 2 - NEAR)))
        wanted = np.arange(first, min(last + 1, first + NEAR))
        found = np.frombuffer(index_rows(member, first, int(wanted[-1]) + 1), INDEX_RECORD)
        return found if len(found) == len(wanted) and bool((found["index"] == wanted).all()) else none

    def _strike_rows(self, member: SimMember, rows: np.ndarray) -> Place | None:
        source, at = self._source, self._source.randrange(len(rows)) if self._source.random() < 0.7 else len(rows) - 1
        inode, path, offset = _file(member, "index", int(rows["index"][at]) * INDEX_RECORD_BYTES)
        assert inode is not None
        if source.random() < 0.6:
            return _flip("rows flipped", inode, path, offset + source.randrange(INDEX_RECORD_BYTES), source)
        start = offset - offset % SECTOR
        stop = min(start + SECTOR, len(inode.content))
        base = int(path.name)
        inside = int(rows["index"][0]) * INDEX_RECORD_BYTES <= base + start
        inside = inside and base + stop <= (int(rows["index"][-1]) + 1) * INDEX_RECORD_BYTES
        return _replace("rows lost", inode, path, start, bytes(stop - start)) if inside else None

    def _strike_data(self, member: SimMember, rows: np.ndarray) -> Place | None:
        source, at = self._source, self._source.randrange(len(rows))
        position, size = int(rows["position"][at]), int(rows["size"][at])
        inode, path, offset = _file(member, "data", position)
        assert inode is not None
        if source.random() < 0.5:
            choices = [byte for byte in (source.randrange(size), source.randrange(48)) if byte not in UNWITNESSED]
            return _flip("bits flipped", inode, path, offset + choices[0], source) if choices else None
        base, start = int(path.name), offset + source.randrange(size)
        start -= start % SECTOR
        stop = min(start + SECTOR, len(inode.content))
        end = int(rows["position"][-1]) + int(rows["size"][-1])
        if base + start < int(rows["position"][0]) or base + stop > end:
            return None
        kind, content = "sectors lost", bytes(stop - start)
        if source.random() < 0.5:
            other = source.choice([one for name, one in member.files.names.items() if name.parent == path.parent])
            place = source.randrange(0, max(len(other.content), 1), SECTOR)
            kind, content = "sectors misdirected", bytes(other.content[place : place + stop - start])
        if len(content) != stop - start or not _witnessed(rows, inode, base, start, content):
            return None
        return _replace(kind, inode, path, start, content)


def committed_batch(checker: SafetyChecker, index: int) -> Batch | None:
    """Returns the committed batch that holds an entry."""
    if not 0 <= index <= checker.commit_index:
        return None
    return checker.committed[bisect_right(checker.committed_firsts, index) - 1]


def _durable_checkpoint(member: SimMember) -> Checkpoint | None:
    """Returns the lower one of the checkpoints that a crash may leave."""
    path = Layout(member.path).checkpoint
    after_crash = FaultyFiles()
    after_crash.names = member.files.durable_names
    both = [load_checkpoint(files, path) for files in (member.files, after_crash)]
    return min((one for one in both if one), key=lambda one: one.durable_index) if all(both) else None


def index_rows(member: SimMember, first: int, end: int) -> bytes:
    """Returns the bytes of index rows; fewer where there are none."""
    pieces, at, stop = [], first * INDEX_RECORD_BYTES, end * INDEX_RECORD_BYTES
    size = member.sim.mix.storage.index_segment_bytes
    while at < stop:
        upto = min(stop, at - at % size + size)
        inode, _, offset = _file(member, "index", at)
        pieces.append(bytes(inode.content[offset : offset + upto - at]) if inode is not None else b"")
        at = upto
    return b"".join(pieces)


def _file(member: SimMember, folder: str, position: int) -> tuple[Inode | None, Path, int]:
    """Returns the file that holds a position, if there is one, its path, and where in it."""
    storage = member.sim.mix.storage
    size = storage.data_segment_bytes if folder == "data" else storage.index_segment_bytes
    path = member.path / folder / segment_name(position - position % size)
    return member.files.names.get(path), path, position % size


def _witnessed(rows: np.ndarray, inode: Inode, base: int, start: int, content: bytes) -> bool:
    """Whether each record, and each BLANK, that would change, changes where it has a witness."""
    old = bytes(inode.content[start : start + len(content)])
    positions = rows["position"].astype(np.int64)
    seen: dict[tuple[int, bool], bool] = {}
    for at in (base + start + at for at in range(len(content)) if old[at] != content[at]):
        row = int(np.searchsorted(positions, at, side="right")) - 1
        offset, size = at - int(positions[row]), int(rows["size"][row])
        shows = offset not in UNWITNESSED and offset < size + BLANK_BYTES
        seen[row, offset < size] = seen.get((row, offset < size), False) or shows
    return bool(seen) and all(seen.values())


def _flip(kind: str, inode: Inode, path: Path, offset: int, source: random.Random) -> Place:
    return _replace(kind, inode, path, offset, bytes([inode.content[offset] ^ 1 << source.randrange(8)]))


def _replace(kind: str, inode: Inode, path: Path, offset: int, content: bytes) -> Place:
    return Place(kind, path, inode, offset, bytes(inode.content[offset : offset + len(content)]), content)

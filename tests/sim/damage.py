"""Damage to durable data: flipped bits, lost and misdirected sectors, wrong index rows, a lost end of the log.

Injected only where the log guarantees to survive it: on one member at a time; in the data or in the index but not in
both, so that an intact copy and a cross-check remain; in entries that are committed, that this member's durable
checkpoint covers (a bad record after it counts as a torn tail), and that no member has trimmed. The append time and the
flags of a record have no cross-check, so they are never damaged alone.

While the members change, and until a lost voter is removed, nothing is damaged: that would be one fault too many.

The end of a log is lost from an entry that the checkpoint covers up to the last one, while its member is down, as after
a restore of earlier files. The covered entries come back from other members. The acknowledged entries after them are
lost undetectably; a majority has every committed one, so at least one other member does. A member that lost both copies
of its checkpoint cannot rule that out, so it counts as one. One copy of it, or of the hard state, may be lost anytime.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from dledger_core.ids import NO_TERM, Index
from dledger_core.record import INDEX_RECORD, INDEX_RECORD_BYTES, segment_name
from dledger_core.storage.files.ab_file import ABFile, copies
from dledger_core.storage.files.identity import identity_file
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.members_file import members_file
from dledger_core.storage.files.meta_files import (
    Checkpoint,
    checkpoint_file,
    hard_state_file,
    load_checkpoint,
    load_floor,
)
from tests.support.faulty_files import SECTOR, FaultyFiles, Inode

if TYPE_CHECKING:
    from tests.sim.replica_member import ReplicaMember
    from tests.sim.simulator import Simulator

UNCHECKED = range(32, 40)
"""Bytes of a record's header without a cross-check: append time and flags."""
BLANK_BYTES = 8
NEAR = 200
LOST_ROWS_MAX = 60


@dataclass(frozen=True, slots=True)
class Patch:
    """Damaged bytes: their file, the original and the new content."""

    kind: str
    path: Path
    inode: Inode
    offset: int
    original: bytes
    content: bytes

    @property
    def _stop(self) -> int:
        return self.offset + len(self.content)

    @property
    def is_cut_off(self) -> bool:
        """Whether the log ends before it: its file has only zeros from there on."""
        return self.path.parent.name in ("data", "index") and not any(self.inode.content[self.offset :])

    def fits(self, others: Sequence[Patch]) -> bool:
        """Whether it changes durable bytes that neither a pending write nor other damage changes."""
        durable = bytes(self.inode.durable[self.offset : self._stop])
        apart = all(self.inode is not o.inode or self.offset >= o._stop or o.offset >= self._stop for o in others)
        return apart and self.original == durable != self.content

    def apply(self) -> None:
        """Damage the bytes, in the page cache and on the disk."""
        for copy in (self.inode.content, self.inode.durable):
            copy[self.offset : self._stop] = self.content

    def state(self, files: FaultyFiles) -> str:
        """Return ``damaged``, ``repaired`` or ``deleted``; where cache and disk differ, let one of them win."""
        if not any(names.get(self.path) is self.inode for names in (files.names, files.durable_names)):
            return "deleted"
        here = slice(self.offset, self._stop)
        if self.inode.content[here] != self.original:
            return "damaged"
        if self.inode.durable[here] != self.original:  # only the page cache is intact
            if any(data is not None and at <= self.offset < at + len(data) for at, data in self.inode.pending):
                self.inode.durable[here] = self.original  # the kernel writes it back
                return "repaired"
            self.inode.content[here] = self.inode.durable[here]  # its sync failed, and the page is dropped
            return "damaged"
        return "repaired"


class Damages:
    """All current damage; on one member at most."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self._victim: ReplicaMember | None = None
        self._patches: list[Patch] = []
        self._first_index = 0

    def on(self, member: ReplicaMember) -> bool:
        """Whether a member has damage."""
        self._look()
        return self._victim is member

    def deletable_end(self, end: int) -> int:
        """Return the limit of a trim: entries that are damaged on one member must stay on the others."""
        self._look()
        return min(end, self._first_index) if self._victim is not None else end

    def strike(self, source: random.Random) -> None:
        """Damage something on some member, unless a member has damage or may lack acknowledged entries."""
        if not self._members:
            return
        member = source.choice(self._members)
        rows = self._vulnerable(member, source) if self.is_calm() and self._has_peers(member, 2) else ()
        if len(rows):
            self._damage(member, rows, source)

    def _damage(self, member: ReplicaMember, rows: np.ndarray, source: random.Random) -> None:
        patches: list[Patch] = []
        make = _index_patch if source.random() < 0.3 else _data_patch
        for _ in range(source.choice((1, 1, 3))):
            patch = make(member, rows, source)
            if patch is not None and patch.fits(patches):
                patches.append(patch)
                patch.apply()
                self._sim.counters[patch.kind] += 1
        if patches:
            self._victim, self._patches, self._first_index = member, patches, int(rows["index"][0])

    def hole(self, member: ReplicaMember, source: random.Random) -> None:
        """Damage something on a member that is about to survive the others, perhaps the only ones that have it too."""
        self._look()
        free = self._victim is None and not member.repairs.busy  # a repair that is about to end has read everything
        rows = self._vulnerable(member, source) if free else ()
        if len(rows):
            self._damage(member, rows, source)

    def move(self, member: ReplicaMember, other: Damages, moved: ReplicaMember) -> None:
        """Continue in another group with the damage of a member that is ``moved`` there, but for what was cut off."""
        if self._victim is member:
            left = [patch for patch in self._patches if not (member.was_cut and patch.is_cut_off)]
            other._victim, other._patches, other._first_index = moved, left, self._first_index
            self._victim, self._patches = None, []

    def lose_end(self, member: ReplicaMember, source: random.Random) -> None:
        """Take the end of the log of a member that just went down, if the log guarantees to survive that."""
        checkpoints = _checkpoints(member)
        ready = len(checkpoints) == 2 and self.may_forget(member, 2) and member.writing.restart is None
        if not ready:
            return
        low, high = checkpoints
        end = high.durable_index + 1
        batch = self._sim.checker.committed_batch(high.durable_index)
        covered = member.disk.last_index() >= high.durable_index
        if batch is None or not covered or member.disk.term_at(Index(high.durable_index)) != batch.term:
            return
        first = max(self._first_index_max, end - LOST_ROWS_MAX)
        if first > low.durable_index:
            return
        start = source.randrange(first, low.durable_index + 1)
        rows = np.frombuffer(_index_rows(member, start, end), INDEX_RECORD)
        if len(rows) != end - start or int(rows["index"][0]) != start:
            return
        self._sim.counters["ends lost"] += 1
        self._sim.checker.lost.append((member.node_id, member.disk.copy()))
        member.lost_after = Index(low.commit_index)  # uncommitted entries come back from a later leader only
        patches = _blank(member, int(rows["position"][0]), high.position, source)
        self._victim, self._patches, self._first_index = member, patches, start
        if source.random() < 0.7:
            _zero(member, "index", start * INDEX_RECORD_BYTES)

    def lose_copy(self, member: ReplicaMember, source: random.Random) -> None:
        """Lose one copy of hard state or checkpoint, where both are equal now and after a crash."""
        layout = Layout(member.path)
        files = (
            *(hard_state_file(layout.hard_state), checkpoint_file(layout.checkpoint)),
            *(members_file(layout), identity_file(layout.identity)),
        )
        ab_file: ABFile[Any] = source.choice(files)
        if all(ab_file.load(files).equal for files in (member.files, after_crash(member))):
            self._sim.counters["copies lost"] += 1
            _lose(member, source.choice(copies(ab_file.path)), source)

    def lose_checkpoint(self, member: ReplicaMember, source: random.Random) -> None:
        """Take both copies of the checkpoint of a member that just went down, if no other one is recovering."""
        if self._may_lose_file(member, 1):
            self._sim.counters["checkpoints lost"] += 1
            for path in copies(Layout(member.path).checkpoint):
                _lose(member, path, source)
            member.checkpoint_lost = True

    def lose_members(self, member: ReplicaMember, source: random.Random) -> None:
        """Take both copies of the members file in the same way; one of two voters would wait for an operator then."""
        if self._may_lose_file(member, 2):
            self._sim.counters["members files lost"] += 1
            for path in copies(Layout(member.path).members):
                _lose(member, path, source)
            member.members_lost = True

    def _may_lose_file(self, member: ReplicaMember, peers: int) -> bool:
        settled = member.disk.hard_state.term > 0 and member.lost_after is None
        return settled and self.may_forget(member, peers) and member.writing.restart is None

    def may_forget(self, member: ReplicaMember, peers: int) -> bool:
        """Whether a member may forget what it acknowledged."""
        return self._sim.faults_on and member in self._members and self.is_calm() and self._has_peers(member, peers)

    def _has_peers(self, member: ReplicaMember, peers: int) -> bool:
        """Whether enough other voters have all that is committed; two can also commit it again without the member."""
        voters = self._sim.checker.configuration.configuration.voters
        return len(voters - {member.node_id}) >= (peers if member.node_id in voters else 1)

    @property
    def _members(self) -> list[ReplicaMember]:
        return [member for member in self._sim.current if member.life]

    @property
    def _first_index_max(self) -> int:
        return max(member.first_index_max for member in self._members)

    def is_calm(self) -> bool:
        """Whether no member has damage, is lost or changes, or may lack entries that it once acknowledged."""
        self._look()
        changes = self._sim.changes
        return (
            self._victim is None
            and not self._sim.is_disturbed
            and (changes is None or changes.is_settled())
            and not any(
                m.lost_after is not None
                or m.checkpoint_lost
                or m.members_lost
                or m.disk.configurations()[-1].configuration.is_unknown
                or load_floor(m.files, Layout(m.path), NO_TERM) is not None
                for m in self._members
            )
        )

    def _look(self) -> None:
        """Count the repaired patches and drop them."""
        if self._victim is None:
            return
        left = []
        for patch in self._patches:
            state = patch.state(self._victim.files)
            if state == "damaged":
                left.append(patch)
            else:
                self._sim.counters[f"{state}: {patch.kind}"] += 1
        self._patches = left
        if not left and self._victim.lost_after is None:  # after a lost end, index rows may still be missing
            self._victim = None

    def _vulnerable(self, member: ReplicaMember, source: random.Random) -> np.ndarray:
        """Return the index rows of some entries that may be damaged."""
        none = np.empty(0, INDEX_RECORD)
        checkpoints = _checkpoints(member)
        if len(checkpoints) < 2:
            return none
        first = self._first_index_max
        last: int = min(checkpoints[0].durable_index, member.disk.last_index(), self._sim.checker.commit_index)
        while last >= first and member.disk.term_at(Index(last)) != self._committed(last).term:
            last = self._committed(last).first_index - 1
        if last < first:
            return none
        if last - first >= NEAR:
            first = source.choice((first, last + 1 - NEAR, source.randrange(first, last + 2 - NEAR)))
        wanted = np.arange(first, min(last + 1, first + NEAR))
        found = np.frombuffer(_index_rows(member, first, int(wanted[-1]) + 1), INDEX_RECORD)
        return found if len(found) == len(wanted) and bool((found["index"] == wanted).all()) else none

    def _committed(self, index: int) -> object:
        batch = self._sim.checker.committed_batch(index)
        assert batch is not None
        return batch


def _checkpoints(member: ReplicaMember) -> list[Checkpoint]:
    """Return the checkpoints that a crash may leave, the lower one first; fewer than two if it may leave none."""
    path = Layout(member.path).checkpoint
    found = [load_checkpoint(files, path) for files in (member.files, after_crash(member))]
    return sorted((one for one in found if one), key=lambda one: one.durable_index)


def after_crash(member: ReplicaMember) -> FaultyFiles:
    """Return the files that a power loss leaves; small ones are replaced as a whole."""
    files = FaultyFiles()
    files.names = member.files.durable_names
    return files


def _lose(member: ReplicaMember, path: Path, source: random.Random) -> None:
    """Remove a small file, or change a bit of it."""
    inode = member.files.names.get(path)
    if inode is None or not inode.content or source.random() < 0.5:
        for names in (member.files.names, member.files.durable_names):
            names.pop(path, None)
        pending = member.files.pending_names.get(path.parent, [])
        pending[:] = [(name, inode) for name, inode in pending if name != path]
        return
    at = source.randrange(len(inode.content))
    inode.content[at] ^= 1 << source.randrange(8)
    inode.durable[:] = inode.content


def _file(member: ReplicaMember, directory: str, position: int) -> tuple[Inode | None, Path, int]:
    """Return the file that covers a position, its path, and the offset in it."""
    storage = member.sim.mix.storage
    size = storage.data_segment_bytes if directory == "data" else storage.index_segment_bytes
    path = member.path / directory / segment_name(position - position % size)
    return member.files.names.get(path), path, position % size


def _index_rows(member: ReplicaMember, first: int, end: int) -> bytes:
    """Return the bytes of index rows; fewer where files end."""
    found, at, stop = [], first * INDEX_RECORD_BYTES, end * INDEX_RECORD_BYTES
    size = member.sim.mix.storage.index_segment_bytes
    while at < stop:
        upto = min(stop, at - at % size + size)
        inode, _, offset = _file(member, "index", at)
        found.append(bytes(inode.content[offset : offset + upto - at]) if inode is not None else b"")
        at = upto
    return b"".join(found)


def _index_patch(member: ReplicaMember, rows: np.ndarray, source: random.Random) -> Patch | None:
    at = source.randrange(len(rows)) if source.random() < 0.7 else len(rows) - 1
    inode, path, offset = _file(member, "index", int(rows["index"][at]) * INDEX_RECORD_BYTES)
    if inode is None:  # its log is about to restart elsewhere
        return None
    if source.random() < 0.6:
        return _flip("rows flipped", inode, path, offset + source.randrange(INDEX_RECORD_BYTES), source)
    start = offset - offset % SECTOR
    stop = min(start + SECTOR, len(inode.content))
    base = int(path.name)
    inside = int(rows["index"][0]) * INDEX_RECORD_BYTES <= base + start
    inside = inside and base + stop <= (int(rows["index"][-1]) + 1) * INDEX_RECORD_BYTES
    return _patch("rows lost", inode, path, start, bytes(stop - start)) if inside else None


def _data_patch(member: ReplicaMember, rows: np.ndarray, source: random.Random) -> Patch | None:
    at = source.randrange(len(rows))
    position, size = int(rows["position"][at]), int(rows["size"][at])
    inode, path, offset = _file(member, "data", position)
    if inode is None:
        return None
    if source.random() < 0.5:
        choices = [byte for byte in (source.randrange(size), source.randrange(48)) if byte not in UNCHECKED]
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
        sector = source.randrange(0, max(len(other.content), 1), SECTOR)
        kind, content = "sectors misdirected", bytes(other.content[sector : sector + stop - start])
    # Nothing reads the bytes after a BLANK's head, and an interrupted repair does not write them again.
    starts = rows["position"].astype(np.int64)
    last = int(np.searchsorted(starts, base + len(inode.content))) - 1
    stop = min(stop, int(starts[last]) + int(rows["size"][last]) + BLANK_BYTES - base)
    content = content[: stop - start]
    if len(content) != stop - start or not _detectable(rows, inode, base, start, content):
        return None
    return _patch(kind, inode, path, start, content)


def _detectable(rows: np.ndarray, inode: Inode, base: int, start: int, content: bytes) -> bool:
    """Whether each changed record, and each changed BLANK, changes where it has a cross-check."""
    old = bytes(inode.content[start : start + len(content)])
    positions = rows["position"].astype(np.int64)
    seen: dict[tuple[int, bool], bool] = {}
    for at in (base + start + at for at in range(len(content)) if old[at] != content[at]):
        row = int(np.searchsorted(positions, at, side="right")) - 1
        offset, size = at - int(positions[row]), int(rows["size"][row])
        shows = offset not in UNCHECKED and offset < size + BLANK_BYTES
        seen[row, offset < size] = seen.get((row, offset < size), False) or shows
    return bool(seen) and all(seen.values())


def _flip(kind: str, inode: Inode, path: Path, offset: int, source: random.Random) -> Patch:
    return _patch(kind, inode, path, offset, bytes([inode.content[offset] ^ 1 << source.randrange(8)]))


def _patch(kind: str, inode: Inode, path: Path, offset: int, content: bytes) -> Patch:
    return Patch(kind, path, inode, offset, bytes(inode.content[offset : offset + len(content)]), content)


def _blank(member: ReplicaMember, position: int, end: int, source: random.Random) -> list[Patch]:
    """Zero the data from ``position`` on; return the patches of the data before ``end``, which must come back."""
    patches = []
    size = member.sim.mix.storage.data_segment_bytes
    for path, inode in sorted(member.files.names.items()):
        base = int(path.name) if path.parent.name == "data" else end
        start, stop = max(0, position - base), min(end - base, size)
        if path.parent.name == "data" and base >= end and source.random() < 0.5:
            for names in (member.files.names, member.files.durable_names):
                names.pop(path, None)
        elif start < stop:
            # After a segment's last record no byte has to come back.
            original = bytes(inode.content[start:stop]).rstrip(b"\x00")
            patches.append(Patch("end lost", path, inode, start, original, bytes(len(original))))
    _zero(member, "data", position)
    return patches


def _zero(member: ReplicaMember, directory: str, position: int) -> None:
    for path, inode in member.files.names.items():
        if path.parent.name == directory:
            start = max(0, position - int(path.name))
            inode.pending = []
            for copy in (inode.content, inode.durable):
                copy[start:] = bytes(max(0, len(copy) - start))

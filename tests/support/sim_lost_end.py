"""The end of a log is lost while its member is down: data, and mostly the index, from a vouched entry on to the end.

So it is after a file was cut short, or data and index were set back to an earlier time. What the checkpoint vouches for
comes back from the others; what was acknowledged behind that is gone without a trace. The log promises to get over it
on one member at a time: all that is committed lies on a majority, so on at least one other member.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

from dledger_core.ids import NO_TERM, Index
from dledger_core.record import INDEX_RECORD, INDEX_RECORD_BYTES
from dledger_core.storage.files.checkpoint import Checkpoint, load_checkpoint
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.recovering import recovering_above
from tests.support.faulty_files import FaultyFiles
from tests.support.sim_damage import Damages, Place, committed_batch, index_rows

if TYPE_CHECKING:
    from tests.support.replica_sim import ReplicaSim
    from tests.support.sim_member import SimMember

ROWS_MAX = 60


class LostEnds:
    """Perhaps takes the end of a member's log when it goes down; one member's at a time.

    A source of chance of its own, so that a seed in which none is lost runs as it would without.
    """

    def __init__(self, sim: ReplicaSim, damages: Damages, source: random.Random) -> None:
        self._sim = sim
        self._damages = damages
        self._source = source
        self._probability = source.choice((0.0, 0.3, 0.8)) if len(sim.members) > 1 else 0.0

    @property
    def unsettled(self) -> bool:
        """Whether some member may still lack what it once acknowledged."""
        members = self._sim.members.values()
        return any(
            recovering_above(m.files, Layout(m.path), NO_TERM) is not None or m.lost_behind is not None for m in members
        )

    def perhaps(self, member: SimMember) -> None:
        """Takes the end of a log whose member just went down, if that is promised to be survived."""
        lossy = self._sim.faults_on and self._probability and self._source.random() < self._probability
        if not lossy or self._damages.any or self.unsettled or member.writing.reset is not None:
            return
        bounds = _checkpoints(member)
        if bounds is None:
            return
        low, high = bounds
        first = max(one.first_index_max for one in self._sim.members.values())
        batch = committed_batch(self._sim.checker, high.durable_index)
        held = member.disk.last_index() >= high.durable_index
        if batch is None or not held or member.disk.term_at(Index(high.durable_index)) != batch.term:
            return
        first = max(first, high.durable_index + 1 - ROWS_MAX)
        if first <= low.durable_index:
            self._take(member, self._source.randrange(first, low.durable_index + 1), low, high)

    def _take(self, member: SimMember, start: int, low: Checkpoint, high: Checkpoint) -> None:
        rows = np.frombuffer(index_rows(member, start, high.durable_index + 1), INDEX_RECORD)
        if len(rows) != high.durable_index + 1 - start or int(rows["index"][0]) != start:
            return
        self._sim.checker.lost.append((member.node_id, member.disk.copy()))
        member.lost_behind = Index(low.durable_index)
        self._sim.counters["ends lost"] += 1
        self._damages.took(member, self._blank(member, int(rows["position"][0]), high.position), start)
        if self._source.random() < 0.7:
            _zero(member, "index", start * INDEX_RECORD_BYTES)

    def repaired(self) -> None:
        """A member takes part again: perhaps who alone holds what it lost falls silent, so that the others elect."""
        if not self._sim.faults_on or self._source.random() < 0.4:
            return
        for leader in [one.node_id for one in self._sim.members.values() if one.up and one.replica.is_leader]:
            self._sim.counters["leaders cut off"] += 1
            self._sim.network.partition("isolate", leader)

    def _blank(self, member: SimMember, position: int, end: int) -> list[Place]:
        """Zeroes the data from ``position`` on; returns the places of what is to come back."""
        places = []
        size = member.sim.mix.storage.data_segment_bytes
        for path, inode in sorted(member.files.names.items()):
            base = int(path.name) if path.parent.name == "data" else end
            start, stop = max(0, position - base), min(end - base, size)
            if path.parent.name == "data" and base >= end and self._source.random() < 0.5:
                for names in (member.files.names, member.files.durable_names):
                    names.pop(path, None)
            elif start < stop:
                # Lag a segment's last record there is nothing that has to come back as it was.
                original = bytes(inode.content[start:stop]).rstrip(b"\x00")
                places.append(Place("end lost", path, inode, start, original, bytes(len(original))))
        _zero(member, "data", position)
        return places


def _zero(member: SimMember, folder: str, position: int) -> None:
    for path, inode in member.files.names.items():
        if path.parent.name == folder:
            start = max(0, position - int(path.name))
            inode.pending = []
            for copy in (inode.content, inode.durable):
                copy[start:] = bytes(max(0, len(copy) - start))


def _checkpoints(member: SimMember) -> tuple[Checkpoint, Checkpoint] | None:
    """Returns the lower and the higher one of the checkpoints that a crash may leave."""
    after_crash = FaultyFiles()
    after_crash.names = member.files.durable_names
    path = Layout(member.path).checkpoint
    found = [load_checkpoint(files, path) for files in (member.files, after_crash)]
    both = sorted((one for one in found if one), key=lambda one: one.durable_index)
    return (both[0], both[1]) if len(both) == 2 else None

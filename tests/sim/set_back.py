"""Disks that are set back in time: a member returns with an earlier copy of its store, as a restored machine does.

The store has forgotten votes and entries, and its files do not show it. What the other members remember of its promises
refuses it when it attaches (``PeerWatermarks``): a store that forgot a term stops and is replaced, one that
forgot entries that it acknowledged is a recovering voter, and one that led its term keeps its vote for logs that reach
the end of that term. That is sure only within limits, and only there a disk is set back: every other member has run
since the copy and is reached first.

A store that was not set back has forgotten nothing: none is refused, but for a leader that had not synced what it sent.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from random import Random
from typing import TYPE_CHECKING

from dledger_core.errors import DLedgerError, EndLostError, IdentityLostError
from dledger_core.net.attach import floor_of_row
from tests.sim.safety import check

if TYPE_CHECKING:
    from tests.sim.replica_member import ReplicaMember
    from tests.sim.simulator import Simulator


ATTEMPTS = 20
"""Times at which a copy is tried: other faults forbid many of them."""


class SetBacks:
    """All copies of a run; one member at a time."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim

    def copy(self, member: ReplicaMember, random: Random) -> None:
        """Copy what a power loss would leave now, and return to it later if the group certainly notices.

        A copy with damage would bring back what was repaired meanwhile: to the checker a damage without a fault.
        """
        if self._sim.shared.damages.on(member):
            return
        names = {path: inode.clone() for path, inode in member.files.durable_names.items()}
        for inode in names.values():
            inode.content, inode.pending = bytearray(inode.durable), []
        disk, writing, term = member.disk.copy(), copy.copy(member.writing), member.core.status().term
        lives = {other.node_id: other.life for other in self._others(member)}

        def set_back() -> bool:
            now = {other.node_id: other.life for other in self._others(member) if other.up}
            # A loss that waits for the crash would strike the copy.
            idle = writing == replace(writing, restart=None, trimmed_to=0) and member.lose_end_next is None
            may = member.up and idle and now == lives and self._sim.shared.damages.may_forget(member, 2)
            trimmed = disk.first_index() != member.disk.first_index()
            if not may or trimmed or self._sim.changes is None:
                return False
            led = self._sim.checker.leaders.get(term) == member.node_id
            self._sim.counters["disks of leaders set back" if led else "disks set back"] += 1
            self._sim.checker.lost.append((member.node_id, member.disk.copy()))
            member.die("crashes", power=False)
            member.files.names, member.files.durable_names = dict(names), dict(names)
            member.files.pending_names.clear()
            member.disk, member.writing = disk, writing
            member.returns += 1
            member.was_set_back = True
            return True

        def attempt(left: int) -> None:
            if left and not set_back():
                self._sim.time.after(random.randrange(10, 100), lambda: attempt(left - 1))

        self._sim.time.after(random.randrange(10, 300), lambda: attempt(ATTEMPTS))

    def returned(self, member: ReplicaMember) -> None:
        """Attach a store that was set back to the members that may remember it.

        Where one of them has died meanwhile, it is not reached first: an operator replaces the store.
        """
        if not all(other.up for other in self._others(member)):
            assert self._sim.changes is not None
            self._sim.changes.lose(member.node_id)
            return
        for other in self._others(member):
            if other.up and member.up:
                other.attaches(member)
        member.was_set_back = False

    def refused(self, member: ReplicaMember, error: DLedgerError) -> None:
        """Do what a node does whose store is refused."""
        floor = floor_of_row(error.values.get("floor"))
        kind = "a leader's end" if floor is not None and not floor.is_open else error.name
        self._sim.counters[f"{'set back' if member.was_set_back else 'refused'}: {kind}"] += 1
        if isinstance(error, IdentityLostError):
            check(member.was_set_back, "a store is refused that has forgotten no vote", member.node_id, error)
            assert self._sim.changes is not None
            self._sim.changes.lose(member.node_id)
            return
        check(isinstance(error, EndLostError), "a store is refused for another reason", member.node_id, error)
        honest = floor is not None and not floor.is_open
        check(member.was_set_back or honest, "a store is refused that has forgotten nothing", member.node_id, error)
        check(member.replica.peers.raise_floor(floor), "a store is refused that has the floor", member.node_id, error)

    def _others(self, member: ReplicaMember) -> list[ReplicaMember]:
        return [other for other in self._sim.current if other is not member]

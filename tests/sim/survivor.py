"""The answers and changes of a node for an operator who recovers its group, as those of ``server.group.Group``.

The functions of the store are the real ones (``GroupStore``), and so is the end of a replica that retires its log. A
crash may strike between any two operations on files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from dledger_core.config import Peer
from dledger_core.errors import DLedgerError, RecoveryRefusedError, UnreachableError
from dledger_core.ids import NodeId
from dledger_core.recovery import (
    CompleteRecord,
    CutLog,
    FillHoles,
    RetireLog,
    SurvivorAnswer,
    TakeRecord,
)
from dledger_core.server.bootstrap.store import known_members
from dledger_core.server.config import ServerConfig
from dledger_core.server.maintenance.repair import fill_holes
from tests.sim.repairs import SimRepairEnvironment
from tests.sim.safety import check

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import TypeVar

    from tests.sim.replica_member import ReplicaMember

    T = TypeVar("T")

Change = RetireLog | FillHoles | CutLog | TakeRecord | CompleteRecord


def answer(member: ReplicaMember) -> SurvivorAnswer:
    """Return the store as its node reports it to an operator."""
    found = member.store.survivor()
    if not member.up:
        if found.end is None and found.log_uuid is not None:
            try:
                end, holes = member.store.inspect()
            except DLedgerError as error:
                return replace(found, reason=str(error))
            return replace(found, end=end, holes=holes, reason="its store is being repaired")
        return found
    replica, status = member.replica, member.core.status()
    configuration, end = member.core.configuration, member.replica.store.log_end()
    leader = replica.leader_node if status.has_active_leader or replica.is_leader else None
    peers = (Peer(member.node, "sim", 1),)
    config = ServerConfig(self_id=member.node, peers=peers, groups=("g",), directory=member.path.parents[1])
    return replace(
        found,
        version=configuration.version,
        members=known_members(configuration, config),
        chain=replica.lineage.chain,
        end=end,
        leader=leader,
        holes=() if leader is not None else member.store.inspect(end)[1],
    )


async def carry_out(member: ReplicaMember, action: Change) -> None:
    """Execute an action of an operator on a node's store.

    Raises:
        DLedgerError: the store does not allow it, or its node died meanwhile.
    """
    match action:
        case RetireLog(log_uuid):
            _retire(member, log_uuid)
        case FillHoles(_, _, survivors):
            await _fill(member, survivors)
        case CutLog(_, start):
            _check_retired(member)
            before, member.was_cut, member.cut_start = member.was_cut, True, start
            if member.store.cut(start) is None:
                member.was_cut = before
            member.cut_start = None
        case TakeRecord(record):
            member.store.take_recovery(record)
        case CompleteRecord(record):
            if member.store.identity.log_uuid != record.log_uuid:
                member.store.complete_recovery(record.log_uuid)
                member.sim.recoveries.move(member)


def _retire(member: ReplicaMember, log_uuid: str) -> None:
    if member.waits:
        return
    if log_uuid != member.store.identity.log_uuid:
        raise RecoveryRefusedError("the store has another log", "", "")
    if not member.up:  # it is being repaired, which ends
        member.files.kill()
        member.life += 1
        member.repairs.busy = False
        end, _ = member.store.inspect()
    else:
        if member.core.status().has_active_leader:
            raise RecoveryRefusedError("a majority is alive", "", "")
        known = member.leave()
        end, _ = member.store.inspect(known)
        kept = (end.last_term, end.last_index) >= (known.last_term, known.last_index)
        check(kept, "a store retires more than its log", member.node_id, known, end)
    member.store.retire(end)
    member.waits = True


def set_aside(member: ReplicaMember) -> None:
    """Retire a log that another one contains."""
    member.store.retire(member.leave())
    member.waits = True


def _check_retired(member: ReplicaMember) -> None:
    if not member.waits:
        raise RecoveryRefusedError("the store has not retired its log", "", "")


class _Environment(SimRepairEnvironment):
    """Of one life of a node."""

    def __init__(self, member: ReplicaMember) -> None:
        super().__init__(member)
        self._life = member.life

    async def run_blocking(self, function: Callable[[], T]) -> T:
        await self.sleep(0.02)
        if self.member.life != self._life:
            raise UnreachableError("the node died", self.member.node_id)
        return function()


async def _fill(member: ReplicaMember, survivors: Sequence[NodeId]) -> None:
    _check_retired(member)
    peers = tuple(Peer(node, "sim", 1 + at) for at, node in enumerate(survivors))
    life = member.life
    with member.store.repairing(write=True) as repairing:
        report = await fill_holes(repairing, peers, "g", _Environment(member))
    member.sim.counters["holes filled"] += len(report.repaired)
    member.sim.counters["holes left"] += len(report.remaining)
    if member.life != life:
        raise UnreachableError("the node died", member.node_id)
    member.store.update_end()

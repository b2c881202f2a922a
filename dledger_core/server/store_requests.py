"""Requests that change a group's store: bootstrap, admission, and the recovery of a lost majority.

One at a time holds ``Group.store_lock``, because the methods of ``GroupStore`` block and must not overlap.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Final

from dledger_core.bootstrap import BootstrapRecord, LogConstants, StoreAnswer
from dledger_core.config import Peer
from dledger_core.errors import BadRequestError, DLedgerError, RecoveryRefusedError, one_line
from dledger_core.lineage import RecoveryRecord
from dledger_core.record import Records
from dledger_core.recovery import SurvivorAnswer
from dledger_core.server.bootstrap.store import GroupStore, known_members
from dledger_core.server.group import Group
from dledger_core.server.group_state import Quarantined, Repairing, SetAside
from dledger_core.server.maintenance.repair import EventLoopRepairs, fill_holes

_LOG = logging.getLogger(__name__)

_RECOVER_AGAIN: Final = "run dledger recover --lost again"


async def bootstrap(group: Group, operation: str, record_id: str | None, record: BootstrapRecord | None) -> StoreAnswer:
    """Execute an operation of a bootstrap on the store; host the group if it makes the store a member.

    Raises:
        FoundingRefusedError: the store's identity does not allow it.
        UnreachableError: the store is not open.
    """
    return await _change_store(group, lambda store: store.apply(operation, record_id, record))


async def admit(group: Group, node_id: str, log_uuid: str, constants: LogConstants) -> StoreAnswer:
    """Make the store one of a log that exists, and host the group; raise as ``found``."""
    return await _change_store(group, lambda store: store.admit(node_id, log_uuid, constants))


async def _change_store(group: Group, change: Callable[[GroupStore], StoreAnswer]) -> StoreAnswer:
    store = group.store
    if store is None or not group.current.takes_changes:
        raise group.unreachable()
    async with group.store_lock:
        answer = await asyncio.to_thread(change, store)
        if group.is_waiting and store.identity.is_member:
            await _to_the_end(group.open_bootstrapped(store))
    return answer


async def recover(
    group: Group,
    operation: str,
    log_uuid: str | None,
    record: RecoveryRecord | None,
    *,
    start: int = 0,
    survivors: Sequence[Peer] = (),
) -> SurvivorAnswer:
    """Execute an operation of ``dledger recover --lost`` on the store, durably; return the store after it.

    Args:
        group: the group.
        operation: see ``RecoverLogRequest``.
        log_uuid: the log that it is about.
        record: of take.
        start: of cut: the first entry of the hole.
        survivors: of fill: nodes that may have the records.

    Raises:
        RecoveryRefusedError: the store is not in a state that allows it.
        BadRequestError: an argument is missing.
    """
    store = group.store
    if store is None:
        return SurvivorAnswer(node_id=group.host.config.self_id)
    async with group.store_lock:
        if operation == "give-up":
            await _retire(group, store, log_uuid)
        elif operation in ("fill", "cut"):
            await _repair_retired(group, store, operation, start, survivors)
        elif operation == "take":
            if record is None:
                raise BadRequestError("the payload is not a recovery record", "", "send the record")
            await asyncio.to_thread(store.take_recovery, record)
        elif operation == "complete" and store.identity.log_uuid != log_uuid:
            if log_uuid is None:
                raise BadRequestError("complete has no field 'log'", "", "send the uuid of the new log")
            await asyncio.to_thread(store.complete_recovery, log_uuid)
            if group.is_waiting:
                await _to_the_end(group.open_bootstrapped(store))
        return await _survivor(group, store)


async def _retire(group: Group, store: GroupStore, log_uuid: str | None) -> None:
    """Retire the log by request, that of a damaged or quarantined store too."""
    if isinstance(group.current, Repairing) and log_uuid == store.identity.log_uuid:
        await group.current.end()  # the repair may be faster, then the group is hosted
    state, me = group.current, group.host.config.self_id
    if isinstance(state, SetAside):
        return
    if isinstance(state, Repairing | Quarantined):
        if state.opened is not None:
            raise RecoveryRefusedError(f"{me}: {state.reason}", "", f"restart {me}, then {_RECOVER_AGAIN}")
        replica, ours = None, store.identity.log_uuid
    else:
        replica = group.services().replica
        ours = replica.log_uuid
    if log_uuid != ours:
        raise RecoveryRefusedError(f"the store has log {ours}, not {log_uuid}", "", _RECOVER_AGAIN)
    if replica is not None and replica.raft.status().has_active_leader:
        raise RecoveryRefusedError(f"{me} follows {replica.leader_node}: a majority is alive", "", _RECOVER_AGAIN)
    _LOG.warning("retiring the log by request: group=%s member=%s log=%s", group.name, store.member, log_uuid)
    await _to_the_end(group.leave_log(store, SetAside(), inspects=True))


async def _repair_retired(
    group: Group, store: GroupStore, operation: str, start: int, survivors: Sequence[Peer]
) -> None:
    """Fill the holes of a store that has retired its log from other survivors, or end its log before one."""
    me = group.host.config.self_id
    if not isinstance(group.current, SetAside):
        raise RecoveryRefusedError(f"the store of {me} has not retired its log", "", _RECOVER_AGAIN)
    store.release_lock()
    try:
        if operation == "fill":
            await _fill_holes(group, store, survivors)
        elif (kept := await asyncio.to_thread(store.cut, start)) is not None:
            _LOG.warning("log ended before a hole: group=%s node=%s start=%d kept=%s", group.name, me, start, kept)
    finally:
        store.take_lock()


async def read_retired(group: Group, log_uuid: str | None, start: int, end: int) -> tuple[Records, int]:
    """Return records for another survivor and the commit index; see ``GroupStore.read_retired``.

    Without the store's lock: two survivors may fill each other's holes at once, and each record is checked.
    """
    store = group.store
    if store is None or not isinstance(group.current, SetAside):
        raise RecoveryRefusedError("the store has not retired that log", "", _RECOVER_AGAIN)
    max_bytes = group.host.config.limits.repair_fetch_bytes
    return await asyncio.to_thread(store.read_retired, log_uuid, start, end, max_bytes)


async def _to_the_end(work: Coroutine[Any, Any, None]) -> None:
    """Run ``work`` to its end, even if the task that waits for it is cancelled: the request of a lost connection.

    A store that is neither open nor retired would be useless until the node's next start
    (``tests/server/bootstrap/test_lost_majority.py::test_retirement_whose_client_disconnects_is_finished``).
    """
    task = asyncio.create_task(work)
    try:
        await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise


async def _survivor(group: Group, store: GroupStore) -> SurvivorAnswer:
    """Return the store as a recovery sees it."""
    found, hosted, reason = await asyncio.to_thread(store.survivor), group.hosted, group.reason
    if hosted is None and (found.end is not None or found.log_uuid is None):
        return replace(found, reason="" if found.end is not None else reason)
    if hosted is None:
        try:  # it waits for its repair or is quarantined: its files show it
            end, holes = await asyncio.to_thread(store.inspect)
        except DLedgerError as error:
            return replace(found, reason=f"{reason}; {error}")
        return replace(found, end=end, holes=holes)
    replica, status = hosted.replica, hosted.replica.raft.status()
    configuration = replica.raft.configuration
    end = replica.store.log_end()
    leader = replica.leader_node if status.has_active_leader or replica.is_leader else None
    return replace(
        found,
        version=configuration.version,
        members=known_members(configuration, group.host.config),
        chain=replica.lineage.chain,
        end=end,
        leader=leader,
        holes=() if leader is not None else (await asyncio.to_thread(store.inspect, end))[1],
    )


async def _fill_holes(group: Group, store: GroupStore, survivors: Sequence[Peer]) -> None:
    config, node = group.host.config, group.host.config.self_id
    environment = EventLoopRepairs(limits=config.limits, credentials=group.host.credentials)
    with await asyncio.to_thread(partial(store.repairing, write=True)) as repairing:
        report = await fill_holes(repairing, survivors, group.name, environment)
    for hole in report.repaired:
        _LOG.warning("hole filled: group=%s node=%s start=%d end=%d", group.name, node, hole.start, hole.end)
    reasons = one_line("; ".join(f"{peer}: {why}" for peer, why in report.failures.items()))
    for hole in report.remaining:
        place = group.name, node, hole.start, hole.end
        _LOG.error("hole not filled: group=%s node=%s start=%d end=%d error=%s", *place, reasons)
    await asyncio.to_thread(store.update_end)

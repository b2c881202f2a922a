"""Repairs stores from peers: one that cannot be opened, before its group takes part, and one that is in use."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Final

from dledger_core.config import Peer
from dledger_core.errors import CorruptRecordError, UnreachableError
from dledger_core.record import Records
from dledger_core.server.config import ServerConfig
from dledger_core.server.maintenance.peer_records import PeerRecords
from dledger_core.server.maintenance.repair_environment import EventLoopRepairs, RepairEnvironment
from dledger_core.storage import CommitLog
from dledger_core.storage.check.damage import Damage
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import verification_reason

__all__ = ["QuarantinedStores", "RepairReport", "open_sound", "repair_store"]

_LOG = logging.getLogger(__name__)

RETRY_S: Final = 2.0
TOLD_S: Final = 60.0

Again = Callable[[Sequence[Damage], Mapping[str, str]], Awaitable[bool]]
"""Gets what remains and why peers did not help; returns whether to ask them again."""


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What a repair came to.

    Attributes:
        found: the damage there was.
        remaining: what no peer could give.
        failures: why peers did not help, by node id.
    """

    found: tuple[Damage, ...]
    remaining: tuple[Damage, ...]
    failures: Mapping[str, str]


async def _give_up(_remaining: Sequence[Damage], _failures: Mapping[str, str]) -> bool:
    return False


async def repair_store(
    store: StoreRepair,
    peers: Sequence[Peer],
    group: str,
    again: Again = _give_up,
    environment: RepairEnvironment | None = None,
) -> RepairReport:
    """Verifies a whole store, takes what is damaged from peers, and verifies again; then it is suspect no more.

    Args:
        store: held for repair; closed by the caller.
        peers: who may hold the records; the store's own node among them does no harm.
        group: the group's name.
        again: decides about another attempt while something remains.
        environment: time, threads and connections; by default those of the running event loop.

    Raises:
        DiskFailedError: the disk does not take what is written.
    """
    environment = environment or EventLoopRepairs()
    await environment.beside(store.prepare)
    found = left = await environment.beside(partial(store.find, rewrite_rows=True))
    others = tuple(peer for peer in peers if peer.node_id != store.meta.node_id)
    records = PeerRecords(others, group, store.meta.log_uuid, environment.source)
    if others:
        await environment.beside(partial(store.mark_recovering_if_end_is_lost, found))

    async def write(damage: Damage, fetched: Records | None, commit_index: int) -> Damage | None:
        return await environment.beside(partial(store.write_back, damage, fetched, commit_index))

    while left:
        rests = [await records.mend(damage, write) for damage in left]
        left = [rest for rest in rests if rest is not None]
        if left and not await again(left, records.failures):
            break
    if found and not left:
        left = await environment.beside(partial(store.find, rewrite_rows=True))
    if not left:
        await environment.beside(store.settle)
    return RepairReport(tuple(found), tuple(left), dict(records.failures))


def open_sound(
    config: ServerConfig, group: str, files: Files | None = None, log_type: type[CommitLog] = CommitLog
) -> CommitLog:
    """Opens a group's log and looks through its newest part.

    Args:
        config: the node's settings.
        group: the group.
        files: the file system.
        log_type: what to open.

    Raises:
        CorruptRecordError: it is damaged, or marked suspect.
        StorageError: it is foreign or in use.
    """
    files = files or OsFiles()
    path = config.store_path(group)
    why = verification_reason(files, Layout(path))
    if why is not None:
        raise CorruptRecordError(
            f"the store is suspect, a write failed ({why})", str(path), "it is verified and repaired from its peers"
        )
    log = log_type.open(path, group=group, node_id=config.self_id, config=config.storage, files=files)
    try:
        log.check_recent()
    except BaseException:
        log.close()
        raise
    return log


class QuarantinedStores:
    """The groups of a node whose stores are not fit to be opened; each is repaired, then opened, beside the others.

    Args:
        config: the node's settings.
        host: gets group and log once the log is sound.
        on_failed: gets the error of a store that cannot be repaired at all.
        environment: time, threads and connections; by default those of the running event loop.
        files: the file system.
        log_type: what is opened in the end.
    """

    def __init__(
        self,
        config: ServerConfig,
        host: Callable[[str, CommitLog], None],
        on_failed: Callable[[BaseException], None],
        environment: RepairEnvironment | None = None,
        files: Files | None = None,
        log_type: type[CommitLog] = CommitLog,
    ) -> None:
        self._config = config
        self._host = host
        self._on_failed = on_failed
        self._environment = environment or EventLoopRepairs()
        self._files = files or OsFiles()
        self._log_type = log_type
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._told = 0.0

    def __contains__(self, group: str) -> bool:
        return group in self._tasks

    def refuse(self, group: str) -> None:
        """Raises what is answered for a group that is being repaired."""
        if group in self._tasks:
            raise UnreachableError(
                f"the store of group {group} on {self._config.self_id} is suspect", "", "ask another node"
            )

    def take(self, group: str, error: CorruptRecordError) -> bool:
        """Begins to repair a store because of ``error``; returns False where no peer could help."""
        if not self.can_help(group, error):
            return False
        _LOG.error("group %s takes no part and has no vote until its store is repaired: %s", group, error)
        self._tasks[group] = asyncio.create_task(self._repair(group, error), name=f"repair-{group}")
        return True

    def can_help(self, group: str, error: CorruptRecordError) -> bool:
        """Whether a repair may mend what ``error`` tells."""
        path = self._config.store_path(group)
        in_data = Path(error.where).parent == path / "data"
        suspect = verification_reason(self._files, Layout(path)) is not None
        return suspect or (in_data and len(self._config.peers) > 1)

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _repair(self, group: str, error: CorruptRecordError) -> None:
        try:
            log = await self.repaired(group, error)
            del self._tasks[group]
            self._host(group, log)
        except Exception as failure:  # noqa: BLE001 - whatever it is, the node must not go on without the group
            _LOG.critical("group %s cannot be repaired: %s", group, failure)
            self._on_failed(failure)

    async def repaired(self, group: str, error: CorruptRecordError) -> CommitLog:
        """Returns the log of a store that ``error`` tells of, opened after its repair.

        Raises:
            CorruptRecordError: no peer could help, and none is asked again.
            DiskFailedError: the disk does not take what is written.
        """
        config, environment, files = self._config, self._environment, self._files

        async def again(remaining: Sequence[Damage], failures: Mapping[str, str]) -> bool:
            if len(config.peers) == 1:
                return False
            self._tell(group, remaining, failures)
            await environment.sleep(RETRY_S)
            return True

        path, node_id = config.store_path(group), config.self_id
        store = await environment.beside(
            partial(StoreRepair.open, path, group=group, node_id=node_id, files=files, config=config.storage)
        )
        try:
            report = await repair_store(store, config.peers, group, again, environment)
        finally:
            store.close()
        if report.remaining:
            raise error
        for damage in report.found:
            _LOG.warning("group %s: entries [%d, %d) are repaired", group, damage.start, damage.end)
        log = await environment.beside(partial(open_sound, config, group, files, self._log_type))
        _LOG.info("group %s: the store is verified", group)
        return log

    def _tell(self, group: str, remaining: Sequence[Damage], failures: Mapping[str, str]) -> None:
        now = self._environment.now()
        if now - self._told >= TOLD_S or not self._told:
            self._told = now
            first = remaining[0]
            reasons = "; ".join(f"{node}: {why}" for node, why in failures.items())
            _LOG.error(
                "group %s: no intact copy of entries [%d, %d) so far (%s)", group, first.start, first.end, reasons
            )

"""Periodic rounds over a node's stores: check the free disk space, and trim logs by their retention.

A leader whose disk is nearly full hands leadership over, because the other nodes may still have space.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from functools import partial
from typing import Any

from dledger_core.config import LIMITS, Limits
from dledger_core.errors import DLedgerError
from dledger_core.ids import Index, NodeId, Position
from dledger_core.server.maintenance.archive_guard import ArchiveGuard
from dledger_core.server.maintenance.retention import RetentionPolicy, plan
from dledger_core.server.replica.replica import Replica
from dledger_core.storage.files.file_system import DiskSpace
from dledger_core.storage.read.log_queries import SegmentSummary

_LOG = logging.getLogger(__name__)


class DiskRounds:
    """Periodic rounds over a node's stores: checks of free disk space, and retention. One round of each kind at a time.

    Args:
        policy: rules of retention.
        replicas: returns the node's replicas.
        executor: threads that read.
        is_connected: whether the node has a connection to another one.
        limits: the node's limits.
    """

    def __init__(
        self,
        policy: RetentionPolicy,
        replicas: Callable[[], Sequence[Replica]],
        executor: Executor,
        is_connected: Callable[[NodeId], bool],
        limits: Limits = LIMITS,
    ) -> None:
        self._policy = policy
        self._replicas = replicas
        self._executor = executor
        self._is_connected = is_connected
        self._limits = limits
        self._handed_over: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._recorded: dict[str, dict[Index, int]] = {}
        self._archives: dict[str, ArchiveGuard] = {}

    def start_space_check(self) -> None:
        """Start a check of free disk space."""
        self._start("disk space", self.check_space())

    def start_retention(self) -> None:
        """Start a round of retention."""
        if self._policy.enabled:
            self._start("retention", self.retain())

    async def close(self) -> None:
        """Cancel rounds in progress."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _start(self, name: str, work: Coroutine[Any, Any, None]) -> None:
        before = self._tasks.get(name)
        if before is not None and not before.done():
            work.close()
            return

        async def guarded() -> None:
            try:
                await work
            except (DLedgerError, OSError) as error:
                _LOG.warning("maintenance failed: round=%s error=%s", name, error)

        self._tasks[name] = asyncio.create_task(guarded(), name=name)

    async def check_space(self) -> None:
        """Check the free disk space of each log once."""
        replicas = self._replicas()
        guards = [replica.space for replica in replicas]
        archives = [self.archive(replica) for replica in replicas]

        def space() -> list[tuple[Position, DiskSpace]]:
            for archive in archives:
                archive.measure()
            return [replica.log.space() for replica in replicas]

        found = await asyncio.get_running_loop().run_in_executor(self._executor, space)
        for guard, (position, disk) in zip(guards, found, strict=True):
            guard.observe(position, disk, guards)
        for replica in replicas:
            if replica.is_leader and replica.space.is_full:
                self._hand_over(replica)

    def _hand_over(self, replica: Replica) -> None:
        """Offer leadership to the other voters; again only after a while, because an offer holds up control entries."""
        now = asyncio.get_running_loop().time()
        if now - self._handed_over.get(replica.group, float("-inf")) >= self._limits.disk_full_hand_over_s:
            self._handed_over[replica.group] = now
            _LOG.warning("handing leadership over, disk nearly full: group=%s", replica.group)
            work = replica.leadership.hand_over(self._limits.transfer_s, self._is_connected)
            self._start(f"hand over {replica.group}", work)

    async def retain(self) -> None:
        """Trim each log once, one after another: each sees the space that the previous one freed."""
        for replica in self._replicas():
            await self._retain(replica)

    def archive(self, replica: Replica) -> ArchiveGuard:
        """Return the guard of a replica's archive."""
        found = self._archives.get(replica.group)
        if found is None or found.replica is not replica:  # a repair or a recovery opened the store again
            found = self._archives[replica.group] = ArchiveGuard(replica, int(self._limits.log_time_s * 1000))
        return found

    async def _deletable_end(self, replica: Replica, segments: Sequence[SegmentSummary]) -> int:
        """Return up to where the archive allows to delete, as far as this round could; 0 without an archive."""
        if not replica.tables.archive.is_active:
            return 0
        last = segments[min(len(segments) - 1, self._limits.retention_segments)].first_index
        compare = partial(self.archive(replica).deletable_end, segments[0].first_index, last)
        return await asyncio.get_running_loop().run_in_executor(self._executor, compare)

    async def _retain(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        segments = await loop.run_in_executor(self._executor, replica.log.segment_summaries)
        if len(segments) < 2:
            return
        _, space = await loop.run_in_executor(self._executor, replica.log.space)
        expired = await self._expired(replica, segments)
        deletable = await self._deletable_end(replica, segments)
        keep_from = min(replica.readable_end - 1, replica.visible_end)
        # Asked for now, after the last wait: an archive may have begun meanwhile, or ended.
        if (archived := replica.store.archived_end) is not None:
            keep_from = min(keep_from, archived, deletable)
        index = plan(
            self._policy,
            segments,
            keep_from=keep_from,
            pins=replica.pins.starts(replica.pin_time_ms),
            expired=expired,
            hour=time.localtime().tm_hour,
            space=space,
            segments_max=self._limits.retention_segments,
        )
        start = segments[0].first_index
        if index > start:
            _LOG.info("trimming log: group=%s start=%d end=%d", replica.group, start, index)
            replica.store.trim(index)

    async def _expired(self, replica: Replica, segments: Sequence[SegmentSummary]) -> int:
        """Return how many of the oldest data files are older than the age limit.

        A file is as old as the first log time recorded after it: it may be older, so none is deleted too early. Log
        times are remembered, because a search may read the index of ten minutes of appends.
        """
        known, found, expired = self._recorded.get(replica.group, {}), dict[Index, int](), 0
        if self._policy.reserved_ms is not None:
            before_ms = replica.log_time.now_ms - self._policy.reserved_ms
            for start in [segment.first_index for segment in segments[1 : self._limits.retention_segments + 1]]:
                recorded_ms = known.get(start)
                if recorded_ms is None and start <= replica.tables.applied_index:
                    search = partial(replica.log.first_log_time, start, replica.readable_end)
                    recorded_ms = await asyncio.get_running_loop().run_in_executor(self._executor, search)
                if recorded_ms is None:
                    break
                found[start] = recorded_ms
                if recorded_ms >= before_ms:
                    break
                expired += 1
        self._recorded[replica.group] = found
        return expired

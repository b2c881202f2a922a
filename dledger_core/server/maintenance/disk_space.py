"""Disk space: reject appends while the disk is nearly full, and trim logs by their retention.

Bytes that are staged count as written, so that a fast leader does not use up the reserve between two looks at the disk.
Control entries (a leader's no-op, the end of a transaction) may use the reserve. A follower whose disk is nearly full
sends no response to an AppendEntries that it cannot accept: the leader continues with the others, and probes without
sending the entries again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import TYPE_CHECKING, Any, Final

from dledger_core.config import LIMITS, Limits
from dledger_core.errors import DiskFullError, DLedgerError
from dledger_core.ids import Position
from dledger_core.raft import AppendEntries, Message, RawNode
from dledger_core.server.maintenance.retention import RetentionPolicy, plan
from dledger_core.storage import CommitLog
from dledger_core.storage.files.file_system import DiskSpace

if TYPE_CHECKING:
    from dledger_core.server.replica.replica import Replica

_LOG = logging.getLogger(__name__)

_NEAR: Final = 16
"""While free space is above this many reserves, staged bytes of the node's other logs are not counted."""


class SpaceGuard:
    """Disk-full guard of one log; lives on the event loop.

    Args:
        group: its name, for messages.
        log: the log.
        reserve_bytes: free space below which appends are rejected; 0 = never.
        limits: the node's limits.
    """

    def __init__(self, group: str, log: CommitLog, reserve_bytes: int, limits: Limits = LIMITS) -> None:
        self._group = group
        self._log = log
        self._reserve_bytes = reserve_bytes
        self._limits = limits
        self._neighbours: Sequence[SpaceGuard] = ()
        self._seen = log.space()  # a small disk may be full before the first look
        self._full = False

    @property
    def is_full(self) -> bool:
        """Whether appends are rejected; checks the free space first."""
        if not self._full and (free := self._free_bytes()) < self._reserve_bytes:
            self._full = True
            _LOG.warning("disk nearly full, rejecting appends: group=%s free_bytes=%d", self._group, free)
        return self._full

    def observe(self, position: Position, space: DiskSpace, neighbours: Sequence[SpaceGuard] = ()) -> None:
        """Record the result of ``CommitLog.space``, and the guards of all logs on the disk, this one included."""
        self._seen = position, space
        self._neighbours = neighbours
        # An eighth more than the reserve must be free again: otherwise each freed block would admit one append.
        if self._full and self._free_bytes() >= self._reserve_bytes + self._reserve_bytes // 8:
            self._full = False
            _LOG.warning("disk space free again, accepting appends: group=%s", self._group)

    def check(self) -> None:
        """Raise DiskFullError if an append would use the reserve."""
        if self.is_full:
            retry_ms = self._limits.disk_full_retry_ms
            raise DiskFullError(
                "the disk is nearly full",
                str(self._log.directory),
                f"free disk space or set a retention; retry after {retry_ms} ms",
                {"group": self._group, "free_bytes": self._free_bytes(), "retry_after_ms": retry_ms},
            )

    def admits(self, message: Message, raft: RawNode) -> bool:
        """Whether a follower may accept a message; a rejected one counts as lost.

        A probe about entries that were rejected gets no response either: otherwise the leader would send them again.
        """
        if not isinstance(message, AppendEntries) or not self.is_full:
            return True
        free, nbytes = self._free_bytes(), sum(batch.nbytes for batch in message.batches)
        if free >= self._reserve_bytes // 2:
            return True
        if nbytes:
            return nbytes <= self._limits.small_message_bytes and free - nbytes >= self._reserve_bytes // 8
        return message.prev_index <= raft.last_index

    def _free_bytes(self) -> int:
        """Free bytes once everything staged is written."""
        free = self._seen[1].free_bytes
        left = free - self._unwritten_bytes()
        if self._neighbours and left < _NEAR * self._reserve_bytes:
            left = free - sum(guard._unwritten_bytes() for guard in self._neighbours)
        return left

    def _unwritten_bytes(self) -> int:
        """Bytes that were staged since the last look, or were not written then."""
        nbytes = max(0, self._log.staged_end - self._seen[0])
        return nbytes + nbytes * 2 // 3  # worst case: empty bodies, where the index adds two thirds


class DiskRounds:
    """Periodic rounds over a node's stores: the look at free space, and retention. One round of each kind at a time.

    Args:
        policy: rules of retention.
        replicas: returns the node's replicas.
        executor: threads that read.
        limits: the node's limits.
    """

    def __init__(
        self,
        policy: RetentionPolicy,
        replicas: Callable[[], Sequence[Replica]],
        executor: Executor,
        limits: Limits = LIMITS,
    ) -> None:
        self._policy = policy
        self._replicas = replicas
        self._executor = executor
        self._limits = limits
        self._tasks: dict[str, asyncio.Task[None]] = {}

    def start_look(self) -> None:
        """Start a look at free disk space."""
        self._start("disk space", self.look())

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

    async def look(self) -> None:
        """Look at the free space of each log once."""
        replicas = self._replicas()
        guards = [replica.space for replica in replicas]

        def space() -> list[tuple[Position, DiskSpace]]:
            return [replica.log.space() for replica in replicas]

        found = await asyncio.get_running_loop().run_in_executor(self._executor, space)
        for guard, (position, disk) in zip(guards, found, strict=True):
            guard.observe(position, disk, guards)

    async def retain(self) -> None:
        """Trim each log once, one after another: each sees the space that the previous one freed."""
        for replica in self._replicas():
            await self._retain(replica)

    async def _retain(self, replica: Replica) -> None:
        loop = asyncio.get_running_loop()
        segments = await loop.run_in_executor(self._executor, replica.log.segment_summaries)
        if len(segments) < 2:
            return
        _, space = await loop.run_in_executor(self._executor, replica.log.space)
        now = time.time()
        index = plan(
            self._policy,
            segments,
            keep_from=min(replica.readable_end - 1, replica.visible_end),
            pins=replica.pins.starts(int(now * 1000)),
            now_ms=int(now * 1000),
            hour=time.localtime(now).tm_hour,
            space=space,
            segments_max=self._limits.retention_segments,
        )
        start = segments[0].first_index
        if index > start:
            _LOG.info("trimming log: group=%s start=%d end=%d", replica.group, start, index)
            replica.trim(index)

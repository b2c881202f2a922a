"""What a node does for its stores now and then: looks how much room there is, and deletes what retention lets go."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Executor
from typing import Any, Final

from dledger_core.errors import DLedgerError
from dledger_core.ids import Position
from dledger_core.server.maintenance.retention import RetentionPolicy, plan
from dledger_core.server.replica.replica import Replica
from dledger_core.storage.files.file_system import DiskSpace

__all__ = ["RETENTION_S", "SPACE_S", "Maintenance"]

_LOG = logging.getLogger(__name__)

SPACE_S: Final = 1.0
RETENTION_S: Final = 10.0


class Maintenance:
    """Works in tasks of the event loop, with the disk's part in ``executor``; one round of each kind at a time.

    Args:
        policy: what may be deleted.
        replicas: returns the node's replicas.
        executor: for reads.
    """

    def __init__(self, policy: RetentionPolicy, replicas: Callable[[], Sequence[Replica]], executor: Executor) -> None:
        self._policy = policy
        self._replicas = replicas
        self._executor = executor
        self._rounds: dict[str, asyncio.Task[None]] = {}

    def look(self) -> None:
        """Begins to look how much room there is."""
        self._begin("room on the disk", self.look_round())

    def retain(self) -> None:
        """Begins to delete what may go."""
        if self._policy.enabled:
            self._begin("retention", self.retain_round())

    async def close(self) -> None:
        """Ends what is under way."""
        for task in self._rounds.values():
            task.cancel()
        await asyncio.gather(*self._rounds.values(), return_exceptions=True)

    def _begin(self, what: str, work: Coroutine[Any, Any, None]) -> None:
        before = self._rounds.get(what)
        if before is not None and not before.done():
            work.close()
            return

        async def guarded() -> None:
            try:
                await work
            except (DLedgerError, OSError) as error:
                _LOG.warning("%s: %s", what, error)

        self._rounds[what] = asyncio.create_task(guarded(), name=what)

    async def look_round(self) -> None:
        """Looks once, for each group."""
        replicas = self._replicas()
        guards = [replica.space for replica in replicas]

        def look() -> list[tuple[Position, DiskSpace]]:
            return [replica.log.space() for replica in replicas]

        found = await asyncio.get_running_loop().run_in_executor(self._executor, look)
        for guard, (position, space) in zip(guards, found, strict=True):
            guard.observe(position, space, guards)

    async def retain_round(self) -> None:
        """Deletes once what may go, group by group: each looks at the room that the one before left."""
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
        )
        if index > segments[0].first_index:
            _LOG.info("group %s: deleting entries %d to %d", replica.group, segments[0].first_index, index - 1)
            replica.trim(index)

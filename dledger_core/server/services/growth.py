"""Requests that wait for entries of a log: each is woken when its entry is readable, and not at every commit.

Thousands of requests may wait for entries far ahead of the end of a log, by mistake or on purpose. To wake all of them
at each commit would cost the event loop milliseconds.
"""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections.abc import Mapping
from typing import Final

from dledger_core.net.messages import Isolation
from dledger_core.server.replica.change_signal import wait_woken, wake
from dledger_core.server.replica.replica import Replica

_DEAD_ROWS_MAX: Final = 64
"""Rows of requests that no longer wait, above which as many as those that do are removed at once."""
_Row = tuple[int, int, asyncio.Future[None]]


class GrowthWatch:
    """The requests that wait for entries of one replica; lives on the node's event loop.

    A change of role wakes all of them, because without a leader no entry arrives.
    """

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._numbers = itertools.count()
        self._waiting: set[asyncio.Future[None]] = set()
        self._committed: list[_Row] = []  # heaps by the end that a request waits for
        self._uncommitted: list[_Row] = []
        self._role = replica.soft_state
        self._change: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def replica(self) -> Replica:
        """The replica."""
        return self._replica

    def end(self, isolation: Isolation) -> int:
        """Return the end of the entries that a request may read now."""
        return self._replica.visible_end if isolation == "committed" else self._replica.readable_end

    def add(self, waiter: asyncio.Future[None], end: int, isolation: Isolation) -> None:
        """Complete ``waiter`` once entries are readable beyond ``end``, or the role changes."""
        self._waiting.add(waiter)
        heapq.heappush(self._heap(isolation), (end, next(self._numbers), waiter))
        self._listen()

    def discard(self, waiter: asyncio.Future[None]) -> None:
        """Remove ``waiter``, whether it was added or not."""
        self._waiting.discard(waiter)
        if len(self._committed) + len(self._uncommitted) > 2 * len(self._waiting) + _DEAD_ROWS_MAX:
            for heap in (self._committed, self._uncommitted):
                heap[:] = [row for row in heap if row[2] in self._waiting]
                heapq.heapify(heap)

    def _heap(self, isolation: Isolation) -> list[_Row]:
        return self._committed if isolation == "committed" else self._uncommitted

    def _listen(self) -> None:
        if self._change is None:
            self._change = asyncio.get_running_loop().create_future()
            self._change.add_done_callback(self._changed)
            self._replica.changes.add(self._change)

    def _changed(self, change: asyncio.Future[None]) -> None:
        del change
        self._change = None
        if self._replica.soft_state is not self._role:
            self._role = self._replica.soft_state
            for waiter in self._waiting:
                wake(waiter)
            self._waiting.clear()
        for heap, end in ((self._committed, self.end("committed")), (self._uncommitted, self.end("uncommitted"))):
            while heap and heap[0][0] < end:
                waiter = heapq.heappop(heap)[2]
                self._waiting.discard(waiter)
                wake(waiter)
        if self._waiting:
            self._listen()


class _Awaited:
    """The ends that one request has seen of replicas."""

    __slots__ = ("_isolation", "_seen")

    def __init__(self, seen: Mapping[GrowthWatch, int], isolation: Isolation) -> None:
        self._seen = seen
        self._isolation = isolation

    def add(self, waiter: asyncio.Future[None]) -> None:
        """See ``WakesWaiters``."""
        for watch, end in self._seen.items():
            watch.add(waiter, end, self._isolation)

    def discard(self, waiter: asyncio.Future[None]) -> None:
        """See ``WakesWaiters``."""
        for watch in self._seen:
            watch.discard(waiter)


async def wait_grown(seen: Mapping[GrowthWatch, int], isolation: Isolation, timeout_s: float) -> None:
    """Wait until a replica has entries beyond the end that was seen of it, a role changes, or the timeout expires."""
    await wait_woken(timeout_s, _Awaited(seen, isolation))

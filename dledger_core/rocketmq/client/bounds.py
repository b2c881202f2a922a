"""What can be read of a Java group now: looks for the log's ends, waits for the safety lag, or appends probes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from dledger_core.client.results import LogBounds
from dledger_core.errors import IndexOutOfRangeError, NoLeaderError
from dledger_core.record import MAGIC_DATA
from dledger_core.rocketmq.client.ends import EndObservation, SafeEndTracker, first_index, last_end
from dledger_core.rocketmq.client.nodes import JavaNodes
from dledger_core.rocketmq.client.options import JavaOptions
from dledger_core.rocketmq.client.reading import Get, is_probe
from dledger_core.rocketmq.remoting.codes import ResponseCode
from dledger_core.rocketmq.remoting.responses import AppendReply

__all__ = ["JavaBounds", "Look"]

LOOK_S: Final = 0.5
"""Looks are this far apart: Java logs a stack trace for each request behind the log's end."""
FIRST_S: Final = 10.0
"""How often the log's first index is looked at again."""
_PROBES_SKIPPED_MAX: Final = 16


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the log found.

    Attributes:
        leader_id: who led.
        first_index: first stored index.
        end: index behind the last stored entry, committed or not.
        term: term of that entry, -1 without one.
        safe_end: everything before it may be served; -1 = not known yet.
        commit_index: highest index a majority is known to hold, -1 without a probe.
    """

    leader_id: str
    first_index: int
    end: int
    term: int
    safe_end: int
    commit_index: int


class JavaBounds:
    """Keeps what one client knows of the ends of its log. Belongs to one event loop.

    Args:
        nodes: the group.
        get: reads one entry.
        append_probe: appends a probe entry.
        options: the safety lag, or that probes are appended.
    """

    def __init__(
        self, nodes: JavaNodes, get: Get, append_probe: Callable[[], Awaitable[AppendReply]], options: JavaOptions
    ) -> None:
        self._nodes = nodes
        self._get = get
        self._append_probe = append_probe
        self._options = options
        self._watch = SafeEndTracker(options.safety_lag_ms / 1000)
        self._lock = asyncio.Lock()
        self._end = 0
        self._first = 0
        self._first_at = float("-inf")
        self._probed_end = -1
        self._commit_index = -1
        self._last: tuple[float, Look] | None = None

    async def look(self, timeout_s: float) -> Look:
        """Looks at the log, unless that was done a moment ago; appends a probe if that is asked for.

        Raises:
            DLedgerError: no leader serves.
        """
        loop = asyncio.get_running_loop()
        async with self._lock:
            if self._last is None or loop.time() - self._last[0] >= LOOK_S:
                try:
                    look = await asyncio.wait_for(self._look(loop), 2 * timeout_s)
                except TimeoutError:
                    raise NoLeaderError("the log's end was not found in time", f"group {self._nodes.group}") from None
                self._last = loop.time(), look
            return self._last[1]

    @property
    def known(self) -> LogBounds | None:
        """What the last look found to be readable, None before."""
        if self._last is None or self._last[1].safe_end < 0:
            return None
        look = self._last[1]
        return LogBounds(min(look.first_index, look.safe_end), look.safe_end, look.commit_index)

    def forget(self) -> None:
        """Makes the next look a new one."""
        self._last = None

    async def _look(self, loop: asyncio.AbstractEventLoop) -> Look:
        while True:
            leader = await self._nodes.leader()
            end, term = await last_end(self._term_at, self._end, self._first)
            if loop.time() - self._first_at >= FIRST_S:
                self._first = await first_index(self._is_gone, min(self._first, end), end)
                self._first_at = loop.time()
            if leader == self._nodes.leader_id:
                break
        self._end = end
        self._watch.saw(leader, EndObservation(loop.time(), end, term))
        if self._options.commit_probe:
            await self._probe(end)
        elif (due := self._watch.due(loop.time())) is not None:
            self._watch.confirm(due, await self._term_at(due.end - 1) if due.end else -1)
        return Look(leader, self._first, self._end, term, self._watch.safe_end, self._commit_index)

    async def _term_at(self, index: int) -> int | None:
        """Returns the term of an entry; -1 of one that retention has deleted, None behind the log's end."""
        try:
            return (await self._get(index)).term
        except IndexOutOfRangeError as error:
            return -1 if _is_gone(error) else None

    async def _is_gone(self, index: int) -> bool:
        try:
            await self._get(index)
        except IndexOutOfRangeError as error:
            return _is_gone(error)
        return False

    async def _probe(self, end: int) -> None:
        """Appends a probe if there are new entries to serve; those of other readers' probes are none."""
        if self._commit_index >= 0 and await self._only_probes(self._probed_end, end):
            return
        reply = await self._append_probe()
        self._commit_index = max(self._commit_index, reply.index)
        self._watch.proved(reply.index)
        self._probed_end = self._end = reply.index + 1

    async def _only_probes(self, start: int, end: int) -> bool:
        if end - start > _PROBES_SKIPPED_MAX:
            return False
        for index in range(start, end):
            entry = await self._get(index)
            if entry.magic == MAGIC_DATA and not is_probe(entry.body):
                return False
        return True

    async def current(self, timeout_s: float) -> LogBounds:
        """Looks until a safe end is known; afterwards once.

        Raises:
            NoLeaderError: leaders change so often that no end gets old enough.
        """
        loop = asyncio.get_running_loop()
        deadline = loop.time() + 3 * self._options.safety_lag_ms / 1000 + timeout_s
        while True:
            await self.look(timeout_s)
            if (found := self.known) is not None:
                return found
            if loop.time() >= deadline:
                remedy = "wait until it has one leader, or shorten the safety lag"
                raise NoLeaderError("no end of the log was safe in time", f"group {self._nodes.group}", remedy)
            await self._pause(deadline)

    async def wait_beyond(self, start: int, seconds: float, timeout_s: float) -> LogBounds:
        """Looks until the safe end is behind ``start``, for so long at most."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            bounds = await self.current(timeout_s)
            if bounds.end > start or loop.time() >= deadline:
                return bounds
            await self._pause(deadline)

    @staticmethod
    async def _pause(deadline: float) -> None:
        """Waits for the time of the next look."""
        await asyncio.sleep(max(0.0, min(LOOK_S, deadline - asyncio.get_running_loop().time())))


def _is_gone(error: IndexOutOfRangeError) -> bool:
    return error.values.get("code") == ResponseCode.INDEX_LESS_THAN_LOCAL_BEGIN

"""Role changes of a group as its nodes tell them: one open question per node, the newest state of each kept."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from typing import Any, Final

from dledger_core.client.results import RoleChange
from dledger_core.client.routing.channel import ChannelPool
from dledger_core.errors import DLedgerError, ProtocolError
from dledger_core.net.codec import int_field, str_field
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type

__all__ = ["RoleWatch"]

WAIT_S: Final = 2.0
"""How long a node may have nothing to tell; a frozen one is noticed after this and ``ANSWER_S``."""
ANSWER_S: Final = 1.0
RETRY_S: Final = 0.1


class RoleWatch:
    """Follows the roles of a group's nodes. Belongs to one event loop.

    Args:
        pool: connections to the nodes.
        group: the group.
        check_usable: raises once the client may not be used any more.
    """

    def __init__(self, pool: ChannelPool, group: str, check_usable: Callable[[], None]) -> None:
        self._pool = pool
        self._group = group
        self._check_usable = check_usable
        self._news: dict[str, RoleChange] = {}
        self._woken = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begins to ask."""
        for node_id in self._pool.peers:
            task = asyncio.create_task(self._follow(node_id), name=f"watch-{node_id}")
            task.add_done_callback(lambda _: self._woken.set())
            self._tasks.append(task)

    async def stop(self) -> None:
        """Asks nobody any more; who iterates over ``changes`` is cancelled."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def changes(self) -> AsyncGenerator[RoleChange, None]:
        """Yields what each node is, then every change, for ever; who is slow gets the newest state of each node."""
        while True:
            await self._woken.wait()
            self._woken.clear()
            while self._news:
                yield self._news.pop(next(iter(self._news)))
            for task in self._tasks:
                if task.done():
                    task.result()

    async def _follow(self, node_id: str) -> None:
        last: RoleChange | None = None
        while True:
            self._check_usable()
            try:
                change = await self._ask(node_id, last)
            except DLedgerError as error:
                change = RoleChange(node_id, "unreachable", reason=str(error))
            if change != last:
                last = self._news[node_id] = change
                self._woken.set()
            if change.role == "unreachable":
                await asyncio.sleep(RETRY_S)

    async def _ask(self, node_id: str, last: RoleChange | None) -> RoleChange:
        known = last is not None and last.role != "unreachable"
        seen = [last.role, last.leader_id, last.term] if last is not None and known else None
        request: dict[str, Any] = {"t": Type.WATCH, "g": self._group, "wait": int(WAIT_S * 1000), "seen": seen}
        channel = await self._pool.channel(node_id, ANSWER_S)
        return _change_of(node_id, await channel.request(request, timeout_s=WAIT_S + ANSWER_S))


def _change_of(node_id: str, frame: Frame) -> RoleChange:
    header = frame.header
    leader_id = str_field(header, "leader") if header.get("leader") is not None else None
    broker_role = str_field(header, "broker")
    if broker_role not in ("master", "slave"):
        raise ProtocolError("field 'broker' is malformed", "header")
    return RoleChange(node_id, str_field(header, "role"), broker_role, int_field(header, "term"), leader_id)

"""Nodes of a group in memory, behind the interfaces that a remoting session asks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, TypeVar

from dledger_core.errors import IndexOutOfRangeError, NotLeaderError
from dledger_core.net.hello import Hello
from dledger_core.net.listening import Server, serve
from dledger_core.rocketmq.remoting.messages import WireEntry
from dledger_core.rocketmq.remoting.port import Appended, GroupState, RemotingConnection, RemotingLimits

_Result = TypeVar("_Result")
NAME = "g-1"
HELLO = Hello(role="peer", node_id="n0")


class FakeGroup:
    """A group whose nodes share one list of entries; ``first`` says from where on they are kept."""

    def __init__(self, peers: dict[str, str], leader_id: str | None = "n0") -> None:
        self.peers = peers
        self.leader_id = leader_id
        self.term = 3
        self.first = 0
        self.entries: list[WireEntry] = []
        self.raises: list[Exception] = []
        self.gate: asyncio.Event | None = None
        self.at_gate = 0
        self.gets = 0

    def write(self, body: bytes, magic: int = 1) -> WireEntry:
        position = self.entries[-1].position + 48 + len(self.entries[-1].body) if self.entries else 0
        self.entries.append(WireEntry(len(self.entries), self.term, magic, position, body))
        return self.entries[-1]


class FakeService:
    """One node's view of the group."""

    def __init__(self, group: FakeGroup, node_id: str) -> None:
        self._group, self._node_id = group, node_id

    async def _lead(self) -> None:
        if self._group.gate is not None:
            self._group.at_gate += 1
            await self._group.gate.wait()
        if self._group.raises:
            raise self._group.raises.pop(0)
        if self._group.leader_id != self._node_id:
            raise NotLeaderError("x", "", "", {"leader_id": self._group.leader_id})

    async def state(self) -> GroupState:
        return GroupState(self._group.leader_id, self._group.term, self._group.peers)

    async def append(self, bodies: Sequence[bytes]) -> Appended:
        await self._lead()
        written = [self._group.write(body) for body in bodies][-1]
        return Appended(written.index, written.position, written.term)

    async def get(self, index: int) -> WireEntry:
        await self._lead()
        self._group.gets += 1
        first, entries = self._group.first, self._group.entries
        if not first <= index < len(entries):
            values = {"index": index, "first_index": first, "last_index": len(entries) - 1}
            raise IndexOutOfRangeError("x", "", "", values)
        return entries[index]

    async def transfer(self, node_id: str) -> None:
        await self._lead()
        self._group.leader_id = node_id
        self._group.term += 1


class FakeNode:
    """A node of the one group ``name``."""

    def __init__(self, node_id: str, group: FakeGroup, name: str = "g-1") -> None:
        self.node_id = node_id
        self._name, self._service = name, FakeService(group, node_id)
        self.large = 0

    async def run_blocking(self, work: Callable[[], _Result]) -> _Result:
        self.large += 1
        return work()

    def group(self, name: str) -> FakeService | None:
        return self._service if name == self._name else None


class Nothing:
    """A handler of our own protocol."""

    def on_frame(self, connection: Any, frame: Any) -> None:
        pass

    def on_close(self, connection: Any, error: Any) -> None:
        pass


class RunningGroup:
    """Three nodes with a port each; an async context manager."""

    def __init__(self, **limits: float) -> None:
        self.limits = RemotingLimits(**limits)  # type: ignore[arg-type]
        self.group = FakeGroup({})
        self.servers: dict[str, Server] = {}

    @property
    def peers(self) -> str:
        return ";".join(f"{node}-{address}" for node, address in self.group.peers.items())

    async def __aenter__(self) -> RunningGroup:
        for node_id in ("n0", "n1", "n2"):
            node = FakeNode(node_id, self.group, NAME)
            server = await serve(
                "127.0.0.1",
                0,
                accept=lambda _: HELLO,
                handler_for=lambda _: Nothing(),
                foreign=lambda node=node: RemotingConnection(node, self.limits),  # type: ignore[misc]
            )
            self.servers[node_id] = server
            self.group.peers[node_id] = f"127.0.0.1:{server.port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        for server in self.servers.values():
            await server.close()

    @contextlib.asynccontextmanager
    async def raw(self, node: str = "n0") -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.servers[node].port)
        try:
            yield reader, writer
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()

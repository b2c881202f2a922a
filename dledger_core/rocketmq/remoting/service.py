"""Requests of Java's clients to a node: append, get, metadata, transfer, on the port of the native protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from dledger_core.ids import NodeId
from dledger_core.record import to_arrow
from dledger_core.rocketmq.remoting.connection import RemotingConnection
from dledger_core.rocketmq.remoting.responses import WireEntry
from dledger_core.rocketmq.remoting.session import Appended, GroupService, GroupState

if TYPE_CHECKING:
    from dledger_core.server import PortGroup, PortNode

__all__ = ["RemotingNode", "remoting_port"]

_Result = TypeVar("_Result")


def remoting_port(node: PortNode) -> Callable[[], RemotingConnection]:
    """Return the factory of a node's remoting connections; a ``ForeignPort`` of ``NodeServer``."""
    return RemotingNode(node).connection


class RemotingNode:
    """A node as a remoting session sees it; see ``NodeService``."""

    def __init__(self, node: PortNode) -> None:
        self.node_id = str(node.node_id)
        self._node = node
        self._large = asyncio.Lock()

    async def beside(self, work: Callable[[], _Result]) -> _Result:
        """See ``NodeService``."""
        async with self._large:
            return await asyncio.to_thread(work)

    def connection(self) -> RemotingConnection:
        """Return a protocol that serves one connection."""
        return RemotingConnection(self)

    def group(self, name: str) -> GroupService | None:
        """See ``NodeService``."""
        group = self._node.group(name)
        return None if group is None else _RemotingGroup(group, self._node.addresses)


class _RemotingGroup:
    """A group as a remoting session sees it; see ``GroupService``."""

    def __init__(self, group: PortGroup, peers: Mapping[str, str]) -> None:
        self._group, self._peers = group, peers

    async def state(self) -> GroupState:
        leader = self._group.leader_id
        return GroupState(None if leader is None else str(leader), self._group.term, self._peers)

    async def append(self, bodies: Sequence[bytes]) -> Appended:
        found = await self._group.append(bodies)
        return Appended(found.last_index, self._group.position_of(found.last_index), found.term)

    async def get(self, index: int) -> WireEntry:
        [row] = to_arrow(await self._group.read(index), magic=True).to_pylist()
        return WireEntry(row["index"], row["term"], row["magic"], row["position"], row["body"])

    async def transfer(self, node_id: str) -> None:
        await self._group.transfer_leadership(NodeId(node_id))

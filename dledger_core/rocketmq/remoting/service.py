"""What Java's clients may ask a node: append, get, metadata, transfer, on the port of our own protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeVar

from dledger_core.errors import DLedgerError, IndexOutOfRangeError, NoLeaderError
from dledger_core.ids import NodeId
from dledger_core.record import Columns, to_arrow
from dledger_core.rocketmq.remoting.connection import RemotingConnection
from dledger_core.rocketmq.remoting.responses import WireEntry
from dledger_core.rocketmq.remoting.session import Appended, GroupService, GroupState
from dledger_core.server.config import ServerConfig
from dledger_core.server.replica.transfer import transfer_leadership
from dledger_core.server.services.appends import Appended as Committed
from dledger_core.server.services.reads import ReadRequest
from dledger_core.server.services.request import HostedGroup

__all__ = ["RemotingNode"]

READABLE_S: Final = 5.0
_Result = TypeVar("_Result")


class RemotingNode:
    """This node as a remoting session asks it; see ``NodeService``.

    Args:
        config: the node's settings.
        hosted: its groups, as they are opened.
        is_started: whether all are.
    """

    def __init__(self, config: ServerConfig, hosted: Mapping[str, HostedGroup], is_started: Callable[[], bool]) -> None:
        self.node_id = str(config.self_id)
        self._config = config
        self._hosted = hosted
        self._is_started = is_started
        self._peers = {str(peer.node_id): peer.address for peer in config.peers}
        self._large = asyncio.Lock()

    async def beside(self, work: Callable[[], _Result]) -> _Result:
        """See ``NodeService``."""
        async with self._large:
            return await asyncio.to_thread(work)

    def connection(self) -> RemotingConnection:
        """Makes what serves a connection."""
        return RemotingConnection(self)

    def group(self, name: str) -> GroupService | None:
        """See ``NodeService``."""
        hosted = self._hosted.get(name)
        if hosted is not None and self._is_started():
            return _RemotingGroup(self._config, hosted, self._peers)
        return _ClosedGroup(self._peers) if name in self._config.groups else None


class _RemotingGroup:
    """A group with its services; see ``GroupService``."""

    def __init__(self, config: ServerConfig, hosted: HostedGroup, peers: Mapping[str, str]) -> None:
        self._config, self._hosted, self._peers = config, hosted, peers

    async def state(self) -> GroupState:
        status = self._hosted.replica.raft.status()
        leader = status.leader_id
        return GroupState(None if leader is None else str(leader), int(status.term), self._peers)

    def _lead(self) -> None:
        if not self._hosted.replica.is_leader:
            raise self._hosted.replica.not_leader()

    async def append(self, bodies: Sequence[bytes]) -> Appended:
        self._lead()
        done: asyncio.Future[Committed] = asyncio.get_running_loop().create_future()

        def reply(outcome: Committed | DLedgerError) -> None:
            if done.done():  # the client has gone
                return
            if isinstance(outcome, DLedgerError):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

        self._hosted.appends.append(Columns.from_bodies(list(bodies)), reply)
        found = await done
        await self._wait_readable(found.last_index)
        return Appended(found.last_index, self._position_of(found.last_index), found.term)

    async def _wait_readable(self, index: int) -> None:
        """Waits until an acknowledged entry is in this node's own files: a majority without it may be faster."""
        loop, replica = asyncio.get_running_loop(), self._hosted.replica
        deadline = loop.time() + READABLE_S
        while replica.readable_end <= index and replica.is_leader and (left := deadline - loop.time()) > 0:
            await replica.wait_progress(left)

    def _position_of(self, index: int) -> int:
        try:
            return int(self._hosted.replica.log.position_of(index))
        except IndexOutOfRangeError:
            return -1  # a majority holds it, and this node's own files not yet

    async def get(self, index: int) -> WireEntry:
        self._lead()
        reads = self._hosted.reads
        asked = ReadRequest(
            start=max(0, index),
            end=max(0, index) + 1,
            max_bytes=1,
            min_commit=-1,
            wait_ms=0,
            isolation="records",
            linearizable=False,
        )
        result = await reads.read(asked) if index >= 0 else None
        if result is None or result.records is None or not result.records.count:
            replica = self._hosted.replica
            values = {"index": index, "first_index": replica.log.first_index(), "last_index": replica.readable_end - 1}
            raise IndexOutOfRangeError(f"index {index} is not in the log", f"group {replica.group}", "", values)
        result.records.check(index)
        [row] = to_arrow(result.records, magic=True).to_pylist()
        return WireEntry(row["index"], row["term"], row["magic"], row["position"], row["body"])

    async def transfer(self, node_id: str) -> None:
        await transfer_leadership(self._hosted.replica, self._config, NodeId(node_id))


class _ClosedGroup:
    """A group whose store is being opened or repaired: nobody leads, as far as this node knows."""

    def __init__(self, peers: Mapping[str, str]) -> None:
        self._peers = peers

    async def state(self) -> GroupState:
        return GroupState(None, -1, self._peers)

    async def append(self, bodies: Sequence[bytes]) -> Appended:
        raise NoLeaderError("the store is being opened")

    async def get(self, index: int) -> WireEntry:
        raise NoLeaderError("the store is being opened")

    async def transfer(self, node_id: str) -> None:
        raise NoLeaderError("the store is being opened")

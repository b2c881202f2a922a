"""A node and its groups as a service for another protocol on the node's port sees them.

A composition root passes a ``ForeignPort`` to ``NodeServer``; this package does not know which protocol it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from dledger_core.config import Limits
from dledger_core.errors import DLedgerError, IndexOutOfRangeError, NoLeaderError
from dledger_core.ids import Index, NodeId
from dledger_core.net.messages import ReadRequest
from dledger_core.record import Columns, Records
from dledger_core.server.config import ServerConfig
from dledger_core.server.group import Group
from dledger_core.server.hosted import HostedGroup
from dledger_core.server.replica.members import Members
from dledger_core.server.services.appends import AppendedRange

READABLE_S: Final = 5.0
"""Limit on the wait until this node's own files contain an entry that is committed."""


class PortGroup:
    """One group of this node; its methods raise DLedgerError.

    Args:
        group: the group; unless it is hosted, this node knows no leader of it.
        is_started: whether the node serves clients.
        limits: the node's limits.
    """

    def __init__(self, group: Group, is_started: bool, limits: Limits) -> None:
        self._group = group
        self._hosted = group.hosted if is_started else None
        self._limits = limits

    @property
    def leader_id(self) -> NodeId | None:
        """The group's leader, None if this node knows none."""
        return None if self._hosted is None else self._hosted.replica.leader_node

    @property
    def term(self) -> int:
        """The group's term, -1 unless the group is hosted."""
        return -1 if self._hosted is None else int(self._hosted.replica.raft.status().term)

    def _leading(self) -> HostedGroup:
        if self._hosted is None:
            raise NoLeaderError(f"this node does not serve group {self._group.name} now", "", "ask another node")
        if not self._hosted.replica.is_leader:
            raise self._hosted.replica.not_leader()
        return self._hosted

    async def append(self, bodies: Sequence[bytes]) -> AppendedRange:
        """Append bodies as one batch; return once it is committed and readable here."""
        hosted = self._leading()
        done: asyncio.Future[AppendedRange] = asyncio.get_running_loop().create_future()

        def reply(outcome: AppendedRange | DLedgerError) -> None:
            if done.done():  # the client has disconnected
                return
            if isinstance(outcome, DLedgerError):
                done.set_exception(outcome)
            else:
                done.set_result(outcome)

        hosted.appends.append(Columns.from_bodies(list(bodies)), reply)
        appended = await done
        await self._wait_readable(hosted, appended.last_index)
        return appended

    async def _wait_readable(self, hosted: HostedGroup, index: int) -> None:
        """Wait until this node's own files contain a committed entry: two followers may be faster than the leader."""
        loop, replica = asyncio.get_running_loop(), hosted.replica
        deadline = loop.time() + READABLE_S
        while replica.readable_end <= index and replica.is_leader and (left := deadline - loop.time()) > 0:
            await replica.wait_change(left)

    def position_of(self, index: int) -> int:
        """Return the position of an entry, -1 while this node's own files do not contain it."""
        try:
            return int(self._leading().replica.log.position_of(Index(index)))
        except IndexOutOfRangeError:
            return -1

    async def read(self, index: int) -> Records:
        """Return one committed entry, checked against its CRC. Only the leader serves it.

        Raises:
            IndexOutOfRangeError: ``values`` contain index, first_index and last_index.
        """
        hosted = self._leading()
        if index >= 0:
            request = ReadRequest(
                start=index,
                end=index + 1,
                max_bytes=1,
                isolation="records",
            )
            records = (await hosted.reads.read(request)).records
            if records is not None and records.count:
                records.check(index)
                return records
        replica = hosted.replica
        values = {"index": index, "first_index": replica.log.first_index(), "last_index": replica.readable_end - 1}
        raise IndexOutOfRangeError(f"index {index} is not in the log", f"group {replica.group}", "", values)

    async def transfer_leadership(self, target: NodeId) -> None:
        """Transfer leadership; return when ``target`` leads."""
        self._leading()
        await self._group.transfer_leadership(target, self._limits.transfer_s)


class PortNode:
    """This node.

    Args:
        config: the node's settings.
        members: all nodes.
        groups: the groups that the node was started with, by name.
        is_started: whether the node serves clients.
    """

    def __init__(
        self, config: ServerConfig, members: Members, groups: Mapping[str, Group], is_started: Callable[[], bool]
    ) -> None:
        self._config = config
        self._members = members
        self._groups = groups
        self._is_started = is_started

    @property
    def node_id(self) -> NodeId:
        """This node's id."""
        return self._config.self_id

    @property
    def addresses(self) -> dict[str, str]:
        """The addresses of all nodes by id."""
        return {str(peer.node_id): peer.address for peer in self._members.peers}

    def group(self, name: str) -> PortGroup | None:
        """Return a group that this node was started with, None for any other."""
        group = self._groups.get(name)
        return None if group is None else PortGroup(group, self._is_started(), self._config.limits)


ForeignPort = Callable[[PortNode], Callable[[], asyncio.Protocol]]
"""Gets the node; returns the factory of its connections that speak the other protocol."""

"""A probe of all nodes of a group, for the status page: this node's own replica, and the answers of the others.

The others are asked over one connection per node, METADATA for every group, and the leader for the members: requests
that any client may send. A node that does not answer in time counts as silent; the probe never waits longer.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field, replace
from typing import Any, Final

from dledger_core.client.archive import archive_of
from dledger_core.client.members import GroupMembers, members_of
from dledger_core.client.protocol import ArchiveState, TableUsage
from dledger_core.client.routing.channel import Channel
from dledger_core.client.verdict import GroupHealth, NodeHealth
from dledger_core.config import Peer
from dledger_core.errors import DLedgerError
from dledger_core.ids import NodeId
from dledger_core.net import messages
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.server.group import Group
from dledger_core.server.monitoring.observed import ObservedNode
from dledger_core.server.services.requests.archiving import archive_fields

ANSWER_S: Final = 1.0
CONTACT_MS: Final = 1000
"""A leader that a node was in contact with this recently is alive."""
_IN_FLIGHT: Final = 64
"""Requests to one node at a time, far below what one connection may have."""

OpenChannel = Callable[[Peer], Awaitable[Channel]]
"""Connects to a node as a client that may read."""


async def open_channel(peer: Peer, credentials: Credentials = PLAINTEXT) -> Channel:
    """Connect to a node with this side's credentials."""
    channel = Channel(peer, credentials=credentials)
    await channel.open(ANSWER_S)
    return channel


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeProbe:
    """One node in one group; numbers are None where the node did not answer.

    Attributes:
        node_id: the node.
        address: where it listens.
        role: its role; ``waiting``, ``quarantined`` and the other states where it serves no replica.
        term: its term.
        first_index: its first entry.
        last_index: its last entry.
        commit_index: its last entry that is committed and durable.
        visible_end: end of what it shows to readers.
        data_bytes: size of its log.
        leader_id: the leader that it knows.
        leader_contact_ms: time since it had contact with the leader.
        is_recovering: whether it withholds its vote.
        is_disk_full: whether it rejects appends as leader.
        accepts_entries: whether its disk has space for a leader's entries; nodes of 0.2 do not report it.
        disk_free_bytes: free bytes of the disk with its store; nodes of 0.2 do not report it.
        disk_size_bytes: size of that disk.
        answers: whether it answered.
        reason: why it did not, or serves no replica.
    """

    node_id: NodeId
    address: str
    role: str = "silent"
    term: int | None = None
    first_index: int | None = None
    last_index: int | None = None
    commit_index: int | None = None
    visible_end: int | None = None
    data_bytes: int | None = None
    leader_id: str | None = None
    leader_contact_ms: int | None = None
    is_recovering: bool = False
    is_disk_full: bool = False
    accepts_entries: bool | None = None
    disk_free_bytes: int | None = None
    disk_size_bytes: int | None = None
    answers: bool = False
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupProbe:
    """All nodes in one group; ``members`` are None where no leader reports them."""

    name: str
    nodes: tuple[NodeProbe, ...]
    members: GroupMembers | None = None
    tables: tuple[tuple[str, int, int], ...] = field(default=())
    archive: ArchiveState | None = None
    commits: tuple[int, ...] = ()
    """Of another leader: ``History.commits``."""

    def health(self) -> GroupHealth:
        """Return the health of the group, for the verdict."""
        named = None if self.members is None else {member.node_id for member in self.members.members}
        nodes = tuple(
            NodeHealth(
                node_id=str(node.node_id),
                address=node.address,
                role=node.role,
                answers=node.answers,
                serves=node.term is not None,
                is_recovering=node.is_recovering,
                is_disk_full=node.is_disk_full,
                accepts_entries=node.accepts_entries,
                is_member=None if named is None else node.node_id in named,
                reason=node.reason,
            )
            for node in self.nodes
        )
        tables = tuple(TableUsage(*table) for table in self.tables)
        return GroupHealth(
            name=self.name,
            leader_id=self.leader_id,
            nodes=nodes,
            members=self.members,
            tables=tables,
            archive=self.archive,
        )

    @property
    def leader_id(self) -> str | None:
        """The leader of the highest term that a node knows, None if there is none."""
        answered = [node for node in self.nodes if node.term is not None]
        leading = [node for node in answered if node.role == "leader"]
        if leading:
            return str(max(leading, key=lambda node: node.term or 0).node_id)
        newest = max((node.term or 0 for node in answered), default=0)
        named = (node.leader_id for node in answered if node.term == newest)
        found = next((name for name in named if name is not None), None)
        silent = {str(node.node_id) for node in self.nodes if not node.answers}
        # A busy leader may be late with this answer, and its heartbeats arrive.
        contacts = [node.leader_contact_ms for node in answered if node.leader_id == found]
        is_heard = any(contact is not None and contact < CONTACT_MS for contact in contacts)
        return None if found in silent and not is_heard else found


class ClusterProbe:
    """Probes the groups of a node; lives on its event loop.

    Args:
        node: this node.
        open_channel: connects to the others.
        answer_s: how long to wait for a node.
    """

    def __init__(
        self, node: ObservedNode, open_channel: OpenChannel = open_channel, answer_s: float = ANSWER_S
    ) -> None:
        self._node = node
        self._open = open_channel
        self._answer_s = answer_s
        self._channels: dict[Peer, Channel] = {}
        self._locks: dict[Peer, asyncio.Lock] = {}

    async def close(self) -> None:
        """Close the connections."""
        channels, self._channels = list(self._channels.values()), {}
        for channel in channels:
            with contextlib.suppress(DLedgerError):
                await channel.close()

    async def probe(self, names: list[str]) -> list[GroupProbe]:
        """Return the groups with these names, which this node was started with."""
        others = self._node.members.others
        asked = await asyncio.gather(*(self._ask_all(peer, names) for peer in others))
        answers = {peer.node_id: answer for peer, answer in zip(others, asked, strict=True)}
        probes = [self._group(name, answers) for name in names]
        return list(await asyncio.gather(*map(self._with_members, probes)))

    # --- the others ------------------------------------------------------------------------------------------

    async def _channel(self, peer: Peer) -> Channel:
        async with self._locks.setdefault(peer, asyncio.Lock()):
            channel = self._channels.get(peer)
            if channel is None or not channel.is_open:
                channel = self._channels[peer] = await self._open(peer)
            return channel

    async def _ask_all(self, peer: Peer, names: list[str]) -> dict[str, NodeProbe]:
        """Return the answers of a node about each group."""
        turns = asyncio.Semaphore(_IN_FLIGHT)

        async def ask(channel: Channel, name: str) -> NodeProbe:
            async with turns:
                return await self._ask(channel, peer, name)

        try:
            channel = await self._channel(peer)
            found = await asyncio.gather(*(ask(channel, name) for name in names))
        except DLedgerError as error:
            silent = NodeProbe(node_id=peer.node_id, address=peer.address, reason=error.what)
            return dict.fromkeys(names, silent)
        return dict(zip(names, found, strict=True))

    async def _ask(self, channel: Channel, peer: Peer, name: str) -> NodeProbe:
        header = messages.METADATA.encode(messages.MetadataRequest(), g=name)
        try:
            frame = await channel.request(header, timeout_s=self._answer_s)
            response = messages.METADATA_OK.decode(frame.header)
        except DLedgerError as error:
            answers = "state" in error.values
            role = str(error.values.get("state", "silent"))
            return NodeProbe(node_id=peer.node_id, address=peer.address, role=role, answers=answers, reason=error.what)
        node_id, role, term, first, last, commit, visible_end, nbytes = response.node
        contact_ms = frame.header.get("hl")
        free, size = response.disk or (None, None)
        return NodeProbe(
            node_id=NodeId(node_id),
            address=peer.address,
            role=role,
            term=term,
            first_index=first,
            last_index=last,
            commit_index=commit,
            visible_end=visible_end,
            data_bytes=nbytes,
            leader_id=response.leader,
            leader_contact_ms=contact_ms if isinstance(contact_ms, int) and contact_ms >= 0 else None,
            is_recovering=response.is_recovering,
            is_disk_full=response.is_disk_full,
            accepts_entries=response.acknowledges,
            disk_free_bytes=free,
            disk_size_bytes=size,
            answers=True,
        )

    # --- this node -------------------------------------------------------------------------------------------

    def _own(self, group: Group) -> NodeProbe:
        config, hosted = self._node.config, group.hosted
        me: dict[str, Any] = {"node_id": config.self_id, "address": config.me.address, "answers": True}
        if hosted is None:
            return NodeProbe(**me, role=group.state.value, reason=group.reason)
        replica, status = hosted.replica, hosted.replica.raft.status()
        contact_ms = group.leader_contact_ms
        return NodeProbe(
            **me,
            role=status.role.value,
            term=status.term,
            first_index=replica.log.first_index(),
            last_index=replica.log.last_index(),
            commit_index=replica.readable_end - 1,
            visible_end=replica.visible_end,
            data_bytes=replica.log.data_bytes,
            leader_id=replica.leader_node,
            leader_contact_ms=contact_ms if contact_ms >= 0 else None,
            is_recovering=status.is_recovering,
            is_disk_full=replica.space.is_full,
            accepts_entries=replica.space.accepts_entries,
            disk_free_bytes=replica.space.free_bytes,
            disk_size_bytes=replica.space.total_bytes,
        )

    def _group(self, name: str, answers: dict[NodeId, dict[str, NodeProbe]]) -> GroupProbe:
        group = self._node.groups[name]
        own = self._own(group)
        listed = {str(member.node_id): member.address for member in group.members.members}
        others = [found[name] for node_id, found in answers.items() if str(node_id) in listed]
        nodes = sorted((own, *others), key=lambda node: node.node_id)
        hosted, limits = group.hosted, self._node.config.limits
        tables = () if hosted is None else tuple(hosted.replica.tables.usage(limits))
        archive = None if hosted is None else archive_of(archive_fields(hosted.replica))
        return GroupProbe(name=name, nodes=tuple(nodes), tables=tables, archive=archive)

    async def _with_members(self, probe: GroupProbe) -> GroupProbe:
        hosted, leader = self._node.groups[probe.name].hosted, probe.leader_id
        with contextlib.suppress(DLedgerError):
            if hosted is not None and hosted.replica.is_leader:
                return replace(probe, members=hosted.membership.report())
            if (response := await self._members(probe.name, leader)) is not None:
                return replace(probe, members=members_of(response), commits=tuple(response.commits or ()))
        return probe

    async def _members(self, group: str, leader: str | None) -> messages.MemberResponse | None:
        peer = next((peer for peer in self._node.members.others if peer.node_id == leader), None)
        if peer is None:
            return None
        header = messages.MEMBER.encode(messages.MemberRequest(operation="list", measures=True), g=group)
        frame = await (await self._channel(peer)).request(header, timeout_s=self._answer_s)
        return messages.MEMBER_OK.decode(frame.header)

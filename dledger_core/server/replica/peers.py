"""The members, and connections to the other ones: one per pair of nodes, whatever the number of groups.

The node with the smaller id connects, and again after a loss; both sides use the one connection. The heartbeats of all
groups to one node that arise in one iteration of the loop travel in one frame. Both sides send at least empty frames,
and a link without received bytes is closed and connected again: TCP alone takes minutes to detect a lost peer.

A newcomer that claims to be a connected peer waits: a link that receives bytes meanwhile is the peer's, and the
newcomer is refused. Only a silent link is replaced, so that no hello can cut a working one. Messages of a connection
that is not the peer's link are dropped.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, cast

from dledger_core.config import LIMITS, Limits, Peer
from dledger_core.errors import DLedgerError, ProtocolError, UnreachableError, invariant
from dledger_core.ids import NodeId, node_of
from dledger_core.net import codec
from dledger_core.net.connection import Connection, connect
from dledger_core.net.frame import Frame
from dledger_core.net.hello import Hello
from dledger_core.net.log_bursts import BurstFilter
from dledger_core.raft import Heartbeat, HeartbeatResponse, Message
from dledger_core.server.replica.append_clock import ClockComparison
from dledger_core.server.replica.environment import monotonic_ms, wall_ms

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())

_ALIVE_SHARE: Final = 8
"""Empty frames sent within the time after which a link counts as lost, so that a few may be late."""
_CLAIM_SHARE: Final = 4
"""A newcomer waits for this share of that time, in which two empty frames are due on a link that works."""


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a log, as clients see it.

    Attributes:
        node_id: its node.
        store_uuid: its store, empty where it is not known.
        address: the newest address of the node, HOST:PORT.
        role: ``voter`` or ``learner``.
    """

    node_id: NodeId
    store_uuid: str
    address: str
    role: str


@dataclass(frozen=True, slots=True)
class GroupMembers:
    """The members of one group's log, and the index of the entry that made them so; -1 for the founding."""

    index: int
    members: tuple[Member, ...]


class Members:
    """The nodes that replicate the groups of this node, from a source that can change while the node runs.

    Links, repairs and responses to clients ask it each time and keep no copy.

    Args:
        self_id: this node.
        peers: the first members, this node included: the peers string.
    """

    def __init__(self, self_id: NodeId, peers: tuple[Peer, ...]) -> None:
        self._self_id = self_id
        self._peers = peers

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All members."""
        return self._peers

    @property
    def others(self) -> tuple[Peer, ...]:
        """All members but this node."""
        return tuple(peer for peer in self._peers if peer.node_id != self._self_id)

    def of(self, group: str) -> GroupMembers:
        """Return the members of a group's log."""
        del group
        return GroupMembers(-1, tuple(Member(peer.node_id, "", peer.address, "voter") for peer in self._peers))

    def find(self, node_id: NodeId | None) -> Peer | None:
        """Return a member, None if there is no such one."""
        return next((peer for peer in self._peers if peer.node_id == node_id), None)

    def replace(self, peers: tuple[Peer, ...]) -> None:
        """Set the members; ``PeerLinks.update`` then connects to the added ones and leaves the removed ones."""
        ids = [peer.node_id for peer in peers]
        invariant(len(set(ids)) == len(ids), "a member is listed twice", members=ids)
        self._peers = peers


class _Link:
    """The connection to one peer, and the heartbeats that wait for the end of this iteration."""

    __slots__ = (
        "claim",
        "claim_ticks",
        "clocks",
        "connection",
        "heartbeats",
        "idle_ticks",
        "peer",
        "received_bytes",
        "responses",
        "task",
        "unsent_ticks",
    )

    def __init__(self, peer: Peer, limits: Limits) -> None:
        self.peer = peer
        self.clocks = ClockComparison(limits.clock_difference_ms, limits.clock_compare_ms)
        self.connection: Connection | None = None
        self.claim: Connection | None = None  # the newcomer
        self.claim_ticks = 0
        self.task: asyncio.Task[None] | None = None
        self.received_bytes = 0
        self.idle_ticks = 0
        self.unsent_ticks = 0
        self.heartbeats: list[tuple[str, Heartbeat]] = []
        self.responses: list[tuple[str, HeartbeatResponse]] = []


class PeerLinks:
    """Sends messages to peers and delivers theirs; lives on the node's event loop.

    Args:
        self_id: this node.
        members: the nodes to connect to; ``update`` applies a change.
        hello: creates this node's introduction.
        check_hello: raises if a peer's introduction does not match (another log).
        deliver: gets each received (group, message).
        on_lost: gets the id of a peer whose connection was lost.
        idle_ticks_max: ticks without received bytes after which a link is closed.
        wall_ms: this node's wall clock, ms since the epoch.
        limits: the node's limits.
    """

    def __init__(
        self,
        self_id: NodeId,
        members: Members,
        *,
        hello: Callable[[], Hello],
        check_hello: Callable[[Hello], None],
        deliver: Callable[[str, Message], None],
        on_lost: Callable[[NodeId], None],
        idle_ticks_max: int,
        wall_ms: Callable[[], int] = wall_ms,
        limits: Limits = LIMITS,
    ) -> None:
        self._self_id = self_id
        self._members = members
        self._limits = limits
        self._wall_ms = wall_ms
        self._hello = hello
        self._check_hello = check_hello
        self._deliver = deliver
        self._on_lost = on_lost
        self._idle_ticks_max = idle_ticks_max
        self._links = {peer.node_id: _Link(peer, limits) for peer in members.others}
        self._started = False
        self._flush_scheduled = False

    def start(self) -> None:
        """Start connecting to the nodes with a larger id."""
        self._started = True
        self.update()

    def update(self) -> None:
        """Apply a change of the members: connect to the added ones, close the connections to the removed ones."""
        current = {peer.node_id: peer for peer in self._members.others}
        for node_id, link in list(self._links.items()):
            if current.get(node_id) != link.peer:
                del self._links[node_id]
                self._stop(link)
        for node_id, peer in current.items():
            link = self._links.setdefault(node_id, _Link(peer, self._limits))
            if self._started and link.task is None and self._self_id < node_id:
                link.task = asyncio.create_task(self._keep_connected(link), name=f"connect-{node_id}")

    def _stop(self, link: _Link) -> None:
        if link.task is not None:
            link.task.cancel()
        for connection in (link.connection, link.claim):
            if connection is not None:
                connection.close()

    async def close(self) -> None:
        """Close the connections and open no more."""
        tasks = [link.task for link in self._links.values() if link.task is not None]
        for link in self._links.values():
            self._stop(link)
        await asyncio.gather(*tasks, return_exceptions=True)

    def knows(self, node_id: NodeId | None) -> bool:
        """Whether ``node_id`` is one of the other members."""
        return node_id in self._links

    def connected(self) -> list[NodeId]:
        """Return the peers with an open connection."""
        return [name for name, link in self._links.items() if link.connection is not None and link.connection.is_open]

    def send(self, group: str, message: Message) -> None:
        """Send a message; drop it if the peer is not connected or far too slow, because Raft sends it again."""
        link = self._links.get(node_of(message.target))
        if link is None or link.connection is None:
            return
        link.unsent_ticks = 0
        if isinstance(message, Heartbeat):
            link.heartbeats.append((group, message))
            self._flush_later()
        elif isinstance(message, HeartbeatResponse):
            link.responses.append((group, message))
            self._flush_later()
        elif link.connection.write_buffer_bytes < self._limits.link_queue_bytes:
            link.connection.send_buffers(codec.message_to_frame(group, message))

    def _flush_later(self) -> None:
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        for link in self._links.values():
            heartbeats, link.heartbeats = link.heartbeats, []
            responses, link.responses = link.responses, []
            if link.connection is None:
                continue
            if heartbeats:
                link.connection.send_buffers(codec.heartbeats_frames(heartbeats, self._wall_ms()))
            if responses:
                link.connection.send_buffers(codec.heartbeat_responses_frames(responses))

    def tick(self) -> None:
        """Count one tick: send an empty frame on an unused link, close a link without received bytes.

        Ticks and not seconds, so that a node that was suspended does not count that time against the others.
        """
        for link in self._links.values():
            connection = link.connection
            if connection is None or not connection.is_open:
                continue
            link.unsent_ticks += 1
            if link.unsent_ticks * _ALIVE_SHARE >= self._idle_ticks_max:
                link.unsent_ticks = 0
                connection.send_buffers(codec.alive_frame(self._self_id, link.peer.node_id, self._wall_ms()))
            link.idle_ticks += 1
            if connection.received_bytes != link.received_bytes:
                link.received_bytes, link.idle_ticks = connection.received_bytes, 0
                self._refuse_claim(link)
            elif self._is_claim_due(link):
                self._use(link, cast("Connection", link.claim))
            elif link.idle_ticks >= self._idle_ticks_max:
                values = {"ticks": link.idle_ticks}
                connection.abort(UnreachableError("no bytes received", link.peer.address, "", values))

    # --- connections -----------------------------------------------------------------------------------------

    async def _keep_connected(self, link: _Link) -> None:
        limits = self._limits
        pause, logged = limits.link_pause_s, ""
        while True:
            try:
                if await self._stay_connected(link) >= limits.link_steady_s:
                    pause = limits.link_pause_s
                logged = ""
            except DLedgerError as error:
                if str(error) != logged:
                    logged = str(error)
                    _LOG.info("peer not connected: peer=%s error=%s", link.peer.node_id, error)
            except Exception:  # noqa: BLE001 - without this task the peer would never be reached again
                _LOG.exception("connecting failed: peer=%s", link.peer.node_id)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(pause * 1.5, limits.link_pause_max_s)

    async def _stay_connected(self, link: _Link) -> float:
        """Open a connection and wait until it closes; return its duration in seconds."""
        loop = asyncio.get_running_loop()
        connection = await connect(
            link.peer.host, link.peer.port, self._hello(), self, timeout_s=self._limits.link_dial_s
        )
        self._check_response(link, connection)
        self._use(link, connection)
        since = loop.time()
        await asyncio.shield(connection.closed)
        return loop.time() - since

    def _check_response(self, link: _Link, connection: Connection) -> None:
        try:
            if connection.peer_hello.node_id != link.peer.node_id:
                raise ProtocolError(
                    f"the node at this address is {connection.peer_hello.node_id}, not {link.peer.node_id}",
                    link.peer.address,
                    "correct the peers string",
                )
            self._check_hello(connection.peer_hello)
        except DLedgerError:
            connection.close()
            raise

    def adopt(self, connection: Connection) -> None:
        """Use a peer's connection to this node from now on, or, where the peer has a link, once that one is silent.

        Raises:
            ProtocolError: this node connects to the peer, not the peer to it.
            UnreachableError: another newcomer waits already.
        """
        node_id = connection.peer_hello.node_id
        invariant(self.knows(node_id), "a connection of an unknown peer is adopted", peer=node_id)
        link = self._links[cast("NodeId", node_id)]
        if link.peer.node_id > self._self_id:
            raise ProtocolError(
                f"{self._self_id} connects to {node_id} itself", "", "connect to nodes with a larger id"
            )
        if link.connection is None or not link.connection.is_open:
            self._use(link, connection)
        elif link.claim is None:
            link.claim, link.claim_ticks = connection, 0
            link.received_bytes = link.connection.received_bytes
        else:
            raise UnreachableError(f"{node_id} is connected already, and a newcomer waits", "", "retry")

    def _use(self, link: _Link, connection: Connection) -> None:
        connection.limit_unacknowledged(self._limits.link_unacknowledged_s)
        old, link.connection, link.claim = link.connection, connection, None
        link.received_bytes = link.idle_ticks = link.unsent_ticks = 0
        if old is not None:
            old.close()
        _LOG.info("peer connected: peer=%s address=%s", link.peer.node_id, link.peer.address)

    def _is_claim_due(self, link: _Link) -> bool:
        """Count a tick in which a link received nothing while a newcomer waits."""
        link.claim_ticks += link.claim is not None
        return link.claim_ticks * _CLAIM_SHARE >= self._idle_ticks_max

    def _refuse_claim(self, link: _Link) -> None:
        if link.claim is not None:
            claim, link.claim = link.claim, None
            values = {"peer": str(link.peer.node_id)}
            claim.close(UnreachableError("the peer answers on another connection", claim.peer_address, "", values))
            _LOG.warning(
                "newcomer refused, the peer is connected: peer=%s from=%s", link.peer.node_id, claim.peer_address
            )

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Deliver a peer's frame; raise ProtocolError if it is not a message between replicas."""
        link = self._links.get(cast("NodeId", connection.peer_hello.node_id))
        if link is None or link.connection is not connection:
            return
        for group, message in codec.frame_to_messages(frame):
            if node_of(message.sender) != connection.peer_hello.node_id or node_of(message.target) != self._self_id:
                raise ProtocolError("a message from or to another node", connection.peer_address)
            self._deliver(group, message)
        if (peer_ms := codec.wall_clock(frame)) != 0:
            self._compare_clocks(link, peer_ms)

    def _compare_clocks(self, link: _Link, peer_ms: int) -> None:
        ahead_ms = link.clocks.observe(peer_ms, self._wall_ms(), monotonic_ms())
        if ahead_ms is not None:
            _LOG.warning(
                "clock of a peer differs, append times are its leader's: peer=%s ahead_ms=%d remedy=synchronize clocks",
                link.peer.node_id,
                ahead_ms,
            )

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Remove a connection that was lost."""
        node_id = connection.peer_hello.node_id
        link = self._links.get(node_id) if node_id is not None else None
        if link is None:
            return
        if link.claim is connection:
            link.claim = None
        if link.connection is connection:
            link.connection = None
            _LOG.info("peer disconnected: peer=%s error=%s", node_id, error or "closed")
            self._on_lost(link.peer.node_id)
            if link.claim is not None:
                self._use(link, link.claim)

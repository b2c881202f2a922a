"""Links to the other nodes: one connection per pair, whatever the number of groups, and the groups attached to it.

Both sides dial, at first and after a lost connection; the node with the larger id waits a little longer. If two
processes have two connections, the one that the smaller id dialed stays. One frame carries the heartbeats of all groups
to a node from one iteration of the event loop. Both sides send at least empty frames, and a link without received bytes
is closed and connected again: TCP alone takes minutes to detect a lost peer.

Entries travel in pieces that heartbeats overtake, but the network may still have a queue in which heartbeats wait.
While bytes arrive and heartbeats are late, this node does not campaign against a leader at the other end, and reports
the received bytes: the leader at the other end counts that as a response.

A newcomer that claims to be a connected peer waits: a link that receives bytes meanwhile is the peer's, and the
newcomer is refused. Only a silent link is replaced, so that no hello can cut a working one, and a second process with a
copy of the peer's directory gets no link. Messages of a connection that is not the peer's link are dropped.

Where the log and the list name different addresses of a node, both are dialed in turn. A node that refuses every group
permanently is not the peer but a node of another cluster with its name: the other address and a newcomer come first.

A node that neither the list nor a log names may connect: it may wait for a bootstrap, or have been admitted. It is a
peer only for the groups that it attaches.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, cast

from dledger_core.config import LIMITS, Limits, Peer, parse_peer
from dledger_core.errors import ProtocolError, UnreachableError
from dledger_core.ids import MemberId, NodeId, node_of
from dledger_core.net import codec
from dledger_core.net.connection import Connection
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.dialing import connect
from dledger_core.net.frame import Frame
from dledger_core.net.hello import Hello
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.net.protocol import Type
from dledger_core.raft import AppendEntries, Heartbeat, HeartbeatResponse, InstallSnapshot, Message
from dledger_core.server.replica.attach_exchange import ATTACH_TYPES, AttachExchange
from dledger_core.server.replica.attachments import RETRY_SHARE, AttachHost
from dledger_core.server.replica.environment import monotonic_ms, wall_ms
from dledger_core.server.replica.link import Dialer, Link
from dledger_core.server.replica.members import Members

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())

_QUEUE_BYTES: Final = 96 << 20
"""Bytes queued for one peer; messages beyond it are dropped, and Raft sends them again."""
_DIAL_S: Final = 2.0
"""Timeout of a connection attempt."""
_UNACKNOWLEDGED_S: Final = 10.0
"""Time after which the kernel breaks a link whose bytes are not acknowledged."""
_ALIVE_SHARE: Final = 8
"""Empty frames sent within the time after which a link counts as lost, so that a few may be late."""
_CLAIM_SHARE: Final = 4
"""A newcomer waits for this share of that time, in which two empty frames are due on a link that works."""
_UNLISTED_MAX: Final = 64
_BULK: Final = (AppendEntries, InstallSnapshot)
"""Messages that may be large. They keep their order: an early one would be rejected, and all of them sent again."""


class PeerLinks:
    """Sends messages to peers and delivers theirs; lives on the node's event loop.

    Args:
        self_id: this node.
        members: the nodes to connect to; ``update`` applies a change.
        hello: creates this node's introduction.
        groups: the groups of this node, which are attached to each link.
        deliver: gets each received (group, message).
        on_lost: gets the id of a peer whose connection was lost.
        on_address: gets the id of a peer and the address that it advertises, if that is not the known one.
        on_receiving: gets each (group, member) of a peer whose bytes arrive, but no heartbeats in time.
        on_received: gets each (group, member) of a peer that receives this node's bytes, but no heartbeats in time.
        idle_ticks_max: ticks without received bytes after which a link is closed.
        beat_ticks_max: ticks after which heartbeats are late.
        wall_ms: this node's wall clock, ms since the epoch.
        limits: the node's limits.
        credentials: this node's.
    """

    def __init__(
        self,
        self_id: NodeId,
        members: Members,
        *,
        hello: Callable[[], Hello],
        groups: AttachHost,
        deliver: Callable[[str, Message], None],
        on_lost: Callable[[NodeId], None],
        on_address: Callable[[NodeId, str], None] = lambda node_id, address: None,
        on_receiving: Callable[[str, MemberId], None] = lambda group, member: None,
        on_received: Callable[[str, MemberId], None] = lambda group, member: None,
        idle_ticks_max: int,
        beat_ticks_max: int = 6,
        wall_ms: Callable[[], int] = wall_ms,
        limits: Limits = LIMITS,
        credentials: Credentials = PLAINTEXT,
    ) -> None:
        self._self_id = self_id
        self._credentials = credentials
        self._members = members
        self._limits = limits
        self._wall_ms = wall_ms
        self._hello = hello
        self._attaches = AttachExchange(groups, members)
        self._on_address = on_address
        self._deliver = deliver
        self._on_lost = on_lost
        self._on_receiving = on_receiving
        self._on_received = on_received
        self._idle_ticks_max = idle_ticks_max
        self._beat_ticks_max = beat_ticks_max
        self._links = {node_id: Link(peer, limits) for node_id, peer in self._known_others().items()}
        self._listed = frozenset(self._links)
        self._started = False
        self._flush_scheduled = False

    def start(self) -> None:
        """Start connecting to the other nodes."""
        self._started = True
        self.update()

    def update(self) -> None:
        """Apply a change of the members: connect to the added ones, close the connections to the removed ones."""
        current = self._known_others()
        for node_id, link in list(self._links.items()):
            if node_id in self._listed and node_id not in current:
                del self._links[node_id]
                link.close()
        self._listed = frozenset(current)
        for node_id, peer in current.items():
            link = self._links.setdefault(node_id, Link(peer, self._limits))
            link.peer = peer  # the next connection goes to the new address
            if self._started and link.dialer is None:
                link.dialer = Dialer(
                    link,
                    self._dial,
                    self._take_dialed,
                    partial(self._ways_to, link),
                    waits=node_id < self._self_id,
                    limits=self._limits,
                )

    def _known_others(self) -> dict[NodeId, Peer]:
        return {node_id: peer for node_id, peer in self._members.known.items() if node_id != self._self_id}

    def _ways_to(self, link: Link) -> tuple[Peer, ...]:
        return self._members.ways_to(link.peer.node_id) or (link.peer,)

    async def close(self) -> None:
        """Close the connections and open no more."""
        dialers = [link.dialer for link in self._links.values() if link.dialer is not None]
        for link in self._links.values():
            link.close()
        for dialer in dialers:
            await dialer.wait_stopped()

    def knows(self, node_id: NodeId | None) -> bool:
        """Whether there is a link of ``node_id``."""
        return node_id in self._links

    def connected(self) -> list[NodeId]:
        """Return the peers with an open connection."""
        return [name for name, link in self._links.items() if link.connection is not None and link.connection.is_open]

    def is_attached(self, group: str, member: MemberId) -> bool:
        """Whether messages of a group can be sent to a member now."""
        link = self._links.get(node_of(member))
        return link is not None and link.attached is not None and link.attached.number_of(group, member) is not None

    def send(self, group: str, message: Message) -> None:
        """Send a message; drop it if the peer is not connected or far too slow, because Raft sends it again."""
        link = self._links.get(node_of(message.target))
        if link is None or link.connection is None or link.attached is None:
            return
        number = link.attached.number_of(group, message.target)
        if number is None:
            return
        link.unsent_ticks = 0
        if isinstance(message, Heartbeat):
            link.heartbeats.append((number, message))
            self._flush_later()
        elif isinstance(message, HeartbeatResponse):
            link.responses.append((number, message))
            self._flush_later()
        # Queued without a limit, the messages for one slow peer would fill the memory of a leader.
        elif link.connection.write_buffer_bytes < _QUEUE_BYTES:
            connection = link.connection
            send = connection.send_bulk if isinstance(message, _BULK) else connection.send_buffers
            send(codec.message_to_frame(number, message))

    def attach(self, group: str) -> None:
        """Attach a group to every link, because it is hosted now or its identity has changed."""
        for link in self._links.values():
            if link.attached is not None:
                link.attached.offer(group)

    def _flush_later(self) -> None:
        # Hundreds of groups heartbeat at one tick: a frame for each would cost more than their appends
        # (test_many_heartbeats_in_one_iteration_arrive_in_order).
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        now_ms = self._wall_ms()
        for link in self._links.values():
            link.flush(now_ms)

    def tick(self) -> None:
        """Count one tick: send an empty frame on an unused link, close a link without received bytes.

        Ticks and not seconds, so that a node that was suspended does not count that time against the others.
        """
        for link in self._links.values():
            connection = link.connection
            if connection is None or not connection.is_open:
                continue
            link.unsent_ticks += 1
            if link.attached is not None:
                link.attached.tick(self._idle_ticks_max // RETRY_SHARE)
            # A link without groups, or between followers, carries no messages of Raft (test_idle_link_stays_open).
            if link.unsent_ticks * _ALIVE_SHARE >= self._idle_ticks_max:
                link.unsent_ticks = 0
                connection.send_buffers(codec.alive_frame(self._wall_ms()))
            link.idle_ticks += 1
            link.beat_ticks += 1
            if connection.received_bytes != link.received_bytes:
                link.received_bytes, link.idle_ticks = connection.received_bytes, 0
                link.refuse_claim()
                if link.beat_ticks > self._beat_ticks_max:
                    self._heartbeats_wait(link, connection)
            # A peer whose machine lost power cannot close its old connection; its new process would wait for minutes
            # (test_newcomer_replaces_silent_link_and_one_newcomer_waits).
            elif self._is_claim_due(link):
                self._use(link, cast("Connection", link.claim), by_smaller=link.peer.node_id < self._self_id)
            # Otherwise a node of another cluster at an old address would keep the link from the peer
            # (test_node_of_another_cluster_at_recorded_address_does_not_keep_the_link).
            elif link.is_foreign and len(self._members.ways_to(link.peer.node_id)) > 1:
                link.failed_dials += 1
                connection.close(UnreachableError("a node of another cluster", connection.peer_address))
            # Half-open: TCP notices that after minutes (test_half_open_link_is_closed_and_connected_again).
            elif link.idle_ticks >= self._idle_ticks_max:
                values = {"ticks": link.idle_ticks}
                connection.abort(UnreachableError("no bytes received", link.peer.address, "", values))

    def _heartbeats_wait(self, link: Link, connection: Connection) -> None:
        """Handle that the peer's bytes arrive, but not its heartbeats.

        Both sides have to: the heartbeats that this node does not receive are those that it does not respond to.
        """
        # Tests: test_bytes_that_delay_heartbeats_are_reported_to_both_ends,
        # test_large_append_over_slow_links_needs_no_election.
        connection.send_buffers(codec.alive_frame(self._wall_ms(), connection.received_bytes))
        for group, member in link.members():
            self._on_receiving(group, member)

    # --- connections -----------------------------------------------------------------------------------------

    async def _dial(self, way: Peer) -> Connection:
        """Open a connection to an address; another node there would get the messages of the peer's stores."""
        return await connect(
            way.host,
            way.port,
            self._hello(),
            self,
            timeout_s=_DIAL_S,
            credentials=self._credentials,
            identity=way.node_id,
        )

    def _take_dialed(self, link: Link, connection: Connection) -> Connection:
        by_smaller = self._self_id < link.peer.node_id
        if link.is_open and not link.prefers(connection, by_smaller=by_smaller):
            connection.close()  # the peer dialed at the same time
            return cast("Connection", link.connection)
        self._use(link, connection, by_smaller=by_smaller)
        return connection

    def adopt(self, connection: Connection) -> None:
        """Use a peer's connection to this node from now on, or, where the peer has a link, once that one is silent.

        Raises:
            ProtocolError: it claims to be this node.
            UnreachableError: another newcomer waits already, or too many unlisted nodes are connected.
        """
        node_id = cast("NodeId", connection.peer_hello.node_id)
        if node_id == self._self_id:
            raise ProtocolError(f"{node_id} is this node", "", "give each node its own id")
        link = self._links.get(node_id)
        if link is None:
            # Without security anyone may say hello under new names.
            if len(self._links) - len(self._listed) >= _UNLISTED_MAX:
                raise UnreachableError("too many unlisted nodes are connected", "", "add the node, then retry")
            address = connection.peer_hello.address or connection.peer_address
            link = self._links[node_id] = Link(parse_peer(f"{node_id}-{address}"), self._limits)
        by_smaller = node_id < self._self_id
        # A hello proves nothing: a link that works is never replaced (test_newcomer_displaces_no_link_that_works).
        if not link.is_open or link.is_foreign or link.prefers(connection, by_smaller=by_smaller):
            self._use(link, connection, by_smaller=by_smaller)
        elif link.claim is None:
            link.claim, link.claim_ticks = connection, 0
            link.received_bytes = cast("Connection", link.connection).received_bytes
        else:
            raise UnreachableError(f"{node_id} is connected already, and a newcomer waits", "", "retry")

    def _use(self, link: Link, connection: Connection, *, by_smaller: bool) -> None:
        connection.limit_unacknowledged(_UNACKNOWLEDGED_S)
        link.use(connection, by_smaller=by_smaller)
        node_id, address = link.peer.node_id, connection.peer_hello.address
        _LOG.info("peer connected: peer=%s address=%s", node_id, address or connection.peer_address)
        self._attaches.begin(link, connection, self._links.values())
        if address and address != link.peer.address:
            self._on_address(node_id, address)

    def _is_claim_due(self, link: Link) -> bool:
        """Count a tick in which a link received nothing while a newcomer waits."""
        link.claim_ticks += link.claim is not None
        return link.claim_ticks * _CLAIM_SHARE >= self._idle_ticks_max

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Deliver a peer's frame; raise ProtocolError if it is not a message between replicas."""
        link = self._links.get(cast("NodeId", connection.peer_hello.node_id))
        if link is None:
            return
        # Two processes may claim one id; only the one with the link is the peer
        # (test_newcomer_displaces_no_link_that_works).
        if link.connection is not connection or link.attached is None:
            self._attaches.keep(connection, frame)
            return
        if frame.header["t"] in ATTACH_TYPES:
            self._attaches.take(link, frame)
            return
        for group, message in link.attached.messages_of(frame):
            self._deliver(group, message)
        if frame.header["t"] in (Type.HEARTBEATS, Type.HEARTBEATS_OK):
            link.beat_ticks = 0
            if (received := codec.received_bytes(frame)) > link.reported_bytes:
                link.reported_bytes = received
                for group, member in link.members():
                    self._on_received(group, member)
        if (peer_ms := codec.wall_clock(frame)) != 0:
            self._compare_clocks(link, peer_ms)

    def _compare_clocks(self, link: Link, peer_ms: int) -> None:
        ahead_ms = link.clocks.observe(peer_ms, self._wall_ms(), monotonic_ms())
        if ahead_ms is not None:
            _LOG.warning(
                "clock of a peer differs, append times are its leader's: peer=%s ahead_ms=%d remedy=synchronize clocks",
                link.peer.node_id,
                ahead_ms,
            )

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Remove a connection that was lost."""
        self._attaches.forget(connection)
        node_id = connection.peer_hello.node_id
        link = self._links.get(node_id) if node_id is not None else None
        if link is None:
            return
        if link.claim is connection:
            link.claim = None
        if link.connection is connection:
            link.connection = link.attached = None
            self._members.set_reached(link.peer.node_id, None)
            _LOG.info("peer disconnected: peer=%s error=%s", node_id, error or "closed")
            self._on_lost(link.peer.node_id)
            if link.claim is not None:
                self._use(link, link.claim, by_smaller=link.peer.node_id < self._self_id)
            # Kept, links of nodes that came and went would add up
            # (test_unlisted_node_attaches_and_is_forgotten_when_it_leaves).
            elif link.peer.node_id not in self._listed:
                del self._links[link.peer.node_id]

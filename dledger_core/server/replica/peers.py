"""Connections to the other nodes: one per pair, whatever the number of groups.

The node with the smaller id dials and keeps dialling; both sides use the one connection. Heartbeats of all groups
to one node that arise in the same turn of the loop travel in one frame. A link is never silent: where there is
nothing to say, an empty frame says so, and a link on which nothing comes is given up and made again, for TCP alone
takes minutes to notice that the other side is gone.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from typing import Final

from dledger_core.config import Peer
from dledger_core.errors import DLedgerError, ProtocolError, UnreachableError
from dledger_core.ids import NodeId
from dledger_core.net import codec
from dledger_core.net.connection import Connection
from dledger_core.net.frame import Frame
from dledger_core.net.transport import Hello, connect
from dledger_core.raft import Heartbeat, HeartbeatResponse, Message

__all__ = ["PeerLinks"]

_LOG = logging.getLogger(__name__)

DIAL_TIMEOUT_S: Final = 2.0
DIAL_PAUSE_S: Final = 0.1
DIAL_PAUSE_MAX_S: Final = 1.0
LINK_STEADY_S: Final = 5.0
"""A link that breaks sooner counts as a failed attempt: the pause before the next one goes on growing."""
UNACKNOWLEDGED_S: Final = 10.0
"""The kernel gives a link up whose bytes stay unacknowledged for so long."""
QUEUED_BYTES_MAX: Final = 96 << 20
ALIVE_SHARE: Final = 8
"""Empty frames sent while a link may be silent, so that a few may come late."""


class _Link:
    """The connection to one peer, and the heartbeats that wait for the end of this turn."""

    __slots__ = ("connection", "heard_bytes", "heartbeats", "peer", "responses", "silent_ticks", "unsaid_ticks")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.connection: Connection | None = None
        self.heard_bytes = 0
        self.silent_ticks = 0
        self.unsaid_ticks = 0
        self.heartbeats: list[tuple[str, Heartbeat]] = []
        self.responses: list[tuple[str, HeartbeatResponse]] = []


class PeerLinks:
    """Sends messages to peers and hands theirs on; lives on the node's event loop.

    Args:
        self_id: this node.
        peers: all nodes.
        hello: makes our introduction.
        check_hello: raises if a peer's introduction does not fit (another log).
        deliver: gets each (group, message) that came in.
        on_lost: gets the id of a peer whose connection broke.
        silent_ticks_max: a link on which nothing came for so many ticks is closed.
    """

    def __init__(
        self,
        self_id: NodeId,
        peers: tuple[Peer, ...],
        *,
        hello: Callable[[], Hello],
        check_hello: Callable[[Hello], None],
        deliver: Callable[[str, Message], None],
        on_lost: Callable[[NodeId], None],
        silent_ticks_max: int,
    ) -> None:
        self._self_id = self_id
        self._hello = hello
        self._check_hello = check_hello
        self._deliver = deliver
        self._on_lost = on_lost
        self._silent_ticks_max = silent_ticks_max
        self._links = {peer.node_id: _Link(peer) for peer in peers if peer.node_id != self_id}
        self._dialling: list[asyncio.Task[None]] = []
        self._flush_scheduled = False

    def start(self) -> None:
        """Starts to dial the nodes with a larger id."""
        for link in self._links.values():
            if self._self_id < link.peer.node_id:
                self._dialling.append(asyncio.create_task(self._dial(link), name=f"dial-{link.peer.node_id}"))

    async def close(self) -> None:
        """Stops dialling and closes the connections."""
        for task in self._dialling:
            task.cancel()
        await asyncio.gather(*self._dialling, return_exceptions=True)
        for link in self._links.values():
            if link.connection is not None:
                link.connection.close()

    def knows(self, node_id: NodeId | None) -> bool:
        """Whether ``node_id`` is one of the other nodes."""
        return node_id in self._links

    def connected(self) -> list[NodeId]:
        """Returns the peers with an open connection."""
        return [name for name, link in self._links.items() if link.connection is not None and link.connection.is_open]

    def send(self, group: str, message: Message) -> None:
        """Sends a message, or drops it when the peer is not connected or far too slow (Raft copes)."""
        link = self._links.get(message.target)
        if link is None or link.connection is None:
            return
        link.unsaid_ticks = 0
        if isinstance(message, Heartbeat):
            link.heartbeats.append((group, message))
            self._flush_later()
        elif isinstance(message, HeartbeatResponse):
            link.responses.append((group, message))
            self._flush_later()
        elif link.connection.write_buffer_bytes < QUEUED_BYTES_MAX:
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
                link.connection.send_buffers(codec.heartbeats_frames(heartbeats))
            if responses:
                link.connection.send_buffers(codec.heartbeat_responses_frames(responses))

    def tick(self) -> None:
        """Counts one tick: says that this node is there, and gives up links on which nothing comes.

        Ticks and not seconds, so that a node that slept does not hold its own silence against others.
        """
        for link in self._links.values():
            connection = link.connection
            if connection is None or not connection.is_open:
                continue
            link.unsaid_ticks += 1
            if link.unsaid_ticks * ALIVE_SHARE >= self._silent_ticks_max:
                link.unsaid_ticks = 0
                connection.send_buffers(codec.alive_frame(self._self_id, link.peer.node_id))
            link.silent_ticks += 1
            if connection.received_bytes != link.heard_bytes:
                link.heard_bytes, link.silent_ticks = connection.received_bytes, 0
            elif link.silent_ticks >= self._silent_ticks_max:
                values = {"ticks": link.silent_ticks}
                connection.abort(UnreachableError("nothing came over the link", link.peer.address, "", values))

    # --- connections -----------------------------------------------------------------------------------------

    async def _dial(self, link: _Link) -> None:
        pause, told = DIAL_PAUSE_S, ""
        while True:
            try:
                if await self._stay_connected(link) >= LINK_STEADY_S:
                    pause = DIAL_PAUSE_S
                told = ""
            except DLedgerError as error:
                if str(error) != told:
                    told = str(error)
                    _LOG.info("peer %s: %s", link.peer.node_id, error)
            except Exception:  # noqa: BLE001 - without this task the peer would never be reached again
                _LOG.exception("peer %s: dialling failed", link.peer.node_id)
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(pause * 1.5, DIAL_PAUSE_MAX_S)

    async def _stay_connected(self, link: _Link) -> float:
        """Makes a connection and waits until it is gone; returns how many seconds it stood."""
        loop = asyncio.get_running_loop()
        connection = await connect(link.peer.host, link.peer.port, self._hello(), self, timeout_s=DIAL_TIMEOUT_S)
        self._check_answer(link, connection)
        self.adopt(connection)
        since = loop.time()
        await asyncio.shield(connection.closed)
        return loop.time() - since

    def _check_answer(self, link: _Link, connection: Connection) -> None:
        try:
            if connection.peer_hello.node_id != link.peer.node_id:
                raise ProtocolError(
                    f"the node there calls itself {connection.peer_hello.node_id}",
                    link.peer.address,
                    "correct the peers string",
                )
            self._check_hello(connection.peer_hello)
        except DLedgerError:
            connection.close()
            raise

    def adopt(self, connection: Connection) -> None:
        """Uses a connection to a peer from now on; an older one is closed."""
        node_id = connection.peer_hello.node_id
        assert node_id is not None
        link = self._links[node_id]
        connection.bound_unacknowledged(UNACKNOWLEDGED_S)
        old, link.connection = link.connection, connection
        link.heard_bytes = link.silent_ticks = link.unsaid_ticks = 0
        if old is not None and old is not connection:
            old.close()
        _LOG.info("connected with %s at %s", node_id, link.peer.address)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Takes a frame from a peer; raises ProtocolError if it is none of a peer's."""
        for group, message in codec.frame_to_messages(frame):
            if message.sender != connection.peer_hello.node_id or message.target != self._self_id:
                raise ProtocolError("a message of or to another node", connection.peer_address)
            self._deliver(group, message)

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Forgets a connection that broke."""
        node_id = connection.peer_hello.node_id
        link = self._links.get(node_id) if node_id is not None else None
        if link is not None and link.connection is connection:
            link.connection = None
            _LOG.info("lost %s: %s", node_id, error or "closed")
            self._on_lost(link.peer.node_id)

"""Connections to the other nodes: one per pair, whatever the number of groups.

The node with the smaller id dials and keeps dialling; both sides use the one connection. Heartbeats of all groups
to one node that arise in the same turn of the loop travel in one frame.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Final

from dledger_core.config import Peer
from dledger_core.errors import DLedgerError, ProtocolError
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
QUEUED_BYTES_MAX: Final = 96 << 20


class _Link:
    """The connection to one peer, and the heartbeats that wait for the end of this turn."""

    __slots__ = ("connection", "heartbeats", "peer", "responses")

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.connection: Connection | None = None
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
    ) -> None:
        self._self_id = self_id
        self._hello = hello
        self._check_hello = check_hello
        self._deliver = deliver
        self._on_lost = on_lost
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
                link.connection.send_buffers(codec.heartbeats_frame(heartbeats))
            if responses:
                link.connection.send_buffers(codec.heartbeat_responses_frame(responses))

    # --- connections -----------------------------------------------------------------------------------------

    async def _dial(self, link: _Link) -> None:
        pause, told = DIAL_PAUSE_S, ""
        while True:
            try:
                connection = await connect(
                    link.peer.host, link.peer.port, self._hello(), self, timeout_s=DIAL_TIMEOUT_S
                )
                self._check_answer(link, connection)
            except DLedgerError as error:
                if str(error) != told:
                    told = str(error)
                    _LOG.info("peer %s: %s", link.peer.node_id, error)
                await asyncio.sleep(pause)
                pause = min(pause * 1.5, DIAL_PAUSE_MAX_S)
                continue
            pause, told = DIAL_PAUSE_S, ""
            self.adopt(connection)
            with contextlib.suppress(Exception):
                await asyncio.shield(connection.closed)

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
        old, link.connection = link.connection, connection
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

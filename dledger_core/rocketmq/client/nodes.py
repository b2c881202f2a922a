"""The nodes of a Java group: one connection each, and the leader, learned from METADATA and from redirects."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import socket
from collections.abc import Callable, Sequence
from contextlib import aclosing
from functools import partial
from typing import Final, TypeVar, cast

from dledger_core.client.routing.channel import ClosedError, ConnectionLostError, Unanswered, as_responded
from dledger_core.client.routing.outcomes import NOTHING, Effect
from dledger_core.client.routing.retry import LEADER_FAILED, Deadline, Retry, Timeouts
from dledger_core.config import Peer
from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    NoLeaderError,
    NotLeaderError,
    ProtocolError,
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.net.tls import speaks_tls
from dledger_core.rocketmq.remoting.codes import rejects_base64
from dledger_core.rocketmq.remoting.frame import FrameDecoder, RemotingFrame, encode_frame
from dledger_core.rocketmq.remoting.messages import (
    AppendRequest,
    MetadataRequest,
    MetadataResponse,
    Request,
    Response,
    decode_response,
    encode_request,
)

_R = TypeVar("_R", bound=Response)
CONNECT_TIMEOUT_S: Final = 3.0
ASK_TIMEOUT_S: Final = 1.0
_OPAQUE_MAX: Final = (1 << 31) - 1


class JavaChannel(asyncio.Protocol):
    """A connection to one node; passes each response to its caller. Belongs to one event loop."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._decoder = FrameDecoder()
        self._unanswered = Unanswered[RemotingFrame](peer.address)
        self._numbers = itertools.cycle(range(1, _OPAQUE_MAX))
        self._transport: asyncio.Transport | None = None
        self._sends_numbers: bool | None = None
        self._probing = asyncio.Lock()
        self._closed = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def open(self, timeout_s: float) -> None:
        """Connect; raise UnreachableError if that fails."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: self, self.peer.host, self.peer.port)
        except (OSError, TimeoutError, UnicodeError) as error:  # a UnicodeError: not a valid host name
            reason = "no response in time" if isinstance(error, TimeoutError) else str(error)
            remedy = "check that the node runs and that the address is right"
            raise UnreachableError(f"cannot connect: {reason}", self.peer.address, remedy) from None

    async def call(self, request: Request, kind: type[_R], timeout_s: float) -> _R:
        """Send a request and return its response.

        Raises:
            UnreachableError: not sent.
            ConnectionLostError: sent, and the connection was lost.
            RequestTimedOutError: sent, and no response arrived in time.
            DLedgerError: the error that the node returned.
        """
        deadline = Deadline(timeout_s)
        numbers = isinstance(request, AppendRequest) and await self._needs_numbers(timeout_s)
        frame = await self._respond(request, max(0.001, deadline.left_s), numbers=numbers)
        response = decode_response(kind, frame, self.peer.address)
        failure = response.failure(self.peer.address)
        if failure is not None:
            raise failure
        return response

    async def _needs_numbers(self, timeout_s: float) -> bool:
        """Whether the node reads bytes as numbers only; find out with an append that every node rejects.

        The append itself is no test: an error of the newest version repeats the request in a header, of any size.
        """
        async with self._probing:
            if self._sends_numbers is None:
                frame = await self._respond(AppendRequest(bodies=(b"0",)), timeout_s)
                self._sends_numbers = rejects_base64(frame.code, frame.remark)
            return self._sends_numbers

    async def _respond(self, request: Request, timeout_s: float, *, numbers: bool = False) -> RemotingFrame:
        transport, number = self._transport, next(self._numbers)
        if transport is None or not self.is_open:
            raise UnreachableError("the connection is closed", self.peer.address)
        send = partial(transport.write, encode_frame(encode_request(request, number, numbers=numbers)))
        return await self._unanswered.response(number, send, timeout_s)

    async def close(self) -> None:
        """Close the connection and wait until it is closed."""
        if self._transport is not None:
            self._transport.abort()
            await asyncio.shield(self._closed)

    # --- called by the transport ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport and disable Nagle's algorithm."""
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Pass complete responses to their callers."""
        try:
            self._decoder.receive_data(data)
            while (frame := self._decoder.next_frame()) is not None:
                if frame.is_response:
                    self._unanswered.settle(frame.opaque, frame)
        except ProtocolError as error:
            self._unanswered.lost(f"the node does not speak DLedger's protocol: {error.what}")
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail all requests without a response."""
        self._unanswered.lost(f"the connection was lost: {exc}" if exc else "the node closed the connection")
        if not self._closed.done():
            self._closed.set_result(None)


class JavaNodes:
    """Sends requests to the nodes of one group. Belongs to one event loop.

    Attributes:
        peers: the nodes by id.
        leader_id: the presumed leader.
        connected: whether a node has responded before.
    """

    def __init__(self, peers: Sequence[Peer], group: str) -> None:
        self.peers = {str(peer.node_id): peer for peer in peers}
        self.group = group
        self.leader_id: str | None = None
        self.connected = False
        self._channels: dict[str, JavaChannel] = {}
        self._locks: dict[str, asyncio.Lock] = {node: asyncio.Lock() for node in self.peers}
        self._discovery = asyncio.Lock()
        self._closed = False

    def check_node(self, node_id: str) -> str:
        """Return ``node_id`` if the peers string names it, otherwise raise BadRequestError."""
        if node_id not in self.peers:
            raise BadRequestError(f"no node {node_id!r}", "peers", f"the nodes are: {', '.join(self.peers)}")
        return node_id

    async def ask(self, request: Request, kind: type[_R], timeout_s: float) -> _R:
        """Send a request once to the node that it names; connect first if need be."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        channel = await self._channel(request.remote_id, min(CONNECT_TIMEOUT_S, timeout_s))
        response = await channel.call(request, kind, max(0.001, deadline - loop.time()))
        self.connected = True
        return response

    async def _channel(self, node_id: str, timeout_s: float) -> JavaChannel:
        channel = self._channels.get(node_id)
        if channel is not None and channel.is_open:
            return channel
        async with self._locks[node_id]:  # one connection for all waiting requests
            channel = self._channels.get(node_id)
            if channel is None or not channel.is_open:
                self._check_open()
                channel = JavaChannel(self.peers[node_id])
                await channel.open(timeout_s)
                try:
                    self._check_open()
                except ClosedError:  # closed while it connected
                    await channel.close()
                    raise
                self._channels[node_id] = channel
            return channel

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError

    async def to_leader(
        self,
        make: Callable[[str], Request],
        kind: type[_R],
        *,
        timeout_s: float,
        idempotent: bool,
        effect: Effect = NOTHING,
    ) -> _R:
        """Return the leader's response, following redirects and elections.

        Args:
            make: returns the request for the node with this id.
            kind: type of the response.
            timeout_s: limit of the whole call.
            idempotent: may take effect twice without harm.
            effect: what an error with an unknown outcome says about the request.

        Raises:
            RequestTimedOutError, LeadershipLostError: it may have taken effect.
            DLedgerError: it has not.
        """
        retry = Retry(Timeouts(timeout_s), idempotent=idempotent, effect=lambda: effect)
        while True:
            node: str | None = None
            try:
                node = await self.leader()
                return await self.ask(make(node), kind, retry.attempt_s)
            except DLedgerError as error:
                if node is not None and isinstance(error, LEADER_FAILED):
                    self._leader_failed(node, error)
                await retry.failed(error)

    async def leader(self) -> str:
        """Return the presumed leader; query all nodes if none is known.

        Raises:
            NoLeaderError: no node that responded knows a leader.
            UnreachableError: no node responded.
        """
        if self.leader_id is None:
            async with self._discovery:
                if self.leader_id is None:
                    self.leader_id = await self._discover()
        return self.leader_id

    async def connect_leader(self) -> None:
        """Connect to the leader if possible: concurrent requests then leave in their order."""
        with contextlib.suppress(DLedgerError):
            await self._channel(await self.leader(), CONNECT_TIMEOUT_S)

    def _leader_failed(self, node_id: str, error: DLedgerError) -> None:
        if self.leader_id != node_id:
            return
        hint = error.leader_id if isinstance(error, NotLeaderError) else None
        self.leader_id = hint if hint in self.peers and hint != node_id else None

    async def _discover(self) -> str:
        failures: list[DLedgerError] = []
        async with aclosing(as_responded(map(self.metadata, self.peers))) as responses:
            async for response in responses:
                if isinstance(response, DLedgerError):
                    failures.append(response)
                elif response.leader_id is not None:
                    return self._known(response.leader_id)
        raise self._no_leader(failures)

    def _known(self, leader_id: str) -> str:
        if leader_id not in self.peers:
            remedy = "use the group's own peers string, ids included"
            raise BadRequestError(f"the leader {leader_id} is not in the peers string", "peers", remedy)
        return leader_id

    def _no_leader(self, failures: Sequence[DLedgerError]) -> DLedgerError:
        for failure in failures:
            if isinstance(failure, (UnknownGroupError, BadRequestError, ClosedError)):
                return failure
        if len(failures) < len(self.peers):
            remedy = "a majority of its nodes must run"
            return NoLeaderError("no node leads the group", f"group {self.group}", remedy)
        addresses = ", ".join(peer.address for peer in self.peers.values())
        remedy = "check that they run and the peers string"
        return UnreachableError(f"no node of group {self.group} responded", addresses, remedy)

    async def metadata(self, node_id: str) -> MetadataResponse | DLedgerError:
        """Ask one node for the leader, for at most a second."""
        request = MetadataRequest(group=self.group, remote_id=node_id)
        try:
            return await self.ask(request, MetadataResponse, ASK_TIMEOUT_S)
        except ConnectionLostError as error:
            peer = self.peers[node_id]
            if not await speaks_tls(peer.host, peer.port, ASK_TIMEOUT_S):
                return error
            remedy = "use --protocol dledger with --tls-ca and --token-file, or a port without TLS"
            return BadRequestError("the port speaks TLS, the protocol dledger-java does not", peer.address, remedy)
        except DLedgerError as error:
            return error

    async def ask_all(self) -> dict[str, MetadataResponse | DLedgerError]:
        """Ask every node for the leader; raise UnreachableError or UnknownGroupError if all fail."""
        found = dict(zip(self.peers, await asyncio.gather(*map(self.metadata, self.peers)), strict=True))
        failures = [response for response in found.values() if isinstance(response, DLedgerError)]
        if len(failures) == len(found):
            raise self._no_leader(failures)
        return found

    async def close(self) -> None:
        """Close all connections and open no other one."""
        self._closed = True
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._channels.clear()

"""Requests to nodes: one connection per node, opened when needed, with many requests in flight."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Sequence
from typing import Any, Final, Generic, NamedTuple, TypeVar

from dledger_core.checksum import Buffer
from dledger_core.client.routing.send_window import SendWindow
from dledger_core.client.routing.silence import CONNECT_S, PROBE_TICKS, SILENT_TICKS, Silence, SilenceWatch, WhenSilent
from dledger_core.config import Peer
from dledger_core.errors import (
    ConfigError,
    DLedgerError,
    ProtocolError,
    RequestTimedOutError,
    UnreachableError,
    error_from_wire,
)
from dledger_core.net import messages
from dledger_core.net.connection import Connection
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.dialing import WrongNodeError, connect
from dledger_core.net.frame import Frame
from dledger_core.net.hello import Hello
from dledger_core.net.protocol import Type

CONNECT_TIMEOUT_S: Final = 3.0
_T = TypeVar("_T")


async def as_responded(asked: Iterable[Coroutine[Any, Any, _T]]) -> AsyncGenerator[_T, None]:
    """Run coroutines side by side and yield their results as they arrive; closing the generator cancels the others."""
    tasks = [asyncio.create_task(each) for each in asked]
    try:
        for done in asyncio.as_completed(tasks):
            yield await done
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class ConnectionLostError(UnreachableError):
    """The connection was lost after the request was sent: it may or may not have taken effect."""


class SilentError(ConnectionLostError):
    """The node is silent, and another one can serve the request."""


class ClosedError(ConfigError):
    """The client was closed: a call in progress sends no further request."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*(args or ("the client is closed", "", "make a new one")))


class _Waiting(NamedTuple, Generic[_T]):
    """A request without a response; times are those of the event loop."""

    future: asyncio.Future[_T]
    when_silent: WhenSilent
    timeout_s: float
    expires: float


class Unanswered(Generic[_T]):
    """The requests of one connection without a response, by number; the response of each is a ``_T``.

    Invariant: a number names one request of a connection, so that a late response, or one that nothing waits for,
    reaches no other caller (``test_late_response_after_timeout_is_dropped``).
    """

    def __init__(self, address: str) -> None:
        self._address = address
        self._waiting: dict[int, _Waiting[_T]] = {}
        self._timer: asyncio.Handle | None = None
        self._timer_at = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    async def response(
        self,
        number: int,
        send: Callable[[], object],
        timeout_s: float,
        when_silent: WhenSilent = WhenSilent.WAIT,
    ) -> _T:
        """Send a request and wait for its response.

        Raises:
            SilentError: ``left`` was called for requests of this kind.
            ConnectionLostError: the connection was lost.
            RequestTimedOutError: no response arrived in time.
            DLedgerError: the error that ``settle`` got.
        """
        future = self.expect(number, timeout_s, when_silent)
        try:
            send()
            return await future
        finally:
            self.forget(number)

    def expect(self, number: int, timeout_s: float, when_silent: WhenSilent) -> asyncio.Future[_T]:
        """Return the future of the response to a request that is sent next; ``forget`` it whatever happens."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[_T] = loop.create_future()
        expires = loop.time() + timeout_s
        self._waiting[number] = _Waiting(future, when_silent, timeout_s, expires)
        # One timer for all requests: most of them have their response long before.
        if self._timer is None or expires < self._timer_at:
            self._set_timer(loop, expires)
        return future

    def forget(self, number: int) -> None:
        """Wait for a response no longer."""
        self._waiting.pop(number, None)

    def settle(self, number: object, response: _T | DLedgerError) -> None:
        """Pass a response to its caller; drop it if the caller has stopped waiting."""
        waiting = self._waiting.get(number) if isinstance(number, int) else None
        if waiting is None or waiting.future.done():
            return
        if isinstance(response, DLedgerError):
            waiting.future.set_exception(response)
        else:
            waiting.future.set_result(response)

    def _set_timer(self, loop: asyncio.AbstractEventLoop, expires: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        # The time is kept here: for a timer that is due at once uvloop returns a handle that does not know its time
        # (test_requests_expire_whatever_event_loop_counts).
        self._timer, self._timer_at = loop.call_at(expires, self._expire, loop), expires

    def _expire(self, loop: asyncio.AbstractEventLoop) -> None:
        """Fail the requests that have expired, and wait for the next one."""
        self._timer, now = None, loop.time()
        for number, waiting in self._waiting.items():
            if waiting.expires <= now:
                values = {"seconds": round(waiting.timeout_s, 3)}
                self.settle(number, RequestTimedOutError("no response in time", self._address, "", values))
        left = [waiting.expires for waiting in self._waiting.values() if waiting.expires > now]
        if left:
            self._set_timer(loop, min(left))

    def has(self, kind: WhenSilent) -> bool:
        """Whether a request of a kind waits."""
        return any(waiting.when_silent is kind for waiting in self._waiting.values())

    def left(self, kind: WhenSilent) -> None:
        """Fail all requests of a kind because the node is silent."""
        for number in [number for number, waiting in self._waiting.items() if waiting.when_silent is kind]:
            self.settle(number, SilentError("the node is silent", self._address))

    def lost(self, reason: str) -> None:
        """Fail all requests because the connection was lost."""
        for number in self._waiting:
            self.settle(number, ConnectionLostError(reason, self._address))


class Channel:
    """A connection to one node; numbers the requests and passes each response to its caller.

    Args:
        peer: the node.
        on_request: called with each request.
        credentials: this side's TLS files and token.

    Attributes:
        window: the appends that are sent, and those that wait to be sent.
    """

    def __init__(
        self, peer: Peer, on_request: Callable[[], None] = lambda: None, credentials: Credentials = PLAINTEXT
    ) -> None:
        self.peer = peer
        self.window = SendWindow(peer.address)
        self._credentials = credentials
        self._on_request = on_request
        self._silence = Silence()
        self._connection: Connection | None = None
        self._unanswered = Unanswered[Frame](peer.address)
        self._last_request = 0
        self._is_leaving = False

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._connection is not None and self._connection.is_open and not self._is_leaving

    @property
    def in_flight(self) -> int:
        """Requests without a response."""
        return len(self._unanswered)

    @property
    def features(self) -> frozenset[str]:
        """The optional features that both sides support."""
        return frozenset() if self._connection is None else self._connection.peer_hello.features

    async def open(self, timeout_s: float) -> None:
        """Connect; raise UnreachableError, WrongNodeError, or the error that the node returned for hello."""
        self._connection = await connect(
            self.peer.host,
            self.peer.port,
            Hello(),
            self,
            timeout_s=timeout_s,
            credentials=self._credentials,
            identity=self.peer.node_id if self.peer.has_id else None,
        )

    @property
    def is_silent(self) -> bool:
        """Whether the node is silent."""
        return self._connection is not None and self._silence.is_silent(self._connection)

    def tick(self) -> bool:
        """Count a tick; ask a quiet node whether it runs; return whether it has become silent."""
        connection = self._connection
        if connection is None or not connection.is_open:
            return False
        quiet = self._silence.tick(connection, waits=self.in_flight > 0)
        if quiet == PROBE_TICKS:
            self._last_request += 1
            connection.send({**messages.ALIVE.encode(messages.AliveRequest()), "r": self._last_request})
        return quiet == SILENT_TICKS

    def has(self, kind: WhenSilent) -> bool:
        """Whether a request of a kind waits for its response."""
        return self._unanswered.has(kind)

    def abandon(self, kind: WhenSilent) -> None:
        """Fail all requests of a kind, and those that are not sent yet, because the node is silent."""
        self._unanswered.left(kind)
        self.window.abandon()

    async def request(
        self,
        header: dict[str, Any],
        *payload: Buffer,
        timeout_s: float,
        when_silent: WhenSilent = WhenSilent.WAIT,
        response_type: int | None = None,
    ) -> Frame:
        """Send a request and return its response.

        Args:
            header: without the request id.
            payload: buffers that do not change until the response arrives.
            timeout_s: how long to wait for the response.
            when_silent: what becomes of it if the node is silent.
            response_type: number of the response; that of the request plus 1 by default.

        Raises:
            UnreachableError: not sent.
            ConnectionLostError: sent, and the connection was lost, or the node is silent.
            RequestTimedOutError: sent, and no response arrived in time.
            DLedgerError: the error that the node returned.
        """
        connection = self._connection
        if connection is None or not self.is_open:
            raise UnreachableError("the connection is closed", self.peer.address)
        self._last_request = number = self._last_request + 1
        self._on_request()
        future = self._unanswered.expect(number, timeout_s, when_silent)
        try:
            connection.send({**header, "r": number}, *payload)
            frame = await future
        finally:
            self._unanswered.forget(number)
            if self._is_leaving:
                self._leave()
        if frame.header["t"] != (response_type or header["t"] + 1):
            error = ProtocolError("the response is of another type", self.peer.address, "", {"type": frame.header["t"]})
            connection.close(error)
            raise error
        return frame

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Pass a response to its caller."""
        del connection
        if frame.header["t"] == Type.GOAWAY:
            self._is_leaving = True
            self._leave()
        elif frame.header["t"] == Type.FAILURE:
            fields = frame.header.get("e")
            error = error_from_wire(fields if isinstance(fields, dict) else {})
            self._unanswered.settle(frame.header.get("r"), error)
        else:
            self._unanswered.settle(frame.header.get("r"), frame)

    def _leave(self) -> None:
        """Close the connection if the node asked for it, once all requests have their response."""
        if self._is_leaving and not self._unanswered and self._connection is not None:
            self._connection.close()

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Fail all requests without a response."""
        del connection
        self._unanswered.lost(f"the connection was lost: {error}" if error else "the node closed the connection")

    async def close(self) -> None:
        """Close the connection and wait until it is closed."""
        if self._connection is not None:
            self._connection.close()
            await self._connection.closed


class ChannelPool:
    """One channel per node, shared by all requests; a lost one is replaced at the next request.

    Args:
        peers: the nodes.
        on_silent: gets the channel of a node that has become silent.
        credentials: this side's TLS files and token.

    Attributes:
        peers: the nodes by id.
        connected: whether a node has accepted a connection before.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        on_silent: Callable[[Channel], None] = lambda channel: None,
        credentials: Credentials = PLAINTEXT,
    ) -> None:
        self._credentials = credentials
        self.connected = False
        self._are_configured = True
        self._watch = SilenceWatch(lambda: (*self._channels.values(), *self._retired), on_silent)
        self.peers = {str(peer.node_id): peer for peer in peers}
        self._channels: dict[str, Channel] = {}
        self._retired: list[Channel] = []
        self._connecting: dict[str, asyncio.Task[Channel]] = {}
        self._connecting_since: dict[str, float] = {}
        self._closed = False

    @property
    def in_flight(self) -> int:
        """Requests without a response, on all connections."""
        return sum(channel.in_flight for channel in (*self._channels.values(), *self._retired))

    async def update(self, peers: Sequence[Peer], *, are_configured: bool = False) -> None:
        """Set the nodes: new requests go to these, and idle connections to other addresses are closed.

        A connection with requests in flight stays for them: to lose it would leave their outcome unknown.

        Args:
            peers: the nodes.
            are_configured: they are those of the peers string, and none that a node has reported.
        """
        self._are_configured = are_configured
        self.peers = {str(peer.node_id): peer for peer in peers}
        left = [node for node, channel in self._channels.items() if self.peers.get(node) != channel.peer]
        self._retired += (self._channels.pop(node) for node in left)
        idle = [channel for channel in self._retired if not channel.in_flight]
        self._retired = [channel for channel in self._retired if channel.in_flight]
        await asyncio.gather(*(channel.close() for channel in idle))

    def address(self, node_id: str) -> str:
        """Return the node's address; the id of a node that is no longer a member."""
        peer = self.peers.get(node_id)
        return node_id if peer is None else peer.address

    def is_silent(self, node_id: str) -> bool:
        """Whether the node is silent, on its connection or while one is opened."""
        channel = self._channels.get(node_id)
        if channel is not None and channel.is_open:
            return channel.is_silent
        since = self._connecting_since.get(node_id)
        return since is not None and asyncio.get_running_loop().time() - since > CONNECT_S

    def present(self, node_id: str) -> Channel | None:
        """Return the node's channel if it is open and not silent."""
        channel = None if self._closed else self._channels.get(node_id)
        return channel if channel is not None and channel.is_open and not channel.is_silent else None

    def has(self, node_id: str, kind: WhenSilent) -> bool:
        """Whether a request of a kind waits for a response of the node."""
        channel = self._channels.get(node_id)
        return channel is not None and channel.has(kind)

    def abandon(self, node_id: str, kind: WhenSilent) -> None:
        """Fail all requests of a kind to a node, because it is silent."""
        channel = self._channels.get(node_id)
        if channel is not None:
            channel.abandon(kind)

    async def channel(self, node_id: str, timeout_s: float) -> Channel:
        """Return an open channel to the node.

        Raises:
            UnreachableError: no connection in time, or the node is no longer a member, or it has moved.
            WrongNodeError: the peers string names another node at its address.
            ClosedError: the pool is closed.
        """
        if self._closed:
            raise ClosedError
        channel = self._channels.get(node_id)
        if channel is not None and channel.is_open:
            return channel
        peer = self.peers.get(node_id)
        if peer is None:
            raise UnreachableError("the node is no longer a member", node_id)
        # One attempt for all callers, and a cancelled caller does not end it: otherwise each caller of a node that is
        # down opens a connection of its own.
        task = self._connecting.get(node_id)
        if task is None:
            self._connecting_since[node_id] = asyncio.get_running_loop().time()
            task = self._connecting[node_id] = asyncio.create_task(self._connect(peer))
            task.add_done_callback(lambda done: self._connected(node_id, done))
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(task)
        except TimeoutError:
            raise UnreachableError("cannot connect: no response in time", peer.address) from None
        except DLedgerError as error:
            raise type(error)(*error.args) from None  # several callers may raise the same failure

    async def _connect(self, peer: Peer) -> Channel:
        channel = Channel(peer, self._watch.start, self._credentials)
        try:
            await channel.open(CONNECT_TIMEOUT_S)
        except WrongNodeError as error:
            if self._are_configured:
                raise
            # The nodes have moved since they reported their addresses: they report the new ones soon.
            raise UnreachableError(*error.args) from None
        self.connected = True
        if self.peers.get(str(peer.node_id)) != peer:  # the members changed meanwhile
            await channel.close()
            raise UnreachableError("the node is no longer a member", peer.address)
        left = self._channels.get(str(peer.node_id))
        if left is not None and left.in_flight:
            self._retired.append(left)  # its node stops, and responds before it closes the connection
        self._channels[str(peer.node_id)] = channel
        return channel

    def _connected(self, node_id: str, task: asyncio.Task[Channel]) -> None:
        self._connecting.pop(node_id, None)
        self._connecting_since.pop(node_id, None)
        if not task.cancelled():
            task.exception()  # retrieved, because all callers may have stopped waiting

    async def close(self) -> None:
        """Close all connections, wait until they are closed, and open no other one."""
        self._closed = True
        self._watch.stop()
        tasks = list(self._connecting.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.gather(*(channel.close() for channel in (*self._channels.values(), *self._retired)))
        self._channels.clear()
        self._retired.clear()

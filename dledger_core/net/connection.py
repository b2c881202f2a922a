"""Connections between two sides that speak our protocol: ``connect`` to a node, ``serve`` a port; hello first.

A connection belongs to the event loop that made it. Handlers are plain callbacks: the frames of one read are delivered
in one iteration of the loop, without a task for any of them; those of a client that sends very many in several turns.
"""

from __future__ import annotations

import asyncio
import logging
import math
import socket
import ssl
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol, cast

from dledger_core.checksum import Buffer
from dledger_core.errors import (
    ConfigError,
    DLedgerError,
    ProtocolError,
    UnauthenticatedError,
    UnreachableError,
    error_from_wire,
)
from dledger_core.net.client_turns import RECEIVE_S, TURN_S, ClientTurns
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.deadlines import Deadlines, DeadlineWatch
from dledger_core.net.fields import int_field
from dledger_core.net.frame import LARGE_REQUESTS, Frame, FrameDecoder, encode_frame
from dledger_core.net.hello import Hello, negotiate
from dledger_core.net.log_bursts import BurstFilter
from dledger_core.net.pieces import BulkQueue
from dledger_core.net.protocol import (
    CLIENT_CONTAINERS_MAX,
    CLIENT_FRAME_BYTES_MAX,
    CLIENT_HEADER_BYTES_MAX,
    FRAME_BYTES_MAX,
    HELLO_BYTES_MAX,
    HELLO_TIMEOUT_S,
    PREFACE,
    Type,
)
from dledger_core.net.room import Room, RoomLimits, source_of
from dledger_core.net.tls import PeerCertificate, handshake_error, speaks_tls
from dledger_core.net.tls_listener import HandshakeLimits, TlsListener
from dledger_core.net.unencrypted import Unencrypted

WRITE_HIGH_BYTES: Final = 4 << 20
WRITE_LOW_BYTES: Final = 1 << 20
CLIENT_WRITE_HIGH_BYTES: Final = 1 << 20
CLIENT_WRITE_LOW_BYTES: Final = 256 << 10
PEER_UNSENT_BYTES: Final = 128 << 10
"""Bytes between nodes that the transport, and the kernel, take before the network does: a heartbeat waits for them."""
CLOSE_TIMEOUT_S: Final = 5.0
KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds and count: an idle connection to a lost machine ends after half a minute."""
_TLS_HANDSHAKE: Final = 0x16
_TRIAL_S: Final = 1.0
"""Time to find out whether a port that closes connections speaks TLS."""
_FOREIGN: Final = (0, 1)
_BACKLOG: Final = 1024

_log = logging.getLogger(__name__)
_log.addFilter(BurstFilter())


class Handler(Protocol):
    """The user of a connection; called from the event loop, must not block."""

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Receive one frame. Raising ProtocolError closes the connection."""

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """The connection closed; called once, and only if hello had been accepted."""


class ByteBudget(Protocol):
    """Memory for what clients send."""

    def take(self, nbytes: int) -> None:
        """Take bytes; raise BusyError and take none if they do not fit."""

    def give(self, nbytes: int) -> None:
        """Give bytes back."""


class ServerSide(Protocol):
    """The listening side of a hello."""

    refused: Counter[str]
    """Number of connections and frames that were refused before a service saw them, by the error's name."""

    def enter(self, connection: Connection) -> None:
        """Count a new connection whose address is known; raise QuotaExceededError if that has far too many."""

    def check_room(self, connection: Connection) -> None:
        """Raise BusyError if no further connection of a client, or of one at this address, is accepted."""

    def on_hello(self, connection: Connection, hello: Hello) -> tuple[Hello, Handler]:
        """Return this side's hello and the connection's handler, or raise the error to respond with."""


class Connection(asyncio.BufferedProtocol):
    """One side of a connection, created by ``connect`` and ``serve`` only.

    A listening side may serve another protocol, ``foreign``: a connection whose first byte is 0 or 1 (the length of a
    frame of that protocol) is passed to a protocol that ``foreign`` creates, and then only forwards bytes and events.
    """

    # CPython reads the attributes of an object with more than 30 slowly, unless they are slots.
    __slots__ = (
        "_budget",
        "_bulk",
        "_charged",
        "_closing",
        "_connected",
        "_decoder",
        "_error",
        "_foreign",
        "_handler",
        "_hello",
        "_hello_timeout_s",
        "_identity",
        "_is_full",
        "_is_paused",
        "_loop",
        "_other",
        "_port_turns",
        "_preface_done",
        "_reads",
        "_server",
        "_started_s",
        "_timer",
        "_transport",
        "_turns",
        "_unencrypted",
        "_waits_turn",
        "_writable",
        "accepted",
        "certificate",
        "closed",
        "features",
        "peer_address",
        "peer_hello",
        "principal",
        "received_bytes",
        "received_frames",
        "source",
        "version",
    )

    def __init__(
        self,
        *,
        server: ServerSide | None = None,
        hello: Hello | None = None,
        handler: Handler | None = None,
        hello_timeout_s: float,
        foreign: Callable[[], asyncio.Protocol] | None = None,
        budget: ByteBudget | None = None,
        identity: str | None = "",
        turns: ClientTurns | None = None,
    ) -> None:
        self._identity = identity
        self._foreign = foreign
        self._budget = budget
        self._charged = 0
        self._other: asyncio.Protocol | None = None
        self._loop = asyncio.get_running_loop()
        self._server = server
        self._hello = hello
        self._handler = handler
        self._hello_timeout_s = hello_timeout_s
        self._decoder = FrameDecoder(HELLO_BYTES_MAX)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._timer: asyncio.TimerHandle | None = None
        self._preface_done = server is None
        self._writable: asyncio.Future[None] | None = None
        self._bulk = BulkQueue()
        self._turns: ClientTurns | None = None  # before hello there is one frame
        self._port_turns = turns
        self._started_s = 0.0
        self._waits_turn = False
        self._is_paused = False
        self._is_full = False
        self._unencrypted: Unencrypted | None = None
        self._reads = True
        self._connected = False
        self._closing = False
        self._error: Exception | None = None
        self.closed: asyncio.Future[Exception | None] = self._loop.create_future()
        self.accepted: asyncio.Future[None] = self._loop.create_future()
        self.peer_hello: Hello = Hello()
        self.version = 0
        self.features: frozenset[str] = frozenset()
        self.peer_address = ""
        self.source = ""
        self.principal = ""
        self.certificate: PeerCertificate | None = None
        self.received_bytes = 0
        self.received_frames = 0

    def __repr__(self) -> str:
        state = "closed" if self.closed.done() else "closing" if self._closing else "open"
        return f"<Connection {self.peer_address} {state}>"

    @property
    def who(self) -> str:
        """The other side for logs: its principal, where there is one, and its address."""
        return f"{self.principal}@{self.peer_address}" if self.principal else self.peer_address

    # --- for users ------------------------------------------------------------------------------------------------

    def send(self, header: dict[str, Any], *payload: Buffer) -> None:
        """Queue one frame; payload buffers must not change afterwards. Do nothing once closed."""
        self.send_buffers(encode_frame(header, *payload))

    def send_buffers(self, buffers: list[Buffer]) -> None:
        """Queue one or more encoded frames. Do nothing once closed."""
        if self._closing:
            return
        if self._unencrypted is not None and self._unencrypted.must_wait(buffers):
            self._unencrypted.add(buffers)
            self._encrypt(self._unencrypted)
        elif len(buffers) == 1:
            self._transport.write(buffers[0])
        else:
            self._transport.writelines(buffers)

    def _encrypt(self, unencrypted: Unencrypted) -> None:
        """Pass parts to TLS until it has much that the other side has not taken."""
        while unencrypted and not self._is_full:
            self._transport.write(unencrypted.take())

    def send_bulk(self, buffers: list[Buffer]) -> None:
        """Queue one encoded frame that may be large, after the earlier ones of this kind; all other frames overtake it.

        Do nothing once closed. ``close`` drops what has not left.
        """
        if not self._closing:
            self._bulk.add(buffers)
            self._send_bulk()

    def _send_bulk(self) -> None:
        while self._bulk and self._writable is None and not self._closing:
            self.send_buffers(self._bulk.take())

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return not self._closing

    @property
    def is_inside_frame(self) -> bool:
        """Whether a frame of the other side has begun and not ended."""
        return self._decoder.is_inside_frame

    @property
    def is_reading(self) -> bool:
        """Whether this side reads from the socket, now or in its next turn."""
        return not self._closing and not self._is_paused

    @property
    def write_buffer_bytes(self) -> int:
        """Bytes queued that the kernel has not taken yet."""
        if self.closed.done():
            return 0
        unencrypted = 0 if self._unencrypted is None else self._unencrypted.nbytes
        return self._transport.get_write_buffer_size() + self._bulk.nbytes + unencrypted

    async def drained(self) -> None:
        """Wait while much is queued, for a node's client more than 1 MiB; return at once otherwise, and when closed."""
        if self._writable is not None and not self.closed.done():
            await asyncio.shield(self._writable)

    def pause_reading(self) -> None:
        """Stop reading from the socket; frames in the receive buffer are still delivered."""
        self._is_paused = True
        self._update_reading()

    def resume_reading(self) -> None:
        """Read again after ``pause_reading``."""
        self._is_paused = False
        self._update_reading()

    def _update_reading(self) -> None:
        reads = not self._is_paused and not self._waits_turn
        if reads is self._reads or self._closing:
            return
        self._reads = reads
        if reads:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def charge_to(self, budget: ByteBudget) -> None:
        """Charge the large payloads that begin from now on to another budget than the port's."""
        self._budget = budget

    def limit_unacknowledged(self, seconds: float) -> None:
        """Let the kernel break the connection if sent bytes stay unacknowledged for this time, where it supports that.

        Not for a side whose peer may stop reading for longer.
        """
        sock = self._transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_USER_TIMEOUT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(seconds * 1000))

    def close(self, error: Exception | None = None) -> None:
        """Send queued frames and close; ``closed`` and ``on_close`` get ``error``."""
        if self._closing:
            return
        self._closing = True
        self._error = error
        self._cancel_timer()
        if self._connected:
            while self._unencrypted:
                self._transport.write(self._unencrypted.take())
            self._transport.close()
            self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self, error: Exception | None = None) -> None:
        """Close at once; queued frames are lost."""
        self._closing = True
        self._error = self._error or error
        if self._connected and not self.closed.done():
            self._transport.abort()

    # --- called by the transport ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start hello."""
        self._transport = cast("asyncio.Transport", transport)
        self._connected = True
        if self._closing:  # closed before it was made
            self._transport.abort()
            return
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
            for name, value in KEEPALIVE.items():
                if hasattr(socket, name):
                    sock.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        peer = transport.get_extra_info("peername")
        self.peer_address = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)
        self.source = source_of(peer[0]) if isinstance(peer, tuple) else self.peer_address
        if self._server is not None and not self._enter(self._server):
            return
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        ssl_object = transport.get_extra_info("ssl_object")
        if ssl_object is not None:
            self._unencrypted = Unencrypted()
            self.certificate = PeerCertificate.of(ssl_object)
            if self._hello is not None and not self._is_expected_node():
                return
        self._timer = self._loop.call_later(self._hello_timeout_s, self._hello_late)
        if self._hello is not None:
            self._transport.write(PREFACE)
            self.send(self._hello.to_header())

    def _enter(self, server: ServerSide) -> bool:
        """Whether the other side's address may have one more connection; it gets no response if not."""
        try:
            server.enter(self)
        except DLedgerError as error:
            server.refused[error.name] += 1
            _log.warning("connection closed: peer=%s error=%s", self.peer_address, error)
            self.abort(error)
            return False
        return True

    def _is_expected_node(self) -> bool:
        """Whether the other side is the node that was dialed; it gets nothing, above all no token, if it is not."""
        certificate = self.certificate
        found = "" if certificate is None else certificate.identity
        # Any node will do: a certificate that other programs may have too, with a common name alone, is not enough.
        is_any = self._identity is None and certificate is not None and certificate.is_ours
        if found and (found == self._identity or is_any):
            return True
        self.abort(
            UnauthenticatedError(
                f"the certificate at this address is of {found or 'no node'}, not of {self._identity or 'a node'}",
                self.peer_address,
                "correct the peers string, or the node's certificate",
            )
        )
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory to receive into."""
        del sizehint
        return self._decoder.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver every complete frame, those of a client turn by turn."""
        self._decoder.buffer_updated(nbytes)
        self.received_bytes += nbytes
        if self._other is not None:
            self._pass_on(self._other)
            return
        if self._turns is not None:
            self._turns.use(self._turn_of, nbytes * RECEIVE_S)
        if not self._waits_turn:
            self._deliver()

    def _deliver(self) -> None:
        """Deliver what was received; a client's as far as its turn lasts."""
        if self._turns is None:
            self._deliver_until(math.inf)
        else:
            self._take_turn(self._turns, self._turns.left_s(self._turn_of))
        self._update_reading()

    def _take_turn(self, turns: ClientTurns, seconds: float) -> None:
        begun, self._started_s = time.perf_counter(), 0.0
        self._deliver_until(begun + seconds)
        used_s = time.perf_counter() - begun + self._started_s
        turns.use(self._turn_of, used_s)
        if used_s >= seconds and self._decoder.is_inside_frame:  # frames are left, or a large one arrives
            self._waits_turn = True
            turns.wait(self._turn_of, partial(self._next_turn, turns))

    def _next_turn(self, turns: ClientTurns) -> None:
        """Continue with the frames that were received; others had their turn meanwhile."""
        self._waits_turn = False
        if not self._closing:
            self._take_turn(turns, TURN_S)
            self._update_reading()

    @property
    def _turn_of(self) -> str:
        return self.principal or self.source

    def use_turn(self, seconds: float) -> None:
        """Count work that the frame being delivered starts and that runs later as part of this turn."""
        self._started_s += seconds

    def _deliver_until(self, ends: float) -> None:
        """Deliver at least one frame."""
        decoder = self._decoder
        try:
            if not self._preface_done and not self._take_preface():
                return
            while not self._closing and (frame := decoder.next_frame()) is not None:
                self.received_frames += 1
                if self._charged:
                    self._give_back()  # the handler takes them again
                if self._handler is not None and self.version:
                    self._handler.on_frame(self, frame)
                else:
                    self._on_hello_frame(frame)
                if time.perf_counter() + self._started_s >= ends:
                    return
        except ProtocolError as error:
            self._refuse(error)

    def pause_writing(self) -> None:
        """Record that the queue of bytes to send is long."""
        self._is_full = True
        if self._other is not None:
            self._other.pause_writing()
        elif self._writable is None:
            self._writable = self._loop.create_future()

    def resume_writing(self) -> None:
        """Record that the queue of bytes to send is short again."""
        self._is_full = False
        if self._other is not None:
            self._other.resume_writing()
        if self._unencrypted:
            self._encrypt(self._unencrypted)
        if self._is_full:
            return
        if self._writable is not None:
            self._writable.set_result(None)
            self._writable = None
        self._send_bulk()

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete all waiting futures and call the handler, once."""
        self._closing = True
        self._bulk.clear()
        if self._unencrypted is not None:
            self._unencrypted.clear()
        self._cancel_timer()
        self._give_back()
        self.resume_writing()
        error = self._error or exc
        if self.closed.done():
            return
        self.closed.set_result(error)
        if self._other is not None:
            self._other.connection_lost(exc)
        if not self.accepted.done():
            self.accepted.set_exception(error or _ClosedEarlyError("the connection closed during hello"))
            self.accepted.exception()  # marks it as retrieved: on a listening side no caller awaits it
        elif self._handler is not None:
            self._handler.on_close(self, error)

    # --- another protocol -----------------------------------------------------------------------------------------

    def _switch_protocol(self, foreign: Callable[[], asyncio.Protocol]) -> None:
        self._cancel_timer()
        try:
            if self._server is not None:
                self._server.check_room(self)
        except DLedgerError as error:
            self.abort(error)
            return
        self._other = foreign()
        self._other.connection_made(self._transport)
        self._pass_on(self._other)

    def _pass_on(self, other: asyncio.Protocol) -> None:
        data = bytes(self._decoder.buffered)
        self._decoder.skip(len(data))
        other.data_received(data)

    # --- hello ----------------------------------------------------------------------------------------------------

    def _take_preface(self) -> bool:
        """Whether the preface is complete; refuse another one at its first wrong byte."""
        have = bytes(self._decoder.buffered[: len(PREFACE)])
        if self._foreign is not None and have[0] in _FOREIGN:
            self._switch_protocol(self._foreign)
            return False
        if have[0] == _TLS_HANDSHAKE:
            raise ProtocolError("the other side speaks TLS, this port does not", self.peer_address)
        if have[:4] != PREFACE[: min(len(have), 4)]:
            raise ProtocolError("not the protocol of this port", self.peer_address, "", {"first_bytes": have.hex()})
        if len(have) < len(PREFACE):
            return False
        if have != PREFACE:
            raise ProtocolError("unknown preface version", self.peer_address, "", {"version": have[4]})
        self._decoder.skip(len(PREFACE))
        self._preface_done = True
        return True

    def _on_hello_frame(self, frame: Frame) -> None:
        kind = frame.header["t"]
        if self._server is not None:
            if kind != Type.HELLO:
                raise ProtocolError("the first frame is not a hello", self.peer_address, "", {"type": kind})
            self._respond_to_hello(self._server, Hello.from_header(frame.header))
        elif kind == Type.FAILURE:
            fields = frame.header.get("e")
            self.abort(error_from_wire(fields if isinstance(fields, dict) else {}))
        elif kind == Type.HELLO_OK:
            theirs = Hello.from_header(frame.header)
            # The other side may choose only a version and features that this side offered.
            negotiate(cast("Hello", self._hello), theirs)
            self._accept(theirs)
        else:
            raise ProtocolError("the response to hello is missing", self.peer_address, "", {"type": kind})

    def _respond_to_hello(self, server: ServerSide, hello: Hello) -> None:
        try:
            response, handler = server.on_hello(self, hello)
        except DLedgerError as error:
            server.refused[error.name] += 1
            self.send({"t": Type.FAILURE, "e": error.to_wire()})
            _log.warning("hello refused: peer=%s error=%s", self.peer_address, error)
            self.close(error)
            return
        self._handler = handler
        self.send(response.to_response())
        self._accept(replace(hello, versions=response.versions, features=response.features, token=""))

    def _accept(self, theirs: Hello) -> None:
        self.peer_hello = theirs
        self.version, self.features = theirs.versions[0], theirs.features
        self._cancel_timer()
        if self._server is not None and theirs.role == "client":
            self._turns = self._port_turns
            self._decoder.raise_limit(
                CLIENT_FRAME_BYTES_MAX,
                header_bytes=CLIENT_HEADER_BYTES_MAX,
                large_types=LARGE_REQUESTS,
                admit=self._admit,
                containers_max=CLIENT_CONTAINERS_MAX,
            )
            self._transport.set_write_buffer_limits(high=CLIENT_WRITE_HIGH_BYTES, low=CLIENT_WRITE_LOW_BYTES)
        else:
            is_peer = theirs.role == "peer" and (self._hello is None or self._hello.role == "peer")
            self._decoder.raise_limit(FRAME_BYTES_MAX, takes_pieces=is_peer)
            if is_peer:
                self._limit_unsent()
        self.accepted.set_result(None)

    def _limit_unsent(self) -> None:
        self._transport.set_write_buffer_limits(high=PEER_UNSENT_BYTES, low=PEER_UNSENT_BYTES // 2)
        sock = self._transport.get_extra_info("socket")
        if sock is not None and hasattr(socket, "TCP_NOTSENT_LOWAT"):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, PEER_UNSENT_BYTES)

    def _admit(self, header: dict[str, Any], nbytes: int) -> bool:
        """Charge a client's large payload when its frame begins; if it does not fit, refuse the request."""
        if self._budget is None:
            return True
        try:
            self._budget.take(nbytes)
        except DLedgerError as error:
            if self._server is not None:
                self._server.refused[error.name] += 1
            self.send({"t": Type.FAILURE, "r": int_field(header, "r", 1), "e": error.to_wire()})
            return False
        self._charged = nbytes
        return True

    def _give_back(self) -> None:
        if self._charged and self._budget is not None:
            charged, self._charged = self._charged, 0
            self._budget.give(charged)

    def _hello_late(self) -> None:
        self._refuse(ProtocolError("no hello in time", self.peer_address, "", {"seconds": self._hello_timeout_s}))

    def _refuse(self, error: ProtocolError) -> None:
        _log.warning("connection closed: peer=%s error=%s", self.peer_address, error)
        self.abort(error)

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


async def connect(
    host: str,
    port: int,
    hello: Hello,
    handler: Handler,
    *,
    timeout_s: float,
    credentials: Credentials = PLAINTEXT,
    identity: str | None = "",
) -> Connection:
    """Open a connection and exchange hello. All connections to native nodes start here.

    Args:
        host: name or address.
        port: TCP port.
        hello: this side's introduction.
        handler: gets the frames.
        timeout_s: limit on the time for all of it, hello included.
        credentials: TLS and token.
        identity: with TLS: the node id in the certificate of the other side; None = any node's.

    Returns:
        A connection whose hello was accepted; ``peer_hello`` is the response.

    Raises:
        UnreachableError: no connection, or no response in time.
        UnauthenticatedError: one side does not accept the certificate or the token of the other one.
        DLedgerError: the other side's response to hello.
    """
    try:
        return await _open(host, port, hello, handler, timeout_s=timeout_s, credentials=credentials, identity=identity)
    except _ClosedEarlyError as error:
        if (reason := await _mismatch(host, port, hello, credentials)) is not None:
            raise UnauthenticatedError(reason[0], f"{host}:{port}", reason[1]) from None
        raise UnreachableError(*error.args) from None


async def _mismatch(host: str, port: int, hello: Hello, credentials: Credentials) -> tuple[str, str] | None:
    """Return the problem and its remedy if one side of a closed connection speaks TLS and the other one does not.

    Neither trial sends a token.
    """
    is_node = hello.role == "peer"
    if credentials.context() is None:
        if not await speaks_tls(host, port, _TRIAL_S):
            return None
        node = "give this node --tls-cert, --tls-key, --peer-ca and --tokens"
        client = "give --tls-ca, and --token-file or --tls-cert"
        return "the port speaks TLS, this side does not", node if is_node else client
    try:
        trial = await _open(host, port, Hello(), _Deaf(), timeout_s=_TRIAL_S, credentials=PLAINTEXT, identity=None)
    except DLedgerError:
        return None
    trial.close()
    node = "start it with --tls-cert, --tls-key, --peer-ca and --tokens"
    remedy = node if is_node else f"{node}; on a network that you trust, leave out --tls-ca and the token"
    return "the port does not speak TLS, this side does", remedy


class _ClosedEarlyError(UnreachableError):
    """The other side closed the connection before hello was complete."""


class _Deaf:
    """The handler of a connection that is closed at once."""

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Ignore a frame."""

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Ignore the end."""


async def _open(
    host: str,
    port: int,
    hello: Hello,
    handler: Handler,
    *,
    timeout_s: float,
    credentials: Credentials,
    identity: str | None,
) -> Connection:
    loop = asyncio.get_running_loop()
    address = f"{host}:{port}"
    connection: Connection | None = None
    delivered = False
    try:
        context, token = credentials.context(), credentials.token()
        introduction = replace(hello, token=token) if token else hello
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                lambda: Connection(
                    hello=introduction, handler=handler, hello_timeout_s=timeout_s + 1, identity=identity
                ),
                host,
                port,
                ssl=context,
            )
            await asyncio.shield(connection.accepted)
        delivered = True
    except DLedgerError as error:
        where = f"{error.where}, {address}" if error.where and address not in error.where else error.where or address
        raise type(error)(error.what, where, error.remedy, error.values) from None
    except ssl.SSLError as error:
        if not isinstance(error, (ssl.SSLEOFError, ssl.SSLZeroReturnError)):
            raise handshake_error(error, address) from None
        raise _ClosedEarlyError("cannot connect: the node closed the connection", address, "retry") from None
    except (OSError, TimeoutError, UnicodeError) as error:  # a UnicodeError: not a host name
        reason = "no response in time" if isinstance(error, TimeoutError) else str(error)
        remedy = "check that the node runs and that the address is right"
        is_closed = isinstance(error, ConnectionResetError | ConnectionAbortedError)
        kind = _ClosedEarlyError if is_closed else UnreachableError
        values = {"unknown_host": host} if isinstance(error, socket.gaierror) else {}
        raise kind(f"cannot connect: {reason}", address, remedy, values) from None
    finally:
        # Also if the caller was cancelled after hello was accepted: no other code has the connection.
        if connection is not None and not delivered:
            connection.abort()
    return connection


class Server(ServerSide):
    """A listening port and the connections made to it.

    Attributes:
        port: the port it listens on (useful after asking for port 0).
        connections: the open ones whose hello was accepted.
        room: counts the connections.
    """

    def __init__(
        self,
        accept: Callable[[Hello], Hello],
        handler_for: Callable[[Connection], Handler],
        foreign: Callable[[], asyncio.Protocol] | None = None,
        budget: ByteBudget | None = None,
        deadlines: Deadlines | None = None,
        room: RoomLimits | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        handshakes: HandshakeLimits | None = None,
    ) -> None:
        self.room = Room(room or RoomLimits())
        self._tls = tls
        self._handshake_limits = handshakes or HandshakeLimits()
        self._accept = accept
        self._foreign = foreign
        self._budget = budget
        self._deadlines = deadlines
        self._look: asyncio.TimerHandle | None = None
        self._handler_for = handler_for
        self._listener: asyncio.Server | TlsListener | None = None
        self.port = 0
        self.refused: Counter[str] = Counter()
        self.connections: set[Connection] = set()
        self._all: set[Connection] = set()

    @property
    def clients(self) -> int:
        """Number of connections of clients whose hello was accepted."""
        return sum(connection.peer_hello.role == "client" for connection in self.connections)

    @property
    def handshakes(self) -> Counter[str]:
        """Number of connections by the result of their TLS handshake; none of a port in plaintext."""
        return self._listener.results if isinstance(self._listener, TlsListener) else Counter()

    async def start(self, host: str, port: int, hello_timeout_s: float) -> None:
        """Start to listen; raise ConfigError if the port is not available."""
        turns = ClientTurns()

        def make() -> Connection:
            connection = Connection(
                server=self,
                hello_timeout_s=hello_timeout_s,
                foreign=self._foreign,
                budget=self._budget,
                turns=turns,
            )
            self._all.add(connection)
            connection.closed.add_done_callback(lambda _: self._forget(connection))
            try:
                self.room.enter()
            except DLedgerError as error:
                self.refused[error.name] += 1
                connection.abort(error)  # as soon as it is made
            return connection

        try:
            self._listener = await self._listen(make, host, port, hello_timeout_s)
        except OSError as error:
            remedy = "stop the process that uses the port, or choose another address"
            raise ConfigError(f"cannot listen: {error.strerror or error}", f"{host}:{port}", remedy) from None
        self.port = self._listener.sockets[0].getsockname()[1]
        if self._deadlines is not None:
            self._look_later(DeadlineWatch(self._deadlines), self._deadlines.interval_s)

    async def _listen(
        self, make: Callable[[], Connection], host: str, port: int, timeout_s: float
    ) -> asyncio.Server | TlsListener:
        if self._tls is None:
            return await asyncio.get_running_loop().create_server(make, host, port, backlog=_BACKLOG)
        listener = TlsListener(make, self._tls, self._handshake_limits, timeout_s)
        await listener.start(host, port, _BACKLOG)
        return listener

    def _look_later(self, watch: DeadlineWatch, interval_s: float) -> None:
        loop = asyncio.get_running_loop()

        def look() -> None:
            clients = [connection for connection in self.connections if connection.peer_hello.role == "client"]
            watch.look(clients, loop.time())
            self._look = loop.call_later(interval_s, look)

        self._look = loop.call_later(interval_s, look)

    def on_hello(self, connection: Connection, hello: Hello) -> tuple[Hello, Handler]:
        """Negotiate version and features, call ``accept``, and return the connection's handler."""
        ours = self._accept(hello)
        if hello.role == "client":
            self.check_room(connection)
        version, features = negotiate(hello, ours)
        connection.peer_hello = hello
        handler = self._handler_for(connection)
        self.connections.add(connection)
        if hello.role == "peer":
            self.room.enter_as_node(connection.source)
        return replace(ours, versions=(version,), features=features), handler

    def enter(self, connection: Connection) -> None:
        """See ``ServerSide``."""
        self.room.enter_from(connection.source)

    def check_room(self, connection: Connection) -> None:
        """See ``ServerSide``."""
        self.room.check_client(connection.source)

    def _forget(self, connection: Connection) -> None:
        is_node = connection in self.connections and connection.peer_hello.role == "peer"
        self.room.leave(connection.source, is_node=is_node)
        self._all.discard(connection)
        self.connections.discard(connection)

    async def drain(self, timeout_s: float) -> None:
        """Stop listening, and wait until the clients have left, which they do once they have all responses.

        A connection that is closed while a client sends a request would leave the outcome unknown.
        """
        if self._listener is not None:
            self._listener.close()
        clients = [connection for connection in self.connections if connection.peer_hello.role == "client"]
        for connection in clients:
            connection.send({"t": Type.GOAWAY})
        if clients:
            await asyncio.wait([connection.closed for connection in clients], timeout=timeout_s)

    async def close(self) -> None:
        """Stop listening, close every connection and wait until all are closed."""
        if self._look is not None:
            self._look.cancel()
        if self._listener is not None:
            self._listener.close()
        open_ones = list(self._all)
        for connection in open_ones:
            connection.close()
        if open_ones:
            await asyncio.wait([connection.closed for connection in open_ones])
        if self._listener is not None:
            await self._listener.wait_closed()


async def serve(
    host: str,
    port: int,
    *,
    accept: Callable[[Hello], Hello],
    handler_for: Callable[[Connection], Handler],
    hello_timeout_s: float = HELLO_TIMEOUT_S,
    foreign: Callable[[], asyncio.Protocol] | None = None,
    budget: ByteBudget | None = None,
    deadlines: Deadlines | None = None,
    room: RoomLimits | None = None,
    tls: Callable[[], ssl.SSLContext] | None = None,
    handshakes: HandshakeLimits | None = None,
) -> Server:
    """Listen on a port.

    Args:
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        accept: gets the other side's hello; returns this side's (versions, features, logs), or raises the
            DLedgerError that refuses it.
        handler_for: creates the handler of an accepted connection (``connection.peer_hello`` is set).
        hello_timeout_s: time for the other side's hello, and with TLS for its handshake.
        foreign: creates the protocol of a connection that does not speak this one; None refuses such a connection.
        budget: memory for the large payloads of clients; None = no limit.
        deadlines: when to close clients' connections; None = never.
        room: connections of clients that it accepts; None = any number.
        tls: returns the context of each new connection; None = the port speaks plaintext.
        handshakes: rates of new connections with TLS.

    Raises:
        ConfigError: the port is not available.
    """
    server = Server(accept, handler_for, foreign, budget, deadlines, room, tls, handshakes)
    await server.start(host, port, hello_timeout_s)
    return server

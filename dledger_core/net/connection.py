"""One connection of the native protocol: passes bytes between a transport and a session, and frames to a handler.

A connection belongs to the event loop that made it. Handlers are plain callbacks: the frames of one read are delivered
in one iteration of the loop, without a task for any of them; those of a client that sends very many in several turns.
``dialing`` opens connections, ``listening`` accepts them.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import time
from collections.abc import Sequence
from functools import partial
from typing import Any, Final, Protocol, cast

from dledger_core.checksum import Buffer
from dledger_core.errors import DLedgerError, ProtocolError, UnreachableError
from dledger_core.net.frame import Frame, encode_frame
from dledger_core.net.hello import Hello
from dledger_core.net.limits.budget import ByteBudget, PayloadCharge
from dledger_core.net.limits.connection_limits import source_of
from dledger_core.net.limits.fair_queue import Fairness, FairShare
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.net.output import Output
from dledger_core.net.session import Session
from dledger_core.net.tls import PeerCertificate

WRITE_HIGH_BYTES: Final = 4 << 20
WRITE_LOW_BYTES: Final = 1 << 20
CLIENT_WRITE_HIGH_BYTES: Final = 1 << 20
CLIENT_WRITE_LOW_BYTES: Final = 256 << 10
PEER_UNSENT_BYTES: Final = 128 << 10
"""Bytes between nodes that the transport, and the kernel, take before the network does: a heartbeat waits for them."""
CLOSE_TIMEOUT_S: Final = 5.0
KEEPALIVE: Final = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 3}
"""Seconds, seconds and count: an idle connection to a lost machine ends after half a minute."""

_log = logging.getLogger(__name__)
_log.addFilter(BurstFilter())


class Handler(Protocol):
    """The user of a connection; called from the event loop, must not block."""

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Receive one frame. Raising ProtocolError closes the connection."""

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """The connection closed; called once, and only if hello had been accepted."""


class ClientHandler(Handler, Protocol):
    """The user of a client's connection."""

    def on_appends(self, connection: Connection, frames: Sequence[Frame]) -> bool:
        """Receive consecutive plain appends to one log (``messages.is_plain_append``), else as ``on_frame``.

        Return whether they were handled together, in much less time than one by one.
        """


class Side(Protocol):
    """The side that dialed, or the one that listens: decides about the other side."""

    def session(self) -> Session:
        """Return the session of a new connection."""

    def on_made(self, connection: Connection) -> None:
        """Abort the connection unless the other side's address and certificate are those of one that may connect."""

    def on_hello(self, connection: Connection, hello: Hello) -> None:
        """``accept`` the connection with a handler, or close it."""

    def on_other_protocol(self, connection: Connection) -> asyncio.Protocol | None:
        """Return the protocol that serves a connection which does not speak ours, or close it."""

    def on_request_refused(self, connection: Connection, header: dict[str, Any], error: DLedgerError) -> None:
        """Respond to a request whose payload does not fit; it is skipped."""


class ClosedEarlyError(UnreachableError):
    """The other side closed the connection before hello was complete."""


class Connection(asyncio.BufferedProtocol):
    """One side of a connection.

    A listening side may serve another protocol too: then the connection only forwards bytes and events.

    Args:
        side: the one that made the connection.

    Attributes:
        accepted: done when hello is; has the error if the connection closes before.
        closed: done when the connection is, with the error that closed it, or None.
        peer_hello: the other side's hello.
        peer_address: HOST:PORT of the other side.
        source: its address as limits count it.
        principal: the name behind its token or certificate; empty without security.
        has_tls: whether the connection is encrypted.
        certificate: its certificate, if it has shown one.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._session = side.session()
        self._loop = asyncio.get_running_loop()
        self._transport = cast("asyncio.Transport", None)
        self._output = cast("Output", None)  # both until it is made
        self._is_made = False
        self._handler: Handler | None = None
        self._other: asyncio.Protocol | None = None
        self._share: FairShare | None = None
        self._payloads: PayloadCharge | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._is_paused = False
        self._reads = True
        self._closing = False
        self._error: Exception | None = None
        self.closed: asyncio.Future[Exception | None] = self._loop.create_future()
        self.accepted: asyncio.Future[None] = self._loop.create_future()
        self.peer_hello = Hello()
        self.peer_address = ""
        self.source = ""
        self.principal = ""
        self.has_tls = False
        self.certificate: PeerCertificate | None = None
        self.received_bytes = 0
        self.received_frames = 0

    @property
    def who(self) -> str:
        """The other side for logs: its principal, where there is one, and its address."""
        return f"{self.principal}@{self.peer_address}" if self.principal else self.peer_address

    # --- sending --------------------------------------------------------------------------------------------------

    def send(self, header: dict[str, Any], *payload: Buffer) -> None:
        """Queue one frame; payload buffers must not change afterwards. Do nothing once closed."""
        buffers = encode_frame(header, *payload)
        if not self._closing:
            self._output.write(buffers)

    def send_buffers(self, buffers: list[Buffer]) -> None:
        """Queue one or more encoded frames. Do nothing once closed."""
        if not self._closing:
            self._output.write(buffers)

    def send_bulk(self, buffers: list[Buffer]) -> None:
        """Queue one encoded frame that may be large, after the earlier ones of this kind; all other frames overtake it.

        Do nothing once closed. ``close`` drops what has not left.
        """
        if not self._closing:
            self._output.write_bulk(buffers)

    @property
    def is_open(self) -> bool:
        """Whether frames can be sent."""
        return not self._closing

    @property
    def write_buffer_bytes(self) -> int:
        """Bytes queued that the kernel has not taken yet."""
        return 0 if self.closed.done() else self._output.nbytes

    async def drained(self) -> None:
        """Wait while much is queued, for a node's client more than 1 MiB; return at once otherwise, and when closed."""
        await self._output.drained()

    def limit_unacknowledged(self, seconds: float) -> None:
        """Let the kernel break the connection if sent bytes stay unacknowledged for this time, where it supports that.

        Not for a side whose peer may stop reading for longer.
        """
        _set_options(self._transport, TCP_USER_TIMEOUT=int(seconds * 1000))

    # --- receiving ------------------------------------------------------------------------------------------------

    @property
    def is_inside_frame(self) -> bool:
        """Whether a frame of the other side has begun and not ended."""
        return self._session.is_inside_frame

    @property
    def is_reading(self) -> bool:
        """Whether this side reads from the socket, now or in its next turn."""
        return not self._closing and not self._is_paused

    def pause_reading(self) -> None:
        """Stop reading from the socket; frames in the receive buffer are still delivered."""
        self._is_paused = True
        self._update_reading()

    def resume_reading(self) -> None:
        """Read again after ``pause_reading``."""
        self._is_paused = False
        self._update_reading()

    def _update_reading(self) -> None:
        # Invariant: the socket is read unless the user has paused it, or frames that were received wait for their turn.
        reads = not self._is_paused and not (self._share is not None and self._share.is_waiting)
        if reads is self._reads or self._closing:
            return
        self._reads = reads
        if reads:
            self._transport.resume_reading()
        else:
            self._transport.pause_reading()

    def charge_to(self, budget: ByteBudget) -> None:
        """Charge a client's large payloads to a budget; before hello is accepted."""
        self._payloads = PayloadCharge(budget, partial(self._side.on_request_refused, self))

    def use_turn(self, seconds: float) -> None:
        """Count work that the frame being delivered starts and that runs later as part of this turn."""
        if self._share is not None:
            self._share.ends -= seconds

    # --- opening and closing --------------------------------------------------------------------------------------

    def expect_hello(self, timeout_s: float) -> None:
        """Close the connection unless hello is accepted in time."""
        error = ProtocolError("no hello in time", self.peer_address, "", {"seconds": timeout_s})
        self._timer = self._loop.call_later(timeout_s, self.refuse, error)

    def accept(self, handler: Handler, theirs: Hello, fairness: Fairness | None = None) -> None:
        """Deliver frames from now on.

        Args:
            handler: gets them.
            theirs: the other side's hello, with the version and the features that were chosen.
            fairness: the port's; only for a client's connection.
        """
        self._session.accept(theirs, self._payloads)
        self._cancel_timer()
        self.peer_hello, self._handler = theirs, handler
        self._output.is_prompt = self._session.serves_client or self._session.is_between_nodes
        if self._session.serves_client:
            if fairness is not None:
                source = self.principal or self.source
                self._share = FairShare(fairness, source, self._deliver, self._update_reading)
            self._transport.set_write_buffer_limits(high=CLIENT_WRITE_HIGH_BYTES, low=CLIENT_WRITE_LOW_BYTES)
        elif self._session.is_between_nodes:
            # What the kernel has taken cannot be overtaken: a heartbeat behind megabytes causes an election
            # (``test_large_append_over_slow_links_needs_no_election``).
            self._transport.set_write_buffer_limits(high=PEER_UNSENT_BYTES, low=PEER_UNSENT_BYTES // 2)
            _set_options(self._transport, TCP_NOTSENT_LOWAT=PEER_UNSENT_BYTES)
        self.accepted.set_result(None)

    def refuse(self, error: DLedgerError) -> None:
        """Close at once because of what the other side is or did, and log it."""
        _log.warning("connection closed: peer=%s error=%s", self.peer_address, error)
        self.abort(error)

    def close(self, error: Exception | None = None) -> None:
        """Send queued frames and close; ``closed`` and ``on_close`` get ``error``."""
        if self._closing:
            return
        self._closing = True
        self._error = error
        self._cancel_timer()
        if self._is_made:
            self._output.close()
            self._transport.close()
            self._timer = self._loop.call_later(CLOSE_TIMEOUT_S, self._transport.abort)

    def abort(self, error: Exception | None = None) -> None:
        """Close at once; queued frames are lost."""
        self._closing = True
        self._error = self._error or error
        if self._is_made and not self.closed.done():
            self._transport.abort()

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    # --- called by the transport ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start hello."""
        self._transport = cast("asyncio.Transport", transport)
        ssl_object = transport.get_extra_info("ssl_object")
        self.has_tls = ssl_object is not None
        self._output = Output(self._transport, has_tls=self.has_tls)
        self._is_made = True
        if self._closing:  # closed before it was made
            self._transport.abort()
            return
        _set_options(self._transport, SO_KEEPALIVE=1, TCP_NODELAY=1, **KEEPALIVE)
        self._transport.set_write_buffer_limits(high=WRITE_HIGH_BYTES, low=WRITE_LOW_BYTES)
        peer = transport.get_extra_info("peername")
        self.peer_address = f"{peer[0]}:{peer[1]}" if isinstance(peer, tuple) else str(peer)
        self.source = source_of(peer[0]) if isinstance(peer, tuple) else self.peer_address
        if ssl_object is not None:
            self.certificate = PeerCertificate.of(ssl_object)
        self._side.on_made(self)
        if not self._closing:
            self._output.write(self._session.greeting())

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the memory to receive into."""
        del sizehint
        return self._session.get_buffer()

    def buffer_updated(self, nbytes: int) -> None:
        """Deliver every complete frame, those of a client turn by turn."""
        self._session.buffer_updated(nbytes)
        self.received_bytes += nbytes
        if self._share is not None:
            self._share.received(nbytes)
        elif self._handler is not None:
            self._deliver()
        elif self._other is not None:
            self._other.data_received(self._session.take_rest())
        else:
            self._open()

    def _deliver(self) -> bool:
        """Deliver frames, those of a client until its turn ends; return whether there are more, or a part of one."""
        session, share, handler = self._session, self._share, cast("Handler", self._handler)
        try:
            while not self._closing:
                if share is not None and (frames := session.next_appends(share.appends_max())):
                    self.received_frames += len(frames)
                    share.handled(together=cast("ClientHandler", handler).on_appends(self, frames))
                elif (frame := session.next_frame()) is not None:
                    self.received_frames += 1
                    handler.on_frame(self, frame)
                else:
                    break
                if share is not None and time.perf_counter() >= share.ends:
                    break
        except ProtocolError as error:
            self.refuse(error)
        return not self._closing and session.is_inside_frame

    def _open(self) -> None:
        if self._closing:  # refused already, and what it sent meanwhile must not open the connection again
            return
        try:
            opening = self._session.next_opening()
        except ProtocolError as error:
            self.refuse(error if error.where else ProtocolError(error.what, self.peer_address, "", error.values))
            return
        match opening:
            case Hello():
                self._side.on_hello(self, opening)
                if self._handler is not None:
                    self.buffer_updated(0)  # frames may have come with it
            case DLedgerError():
                self.abort(opening)
            case bytes():
                self._cancel_timer()
                self._other = self._side.on_other_protocol(self)
                if self._other is not None:
                    self._other.connection_made(self._transport)
                    self._other.data_received(opening)

    def pause_writing(self) -> None:
        """Record that the queue of bytes to send is long."""
        (self._other or self._output).pause_writing()

    def resume_writing(self) -> None:
        """Record that the queue of bytes to send is short again."""
        (self._other or self._output).resume_writing()

    def connection_lost(self, exc: Exception | None) -> None:
        """Complete all waiting futures and call the handler, once."""
        self._closing = True
        self._cancel_timer()
        self._session.end()
        # Both refer to this connection. Without this cycle it is freed now, not by a collection that finds thousands
        # of closed ones at once (``test_closed_connection_is_freed_at_once``).
        self._payloads = self._share = None
        if self._is_made:
            self._output.clear()
        error = self._error or exc
        if self.closed.done():
            return
        # Invariant: a handler that was accepted gets ``on_close`` once, and nothing after it.
        self.closed.set_result(error)
        if self._other is not None:
            self._other.connection_lost(exc)
        if not self.accepted.done():
            self.accepted.set_exception(error or ClosedEarlyError("the connection closed during hello"))
            self.accepted.exception()  # marks it as retrieved: on a listening side no caller awaits it
        elif self._handler is not None:
            self._handler.on_close(self, error)


def _set_options(transport: asyncio.Transport, **options: int) -> None:
    """Set options of a TCP socket, as far as this system has them."""
    sock = transport.get_extra_info("socket")
    if sock is None or sock.family not in (socket.AF_INET, socket.AF_INET6):
        return
    for name, value in options.items():
        if hasattr(socket, name):
            level = socket.SOL_SOCKET if name.startswith("SO_") else socket.IPPROTO_TCP
            sock.setsockopt(level, getattr(socket, name), value)

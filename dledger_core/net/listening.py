"""Listening: a port of a node, who may connect to it, and when its connections are closed."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Final

from dledger_core.errors import ConfigError, DLedgerError
from dledger_core.net.connection import Connection, Handler
from dledger_core.net.fields import int_field
from dledger_core.net.hello import Hello, negotiate
from dledger_core.net.limits.budget import ByteBudget
from dledger_core.net.limits.connection_limits import ConnectionLimits
from dledger_core.net.limits.deadlines import Deadlines, DeadlineWatch
from dledger_core.net.limits.fair_queue import Fairness
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.net.protocol import HELLO_TIMEOUT_S, Type
from dledger_core.net.session import Session
from dledger_core.net.tls_listener import HandshakeLimits, TlsListener

_BACKLOG: Final = 1024
_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())


class Server:
    """A listening port and the connections made to it; the ``Side`` of each of them.

    Attributes:
        port: the port it listens on (useful after asking for port 0).
        connections: the open ones whose hello was accepted.
        refused: number of connections and frames that were refused before a service saw them, by the error's name.
        limits: counts the connections.
    """

    def __init__(
        self,
        accept: Callable[[Hello], Hello],
        handler_for: Callable[[Connection], Handler],
        hello_timeout_s: float,
        foreign: Callable[[], asyncio.Protocol] | None = None,
        budget: ByteBudget | None = None,
        deadlines: Deadlines | None = None,
        limits: ConnectionLimits | None = None,
        tls: Callable[[], ssl.SSLContext] | None = None,
        handshakes: HandshakeLimits | None = None,
    ) -> None:
        self.limits = limits or ConnectionLimits()
        self._tls = tls
        self._handshake_limits = handshakes or HandshakeLimits()
        self._accept = accept
        self._hello_timeout_s = hello_timeout_s
        self._foreign = foreign
        self._budget = budget
        self._deadlines = deadlines
        self._check: asyncio.TimerHandle | None = None
        self._handler_for = handler_for
        self._listener: asyncio.Server | TlsListener | None = None
        self._fairness = Fairness()
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

    async def start(self, host: str, port: int) -> None:
        """Start to listen; raise ConfigError if the port is not available."""
        try:
            self._listener = await self._listen(host, port)
        except OSError as error:
            remedy = "stop the process that uses the port, or choose another address"
            raise ConfigError(f"cannot listen: {error.strerror or error}", f"{host}:{port}", remedy) from None
        self.port = self._listener.sockets[0].getsockname()[1]
        if self._deadlines is not None:
            self._check_later(DeadlineWatch(self._deadlines), self._deadlines.interval_s)

    async def _listen(self, host: str, port: int) -> asyncio.Server | TlsListener:
        if self._tls is None:
            return await asyncio.get_running_loop().create_server(self._make, host, port, backlog=_BACKLOG)
        listener = TlsListener(self._make, self._tls, self._handshake_limits, self._hello_timeout_s)
        await listener.start(host, port, _BACKLOG)
        return listener

    def _check_later(self, watch: DeadlineWatch, interval_s: float) -> None:
        loop = asyncio.get_running_loop()

        def check() -> None:
            clients = [connection for connection in self.connections if connection.peer_hello.role == "client"]
            watch.check(clients, loop.time())
            self._check = loop.call_later(interval_s, check)

        self._check = loop.call_later(interval_s, check)

    # --- each connection's side -----------------------------------------------------------------------------------

    def _make(self) -> Connection:
        connection = Connection(self)
        self._all.add(connection)
        connection.closed.add_done_callback(lambda _: self._forget(connection))
        if self._budget is not None:
            connection.charge_to(self._budget)
        try:
            self.limits.enter()
        except DLedgerError as error:
            self.refused[error.name] += 1
            connection.abort(error)  # as soon as it is made
        return connection

    def session(self) -> Session:
        """See ``Side``."""
        return Session(takes_others=self._foreign is not None)

    def on_made(self, connection: Connection) -> None:
        """See ``Side``. It gets no response if it is refused."""
        try:
            self.limits.enter_from(connection.source)
        except DLedgerError as error:
            self.refused[error.name] += 1
            connection.refuse(error)
        else:
            connection.expect_hello(self._hello_timeout_s)

    def on_hello(self, connection: Connection, hello: Hello) -> None:
        """See ``Side``. Negotiates version and features, and calls ``accept`` and ``handler_for``."""
        try:
            response, handler = self._introduced(connection, hello)
        except DLedgerError as error:
            self.refused[error.name] += 1
            connection.send({"t": Type.FAILURE, "e": error.to_wire()})
            _LOG.warning("hello refused: peer=%s error=%s", connection.peer_address, error)
            connection.close(error)
            return
        connection.send(response.to_response())
        # Without the token: ``peer_hello`` stays as long as the connection.
        chosen = replace(hello, versions=response.versions, features=response.features, token="")
        connection.accept(handler, chosen, self._fairness)

    def _introduced(self, connection: Connection, hello: Hello) -> tuple[Hello, Handler]:
        ours = self._accept(hello)
        if hello.role == "client":
            self.limits.check_client(connection.source)
        version, features = negotiate(hello, ours)
        # ``handler_for`` authenticates: before it returns, the connection is none of a client or node, and gets nothing
        # but the error (``test_stranger_is_unauthenticated_at_once``).
        connection.peer_hello = hello
        handler = self._handler_for(connection)
        self.connections.add(connection)
        if hello.role == "peer":
            self.limits.enter_as_node(connection.source)
        return replace(ours, versions=(version,), features=features), handler

    def on_other_protocol(self, connection: Connection) -> asyncio.Protocol | None:
        """See ``Side``. Who speaks another protocol is a client."""
        try:
            self.limits.check_client(connection.source)
        except DLedgerError as error:
            connection.abort(error)
            return None
        return None if self._foreign is None else self._foreign()

    def on_request_refused(self, connection: Connection, header: dict[str, Any], error: DLedgerError) -> None:
        """See ``Side``."""
        self.refused[error.name] += 1
        connection.send({"t": Type.FAILURE, "r": int_field(header, "r", 1), "e": error.to_wire()})

    def _forget(self, connection: Connection) -> None:
        is_node = connection in self.connections and connection.peer_hello.role == "peer"
        self.limits.leave(connection.source, is_node=is_node)
        self._all.discard(connection)
        self.connections.discard(connection)

    # --- stopping -------------------------------------------------------------------------------------------------

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
        if self._check is not None:
            self._check.cancel()
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
    limits: ConnectionLimits | None = None,
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
        limits: connections of clients that it accepts; None = any number.
        tls: returns the context of each new connection; None = the port speaks plaintext.
        handshakes: rates of new connections with TLS.

    Raises:
        ConfigError: the port is not available.
    """
    server = Server(accept, handler_for, hello_timeout_s, foreign, budget, deadlines, limits, tls, handshakes)
    await server.start(host, port)
    return server

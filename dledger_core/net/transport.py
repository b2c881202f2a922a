"""``connect`` to a node, ``serve`` a port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from dledger_core.errors import ConfigError, DLedgerError, UnreachableError
from dledger_core.net.connection import Connection, Handler, ServerSide
from dledger_core.net.hello import Hello, negotiate
from dledger_core.net.protocol import HELLO_TIMEOUT_S

_BACKLOG = 1024


async def connect(
    host: str,
    port: int,
    hello: Hello,
    handler: Handler,
    *,
    timeout_s: float,
) -> Connection:
    """Open a connection and exchange hello.

    Args:
        host: name or address.
        port: TCP port.
        hello: this side's introduction.
        handler: gets the frames.
        timeout_s: limit on the time for all of it, hello included.

    Returns:
        A connection whose hello was accepted; ``peer_hello`` is the response.

    Raises:
        UnreachableError: no connection, or no response in time.
        DLedgerError: the other side's response to hello.
    """
    loop = asyncio.get_running_loop()
    address = f"{host}:{port}"
    connection: Connection | None = None
    delivered = False
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                lambda: Connection(hello=hello, handler=handler, hello_timeout_s=timeout_s + 1),
                host,
                port,
            )
            await asyncio.shield(connection.accepted)
        delivered = True
    except DLedgerError as error:
        where = f"{error.where}, {address}" if error.where and address not in error.where else error.where or address
        raise type(error)(error.what, where, error.remedy, error.values) from None
    except (OSError, TimeoutError, UnicodeError) as error:  # a UnicodeError: not a host name
        reason = "no response in time" if isinstance(error, TimeoutError) else str(error)
        remedy = "check that the node runs and that the address is right"
        raise UnreachableError(f"cannot connect: {reason}", address, remedy) from None
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
    """

    def __init__(
        self,
        accept: Callable[[Hello], Hello],
        handler_for: Callable[[Connection], Handler],
        foreign: Callable[[], asyncio.Protocol] | None = None,
    ) -> None:
        self._accept = accept
        self._foreign = foreign
        self._handler_for = handler_for
        self._listener: asyncio.Server | None = None
        self.port = 0
        self.connections: set[Connection] = set()
        self._all: set[Connection] = set()

    async def start(self, host: str, port: int, hello_timeout_s: float) -> None:
        """Start to listen; raise ConfigError if the port is not available."""

        def make() -> Connection:
            connection = Connection(server=self, hello_timeout_s=hello_timeout_s, foreign=self._foreign)
            self._all.add(connection)
            connection.closed.add_done_callback(lambda _: self._forget(connection))
            return connection

        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(make, host, port, backlog=_BACKLOG)
        except OSError as error:
            remedy = "stop the process that uses the port, or choose another address"
            raise ConfigError(f"cannot listen: {error.strerror or error}", f"{host}:{port}", remedy) from None
        self.port = self._listener.sockets[0].getsockname()[1]

    def on_hello(self, connection: Connection, hello: Hello) -> tuple[Hello, Handler]:
        """Negotiate version and features, call ``accept``, and return the connection's handler."""
        ours = self._accept(hello)
        version, features = negotiate(hello, ours)
        connection.peer_hello = hello
        handler = self._handler_for(connection)
        self.connections.add(connection)
        return replace(ours, versions=(version,), features=features), handler

    def _forget(self, connection: Connection) -> None:
        self._all.discard(connection)
        self.connections.discard(connection)

    async def close(self) -> None:
        """Stop listening, close every connection and wait until all are closed."""
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
) -> Server:
    """Listen on a port.

    Args:
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        accept: gets the other side's hello; returns this side's (versions, features, logs), or raises the
            DLedgerError that refuses it.
        handler_for: creates the handler of an accepted connection (``connection.peer_hello`` is set).
        hello_timeout_s: time for the other side's hello.
        foreign: creates the protocol of a connection that does not speak this one; None refuses such a connection.

    Raises:
        ConfigError: the port is not available.
    """
    server = Server(accept, handler_for, foreign)
    await server.start(host, port, hello_timeout_s)
    return server

"""Making connections: ``connect`` to a node, ``serve`` on a port."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from dledger_core.errors import ConfigError, DLedgerError, UnreachableError
from dledger_core.net.connection import Connection, Handler, ServerSide, TransportStats
from dledger_core.net.hello import Hello, negotiate
from dledger_core.net.protocol import HELLO_TIMEOUT_S

__all__ = ["Connection", "Handler", "Hello", "Server", "TransportStats", "connect", "serve"]

_BACKLOG = 1024


async def connect(
    host: str,
    port: int,
    hello: Hello,
    handler: Handler,
    *,
    timeout_s: float,
    stats: TransportStats | None = None,
) -> Connection:
    """Connects and introduces itself.

    Args:
        host: name or address.
        port: TCP port.
        hello: our introduction.
        handler: gets the frames.
        timeout_s: bound on the whole, hello included.
        stats: where to count; a set of its own by default.

    Returns:
        A connection whose hello was accepted; ``peer_hello`` is the answer.

    Raises:
        UnreachableError: no connection, or no answer in time.
        DLedgerError: the error the other side answered hello with.
    """
    loop = asyncio.get_running_loop()
    address = f"{host}:{port}"
    connection: Connection | None = None
    handed_over = False
    try:
        async with asyncio.timeout(timeout_s):
            _, connection = await loop.create_connection(
                lambda: Connection(
                    stats or TransportStats(), hello=hello, handler=handler, hello_timeout_s=timeout_s + 1
                ),
                host,
                port,
            )
            await asyncio.shield(connection.accepted)
        handed_over = True
    except DLedgerError as error:
        where = f"{error.where}, {address}" if error.where and address not in error.where else error.where or address
        raise type(error)(error.what, where, error.remedy, error.values) from None
    except (OSError, TimeoutError, UnicodeError) as error:  # a UnicodeError: no name of a host
        reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        remedy = "check that the node runs and that the address is right"
        raise UnreachableError(f"cannot connect: {reason}", address, remedy) from None
    finally:
        # Also if the caller gave up after hello was accepted and before this went on: nobody else knows of it.
        if connection is not None and not handed_over:
            connection.abort()
    return connection


class Server(ServerSide):
    """A listening port and the connections made to it.

    Attributes:
        port: the port it listens on (useful after asking for port 0).
        connections: the open ones whose hello was accepted.
        stats: counts since start.
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
        self.stats = TransportStats()
        self._all: set[Connection] = set()

    async def start(self, host: str, port: int, hello_timeout_s: float) -> None:
        """Starts to listen; raises ConfigError if the port cannot be had."""

        def make() -> Connection:
            connection = Connection(self.stats, server=self, hello_timeout_s=hello_timeout_s, foreign=self._foreign)
            self._all.add(connection)
            connection.closed.add_done_callback(lambda _: self._forget(connection))
            return connection

        loop = asyncio.get_running_loop()
        try:
            self._listener = await loop.create_server(make, host, port, backlog=_BACKLOG)
        except OSError as error:
            remedy = "stop what uses the port, or choose another address"
            raise ConfigError(f"cannot listen: {error.strerror or error}", f"{host}:{port}", remedy) from None
        self.port = self._listener.sockets[0].getsockname()[1]

    def on_hello(self, connection: Connection, hello: Hello) -> tuple[Hello, Handler]:
        """Negotiates version and features, asks ``accept``, and gives the connection its handler."""
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
        """Stops listening, closes every connection and waits until they are gone."""
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
    """Listens on a port.

    Args:
        host: address to listen on.
        port: TCP port; 0 takes a free one.
        accept: gets the hello of who connects; returns our own (versions, features, logs), or raises the
            DLedgerError that refuses it.
        handler_for: makes the handler of an accepted connection (``connection.peer_hello`` is known by then).
        hello_timeout_s: how long who connects may take for its hello.
        foreign: makes what serves a connection that speaks RocketMQ's remoting protocol; None refuses such.

    Raises:
        ConfigError: the port cannot be had.
    """
    server = Server(accept, handler_for, foreign)
    await server.start(host, port, hello_timeout_s)
    return server

"""A port that speaks TLS: it accepts sockets and limits the handshakes, each of which costs milliseconds.

Plaintext ports use asyncio's server. Here the socket is accepted first, so that each connection gets the context of the
present certificates, and none of the ClientHello is read before TLS starts.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from dledger_core.errors import UnreachableError
from dledger_core.net.limits.connection_limits import source_of
from dledger_core.net.limits.rates import BurstFilter, TokenBucket, TokenBuckets

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())

HANDSHAKE_RESULTS: Final = ("completed", "failed", "displaced", "refused")
"""Its handshake completed, failed or took too long, ended for one that waited, or never started: its address had too
many."""
_ACCEPT_PAUSE_S: Final = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class HandshakeLimits:
    """Rates of new connections.

    Attributes:
        per_s: handshakes per second of all addresses; further connections wait.
        burst: handshakes at once after a quiet time.
        address_per_s: connections per second of one address; further ones are closed before the handshake.
        address_burst: connections at once of one address after a quiet time.
        in_progress: handshakes in progress, each with a descriptor. The next one waits until one of them ends.
        least_s: time after which a handshake in progress is ended for one that waits.
    """

    per_s: float = 100.0
    burst: int = 200
    address_per_s: float = 40.0
    address_burst: int = 120
    in_progress: int = 64
    least_s: float = 0.6


class TlsListener:
    """Accepts connections with TLS.

    Args:
        make: makes the protocol of a connection.
        context: returns the context of a new connection.
        limits: rates of new connections.
        timeout_s: time for a handshake.

    Attributes:
        sockets: the listening sockets.
        results: number of connections by the result of their handshake, one of ``HANDSHAKE_RESULTS``.
    """

    def __init__(
        self,
        make: Callable[[], asyncio.BaseProtocol],
        context: Callable[[], ssl.SSLContext],
        limits: HandshakeLimits,
        timeout_s: float,
    ) -> None:
        self._make = make
        self._context = context
        self._timeout_s = timeout_s
        self._loop = asyncio.get_running_loop()
        self._rate = TokenBucket(limits.per_s, limits.burst, self._loop.time())
        self._address_rates = TokenBuckets(limits.address_per_s, limits.address_burst)
        self._accepting: list[asyncio.Task[None]] = []
        self._limits = limits
        self._handshakes: dict[asyncio.Task[None], float] = {}
        self.sockets: list[socket.socket] = []
        self.results: Counter[str] = Counter()

    async def start(self, host: str, port: int, backlog: int) -> None:
        """Listen on every address of a host; raise OSError."""
        found = await self._loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, address in dict.fromkeys((each[0], each[4]) for each in found):
                self.sockets.append(_listening_socket(family, address, backlog))
        except OSError:
            self._close_sockets()
            raise
        self._accepting = [asyncio.create_task(self._accept(each), name="accept-tls") for each in self.sockets]

    async def _accept(self, listener: socket.socket) -> None:
        loop = self._loop
        while True:
            try:
                sock, address = await loop.sock_accept(listener)
            except OSError as error:  # no descriptor is free, or the other side has left
                _LOG.warning("connection not accepted: error=%s", error)
                await asyncio.sleep(_ACCEPT_PAUSE_S)
                continue
            # First the rate of its address: a flood from one address must not take the turns of others.
            if self._address_rates.take(source_of(str(address[0])), loop.time()):
                _LOG.warning("connection refused, too many handshakes: peer=%s:%s", address[0], address[1])
                self.results["refused"] += 1
                sock.close()
                await asyncio.sleep(0)  # accepting does not wait while connections are in the backlog
                continue
            try:
                await self._turn()
            except asyncio.CancelledError:
                sock.close()
                raise
            task = asyncio.create_task(self._handshake(sock, f"{address[0]}:{address[1]}"))
            self._handshakes[task] = loop.time()
            task.add_done_callback(partial(self._ended, sock))

    def _ended(self, sock: socket.socket, task: asyncio.Task[None]) -> None:
        del self._handshakes[task]
        # Also if the task never had it, because it was cancelled before its first step
        # (test_handshake_that_is_ended_before_it_begins_closes_its_socket).
        if task.cancelled():
            sock.close()

    async def _turn(self) -> None:
        """Wait until a handshake may start; the oldest one in progress ends for it if it has had its time.

        Without a limit, connections that send nothing take all descriptors, and the node cannot open its own files.
        """
        loop, limits = self._loop, self._limits
        while True:
            wait_s = self._rate.take(loop.time())
            if wait_s <= 0:
                break
            await asyncio.sleep(wait_s)
        while len(self._handshakes) >= limits.in_progress:
            oldest, since = next(iter(self._handshakes.items()))
            left_s = since + limits.least_s - loop.time()
            if left_s <= 0:
                self.results["displaced"] += 1
                oldest.cancel()
            await asyncio.wait(self._handshakes, timeout=max(left_s, 0) or None, return_when=asyncio.FIRST_COMPLETED)

    # Every socket ends here: its protocol gets the transport, or ``connection_lost``, which takes it out of the counts
    # of its port (``test_connection_that_ends_in_its_handshake_leaves_nothing_behind``).
    async def _handshake(self, sock: socket.socket, address: str) -> None:
        protocol = self._make()
        try:
            await self._loop.connect_accepted_socket(
                lambda: protocol, sock, ssl=self._context(), ssl_handshake_timeout=self._timeout_s
            )
        except (OSError, TimeoutError) as error:
            self.results["failed"] += 1
            sock.close()
            _LOG.info("TLS handshake failed: peer=%s error=%s", address, error)
            protocol.connection_lost(UnreachableError(f"the TLS handshake failed: {error}", address))
        except asyncio.CancelledError:
            protocol.connection_lost(UnreachableError("the TLS handshake was ended", address))
            raise
        else:
            self.results["completed"] += 1

    def close(self) -> None:
        """Stop listening; handshakes in progress end."""
        for task in (*self._accepting, *self._handshakes):
            task.cancel()
        self._close_sockets()

    def _close_sockets(self) -> None:
        for each in self.sockets:
            each.close()

    async def wait_closed(self) -> None:
        """Wait until all tasks have ended."""
        await asyncio.gather(*self._accepting, *self._handshakes, return_exceptions=True)


def _listening_socket(family: int, address: Any, backlog: int) -> socket.socket:
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listener.setblocking(False)
        listener.bind(address)
        listener.listen(backlog)
    except OSError:
        listener.close()
        raise
    return listener

"""A small HTTP/1.1 server on the node's event loop: GET and HEAD, short requests, complete responses.

h11 reads and writes the protocol. What a stranger can occupy is limited: connections, the size of a request, and the
time to send it and to take the response; with TLS also the rate and the time of handshakes.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final
from urllib.parse import parse_qsl, urlsplit

import h11

from dledger_core.errors import ConfigError
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.net.tls_listener import HandshakeLimits, TlsListener

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())

CONNECTIONS_MAX: Final = 32
REQUEST_BYTES_MAX: Final = 16 << 10
REQUEST_S: Final = 10.0
"""Time for a request to arrive, and for a response to be taken."""
IDLE_S: Final = 60.0
_READ_BYTES: Final = 16 << 10
_BACKLOG: Final = 100
_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "X-Frame-Options": "DENY",
}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """A request.

    Attributes:
        path: without the query.
        query: the last value of each parameter.
        headers: by lower-case name.
    """

    path: str
    query: Mapping[str, str]
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class HttpResponse:
    """A response; ``headers`` are in addition to those that each response has."""

    body: bytes
    content_type: str = "text/plain; charset=utf-8"
    status: HTTPStatus = HTTPStatus.OK
    headers: Mapping[str, str] = field(default_factory=dict)


Answer = Callable[[HttpRequest], Awaitable[HttpResponse]]


def text_response(status: HTTPStatus, text: str, **headers: str) -> HttpResponse:
    """Return a response with one line of text."""
    return HttpResponse((text + "\n").encode(), status=status, headers=headers)


class HttpPort:
    """A listening port; lives on one event loop.

    Args:
        answer: returns the response to a request. An error of it becomes status 500, and its traceback is logged.
        connections_max: open connections; the next one is closed.
        request_s: time for a request to arrive, and for a response to be taken.
        idle_s: time after which an unused connection is closed.
    """

    def __init__(
        self,
        answer: Answer,
        *,
        connections_max: int = CONNECTIONS_MAX,
        request_s: float = REQUEST_S,
        idle_s: float = IDLE_S,
    ) -> None:
        self._answer = answer
        self._connections_max = connections_max
        self._request_s = request_s
        self._idle_s = idle_s
        self._server: asyncio.Server | TlsListener | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.port = 0

    async def start(self, host: str, port: int, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Start to listen; raise ConfigError if the port is not available.

        Args:
            host: address to listen on.
            port: TCP port; 0 takes a free one.
            tls: returns the context of each new connection; None = the port speaks plaintext.
        """
        try:
            self._server = await self._listen(host, port, tls)
        except OSError as error:
            remedy = "stop the process that uses the port, or choose another one with --http"
            raise ConfigError(f"cannot listen: {error.strerror or error}", f"{host}:{port}", remedy) from None
        self.port = self._server.sockets[0].getsockname()[1]

    async def _listen(
        self, host: str, port: int, tls: Callable[[], ssl.SSLContext] | None
    ) -> asyncio.Server | TlsListener:
        if tls is None:
            return await asyncio.start_server(self._accept, host, port, limit=REQUEST_BYTES_MAX)

        def make() -> asyncio.StreamReaderProtocol:
            return asyncio.StreamReaderProtocol(asyncio.StreamReader(REQUEST_BYTES_MAX), self._accept)

        listener = TlsListener(make, tls, HandshakeLimits(in_progress=CONNECTIONS_MAX), self._request_s)
        await listener.start(host, port, _BACKLOG)
        return listener

    async def close(self) -> None:
        """Stop listening, and close every connection."""
        if self._server is not None:
            self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._tasks) >= self._connections_max:
            _LOG.warning("http connection refused, too many are open: limit=%d", self._connections_max)
            writer.transport.abort()
            return
        task = asyncio.create_task(self._serve(reader, writer), name="http")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.transport.set_write_buffer_limits(high=0)  # so that ``drain`` waits until the client took it all
        connection = h11.Connection(h11.SERVER, max_incomplete_event_size=REQUEST_BYTES_MAX)
        try:
            while await self._exchange(connection, reader, writer):
                connection.start_next_cycle()
        except h11.RemoteProtocolError as error:
            with contextlib.suppress(h11.LocalProtocolError, OSError, TimeoutError):
                await self._send(
                    connection,
                    writer,
                    text_response(HTTPStatus(error.error_status_hint), "not a valid request"),
                    b"GET",
                )
        except (OSError, TimeoutError):
            writer.transport.abort()
        except asyncio.CancelledError:
            writer.transport.abort()
            raise
        writer.close()

    async def _exchange(
        self, connection: h11.Connection, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Serve one request; return whether another one may follow on the connection."""
        event = connection.next_event()
        wait_s = self._idle_s
        while event is h11.NEED_DATA:
            async with asyncio.timeout(wait_s):
                connection.receive_data(await reader.read(_READ_BYTES))
            wait_s = self._request_s
            event = connection.next_event()
        if not isinstance(event, h11.Request):
            return False
        response = await self._respond(event)
        async with asyncio.timeout(self._request_s):
            await self._send(connection, writer, response, event.method)
        # A request with a body is answered, and its body is not read: the connection closes.
        return connection.next_event().__class__ is h11.EndOfMessage and connection.our_state is h11.DONE

    async def _respond(self, event: h11.Request) -> HttpResponse:
        if event.method not in (b"GET", b"HEAD"):
            return text_response(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD", Allow="GET, HEAD")
        target = urlsplit(event.target.decode("latin-1"))
        headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
        request = HttpRequest(target.path, dict(parse_qsl(target.query, keep_blank_values=True)), headers)
        try:
            return await self._answer(request)
        except Exception:  # noqa: BLE001 - the client gets a response, the log the traceback
            _LOG.exception("http request failed: path=%r", request.path)
            return text_response(HTTPStatus.INTERNAL_SERVER_ERROR, "internal error; see the log of the node")

    async def _send(
        self, connection: h11.Connection, writer: asyncio.StreamWriter, response: HttpResponse, method: bytes
    ) -> None:
        headers = _HEADERS | {
            "Content-Type": response.content_type,
            "Content-Length": str(len(response.body)),
            **response.headers,
        }
        head = h11.Response(status_code=response.status, headers=list(headers.items()))
        parts = [connection.send(head)]
        if method != b"HEAD":
            parts.append(connection.send(h11.Data(data=response.body)))
        parts.append(connection.send(h11.EndOfMessage()))
        writer.write(b"".join(parts))
        await writer.drain()

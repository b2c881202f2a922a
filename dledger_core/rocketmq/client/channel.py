"""One connection to a Java node: requests in flight side by side, each reply handed to who waits for it."""

from __future__ import annotations

import asyncio
import itertools
import socket
from typing import Final, TypeVar, cast

from dledger_core.client.routing.channel import ConnectionLostError
from dledger_core.config import Peer
from dledger_core.errors import ProtocolError, RequestTimedOutError, UnreachableError
from dledger_core.rocketmq.remoting.frame import FrameDecoder, RemotingFrame, encode_frame
from dledger_core.rocketmq.remoting.requests import Request, encode_request
from dledger_core.rocketmq.remoting.responses import Reply, decode_reply

__all__ = ["JavaChannel"]

_R = TypeVar("_R", bound=Reply)
_OPAQUE_MAX: Final = (1 << 31) - 1


class JavaChannel(asyncio.Protocol):
    """A connection to one node. Belongs to one event loop."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._decoder = FrameDecoder()
        self._waiting: dict[int, asyncio.Future[RemotingFrame]] = {}
        self._numbers = itertools.cycle(range(1, _OPAQUE_MAX))
        self._transport: asyncio.Transport | None = None
        self._closed = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        """Whether requests can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def open(self, timeout_s: float) -> None:
        """Connects; raises UnreachableError."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                await loop.create_connection(lambda: self, self.peer.host, self.peer.port)
        except (OSError, TimeoutError, UnicodeError) as error:  # a UnicodeError: no name of a host
            reason = "no answer in time" if isinstance(error, TimeoutError) else str(error)
            remedy = "check that the node runs and that the address is right"
            raise UnreachableError(f"cannot connect: {reason}", self.peer.address, remedy) from None

    async def call(self, request: Request, kind: type[_R], timeout_s: float) -> _R:
        """Sends a request and returns its reply.

        Raises:
            UnreachableError: not sent.
            ConnectionLostError: sent, and the connection broke.
            RequestTimedOutError: sent, and no answer came in time.
            DLedgerError: what the node answered.
        """
        if self._transport is None or not self.is_open:
            raise UnreachableError("the connection is closed", self.peer.address)
        loop = asyncio.get_running_loop()
        number = next(self._numbers)
        data = encode_frame(encode_request(request, number))
        future: asyncio.Future[RemotingFrame] = loop.create_future()
        self._waiting[number] = future
        timer = loop.call_later(timeout_s, self._expire, future, timeout_s)
        try:
            self._transport.write(data)
            frame = await future
        finally:
            timer.cancel()
            self._waiting.pop(number, None)
        reply = decode_reply(kind, frame, self.peer.address)
        failure = reply.failure(self.peer.address)
        if failure is not None:
            raise failure
        return reply

    def _expire(self, future: asyncio.Future[RemotingFrame], timeout_s: float) -> None:
        if not future.done():
            values = {"seconds": round(timeout_s, 3)}
            future.set_exception(RequestTimedOutError("no answer in time", self.peer.address, "", values))

    async def close(self) -> None:
        """Closes the connection and waits until it is gone."""
        if self._transport is not None:
            self._transport.abort()
            await asyncio.shield(self._closed)

    # --- called by the transport ----------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast("asyncio.Transport", transport)
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def data_received(self, data: bytes) -> None:
        """Wakes who waits for the replies that are complete now; one nobody waits for any more is dropped."""
        try:
            self._decoder.receive_data(data)
            while (frame := self._decoder.next_frame()) is not None:
                future = self._waiting.get(frame.opaque) if frame.is_reply else None
                if future is not None and not future.done():
                    future.set_result(frame)
        except ProtocolError as error:
            self._fail(f"the node does not speak DLedger's protocol: {error.what}")
            assert self._transport is not None
            self._transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        """See ``asyncio.Protocol``."""
        self._fail(f"the connection was lost: {exc}" if exc else "the node closed the connection")
        if not self._closed.done():
            self._closed.set_result(None)

    def _fail(self, reason: str) -> None:
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(ConnectionLostError(reason, self.peer.address))

"""A remoting connection on a node's event loop: requests side by side, and bounds on what one client keeps busy."""

from __future__ import annotations

import asyncio
import logging
from typing import Final, cast

from dledger_core.errors import ProtocolError
from dledger_core.rocketmq.remoting.codes import RequestCode
from dledger_core.rocketmq.remoting.frame import RemotingFrame
from dledger_core.rocketmq.remoting.session import NodeService, RemotingSession

__all__ = ["RemotingConnection"]

REQUESTS_MAX: Final = 512
REQUEST_BYTES_MAX: Final = 32 << 20
GETS_MAX: Final = 8
"""Entries read at once: each may take 5.6 MB as base64 until the client has taken it."""
FIRST_REQUEST_S: Final = 5.0
HALF_REQUEST_S: Final = 60.0
"""For the rest of a request of which something has come: what is held for it is memory."""

_LOG = logging.getLogger(__name__)


class RemotingConnection(asyncio.Protocol):
    """One client's connection; requests but large ones start in the order they come, answers leave as they are ready.

    While a client has too much under way, or does not take its answers, nothing more is read from it.

    Args:
        node: what answers.
    """

    def __init__(self, node: NodeService) -> None:
        self._session = RemotingSession(node)
        self._transport: asyncio.Transport = cast("asyncio.Transport", None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._bytes = 0
        self._writable = asyncio.Event()
        self._writable.set()
        self._reading = True
        self._gets = asyncio.Semaphore(GETS_MAX)
        self._timer: asyncio.TimerHandle | None = None
        self._peer = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See ``asyncio.Protocol``."""
        self._transport = cast("asyncio.Transport", transport)
        self._peer = str(transport.get_extra_info("peername"))
        self._wait_for_request(FIRST_REQUEST_S)

    def _wait_for_request(self, seconds: float) -> None:
        self._timer = asyncio.get_running_loop().call_later(seconds, self._is_late, seconds)

    def _is_late(self, seconds: float) -> None:
        if self._reading:
            self._refuse(ProtocolError("no request in time", self._peer, "", {"seconds": seconds}))
        else:  # it was not allowed to send
            self._wait_for_request(seconds)

    def data_received(self, data: bytes) -> None:
        """Starts every request that is complete now."""
        try:
            frames = self._session.receive_data(data)
        except ProtocolError as error:
            self._refuse(error)
            return
        for frame in frames:
            self._forget_timer()
            self._bytes += len(frame.body)
            task = asyncio.create_task(self._answer(frame))
            self._tasks.add(task)
            task.add_done_callback(self._answered)
        if self._timer is None and self._session.holds_half:
            self._wait_for_request(HALF_REQUEST_S)
        self._read_or_pause()

    async def _answer(self, frame: RemotingFrame) -> None:
        try:
            if frame.code == RequestCode.GET:
                async with self._gets:
                    await self._write(await self._session.answer(frame))
            else:
                await self._write(await self._session.answer(frame))
        except ProtocolError as error:
            self._refuse(error)
        finally:
            self._bytes -= len(frame.body)

    def _answered(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        self._read_or_pause()

    async def _write(self, data: bytes) -> None:
        await self._writable.wait()
        if data and not self._transport.is_closing():
            self._transport.write(data)

    def _read_or_pause(self) -> None:
        busy = len(self._tasks) >= REQUESTS_MAX or self._bytes >= REQUEST_BYTES_MAX or not self._writable.is_set()
        if busy != self._reading or self._transport.is_closing():
            return
        self._reading = not busy
        if busy:
            self._transport.pause_reading()
        else:
            self._transport.resume_reading()

    def _refuse(self, error: ProtocolError) -> None:
        if not self._transport.is_closing():
            _LOG.warning("closing the remoting connection with %s: %s", self._peer, error)
            self._transport.abort()

    def _forget_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def pause_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._writable.clear()
        self._read_or_pause()

    def resume_writing(self) -> None:
        """See ``asyncio.Protocol``."""
        self._writable.set()
        self._read_or_pause()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends what is under way."""
        del exc
        self._forget_timer()
        self._writable.set()
        for task in self._tasks:
            task.cancel()

"""The event loop's time for the frames of clients: one client with much to do does not delay the others for long.

In each iteration of the loop the frames of a source, a principal or an address, are handled for a limited time,
however many connections it has; one frame of each connection is handled in any case, so that many clients with one
request each are served together. The others wait, and in each iteration one connection continues: sources take turns,
and so do the connections of a source. Alone, a client that sends thousands at once loses the cost of the iterations.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final

from dledger_core.net.turns import Turns

TURN_S: Final = 0.0005
"""Time of a source in one iteration; at least one frame is handled. One read has up to 128 KiB, that is, thousands of
small requests."""
RECEIVE_S: Final = 0.001 / (1 << 20)
"""Time of a received byte, roughly: the loop has copied it, and decrypted it if the port speaks TLS."""


class ClientTurns:
    """The turns of a port's clients; belongs to its event loop."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._waiting: Turns[Callable[[], None]] = Turns()
        self._used: dict[str, float] = {}

    def left_s(self, source: str) -> float:
        """Return the time that a source may use now; none while connections of it wait."""
        return 0.0 if source in self._waiting else TURN_S - self._used.get(source, 0.0)

    def use(self, source: str, seconds: float) -> None:
        """Count time of this iteration."""
        if not self._used:
            self._loop.call_soon(self._used.clear)
        self._used[source] = self._used.get(source, 0.0) + seconds

    def wait(self, source: str, handle: Callable[[], None]) -> None:
        """Call ``handle`` in the source's next turn, which may last for ``TURN_S``."""
        if not self._waiting:
            self._loop.call_soon(self._next)
        self._waiting.add(source, handle, 1)

    def _next(self) -> None:
        [handle] = self._waiting.take(1)
        if self._waiting:
            self._loop.call_soon(self._next)
        handle()


class ConnectionTurns:
    """The turns of one connection.

    Args:
        port: those of all clients.
        source: principal or address, whose turns the connection shares.
        deliver: delivers frames until ``is_over``, at least one; returns whether more have arrived, or a large one is
            arriving.
        on_waiting: called when ``is_waiting`` has changed.

    Attributes:
        is_waiting: whether frames wait for the next turn. Meanwhile nothing is read, or a client that sends faster
            than its turns allow would fill the node's memory.
        ends: time on the clock of ``time.perf_counter`` when the turn ends.
    """

    __slots__ = ("_deliver", "_on_waiting", "_port", "_source", "ends", "is_waiting")

    def __init__(
        self, port: ClientTurns, source: str, deliver: Callable[[], bool], on_waiting: Callable[[], None]
    ) -> None:
        self._port = port
        self._source = source
        self._deliver = deliver
        self._on_waiting = on_waiting
        self.is_waiting = False
        self.ends = 0.0

    def received(self, nbytes: int) -> None:
        """Deliver frames for as long as the source has time."""
        # Bytes count as they arrive: a large payload is a frame only at its end
        # (``test_received_bytes_of_many_connections_count_together``).
        self._port.use(self._source, nbytes * RECEIVE_S)
        if not self.is_waiting:
            self._take(self._port.left_s(self._source))

    def _take(self, seconds: float) -> None:
        self.ends = time.perf_counter() + seconds
        has_more = self._deliver()
        left_s = self.ends - time.perf_counter()
        self._port.use(self._source, seconds - left_s)
        if has_more and left_s <= 0:
            self.is_waiting = True
            self._port.wait(self._source, self._continue)
            self._on_waiting()

    def _continue(self) -> None:
        self.is_waiting = False
        self._take(TURN_S)
        if not self.is_waiting:
            self._on_waiting()

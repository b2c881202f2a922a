"""Nodes that do not respond: the kernel takes long to report a frozen process, as it does a lost network.

While a connection has requests without a response, a client counts the ticks in which no byte moved, in either
direction: a large response on a slow network is no silence. Ticks and not seconds, so that a client that stalls
itself does not count that time. A quiet node is asked whether it runs, because a long poll is quiet too. Without a
response to that the node is silent until a byte arrives.

Invariant: silence alone never ends a plain append, which only its deadline or its connection's end makes an unknown
outcome (``test_plain_append_in_flight_waits_for_its_outcome_and_later_ones_follow``): a silent node may only be slow,
and a repeat of the append would then be written twice.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Final, Generic, Protocol, TypeVar

from dledger_core.net.connection import Connection

TICK_S: Final = 0.05
PROBE_TICKS: Final = 7
"""Quiet ticks after which a node is asked whether it runs: a few heartbeats."""
SILENT_TICKS: Final = 12
"""Quiet ticks after which a node is silent."""
CONNECT_S: Final = 0.35
"""Time after which a node that does not complete a connection is silent too; the attempt continues."""


class WhenSilent(Enum):
    """Treatment of a request whose node is silent."""

    WAIT = "wait"
    """It waits for its outcome: to send it again might append twice, or no other node can serve it."""
    LEAVE = "leave"
    """It fails at once: any node can serve it."""
    FOLLOW = "follow"
    """It fails once another node leads: only the leader can serve it, and a leader that is only slow still will."""


class Silence:
    """The silence of one connection."""

    def __init__(self) -> None:
        self._ticks = 0
        self._moved = (0, 0)
        self._silent_at: int | None = None

    def tick(self, connection: Connection, *, waits: bool) -> int:
        """Count a tick; return the number of quiet ticks, 0 unless requests wait for a response."""
        moved = connection.received_bytes, connection.write_buffer_bytes
        self._ticks = self._ticks + 1 if waits and moved == self._moved else 0
        self._moved = moved
        if self._ticks == SILENT_TICKS:
            self._silent_at = connection.received_bytes
        return self._ticks

    def is_silent(self, connection: Connection) -> bool:
        """Whether the node was silent, and no byte has arrived since."""
        return connection.is_open and self._silent_at == connection.received_bytes


class Watched(Protocol):
    """A connection with requests."""

    @property
    def in_flight(self) -> int:
        """Requests without a response."""

    def tick(self) -> bool:
        """Count a tick; return whether the node has become silent."""


W = TypeVar("W", bound=Watched)


class SilenceWatch(Generic[W]):
    """The clock of a client's connections; it runs only while requests wait for a response.

    Args:
        channels: returns the connections.
        on_silent: gets each one whose node has become silent.
    """

    def __init__(self, channels: Callable[[], Iterable[W]], on_silent: Callable[[W], None]) -> None:
        self._channels = channels
        self._on_silent = on_silent
        self._timer: asyncio.TimerHandle | None = None

    def start(self) -> None:
        """Start the clock unless it runs."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(TICK_S, self._tick)

    def _tick(self) -> None:
        self._timer = None
        channels = list(self._channels())
        for channel in channels:
            if channel.tick():
                self._on_silent(channel)
        if any(channel.in_flight for channel in channels):
            self.start()

    def stop(self) -> None:
        """Stop the clock."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

"""Deadlines of a port's connections: none holds memory, or a place, indefinitely without progress.

A periodic check compares each connection with its state at the previous check. So a frame costs nothing, and a
deadline is late by one interval at most.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from dledger_core.errors import DLedgerError, ProtocolError, UnreachableError
from dledger_core.net.connection import Connection


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds until a connection is closed.

    Attributes:
        frame_s: from the start of a frame to its end, while the other side may send.
        unsent_s: while the other side receives nothing of its queued bytes.
        idle_s: without a byte from the other side and with nothing to send.
    """

    frame_s: float
    unsent_s: float
    idle_s: float

    @property
    def interval_s(self) -> float:
        """Seconds between two checks."""
        return min(self.frame_s, self.unsent_s, self.idle_s) / 6


@dataclass(slots=True)
class _Seen:
    """A connection at the last check, and since when nothing has changed."""

    frames: int
    nbytes: int
    unsent: int
    frame_since: float
    bytes_since: float
    unsent_since: float


class DeadlineWatch:
    """Closes the connections of one port that are past a deadline.

    A late check counts as two intervals: this node was stopped, and has not read the bytes that arrived meanwhile.
    """

    def __init__(self, deadlines: Deadlines) -> None:
        self._deadlines = deadlines
        self._seen: dict[Connection, _Seen] = {}
        self._last: float | None = None
        self._watched_s = 0.0

    def check(self, connections: Iterable[Connection], now: float) -> None:
        """Compare the connections with the last check, and close those past a deadline."""
        # A node that was suspended has read nothing meanwhile, so all its clients would seem to be idle
        # (``test_connection_stays_open_if_this_node_was_stopped``).
        since = 0.0 if self._last is None else now - self._last
        self._last, self._watched_s = now, self._watched_s + min(since, 2 * self._deadlines.interval_s)
        self._compare(connections, self._watched_s)

    def _compare(self, connections: Iterable[Connection], now: float) -> None:
        before, self._seen = self._seen, {}
        for connection in list(connections):
            seen = before.get(connection) or _Seen(-1, -1, 0, now, now, now)
            self._seen[connection] = seen
            self._update(seen, connection, now)
            error = self._overdue(seen, now)
            if error is not None:
                connection.abort(error)

    def _update(self, seen: _Seen, connection: Connection, now: float) -> None:
        if seen.frames != connection.received_frames or not (connection.is_inside_frame and connection.is_reading):
            seen.frames, seen.frame_since = connection.received_frames, now
        unsent = connection.write_buffer_bytes
        if seen.unsent != unsent or not unsent:
            seen.unsent, seen.unsent_since = unsent, now
        if seen.nbytes != connection.received_bytes or unsent:
            seen.nbytes, seen.bytes_since = connection.received_bytes, now

    def _overdue(self, seen: _Seen, now: float) -> DLedgerError | None:
        deadlines = self._deadlines
        if now - seen.frame_since >= deadlines.frame_s:
            return ProtocolError("a frame was not completed in time", "", "", {"seconds": deadlines.frame_s})
        if now - seen.unsent_since >= deadlines.unsent_s:
            return UnreachableError("responses were not received in time", "", "", {"unsent_bytes": seen.unsent})
        if now - seen.bytes_since >= deadlines.idle_s:
            return UnreachableError("the connection was idle", "", "connect again", {"seconds": deadlines.idle_s})
        return None

"""The connection to one other node, and the task that keeps it open."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final

from dledger_core.config import Limits, Peer
from dledger_core.errors import DLedgerError, UnreachableError
from dledger_core.ids import MemberId
from dledger_core.net import codec
from dledger_core.net.connection import Connection
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.raft import Heartbeat, HeartbeatResponse
from dledger_core.server.replica.attachments import Attachments
from dledger_core.server.replica.clock_comparison import ClockComparison

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())

_PAUSE_MAX_S: Final = 1.0
"""Longest pause after a failed attempt: a node that returns is connected within about a second."""
_STEADY_S: Final = 5.0
"""A link that breaks sooner counts as a failed attempt, so that a node that refuses it is not dialed all the time."""
_SECOND: Final = 3
"""The node with the larger id waits this many times as long before it dials."""


class Link:
    """The connection to one peer, and the heartbeats that wait for the end of this iteration.

    Attributes:
        peer: the other node, with its newest known address.
        connection: the one in use, None while there is none.
        attached: the groups of that connection.
        by_smaller: whether the smaller of the two ids dialed it.
        claim: a newcomer that waits until the connection is silent.
        dialer: the task that keeps the link open, None for a node that is not listed.
        uses: number of connections used so far.
        failed_dials: picks the next address.
        received_bytes: as of the last tick in which bytes arrived.
        reported_bytes: bytes that the peer has received, as it said.
        beat_ticks: ticks since the peer's last heartbeats or responses to heartbeats.
        idle_ticks, unsent_ticks: ticks without received and without sent bytes.
    """

    __slots__ = (
        "attached",
        "beat_ticks",
        "by_smaller",
        "claim",
        "claim_ticks",
        "clocks",
        "connection",
        "dialer",
        "failed_dials",
        "heartbeats",
        "idle_ticks",
        "peer",
        "received_bytes",
        "reported_bytes",
        "responses",
        "unsent_ticks",
        "uses",
    )

    def __init__(self, peer: Peer, limits: Limits) -> None:
        self.peer = peer
        self.dialer: Dialer | None = None
        self.failed_dials = self.uses = 0
        self.clocks = ClockComparison(limits.clock_difference_ms, limits.clock_compare_ms)
        self.connection: Connection | None = None
        self.attached: Attachments | None = None
        self._start(by_smaller=False)

    def _start(self, *, by_smaller: bool) -> None:
        self.by_smaller = by_smaller
        self.claim: Connection | None = None
        self.claim_ticks = 0
        self.received_bytes = self.reported_bytes = 0
        self.beat_ticks = self.idle_ticks = self.unsent_ticks = 0
        self.heartbeats: list[tuple[int, Heartbeat]] = []
        self.responses: list[tuple[int, HeartbeatResponse]] = []

    def use(self, connection: Connection, *, by_smaller: bool) -> None:
        """Use a connection from now on; close the previous one, and a newcomer that waits."""
        before = (self.connection, self.claim)
        self.connection = connection
        self.uses += 1
        self._start(by_smaller=by_smaller)
        for other in before:
            if other is not None and other is not connection:
                other.close()

    def close(self) -> None:
        """Close the connections, and open no more."""
        if self.dialer is not None:
            self.dialer.stop()
        for connection in (self.connection, self.claim):
            if connection is not None:
                connection.close()

    @property
    def is_open(self) -> bool:
        """Whether there is an open connection."""
        return self.connection is not None and self.connection.is_open

    @property
    def is_foreign(self) -> bool:
        """Whether the node at the other end belongs to another cluster."""
        return self.attached is not None and self.attached.is_foreign

    def members(self) -> list[tuple[str, MemberId]]:
        """Return (group, member) of each attached group."""
        return [] if self.attached is None else self.attached.members()

    def prefers(self, newcomer: Connection, *, by_smaller: bool) -> bool:
        """Whether, of two connections between the same two processes, the newcomer is the one that stays."""
        # By a rule that both ends know: if each kept the one that it dialed, both would be closed
        # (test_connection_dialed_by_smaller_id_stays).
        same_process = self.connection is not None and self.connection.peer_hello.process == newcomer.peer_hello.process
        return same_process and by_smaller and not self.by_smaller

    def flush(self, wall_ms: int) -> None:
        """Send the heartbeats and responses of this iteration."""
        heartbeats, self.heartbeats = self.heartbeats, []
        responses, self.responses = self.responses, []
        if self.connection is not None:
            if heartbeats:
                self.connection.send_buffers(codec.heartbeats_frames(heartbeats, wall_ms))
            if responses:
                self.connection.send_buffers(codec.heartbeat_responses_frames(responses))

    def refuse_claim(self) -> None:
        """Close a newcomer, because the peer is alive."""
        if self.claim is not None:
            claim, self.claim = self.claim, None
            values = {"peer": str(self.peer.node_id)}
            claim.close(UnreachableError("the peer answers on another connection", claim.peer_address, "", values))
            _LOG.warning(
                "newcomer refused, the peer is connected: peer=%s from=%s", self.peer.node_id, claim.peer_address
            )


class Dialer:
    """Keeps one link connected; owns the task that does.

    Args:
        link: the link.
        dial: opens a connection to an address.
        take: uses a connection that was opened, unless the peer has opened one meanwhile; returns the one in use.
        ways: returns the addresses of the peer.
        waits: whether the peer has the smaller id, so that this node gives it time to dial first.
        limits: the node's limits.
    """

    def __init__(
        self,
        link: Link,
        dial: Callable[[Peer], Awaitable[Connection]],
        take: Callable[[Link, Connection], Connection],
        ways: Callable[[], Sequence[Peer]],
        *,
        waits: bool,
        limits: Limits,
    ) -> None:
        self._link = link
        self._dial = dial
        self._take = take
        self._ways = ways
        self._waits = waits
        self._limits = limits
        self._task = asyncio.create_task(self._keep_connected(), name=f"connect-{link.peer.node_id}")

    def stop(self) -> None:
        """Dial no more."""
        self._task.cancel()

    async def wait_stopped(self) -> None:
        """Return when the task has ended after ``stop``."""
        await asyncio.gather(self._task, return_exceptions=True)

    async def _keep_connected(self) -> None:
        limits = self._limits
        pause, logged = limits.link_pause_s, ""
        while True:
            if self._waits:
                await self._give_way(pause)
            try:
                if await self._stay_connected() >= _STEADY_S:
                    pause = limits.link_pause_s
                logged = ""
            except DLedgerError as error:
                if str(error) != logged:
                    logged = str(error)
                    _LOG.info("peer not connected: peer=%s error=%s", self._link.peer.node_id, error)
            except Exception:  # noqa: BLE001 - without this task the peer would never be reached again
                _LOG.exception("connecting failed: peer=%s", self._link.peer.node_id)
            # A link that breaks at once would otherwise cost a handshake and all attaches many times a second
            # (test_pause_grows_while_link_breaks_at_once).
            await asyncio.sleep(pause * random.uniform(0.75, 1.25))
            pause = min(pause * 1.5, _PAUSE_MAX_S)

    async def _give_way(self, pause: float) -> None:
        """Give the smaller id time to dial first, from the last loss on, so that two nodes seldom dial at once."""
        # It only waits: where the smaller id cannot reach it, the larger one dials too
        # (test_node_with_larger_id_dials_too).
        uses = -1
        while uses != self._link.uses:
            uses = self._link.uses
            await asyncio.sleep(pause * _SECOND)

    async def _stay_connected(self) -> float:
        """Open a connection, unless the peer has, and wait until it closes; return its duration in seconds."""
        loop, connection = asyncio.get_running_loop(), self._link.connection
        if connection is None or not connection.is_open:
            ways = self._ways()
            try:
                connection = await self._dial(ways[self._link.failed_dials % len(ways)])
            except DLedgerError:
                self._link.failed_dials += 1
                raise
            connection = self._take(self._link, connection)
        since = loop.time()
        await asyncio.shield(connection.closed)
        return loop.time() - since

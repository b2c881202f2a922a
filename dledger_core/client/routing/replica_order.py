"""The order in which a read asks the replicas: by role, by who served last, by recent failures."""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import dataclass
from typing import Final

from dledger_core.client.protocol import ReadFrom
from dledger_core.client.routing.known_log import KnownLog
from dledger_core.client.routing.leader_search import LeaderSearch
from dledger_core.client.routing.node_health import NodeHealth
from dledger_core.client.routing.node_queries import ASK_TIMEOUT_S
from dledger_core.errors import DLedgerError, OtherLogError, RequestTimedOutError, UnknownFeatureError, UnreachableError
from dledger_core.net.frame import Frame

FAILED_S: Final = 10.0
"""How long a replica that failed a read is asked after the others."""
LEADER_KEPT_S: Final = 10.0
"""How long reads that prefer a role presume the same leader."""
CONTACT_LOST_MS: Final = 1_000
"""A replica that had no contact with a leader for longer is asked after the others."""


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """The order in which a read asks the replicas; all of them are asked if need be.

    Attributes:
        read_from: the role to ask first.
        spread: readers with different numbers start at different replicas; None: at the replica that served last.
    """

    read_from: ReadFrom = "any"
    spread: int | None = None


ANY_REPLICA: Final = ReplicaChoice()


class ReplicaOrder:
    """Orders the replicas for the reads of one client. Belongs to one event loop."""

    def __init__(self, log: KnownLog, leader_search: LeaderSearch, health: NodeHealth) -> None:
        self._log = log
        self._health = health
        self._leader_search = leader_search
        self._last_good: str | None = None
        self._failed: dict[str, float] = {}
        self._leader_asked = float("-inf")

    async def nodes(self, choice: ReplicaChoice = ANY_REPLICA) -> list[str]:
        """Return the nodes in the order in which a read asks them; unresponsive ones and recent failures last."""
        now = asyncio.get_running_loop().time()
        self._failed = {node: until for node, until in self._failed.items() if until > now}
        order = list(self._log.pool.peers)
        if choice.spread is None:
            random.shuffle(order)
            order.sort(key=lambda node: 0 if node == self._last_good else 1 if node == self._log.leader else 2)
        else:
            first = choice.spread % len(order)
            order = order[first:] + order[:first]
        if choice.read_from != "any":
            leader = await self._leader_for_reads()
            order.sort(key=lambda node: (node == leader) != (choice.read_from == "leader"))
        unresponsive = self._health.unresponsive()
        order.sort(key=lambda node: node in self._failed or self._log.pool.address(node) in unresponsive)
        return order

    async def _leader_for_reads(self) -> str | None:
        """Return the presumed leader; None if no node knows one.

        A deposed leader still serves reads and so does not reveal its successor: ask the nodes again after a while.
        """
        now = asyncio.get_running_loop().time()
        if now - self._leader_asked >= LEADER_KEPT_S:
            self._log.leader, self._leader_asked = None, now
        if self._log.leader is None:
            with contextlib.suppress(DLedgerError):
                await self._leader_search.channel(ASK_TIMEOUT_S)
        return self._log.leader

    def served(self, node_id: str, frame: Frame) -> None:
        """Record that a replica served a read; one without contact to a leader may lack what others have."""
        contact_ms = frame.header.get("hl", 0)
        if isinstance(contact_ms, int) and 0 <= contact_ms <= CONTACT_LOST_MS:
            self._last_good = node_id
            self._failed.pop(node_id, None)
        else:
            self._avoid(node_id)

    def failed(self, node_id: str, error: DLedgerError) -> None:
        """Record that a replica failed a read."""
        if isinstance(error, UnknownFeatureError):
            return  # it serves all other requests
        self._avoid(node_id)
        if isinstance(error, UnreachableError | RequestTimedOutError | OtherLogError):
            self._log.leader_failed(node_id)
            self._leader_search.refresh()

    def _avoid(self, node_id: str) -> None:
        self._failed[node_id] = asyncio.get_running_loop().time() + FAILED_S
        if self._last_good == node_id:
            self._last_good = None

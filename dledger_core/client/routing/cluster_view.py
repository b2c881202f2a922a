"""A client's view of its group: the members, the node to ask next, and the time to wait."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from dledger_core.client.routing.channel import Channel, ChannelPool
from dledger_core.client.routing.known_log import KnownLog
from dledger_core.client.routing.leader_search import LeaderSearch
from dledger_core.client.routing.node_health import NODE_HEALTH, NodeHealth
from dledger_core.client.routing.node_queries import ASK_TIMEOUT_S, Enough, NodeQueries, majority
from dledger_core.client.routing.replica_order import ReplicaOrder
from dledger_core.config import Peer
from dledger_core.errors import DLedgerError
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.frame import Frame


class ClusterView:
    """The nodes of one group as seen by one client. Belongs to one event loop.

    Args:
        peers: the configured peers, which are only used to find the group.
        group: the group's name.
        log_uuid: the log; None = the one that is found first.
        credentials: the client's TLS files and token.
        health: of the nodes.

    Attributes:
        pool: the connections.
        log: who is there: the log, its members, its presumed leader.
        leader: where to ask for what only the leader can serve.
        replicas: where to ask for reads.
        health: of the nodes.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        group: str,
        log_uuid: str | None = None,
        credentials: Credentials = PLAINTEXT,
        health: NodeHealth = NODE_HEALTH,
    ) -> None:
        self.health = health
        self.pool = ChannelPool(peers, self._silent, credentials)
        self.log = KnownLog(self.pool, group, log_uuid)
        self._nodes = NodeQueries(self.log, health)
        self.leader = LeaderSearch(self.log, self._nodes)
        self.replicas = ReplicaOrder(self.log, self.leader, health)

    def _silent(self, channel: Channel) -> None:
        self.leader.leave(channel)

    async def ask_all(self, header: Mapping[str, Any], enough: Enough = majority) -> dict[str, Frame | DLedgerError]:
        """Send a request to every node; see ``NodeQueries.ask_all``."""
        await self.leader.learn_ids(ASK_TIMEOUT_S)
        return await self._nodes.ask_all(header, enough)

    async def close(self) -> None:
        """Cancel the searches and close all connections."""
        await self.leader.close()
        await self._nodes.close()
        await self.pool.close()

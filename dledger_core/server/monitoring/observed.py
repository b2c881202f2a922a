"""The parts of a node that its second port shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from dledger_core.client.verdict import survival_text
from dledger_core.ids import NodeId
from dledger_core.net.limits.budget import Budget
from dledger_core.server.config import ServerConfig
from dledger_core.server.group import Group
from dledger_core.server.hosted import HostedGroup
from dledger_core.server.maintenance.scrub import LiveRepairs, Scrub
from dledger_core.server.replica.members import Members
from dledger_core.server.services.service import ClientService


@dataclass(frozen=True, slots=True, kw_only=True)
class ObservedNode:
    """A node.

    Attributes:
        config: its settings.
        members: all nodes.
        groups: the groups that it was started with.
        service: serves its clients.
        appends: bytes of appends without a response.
        repairs: repairs damage.
        scrub: looks for damage.
        is_started: whether its stores are open.
        connected: the peers with an open connection.
        clients: number of connections of clients.
        refused_early: number of connections and frames refused before a service saw them, by the error's name.
        address_refusals: number of connections refused because their address had too many.
        handshakes: number of connections by the result of their TLS handshake.
        expiry: time when the first of its certificates expires, in seconds since the epoch; None without security.
    """

    config: ServerConfig
    members: Members
    groups: Mapping[str, Group]
    service: ClientService
    appends: Budget
    repairs: LiveRepairs
    scrub: Scrub
    is_started: Callable[[], bool]
    connected: Callable[[], list[NodeId]]
    clients: Callable[[], int]
    refused_early: Callable[[], Counter[str]]
    address_refusals: Callable[[], int]
    handshakes: Callable[[], Counter[str]]
    expiry: Callable[[], float | None]

    @property
    def refused(self) -> Counter[str]:
        """Number of requests, frames and connections that were refused, by the error's name."""
        return self.service.refused + self.refused_early()

    @property
    def quota_refusals(self) -> dict[str, int]:
        """Number of refusals by quota; most quotas are a principal's."""
        by_quota = {quota.value: count for quota, count in self.service.quotas.refused.items()}
        return by_quota | {"address_connections": self.address_refusals()}

    def requests(self) -> int:
        """Return the number of requests in progress that wait for the disk or for a change."""
        return sum(len(flow.tasks) for flow in self.service.flows.values())

    def not_ready(self) -> Iterator[str]:
        """Yield why the node does not serve a group; a group that waits to be bootstrapped is ready for that.

        A node that stores no entries, or that leads a group in which no append is acknowledged, is not ready either.
        """
        if not self.is_started():
            yield "the stores are being opened"
            return
        if self.service.is_draining:
            yield "the node is stopping"
        for name, group in self.groups.items():
            hosted = group.hosted
            if hosted is None:
                if not group.is_waiting:
                    yield f"group {name}: {group.reason}"
            elif not hosted.replica.space.accepts_entries:
                yield f"group {name}: the disk is nearly full: the node acknowledges no appends"
            elif hosted.replica.is_leader and failures_survived(hosted) < 0:
                yield f"group {name}: {survival_text(-1)}"


def failures_survived(hosted: HostedGroup) -> int:
    """Return how many more voters may fail, as the leader knows it from its followers."""
    return hosted.membership.report().failures_survived(leader_id=hosted.replica.node_id)

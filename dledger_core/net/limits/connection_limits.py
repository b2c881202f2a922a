"""Limits on the connections of clients to a port, in total and per address.

Nodes do not count, so that clients cannot keep them out. Only a hello shows whether a node or a client has connected:
until then a few more connections than the limits are accepted.
"""

from __future__ import annotations

import ipaddress
from collections import Counter
from typing import Final

from dledger_core.errors import BusyError, DLedgerError, QuotaExceededError, invariant

_NOT_CLIENTS_MAX: Final = 32
"""Connections of nodes, and those without a hello, in addition to the clients."""
_RETRY_AFTER_MS: Final = 500
_IPV6_PREFIX: Final = 64


def source_of(address: str) -> str:
    """Return the address that limits count by; of IPv6 the network, because one host has a whole one."""
    try:
        parsed = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address
    if parsed.version == 4:
        return address
    return str(ipaddress.ip_network((parsed, _IPV6_PREFIX), strict=False))


class ConnectionLimits:
    """Counts the open connections of a port; each limit is None if there is none.

    Args:
        total: connections of clients of all addresses; more get BUSY.
        per_address: connections of clients of one address; more get QUOTA_EXCEEDED.

    Attributes:
        address_refusals: connections that were refused because their address had too many.
    """

    def __init__(self, *, total: int | None = None, per_address: int | None = None) -> None:
        self._total = total
        self._per_address = per_address
        self._open = 0
        self._sources: Counter[str] = Counter()
        self._nodes: Counter[str] = Counter()
        self.address_refusals = 0

    def enter(self) -> None:
        """Count a new connection; raise BusyError if there are far too many. It must ``leave`` in any case."""
        # Invariant: the nodes' connections are among those of their source, and those among all that are open.
        self._open += 1
        if self._total is not None and self._open > self._total + _NOT_CLIENTS_MAX:
            raise self._too_many(self._total)

    def enter_from(self, source: str) -> None:
        """Count the address of a new connection; raise QuotaExceededError if it has far too many."""
        self._sources[source] += 1
        limit = self._per_address
        if limit is not None and self._sources[source] > limit + _NOT_CLIENTS_MAX:
            raise self._too_many_from(source, limit)

    def check_client(self, source: str) -> None:
        """Raise BusyError if a connection that has entered is one too many for a client.

        Raises:
            QuotaExceededError: its address has too many.
        """
        total, per_address = self._total, self._per_address
        if total is not None and self._open - self._nodes.total() > total:
            raise self._too_many(total)
        if per_address is not None and self._sources[source] - self._nodes[source] > per_address:
            raise self._too_many_from(source, per_address)

    def enter_as_node(self, source: str) -> None:
        """Count a connection that has entered as one of a node."""
        # Otherwise clients that take all connections keep the nodes apart, and the group has no leader
        # (``test_connections_of_nodes_do_not_count_as_clients``).
        self._nodes[source] += 1

    def leave(self, source: str, *, is_node: bool) -> None:
        """Count the end of a connection; ``source`` is empty if its address was never known."""
        self._open -= 1
        invariant(self._open >= 0, "a connection ends twice", source=source)
        for counter in (self._sources, *([self._nodes] if is_node else [])):
            counter[source] -= 1
            if counter[source] <= 0:
                del counter[source]

    def _too_many(self, limit: int) -> DLedgerError:
        return BusyError(
            f"{limit} clients are connected, which is the limit",
            "",
            "close connections, or raise the limit on open files",
            {"retry_after_ms": _RETRY_AFTER_MS},
        )

    def _too_many_from(self, source: str, limit: int) -> DLedgerError:
        self.address_refusals += 1
        return QuotaExceededError(
            f"{limit} clients are connected from {source}, which is the limit of one address",
            "",
            "close connections, or connect from several addresses",
            {"quota": "address_connections", "limit": limit, "retry_after_ms": _RETRY_AFTER_MS},
        )

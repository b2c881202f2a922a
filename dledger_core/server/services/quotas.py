"""Quotas of principals: shares of a node that one principal may occupy, over all of its connections.

A valid token alone would leave a principal free to slow down all the others. Without security there are no principals,
so there are no quotas either: the limits of a connection and of the node hold as before.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from enum import StrEnum

from dledger_core.config import Limits
from dledger_core.errors import DLedgerError, QuotaExceededError
from dledger_core.net.payloads import ByteBudget


class Quota(StrEnum):
    """One share: what is counted."""

    CONNECTIONS = "connections"
    APPEND_BYTES = "append_bytes"
    RESPONSE_BYTES = "response_bytes"
    WATCHES = "watches"
    AWAITED_GROUPS = "awaited_groups"
    LONG_POLLS = "long_polls"
    DIGESTS = "digests"
    LINEARIZABLE_READS = "linearizable_reads"
    PINS = "pins"
    PRODUCERS = "producers"
    OPEN_TRANSACTIONS = "open_transactions"

    @property
    def words(self) -> str:
        """The name in a sentence."""
        return self.value.replace("_", " ")


def exceeded(
    quota: Quota, principal: str, taken: str, limit: int, remedy: str, retry_after_ms: int
) -> QuotaExceededError:
    """Return the error of a principal that has taken its share, in words: ``taken``."""
    return QuotaExceededError(
        f"principal {principal} has {taken}, and the limit is {limit}",
        "",
        remedy,
        {"quota": quota.value, "principal": principal, "limit": limit, "retry_after_ms": retry_after_ms},
    )


class Tenant:
    """The shares that one principal has taken.

    Args:
        name: the principal.
        limits: the node's limits.
        refused: counts refusals by quota.
    """

    def __init__(self, name: str, limits: Limits, refused: Counter[Quota]) -> None:
        self.name = name
        self._retry_after_ms = limits.retry_after_ms
        self._limits = {quota: int(getattr(limits, f"principal_{quota.value}")) for quota in Quota}
        self._refused = refused
        self._taken: Counter[Quota] = Counter()

    @property
    def is_idle(self) -> bool:
        """Whether nothing is taken."""
        return not any(self._taken.values())

    def taken(self, quota: Quota) -> int:
        """Return the share that is taken."""
        return self._taken[quota]

    def take(self, quota: Quota, amount: int = 1) -> None:
        """Take a share; raise QuotaExceededError and take none if it does not fit. One taking alone always fits."""
        limit, taken = self._limits[quota], self._taken[quota]
        if taken and taken + amount > limit:
            self._refused[quota] += 1
            remedy = f"retry after {self._retry_after_ms} ms, or use fewer at once"
            raise exceeded(quota, self.name, f"{taken} {quota.words} in use", limit, remedy, self._retry_after_ms)
        self._taken[quota] = taken + amount

    def give(self, quota: Quota, amount: int = 1) -> None:
        """Give a share back."""
        self._taken[quota] -= amount

    @contextlib.contextmanager
    def lend(self, quota: Quota, amount: int = 1) -> Iterator[None]:
        """Take a share for the duration of the context; raise QuotaExceededError."""
        self.take(quota, amount)
        try:
            yield
        finally:
            self.give(quota, amount)


class PayloadBudget:
    """Memory for the large payloads of one principal, from the first byte of a frame: its share, and the node's.

    Args:
        tenant: the principal's shares.
        node: the memory for all clients.
    """

    def __init__(self, tenant: Tenant, node: ByteBudget) -> None:
        self._tenant = tenant
        self._node = node

    def take(self, nbytes: int) -> None:
        """Take bytes; raise QuotaExceededError or BusyError and take none if they do not fit."""
        self._tenant.take(Quota.APPEND_BYTES, nbytes)
        try:
            self._node.take(nbytes)
        except DLedgerError:
            self._tenant.give(Quota.APPEND_BYTES, nbytes)
            raise

    def give(self, nbytes: int) -> None:
        """Give bytes back."""
        self._node.give(nbytes)
        self._tenant.give(Quota.APPEND_BYTES, nbytes)


class Quotas:
    """The tenants of a node.

    Args:
        limits: the node's limits.

    Attributes:
        refused: refusals by quota since the start.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._tenants: dict[str, Tenant] = {}
        self.refused: Counter[Quota] = Counter(dict.fromkeys(Quota, 0))

    def tenant(self, principal: str) -> Tenant | None:
        """Return the shares of a principal; None for a connection without one."""
        if not principal:
            return None
        found = self._tenants.get(principal)
        if found is None:
            self._tenants = {name: tenant for name, tenant in self._tenants.items() if not tenant.is_idle}
            found = self._tenants[principal] = Tenant(principal, self._limits, self.refused)
        return found

"""Quotas of principals: shares of a node that one principal may occupy, over all of its connections.

A valid token alone would leave a principal free to slow down all the others. Without security there are no principals,
so there are no quotas either: the limits of a connection and of the node hold as before.
"""

from __future__ import annotations

from collections import Counter
from enum import StrEnum

from dledger_core.config import Limits
from dledger_core.errors import QuotaExceededError
from dledger_core.net.limits.budget import Allowance


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


class _Share(Allowance):
    """The part of one quota that a principal has taken."""

    def __init__(self, quota: Quota, principal: str, limits: Limits, refused: Counter[Quota]) -> None:
        super().__init__(int(getattr(limits, f"principal_{quota.value}")))
        self._quota = quota
        self._principal = principal
        self._refused = refused
        self._retry_after_ms = limits.retry_after_ms

    def _refusal(self) -> QuotaExceededError:
        self._refused[self._quota] += 1
        remedy = f"retry after {self._retry_after_ms} ms, or use fewer at once"
        taken = f"{self.taken} {self._quota.words} in use"
        return exceeded(self._quota, self._principal, taken, self._limit, remedy, self._retry_after_ms)


class Tenant:
    """The shares that one principal has taken; ``tenant[quota]`` is one of them.

    Args:
        name: the principal.
        limits: the node's limits.
        refused: counts refusals by quota.
    """

    def __init__(self, name: str, limits: Limits, refused: Counter[Quota]) -> None:
        self.name = name
        self._shares = {quota: _Share(quota, name, limits, refused) for quota in Quota}

    def __getitem__(self, quota: Quota) -> Allowance:
        return self._shares[quota]

    @property
    def is_idle(self) -> bool:
        """Whether nothing is taken."""
        return not any(share.taken for share in self._shares.values())


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

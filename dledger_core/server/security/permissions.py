"""The permission that each request needs: one table for all of them.

Producers and sinks with ``append`` also ask for the state of their own producers and transactions, and end their
transactions. Whatever changes a group, its members, its leader, its tables or what others wrote needs ``admin``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from dledger_core.net.protocol import Type
from dledger_core.server.security.principals import Permission

Rule = Permission | None | Callable[[Mapping[str, Any]], Permission | None]
"""None = any permission on the group, or, for a request about no group, any principal."""


def _pins(header: Mapping[str, Any]) -> Permission | None:
    return None if header.get("pin") is None else "read"


def _by_operation(default: str, **permissions: Permission) -> Callable[[Mapping[str, Any]], Permission]:
    """Return the rule of a request with operations; ``default`` is the one of a header without it."""
    return lambda header: permissions.get(str(header.get("op", default)), "admin")


REQUESTS: Final[Mapping[Type, Rule]] = {
    Type.ALIVE: None,
    Type.GROUPS: None,
    Type.METADATA: _pins,
    Type.WATCH: None,
    Type.READ: "read",
    Type.TIME: "read",
    Type.AT: "read",
    Type.DIGEST: "read",
    Type.DESCRIBE: "read",
    Type.AWAIT: "read",
    Type.APPEND: "append",
    Type.PRODUCER: _by_operation("state", state="append"),
    Type.TRANSACTION: "append",
    Type.MEMBER: _by_operation("list", list="read"),
    Type.RECOVER: "admin",
    Type.TRANSFER: "admin",
    Type.FOUND: "admin",
    Type.ADMIT: "admin",
    Type.CONTINUE: "admin",
}

WITHOUT_GROUP: Final = frozenset({Type.ALIVE, Type.GROUPS})
"""Requests about the node, and not about a group."""


def permission_of(header: Mapping[str, Any]) -> Permission | None:
    """Return the permission that a request needs; a type without a rule needs ``admin``."""
    rule = REQUESTS.get(header["t"], "admin")
    return rule(header) if callable(rule) else rule

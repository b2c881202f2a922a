"""The permission that each request needs: one table for all of them.

Producers and sinks with ``append`` also ask for the state of their own producers and transactions, and end their
transactions, which they name by their run. Whatever changes a group, its members, its leader, its tables or what others
wrote needs ``admin``, and so do the lists of producers and transactions, which name those of others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from dledger_core.net.protocol import Type
from dledger_core.server.security.principals import Permission

_TABLES_OF_READERS: Final = ("terms", "segments")
Rule = Permission | None | Callable[[Mapping[str, Any]], Permission | None]
"""None = any permission on the group, or, for a request about no group, any principal."""


def _pins(header: Mapping[str, Any]) -> Permission | None:
    return None if header.get("pin") is None else "read"


def _by_operation(default: str, **permissions: Permission) -> Callable[[Mapping[str, Any]], Permission]:
    """Return the rule of a request with operations; ``default`` is the one of a header without it."""
    return lambda header: permissions.get(str(header.get("op", default)), "admin")


def _table(header: Mapping[str, Any]) -> Permission:
    return "read" if header.get("table") in _TABLES_OF_READERS else "admin"


def _transaction(header: Mapping[str, Any]) -> Permission:
    """Return the permission for a transaction: to abort it whatever its run is an operator's command."""
    named = header.get("x")
    is_own = isinstance(named, Mapping) and bool(named.get("r"))
    return "admin" if header.get("op") == "abort" and not is_own else "append"


REQUESTS: Final[Mapping[Type, Rule]] = {
    Type.ALIVE: None,
    Type.GROUPS: None,
    Type.METADATA: _pins,
    Type.WATCH: None,
    Type.READ: "read",
    Type.TIME: "read",
    Type.AT: "read",
    Type.DIGEST: "read",
    Type.DESCRIBE: _table,
    Type.AWAIT: "read",
    Type.APPEND: "append",
    Type.PRODUCER: _by_operation("state", state="append"),
    Type.TRANSACTION: _transaction,
    Type.MEMBER: _by_operation("list", list="read"),
    Type.RECOVER: "admin",
    Type.TRANSFER: "admin",
    Type.FOUND: "admin",
    Type.ADMIT: "admin",
    Type.CONTINUE: "admin",
    Type.BACKUP: "admin",
}

WITHOUT_GROUP: Final = frozenset({Type.ALIVE, Type.GROUPS})
"""Requests about the node, and not about a group."""


def permission_of(header: Mapping[str, Any]) -> Permission | None:
    """Return the permission that a request needs; a type without a rule needs ``admin``."""
    rule = REQUESTS.get(header["t"], "admin")
    return rule(header) if callable(rule) else rule

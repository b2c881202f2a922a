"""The table of requests that a node serves: one row declares everything about one request.

What a client sends and gets is declared in ``net/messages.py``, and its call in ``client/protocol.py``. A request
without a row is refused, and a row without one of its columns is a type error.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Final, Generic, TypeVar

from dledger_core.config import Limits
from dledger_core.net import messages
from dledger_core.net.fields import Table
from dledger_core.net.frame import Frame
from dledger_core.net.limits.client_flow import Share
from dledger_core.net.limits.quotas import Quota
from dledger_core.server.security.principals import Permission
from dledger_core.server.services.requests import administration, appending, archiving, reading
from dledger_core.server.services.requests.calls import Call, GroupCall, GroupsCall, LogCall, Work

C = TypeVar("C", bound=Call)
M = TypeVar("M")
Rule = Permission | None | Callable[[Mapping[str, Any]], Permission | None]
"""None = any permission on the group, or, for a request about the node, any principal."""


class Effect(Enum):
    """Whether a request may change something.

    A node that stops refuses the requests without effect that wait: another node serves them. One that may have taken
    effect gets no response: an error would say that it had none (``tests/server/test_stopping.py``).
    """

    NONE = "none"
    CHANGE = "change"


@dataclass(frozen=True, slots=True)
class Request(Generic[C, M]):
    """One request.

    Attributes:
        message: its number and fields.
        about: what it concerns: the node, several groups, a group, or the log of a group.
        permission: what its principal needs, decided from the header. Producers and sinks with ``append`` also ask for
            the state of their own producers and transactions, and end their transactions, which they name by their run.
            Whatever changes a group, its members, its leader, its tables or what others wrote needs ``admin``, and so
            do the lists of producers and transactions, which name those of others.
        effect: whether it may change something.
        share: the principal's quota that it takes while it waits or works for long, and how much of it.
        serve: serves it within the call, or returns the work for a task of its own.
    """

    message: Table[M]
    about: type[C]
    permission: Rule
    effect: Effect
    share: Callable[[M], Share | None] | None
    serve: Callable[[C, M], Work | None]


def in_task(work: Callable[[C, M], Coroutine[Any, Any, None]]) -> Callable[[C, M], Work]:
    """Return the handler of a request that waits for the disk or for a change."""
    return lambda call, message: partial(work, call, message)


_AWAIT_GROUPS_MIN: Final = 8
"""An AWAIT counts as this many groups at least: the request itself takes as much memory."""
_TABLES_OF_READERS: Final = ("terms", "segments")


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


def _one(quota: Quota) -> Callable[[Any], Share]:
    return lambda _: (quota, 1)


def _share_of_await(message: messages.AwaitRequest) -> Share:
    return Quota.AWAITED_GROUPS, max(_AWAIT_GROUPS_MIN, message.count)


def _share_of_read(message: messages.ReadRequest) -> Share | None:
    if message.consistency == "linearizable":
        return Quota.LINEARIZABLE_READS, 1
    return (Quota.LONG_POLLS, 1) if message.wait_ms else None


_ROWS: Final = (
    # --- appends -------------------------------------------------------------------------------------------------
    Request(messages.APPEND, LogCall, "append", Effect.CHANGE, None, appending.append),
    Request(messages.PRODUCE, LogCall, "append", Effect.CHANGE, None, appending.produce),
    Request(messages.TRANSACTION, LogCall, _transaction, Effect.CHANGE, None, appending.transaction),
    Request(
        messages.PRODUCER, LogCall, _by_operation("state", state="append"), Effect.CHANGE, None, appending.producer
    ),
    # --- reads ---------------------------------------------------------------------------------------------------
    Request(messages.METADATA, LogCall, _pins, Effect.NONE, None, reading.metadata),
    Request(messages.READ, LogCall, "read", Effect.NONE, _share_of_read, in_task(reading.read)),
    Request(messages.TIME, LogCall, "read", Effect.NONE, None, in_task(reading.time)),
    Request(messages.SPLIT, LogCall, "read", Effect.NONE, None, in_task(reading.split)),
    Request(messages.AT, LogCall, "read", Effect.NONE, None, in_task(reading.at)),
    Request(messages.DESCRIBE, LogCall, _table, Effect.NONE, None, in_task(reading.describe)),
    Request(messages.DIGEST, LogCall, "read", Effect.NONE, _one(Quota.DIGESTS), in_task(reading.digest)),
    Request(messages.AWAIT, GroupsCall, "read", Effect.NONE, _share_of_await, in_task(reading.await_entries)),
    Request(messages.BACKUP, LogCall, "admin", Effect.NONE, None, in_task(reading.backup)),
    # --- the archive ---------------------------------------------------------------------------------------------
    Request(messages.RANGES, LogCall, "read", Effect.NONE, None, in_task(archiving.ranges)),
    Request(messages.PROVE, LogCall, "admin", Effect.CHANGE, _one(Quota.DIGESTS), in_task(archiving.prove)),
    Request(messages.ARCHIVE_RANGES, LogCall, "read", Effect.NONE, None, in_task(archiving.archived_ranges)),
    Request(messages.ARCHIVE_END, LogCall, "admin", Effect.CHANGE, None, in_task(archiving.end)),
    # --- the node and its groups ---------------------------------------------------------------------------------
    Request(messages.ALIVE, Call, None, Effect.NONE, None, administration.alive),
    Request(messages.GROUPS, Call, None, Effect.NONE, None, administration.groups),
    Request(messages.WATCH, LogCall, None, Effect.NONE, _one(Quota.WATCHES), in_task(administration.watch)),
    Request(
        messages.MEMBER,
        LogCall,
        _by_operation("list", list="read"),
        Effect.CHANGE,
        None,
        in_task(administration.member),
    ),
    Request(messages.TRANSFER, LogCall, "admin", Effect.CHANGE, None, in_task(administration.transfer)),
    Request(messages.FOUND, GroupCall, "admin", Effect.CHANGE, None, in_task(administration.bootstrap)),
    Request(messages.ADMIT, GroupCall, "admin", Effect.CHANGE, None, in_task(administration.admit)),
    Request(messages.CONTINUE, GroupCall, "admin", Effect.CHANGE, None, in_task(administration.recover_log)),
)
REQUESTS: Final[Mapping[int, Request[Any, Any]]] = {row.message.number: row for row in _ROWS}


def permission_of(header: Mapping[str, Any]) -> Permission | None:
    """Return the permission that a request needs; a type without a row needs ``admin``."""
    row = REQUESTS.get(header["t"])
    rule: Rule = "admin" if row is None else row.permission
    return rule(header) if callable(rule) else rule


def groups_of(frame: Frame, limits: Limits) -> list[str]:
    """Return the groups that a request is about; one of a type without a row must name one."""
    row = REQUESTS.get(frame.header["t"])
    about: type[Call] = GroupCall if row is None else row.about
    return about.groups_of(frame, limits)

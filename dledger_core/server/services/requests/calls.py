"""A client's request on a node, and the state that all requests share."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

from dledger_core.checksum import Buffer
from dledger_core.config import Limits
from dledger_core.errors import DLedgerError, ProtocolError, UnknownGroupError
from dledger_core.net import codec, messages
from dledger_core.net.connection import Connection
from dledger_core.net.fields import Table, str_field
from dledger_core.net.frame import Frame
from dledger_core.net.limits.budget import Budget
from dledger_core.net.limits.client_flow import ClientFlow
from dledger_core.net.limits.quotas import Quotas
from dledger_core.net.protocol import Type
from dledger_core.server.config import ServerConfig
from dledger_core.server.group import Group
from dledger_core.server.replica.members import Members
from dledger_core.server.services.row_quotas import WriterQuotas

M = TypeVar("M")
Work = Callable[[], Coroutine[Any, Any, None]]
"""Serves a request; not a coroutine yet, because a task that is refused never starts one."""


class ServedNode:
    """The parts that the requests of all connections share: the node, its groups, limits on the work for clients.

    ``inflight_bytes_max`` limits the responses of all connections together, separately from the appends' own limit, so
    that readers cannot keep producers out.

    Attributes:
        commit_history: returns recent durations of a group's commits on this node; a second port sets it.
    """

    def __init__(
        self, config: ServerConfig, members: Members, groups: Mapping[str, Group], node_uuid: Callable[[], str]
    ) -> None:
        self.config = config
        self.limits = config.limits
        self.members = members
        self.groups = groups
        self.node_uuid = node_uuid
        self.responses = Budget(config.inflight_bytes_max, config.limits.retry_after_ms)
        self.digests = asyncio.Semaphore(config.limits.digests_at_once)
        # A response is charged when its size is known: few are read at once, so that few are not charged.
        self.reading = asyncio.Semaphore(config.limits.digests_at_once + 1)
        self.quotas = Quotas(config.limits)
        self.writers = WriterQuotas(config.limits, self.quotas.refused)
        self.commit_history: Callable[[str], list[int] | None] = lambda _: None

    def group(self, name: str) -> Group:
        """Return a group; raise UnknownGroupError."""
        group = self.groups.get(name)
        if group is None:
            names = ", ".join(sorted(self.groups))
            raise UnknownGroupError(
                f"{self.config.self_id} does not host group {name!r}", "", f"use one of: {names}", {"group": name}
            )
        return group


class Call:
    """One request about the node, and the way back to its client.

    An append creates one: a class with slots, because a frozen dataclass takes three times as long to create.
    """

    __slots__ = ("connection", "flow", "frame", "node")

    def __init__(self, node: ServedNode, connection: Connection, flow: ClientFlow, frame: Frame) -> None:
        self.node = node
        self.connection = connection
        self.flow = flow
        self.frame = frame

    @staticmethod
    def groups_of(frame: Frame, limits: Limits) -> list[str]:
        """Return the groups that a request is about; its sender needs a permission on each."""
        del frame, limits
        return []

    @property
    def routing(self) -> dict[str, Any]:
        """The keys of the response that all messages share."""
        return {"r": self.frame.header["r"]}

    def respond(self, table: Table[M], response: M, *payload: Buffer) -> None:
        """Send the response; one that does not fit a frame becomes an error."""
        try:
            self.connection.send(table.encode(response, **self.routing), *payload)
        except ProtocolError as error:
            self.refuse(error)

    def refuse(self, error: DLedgerError, frames: Sequence[Frame] = ()) -> None:
        """Send an error as the response to this request, or to each of several; count it."""
        for frame in frames or (self.frame,):
            self.flow.refused[error.name] += 1
            self.connection.send({"t": Type.FAILURE, "r": frame.header["r"], "e": error.to_wire()})

    @contextlib.contextmanager
    def charged(self, nbytes: int) -> Iterator[None]:
        """Charge a response to the node and the principal for the duration of the context."""
        with self.node.responses.lend(nbytes), self.flow.lend_response(nbytes):
            yield


class GroupsCall(Call):
    """A request about several groups, which its payload names."""

    __slots__ = ()

    @staticmethod
    def groups_of(frame: Frame, limits: Limits) -> list[str]:
        """See ``Call``."""
        return list(codec.parse_seen(frame.payload, messages.AWAIT.decode(frame.header).count, limits.await_groups))


class GroupCall(Call):
    """A request about one group that this node was started with; the group need not be hosted."""

    __slots__ = ("group",)

    def __init__(self, node: ServedNode, connection: Connection, flow: ClientFlow, frame: Frame) -> None:
        super().__init__(node, connection, flow, frame)
        self.group = node.group(str_field(frame.header, "g"))

    @staticmethod
    def groups_of(frame: Frame, limits: Limits) -> list[str]:
        """See ``Call``."""
        del limits
        return [str_field(frame.header, "g")]


class LogCall(GroupCall):
    """A request about the log of a group that this node hosts."""

    __slots__ = ("hosted",)

    def __init__(self, node: ServedNode, connection: Connection, flow: ClientFlow, frame: Frame) -> None:
        super().__init__(node, connection, flow, frame)
        if (wanted := frame.header.get("lu")) is not None:
            self.group.check_log(wanted)
        self.hosted = self.group.services()

    @property
    def routing(self) -> dict[str, Any]:
        """Those keys, with the time since a contact with a leader, and the index of the configuration in force."""
        shared = {"r": self.frame.header["r"], "hl": self.group.leader_contact_ms}
        # Without the members: to describe them for each response costs a twentieth of an append.
        if (index := self.node.members.index(self.group.name)) >= 0:
            shared["cv"] = index
        return shared

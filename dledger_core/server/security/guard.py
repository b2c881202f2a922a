"""Authorization: the requests of one connection, each checked before the service gets it."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Sequence

from dledger_core.config import Limits
from dledger_core.errors import DLedgerError, ForbiddenError, ProtocolError, UnauthenticatedError
from dledger_core.net.connection import ClientHandler, Connection
from dledger_core.net.fields import int_field
from dledger_core.net.frame import Frame
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.net.protocol import Type
from dledger_core.server.admin_log import AdminLog
from dledger_core.server.security.authentication import Authentication, Grant
from dledger_core.server.security.principals import Permission, Principal
from dledger_core.server.services.requests.table import groups_of, permission_of

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())


class Guard:
    """The handler of one connection to a node with security.

    Args:
        service: gets the requests that the principal may send.
        authentication: the principals.
        grant: the proof that the connection has shown.
        admin_log: gets each request of a client that needs ``admin`` and is allowed.
        limits: the node's limits.
        refused: counts the requests that it refuses, by the error's name.
    """

    def __init__(
        self,
        service: ClientHandler,
        authentication: Authentication,
        grant: Grant,
        admin_log: AdminLog,
        limits: Limits,
        refused: Counter[str] | None = None,
    ) -> None:
        self._service = service
        self._refused = Counter() if refused is None else refused
        self._authentication = authentication
        self._grant = grant
        self._admin_log = admin_log
        self._limits = limits
        self._generation = authentication.principals.generation
        self._principal: Principal = authentication.principal_of(grant)

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Pass a request on if the principal may send it; respond with an error otherwise."""
        number = int_field(frame.header, "r", 1)
        try:
            self._check(connection, frame)
        except ProtocolError:
            raise
        except DLedgerError as error:
            _LOG.warning("request refused: peer=%s type=%s error=%s", connection.who, frame.header["t"], error)
            self._refused[error.name] += 1
            connection.send({"t": Type.FAILURE, "r": number, "e": error.to_wire()})
            if isinstance(error, UnauthenticatedError):
                connection.close(error)
            return
        self._service.on_frame(connection, frame)

    def on_appends(self, connection: Connection, frames: Sequence[Frame]) -> bool:
        """Pass plain appends to one log on, which need the same permission; otherwise respond to each."""
        try:
            self._check(connection, frames[0])
        except DLedgerError:
            for frame in frames:
                if connection.is_open:
                    self.on_frame(connection, frame)
            return False
        return self._service.on_appends(connection, frames)

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """See ``Handler``."""
        self._service.on_close(connection, error)

    def _check(self, connection: Connection, frame: Frame) -> None:
        principals = self._authentication.principals
        if self._generation != principals.generation:
            self._principal = self._authentication.principal_of(self._grant)
            self._generation = principals.generation
        header = frame.header
        permission = permission_of(header)
        groups = groups_of(frame, self._limits)
        refused = [group for group in groups if not self._may(permission, group)]
        if refused:
            raise _forbidden(self._principal, permission, refused[0])
        if permission == "admin" and not self._grant.is_node:
            self._admin_log.record_request(groups[0], connection.who, _command(frame))

    def _may(self, permission: Permission | None, group: str) -> bool:
        return self._principal.may_any(group) if permission is None else self._principal.may(permission, group)


def _forbidden(principal: Principal, permission: Permission | None, group: str) -> ForbiddenError:
    wanted = permission or "read"
    return ForbiddenError(
        f"principal {principal.name} has no permission {wanted} on group {group[:127]}",
        "",
        "grant it in the file of --tokens on the nodes",
        {"principal": principal.name, "permission": wanted, "group": group[:127]},
    )


def _command(frame: Frame) -> str:
    """Return a request for the admin log, with its arguments; the first word is its kind."""
    shown = {key: value for key, value in frame.header.items() if key not in ("t", "r", "g", "lu")}
    try:
        name = Type(frame.header["t"]).name.lower()
    except ValueError:
        name = f"unknown {frame.header['t']}"
    return f"{name} {shown}" if shown else name

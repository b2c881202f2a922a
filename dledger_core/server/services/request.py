"""One request of a client and the way back to who asked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from dledger_core.checksum import Buffer
from dledger_core.errors import DLedgerError, ProtocolError
from dledger_core.net.connection import Connection
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.appends import Appends
from dledger_core.server.services.flow import ClientFlow
from dledger_core.server.services.positions import Positions
from dledger_core.server.services.reads import Reads
from dledger_core.server.services.role_events import RoleFeed

__all__ = ["GroupRequest", "HostedGroup", "Request"]


@dataclass(frozen=True, slots=True)
class HostedGroup:
    """A group on this node with its services."""

    replica: Replica
    appends: Appends
    reads: Reads
    positions: Positions
    roles: RoleFeed


@dataclass(frozen=True, slots=True)
class Request:
    """A request that is about no group, or about many."""

    connection: Connection
    flow: ClientFlow
    frame: Frame

    def answer(self, kind: Type, fields: dict[str, Any], *payload: Buffer) -> None:
        """Answers; an answer that does not fit a frame becomes an error."""
        try:
            self.connection.send({"t": kind, "r": self.frame.header["r"]} | fields, *payload)
        except ProtocolError as error:
            self.refuse(error)

    def refuse(self, error: DLedgerError) -> None:
        """Answers with an error."""
        header = {"t": Type.FAILURE, "r": self.frame.header["r"]}
        try:
            self.connection.send(header | {"e": error.to_wire()})
        except ProtocolError:  # it repeats what was asked
            self.connection.send(header | {"e": type(error)("the error is too long to be told").to_wire()})


@dataclass(frozen=True, slots=True)
class GroupRequest(Request):
    """A request about one group that this node hosts."""

    hosted: HostedGroup

"""The client service: one handler for all client connections."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from dledger_core.errors import DLedgerError, ProtocolError, RecoveryRefusedError, UnreachableError, in_words, one_line
from dledger_core.net.connection import Connection
from dledger_core.net.fields import int_field
from dledger_core.net.frame import Frame
from dledger_core.net.limits.client_flow import ClientFlow
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.net.protocol import Type
from dledger_core.server.config import ServerConfig
from dledger_core.server.group import Group
from dledger_core.server.replica.members import Members
from dledger_core.server.services.requests.appending import append_plain
from dledger_core.server.services.requests.calls import Call, LogCall, ServedNode, Work
from dledger_core.server.services.requests.table import REQUESTS, Effect, Request
from dledger_core.tracing import is_traced

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())


class ClientService:
    """Serves clients; lives on the node's event loop. ``ClientFlow`` limits each connection.

    Attributes:
        node: what the requests share.
        refused: number of requests that were answered with an error, by the error's name.
        is_draining: whether the node is stopping.
    """

    def __init__(
        self, config: ServerConfig, members: Members, groups: Mapping[str, Group], node_uuid: Callable[[], str]
    ) -> None:
        self.node = ServedNode(config, members, groups, node_uuid)
        self._flows: dict[Connection, ClientFlow] = {}
        self.is_draining = False
        self.quotas = self.node.quotas
        self.refused: Counter[str] = Counter()

    @property
    def response_bytes(self) -> int:
        """Bytes of responses in memory."""
        return self.node.responses.taken_bytes

    @property
    def flows(self) -> Mapping[Connection, ClientFlow]:
        """The flow control of each connection that has sent a request."""
        return self._flows

    def drain(self) -> None:
        """Refuse the requests that wait, and later ones that could: another node serves them."""
        self.is_draining = True
        for flow in self._flows.values():
            flow.close()

    async def close(self) -> None:
        """Cancel requests in progress."""
        tasks = [task for flow in self._flows.values() for task in flow.tasks]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _stopping(self) -> UnreachableError:
        return UnreachableError(f"{self.node.config.self_id} is stopping", "", "ask another node")

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """Serve a request; raise ProtocolError for any other message."""
        int_field(frame.header, "r", 1)
        flow = self._flow_of(connection)
        try:
            self._dispatch(connection, flow, frame)
        except ProtocolError:
            raise
        except DLedgerError as error:
            Call(self.node, connection, flow, frame).refuse(error)
        flow.check_unsent()

    def on_appends(self, connection: Connection, frames: Sequence[Frame]) -> bool:
        """Serve plain appends to one log as one column; one by one if anything is wrong, or if each has a span."""
        if not is_traced() and self._append_together(connection, frames):
            return True
        for frame in frames:
            self.on_frame(connection, frame)
        return False

    def _append_together(self, connection: Connection, frames: Sequence[Frame]) -> bool:
        flow = self._flow_of(connection)
        try:
            append_plain(LogCall(self.node, connection, flow, frames[0]), frames)
        except DLedgerError as error:
            if len(frames) > 1 or isinstance(error, ProtocolError):
                return False
            Call(self.node, connection, flow, frames[0]).refuse(error)
        flow.check_unsent()
        return True

    def _flow_of(self, connection: Connection) -> ClientFlow:
        flow = self._flows.get(connection)
        if flow is None:
            tenant = self.quotas.tenant(connection.principal)
            flow = self._flows[connection] = ClientFlow(connection, self.node.limits, tenant, self.refused)
        return flow

    def _dispatch(self, connection: Connection, flow: ClientFlow, frame: Frame) -> None:
        kind = frame.header["t"]
        request = REQUESTS.get(kind)
        if request is None:
            if kind == Type.RECOVER:
                # Versions up to 0.2.0 gave votes back by it. Their command must not believe that it worked.
                remedy = "run dledger recover of this version; --lost names nodes that are lost"
                raise RecoveryRefusedError("votes are not given back", "", remedy)
            raise ProtocolError("not a request", connection.peer_address, "", {"type": kind})
        call = request.about(self.node, connection, flow, frame)
        message = request.message.decode(frame.header)
        work = request.serve(call, message)
        if work is None:
            return
        if self.is_draining and request.effect is Effect.NONE:
            raise self._stopping()
        flow.start(self._respond(request, call, work), None if request.share is None else request.share(message))

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """Cancel the connection's requests."""
        del error
        flow = self._flows.pop(connection, None)
        if flow is not None:
            flow.close()

    async def _respond(self, request: Request[Any, Any], call: Call, work: Work) -> None:
        try:
            await work()
        except asyncio.CancelledError:
            # A change that is cancelled may have taken effect: it gets no response, so its outcome is unknown.
            if request.effect is Effect.NONE:
                call.refuse(self._stopping())
            raise
        except DLedgerError as error:
            call.refuse(error)
        except Exception as error:  # noqa: BLE001 - the client gets a response, the log the traceback
            _LOG.exception("request failed: header=%s", one_line(in_words(call.frame.header)))
            call.refuse(DLedgerError(f"internal error: {type(error).__name__}: {error}"))

"""Requests to one node or to all nodes at once, and how long each node is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

from dledger_core.client.routing.known_log import KnownLog
from dledger_core.errors import BusyError, DLedgerError, UnknownGroupError
from dledger_core.net.dialing import WrongNodeError
from dledger_core.net.frame import Frame

ASK_TIMEOUT_S: Final = 1.0
UNRESPONSIVE_S: Final = 10.0
"""How long a node counts as unresponsive after a timeout."""
UNRESPONSIVE_TIMEOUT_S: Final = 0.25
"""Timeout of a request to an unresponsive node."""


def raise_wrong_node(responses: Iterable[object]) -> None:
    """Raise the WrongNodeError among responses: a wrong peers string is an error whichever node responds first."""
    for response in responses:
        if isinstance(response, WrongNodeError):
            raise response


class NodeQueries:
    """Asks the nodes of a group about themselves; a failure is a result too. Belongs to one event loop."""

    def __init__(self, log: KnownLog) -> None:
        self._log = log
        self._pool = log.pool
        self._unresponsive: dict[str, float] = {}

    async def ask(
        self, node_id: str, header: Mapping[str, Any], timeout_s: float = ASK_TIMEOUT_S
    ) -> Frame | DLedgerError:
        """Return one node's response, or its error."""
        request = {**header, "g": self._log.group}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            channel = await self._pool.channel(node_id, timeout_s)
            response = await channel.request(request, timeout_s=max(0.001, deadline - loop.time()))
        except DLedgerError as error:
            if loop.time() >= deadline:
                self._unresponsive.setdefault(node_id, loop.time() + UNRESPONSIVE_S)
            return error
        self._unresponsive.pop(node_id, None)
        return response

    async def ask_all(self, header: Mapping[str, Any]) -> dict[str, Frame | DLedgerError]:
        """Send a request to every node, in parallel, and wait at most a second for each.

        An unresponsive node gets a short timeout, unless no other node responds: one crashed machine must not slow
        down every query (``test_unresponsive_node_delays_metadata_once``).

        Raises:
            UnreachableError: no node responded.
            WrongNodeError: the peers string names another node at an address.
        """
        now = asyncio.get_running_loop().time()
        self._unresponsive = {node: until for node, until in self._unresponsive.items() if until > now}
        unresponsive = set(self._unresponsive)
        found = await self._ask_each(header, unresponsive)
        if unresponsive and not any(isinstance(response, Frame) for response in found.values()):
            found = await self._ask_each(header, ())
        raise_wrong_node(found.values())
        if not any(isinstance(response, Frame) for response in found.values()):
            failures = [response for response in found.values() if isinstance(response, DLedgerError)]
            refused = next((error for error in failures if isinstance(error, (UnknownGroupError, BusyError))), None)
            raise refused or self._log.unreachable(failures)
        return found

    async def _ask_each(
        self, header: Mapping[str, Any], unresponsive: Container[str]
    ) -> dict[str, Frame | DLedgerError]:
        nodes = list(self._pool.peers)
        timeouts = [UNRESPONSIVE_TIMEOUT_S if node in unresponsive else ASK_TIMEOUT_S for node in nodes]
        responses = await asyncio.gather(*(self.ask(node, header, s) for node, s in zip(nodes, timeouts, strict=True)))
        return dict(zip(nodes, responses, strict=True))

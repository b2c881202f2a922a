"""Requests to one node or to all nodes at once, and how long each node is waited for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from dledger_core.client.routing.channel import SilentError
from dledger_core.client.routing.known_log import KnownLog
from dledger_core.client.routing.node_health import NodeHealth
from dledger_core.client.routing.silence import WhenSilent
from dledger_core.errors import BusyError, DLedgerError, RequestTimedOutError, UnknownGroupError
from dledger_core.net import messages
from dledger_core.net.dialing import WrongNodeError
from dledger_core.net.frame import Frame

ASK_TIMEOUT_S: Final = 1.0
UNRESPONSIVE_TIMEOUT_S: Final = 0.25
"""How long an unresponsive node is waited for if the other responses do not suffice."""

Enough = Callable[[Mapping[str, Frame], int], bool]
"""Whether these responses suffice; the number is that of the nodes."""


def majority(found: Mapping[str, Frame], nodes: int) -> bool:
    """Whether most nodes have responded."""
    return len(found) > nodes // 2


def everyone(found: Mapping[str, Frame], nodes: int) -> bool:
    """Whether all nodes have responded."""
    return len(found) == nodes


def newest_leader(found: Mapping[str, Frame], nodes: int) -> bool:
    """Whether most nodes have responded to METADATA, and the leader of the newest term among them.

    A follower may not know the newest commit index, so without the leader the end of the log is not known
    (``test_bounds_wait_for_a_slow_leader_and_not_for_a_follower``). Of any majority one node knows the newest term.
    """
    if not majority(found, nodes):
        return False
    responses = [messages.METADATA_OK.decode(frame.header) for frame in found.values()]
    return max(responses, key=lambda response: response.term).leader in found


def raise_wrong_node(responses: Iterable[object]) -> None:
    """Raise the WrongNodeError among responses: a wrong peers string is an error whichever node responds first."""
    for response in responses:
        if isinstance(response, WrongNodeError):
            raise response


class NodeQueries:
    """Asks the nodes of a group about themselves; a failure is a result too. Belongs to one event loop."""

    def __init__(self, log: KnownLog, health: NodeHealth) -> None:
        self._log = log
        self._pool = log.pool
        self._health = health
        self._failures: dict[str, DLedgerError] = {}
        self._asked: set[asyncio.Task[Frame | DLedgerError]] = set()

    async def ask(self, node_id: str, header: Mapping[str, Any]) -> Frame | DLedgerError:
        """Return one node's response, or its error, within a second."""
        request = {**header, "g": self._log.group}
        loop, address = asyncio.get_running_loop(), self._pool.address(node_id)
        deadline = loop.time() + ASK_TIMEOUT_S
        try:
            channel = await self._pool.channel(node_id, ASK_TIMEOUT_S)
            left_s = max(0.001, deadline - loop.time())
            response = await channel.request(request, timeout_s=left_s, when_silent=WhenSilent.LEAVE)
        except DLedgerError as error:
            self._failures[node_id] = error
            if loop.time() >= deadline or isinstance(error, SilentError):
                self._health.missed(address)
            return error
        self._failures.pop(node_id, None)
        self._health.responded(address)
        return response

    async def ask_all(self, header: Mapping[str, Any], enough: Enough = majority) -> dict[str, Frame | DLedgerError]:
        """Send a request to every node; see ``ask_each``.

        Raises:
            UnreachableError: no node responded.
            WrongNodeError: the peers string names another node at an address.
        """
        found = await self.ask_each(self._pool.peers, header, enough)
        raise_wrong_node(found.values())
        if not any(isinstance(response, Frame) for response in found.values()):
            failures = [response for response in found.values() if isinstance(response, DLedgerError)]
            refused = next((error for error in failures if isinstance(error, (UnknownGroupError, BusyError))), None)
            raise refused or self._log.unreachable(failures)
        return found

    async def ask_each(
        self, nodes: Iterable[str], header: Mapping[str, Any], enough: Enough
    ) -> dict[str, Frame | DLedgerError]:
        """Send a request to nodes, in parallel, and wait at most a second for each.

        Once the responses suffice, the other nodes get a moment more, and unresponsive ones none: a hung machine must
        not slow down every query (``test_hung_node_delays_bounds_once``). The requests to them continue, and a response
        shows that the node is back.
        """
        loop = asyncio.get_running_loop()
        asked = {node: asyncio.create_task(self.ask(node, header)) for node in nodes}
        self._asked.update(asked.values())
        for task in asked.values():
            task.add_done_callback(self._asked.discard)
        latest, suffices_at = loop.time() + UNRESPONSIVE_TIMEOUT_S, None
        try:
            while left := {node: task for node, task in asked.items() if not task.done()}:
                responses = {node: task.result() for node, task in asked.items() if task.done()}
                found = {node: each for node, each in responses.items() if isinstance(each, Frame)}
                if suffices_at is None and enough(found, len(asked)):
                    suffices_at = loop.time()
                ends = {node: self._waits_until(node, suffices_at, latest) for node in left}
                end = max(ends.values()) if found else float("inf")
                if end <= loop.time():
                    break
                timeout = None if end == float("inf") else end - loop.time()
                await asyncio.wait(left.values(), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        except BaseException:
            for task in asked.values():
                task.cancel()
            raise
        return {node: self._outcome(node, task) for node, task in asked.items()}

    def _waits_until(self, node_id: str, suffices_at: float | None, latest: float) -> float:
        """Return the time up to which a response is waited for; the request itself ends after a second."""
        address = self._pool.address(node_id)
        if self._health.is_unresponsive(address):
            return latest if suffices_at is None else suffices_at
        return float("inf") if suffices_at is None else suffices_at + self._health.hedge_delay_s(address)

    def _outcome(self, node_id: str, task: asyncio.Task[Frame | DLedgerError]) -> Frame | DLedgerError:
        if task.done():
            return task.result()
        address = self._pool.address(node_id)
        self._health.missed(address)
        # The error of an earlier request says more, and where the node may have moved to another address.
        return self._failures.get(node_id) or RequestTimedOutError("no response in time", address)

    async def close(self) -> None:
        """Cancel the requests that no call waits for."""
        tasks = list(self._asked)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

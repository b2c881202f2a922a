"""The nodes of a Java group: one connection each, and who leads, learned by METADATA and from redirects."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

from dledger_core.client.routing.retry import Retry, Timeouts
from dledger_core.config import Peer
from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    LeadershipLostError,
    NoLeaderError,
    NotLeaderError,
    RequestTimedOutError,
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.rocketmq.client.channel import JavaChannel
from dledger_core.rocketmq.remoting.requests import MetadataRequest, Request
from dledger_core.rocketmq.remoting.responses import MetadataReply, Reply

__all__ = ["JavaNodes"]

_R = TypeVar("_R", bound=Reply)
CONNECT_TIMEOUT_S: Final = 3.0
ASK_TIMEOUT_S: Final = 1.0
_LEADER_GONE = (NotLeaderError, NoLeaderError, UnreachableError, LeadershipLostError, RequestTimedOutError)


class JavaNodes:
    """Sends requests to the nodes of one group. Belongs to one event loop.

    Attributes:
        peers: the nodes by id.
        leader_id: who is believed to lead.
        connected: whether a node has responded before.
    """

    def __init__(self, peers: Sequence[Peer], group: str) -> None:
        self.peers = {str(peer.node_id): peer for peer in peers}
        self.group = group
        self.leader_id: str | None = None
        self.connected = False
        self._channels: dict[str, JavaChannel] = {}
        self._locks: dict[str, asyncio.Lock] = {node: asyncio.Lock() for node in self.peers}
        self._discovery = asyncio.Lock()

    def check_node(self, node_id: str) -> str:
        """Returns ``node_id`` if the peers string names it, else raises BadRequestError."""
        if node_id not in self.peers:
            raise BadRequestError(f"no node {node_id!r}", "peers", f"the nodes are: {', '.join(self.peers)}")
        return node_id

    async def ask(self, request: Request, kind: type[_R], timeout_s: float) -> _R:
        """Sends a request to the node that it names, once; connects first if need be."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        channel = await self._channel(request.remote_id, min(CONNECT_TIMEOUT_S, timeout_s))
        reply = await channel.call(request, kind, max(0.001, deadline - loop.time()))
        self.connected = True
        return reply

    async def _channel(self, node_id: str, timeout_s: float) -> JavaChannel:
        channel = self._channels.get(node_id)
        if channel is not None and channel.is_open:
            return channel
        async with self._locks[node_id]:  # one connection, however many requests wait for it
            channel = self._channels.get(node_id)
            if channel is None or not channel.is_open:
                channel = JavaChannel(self.peers[node_id])
                await channel.open(timeout_s)
                self._channels[node_id] = channel
            return channel

    async def to_leader(
        self, make: Callable[[str], Request], kind: type[_R], *, timeout_s: float, idempotent: bool
    ) -> _R:
        """Returns the leader's reply, following redirects and elections.

        Args:
            make: returns the request for the node with this id.
            kind: of the reply.
            timeout_s: bound on everything.
            idempotent: may take effect twice without harm.

        Raises:
            RequestTimedOutError, LeadershipLostError: it may have taken effect.
            DLedgerError: it has not.
        """
        retry = Retry(Timeouts(timeout_s), idempotent=idempotent)
        while True:
            node: str | None = None
            try:
                node = await self.leader()
                return await self.ask(make(node), kind, retry.attempt_s)
            except DLedgerError as error:
                if node is not None and isinstance(error, _LEADER_GONE):
                    self._leader_failed(node, error)
                await retry.failed(error)

    async def leader(self) -> str:
        """Returns who is believed to lead; asks all nodes if nobody is.

        Raises:
            NoLeaderError: the nodes that answered know of no leader.
            UnreachableError: no node answered.
        """
        if self.leader_id is None:
            async with self._discovery:
                if self.leader_id is None:
                    self.leader_id = await self._discover()
        return self.leader_id

    async def connect_leader(self) -> None:
        """Connects to who leads, if it can be done now: then what is asked side by side leaves in its order."""
        with contextlib.suppress(DLedgerError):
            await self._channel(await self.leader(), CONNECT_TIMEOUT_S)

    def _leader_failed(self, node_id: str, error: DLedgerError) -> None:
        if self.leader_id != node_id:
            return
        hint = error.leader_id if isinstance(error, NotLeaderError) else None
        self.leader_id = hint if hint in self.peers and hint != node_id else None

    async def _discover(self) -> str:
        tasks = [asyncio.create_task(self.metadata(node)) for node in self.peers]
        failures: list[DLedgerError] = []
        try:
            for done in asyncio.as_completed(tasks):
                answer = await done
                if isinstance(answer, DLedgerError):
                    failures.append(answer)
                elif answer.leader_id is not None:
                    return self._known(answer.leader_id)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise self._nobody(failures)

    def _known(self, leader_id: str) -> str:
        if leader_id not in self.peers:
            remedy = "use the group's own peers string, ids included"
            raise BadRequestError(f"{leader_id} leads, which peers does not name", "peers", remedy)
        return leader_id

    def _nobody(self, failures: Sequence[DLedgerError]) -> DLedgerError:
        for failure in failures:
            if isinstance(failure, (UnknownGroupError, BadRequestError)):
                return failure
        if len(failures) < len(self.peers):
            remedy = "a majority of its nodes must run"
            return NoLeaderError("no node leads the group", f"group {self.group}", remedy)
        addresses = ", ".join(peer.address for peer in self.peers.values())
        remedy = "check that they run and the peers string"
        return UnreachableError(f"no node of group {self.group} answered", addresses, remedy)

    async def metadata(self, node_id: str) -> MetadataReply | DLedgerError:
        """Asks one node who leads, for at most a second."""
        request = MetadataRequest(group=self.group, remote_id=node_id)
        try:
            return await self.ask(request, MetadataReply, ASK_TIMEOUT_S)
        except DLedgerError as error:
            return error

    async def ask_all(self) -> dict[str, MetadataReply | DLedgerError]:
        """Asks every node who leads; raises UnreachableError if none answers, UnknownGroupError if one says so."""
        found = dict(zip(self.peers, await asyncio.gather(*map(self.metadata, self.peers)), strict=True))
        failures = [answer for answer in found.values() if isinstance(answer, DLedgerError)]
        if len(failures) == len(found):
            raise self._nobody(failures)
        return found

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(channel.close() for channel in self._channels.values()))
        self._channels.clear()

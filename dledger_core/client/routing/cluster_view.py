"""A client's view of its group: the presumed leader, the replica that served last, the highest known commit index."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import Container, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from dledger_core.client.protocol import ReadFrom
from dledger_core.client.routing.channel import Channel, ChannelPool, as_responded
from dledger_core.config import Peer
from dledger_core.errors import (
    BadRequestError,
    DLedgerError,
    NoLeaderError,
    NotLeaderError,
    RequestTimedOutError,
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.net import messages
from dledger_core.net.frame import Frame

ASK_TIMEOUT_S: Final = 1.0
UNRESPONSIVE_S: Final = 10.0
"""How long a node counts as unresponsive after a timeout."""
UNRESPONSIVE_TIMEOUT_S: Final = 0.25
"""Timeout of a request to an unresponsive node."""
FAILED_S: Final = 10.0
"""How long a replica that failed a read is asked after the others."""
LEADER_KEPT_S: Final = 10.0
"""How long reads that prefer a role presume the same leader."""


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """The order in which a read asks the replicas; all of them are asked if need be.

    Attributes:
        read_from: the role to ask first.
        spread: readers with different numbers start at different replicas; None: at the replica that served last.
    """

    read_from: ReadFrom = "any"
    spread: int | None = None


ANY_REPLICA: Final = ReplicaChoice()
_METADATA: Final = messages.METADATA.encode(messages.MetadataRequest())


class ClusterView:
    """The nodes of one group as seen by one client. Belongs to one event loop.

    Attributes:
        commit_seen: highest commit index that a response proved; reads never show less than this.
    """

    def __init__(self, peers: Sequence[Peer], group: str) -> None:
        self.pool = ChannelPool(peers)
        self.group = group
        self.commit_seen = -1
        self._leader: str | None = None
        self._last_good: str | None = None
        self._discovery: asyncio.Task[str] | None = None
        self._unresponsive: dict[str, float] = {}
        self._failed: dict[str, float] = {}
        self._leader_asked = float("-inf")

    @property
    def addresses(self) -> str:
        """All addresses, for error messages."""
        return ", ".join(peer.address for peer in self.pool.peers.values())

    def check_node(self, node_id: str) -> str:
        """Return ``node_id`` if the peers string names it, otherwise raise BadRequestError."""
        if node_id not in self.pool.peers:
            raise BadRequestError(f"no node {node_id!r}", "peers", f"the nodes are: {', '.join(self.pool.peers)}")
        return node_id

    async def set_members(self, peers: Sequence[Peer]) -> None:
        """Set the group's nodes; a removed leader is forgotten."""
        await self.pool.update(peers)
        if self._leader not in self.pool.peers:
            self._leader = None

    # --- the leader -----------------------------------------------------------------------------------------------

    async def leader(self, timeout_s: float) -> Channel:
        """Return a channel to the presumed leader; query all nodes if none is known.

        Raises:
            NoLeaderError: no node that responded knows a leader.
            UnreachableError: no node responded, or the leader cannot be reached.
        """
        if self._leader is None:
            if self._discovery is None:
                self._discovery = asyncio.create_task(self._discover())
                self._discovery.add_done_callback(self._discovered)
            try:
                async with asyncio.timeout(timeout_s):
                    self._leader = await asyncio.shield(self._discovery)
            except TimeoutError:
                raise NoLeaderError("no leader was found in time", f"group {self.group}") from None
            except DLedgerError as error:
                raise type(error)(*error.args) from None
        node_id = self._leader
        try:
            return await self.pool.channel(node_id, timeout_s)
        except DLedgerError:
            self._forget_leader(node_id)
            raise

    def _discovered(self, task: asyncio.Task[str]) -> None:
        self._discovery = None
        if not task.cancelled():
            task.exception()

    async def _discover(self) -> str:
        """Return the leader that the responses of the newest term name.

        A deposed leader, and nodes that did not hear of its successor, name the old one. A majority has responses of
        the newest leader's term; the others get a moment more, so that an unresponsive node costs no second.
        """
        asked = [self._ask(node_id, _METADATA, ASK_TIMEOUT_S) for node_id in self.pool.peers]
        failures: list[DLedgerError] = []
        leaders: dict[int, str | None] = {}
        loop, responded = asyncio.get_running_loop(), 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit, aclosing(as_responded(asked)) as responses:
                async for response in responses:
                    if isinstance(response, DLedgerError):
                        failures.append(response)
                        continue
                    found = messages.METADATA_OK.decode(response.header)
                    leader = found.leader if found.leader in self.pool.peers else None
                    leaders[found.term] = leader or leaders.get(found.term)
                    responded += 1
                    if limit.when() is None and responded > len(asked) // 2:
                        limit.reschedule(loop.time() + UNRESPONSIVE_TIMEOUT_S)
        newest = leaders[max(leaders)] if leaders else None
        if newest is None:
            raise self._no_leader(failures)
        return newest

    def _no_leader(self, failures: Sequence[DLedgerError]) -> DLedgerError:
        if len(failures) < len(self.pool.peers):
            return NoLeaderError("no node leads the group", f"group {self.group}", "a majority of its nodes must run")
        return self.unreachable(failures)

    def unreachable(self, failures: Sequence[DLedgerError]) -> DLedgerError:
        """Return the error for a request that failed on every node."""
        for failure in failures:
            if not failure.retriable and not failure.outcome_unknown:
                return failure
        return UnreachableError(
            f"no node of group {self.group} responded", self.addresses, "check that they run and the peers string"
        )

    def leader_failed(self, node_id: str, error: DLedgerError) -> None:
        """Record that the presumed leader failed; follow its hint if it sent one."""
        self._forget_leader(node_id)
        if isinstance(error, NotLeaderError) and error.leader_id in self.pool.peers and error.leader_id != node_id:
            self._leader = error.leader_id

    def leader_is(self, node_id: str) -> None:
        """Record the leader."""
        self._leader = node_id if node_id in self.pool.peers else None

    def _forget_leader(self, node_id: str) -> None:
        if self._leader == node_id:
            self._leader = None

    # --- replicas -------------------------------------------------------------------------------------------------

    async def read_order(self, choice: ReplicaChoice = ANY_REPLICA) -> list[str]:
        """Return the nodes in the order in which a read asks them; those with a recent failure come last."""
        now = asyncio.get_running_loop().time()
        self._failed = {node: until for node, until in self._failed.items() if until > now}
        order = list(self.pool.peers)
        if choice.spread is None:
            random.shuffle(order)
            order.sort(key=lambda node: 0 if node == self._last_good else 1 if node == self._leader else 2)
        else:
            first = choice.spread % len(order)
            order = order[first:] + order[:first]
        if choice.read_from != "any":
            leader = await self._leader_for_reads()
            order.sort(key=lambda node: (node == leader) != (choice.read_from == "leader"))
        order.sort(key=lambda node: node in self._failed)
        return order

    async def _leader_for_reads(self) -> str | None:
        """Return the presumed leader; None if no node knows one.

        A deposed leader still serves reads and so does not reveal its successor: ask the nodes again after a while.
        """
        now = asyncio.get_running_loop().time()
        if now - self._leader_asked >= LEADER_KEPT_S:
            self._leader, self._leader_asked = None, now
        if self._leader is None:
            with contextlib.suppress(DLedgerError):
                await self.leader(ASK_TIMEOUT_S)
        return self._leader

    def served(self, node_id: str) -> None:
        """Record that a replica served a read."""
        self._last_good = node_id
        self._failed.pop(node_id, None)

    def read_failed(self, node_id: str, error: DLedgerError) -> None:
        """Record that a replica failed a read."""
        self._failed[node_id] = asyncio.get_running_loop().time() + FAILED_S
        if self._last_good == node_id:
            self._last_good = None
        if isinstance(error, UnreachableError | RequestTimedOutError):
            self._forget_leader(node_id)

    def saw_commit(self, commit_index: int) -> None:
        """Record a commit index that a response proved."""
        self.commit_seen = max(self.commit_seen, commit_index)

    # --- all nodes ------------------------------------------------------------------------------------------------

    async def _ask(self, node_id: str, header: Mapping[str, Any], timeout_s: float) -> Frame | DLedgerError:
        request = {**header, "g": self.group}
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            channel = await self.pool.channel(node_id, timeout_s)
            response = await channel.request(request, timeout_s=max(0.001, deadline - loop.time()))
        except DLedgerError as error:
            if loop.time() >= deadline:
                self._unresponsive.setdefault(node_id, loop.time() + UNRESPONSIVE_S)
            return error
        self._unresponsive.pop(node_id, None)
        return response

    async def _ask_each(
        self, header: Mapping[str, Any], unresponsive: Container[str]
    ) -> dict[str, Frame | DLedgerError]:
        def timeout_s(node_id: str) -> float:
            return UNRESPONSIVE_TIMEOUT_S if node_id in unresponsive else ASK_TIMEOUT_S

        nodes = list(self.pool.peers)
        responses = await asyncio.gather(*(self._ask(node, header, timeout_s(node)) for node in nodes))
        return dict(zip(nodes, responses, strict=True))

    async def ask_all(self, header: Mapping[str, Any]) -> dict[str, Frame | DLedgerError]:
        """Send a request to every node, in parallel, and wait at most a second for each.

        An unresponsive node gets a short timeout, unless no other node responds: one crashed machine must not slow
        down every query.
        """
        now = asyncio.get_running_loop().time()
        self._unresponsive = {node: until for node, until in self._unresponsive.items() if until > now}
        unresponsive = set(self._unresponsive)
        found = await self._ask_each(header, unresponsive)
        if unresponsive and not any(isinstance(response, Frame) for response in found.values()):
            found = await self._ask_each(header, ())
        if not any(isinstance(response, Frame) for response in found.values()):
            failures = [response for response in found.values() if isinstance(response, DLedgerError)]
            unknown = next((e for e in failures if isinstance(e, UnknownGroupError)), None)
            raise unknown or self.unreachable(failures)
        return found

    async def close(self) -> None:
        """Close all connections."""
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.gather(self._discovery, return_exceptions=True)
        await self.pool.close()

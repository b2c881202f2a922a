"""What a client knows of its group's nodes: who leads, who served last, how far the log is committed."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator, Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from dledger_core.client.results import RoleChange
from dledger_core.client.routing.channel import Channel, ChannelPool
from dledger_core.client.watching import RoleWatch
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
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type

__all__ = ["ANY_REPLICA", "ClusterView", "ReadFrom", "ReplicaChoice"]

ReadFrom = Literal["any", "leader", "follower"]

ASK_TIMEOUT_S: Final = 1.0
SILENT_S: Final = 10.0
"""How long a node that did not answer in time counts as silent."""
SILENT_TIMEOUT_S: Final = 0.25
FAILED_S: Final = 10.0
"""How long a replica that did not serve a read is asked after the others."""
LEADER_KEPT_S: Final = 10.0
"""How long reads that prefer a role take the same node for the leader."""


@dataclass(frozen=True, slots=True)
class ReplicaChoice:
    """The order in which a read asks the replicas; all of them are asked in the end.

    Attributes:
        read_from: the role to ask first.
        spread: readers with different numbers begin at different replicas; None: at the replica that served last.
    """

    read_from: ReadFrom = "any"
    spread: int | None = None


ANY_REPLICA: Final = ReplicaChoice()


class ClusterView:
    """The nodes of one group as seen by one client. Belongs to one event loop.

    Attributes:
        commit_seen: highest commit index any answer proved; reads never show less than this.
        watches: who follows the nodes' roles just now.
    """

    def __init__(self, peers: Sequence[Peer], group: str) -> None:
        self.watches: set[RoleWatch] = set()
        self.pool = ChannelPool(peers)
        self.group = group
        self.commit_seen = -1
        self._leader: str | None = None
        self._last_good: str | None = None
        self._discovery: asyncio.Task[str] | None = None
        self._silent: dict[str, float] = {}
        self._failed: dict[str, float] = {}
        self._leader_asked = float("-inf")

    @property
    def addresses(self) -> str:
        """All addresses, for error messages."""
        return ", ".join(peer.address for peer in self.pool.peers.values())

    def check_node(self, node_id: str) -> str:
        """Returns ``node_id`` if the peers string names it, else raises BadRequestError."""
        if node_id not in self.pool.peers:
            raise BadRequestError(f"no node {node_id!r}", "peers", f"the nodes are: {', '.join(self.pool.peers)}")
        return node_id

    # --- the leader -----------------------------------------------------------------------------------------------

    async def leader(self, timeout_s: float) -> Channel:
        """Returns a channel to who is believed to lead; asks all nodes if nobody is.

        Raises:
            NoLeaderError: the nodes that answered know of no leader.
            UnreachableError: no node answered, or the leader cannot be reached.
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
        """Returns the first node that is named as leader in the newest term heard of."""
        tasks = [asyncio.create_task(self._ask(node_id, {}, ASK_TIMEOUT_S)) for node_id in self.pool.peers]
        failures: list[DLedgerError] = []
        try:
            for done in asyncio.as_completed(tasks):
                answer = await done
                if isinstance(answer, DLedgerError):
                    failures.append(answer)
                    continue
                header = answer.header
                if header.get("leader") in self.pool.peers:
                    return str(header["leader"])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        raise self._nobody(failures)

    def _nobody(self, failures: Sequence[DLedgerError]) -> DLedgerError:
        if len(failures) < len(self.pool.peers):
            return NoLeaderError("no node leads the group", f"group {self.group}", "a majority of its nodes must run")
        return self.unreachable(failures)

    def unreachable(self, failures: Sequence[DLedgerError]) -> DLedgerError:
        """Returns the error for "every node failed"."""
        for failure in failures:
            if not failure.retriable and not failure.outcome_unknown:
                return failure
        return UnreachableError(
            f"no node of group {self.group} answered", self.addresses, "check that they run and the peers string"
        )

    def leader_failed(self, node_id: str, error: DLedgerError) -> None:
        """Takes note that the believed leader did not serve; follows its hint if it gave one."""
        self._forget_leader(node_id)
        if isinstance(error, NotLeaderError) and error.leader_id in self.pool.peers and error.leader_id != node_id:
            self._leader = error.leader_id

    def leader_is(self, node_id: str) -> None:
        """Takes note of who leads."""
        self._leader = node_id if node_id in self.pool.peers else None

    def _forget_leader(self, node_id: str) -> None:
        if self._leader == node_id:
            self._leader = None

    # --- replicas -------------------------------------------------------------------------------------------------

    async def read_order(self, choice: ReplicaChoice = ANY_REPLICA) -> list[str]:
        """Return the nodes in the order in which a read asks them; those that failed a moment ago come last."""
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
        """Return the presumed leader, None if no node knows one: then the replicas are asked in turn.

        Reads never learn of a new leader from the old one, so the nodes are asked again after a while.
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
        """Record that a replica did not serve a read."""
        self._failed[node_id] = asyncio.get_running_loop().time() + FAILED_S
        if self._last_good == node_id:
            self._last_good = None
        if isinstance(error, UnreachableError | RequestTimedOutError):
            self._forget_leader(node_id)

    def saw_commit(self, commit_index: int) -> None:
        """Takes note of a commit index that an answer proved."""
        self.commit_seen = max(self.commit_seen, commit_index)

    # --- asking everybody -----------------------------------------------------------------------------------------

    async def _ask(self, node_id: str, fields: Mapping[str, Any], timeout_s: float) -> Frame | DLedgerError:
        request: dict[str, Any] = {"t": Type.METADATA, "g": self.group} | dict(fields)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout_s
        try:
            channel = await self.pool.channel(node_id, timeout_s)
            answer = await channel.request(request, timeout_s=max(0.001, deadline - loop.time()))
        except DLedgerError as error:
            if loop.time() >= deadline:
                self._silent.setdefault(node_id, loop.time() + SILENT_S)
            return error
        self._silent.pop(node_id, None)
        return answer

    async def _ask_each(self, fields: Mapping[str, Any], silent: Container[str]) -> dict[str, Frame | DLedgerError]:
        patience = {node: SILENT_TIMEOUT_S if node in silent else ASK_TIMEOUT_S for node in self.pool.peers}
        answers = await asyncio.gather(*(self._ask(node, fields, patience[node]) for node in self.pool.peers))
        return dict(zip(self.pool.peers, answers, strict=True))

    async def ask_all(self, fields: Mapping[str, Any] | None = None) -> dict[str, Frame | DLedgerError]:
        """Asks every node for its metadata, in parallel, at most a second each; ``fields`` go with the question.

        One that was silent has only a moment for a while, unless nobody else answers: a dead machine shall not slow
        down every question.
        """
        now = asyncio.get_running_loop().time()
        self._silent = {node: until for node, until in self._silent.items() if until > now}
        silent = set(self._silent)
        found = await self._ask_each(fields or {}, silent)
        if silent and not any(isinstance(answer, Frame) for answer in found.values()):
            found = await self._ask_each(fields or {}, ())
        if not any(isinstance(answer, Frame) for answer in found.values()):
            failures = [answer for answer in found.values() if isinstance(answer, DLedgerError)]
            unknown = next((e for e in failures if isinstance(e, UnknownGroupError)), None)
            raise unknown or self.unreachable(failures)
        return found

    async def role_changes(self, check_usable: Callable[[], None]) -> AsyncGenerator[RoleChange, None]:
        """See ``AsyncClient.role_changes``."""
        watch = RoleWatch(self.pool, self.group, check_usable)
        self.watches.add(watch)
        watch.start()
        try:
            async with contextlib.aclosing(watch.changes()) as changes:
                async for change in changes:
                    yield change
        finally:
            self.watches.discard(watch)
            await watch.stop()

    async def close(self) -> None:
        """Closes all connections."""
        await asyncio.gather(*(watch.stop() for watch in self.watches))
        if self._discovery is not None:
            self._discovery.cancel()
            await asyncio.gather(self._discovery, return_exceptions=True)
        await self.pool.close()

"""Searches for the leader, which alone can serve appends, and for the successor of a silent leader."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence
from typing import Final

from dledger_core.client.routing.channel import Channel
from dledger_core.client.routing.known_log import KnownLog, described_by
from dledger_core.client.routing.node_queries import ASK_TIMEOUT_S, NodeQueries, majority, raise_wrong_node
from dledger_core.client.routing.silence import CONNECT_S, WhenSilent
from dledger_core.errors import BadRequestError, DLedgerError, NoLeaderError
from dledger_core.net import messages
from dledger_core.net.dialing import WrongNodeError

SEEK_PAUSE_S: Final = 0.05
SEEK_PAUSE_MAX_S: Final = 1.0
"""Pauses while a silent leader has no successor; an election takes less than ten of the first."""
REFRESH_S: Final = 1.0
"""Least time between two searches in the background."""


class LeaderSearch:
    """Finds the log, its members and its leader by asking all nodes. Belongs to one event loop.

    At most one search runs at a time, and every call that needs one waits for it: many calls that fail at once must
    not become as many requests to each node.
    """

    def __init__(self, log: KnownLog, nodes: NodeQueries) -> None:
        self._log = log
        self._pool = log.pool
        self._nodes = nodes
        self._search: asyncio.Task[str] | None = None
        self._refreshed = float("-inf")
        self._seeking: dict[str, asyncio.Task[None]] = {}
        self._waiting = 0  # calls that wait until a silent leader has a successor

    @property
    def present(self) -> Channel | None:
        """The channel to the presumed leader, if it is open and not silent: what ``channel`` would return."""
        return None if self._log.leader is None else self._pool.present(self._log.leader)

    async def channel(self, timeout_s: float) -> Channel:
        """Return a channel to the presumed leader; query all nodes if none is known, or that one is silent.

        Raises:
            NoLeaderError: no node that responded knows a leader, or a silent one leads.
            UnreachableError: no node responded, or the leader cannot be reached.
        """
        log, pool = self._log, self._pool
        if log.leader is None:
            log.leader = await self.find(timeout_s)
        if pool.is_silent(log.leader):
            await self._successor_of(log.leader, timeout_s)
        node_id = log.leader
        try:
            return await pool.channel(node_id, min(timeout_s, CONNECT_S))
        except DLedgerError:
            log.leader_failed(node_id)
            raise

    # --- one search -----------------------------------------------------------------------------------------------

    async def find(self, timeout_s: float) -> str:
        """Ask all nodes for log, members and leader, and follow a log that continues; return the leader."""
        search = self._search or self._start()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(search)
        except TimeoutError:
            raise NoLeaderError("no leader was found in time", f"group {self._log.group}") from None
        except DLedgerError as error:
            raise type(error)(*error.args) from None  # several callers may raise the same failure

    async def find_log(self, timeout_s: float) -> DLedgerError | None:
        """Search as ``find`` does; return the error if there is one."""
        try:
            await self.find(timeout_s)
        except DLedgerError as error:
            return error
        return None

    def refresh(self) -> None:
        """Search in the background, unless that was done within a second."""
        now = asyncio.get_running_loop().time()
        if self._search is None and now - self._refreshed >= REFRESH_S:
            self._refreshed = now
            self._start()

    async def learn_ids(self, timeout_s: float) -> None:
        """Ask for the members of the log if the id of a node is not known; a failure is left to the next request."""
        if self._log.lacks_ids:
            await self._try_to_find(timeout_s)

    async def learn_members(self, timeout_s: float) -> None:
        """Ask for the members of the log if none are known, or the id of one is not, and so check the peers string.

        Raises:
            WrongNodeError: the peers string names another node at an address.
        """
        if self._log.lacks_ids or not self._log.is_known:
            await self._try_to_find(timeout_s)

    async def _try_to_find(self, timeout_s: float) -> None:
        try:
            await self.find(timeout_s)
        except WrongNodeError:
            raise
        except DLedgerError:
            pass  # left to the next request

    async def check_node(self, node_id: str, timeout_s: float) -> None:
        """Raise BadRequestError if neither the peers string nor the log names the node."""
        if node_id not in self._pool.peers:
            await self._try_to_find(timeout_s)  # which learns the members
        if node_id not in self._pool.peers:
            raise BadRequestError(f"no node {node_id!r}", "peers", f"the nodes are: {', '.join(self._pool.peers)}")

    def _start(self) -> asyncio.Task[str]:
        self._search = asyncio.create_task(self._run())
        self._search.add_done_callback(self._ended)
        return self._search

    def _ended(self, task: asyncio.Task[str]) -> None:
        self._search = None
        if not task.cancelled():
            task.exception()  # retrieved, because all callers may have stopped waiting

    async def _run(self) -> str:
        """Return the leader that the responses of the newest term name.

        A deposed leader, and nodes that did not hear of its successor, name the old one. A leader has a majority's
        votes (dissertation, 3.4), so of any majority one node knows its term: a majority of responses is enough
        (``test_client_follows_leader_of_newest_term``). The others get a moment more, so that an unresponsive node
        costs no second.
        """
        nodes = [node for node in self._pool.peers if not self._pool.is_silent(node)] or list(self._pool.peers)
        described = described_by(await self._nodes.ask_each(nodes, self._log.metadata_request(), majority))
        raise_wrong_node(described.values())
        found = (await self._log.learn(described)).values()
        leaders: dict[int, str | None] = {}
        for response in found:
            if isinstance(response, messages.MetadataResponse):
                leader = response.leader if response.leader in self._pool.peers else None
                leaders[response.term] = leader or leaders.get(response.term)
        newest = leaders[max(leaders)] if leaders else None
        if newest is None:
            raise await self._no_leader([each for each in found if isinstance(each, DLedgerError)], len(nodes))
        return newest

    async def _no_leader(self, failures: Sequence[DLedgerError], asked: int) -> DLedgerError:
        if len(failures) < asked:
            return NoLeaderError(
                "no node leads the group",
                f"group {self._log.group}",
                "start a majority of its nodes; if they run, dledger status names the next command",
            )
        error = self._log.unreachable(failures)
        await self._log.forget_members()
        return error

    # --- a silent leader ------------------------------------------------------------------------------------------

    def leave(self, channel: Channel) -> None:
        """Leave a node that has become silent, unless there is no other one."""
        if len(self._pool.peers) > 1:
            channel.abandon(WhenSilent.LEAVE)
            self._start_seeking(str(channel.peer.node_id))

    def _start_seeking(self, node_id: str) -> asyncio.Task[None]:
        task = self._seeking.get(node_id)
        if task is None:
            task = self._seeking[node_id] = asyncio.create_task(self._seek(node_id))
            task.add_done_callback(lambda _: self._seeking.pop(node_id, None))
        return task

    async def _seek(self, node_id: str) -> None:
        """Ask the other nodes until another one leads than a silent node, then let its requests follow.

        It ends once no call waits for that. The silence of a leader alone proves nothing: the others follow it as long
        as they receive its heartbeats (``test_idempotent_request_follows_the_leader_only_once_another_leads``).
        """
        pause_s = SEEK_PAUSE_S
        while self._pool.is_silent(node_id) and (self._waiting or self._pool.has(node_id, WhenSilent.FOLLOW)):
            with contextlib.suppress(DLedgerError):
                leader = await self.find(ASK_TIMEOUT_S)
                if leader != node_id:
                    self._log.leader = leader
                    self._pool.abandon(node_id, WhenSilent.FOLLOW)
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.1, SEEK_PAUSE_MAX_S)

    async def _successor_of(self, node_id: str, timeout_s: float) -> None:
        """Wait until a silent leader has a successor, or is no longer silent; raise NoLeaderError."""
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._start_seeking(node_id))
        except TimeoutError:
            group = f"group {self._log.group}"
            raise NoLeaderError("the leader is silent, and no other node leads", group) from None
        finally:
            self._waiting -= 1
        if self._log.leader is None:
            raise NoLeaderError("no leader was found", f"group {self._log.group}")

    async def close(self) -> None:
        """Cancel the searches."""
        tasks = [*self._seeking.values(), *([] if self._search is None else [self._search])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

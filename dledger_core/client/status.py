"""State of a group as its nodes report it: nodes, log ends, roles, producers and transactions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

from dledger_core.client.archive import archive_of
from dledger_core.client.protocol import (
    LogRange,
    Metadata,
    NodeStatus,
    ProducerState,
    RoleChange,
    TableUsage,
    TransactionState,
)
from dledger_core.client.routing.cluster_view import ClusterView
from dledger_core.client.routing.known_log import Described
from dledger_core.client.routing.retry import Deadline
from dledger_core.config import Peer, is_node_id
from dledger_core.control import TransactionId
from dledger_core.errors import DLedgerError
from dledger_core.lineage import ancestors_of_rows
from dledger_core.net import messages
from dledger_core.net.frame import Frame
from dledger_core.record import Isolation

POLL_S: Final = 0.1
"""Interval between two queries for the end of a log."""
WATCH_WAIT_S: Final = 2.0
"""How long a node waits for a change; an unresponsive node is noticed after this and ``WATCH_RESPONSE_S``."""
WATCH_RESPONSE_S: Final = 1.0
WATCH_RETRY_S: Final = 0.1


def metadata_of(peers: Sequence[Peer], responses: Described) -> Metadata:
    """Merge the nodes' responses, at least one of which is not an error."""
    decoded = {
        node: response for node, response in responses.items() if isinstance(response, messages.MetadataResponse)
    }
    # A removed node may not have received the entry that removed it, so the leader's members count.
    known = max(decoded.values(), key=lambda found: (found.node[1] == "leader", found.term, found.configuration))
    named = {str(row[0]) for row in known.members}
    nodes = tuple(_node_status(peer, responses.get(str(peer.node_id)), named) for peer in peers)
    newest = max(decoded.values(), key=lambda response: response.term)
    # A node that reports itself as leader is right; other nodes may still name the previous leader.
    leading = [r.node[0] for r in decoded.values() if r.node[1] == "leader" and r.term == newest.term]
    uuid = next((response.log for response in decoded.values() if response.log), None)
    leader = leading[0] if leading else newest.leader
    chain = max((ancestors_of_rows(response.chain) for response in decoded.values()), key=len)
    # A lagging node has not received the newest rows yet.
    tables = {name: TableUsage(name, rows, limit) for name, rows, limit in newest.tables or ()}
    for response in decoded.values():
        for name, rows, limit in response.tables or ():
            if name not in tables or rows > tables[name].rows:
                tables[name] = TableUsage(name, rows, limit)
    # The leader's, if it responded: another node may not have applied the newest proof, or the end of the archive.
    archive = archive_of(next((r for r in decoded.values() if r.node[0] == leader), newest).archive)
    return Metadata(leader, newest.term, nodes, uuid, tuple(newest.preferred), chain, tuple(tables.values()), archive)


def bounds_of(metadata: Metadata, isolation: Isolation = "read_committed") -> LogRange:
    """Return the widest view among the nodes that responded."""
    nodes = [node for node in metadata.nodes if node.reachable]
    first = min((node.first_index for node in nodes), default=0)
    end, commit = max(((node.visible_end, node.commit_index) for node in nodes), default=(0, -1))
    if isolation == "read_uncommitted":
        commit = max((node.commit_index for node in nodes), default=-1)
        end = commit + 1
    return LogRange(max(0, first), max(0, end), commit, metadata.log_uuid, metadata.chain)


async def bounds_reaching(read_bounds: Callable[[], Awaitable[LogRange]], min_end: int, wait_ms: int) -> LogRange:
    """Read a log's bounds until its end is at least ``min_end`` or the wait timed out; return the last ones."""
    deadline = Deadline(wait_ms / 1000)
    while True:
        found = await read_bounds()
        if found.end >= min_end or deadline.is_over:
            return found
        await asyncio.sleep(POLL_S)


def _role_of(error: DLedgerError) -> str:
    """Return the role of a node that reports none: a node that responds names the state of its group."""
    return str(error.values.get("state", "unreachable"))


def _node_status(
    peer: Peer, response: messages.MetadataResponse | DLedgerError | None, members: Collection[str]
) -> NodeStatus:
    is_member = str(peer.node_id) in members if members else None
    if response is None:
        return NodeStatus(str(peer.node_id), peer.address, is_member=is_member)
    if isinstance(response, DLedgerError):
        role = _role_of(response)
        return NodeStatus(str(peer.node_id), peer.address, role, reason=str(response), is_member=is_member)
    node_id, role, _, first, last, commit, visible_end, data_bytes = response.node
    status = NodeStatus(node_id, peer.address, role, first, last, commit, visible_end, data_bytes, reachable=True)
    status = replace(
        status,
        is_recovering=response.is_recovering,
        is_disk_full=response.is_disk_full,
        accepts_entries=response.acknowledges,
        is_member=is_member,
    )
    if response.disk is not None:
        status = replace(status, disk_free_bytes=response.disk[0], disk_size_bytes=response.disk[1])
    if response.orphaned is None:
        return status
    return replace(status, lost_entries=response.orphaned[0], lost_bytes=response.orphaned[1])


def groups_of(responses: Mapping[str, Frame | DLedgerError], group: str, log_uuid: str | None) -> dict[str, str | None]:
    """Merge the nodes' responses to GROUPS, without those of nodes that have another log of ``group``.

    Raises:
        ProtocolError: a response is malformed.
    """
    found: dict[str, str | None] = {}
    for response in responses.values():
        if isinstance(response, Frame):
            logs = messages.GROUPS_OK.decode(response.header).logs
            if None in (log_uuid, logs.get(group)) or logs[group] == log_uuid:
                found |= {name: uuid or found.get(name) for name, uuid in logs.items()}
    return dict(sorted(found.items()))


def producer_of(frame: Frame) -> ProducerState:
    """Return the decoded PRODUCER_OK."""
    response = messages.PRODUCER_OK.decode(frame.header)
    last = None if response.last is None else (response.last[0], response.last[1])
    return ProducerState(response.known, response.epoch, response.sequence, last)


def transaction_of(frame: Frame) -> TransactionState:
    """Return the decoded TRANSACTION_OK."""
    response = messages.TRANSACTION_OK.decode(frame.header)
    return TransactionState(
        response.state, response.index, response.newest, rows=response.rows, fingerprint=response.fingerprint
    )


def transaction_map(transaction: TransactionId, *, once: bool = False, elsewhere: int = -1) -> dict[str, Any]:
    """Return the field ``x`` that names a transaction, with what makes its query known."""
    named: dict[str, Any] = {"q": transaction.query_id, "b": int(transaction.batch_id), "r": transaction.run_id}
    return named | ({"o": True} if once else {}) | ({"w": int(elsewhere)} if elsewhere >= 0 else {})


class RoleWatch:
    """Follows the roles of a group's nodes: one long poll per node. Belongs to one event loop.

    Args:
        view: the nodes of the group.
        wait_s: how long a node waits for a change.
        response_s: time limit of a response, in addition to ``wait_s``.
    """

    def __init__(
        self, view: ClusterView, *, wait_s: float = WATCH_WAIT_S, response_s: float = WATCH_RESPONSE_S
    ) -> None:
        self._view = view
        self._wait_s = wait_s
        self._response_s = response_s
        self._news: dict[str, RoleChange] = {}
        self._woken = asyncio.Event()
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def changes(self) -> AsyncGenerator[RoleChange, None]:
        """Yield the role of each node, then every change; a slow consumer receives only each node's latest role."""
        try:
            await self._view.leader.learn_ids(self._response_s)
            while True:
                for node_id in self._view.pool.peers.keys() - self._tasks.keys():
                    task = asyncio.create_task(self._follow(node_id), name=f"watch-{node_id}")
                    task.add_done_callback(lambda _: self._woken.set())
                    self._tasks[node_id] = task
                await self._woken.wait()
                self._woken.clear()
                while self._news:
                    yield self._news.pop(next(iter(self._news)))
                for task in self._tasks.values():
                    if task.done():
                        task.result()
        finally:
            await self.stop()

    async def stop(self) -> None:
        """Stop polling; the consumer of ``changes`` is cancelled."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _follow(self, node_id: str) -> None:
        last: RoleChange | None = None
        while True:
            await self._view.leader.learn_ids(self._response_s)
            if not is_node_id(node_id) and node_id not in self._view.pool.peers:
                return  # the address is a member's, and is followed by its id
            try:
                change = await self._poll(node_id, last)
            except DLedgerError as error:
                change = RoleChange(node_id, _role_of(error), reason=str(error))
            if change != last:
                last = self._news[node_id] = change
                self._woken.set()
            if change.broker_role is None:
                self._view.leader.refresh()  # it may have moved
                await asyncio.sleep(WATCH_RETRY_S)
            elif change.leader_id is not None and change.leader_id not in self._view.pool.peers:
                self._view.leader.refresh()  # the leader is outside the list

    async def _poll(self, node_id: str, last: RoleChange | None) -> RoleChange:
        known = last is not None and last.broker_role is not None
        seen = [last.role, last.leader_id, last.term] if last is not None and known else None
        message = messages.WatchRequest(wait_ms=int(self._wait_s * 1000), seen=seen)
        request = self._view.log.header_for(messages.WATCH.encode(message, g=self._view.log.group))
        channel = await self._view.pool.channel(node_id, self._response_s)
        response = await channel.request(request, timeout_s=self._wait_s + self._response_s)
        if self._view.log.is_older_than(response):
            self._view.leader.refresh()
        return _change_of(node_id, response)


class RoleWatches:
    """The running role watches of one client; closing it stops them."""

    def __init__(self, view: ClusterView) -> None:
        self._view = view
        self._watches: set[RoleWatch] = set()

    @property
    def running(self) -> int:
        """Number of watches that poll now."""
        return len(self._watches)

    async def changes(self) -> AsyncGenerator[RoleChange, None]:
        """See ``OptionalOperations.role_changes``."""
        watch = RoleWatch(self._view)
        self._watches.add(watch)
        try:
            async with contextlib.aclosing(watch.changes()) as changes:
                async for change in changes:
                    yield change
        finally:
            self._watches.discard(watch)

    async def close(self) -> None:
        """Stop all watches."""
        await asyncio.gather(*(watch.stop() for watch in self._watches))


def _change_of(node_id: str, frame: Frame) -> RoleChange:
    response = messages.WATCH_OK.decode(frame.header)
    return RoleChange(node_id, response.role, response.broker, response.term, response.leader)

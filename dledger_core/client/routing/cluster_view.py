"""A client's view of its group: its log, members and presumed leader, the replica that served last, the commit index.

The list of peers is the way in. The nodes report the members of the log with their newest addresses: these are asked
from then on, and the other nodes of the list too. Once no node responds, the list is the way in again. The view keeps
the log that it found first: nodes with another one, as a new cluster at an old address has it, count as failed.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, Final

from dledger_core.client.protocol import ReadFrom
from dledger_core.client.routing.channel import Channel, ChannelPool, as_responded
from dledger_core.client.routing.silence import CONNECT_S, WhenSilent
from dledger_core.config import Peer, parse_peer
from dledger_core.continuation import chain_of_rows
from dledger_core.errors import (
    BadRequestError,
    BusyError,
    DLedgerError,
    NoLeaderError,
    NotLeaderError,
    OtherLogError,
    RequestTimedOutError,
    UnknownGroupError,
    UnreachableError,
)
from dledger_core.net import messages
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.frame import Frame

ASK_TIMEOUT_S: Final = 1.0
UNRESPONSIVE_S: Final = 10.0
"""How long a node counts as unresponsive after a timeout."""
UNRESPONSIVE_TIMEOUT_S: Final = 0.25
"""Timeout of a request to an unresponsive node."""
_LOG = logging.getLogger(__name__)
FAILED_S: Final = 10.0
"""How long a replica that failed a read is asked after the others."""
LEADER_KEPT_S: Final = 10.0
"""How long reads that prefer a role presume the same leader."""
SEEK_PAUSE_S: Final = 0.05
SEEK_PAUSE_MAX_S: Final = 1.0
"""Pauses while a silent leader has no successor; an election takes less than ten of the first."""
CONTACT_LOST_MS: Final = 1_000
"""A replica that had no contact with a leader for longer is asked after the others."""
REFRESH_S: Final = 1.0
"""Least time between two searches for moved nodes in the background."""
Described = dict[str, messages.MetadataResponse | DLedgerError]
"""The nodes' responses to METADATA."""


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
_NOTHING: Final = (-2, -2)
"""Before every (term, index) of a configuration."""


def _configuration(response: messages.MetadataResponse) -> tuple[int, int]:
    return response.term, response.configuration


class ClusterView:
    """The nodes of one group as seen by one client. Belongs to one event loop.

    Args:
        peers: the way in.
        group: the group's name.
        log_uuid: the log; None = the one that is found first.
        credentials: the client's TLS files and token.

    Attributes:
        log_uuid: the log, None while it is not known.
        commit_seen: highest commit index that a response proved; reads never show less than this.
        entry_seen: index and term of the last entry that was appended or read; -1 and -1 = none.
    """

    def __init__(
        self, peers: Sequence[Peer], group: str, log_uuid: str | None = None, credentials: Credentials = PLAINTEXT
    ) -> None:
        self.pool = ChannelPool(peers, self._silent, credentials)
        self.group = group
        self.log_uuid = log_uuid
        self.commit_seen = -1
        self.entry_seen = (-1, -1)
        self._listed = tuple(peers)
        self._newest = _NOTHING
        self._refreshed = float("-inf")
        self._leader: str | None = None
        self._last_good: str | None = None
        self._discovery: asyncio.Task[str] | None = None
        self._unresponsive: dict[str, float] = {}
        self._failed: dict[str, float] = {}
        self._leader_asked = float("-inf")
        self._seeking: dict[str, asyncio.Task[None]] = {}
        self._waiting = 0  # calls that wait until a silent leader has a successor

    @property
    def addresses(self) -> str:
        """All addresses, for error messages."""
        return ", ".join(peer.address for peer in self.pool.peers.values())

    async def check_node(self, node_id: str, timeout_s: float) -> None:
        """Raise BadRequestError if neither the peers string nor the log names the node."""
        if node_id not in self.pool.peers:
            with contextlib.suppress(DLedgerError):
                await self._find_leader(timeout_s)  # which learns the members
        if node_id not in self.pool.peers:
            raise BadRequestError(f"no node {node_id!r}", "peers", f"the nodes are: {', '.join(self.pool.peers)}")

    @property
    def is_known(self) -> bool:
        """Whether a node has reported the members of the log."""
        return self._newest != _NOTHING

    async def learn_ids(self, timeout_s: float) -> None:
        """Ask for the members of the log if the id of a node is not known; a failure is left to the next request."""
        if not all(peer.has_id for peer in self.pool.peers.values()):
            with contextlib.suppress(DLedgerError):
                await self._find_leader(timeout_s)

    # --- the log and its members ----------------------------------------------------------------------------------

    def for_log(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return a request about the group with the uuid of the log, once that is known."""
        return header if self.log_uuid is None or "g" not in header else {**header, "lu": self.log_uuid}

    async def learn(self, responses: Described) -> Described:
        """Take in the log, if none is known, and its newest members; return the responses of nodes with this log.

        The response of a node with another log becomes an OtherLogError.
        """
        found = [response for response in responses.values() if isinstance(response, messages.MetadataResponse)]
        if self.log_uuid is None:
            # More nodes have the group's log than one that another cluster has at an old address.
            named = Counter(response.log for response in found if response.log is not None)
            self.log_uuid = max(named, key=named.__getitem__, default=None)
        elif (successor := self._successor(found)) is not None:
            self._follow(successor)
        ours = [response for response in found if response.log in (None, self.log_uuid)]
        newest = max(ours, key=_configuration, default=None)
        if newest is not None and newest.members and _configuration(newest) >= self._newest:
            members = [parse_peer(f"{node}-{address}") for node, _, address, _ in newest.members]
            if _configuration(newest) == self._newest:
                members = [self._next_way(peer, responses) for peer in members]
            self._newest = _configuration(newest)
            await self._set_members(members)
        return {node: self._of_this_log(node, response) for node, response in responses.items()}

    def _next_way(self, reported: Peer, responses: Described) -> Peer:
        """Return where to ask a node next, of which a newer address is not recorded.

        A node that did not respond is asked at the reported address and at that of the list in turn: after a start at
        other addresses, the log's are the old ones until the nodes have found each other.
        """
        node_id = str(reported.node_id)
        present = self.pool.peers.get(node_id, reported)
        if not isinstance(responses.get(node_id), UnreachableError):
            return present
        ways = (reported, *(peer for peer in self._listed if peer.node_id == reported.node_id))
        return next((way for way in ways if way != present), present)

    def metadata_request(self, *, space: bool = False) -> dict[str, Any]:
        """Return METADATA; a node whose log continues this one says whether it contains what the client has seen."""
        seen = None if self.log_uuid is None else [self.log_uuid, *self.entry_seen]
        return messages.METADATA.encode(messages.MetadataRequest(space=space, seen=seen))

    def _successor(self, found: Sequence[messages.MetadataResponse]) -> str | None:
        """Return the log that continues this one, if this one has no leader now."""
        if any(response.log == self.log_uuid and response.leader is not None for response in found):
            return None
        named = Counter(response.log for response in found if response.follows and response.log is not None)
        return max(named, key=named.__getitem__, default=None)

    def _follow(self, log_uuid: str) -> None:
        """Switch to a log that continues this one and contains the entries that the client has seen."""
        _LOG.warning("following the log that continues: group=%s log=%s before=%s", self.group, log_uuid, self.log_uuid)
        self.log_uuid = log_uuid
        self.commit_seen = min(self.commit_seen, self.entry_seen[0])
        self._newest = _NOTHING
        self._leader = None

    def _of_this_log(
        self, node_id: str, response: messages.MetadataResponse | DLedgerError
    ) -> messages.MetadataResponse | DLedgerError:
        if isinstance(response, DLedgerError) or response.log in (None, self.log_uuid):
            return response
        values = {"group": self.group, "node": node_id, "ours": self.log_uuid, "theirs": response.log}
        link = next((link for link in chain_of_rows(response.chain) if link.log_uuid == self.log_uuid), None)
        if link is not None and response.follows is None:
            return UnreachableError(
                f"{node_id} does not know whether log {response.log}, which continues log {self.log_uuid}, contains "
                f"the entry at index {self.entry_seen[0]}: it is not committed there yet, or deleted",
                self._address(node_id),
                "retry; if this stays, the entry is deleted: continue with a new client",
                values,
            )
        if link is not None and response.follows is False:
            index, term = self.entry_seen
            return OtherLogError(
                f"log {response.log} continues log {self.log_uuid} up to index {link.index}, and without the entry at "
                f"index {index} of term {term} that this client has seen",
                self._address(node_id),
                "the entry was lost with most nodes: compare the data, then continue with a new client",
                values | {"continued_index": link.index, "continued_term": link.term, "index": index, "term": term},
            )
        return OtherLogError(
            f"{node_id} has another log of group {self.group} than this client",
            self._address(node_id),
            "correct the peers string; a new client takes the log that it finds",
            values,
        )

    async def _set_members(self, members: Iterable[Peer]) -> None:
        known = {peer.node_id: peer for peer in members}
        # A peer of the list without an id is one of the members; which one is not known.
        listed = {peer.node_id: peer for peer in self._listed if peer.has_id or not known}
        await self.pool.update(tuple((listed | known).values()))
        if self._leader not in self.pool.peers:
            self._leader = None

    def _address(self, node_id: str) -> str:
        peer = self.pool.peers.get(node_id)
        return node_id if peer is None else peer.address

    def responded(self, frame: Frame) -> None:
        """Look for moved nodes if a response names a newer configuration than the known one."""
        index = frame.header.get("cv", -1)
        if isinstance(index, int) and index > self._newest[1]:
            self.refresh()

    def refresh(self) -> None:
        """Ask all nodes for log, members and leader in the background, unless that was done within a second."""
        now = asyncio.get_running_loop().time()
        if self._discovery is None and now - self._refreshed >= REFRESH_S:
            self._refreshed = now
            self._start_discovery()

    # --- the leader -----------------------------------------------------------------------------------------------

    async def leader(self, timeout_s: float) -> Channel:
        """Return a channel to the presumed leader; query all nodes if none is known, or that one is silent.

        Raises:
            NoLeaderError: no node that responded knows a leader, or a silent one leads.
            UnreachableError: no node responded, or the leader cannot be reached.
        """
        if self._leader is None:
            self._leader = await self._find_leader(timeout_s)
        if self.pool.is_silent(self._leader):
            await self._sought(self._leader, timeout_s)
        node_id = self._leader
        try:
            return await self.pool.channel(node_id, min(timeout_s, CONNECT_S))
        except DLedgerError:
            self._forget_leader(node_id)
            raise

    def _silent(self, channel: Channel) -> None:
        """Leave a node that has become silent, unless there is no other one."""
        if len(self.pool.peers) > 1:
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
        as they receive its heartbeats.
        """
        pause_s = SEEK_PAUSE_S
        while self.pool.is_silent(node_id) and (self._waiting or self.pool.has(node_id, WhenSilent.FOLLOW)):
            with contextlib.suppress(DLedgerError):
                leader = await self._find_leader(ASK_TIMEOUT_S)
                if leader != node_id:
                    self._leader = leader
                    self.pool.abandon(node_id, WhenSilent.FOLLOW)
                    return
            await asyncio.sleep(pause_s)
            pause_s = min(pause_s * 1.1, SEEK_PAUSE_MAX_S)

    async def _sought(self, node_id: str, timeout_s: float) -> None:
        """Wait until a silent leader has a successor, or is no longer silent; raise NoLeaderError."""
        self._waiting += 1
        try:
            async with asyncio.timeout(timeout_s):
                await asyncio.shield(self._start_seeking(node_id))
        except TimeoutError:
            raise NoLeaderError("the leader is silent, and no other node leads", f"group {self.group}") from None
        finally:
            self._waiting -= 1
        if self._leader is None:
            raise NoLeaderError("no leader was found", f"group {self.group}")

    async def find_log(self, timeout_s: float) -> DLedgerError | None:
        """Ask all nodes for log, members and leader now, and follow a log that continues; return the error if any."""
        try:
            await self._find_leader(timeout_s)
        except DLedgerError as error:
            return error
        return None

    async def _find_leader(self, timeout_s: float) -> str:
        discovery = self._discovery or self._start_discovery()
        try:
            async with asyncio.timeout(timeout_s):
                return await asyncio.shield(discovery)
        except TimeoutError:
            raise NoLeaderError("no leader was found in time", f"group {self.group}") from None
        except DLedgerError as error:
            raise type(error)(*error.args) from None

    def _start_discovery(self) -> asyncio.Task[str]:
        self._discovery = asyncio.create_task(self._discover())
        self._discovery.add_done_callback(self._discovered)
        return self._discovery

    def _discovered(self, task: asyncio.Task[str]) -> None:
        self._discovery = None
        if not task.cancelled():
            task.exception()

    async def _discover(self) -> str:
        """Return the leader that the responses of the newest term name.

        A deposed leader, and nodes that did not hear of its successor, name the old one. A majority has responses of
        the newest leader's term; the others get a moment more, so that an unresponsive node costs no second.
        """
        nodes = [node for node in self.pool.peers if not self.pool.is_silent(node)] or list(self.pool.peers)
        asked = [self._describe(node_id) for node_id in nodes]
        described: Described = {}
        loop, responded = asyncio.get_running_loop(), 0
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(None) as limit, aclosing(as_responded(asked)) as responses:
                async for node_id, response in responses:
                    described[node_id] = response
                    responded += not isinstance(response, DLedgerError)
                    if limit.when() is None and responded > len(asked) // 2:
                        limit.reschedule(loop.time() + UNRESPONSIVE_TIMEOUT_S)
        found = (await self.learn(described)).values()
        leaders: dict[int, str | None] = {}
        for response in found:
            if isinstance(response, messages.MetadataResponse):
                leader = response.leader if response.leader in self.pool.peers else None
                leaders[response.term] = leader or leaders.get(response.term)
        newest = leaders[max(leaders)] if leaders else None
        if newest is None:
            raise await self._no_leader([each for each in found if isinstance(each, DLedgerError)], len(asked))
        return newest

    async def _describe(self, node_id: str) -> tuple[str, messages.MetadataResponse | DLedgerError]:
        response = await self._ask(node_id, self.metadata_request(), ASK_TIMEOUT_S)
        if isinstance(response, DLedgerError):
            return node_id, response
        return node_id, messages.METADATA_OK.decode(response.header)

    async def _no_leader(self, failures: Sequence[DLedgerError], asked: int) -> DLedgerError:
        if len(failures) < asked:
            return NoLeaderError(
                "no node leads the group",
                f"group {self.group}",
                "start a majority of its nodes; if they run, dledger status names the next command",
            )
        error = self.unreachable(failures)
        self._newest = _NOTHING
        await self._set_members(())
        return error

    def unreachable(self, failures: Sequence[DLedgerError]) -> DLedgerError:
        """Return the error for a request that failed on every node."""
        # One node alone may have been replaced by a node of another cluster at its old address.
        others = sum(isinstance(failure, OtherLogError) for failure in failures)
        for failure in failures:
            final = not failure.retriable and not failure.outcome_unknown
            if final and (not isinstance(failure, OtherLogError) or 2 * others > len(failures)):
                return failure
        for failure in failures:
            if failure.values.get("state") == "waiting":  # its remedy names the nodes or the command
                return failure
        remedy = "check that they run and the peers string"
        unknown = sorted(
            {str(failure.values["unknown_host"]) for failure in failures if "unknown_host" in failure.values}
        )
        if unknown:
            remedy = (
                f"the host name {unknown[0]} is not known: correct it, and write a host name that contains '-' and has "
                "no node id before it as [host]:port"
            )
        if self.is_known and not all(peer.has_id for peer in self._listed):
            remedy += "; if only the address of the list can be reached, write it with the node's id: id-host:port"
        return UnreachableError(f"no node of group {self.group} responded", self.addresses, remedy)

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

    def served(self, node_id: str, frame: Frame) -> None:
        """Record that a replica served a read; one without contact to a leader may lack what others have."""
        contact_ms = frame.header.get("hl", 0)
        if isinstance(contact_ms, int) and 0 <= contact_ms <= CONTACT_LOST_MS:
            self._last_good = node_id
            self._failed.pop(node_id, None)
        else:
            self._avoid(node_id)

    def read_failed(self, node_id: str, error: DLedgerError) -> None:
        """Record that a replica failed a read."""
        self._avoid(node_id)
        if isinstance(error, UnreachableError | RequestTimedOutError | OtherLogError):
            self._forget_leader(node_id)
            self.refresh()

    def _avoid(self, node_id: str) -> None:
        self._failed[node_id] = asyncio.get_running_loop().time() + FAILED_S
        if self._last_good == node_id:
            self._last_good = None

    def saw_commit(self, commit_index: int) -> None:
        """Record a commit index that a response proved."""
        self.commit_seen = max(self.commit_seen, commit_index)

    def saw_entry(self, index: int, term: int) -> None:
        """Record an entry that was appended or read: a log that continues this one must contain it."""
        if index > self.entry_seen[0] and term >= 0:
            self.entry_seen = (index, term)

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
        await self.learn_ids(ASK_TIMEOUT_S)
        now = asyncio.get_running_loop().time()
        self._unresponsive = {node: until for node, until in self._unresponsive.items() if until > now}
        unresponsive = set(self._unresponsive)
        found = await self._ask_each(header, unresponsive)
        if unresponsive and not any(isinstance(response, Frame) for response in found.values()):
            found = await self._ask_each(header, ())
        if not any(isinstance(response, Frame) for response in found.values()):
            failures = [response for response in found.values() if isinstance(response, DLedgerError)]
            refused = next((error for error in failures if isinstance(error, (UnknownGroupError, BusyError))), None)
            raise refused or self.unreachable(failures)
        return found

    async def close(self) -> None:
        """Close all connections."""
        tasks = [*self._seeking.values(), *([] if self._discovery is None else [self._discovery])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.pool.close()

"""The log that a client found first: its members and leader, and what the client has seen of it.

The configured peers are only used to find the group: the nodes report the members with their newest addresses, and
these are asked from then on, next to the other configured nodes. Once no node responds, only the configured peers are
left. Nodes with another log, as a new cluster at an old address has it, count as failed.

Invariants, whatever the nodes respond:

* One client, one log: ``log_uuid`` changes once from None, and then only to a log that continues it and contains the
  last entry that the client has seen, and only while no node leads the old one. Otherwise an append could enter
  another cluster's log (``test_other_cluster_at_old_addresses_is_refused``,
  ``test_client_follows_log_that_continues_its_own``).
* ``commit_seen`` never falls while ``log_uuid`` stays: no read shows less of the log than an earlier one (monotonic
  reads; ``test_replica_without_known_entries_is_behind``).
* Of all configurations the one of the highest (term, index) counts, so a node that lags does not bring back a removed
  member (``test_moved_nodes_are_followed_by_reads_and_appends``).
* When the members change, a ``leader`` that is none of them is forgotten: nothing is sent to a node that left.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from dledger_core.client.routing.channel import ChannelPool
from dledger_core.config import Peer, parse_peer
from dledger_core.errors import DLedgerError, NotLeaderError, OtherLogError, UnreachableError
from dledger_core.lineage import ancestors_of_rows
from dledger_core.net import messages
from dledger_core.net.frame import Frame

_LOG = logging.getLogger(__name__)
_NOTHING: Final = (-2, -2)
"""Before every (term, index) of a configuration."""
Described = dict[str, messages.MetadataResponse | DLedgerError]
"""The nodes' responses to METADATA."""


def described_by(responses: Mapping[str, Frame | DLedgerError]) -> Described:
    """Return the decoded responses to METADATA; errors stay."""
    return {
        node: response if isinstance(response, DLedgerError) else messages.METADATA_OK.decode(response.header)
        for node, response in responses.items()
    }


def _configuration(response: messages.MetadataResponse) -> tuple[int, int]:
    return response.term, response.configuration


def _most_named(found: Iterable[messages.MetadataResponse]) -> str | None:
    """Return the log that most nodes have: one node may be another cluster's, at an old address of this one."""
    named = Counter(response.log for response in found if response.log is not None)
    return max(named, key=named.__getitem__, default=None)


class KnownLog:
    """The log of one group as one client knows it. Belongs to one event loop.

    Args:
        pool: the connections; its peers are the configured ones at first, then the members too.
        group: the group's name.
        log_uuid: the log; None = the one that is found first.

    Attributes:
        log_uuid: the log, None while it is not known.
        leader: the presumed leader.
        commit_seen: highest commit index that a response proved; reads never show less than this.
        entry_seen: index and term of the last entry that was appended or read; -1 and -1 = none.
    """

    def __init__(self, pool: ChannelPool, group: str, log_uuid: str | None) -> None:
        self.pool = pool
        self.group = group
        self.log_uuid = log_uuid
        self.leader: str | None = None
        self.commit_seen = -1
        self.entry_seen = (-1, -1)
        self._configured = tuple(pool.peers.values())
        self._newest = _NOTHING

    # --- requests and what they show ------------------------------------------------------------------------------

    def header_for(self, header: dict[str, Any]) -> dict[str, Any]:
        """Return a request about the group with the uuid of the log, once that is known."""
        return header if self.log_uuid is None or "g" not in header else {**header, "lu": self.log_uuid}

    def metadata_request(self, *, space: bool = False) -> dict[str, Any]:
        """Return METADATA; a node whose log continues this one says whether it contains what the client has seen."""
        seen = None if self.log_uuid is None else [self.log_uuid, *self.entry_seen]
        return messages.METADATA.encode(messages.MetadataRequest(space=space, seen=seen))

    def saw_commit(self, commit_index: int) -> None:
        """Record a commit index that a response proved."""
        self.commit_seen = max(self.commit_seen, commit_index)

    def saw_entry(self, index: int, term: int) -> None:
        """Record an entry that was appended or read: a log that continues this one must contain it."""
        if index > self.entry_seen[0] and term >= 0:
            self.entry_seen = (index, term)

    # --- the leader -----------------------------------------------------------------------------------------------

    def leader_is(self, node_id: str) -> None:
        """Record the leader."""
        self.leader = node_id if node_id in self.pool.peers else None

    def leader_failed(self, node_id: str, error: DLedgerError | None = None) -> None:
        """Forget a presumed leader that failed; follow its hint if it sent one."""
        if self.leader == node_id:
            self.leader = None
        if isinstance(error, NotLeaderError) and error.leader_id in self.pool.peers and error.leader_id != node_id:
            self.leader = error.leader_id

    # --- the members ----------------------------------------------------------------------------------------------

    @property
    def is_known(self) -> bool:
        """Whether a node has reported the members of the log."""
        return self._newest != _NOTHING

    @property
    def lacks_ids(self) -> bool:
        """Whether a configured peer may be any of the members."""
        return not all(peer.has_id for peer in self.pool.peers.values())

    def is_older_than(self, response: Frame) -> bool:
        """Whether a response names a newer configuration than the known one."""
        index = response.header.get("cv", -1)
        return isinstance(index, int) and index > self._newest[1]

    async def learn(self, responses: Described) -> Described:
        """Take in the log, if none is known, and its newest members; return the responses of nodes with this log.

        The response of a node with another log becomes an OtherLogError.
        """
        found = [response for response in responses.values() if isinstance(response, messages.MetadataResponse)]
        if self.log_uuid is None:
            self.log_uuid = _most_named(found)
        elif (successor := self._successor(found)) is not None:
            self._follow(successor)
        ours = [response for response in found if response.log in (None, self.log_uuid)]
        newest = max(ours, key=_configuration, default=None)
        if newest is not None and newest.members and _configuration(newest) >= self._newest:
            members = [parse_peer(f"{node}-{address}") for node, _, address, _ in newest.members]
            if _configuration(newest) == self._newest:
                members = [self._next_address(peer, responses) for peer in members]
            self._newest = _configuration(newest)
            await self._set_members(members)
        return {node: self._of_this_log(node, response) for node, response in responses.items()}

    async def forget_members(self) -> None:
        """Ask only the configured peers again, because no node responds: all members may have moved."""
        self._newest = _NOTHING
        await self._set_members(())

    def _successor(self, found: Sequence[messages.MetadataResponse]) -> str | None:
        """Return the log that continues this one, if this one has no leader now."""
        if any(response.log == self.log_uuid and response.leader is not None for response in found):
            return None
        return _most_named(response for response in found if response.follows)

    def _follow(self, log_uuid: str) -> None:
        """Switch to a log that continues this one and contains the entries that the client has seen."""
        _LOG.warning("following the log that continues: group=%s log=%s before=%s", self.group, log_uuid, self.log_uuid)
        self.log_uuid = log_uuid
        # Entries committed after it may be lost: a replica that had to reach them would never serve a read.
        self.commit_seen = min(self.commit_seen, self.entry_seen[0])
        self._newest = _NOTHING
        self.leader = None

    def _next_address(self, reported: Peer, responses: Described) -> Peer:
        """Return where to ask a node next, of which no newer address is recorded.

        A node that did not respond is asked at the reported address and at the configured one in turn: after a start at
        other addresses, the log's are the old ones until the nodes have found each other.
        """
        node_id = str(reported.node_id)
        present = self.pool.peers.get(node_id, reported)
        if not isinstance(responses.get(node_id), UnreachableError):
            return present
        addresses = (reported, *(peer for peer in self._configured if peer.node_id == reported.node_id))
        return next((each for each in addresses if each != present), present)

    async def _set_members(self, members: Iterable[Peer]) -> None:
        known = {peer.node_id: peer for peer in members}
        # A configured peer without an id is one of the members; which one is not known.
        configured = {peer.node_id: peer for peer in self._configured if peer.has_id or not known}
        await self.pool.update(tuple((configured | known).values()), are_configured=not known)
        if self.leader not in self.pool.peers:
            self.leader = None

    # --- errors ---------------------------------------------------------------------------------------------------

    def _of_this_log(
        self, node_id: str, response: messages.MetadataResponse | DLedgerError
    ) -> messages.MetadataResponse | DLedgerError:
        if isinstance(response, DLedgerError) or response.log in (None, self.log_uuid):
            return response
        values = {"group": self.group, "node": node_id, "ours": self.log_uuid, "theirs": response.log}
        peer = self.pool.peers.get(node_id)
        address = node_id if peer is None else peer.address
        link = next((link for link in ancestors_of_rows(response.chain) if link.log_uuid == self.log_uuid), None)
        if link is not None and response.follows is None:
            return UnreachableError(
                f"{node_id} does not know whether log {response.log}, which continues log {self.log_uuid}, contains "
                f"the entry at index {self.entry_seen[0]}: it is not committed there yet, or deleted",
                address,
                "retry; if this stays, the entry is deleted: continue with a new client",
                values,
            )
        if link is not None and response.follows is False:
            index, term = self.entry_seen
            return OtherLogError(
                f"log {response.log} continues log {self.log_uuid} up to index {link.index}, and without the entry at "
                f"index {index} of term {term} that this client has seen",
                address,
                "the entry was lost with most nodes: compare the data, then continue with a new client",
                values | {"continued_index": link.index, "continued_term": link.term, "index": index, "term": term},
            )
        return OtherLogError(
            f"{node_id} has another log of group {self.group} than this client",
            address,
            "correct the peers string; a new client takes the log that it finds",
            values,
        )

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
        unknown = sorted({str(each.values["unknown_host"]) for each in failures if "unknown_host" in each.values})
        if unknown:
            remedy = (
                f"the host name {unknown[0]} is not known: correct it, and write a host name that contains '-' and has "
                "no node id before it as [host]:port"
            )
        if self.is_known and not all(peer.has_id for peer in self._configured):
            remedy += "; if only the address of the list can be reached, write it with the node's id: id-host:port"
        addresses = ", ".join(peer.address for peer in self.pool.peers.values())
        return UnreachableError(f"no node of group {self.group} responded", addresses, remedy)

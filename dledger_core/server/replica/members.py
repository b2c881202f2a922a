"""The nodes to connect to, and the members of each group's log with their newest addresses.

The configured peers are only used to find the cluster. The members of a group are in its log: ``set_configuration``
takes each configuration that comes into force. If a list names other nodes than the log, that is reported and changes
nothing.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from dledger_core.config import Peer, format_peers, parse_peer
from dledger_core.errors import ConfigError, invariant
from dledger_core.ids import MemberId, NodeId, node_of, store_of

if TYPE_CHECKING:
    from collections.abc import Iterable

    from dledger_core.raft import Configuration, ConfigurationInForce

_LOG = logging.getLogger(__name__)
_BOOTSTRAP: Final = -1


@dataclass(frozen=True, slots=True)
class Member:
    """A member of a log, as clients see it.

    Attributes:
        node_id: its node.
        store_uuid: its store, empty where it is not known.
        address: the newest address of the node, HOST:PORT.
        role: ``voter`` or ``learner``.
    """

    node_id: NodeId
    store_uuid: str
    address: str
    role: str


@dataclass(frozen=True, slots=True)
class LogMembers:
    """The members of one group's log, and the index of the entry that made them so; -1 for the bootstrap."""

    index: int
    members: tuple[Member, ...]


class Members:
    """The nodes that replicate the groups of this node; links, repairs and responses ask it each time.

    Args:
        self_id: this node.
        peers: the nodes of the peers string, this node included.
    """

    def __init__(self, self_id: NodeId, peers: tuple[Peer, ...]) -> None:
        self._self_id = self_id
        self._listed = peers
        self._groups: dict[str, ConfigurationInForce] = {}
        self._reached: dict[NodeId, str] = {}
        self._reported: dict[str, frozenset[NodeId]] = {}

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The nodes of the list and all members of the logs, each with the address where it was reached or recorded."""
        return tuple(self._where_reached(peer) for peer in self.known.values())

    @property
    def known(self) -> dict[NodeId, Peer]:
        """The same nodes, each with the address that a log recorded, or that of the list where none did."""
        return {peer.node_id: peer for peer in (*self._listed, *self._recorded())}

    def _recorded(self) -> Iterable[Peer]:
        for known in sorted(self._groups.values(), key=lambda each: each.index):
            yield from _addressed(known.configuration)

    def _where_reached(self, peer: Peer) -> Peer:
        """Return a node with the address where this process reached it, which is newer than what a log recorded."""
        if peer.node_id == self._self_id:
            return next((listed for listed in self._listed if listed.node_id == self._self_id), peer)
        address = self._reached.get(peer.node_id)
        return peer if address is None else parse_peer(f"{peer.node_id}-{address}")

    @property
    def others(self) -> tuple[Peer, ...]:
        """All of them but this node."""
        return tuple(peer for peer in self.peers if peer.node_id != self._self_id)

    def find(self, node_id: NodeId | None) -> Peer | None:
        """Return a node, None if there is no such one."""
        return next((peer for peer in self.peers if peer.node_id == node_id), None)

    def ways_to(self, node_id: NodeId) -> tuple[Peer, ...]:
        """Return the addresses to dial in turn: the recorded one, then the one of the list if it differs.

        After one node moved the log is right; after all of them moved at once, only their lists are.
        """
        recorded = [peer for peer in self._recorded() if peer.node_id == node_id][-1:]
        listed = [peer for peer in self._listed if peer.node_id == node_id]
        # In turn: neither of the two is known to be right
        # (test_node_is_dialed_at_its_recorded_and_its_listed_address_in_turn).
        return tuple(dict.fromkeys((*recorded, *listed)))

    def set_reached(self, node_id: NodeId, address: str | None) -> None:
        """Take the address that a connected node with a store of a group here advertises, None once it is lost."""
        self._reached.pop(node_id, None)
        if address:
            self._reached[node_id] = address

    def _known(self, group: str) -> ConfigurationInForce | None:
        known = self._groups.get(group)
        return None if known is None or known.configuration.is_unknown else known

    def index(self, group: str) -> int:
        """Return the index of the configuration in force, -1 where the log names none yet: ``of(group).index``."""
        known = self._known(group)
        return _BOOTSTRAP if known is None else known.index

    def of(self, group: str) -> LogMembers:
        """Return the members of a group's log; the nodes of the list where the log names none yet."""
        known = self._known(group)
        addresses = {peer.node_id: peer.address for peer in self.peers}
        if known is None:
            listed = (Member(peer.node_id, "", peer.address, "voter") for peer in self._listed)
            return LogMembers(_BOOTSTRAP, tuple(listed))
        found = known.configuration

        def member(each: MemberId) -> Member:
            node = node_of(each)
            # The address where the node answers now, even if another was recorded: clients get it from here.
            recorded = None if node == self._self_id or node in self._reached else found.addresses.get(each)
            address = recorded or addresses.get(node, "")
            return Member(node, store_of(each), address, "voter" if found.is_voter(each) else "learner")

        return LogMembers(known.index, tuple(member(each) for each in found.members if addresses.get(node_of(each))))

    def set_configuration(self, group: str, found: ConfigurationInForce) -> None:
        """Take the configuration that is in force in a group now; report it if the list names other nodes."""
        self._groups[group] = found
        members = frozenset(map(node_of, found.configuration.members))
        listed = frozenset(peer.node_id for peer in self._listed)
        # The log decides who is a member; the list only differs, so it is a warning, once
        # (test_list_that_differs_from_log_is_reported_once_and_changes_nothing).
        if members in (listed, frozenset()) or self._reported.get(group) == members:
            return
        self._reported[group] = members
        _LOG.warning(
            "peers string names other nodes than the log, the log decides: group=%s peers=%s members=%s "
            "remedy=dledger member list, then restart with --peers '%s' when convenient",
            group,
            ",".join(sorted(listed)),
            ",".join(sorted(members)),
            format_peers(tuple(peer for peer in self.peers if peer.node_id in members)),
        )

    def replace(self, peers: tuple[Peer, ...]) -> None:
        """Set the list; ``PeerLinks.update`` then connects to the added nodes and leaves the removed ones."""
        ids = [peer.node_id for peer in peers]
        invariant(len(set(ids)) == len(ids), "a member is listed twice", members=ids)
        self._listed = peers


def _addressed(configuration: Configuration) -> Iterable[Peer]:
    replaced = frozenset(configuration.replaces.values())
    for member in sorted(configuration.members, key=lambda each: each not in replaced):  # its replacement counts
        try:
            yield parse_peer(f"{node_of(member)}-{configuration.addresses[member]}")
        except (KeyError, ConfigError):
            continue

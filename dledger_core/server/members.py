"""The nodes that replicate the groups of this node, from a source that can change while the node runs."""

from __future__ import annotations

from dledger_core.config import Peer
from dledger_core.errors import invariant
from dledger_core.ids import NodeId


class Members:
    """The current members. Links, repairs and responses to clients ask it each time and keep no copy.

    Args:
        self_id: this node.
        peers: the first members, this node included: the peers string.
    """

    def __init__(self, self_id: NodeId, peers: tuple[Peer, ...]) -> None:
        self._self_id = self_id
        self._peers = peers

    @property
    def peers(self) -> tuple[Peer, ...]:
        """All members."""
        return self._peers

    @property
    def others(self) -> tuple[Peer, ...]:
        """All members but this node."""
        return tuple(peer for peer in self._peers if peer.node_id != self._self_id)

    def find(self, node_id: NodeId | None) -> Peer | None:
        """Return a member, None if there is no such one."""
        return next((peer for peer in self._peers if peer.node_id == node_id), None)

    def replace(self, peers: tuple[Peer, ...]) -> None:
        """Set the members; ``PeerLinks.update`` then connects to the added ones and leaves the removed ones."""
        ids = [peer.node_id for peer in peers]
        invariant(len(set(ids)) == len(ids), "a member is listed twice", members=ids)
        self._peers = peers

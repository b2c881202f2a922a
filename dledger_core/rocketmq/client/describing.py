"""What a Java group's nodes tell of themselves, as the client's Metadata."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from dledger_core.client.results import Metadata, NodeStatus
from dledger_core.config import Peer
from dledger_core.errors import DLedgerError

if TYPE_CHECKING:
    from dledger_core.rocketmq.client.bounds import Look
    from dledger_core.rocketmq.remoting.responses import MetadataReply

__all__ = ["metadata_of"]


def metadata_of(
    peers: Sequence[Peer], answers: Mapping[str, MetadataReply | DLedgerError], look: Look | None
) -> Metadata:
    """Returns who leads, the ends of the leader's log, and which nodes answer; of others Java tells no more."""
    named = [answer.leader_id for answer in answers.values() if not isinstance(answer, DLedgerError)]
    leader = look.leader_id if look is not None else next((node for node in named if node is not None), None)
    nodes = []
    for peer in peers:
        node, answer = str(peer.node_id), answers[str(peer.node_id)]
        if isinstance(answer, DLedgerError):
            nodes.append(NodeStatus(node, peer.address))
        elif look is not None and node == look.leader_id:
            facts = (look.first_index, look.end - 1, look.commit_index, look.safe_end)
            nodes.append(NodeStatus(node, peer.address, "leader", *facts, reachable=True))
        else:
            role = "leader" if node == leader else "follower" if answer.leader_id is not None else "candidate"
            nodes.append(NodeStatus(node, peer.address, role, reachable=True))
    return Metadata(leader, look.term if look is not None else -1, tuple(nodes))

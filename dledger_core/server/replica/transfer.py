"""Handing leadership over, as a client asks for it."""

from __future__ import annotations

import asyncio
from typing import Final

from dledger_core.errors import BadRequestError, TransferringError
from dledger_core.ids import NodeId
from dledger_core.server.config import ServerConfig
from dledger_core.server.replica.replica import Replica

__all__ = ["transfer_leadership"]

PATIENCE_S: Final = 3.0


async def transfer_leadership(replica: Replica, config: ServerConfig, target: NodeId) -> None:
    """Hands a group over to a node; returns when it leads.

    Raises:
        NotLeaderError: this node does not lead.
        BadRequestError: there is no such node.
        TransferringError: it did not take over in time.
    """
    if not replica.is_leader:
        raise replica.not_leader()
    if target not in {peer.node_id for peer in config.peers}:
        raise BadRequestError(f"{target} is not in the peers string", "node", "name another node")
    if target != config.self_id:
        replica.transfer_leadership(target)
    deadline = asyncio.get_running_loop().time() + PATIENCE_S
    while replica.soft_state.leader_id != target:
        left = deadline - asyncio.get_running_loop().time()
        if left <= 0:
            raise TransferringError(f"{target} did not take over in time", "", "retry when it has caught up")
        await replica.wait_progress(left)

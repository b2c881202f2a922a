"""The leader's side of an admission: find the waiting node, and make its store a store of the log.

A node without a store waits under its node id, and nothing proves that it is the one that was meant: another machine
may have been started with the same id. So all addresses that are known for the node are asked first, and nothing is
changed unless exactly one node waits there.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any, Final

from dledger_core.bootstrap import StoreAnswer
from dledger_core.client.routing.channel import Channel
from dledger_core.config import Peer, parse_peer
from dledger_core.errors import DLedgerError, MemberChangeRefusedError, ProtocolError
from dledger_core.ids import NodeId, node_of
from dledger_core.net import messages
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.frame import Frame
from dledger_core.raft import Configuration
from dledger_core.server.replica.members import Members
from dledger_core.server.replica.replica import Replica

_ADMIT_S: Final = 3.0
"""Timeout of a connection and of a request to a node whose store is admitted."""
Ask = Callable[[Peer, dict[str, Any]], Awaitable[Frame]]
"""Sends a request to a node and returns the response."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    """A node that answered about its store."""

    peer: Peer
    node_uuid: str
    answer: StoreAnswer


class Admissions:
    """Admits stores to the log of one group.

    Args:
        replica: the group's replica, which leads.
        members: addresses that this node knows.
        ask: sends a request; over a connection of its own by default.
        credentials: this node's, for that connection.
    """

    def __init__(
        self,
        replica: Replica,
        members: Members,
        ask: Ask | None = None,
        credentials: Credentials = PLAINTEXT,
    ) -> None:
        self._credentials = credentials
        self._replica = replica
        self._members = members
        self._ask = self._over_connection if ask is None else ask

    async def admit(self, node: NodeId, address: str | None, configuration: Configuration) -> tuple[str, str]:
        """Make the store of a waiting node a store of this log; return its uuid and the node's address.

        Args:
            node: the node.
            address: its HOST:PORT; None = the one that is known.
            configuration: the group's, with the last address of the node.

        Raises:
            MemberChangeRefusedError: no node waits there, two do, or its store belongs to another log.
        """
        known = [address] if address is not None else []
        known += [found for member, found in configuration.addresses.items() if node_of(member) == node]
        if (peer := self._members.find(node)) is not None:
            known.append(peer.address)
        if not known:
            raise _refused("store-unknown", f"no address of {node} is known", "name it with --address")
        waiting = await self._waiting(node, dict.fromkeys(known))
        chosen = [found for found in waiting if address in (None, found.peer.address)]
        if not chosen:
            raise _refused(
                "store-unknown", f"{node} does not answer at {known[0]}", f"start {node} with an empty store"
            )
        return await self._admitted(node, chosen[0].peer), chosen[0].peer.address

    async def _waiting(self, node: NodeId, addresses: Iterable[str]) -> list[_Waiting]:
        """Return the answers of the node at these addresses; raise if they come from two nodes."""
        peers = [parse_peer(f"{node}-{address}") for address in addresses]
        found = [each for each in await asyncio.gather(*map(self._probe, peers)) if each is not None]
        if len({each.node_uuid for each in found}) > 1:
            places = " and ".join(each.peer.address for each in found)
            raise _refused("two-stores-wait", f"two nodes answer as {node}: at {places}", "stop the wrong one")
        return found

    async def _probe(self, peer: Peer) -> _Waiting | None:
        """Return a node's answer; None if it does not answer, has another id or another log of this group."""
        header = messages.FOUND.encode(messages.BootstrapRequest(operation="look"), g=self._replica.group)
        try:
            response = messages.FOUND_OK.decode((await self._ask(peer, header)).header)
        except DLedgerError:
            return None
        answer = StoreAnswer.from_fields(response.answer)
        if answer is None or answer.node_id != peer.node_id:
            return None
        return _Waiting(peer, response.node_uuid, answer)

    async def _admitted(self, node: NodeId, peer: Peer) -> str:
        log_uuid = self._replica.log_uuid
        if log_uuid is None:
            raise _refused("no-commit-in-term", "the log has no identity yet", "retry")
        request = messages.AdmitRequest(node=node, log=log_uuid, constants=asdict(self._replica.log.constants))
        header = messages.ADMIT.encode(request, g=self._replica.group)
        try:
            return messages.ADMIT_OK.decode((await self._ask(peer, header)).header).store
        except ProtocolError:
            raise
        except DLedgerError as error:
            raise _refused(
                "store-refuses", f"{node} does not admit its store to this log: {error.what}", error.remedy
            ) from error

    async def _over_connection(self, peer: Peer, header: dict[str, Any]) -> Frame:
        channel = Channel(peer, credentials=self._credentials)
        try:
            await channel.open(_ADMIT_S)
            return await channel.request(header, timeout_s=_ADMIT_S)
        finally:
            with contextlib.suppress(DLedgerError):
                await channel.close()


def _refused(reason: str, what: str, remedy: str) -> MemberChangeRefusedError:
    return MemberChangeRefusedError(what, "", remedy, {"reason": reason})

"""Attaches the groups of this node on all its links; ``attachments`` has the state of one connection."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from functools import partial
from typing import Final

from dledger_core.errors import DuplicateStoreError
from dledger_core.ids import MemberId, store_of
from dledger_core.net.connection import Connection
from dledger_core.net.frame import Frame
from dledger_core.net.limits.rates import BurstFilter
from dledger_core.net.protocol import Type
from dledger_core.server.replica.attachments import AttachHost, Attachments
from dledger_core.server.replica.link import Link
from dledger_core.server.replica.members import Members

_LOG = logging.getLogger(__name__)
_LOG.addFilter(BurstFilter())

_EARLY_FRAMES_MAX: Final = 4096
ATTACH_TYPES: Final = (Type.ATTACH, Type.ATTACH_REFUSED)


class AttachExchange:
    """Sends this node's offers on each link and takes the peers' offers.

    Args:
        host: the groups of this node.
        members: records which peers are reached.
    """

    def __init__(self, host: AttachHost, members: Members) -> None:
        self._host = host
        self._members = members
        self._early: dict[Connection, list[Frame]] = {}

    def begin(self, link: Link, connection: Connection, links: Iterable[Link]) -> None:
        """Attach all groups on a connection that its link uses from now on; ``links`` are all those of this node."""
        self._members.set_reached(link.peer.node_id, None)
        attached = Attachments(
            link.peer.node_id, self._host, partial(_check_holder, links, link), connection.send_buffers
        )
        link.attached = attached
        # The response to hello of an accepted connection leaves after this call, and must be the first frame.
        asyncio.get_running_loop().call_soon(self._offer_all, link, attached)
        for frame in self._early.pop(connection, ()):
            self.take(link, frame)

    def _offer_all(self, link: Link, attached: Attachments) -> None:
        if link.attached is attached:
            attached.offer_all()

    def keep(self, connection: Connection, frame: Frame) -> None:
        """Keep an attach of a newcomer, or of a dialed connection that is not in use yet; drop everything else."""
        # Only attaches: messages of a newcomer must not count, because it may be another process with the peer's name
        # (test_newcomer_displaces_no_link_that_works). An attach is sent once, so it must not be lost.
        early = self._early.setdefault(connection, [])
        if frame.header["t"] in ATTACH_TYPES and len(early) < _EARLY_FRAMES_MAX:
            early.append(frame)

    def forget(self, connection: Connection) -> None:
        """Drop the kept attaches of a connection."""
        self._early.pop(connection, None)

    def take(self, link: Link, frame: Frame) -> None:
        """Take an attach or its refusal."""
        if link.attached is None:
            return
        error = link.attached.on_frame(frame)
        if link.connection is not None and link.members():
            self._members.set_reached(link.peer.node_id, link.connection.peer_hello.address)
        if error is not None and not error.retriable:
            group = str(frame.header.get("g"))[:127]
            _LOG.warning("attach refused: group=%r peer=%s error=%s", group, link.peer.node_id, error)


def _check_holder(links: Iterable[Link], link: Link, group: str, member: MemberId) -> None:
    """Raise DuplicateStoreError if another node that answers holds the store."""
    # Two processes with one store would vote twice in a term and acknowledge what only one disk has
    # (test_second_node_with_same_store_is_refused).
    if not store_of(member):
        return
    for other in links:
        holds = other is not link and other.is_open and other.attached is not None
        if holds and other.attached is not None and store_of(member) in other.attached.stores_of(group):
            raise DuplicateStoreError(
                f"{other.peer.node_id} holds the same store of group {group}",
                str(link.peer.node_id),
                "stop the node with the copy; a copied directory is not a store of its own",
                {"group": group, "store": store_of(member), "holder": str(other.peer.node_id)},
            )

"""Committed records of a group from any peer with an intact copy, to replace damaged ones here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from dledger_core.config import LIMITS, Limits, Peer
from dledger_core.errors import (
    CorruptRecordError,
    DLedgerError,
    StoreMismatchError,
    UnreachableError,
    error_from_wire,
)
from dledger_core.net import codec, messages
from dledger_core.net.connection import Connection
from dledger_core.net.frame import Frame
from dledger_core.net.hello import Hello
from dledger_core.net.protocol import Type
from dledger_core.net.transport import connect
from dledger_core.record import Records
from dledger_core.storage.check.damage import Damage

Write = Callable[[Damage, Records | None, int], Awaitable[Damage | None]]
"""Writes records over a damaged range; gets the peer's commit index with them, returns the remaining damage."""


class PeerRecordSource(Protocol):
    """Another node that may have records of a group; takes one request at a time."""

    @property
    def peer(self) -> Peer:
        """The node."""

    async def open(self, group: str, log_uuid: str | None) -> None:
        """Connect, unless connected, and check that the peer has the same log."""

    async def read(self, group: str, start: int, end: int) -> tuple[Records, int]:
        """Return committed records from ``start`` on and the commit index; raise the peer's error."""

    async def close(self) -> None:
        """Close the connection."""


class PeerConnection:
    """One connection to one peer; see ``PeerRecordSource``."""

    def __init__(self, peer: Peer, limits: Limits = LIMITS) -> None:
        self.peer = peer
        self._limits = limits
        self._connection: Connection | None = None
        self._response: asyncio.Future[Frame] | None = None
        self._number = 0

    async def open(self, group: str, log_uuid: str | None) -> None:
        """See ``PeerRecordSource``."""
        if self._connection is not None:
            return
        self._connection = await connect(
            self.peer.host, self.peer.port, Hello(), self, timeout_s=self._limits.peer_connect_s
        )
        theirs = self._connection.peer_hello.logs.get(group)
        if log_uuid is not None and theirs is not None and theirs != log_uuid:
            raise StoreMismatchError(
                f"{self.peer.node_id} has another log of group {group}", self.peer.address, "correct the peers string"
            )

    async def read(self, group: str, start: int, end: int) -> tuple[Records, int]:
        """See ``PeerRecordSource``."""
        assert self._connection is not None
        self._number += 1
        self._response = asyncio.get_running_loop().create_future()
        request = messages.ReadRequest(
            start=start, end=end, max_bytes=self._limits.repair_fetch_bytes, isolation="records"
        )
        try:
            async with asyncio.timeout(self._limits.peer_response_s):
                self._connection.send(messages.READ.encode(request, r=self._number, g=group))
                frame = await self._response
        except TimeoutError:
            raise UnreachableError("no response in time", self.peer.address) from None
        response = messages.READ_OK.decode(frame.header)
        return codec.parse_records(frame.payload, response.count), response.commit_index

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See ``Handler``."""
        del connection
        if self._response is None or self._response.done() or frame.header.get("r") != self._number:
            return
        fields = frame.header.get("e")
        if frame.header["t"] == Type.READ_OK:
            self._response.set_result(frame)
        else:
            self._response.set_exception(error_from_wire(fields if isinstance(fields, dict) else {}))

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """See ``Handler``."""
        del connection
        if self._response is not None and not self._response.done():
            self._response.set_exception(UnreachableError(f"the connection was lost: {error}", self.peer.address))

    async def close(self) -> None:
        """See ``PeerRecordSource``."""
        if self._connection is not None:
            self._connection.close()
            await self._connection.closed


class PeerRecords:
    """Repair of damaged ranges of one group's store.

    Args:
        peers: the other nodes.
        group: the group.
        log_uuid: identity of the log, if it is known here.
        source: creates the access to a node.

    Attributes:
        failures: each peer's reason for not helping, as of its last request, by node id.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        group: str,
        log_uuid: str | None,
        source: Callable[[Peer], PeerRecordSource] = PeerConnection,
    ) -> None:
        self._source = source
        self._peers = tuple(peers)
        self._group = group
        self._log_uuid = log_uuid
        self.failures: dict[str, str] = {}

    async def repair(self, damage: Damage, write: Write) -> Damage | None:
        """Fetch a range and write it, chunk by chunk; return the damage for which no peer has records, or None.

        Raises:
            DiskFailedError: a write here failed.
        """
        left: Damage | None = damage
        if damage.start == damage.end:
            return await write(damage, None, -1)
        while left is not None:
            before = left
            for peer in self._peers:
                left = await self._repair_from(peer, before, write)
                if left != before:
                    break
            if left == before:
                return left
        return None

    async def _repair_from(self, peer: Peer, damage: Damage, write: Write) -> Damage | None:
        """Repair from one peer as far as it has records; return the remaining damage."""
        source = self._source(peer)
        left: Damage | None = damage
        try:
            while left is not None:
                fetched = await self._fetch(source, left)
                if fetched is None:
                    break
                try:
                    left = await write(left, *fetched)
                except CorruptRecordError as error:  # the records do not fit this log
                    self.failures[str(peer.node_id)] = str(error)
                    break
        finally:
            await source.close()
        return left

    async def _fetch(self, source: PeerRecordSource, damage: Damage) -> tuple[Records, int] | None:
        """Return the peer's records of the range, up to its own damage, and its commit index; None if it has none."""
        end = int(damage.end)
        try:
            await source.open(self._group, self._log_uuid)
            try:
                found = await source.read(self._group, damage.start, end)
            except CorruptRecordError as error:
                theirs = error.values.get("index")
                if not isinstance(theirs, int) or not damage.start < theirs < end:
                    raise
                found = await source.read(self._group, damage.start, theirs)
            if found[0].count:
                return found
            reason = "the peer has not committed these entries"
        except DLedgerError as error:
            reason = str(error)
        self.failures[str(source.peer.node_id)] = reason
        return None

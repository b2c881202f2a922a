"""Committed records of a group from whichever peer holds them intact, to put in the place of damaged ones here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Final, Protocol

from dledger_core.config import Peer
from dledger_core.errors import (
    CorruptRecordError,
    DLedgerError,
    StoreMismatchError,
    UnreachableError,
    error_from_wire,
)
from dledger_core.net import codec
from dledger_core.net.codec import int_field
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.net.transport import Connection, Hello, connect
from dledger_core.record import Records
from dledger_core.storage.check.damage import Damage

__all__ = ["PeerRecords", "PeerSource", "Source", "Write"]

FETCH_BYTES: Final = 4 << 20
ANSWER_S: Final = 10.0
CONNECT_S: Final = 3.0

Write = Callable[[Damage, Records | None, int], Awaitable[Damage | None]]
"""Writes records over a damaged range; gets the commit index they were read under, returns what remains."""


class Source(Protocol):
    """Another node that may hold records of a group; answers one question at a time."""

    @property
    def peer(self) -> Peer:
        """The node."""

    async def open(self, group: str, log_uuid: str | None) -> None:
        """Connects, unless it is connected, and looks that the peer holds the same log."""

    async def read(self, group: str, start: int, end: int) -> tuple[Records, int]:
        """Returns committed records from ``start`` on and the commit index; raises what the peer answers."""

    async def close(self) -> None:
        """Closes the connection."""


class PeerSource:
    """One connection to one peer; see ``Source``."""

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self._connection: Connection | None = None
        self._answer: asyncio.Future[Frame] | None = None
        self._number = 0

    async def open(self, group: str, log_uuid: str | None) -> None:
        """See ``Source``."""
        if self._connection is not None:
            return
        self._connection = await connect(self.peer.host, self.peer.port, Hello(), self, timeout_s=CONNECT_S)
        theirs = self._connection.peer_hello.logs.get(group)
        if log_uuid is not None and theirs is not None and theirs != log_uuid:
            raise StoreMismatchError(
                f"{self.peer.node_id} holds another log of group {group}", self.peer.address, "name the right peers"
            )

    async def read(self, group: str, start: int, end: int) -> tuple[Records, int]:
        """See ``Source``."""
        assert self._connection is not None
        self._number += 1
        self._answer = asyncio.get_running_loop().create_future()
        header: dict[str, Any] = {"t": Type.READ, "r": self._number, "g": group, "start": start, "end": end}
        try:
            async with asyncio.timeout(ANSWER_S):
                self._connection.send(header | {"max": FETCH_BYTES, "iso": "records"})
                frame = await self._answer
        except TimeoutError:
            raise UnreachableError("no answer in time", self.peer.address) from None
        return codec.parse_records(frame.payload, int_field(frame.header, "n", 0)), int_field(frame.header, "commit")

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        """See ``Handler``."""
        del connection
        if self._answer is None or self._answer.done() or frame.header.get("r") != self._number:
            return
        fields = frame.header.get("e")
        if frame.header["t"] == Type.READ_OK:
            self._answer.set_result(frame)
        else:
            self._answer.set_exception(error_from_wire(fields if isinstance(fields, dict) else {}))

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        """See ``Handler``."""
        del connection
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(UnreachableError(f"the connection was lost: {error}", self.peer.address))

    async def close(self) -> None:
        """See ``Source``."""
        if self._connection is not None:
            self._connection.close()
            await self._connection.closed


class PeerRecords:
    """Repairs ranges of one group's store.

    Args:
        peers: the other nodes.
        group: the group.
        log_uuid: identity of the log, if it is known here.
        source: makes the access to a node.

    Attributes:
        failures: why each peer could not help the last time it was asked.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        group: str,
        log_uuid: str | None,
        source: Callable[[Peer], Source] = PeerSource,
    ) -> None:
        self._source = source
        self._peers = tuple(peers)
        self._group = group
        self._log_uuid = log_uuid
        self.failures: dict[str, str] = {}

    async def mend(self, damage: Damage, write: Write) -> Damage | None:
        """Fetches a range and has it written, piece by piece; returns what no peer could give, or None.

        Raises:
            DiskFailedError: the disk here does not take the records.
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
        """Takes from one peer as much as it has; returns what remains."""
        source = self._source(peer)
        left: Damage | None = damage
        try:
            while left is not None:
                fetched = await self._fetch(source, left)
                if fetched is None:
                    break
                try:
                    left = await write(left, *fetched)
                except CorruptRecordError as error:  # it does not fit
                    self.failures[str(peer.node_id)] = str(error)
                    break
        finally:
            await source.close()
        return left

    async def _fetch(self, source: Source, damage: Damage) -> tuple[Records, int] | None:
        """Returns what the peer has of the range, up to damage of its own, and its commit index; None if nothing."""
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

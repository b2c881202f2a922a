"""A snapshot in chunks: both sides of one transfer, and the replica's part in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dledger_core.ids import Index, MemberId, Term


class SnapshotPayloads(Protocol):
    """The state of trimmed entries that a log which starts later still needs. Called within the core."""

    def pack(self, first_index: Index) -> bytes:
        """Return the state of all committed entries before ``first_index``, perhaps of later ones too."""

    def install(self, first_index: Index, previous_term: Term, data: bytes) -> object:
        """Restart the staged log at ``first_index``; return the replica's own object for ``Ready.restart``.

        Raises:
            ProtocolError: ``data`` is not usable; nothing changed.
        """


@dataclass(slots=True)
class OutgoingSnapshot:
    """One transfer as the leader sees it.

    Attributes:
        number: distinguishes it from others of the same leader and term.
        first_index: index at which the follower restarts its log.
        previous_term: term of the entry before; NO_TERM if unknown.
        data: the packed state.
        offset: bytes that the follower is known to have.
        sent: the chunk at ``offset`` is in flight.
        ask_due: ask how much has arrived.
        asked: such a query is in flight.
    """

    number: int
    first_index: Index
    previous_term: Term
    data: bytes
    offset: int = 0
    sent: bool = False
    ask_due: bool = False
    asked: bool = False


@dataclass(slots=True)
class IncomingSnapshot:
    """One transfer as the follower sees it."""

    sender: MemberId
    term: Term
    number: int
    nbytes: int = 0
    chunks: list[bytes] = field(default_factory=list)

    def belongs_to(self, sender: MemberId, term: Term, number: int) -> bool:
        """Whether it is the transfer with this number."""
        return (self.sender, self.term, self.number) == (sender, term, number)

    def add(self, offset: int, data: bytes) -> None:
        """Add a chunk if it is the next one."""
        if data and offset == self.nbytes:
            self.chunks.append(bytes(data))
            self.nbytes += len(data)

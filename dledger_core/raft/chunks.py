"""What a reset carries, in pieces: the leader's side of one transfer, the member's, and the drivers' part in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from dledger_core.ids import Index, NodeId, Term

__all__ = ["IncomingSnapshot", "OutgoingSnapshot", "SnapshotPayloads"]


class SnapshotPayloads(Protocol):
    """What a driver knows of a log that begins later: what it needs beside its entries. Called within the core."""

    def pack(self, first_index: Index) -> bytes:
        """Returns what is needed to begin at ``first_index``: of all that is committed before it, perhaps of more."""

    def unpack(self, first_index: Index, previous_term: Term, data: bytes) -> object:
        """Returns the driver's own object for ``Ready.new_start``; raises ProtocolError if ``data`` is not usable."""


@dataclass(slots=True)
class OutgoingSnapshot:
    """One transfer as the leader sees it.

    Attributes:
        number: distinguishes it from others of the same leader and term.
        first_index: where the member is to begin.
        previous_term: term of the entry before; NO_TERM if unknown.
        data: what the driver packed.
        offset: bytes that the member is known to have.
        sent: the piece at ``offset`` is on its way.
        ask_due: ask what has arrived.
        asked: such a question is on its way.
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
    """One transfer as the member sees it."""

    sender: NodeId
    term: Term
    number: int
    nbytes: int = 0
    pieces: list[bytes] = field(default_factory=list)

    def is_of(self, sender: NodeId, term: Term, number: int) -> bool:
        """Whether it is the one with this number."""
        return (self.sender, self.term, self.number) == (sender, term, number)

    def add(self, offset: int, data: bytes) -> None:
        """Takes a piece if it is the next one."""
        if data and offset == self.nbytes:
            self.pieces.append(bytes(data))
            self.nbytes += len(data)

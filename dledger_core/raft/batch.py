"""What the core knows of entries: whole batches, and terms as runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from dledger_core.ids import Index, Term

__all__ = ["BATCHES_MAX", "Batch", "LogStore", "TermRange"]

BATCHES_MAX: Final = 4096
"""Batches in one AppendEntries: however tiny they are, its header stays small (drivers refuse far longer ones)."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Consecutive entries of one append, of one term; moved and cut only whole.

    Attributes:
        first_index: index of the first entry.
        count: number of entries, at least 1.
        term: term of all of them.
        nbytes: bytes of the payload, for flow control only.
        payload: the driver's own object; the core passes it on and never looks inside. The NOOP of a
            new leader is made by the factory that the driver gave.
    """

    first_index: Index
    count: int
    term: Term
    nbytes: int
    payload: object

    @property
    def last_index(self) -> Index:
        """Index of the last entry."""
        return Index(self.first_index + self.count - 1)


@dataclass(frozen=True, slots=True)
class TermRange:
    """A term and the index of its first entry in the log."""

    first_index: Index
    term: Term


class LogStore(Protocol):
    """The durable log as the core sees it: read-only, synchronous.

    Only what an earlier Ready asked to persist, and ``advance`` confirmed, is ever asked for.
    """

    def first_index(self) -> Index:
        """Returns the index of the first entry held (0 for an empty, fresh log)."""

    def last_index(self) -> Index:
        """Returns the index of the last durable entry, or first_index - 1."""

    def term_ranges(self) -> Sequence[TermRange]:
        """Returns the runs of all entries held, in order; read once, at start.

        A log whose prefix was deleted begins with the run of the entry before ``first_index`` if it is known.
        """

    def read_batches(self, start: Index, max_bytes: int) -> Sequence[Batch]:
        """Returns consecutive whole batches, the first one containing ``start``.

        At least one batch; then as many as fit ``max_bytes``, at most ``BATCHES_MAX``.
        """

"""The vote floor: the end below which a member elects no log, its own included.

A member that may have lost entries it acknowledged must not help to elect a log without them: Raft's election rule
(section 5.4.1) compares a candidate with what the voter has, so it protects only what the voter still has. The floor
says what the voter had. The model of these rules is searched by tests/sim/search.
"""

from __future__ import annotations

from dataclasses import dataclass

from dledger_core.ids import Index, Term


@dataclass(frozen=True, slots=True)
class Floor:
    """The least (last term, last index) of a log that a member elects.

    Attributes:
        term: T, the highest term that the member, or a peer, knows that it took part in when it had the entries.
        index: the last entry of that term that it may have acknowledged; None if no member knows how far its log went:
            the floor (T, ∞), that of a *recovering* voter. Only a log with an entry of a term above T is above it.
    """

    term: Term
    index: Index | None = None

    @property
    def is_open(self) -> bool:
        """Whether no index is known: (T, ∞)."""
        return self.index is None

    def admits(self, last_term: Term, last_index: Index) -> bool:
        """Whether a log that ends with this entry is at or above the floor."""
        # The term decides first, as in elections (Raft section 5.4.1): a leader of a later term was elected by members
        # whose logs reached their own floors (test_floor_without_index_admits_logs_of_later_terms_only).
        if last_term != self.term:
            return last_term > self.term
        return self.index is not None and last_index >= self.index


def higher(floor: Floor | None, other: Floor | None) -> Floor | None:
    """Return the higher of two floors: a second loss raises a floor, and nothing lowers it."""
    if floor is None or other is None:
        return floor or other
    if floor.term != other.term:
        return floor if floor.term > other.term else other
    return floor if floor.is_open or (other.index is not None and (floor.index or 0) >= other.index) else other

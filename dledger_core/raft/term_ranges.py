"""Terms of a log as ranges: (first index, term) of each, both ascending."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable

from dledger_core.errors import invariant
from dledger_core.ids import NO_TERM, Index, Term
from dledger_core.raft.batch import TermRange


class TermRanges:
    """The term of every entry in a few numbers, however long the log is."""

    __slots__ = ("_starts", "_terms")

    def __init__(self, ranges: Iterable[TermRange] = ()) -> None:
        self._starts: list[Index] = []
        self._terms: list[Term] = []
        for found in ranges:
            invariant(
                not self._starts or found.first_index > self._starts[-1], "term ranges are out of order", found=found
            )
            self.append(found.first_index, found.term)

    @property
    def last_term(self) -> Term:
        """Term of the last range, or NO_TERM."""
        return self._terms[-1] if self._terms else NO_TERM

    def append(self, first_index: Index, term: Term) -> None:
        """Record that entries from ``first_index`` on have ``term``."""
        last = self._terms[-1] if self._terms else NO_TERM
        if term != last:
            invariant(term > last, "terms in a log never decrease", index=first_index, term=term, last_term=last)
            self._starts.append(first_index)
            self._terms.append(term)

    def term_at(self, index: Index) -> Term:
        """Return the term of the range that covers ``index``, or NO_TERM if none does."""
        starts = self._starts
        if not starts:
            return NO_TERM
        if index >= starts[-1]:
            return self._terms[-1]
        at = bisect_right(starts, index) - 1
        return self._terms[at] if at >= 0 else NO_TERM

    def first_index_of_range(self, index: Index) -> Index:
        """Return the start of the range that covers ``index`` (``index`` if none does)."""
        at = bisect_right(self._starts, index) - 1
        return self._starts[at] if at >= 0 else index

    def last_index_of(self, term: Term, last_index: Index) -> Index | None:
        """Return the last index of ``term`` in a log that ends at ``last_index``, or None if it has none."""
        at = bisect_left(self._terms, term)
        if at == len(self._terms) or self._terms[at] != term:
            return None
        return Index(self._starts[at + 1] - 1) if at + 1 < len(self._starts) else last_index

    def truncate(self, index: Index) -> None:
        """Remove entries from ``index`` on."""
        while self._starts and self._starts[-1] >= index:
            self._starts.pop()
            self._terms.pop()

    def trim(self, first_index: Index) -> None:
        """Remove ranges that end before the entry before ``first_index``: AppendEntries still needs its term."""
        at = bisect_right(self._starts, first_index - 1) - 1
        if at > 0:
            del self._starts[:at]
            del self._terms[:at]

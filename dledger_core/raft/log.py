"""The log as the algorithm sees it: term runs, a tail in memory, a durable store behind it.

Owns the bounds ``first_index <= commit_index + 1 <= last_index + 1`` and ``durable_index <= last_index``, and the
rule that nothing at or below ``commit_index`` is ever cut.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from dledger_core.errors import invariant
from dledger_core.ids import NO_INDEX, NO_TERM, Index, Term
from dledger_core.raft.batch import BATCHES_MAX, Batch, LogStore, TermRange
from dledger_core.raft.pointers import LogPointers
from dledger_core.raft.recent import RecentBatches
from dledger_core.raft.term_ranges import TermRanges

__all__ = ["RaftLog"]


@dataclass(slots=True)
class _Persisting:
    """A Ready on its way to disk, and how much of today's log is durable once it is there."""

    number: int
    durable_to: Index


class RaftLog:
    """One replica's log; batches come in and go out whole.

    Attributes:
        first_index: first entry held.
        last_index: last entry, durable or not.
        last_term: its term.
        durable_index: entries up to here are on this node's disk, as ``persisted`` confirmed.
        emitted_index: entries up to here were in a Ready.
        commit_index: entries up to here are never truncated.
    """

    __slots__ = (
        "_new",
        "_persisting",
        "_recent",
        "_runs",
        "_store",
        "_truncate_from",
        "commit_index",
        "durable_index",
        "emitted_index",
        "first_index",
        "last_index",
        "last_term",
    )

    def __init__(self, store: LogStore, *, commit_index: Index, recent_bytes_max: int) -> None:
        self._store = store
        self._runs = TermRanges(store.term_ranges())
        self._recent = RecentBatches(recent_bytes_max)
        self._new: list[Batch] = []
        self._truncate_from: Index | None = None
        self._persisting: deque[_Persisting] = deque()
        self.first_index = store.first_index()
        self.last_index = store.last_index()
        self.last_term: Term = self._runs.last_term
        self.durable_index = self.last_index
        self.emitted_index = self.last_index
        self.commit_index = max(commit_index, Index(self.first_index - 1))
        invariant(
            self.commit_index <= self.last_index,
            "the recovered commit_index is beyond the log",
            commit_index=commit_index,
            last_index=self.last_index,
        )

    def pointers(self) -> LogPointers:
        """Return the pointers that the core owns."""
        return LogPointers(
            first_index=self.first_index,
            commit_index=self.commit_index,
            durable_index=self.durable_index,
            emitted_index=self.emitted_index,
            last_index=self.last_index,
        )

    @property
    def has_output(self) -> bool:
        """Whether batches or a cut wait to be handed to the driver."""
        return bool(self._new) or self._truncate_from is not None

    def term_at(self, index: Index) -> Term | None:
        """Returns the term of an entry, NO_TERM where the log begins, None where it does not reach."""
        if index > self.last_index or index < self.first_index - 1:
            return None
        return NO_TERM if index == NO_INDEX else self._runs.term_at(index)

    def is_up_to_date(self, last_index: Index, last_term: Term) -> bool:
        """Returns whether a log that ends so is at least as up to date as this one (Raft section 5.4.1)."""
        return last_term > self.last_term or (last_term == self.last_term and last_index >= self.last_index)

    def matches(self, prev_index: Index, prev_term: Term) -> bool:
        """Returns whether this log holds (prev_index, prev_term); what is committed every leader holds alike."""
        if prev_index > self.last_index:
            return False
        return prev_index <= self.commit_index or self.term_at(prev_index) == prev_term

    def conflict_hint(self, prev_index: Index) -> tuple[Term, Index]:
        """Returns this log's term at a refused ``prev_index`` and where that run begins; NO_TERM if too short."""
        if prev_index > self.last_index:
            return NO_TERM, Index(self.last_index + 1)
        return self._runs.term_at(prev_index), self._runs.first_index_of_range(prev_index)

    def last_index_of_term(self, term: Term) -> Index | None:
        """Returns the last index of ``term``, or None if the log has no entry of it."""
        return self._runs.last_index_of(term, self.last_index)

    def append(self, batch: Batch) -> None:
        """Appends a batch at the end."""
        invariant(
            batch.first_index == self.last_index + 1,
            "a batch must continue the log",
            first_index=batch.first_index,
            last_index=self.last_index,
        )
        self._runs.append(batch.first_index, batch.term)
        self._recent.append(batch)
        self._new.append(batch)
        self.last_index = batch.last_index
        self.last_term = batch.term

    def merge(self, batches: tuple[Batch, ...]) -> None:
        """Appends a leader's batches that follow a matching entry; skips those held, cuts only a real conflict."""
        for batch in batches:
            first_index = batch.first_index
            if first_index <= self.last_index:
                held = first_index < self.first_index or self._runs.term_at(first_index) == batch.term
                if held:
                    invariant(
                        batch.last_index <= self.last_index,
                        "a batch is held in part",
                        first_index=first_index,
                        last_index=self.last_index,
                        batch_last_index=batch.last_index,
                    )
                    continue
                self.truncate(first_index)
            self.append(batch)

    def truncate(self, index: Index) -> None:
        """Cuts entries from ``index`` on; also takes back what Readys in flight would have made durable."""
        invariant(
            index > self.commit_index, "committed entries are never cut", index=index, commit_index=self.commit_index
        )
        kept = Index(index - 1)
        self._runs.truncate(index)
        self._recent.truncate(index)
        while self._new and self._new[-1].first_index >= index:
            self._new.pop()
        if index <= self.emitted_index:
            self._truncate_from = index if self._truncate_from is None else min(self._truncate_from, index)
            self.emitted_index = kept
        for persisting in self._persisting:
            persisting.durable_to = min(persisting.durable_to, kept)
        self.durable_index = min(self.durable_index, kept)
        self.last_index = kept
        self.last_term = self._runs.last_term

    def commit_to(self, index: Index) -> bool:
        """Raises ``commit_index`` to ``index``; returns whether that was higher."""
        if index <= self.commit_index:
            return False
        invariant(index <= self.last_index, "commit beyond the log", index=index, last_index=self.last_index)
        self.commit_index = index
        return True

    def batches_from(self, start: Index, max_bytes: int) -> tuple[Batch, ...]:
        """Returns whole batches from the one containing ``start``: at least one, then as many as fit and may be."""
        recent_first = self._recent.first_index
        if recent_first is not None and start >= recent_first >= self.first_index:
            return self._recent.slice(start, max_bytes)
        stored = self._store.read_batches(start, max_bytes)
        # The store may still hold a tail that a Ready in flight cuts.
        batches = tuple(batch for batch in stored if batch.last_index <= self.durable_index)[:BATCHES_MAX]
        invariant(
            bool(batches) and batches[0].first_index <= start <= batches[0].last_index,
            "the store did not return the batch asked for",
            start=start,
            durable_index=self.durable_index,
        )
        return batches

    def take_output(self, number: int) -> tuple[Index | None, tuple[Batch, ...]]:
        """Returns the cut and the batches that Ready ``number`` hands to the driver."""
        truncate_from, batches = self._truncate_from, tuple(self._new)
        self._truncate_from = None
        self._new.clear()
        self.emitted_index = self.last_index
        self._persisting.append(_Persisting(number, self.last_index))
        return truncate_from, batches

    def persisted(self, number: int) -> bool:
        """Takes note that Readys up to ``number`` are durable; returns whether ``durable_index`` rose."""
        durable = self.durable_index
        while self._persisting and self._persisting[0].number <= number:
            durable = max(durable, self._persisting.popleft().durable_to)
        rose = durable > self.durable_index
        self.durable_index = durable
        self._recent.evict(durable)
        return rose

    def restart(self, first_index: Index, previous_term: Term) -> None:
        """Forgets all entries and begins at ``first_index``; what is before is committed, and held nowhere here.

        Until the disk has done the same, it holds the old log, of which only the committed part counts.
        """
        invariant(
            first_index > self.commit_index + 1,
            "a log that reaches the new start needs none",
            first_index=first_index,
            commit_index=self.commit_index,
        )
        previous = Index(first_index - 1)
        self._runs = TermRanges([TermRange(previous, previous_term)] if previous_term != NO_TERM else [])
        self._recent.truncate(Index(0))
        self._new.clear()
        self._truncate_from = None
        self.durable_index = min(self.durable_index, self.commit_index)
        for persisting in self._persisting:
            persisting.durable_to = min(persisting.durable_to, self.durable_index)
        self.first_index = first_index
        self.last_index = self.commit_index = self.emitted_index = previous
        self.last_term = previous_term

    def compact(self, first_index: Index) -> None:
        """Takes note that the store deleted entries before ``first_index``."""
        if first_index <= self.first_index:
            return
        invariant(
            first_index <= self.commit_index + 1 and first_index <= self.durable_index + 1,
            "only committed, durable entries may be deleted",
            first_index=first_index,
            commit_index=self.commit_index,
            durable_index=self.durable_index,
        )
        self.first_index = first_index
        self._runs.compact(first_index)
        self._recent.compact(first_index)

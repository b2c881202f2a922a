"""The log in memory: term ranges, a tail of batches, and the durable store that follows.

Maintains the inequalities of ``raft/pointers.py`` and the rule that no entry at or below ``commit_index`` is ever
truncated (State Machine Safety, Raft section 5.4.3). Every change is repeated on the store at once, so that a batch has
its position before a message or a Ready contains it.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from dledger_core.errors import invariant
from dledger_core.ids import NO_INDEX, NO_TERM, Index, Term
from dledger_core.raft.batch import BATCHES_MAX, Batch, LogStore, Proposal, TermRange
from dledger_core.raft.configuration import Configuration
from dledger_core.raft.configurations import ConfigurationInForce, Configurations
from dledger_core.raft.pointers import LogPointers

BATCH_OVERHEAD_BYTES: Final = 512
"""Cost of a batch in addition to its payload, so that many small batches are limited too."""
BATCHES_KEPT_MAX: Final = 4096
"""Largest number of durable batches in memory. Each is several Python objects, and the more there are, the longer
the garbage collector stops the node, in the end for an election timeout."""


class TermRanges:
    """The term of every entry, as (first index, term) of each range, both ascending."""

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

    def __iter__(self) -> Iterator[TermRange]:
        """Iterate over the ranges, in order."""
        return map(TermRange, self._starts, self._terms)

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

    def last_index_up_to(self, term: Term, last_index: Index) -> Index:
        """Return the last index whose entry has at most ``term``; NO_INDEX if the log is not known to have one."""
        at = bisect_right(self._terms, term)
        if at == 0:
            return NO_INDEX
        return Index(self._starts[at] - 1) if at < len(self._starts) else last_index

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


class RecentBatches:
    """The tail of the log: everything not yet durable, and recent batches for sending.

    The oldest durable ones leave when a limit is exceeded.
    """

    __slots__ = ("_batches", "_bytes_max", "_firsts", "_oldest", "nbytes")

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._batches: list[Batch | None] = []
        self._firsts: list[int] = []
        self._oldest = 0
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._batches) - self._oldest

    @property
    def first_index(self) -> Index | None:
        """First index in memory, or None if there is none."""
        return Index(self._firsts[self._oldest]) if self._oldest < len(self._firsts) else None

    def append(self, batch: Batch) -> None:
        """Add the batch at the end of the log."""
        self._batches.append(batch)
        self._firsts.append(batch.first_index)
        self.nbytes += batch.nbytes + BATCH_OVERHEAD_BYTES

    def truncate(self, index: Index) -> None:
        """Drop batches from ``index`` on."""
        while len(self._batches) > self._oldest and self._firsts[-1] >= index:
            self._firsts.pop()
            self._forget(self._batches.pop())

    def evict(self, durable_index: Index) -> None:
        """Drop the oldest durable batches while a limit is exceeded."""
        batches, at = self._batches, self._oldest
        # The files lack the others, so that nothing could send them
        # (test_recent_batches_are_limited_in_bytes_and_keep_undurable_ones).
        while at < len(batches) and self._last_index(at) <= durable_index:
            if self.nbytes <= self._bytes_max and len(batches) - at <= BATCHES_KEPT_MAX:
                break
            self._forget(batches[at])
            at += 1
        self._drop_before(at)

    def trim(self, first_index: Index) -> None:
        """Drop batches that start before ``first_index``; the store has the rest of a batch that spans it."""
        at = self._oldest
        while at < len(self._firsts) and self._firsts[at] < first_index:
            self._forget(self._batches[at])
            at += 1
        self._drop_before(at)

    def slice(self, start: Index, max_bytes: int) -> tuple[Batch, ...]:
        """Return complete batches from the one containing ``start``: at least one, then as many as fit."""
        at = bisect_right(self._firsts, start, self._oldest) - 1
        chosen: list[Batch] = []
        nbytes = 0
        for number in range(at, min(len(self._batches), at + BATCHES_MAX)):
            batch = self._batches[number]
            assert batch is not None
            nbytes += batch.nbytes
            if chosen and nbytes > max_bytes:
                break
            chosen.append(batch)
        return tuple(chosen)

    def _last_index(self, at: int) -> int:
        batch = self._batches[at]
        assert batch is not None
        return batch.last_index

    def _forget(self, batch: Batch | None) -> None:
        assert batch is not None
        self.nbytes -= batch.nbytes + BATCH_OVERHEAD_BYTES

    def _drop_before(self, oldest: int) -> None:
        """Drop the batches before ``oldest``; move the rest only occasionally, so that a drop costs O(1)."""
        for at in range(self._oldest, oldest):
            self._batches[at] = None
        self._oldest = oldest
        if oldest == len(self._batches) or (oldest > 64 and oldest * 2 > len(self._batches)):
            del self._batches[:oldest]
            del self._firsts[:oldest]
            self._oldest = 0


@dataclass(slots=True)
class _Persisting:
    """A Ready in flight to the disk, and the end of today's log that is durable once it arrived."""

    number: int
    durable_to: Index


class RaftLog:
    """One replica's log; batches enter and leave it complete.

    Attributes:
        first_index: first entry of the log.
        last_index: last entry, durable or not.
        last_term: its term.
        durable_index: entries up to here are on this node's disk, as ``persisted`` confirmed.
        emitted_index: entries up to here were in a Ready.
        commit_index: entries up to here are never truncated.
        configurations: the configurations of its entries; they change with the log.
    """

    __slots__ = (
        "_new",
        "_persisting",
        "_ranges",
        "_recent",
        "_store",
        "_truncate_from",
        "commit_index",
        "configurations",
        "durable_index",
        "emitted_index",
        "first_index",
        "last_index",
        "last_term",
    )

    def __init__(
        self,
        store: LogStore,
        *,
        commit_index: Index,
        recent_bytes_max: int,
        configurations: Sequence[ConfigurationInForce],
    ) -> None:
        self._store = store
        self._ranges = TermRanges(store.term_ranges())
        self._recent = RecentBatches(recent_bytes_max)
        self._new: list[Batch] = []
        self._truncate_from: Index | None = None
        self._persisting: deque[_Persisting] = deque()
        self.first_index = store.first_index()
        self.last_index = store.last_index()
        self.last_term: Term = self._ranges.last_term
        self.configurations = Configurations(configurations, self.first_index, self.last_index)
        self.durable_index = self.last_index
        self.emitted_index = self.last_index
        # Trimmed entries were committed, although a checkpoint from before the trim records less.
        self.commit_index = max(commit_index, Index(self.first_index - 1))
        invariant(
            self.commit_index <= self.last_index,
            "the recovered commit_index is past the end of the log",
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
        """Whether the next Ready contains batches or a truncation."""
        return bool(self._new) or self._truncate_from is not None

    @property
    def term_ranges(self) -> Sequence[TermRange]:
        """The term ranges of the log, in order; the first one may begin before it."""
        return tuple(self._ranges)

    def term_at(self, index: Index) -> Term | None:
        """Return the term of an entry, NO_TERM before the first entry ever, None outside the log."""
        if index > self.last_index or index < self.first_index - 1:
            return None
        return NO_TERM if index == NO_INDEX else self._ranges.term_at(index)

    def is_up_to_date(self, last_index: Index, last_term: Term) -> bool:
        """Whether a log with this end is at least as up to date as this one (Raft section 5.4.1).

        The last term decides first: a longer log may consist of entries that were never committed.
        """
        return last_term > self.last_term or (last_term == self.last_term and last_index >= self.last_index)

    def matches(self, prev_index: Index, prev_term: Term) -> bool:
        """Whether this log contains (prev_index, prev_term).

        Trimmed entries are committed, and a committed entry is the same in the log of every later leader (Leader
        Completeness, Raft section 5.4.3): they match, although their terms are unknown here or at the leader.

        Raises:
            InvariantViolationError: a committed entry here has another term.
        """
        if prev_index > self.last_index:
            return False
        if self.term_at(prev_index) == prev_term:
            return True
        if prev_index > self.commit_index:
            return False
        self._check_committed(prev_index, prev_term)
        return True

    def _check_committed(self, index: Index, term: Term) -> None:
        """Raise InvariantViolationError if the committed entry at ``index`` is known to have another term.

        Both cannot be right: this replica or the leader has an entry that the group did not commit. To go on would
        serve two histories of one log.
        """
        ours = self.term_at(index)
        invariant(
            ours is None or NO_TERM in (ours, term) or ours == term,
            "the leader contradicts a committed entry",
            index=index,
            term_here=ours,
            term_of_leader=term,
            commit_index=self.commit_index,
        )

    def conflict_hint(self, prev_index: Index) -> tuple[Term, Index]:
        """Return this log's term at a rejected ``prev_index`` and the start of its range; NO_TERM if too short."""
        if prev_index > self.last_index:
            return NO_TERM, Index(self.last_index + 1)
        return self._ranges.term_at(prev_index), self._ranges.first_index_of_range(prev_index)

    def last_index_of_term(self, term: Term) -> Index | None:
        """Return the last index of ``term``, or None if the log has no entry of it."""
        return self._ranges.last_index_of(term, self.last_index)

    def last_index_up_to(self, term: Term) -> Index:
        """Return the last index whose entry has at most ``term``; NO_INDEX if the log is not known to have one."""
        return self._ranges.last_index_up_to(term, self.last_index)

    def propose(self, proposal: Proposal, term: Term) -> Batch:
        """Append a leader's own batch and return it with its place."""
        first_index = Index(self.last_index + 1)
        batch = self._store.place(proposal, first_index, term)
        invariant(
            (batch.first_index, batch.count, batch.term) == (first_index, proposal.count, term),
            "the store placed a batch elsewhere",
            first_index=batch.first_index,
            expected=first_index,
        )
        self._add(batch)
        return batch

    def append(self, batch: Batch) -> None:
        """Append a batch that another leader placed."""
        invariant(
            batch.first_index == self.last_index + 1,
            "a batch must continue the log",
            first_index=batch.first_index,
            last_index=self.last_index,
        )
        self._store.stage(batch)
        self._add(batch)

    def _add(self, batch: Batch) -> None:
        configuration = batch.configuration
        # At its append and not at its commit: the majority that commits the entry is the one of the new configuration
        # (thesis section 4.1; test_configuration_is_in_force_when_it_is_appended).
        if configuration is not None:
            self.configurations.append(batch.first_index, Configuration.from_bytes(configuration))
        self._ranges.append(batch.first_index, batch.term)
        self._recent.append(batch)
        self._new.append(batch)
        self.last_index = batch.last_index
        self.last_term = batch.term

    def merge(self, batches: tuple[Batch, ...]) -> None:
        """Append a leader's batches that follow a matching entry.

        Batches that the log contains are skipped, and only a real conflict truncates: an AppendEntries may be old and
        overtaken, and truncating after it would remove entries that this node has acknowledged since (Raft section
        5.3, receiver rule 3: "if an existing entry conflicts").
        """
        for batch in batches:
            first_index = batch.first_index
            if first_index <= self.last_index:
                if first_index <= self.commit_index:  # terms never decrease, so the ends decide
                    self._check_committed(first_index, batch.term)
                    self._check_committed(min(batch.last_index, self.commit_index), batch.term)
                known = first_index < self.first_index or self._ranges.term_at(first_index) == batch.term
                if known:
                    invariant(
                        batch.last_index <= self.last_index
                        and self.term_at(batch.last_index) in (None, NO_TERM, batch.term),
                        "the log contains a part of a batch",
                        first_index=first_index,
                        last_index=self.last_index,
                        batch_last_index=batch.last_index,
                        batch_term=batch.term,
                    )
                    continue
                self.truncate(first_index)
            self.append(batch)

    def truncate(self, index: Index) -> None:
        """Remove entries from ``index`` on, also from Readys in flight: they no longer become durable."""
        invariant(
            index > self.commit_index,
            "committed entries are never truncated",
            index=index,
            commit_index=self.commit_index,
        )
        kept = Index(index - 1)
        self._store.stage_truncate(index)
        self._ranges.truncate(index)
        self._recent.truncate(index)
        self.configurations.truncate(index)
        while self._new and self._new[-1].first_index >= index:
            self._new.pop()
        # The disk does not know entries that no Ready contained
        # (test_truncation_of_entries_without_a_ready_does_not_reach_the_disk). Of two truncations in one Ready the
        # lower one does both (test_two_truncations_give_the_lower_one).
        if index <= self.emitted_index:
            self._truncate_from = index if self._truncate_from is None else min(self._truncate_from, index)
            self.emitted_index = kept
        # The disk confirms the old entries later, at indexes that other entries have by then.
        for persisting in self._persisting:
            persisting.durable_to = min(persisting.durable_to, kept)
        # A leader counts its own disk by this index, and other entries at these indexes are not on it (mutation "a
        # truncation does not lower durable_index").
        self.durable_index = min(self.durable_index, kept)
        self.last_index = kept
        self.last_term = self._ranges.last_term

    def commit_to(self, index: Index) -> bool:
        """Raise ``commit_index`` to ``index``; return whether that was higher."""
        if index <= self.commit_index:
            return False
        invariant(index <= self.last_index, "commit past the end of the log", index=index, last_index=self.last_index)
        self.commit_index = index
        return True

    def is_recent(self, index: Index) -> bool:
        """Whether the batches from ``index`` on are in memory, so that sending them reads no file."""
        recent_first = self._recent.first_index
        return recent_first is not None and index >= recent_first >= self.first_index

    def batches_from(self, start: Index, max_bytes: int) -> tuple[Batch, ...]:
        """Return complete batches from the one containing ``start``: at least one, then as many as fit."""
        if self.is_recent(start):
            return self._recent.slice(start, max_bytes)
        stored = self._store.read_batches(start, max_bytes)
        # Sent, such a tail would be entries of a deposed leader under the name of this one
        # (test_batches_from_skips_a_tail_that_is_being_truncated).
        # The files may still contain a tail that a Ready in flight truncates.
        batches = tuple(batch for batch in stored if batch.last_index <= self.durable_index)[:BATCHES_MAX]
        invariant(
            bool(batches) and batches[0].first_index <= start <= batches[0].last_index,
            "the store did not return the requested batch",
            start=start,
            durable_index=self.durable_index,
        )
        return batches

    def take_output(self, number: int) -> tuple[Index | None, tuple[Batch, ...]]:
        """Return the truncation and the batches for Ready ``number``."""
        truncate_from, batches = self._truncate_from, tuple(self._new)
        invariant(
            not batches or batches[-1].last_index == self.last_index,
            "a Ready does not end with the log",
            last_index=self.last_index,
        )
        self._truncate_from = None
        self._new.clear()
        self.emitted_index = self.last_index
        self._persisting.append(_Persisting(number, self.last_index))
        return truncate_from, batches

    def persisted(self, number: int) -> bool:
        """Record that Readys up to ``number`` are durable; return whether ``durable_index`` rose."""
        durable = self.durable_index
        while self._persisting and self._persisting[0].number <= number:
            durable = max(durable, self._persisting.popleft().durable_to)
        invariant(
            durable <= self.emitted_index,
            "entries became durable that no Ready contained",
            durable_index=durable,
            emitted_index=self.emitted_index,
        )
        if durable == self.durable_index:
            return False
        self.durable_index = durable
        self._recent.evict(durable)
        return True

    def restart(self, first_index: Index, previous_term: Term, in_force: ConfigurationInForce) -> None:
        """Remove all entries and restart at ``first_index``; entries before it are committed and trimmed.

        ``in_force`` is the configuration that was in force before that index.

        Until the disk has restarted too, it contains the old log, of which only the committed part counts.
        """
        invariant(
            first_index > self.commit_index + 1,
            "a log that reaches the new first index needs no snapshot",
            first_index=first_index,
            commit_index=self.commit_index,
        )
        previous = Index(first_index - 1)
        self._ranges = TermRanges([TermRange(previous, previous_term)] if previous_term != NO_TERM else [])
        self._recent.truncate(Index(0))
        self.configurations.install(in_force, first_index)
        self._new.clear()
        self._truncate_from = None
        # Old entries that become durable late must not count at indexes of the new log
        # (test_restart_takes_back_entries_in_flight_to_the_disk).
        self.durable_index = min(self.durable_index, self.commit_index)
        for persisting in self._persisting:
            persisting.durable_to = min(persisting.durable_to, self.durable_index)
        self.first_index = first_index
        self.last_index = self.commit_index = self.emitted_index = previous
        self.last_term = previous_term

    def trim(self, first_index: Index) -> None:
        """Record that the store deleted all entries before ``first_index``."""
        if first_index <= self.first_index:
            return
        invariant(
            first_index <= self.commit_index + 1 and first_index <= self.durable_index + 1,
            "only committed, durable entries may be deleted",
            first_index=first_index,
            commit_index=self.commit_index,
            durable_index=self.durable_index,
        )
        # The term of the entry before stays known: AppendEntries names it
        # (test_trim_keeps_the_term_before_the_first_entry).
        self.first_index = first_index
        self._ranges.trim(first_index)
        self._recent.trim(first_index)
        self.configurations.trim(first_index)

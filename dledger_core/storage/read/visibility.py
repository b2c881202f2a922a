"""The rule of ``read_committed``: which entries of a log it shows, and where it stops.

It shows data entries up to the oldest open transaction, without the entries of orphaned attempts: those of aborted
transactions and those that no commit names. Both follow from the control entries before the end of the committed
entries; a control entry after that end may still be replaced, so it decides nothing.

Servers, ``StoreReader``, ``convert``, the jobs and the connector all call this module.
"""

from __future__ import annotations

import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import Buffer
from dledger_core.control import TransactionId
from dledger_core.ids import Index
from dledger_core.record import inside
from dledger_core.storage.tables.tables import LogTables
from dledger_core.storage.tables.transactions import TransactionTable

Until = Literal["committed", "end"]
"""Up to which entry a store is read: the recorded commit index, or its last entry."""

Hidden = Literal["control", "uncommitted", "aborted", "open"]
"""Why ``read_committed`` hides an entry.

control: it is not a data entry. uncommitted: the store does not record it as committed. aborted: it belongs to an
orphaned attempt, which includes the losing attempts of a committed transaction. open: the oldest open transaction
starts before it.
"""

SKIPPED_MIN: Final = 1024
"""A read ends before an orphaned range of more entries; a shorter range is read and dropped."""

ControlEntries = Callable[[int, int], Iterable[tuple[Index, int, Buffer]]]
"""Yields (index, append time in ms, body) of the control entries in [start, end)."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """Entries that ``read_committed`` shows of one log, as of one end of its committed entries.

    Attributes:
        end: end (exclusive) of the visible entries.
        open_transaction: the oldest open transaction, if it holds ``end`` back.
        orphaned_ranges: ranges [start, end) of orphaned attempts, sorted and disjoint.
    """

    end: Index
    open_transaction: TransactionId | None = None
    orphaned_ranges: Sequence[tuple[int, int]] = ()

    @classmethod
    def of(cls, transactions: TransactionTable, committed_end: int) -> Visibility:
        """Return the visible part of a log whose control entries before ``committed_end`` are applied."""
        oldest = transactions.open.oldest
        if oldest is None or oldest[1].first_index >= committed_end:
            return cls(Index(committed_end), None, transactions.orphaned.ranges)
        (query_id, batch_id), found = oldest
        return cls(found.first_index, TransactionId(query_id, batch_id, found.run_id), transactions.orphaned.ranges)

    def orphaned(self, start: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of orphaned attempts that overlap [start, end), in order."""
        ranges = self.orphaned_ranges
        low = max(bisect_left(ranges, (start, start)) - 1, 0)
        return [pair for pair in ranges[low : bisect_left(ranges, (end, end))] if pair[1] > start]

    def span(self, start: int, end: int, *, ranges_max: int | None = None) -> tuple[int, int, list[tuple[int, int]]]:
        """Return the next entries to read in [start, end).

        Args:
            start: index at which the reader continues.
            end: end (exclusive) of the requested range.
            ranges_max: largest number of orphaned ranges to return.

        Returns:
            The first index and the end (exclusive) of a contiguous read, equal if nothing is visible; and the orphaned
            ranges within it, whose entries the reader drops.
        """
        end = max(min(end, self.end), start)
        orphaned = self.orphaned(start, end)
        while orphaned and orphaned[0][0] <= start:
            start = min(max(start, orphaned.pop(0)[1]), end)
        for at, (low, high) in enumerate(orphaned):
            if high - low > SKIPPED_MIN or at == ranges_max:
                return start, low, orphaned[:at]
        return start, end, orphaned

    def hidden(
        self, indexes: npt.NDArray[np.int64], is_data: npt.NDArray[np.bool_], committed_end: int
    ) -> npt.NDArray[np.object_]:
        """Return for each entry why ``read_committed`` hides it, a ``Hidden``; None for the entries that it shows.

        Args:
            indexes: of the entries.
            is_data: whether each one is a data entry.
            committed_end: end (exclusive) of the committed entries.
        """
        found = np.full(len(indexes), None, np.object_)
        found[indexes >= self.end] = "open"
        if len(indexes):
            low, high = int(indexes.min()), int(indexes.max()) + 1
            found[inside(indexes, self.orphaned(low, high))] = "aborted"
        found[indexes >= committed_end] = "uncommitted"
        found[~is_data] = "control"
        return found


class Outcomes:
    """Outcomes of a store's transactions up to an index. Successive views of a store extend it; thread-safe.

    Args:
        tables: the store's last snapshot.
        first_index: the store's first index.
    """

    def __init__(self, tables: LogTables, first_index: int) -> None:
        self._tables = tables
        self._end = max(tables.applied_index + 1, first_index)
        self._lock = threading.Lock()

    @property
    def end(self) -> int:
        """End (exclusive) of the entries whose control entries are applied."""
        return self._end

    def visibility(self, control_entries: ControlEntries, committed_end: int) -> Visibility:
        """Apply the control entries before ``committed_end`` and return the visible part of the log.

        A snapshot or a newer view may have applied more: later entries that are committed change no earlier outcome.

        Raises:
            CorruptRecordError: a control entry is damaged.
        """
        with self._lock:
            for index, time_ms, body in control_entries(self._end, committed_end):
                self._tables.apply(index, time_ms, body)
            self._end = max(self._end, committed_end)
            found = Visibility.of(self._tables.transactions, committed_end)
            return replace(found, orphaned_ranges=tuple(found.orphaned_ranges))  # the table keeps changing

    def open_ranges(self) -> list[tuple[int, int]]:
        """Return the ranges [start, end) of data entries of all open transactions, sorted."""
        with self._lock:
            opened = self._tables.transactions.open.values()
            return sorted((part.first, part.last + 1) for found in opened for part in found.parts if part.rows)


class StoreVisibility:
    """The visible entries of one view of a store, by the end of its committed entries.

    Args:
        tables: returns the store's last snapshot.
        control_entries: of the store.
        first_index: of the view.
        committed_end: end (exclusive) of the entries that the store records as committed.
        earlier: of an earlier view of the same store, whose outcomes are extended.
    """

    def __init__(
        self,
        tables: Callable[[], LogTables],
        control_entries: ControlEntries,
        first_index: int,
        committed_end: int,
        earlier: StoreVisibility | None,
    ) -> None:
        self._tables, self._control_entries, self._first_index = tables, control_entries, first_index
        self._committed_end = committed_end
        known = None if earlier is None else earlier._outcomes
        self._outcomes: Outcomes | None = known if known is not None and known.end >= first_index else None
        self._found: dict[int, Visibility] = {}

    def before(self, end: int) -> Visibility:
        """Return the visible entries before ``end``.

        Raises:
            CorruptRecordError: a control entry is damaged, or the snapshot that replaces deleted ones.
        """
        if end not in self._found:
            kept = end <= self._committed_end  # later entries may still be replaced: their outcomes are not kept
            outcomes = self._outcomes if kept else None
            outcomes = outcomes or Outcomes(self._tables(), self._first_index)
            self._outcomes = outcomes if kept else self._outcomes
            self._found[end] = outcomes.visibility(self._control_entries, end)
        return self._found[end]

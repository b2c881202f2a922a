"""The durable entries of a log, read by any thread while one other thread writes.

Readers take no lock. The writer moves ``_first_index`` and ``_last_index`` before it removes anything, then increments
``_removals``: a reader that fails inside the range retries if the number has changed.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from dledger_core import control
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index, Position, Term
from dledger_core.raft.batch import Batch, TermRange
from dledger_core.record import Records
from dledger_core.storage.check.damage import Damage, damage_near, wrong_rows
from dledger_core.storage.files.index_file import term_ranges
from dledger_core.storage.read import log_queries
from dledger_core.storage.read.record_reader import out_of_range
from dledger_core.storage.write.recovered_store import RecoveredStore
from dledger_core.storage.write.staging import StagedEnd

RECENT_BYTES: Final = 256 << 20
_READ_BYTES: Final = 8 << 20
T = TypeVar("T")


class DurableLog:
    """The reading side of ``CommitLog``."""

    def __init__(self, store: RecoveredStore, on_damage: Callable[[int], None] | None) -> None:
        self.config: Final = store.config
        self._layout = store.layout
        self._meta = store.meta
        self._index = store.index
        self._reader = store.reader
        self._first_index, self._last_index = store.end.first_index, store.end.last_index
        self._removals = 0
        self._on_damage = on_damage

    def first_index(self) -> Index:
        """See ``LogStore``."""
        return Index(self._first_index)

    def last_index(self) -> Index:
        """See ``LogStore``."""
        return Index(self._last_index)

    @property
    def commitlog_prefix(self) -> str | None:
        """Fingerprint of the CommitLog that the log starts after; None if it starts after none."""
        return self._meta.commitlog_prefix

    def term_ranges(self) -> Sequence[TermRange]:
        """See ``LogStore``; found by bisecting the index."""
        # The term before the first entry stays known: AppendEntries compares it for the first entry after the start
        # (dissertation 5.1; test_restart_without_a_known_previous_term).
        ranges = term_ranges(self._reader.term_at, self._first_index, self._last_index)
        before = self._meta.previous_term
        if before is not None and self._meta.first_index == self._first_index:
            later = (found for found in ranges if found.term != before)
            ranges = [TermRange(Index(self._first_index - 1), Term(before)), *later]
        return ranges

    def read_batches(self, start: Index, max_bytes: int) -> Sequence[Batch]:
        """See ``LogStore``: complete checked batches, the first one containing ``start``."""
        self._check_range(start, start + 1)
        end = self._last_index + 1
        return self._reporting(
            start, lambda: log_queries.read_batches(self._reader, start, self._first_index, end, max_bytes)
        )

    def read(self, start: int, end: int, max_bytes: int) -> Records:
        """Return checked durable records from ``start`` up to ``end`` or ``max_bytes``, but at least one.

        Raises:
            IndexOutOfRangeError: ``start`` is not in the log.
            CorruptRecordError: a record is damaged.
        """
        return self._reporting(start, lambda: self._read(start, end, max_bytes, body_crc=True))

    def inspect(self, start: int, end: int, max_bytes: int) -> Records:
        """Return records like ``read``, for a caller that searches for damage: it is not reported here."""
        return self._read(start, end, max_bytes, body_crc=True)

    def check_blanks(self, records: Records, first_index: int) -> None:
        """Raise CorruptRecordError if a segment that these records fill does not end with its BLANK."""
        following = first_index + records.count
        self._reporting(first_index, lambda: self._reader.check_blanks(records, self.position_of(following)))

    def read_raw(self, start: int, end: int, max_bytes: int) -> Records:
        """Return records like ``read``, without checking bodies against their CRCs."""
        return self._read(start, end, max_bytes, body_crc=False)

    def _read(self, start: int, end: int, max_bytes: int, *, body_crc: bool) -> Records:
        def read() -> Records:
            self._check_range(start, end)
            upto = min(end, self._last_index + 1)
            return self._reader.read(start, upto, max_bytes, body_crc=body_crc)

        return self._undisturbed(read)

    def _reporting(self, start: int, read: Callable[[], T]) -> T:
        try:
            return self._undisturbed(read)
        except CorruptRecordError as error:
            if self._on_damage is not None:
                index = error.values.get("index")
                self._on_damage(index if isinstance(index, int) else start)
            raise

    def _undisturbed(self, read: Callable[[], T]) -> T:
        """Return the result of ``read``; retry if the entries may have been removed meanwhile."""
        # No lock: readers must not wait for the disk of the writer. So a truncation or a trim may remove the entries
        # that a reader reads, which is not damage (test_other_threads_read_during_appends_and_truncations).
        while True:
            removals = self._removals
            try:
                return read()
            except CorruptRecordError:
                if removals == self._removals:
                    raise

    def check_recent(self, recent_bytes: int = RECENT_BYTES) -> Index:
        """Read and check the newest records before the log is served; the rest is the scrub's work.

        Args:
            recent_bytes: bytes before the end of the log.

        Returns:
            The first index that was read.

        Raises:
            CorruptRecordError: with file and position of the first damaged record.
        """
        first, last = self.first_index(), self.last_index()
        if last < first:
            return first
        oldest = self.position_of(last) - recent_bytes
        start = begin = Index(first + bisect_left(range(first, last), oldest, key=self.position_of))
        while start <= last:
            start = Index(start + self.read(start, last + 1, _READ_BYTES).count)
        return begin

    def damage_near(self, index: int) -> Damage | None:
        """Return the damage at or shortly after an entry, or None; slow, reads from the last good one on."""
        end = self._last_index + 1
        first, position = self._first_index, self._reader.data.bases[0] if self._reader.data.bases else 0
        return damage_near(self._reader, self._index, index, (first, position), (end, self._end_of(end - 1).position))

    def rows_fit(self, records: Records, first_index: int) -> bool:
        """Whether the index rows of these records agree with them."""
        return wrong_rows(self._index, records, first_index) is None

    def _check_range(self, start: int, end: int) -> None:
        first, last = self._first_index, self._last_index
        if not first <= start <= last or end <= start:
            raise out_of_range(self._layout.root, start, end, first, last)

    def index_at_time(self, timestamp_ms: int) -> Index:
        """Return the first entry appended at or after a time, or last_index + 1 if there is none."""

        def find() -> int:
            return log_queries.index_at_time(self._reader, self._first_index, self._last_index + 1, timestamp_ms)

        return Index(self._undisturbed(find))

    def index_at_position(self, position: int) -> Index:
        """Return the entry whose record contains a position, else the next one, or last_index + 1."""

        def find() -> int:
            return log_queries.index_at_position(self._reader, self._first_index, self._last_index + 1, position)

        return Index(self._undisturbed(find))

    def split_points(self, start: int, end: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return for each of ascending positions the index in [start, end] whose record starts nearest to it."""

        def find() -> npt.NDArray[np.int64]:
            self._check_range(start, end)
            return log_queries.split_points(self._index, start, min(end, self._last_index + 1), positions)

        return self._reporting(start, find)

    def position_of(self, index: int) -> Position:
        """Return the position of a record; for last_index + 1 the end of the log."""
        if index == self._last_index + 1:
            return Position(self._end_of(index - 1).position)
        self._check_range(index, index + 1)
        return Position(self._place(index)[0])

    @property
    def data_bytes(self) -> int:
        """Bytes between the first record and the end of the durable log."""

        def find() -> int:
            bases = self._reader.data.bases
            return self._end_of(self._last_index).position - bases[0] if bases else 0

        return self._undisturbed(find)

    def segment_summaries(self) -> list[log_queries.SegmentSummary]:
        """Return a summary of each data file, in order."""
        return self._undisturbed(lambda: log_queries.segment_summaries(self._reader, self._last_index + 1))

    def control_entries(self, start: int, end: int) -> Iterator[tuple[Index, int, bytes]]:
        """Yield (index, append time in ms, body) of the control and configuration entries in [start, end)."""
        return log_queries.control_entries(self._reader, max(start, self._first_index), min(end, self._last_index + 1))

    def first_log_time(self, start: int, end: int) -> int | None:
        """Return the first log time recorded in [start, end), in ms; None if there is none, or damage hides it."""
        with contextlib.suppress(CorruptRecordError):  # it is repaired first
            for _, _, body in self.control_entries(start, end):
                recorded_ms = control.log_time(control.unpack(body))
                if recorded_ms is not None:
                    return recorded_ms
        return None

    @property
    def last_time_ms(self) -> int:
        """Append time of the last durable entry, ms since the epoch."""
        return self._undisturbed(lambda: self._end_of(self._last_index).time_ms)

    def _end_of(self, index: int) -> StagedEnd:
        """Return the end of the durable log if ``index`` were its last entry."""
        if index < self._first_index:
            bases = self._reader.data.bases
            position = bases[0] if bases else self._meta.first_position
            return StagedEnd(self._first_index, position, 0)
        position, size, time_ms = self._place(index)
        return StagedEnd(index + 1, position + size, time_ms)

    def _certain_end_of(self, index: int) -> StagedEnd:
        """Return ``_end_of`` an entry to truncate after; raise CorruptRecordError if the entry is damaged."""
        # A damaged row names another place, and a truncation there would cut through a record
        # (test_truncation_does_not_trust_a_damaged_row, test_checkpoint_does_not_trust_a_damaged_row).
        if index >= self._first_index:
            self._reader.read(index, index + 1, 1, body_crc=False)
        return self._end_of(index)

    def _place(self, index: int) -> tuple[int, int, int]:
        """Return position, size and append time of an entry; from its row if its record is damaged."""
        try:
            return log_queries.place_of(self._reader, index)
        except CorruptRecordError:
            # Good enough to find a damaged entry; whatever is written goes by ``_certain_end_of``.
            row = self._index.read(index, index + 1)[0]
            return int(row["position"]), int(row["size"]), 0

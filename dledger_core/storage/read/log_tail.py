"""The end of a log: a scan of the last records of a store, and the index rows that its files lack."""

from __future__ import annotations

from functools import cached_property
from typing import Final

import numpy as np

from dledger_core.ids import Index
from dledger_core.record import Records, index_records
from dledger_core.storage.check.damage import next_record
from dledger_core.storage.check.judge import ScanCursor, ScanStop, complete_end
from dledger_core.storage.check.scan import Scanner
from dledger_core.storage.files.index_file import agreement
from dledger_core.storage.read.store_files import StoreFiles


class LogTail:
    """The end of a log as one scan found it.

    Args:
        store: the files; ``store.index`` gets the rows that they lack.
        first_index: first entry of the log.
        start: place from which on the records are scanned.

    Attributes:
        last_index: the last entry.
        damaged: entries [start, end) that are damaged and that complete entries follow.
    """

    def __init__(self, store: StoreFiles, first_index: int, start: ScanCursor) -> None:
        self._reader, self._rows, self._index = store.reader, store.rows, store.index
        self._first_index, self._native = first_index, store.writer.meta is not None
        self.damaged: list[tuple[Index, Index]] = []
        last = (start.index if start.index is not None else first_index) - 1
        cursor: ScanCursor | None = start
        while cursor is not None:
            scanner = Scanner(self._reader.data, self._rows, self._reader.rules, cursor)
            last = self._add(scanner, last)
            cursor = self._after_damage(scanner.stop, last + 1)
        self.last_index: Final = Index(last)

    def _add(self, scanner: Scanner, last: int) -> int:
        """Add the records of one scan, and return the last entry's index."""
        for block in scanner.blocks():
            rows = index_records(block.records)
            rows["position"] = block.positions
            if self._index.first is None:
                on_disk = self._rows.read(block.first_index, block.end_index)
                wrong = np.flatnonzero(~agreement(on_disk, rows, magic=False))
                if len(wrong):
                    first = int(wrong[0])
                    self._index.extend(block.first_index + first, rows[first:])
            else:
                self._index.extend(block.first_index, rows)
            at = complete_end(block.records)
            if at is not None:
                last = block.first_index + at
        return last

    def _after_damage(self, stop: ScanStop | None, start: int) -> ScanCursor | None:
        """Return the record that follows a bad one or a missing file, or None where the log ends; note the damage.

        Older records that follow are no part of the log: Java does not remove the entries that it truncates.
        """
        if stop is None or (stop.cursor.index or 0) != start:
            return None
        data, position = self._reader.data, stop.cursor.position
        in_hole = any(low <= position < high for low, high in data.holes)
        if self._native and not in_hole:  # recovery would truncate there too
            return None
        after = next_record(self._reader, self._rows, stop, start)
        if after is None or after.index is None or after.term < stop.cursor.term:
            return None
        again = Scanner(data, self._rows, self._reader.rules, stop.cursor)
        if next(again.blocks(), None) is not None:  # the store has grown meanwhile
            return stop.cursor
        end = max(after.index, start + 1)
        if not in_hole:
            self.damaged.append((Index(start), Index(end)))
        if self._index.first is not None:
            self._index.extend(start, self._rows.read(start, end))
        return ScanCursor(after.position, end, after.term)

    @property
    def last_term(self) -> int:
        """Term of the last entry; 0 if there is none."""
        return self._reader.term_at(self.last_index) if self.last_index >= self._first_index else 0

    def resume_at(self, position_end: int) -> ScanCursor:
        """Return the place up to which the index rows are in the files, for the scan of a later view.

        Args:
            position_end: end of the last entry's record.
        """
        first = self._index.first
        if first is not None:
            return ScanCursor(int(self._index.read(first, first + 1)[0]["position"]), first)
        return ScanCursor(position_end, self.last_index + 1, self.last_term)

    def index_mismatches(self, records: Records) -> list[int]:
        """Return the indexes of those ``records`` whose rows in the index files differ from the data.

        Rows at the end that were not written yet do not count: the index of a running or killed store lags there.
        """
        if not records.count:
            return []
        expected = index_records(records)
        start = int(expected["index"][0])
        rows = self._rows.read(start, start + records.count)
        if not self._reader.rules.position_checked:
            expected["position"] = rows["position"]
        wrong = ~agreement(rows, expected, magic=self._native)
        found = start + np.flatnonzero(wrong)
        return [int(index) for index in found if index < self._written_end or rows["size"][index - start]]

    @cached_property
    def _written_end(self) -> int:
        """End (exclusive) of the entries that the index files contain."""
        first = self._index.first
        if first is None:
            return self.last_index + 1
        before = max(first - 1, self._first_index)
        written = np.flatnonzero(self._rows.read(before, self.last_index + 1)["size"])
        # Without a single row the index is lost; it does not lag.
        return before + int(written[-1]) + 1 if len(written) else self.last_index + 1

"""Writes records at given positions into a store's data and index files."""

from __future__ import annotations

import itertools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import Buffer
from dledger_core.record import INDEX_RECORD_BYTES, MAGIC_BLANK, PREFIX, Records, index_records
from dledger_core.storage.check.recovery import cut_tail
from dledger_core.storage.files.file_system import Files
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.segments import Segments

__all__ = ["LayoutBreakError", "StoreWriter", "breaks_layout"]

_BLANK_BYTES: Final = 8


class LayoutBreakError(Exception):
    """Records do not lie as DLedger lays them, so their positions cannot be kept."""


def breaks_layout(positions: Any, sizes: Any, end: int | None, segment_bytes: int) -> bool:
    """Whether records do not lie as DLedger lays them: one behind the other, or behind a BLANK to the segment's end.

    Args:
        positions: int64, shape (n,).
        sizes: int64, shape (n,).
        end: where the record before ends; None = there is none.
        segment_bytes: size of a data file.
    """
    ends = positions + sizes
    before = np.concatenate([np.array([positions[0] if end is None else end]), ends[:-1]])
    left = -before % segment_bytes
    rolled = (positions == before + left) & (left >= _BLANK_BYTES)
    room = segment_bytes - positions % segment_bytes
    good = ((positions == before) | rolled) & (room >= sizes + _BLANK_BYTES)
    if end is None:
        good[0] &= positions[0] % segment_bytes == 0
    return not bool(good.all())


class StoreWriter:
    """Appends to files that nobody else uses. A crash leaves a tail that ``cut_back`` removes.

    Args:
        files: the file system.
        layout: the store.
        data_segment_bytes: size of a data file.
        index_segment_bytes: size of an index file.
    """

    def __init__(self, files: Files, layout: Layout, data_segment_bytes: int, index_segment_bytes: int) -> None:
        files.mkdir(layout.data)
        files.mkdir(layout.index)
        self.data = Segments.load(files, layout.data, data_segment_bytes, write=True)
        self.index = IndexFile(Segments.load(files, layout.index, index_segment_bytes, write=True, gaps=True))
        self._touched: set[int] = set()
        self._touched_index: set[int] = set()

    def wipe(self) -> None:
        """Removes everything."""
        for segments in (self.data, self.index.segments):
            segments.drop(tuple(reversed(segments.bases)))

    def cut_back(self, position: int, next_index: int) -> None:
        """Removes what lies behind ``position`` and from entry ``next_index`` on."""
        if self.data.bases:
            self.data.fill_up(self.data.bases[-1])
            cut_tail(self.data, position, self.data.written_end(position))
        rows = self.index.segments
        if rows.bases:
            rows.fill_up(rows.bases[-1])
            self.index.cut(next_index, -(-rows.written_end(next_index * INDEX_RECORD_BYTES) // INDEX_RECORD_BYTES))

    def write(self, records: Records, end: int | None) -> int:
        """Writes records where their headers say.

        Args:
            records: at least one.
            end: where the record before ends; None = there is none.

        Returns:
            Where the last one ends.

        Raises:
            LayoutBreakError: they do not follow each other as DLedger lays them; nothing was written.
        """
        headers = records.headers
        positions, sizes = headers["position"].astype(np.int64), records.sizes.astype(np.int64)
        if breaks_layout(positions, sizes, end, self.data.segment_bytes):
            raise LayoutBreakError
        ends = positions + sizes
        breaks = np.flatnonzero(positions[1:] != ends[:-1]) + 1
        view, offset = memoryview(records.data), 0
        at = int(positions[0]) if end is None else end
        for first, stop in itertools.pairwise([0, *breaks.tolist(), records.count]):
            begin, after = int(positions[first]), int(ends[stop - 1])
            if begin != at:
                self._put(at, PREFIX.pack(MAGIC_BLANK, begin - at))
            self._put(begin, view[offset : offset + after - begin])
            offset += after - begin
            at = after
        self._write_index(records)
        return at

    def _put(self, position: int, buffer: Buffer) -> None:
        base = self.data.base_of(position)
        if base not in self.data.bases:
            self.data.create(base)
            self.data.sync_dir()
        self.data.write(position, [buffer])
        self._touched.add(base)

    def _write_index(self, records: Records) -> None:
        rows: npt.NDArray[Any] = index_records(records)
        first = int(rows["index"][0])
        self.index.write(first, rows)
        segments = self.index.segments
        begin, stop = first * INDEX_RECORD_BYTES, (first + len(rows)) * INDEX_RECORD_BYTES
        self._touched_index.update(range(segments.base_of(begin), stop, segments.segment_bytes))

    def sync(self) -> None:
        """Makes everything written so far durable."""
        self.data.sync(sorted(self._touched))
        self.index.segments.sync(sorted(self._touched_index))
        self._touched.clear()
        self._touched_index.clear()

    def close(self) -> None:
        """Lets go of the files."""
        self.data.close()
        self.index.segments.close()

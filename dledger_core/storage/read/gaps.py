"""Entries that a store lacks: data files are missing between others, or at its end where the index has more entries."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final

import numpy as np

from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index, Position
from dledger_core.record import HEADER_BYTES
from dledger_core.storage.check.judge import ScanCursor
from dledger_core.storage.check.recovery import missing_start
from dledger_core.storage.check.scan import Scanner
from dledger_core.storage.read.store_files import StoreFiles

_MISSING_ROWS: Final = 1024
TimeOf = Callable[[int], datetime | None]
"""Returns the time of an entry, or None."""


@dataclass(frozen=True, slots=True)
class Gap:
    """Entries of which a store has no data, because files between others are missing.

    Attributes:
        start: the first one.
        end: end (exclusive).
        position: of the first missing file.
        end_position: of the file after the missing ones.
        path: the first missing file.
        since: append or store time of the entry before them; None if unknown.
        until: time of the entry after them.
    """

    start: Index
    end: Index
    position: Position
    end_position: Position
    path: Path
    since: datetime | None = None
    until: datetime | None = None

    @property
    def message(self) -> str:
        """The gap as a statement."""
        return missing_files(self.position, self.end_position, self.since, self.until)

    @property
    def error(self) -> CorruptRecordError:
        """The gap as an error."""
        values = {"index": int(self.start), "end": int(self.end), "position": int(self.position)}
        remedy = "restore the file, copy the store of a replica, or repair the store from a peer"
        return CorruptRecordError(self.message, str(self.path), remedy, values)


def missing_files(position: int, end: int, since: datetime | None, until: datetime | None) -> str:
    """Return the statement about missing files: their positions, and the times of the entries around them."""
    between = [
        f"{name} {time.isoformat(timespec='seconds')}" for name, time in (("after", since), ("before", until)) if time
    ]
    times = f"; their entries were written {' and '.join(between)}" if between else ""
    return f"the files of positions {position} to {end - 1} are missing{times}"


def gaps_of(store: StoreFiles, first_index: int, last_index: int, time_of: TimeOf) -> Iterator[Gap]:
    """Yield the gaps between data files, and at the start of a native store, in order."""
    reader, data, meta = store.reader, store.reader.data, store.writer.meta
    lost = None if meta is None else missing_start(data, meta)
    if meta is not None and lost is not None:
        start, end = Index(meta.first_index), max(Index(first_index), Index(meta.first_index))
        yield Gap(start, end, Position(lost), Position(data.bases[0]), data.path(lost), None, time_of(end))
    for low, high in data.holes:
        base = low - data.segment_bytes
        header = reader.header_at(base)
        cursor = ScanCursor(base, None if header is None else header.index)
        scanner = Scanner(data, reader.index, reader.rules, cursor, body_crc=False)
        begin = ([first_index] + [block.end_index for block in scanner.blocks()])[-1]
        later = (reader.header_at(each) for each in data.bases if each >= high)
        stop = max(begin, next((header.index for header in later if header is not None), last_index + 1))
        times = time_of(begin - 1), time_of(stop)
        yield Gap(Index(begin), Index(stop), Position(low), Position(high), data.path(low), *times)


def missing_at_end(store: StoreFiles, last_index: int, position_end: int) -> tuple[Index, Index]:
    """Return the entries [start, end) with which the index of a Java store continues, and that its data lacks.

    A row continues the log if it starts where the entry before it ends, or in the next file, with a term that is not
    lower. Rows of entries that Java truncated have lower terms, and their data is still there.
    """
    at = last_index + 1
    place, term = position_end, store.reader.term_at(last_index)
    step, full = _MISSING_ROWS, store.segment_bytes[0]
    while True:
        found = store.rows.read(at, at + step)
        ends = found["position"].astype(np.int64) + found["size"]
        before = np.concatenate([[place], ends[:-1]])
        terms = np.concatenate([[term], found["term"].astype(np.int64)])
        follows = (found["position"] >= before) & (found["position"] < before + full) & (np.diff(terms) >= 0)
        valid = follows & (found["index"] == np.arange(at, at + step)) & (found["size"] >= HEADER_BYTES)
        count = step if bool(valid.all()) else int(np.argmin(valid))
        at += count
        if count < step:
            return Index(last_index + 1), Index(at)
        place, term = int(ends[-1]), int(found["term"][-1])

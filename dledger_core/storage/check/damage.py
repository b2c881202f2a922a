"""Finds what is damaged of entries that are known to have been durable: which ones, and where they lie.

Unlike recovery it goes on behind a bad record, to the next one that is whole: by the record's own size, by the index,
or at the next segment. Unlike ``verify`` it begins at a place that is known to be right and may never miss one: what
it names is what has to be fetched from a peer.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Index, Position
from dledger_core.record import Records, index_records
from dledger_core.storage.check.scan import Cursor, Run, Scanner, Stop, StopKind
from dledger_core.storage.files.index_file import IndexFile, IndexSource, agreement, contradiction
from dledger_core.storage.read.record_reader import RecordReader

__all__ = ["Damage", "damage_near", "find_damage", "write_wrong_rows", "wrong_rows"]

_ROWS_PER_STEP: Final = 4096
_NEAR: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class Damage:
    """Entries [start, end) of a store that are damaged or missing.

    Attributes:
        start: the first one; equal to ``end`` where only the BLANK at a segment's end is damaged.
        end: behind the last one.
        position: where the first one has to lie, or the BLANK before it.
        length: bytes up to the next intact record, or to the end of what was durable.
        path: the file in which it begins.
        message: what is wrong, for people.
    """

    start: Index
    end: Index
    position: Position
    length: int
    path: str
    message: str


def wrong_rows(index: IndexSource, records: Records, first_index: int) -> tuple[int, npt.NDArray[Any]] | None:
    """Returns what to write into the index so that it knows these intact records, or None if it does."""
    rows = index_records(records)
    wrong = np.flatnonzero(~agreement(index.read(first_index, first_index + records.count), rows, magic=True))
    if not len(wrong):
        return None
    first, stop = int(wrong[0]), int(wrong[-1]) + 1
    return first_index + first, rows[first:stop]


def write_wrong_rows(index: IndexFile, records: Records, first_index: int) -> None:
    """Writes, durably, what the index lacks to know these intact records."""
    wrong = wrong_rows(index, records, first_index)
    if wrong is not None:
        index.write(*wrong)
        index.sync(wrong[0], wrong[0] + len(wrong[1]))


class _Search:
    def __init__(
        self, reader: RecordReader, index: IndexSource, end: int, end_position: int, on_run: Callable[[Run], None]
    ) -> None:
        self.reader = reader
        self.data = reader.data
        self.index = index
        self.end = end
        self.end_position = end_position
        self.on_run = on_run
        self.before: Run | None = None

    def run(self, cursor: Cursor) -> Iterator[Damage]:
        while cursor.index is not None and cursor.index < self.end:
            stop, skip = self._scan(cursor)
            if stop is None:
                return
            place = stop.cursor
            index = cursor.index if place.index is None else place.index
            onward = self._behind(stop, index, skip)
            assert onward.index is not None
            yield Damage(
                Index(index),
                Index(onward.index),
                Position(place.position),
                max(onward.position - place.position, 0),
                str(self.data.path(place.position)),
                (StopKind.HEADER if stop.kind is StopKind.END else stop.kind).value,
            )
            cursor = onward

    def _scan(self, cursor: Cursor) -> tuple[Stop | None, int]:
        """Returns where the intact records from a place on end, or None at the end of all; and bytes to leave out."""
        scanner = Scanner(self.data, self.index, self.reader.rules, cursor)
        self.before = None
        try:
            for run in scanner.runs():
                kept = run.records.slice(0, min(run.records.count, self.end - run.first_index))
                stop = self._contradicted(Run(run.first_index, run.position, kept))
                if stop is not None:
                    return stop, 0
                self.before = Run(run.first_index, run.position, kept)
                self.on_run(self.before)
                if run.end_index >= self.end:
                    return None, 0
        except CorruptRecordError:  # the disk cannot read: somewhere in what was to be read next
            return Stop(StopKind.BODY, scanner.cursor), RECORD_BYTES_MAX
        stop = scanner.stop or Stop(StopKind.END, scanner.cursor)
        return (self._blame(stop) if stop.kind is StopKind.TERM else stop), 0

    def _contradicted(self, run: Run) -> Stop | None:
        if not run.records.count:
            return None
        rows = self.index.read(run.first_index, run.end_index)
        wrong = np.flatnonzero(contradiction(rows, index_records(run.records)))
        if not len(wrong):
            return None
        at = int(wrong[0])
        if at:
            self.on_run(Run(run.first_index, run.position, run.records.slice(0, at)))
        cursor = Cursor(int(run.positions[at]), run.first_index + at)
        return Stop(StopKind.WITNESS, cursor, int(run.records.sizes[at]))

    def _blame(self, stop: Stop) -> Stop:
        """A falling term: the record before may be the wrong one, unless its row confirms it."""
        before, index = self.before, stop.cursor.index
        if before is None or index is None or before.end_index != index:
            return stop
        if (
            wrong_rows(self.index, before.records.slice(before.records.count - 1, before.records.count), index - 1)
            is None
        ):
            return stop
        return Stop(StopKind.TERM, Cursor(int(before.positions[-1]), index - 1), int(before.records.sizes[-1]))

    def _behind(self, stop: Stop, index: int, skip: int) -> Cursor:
        """Returns the next intact-looking record at or behind a damaged place, else the end of all."""
        position = stop.cursor.position
        own = self.index.read(index, index + 1)[0]
        sizes = [stop.size] if stop.size else []
        if int(own["index"]) == index and int(own["position"]) == position:
            sizes.append(int(own["size"]))
        for size in () if skip else sizes:
            if index + 1 < self.end and self._is_record(index + 1, position + size):
                return Cursor(position + size, index + 1)
        found = self._next_known(index, position + skip) or self._next_head(index, position + skip)
        return found or Cursor(self.end_position, self.end)

    def _is_record(self, index: int, position: int) -> bool:
        with contextlib.suppress(CorruptRecordError):
            header = self.reader.header_at(position)
            return header is not None and header.index == index
        return False

    def _next_known(self, index: int, position: int) -> Cursor | None:
        """Returns the first record behind ``position`` that the index knows, and that is there."""
        for low in range(index, self.end, _ROWS_PER_STEP):
            high = min(low + _ROWS_PER_STEP, self.end)
            rows = self.index.read(low, high)
            known = np.flatnonzero((rows["index"] == np.arange(low, high)) & (rows["position"] > position))
            for at in known.tolist():
                if self._is_record(low + at, int(rows["position"][at])):
                    return Cursor(int(rows["position"][at]), low + at)
        return None

    def _next_head(self, index: int, position: int) -> Cursor | None:
        for base in self.data.bases:
            if base > position:
                with contextlib.suppress(CorruptRecordError):
                    header = self.reader.header_at(base)
                    if header is not None and index <= header.index < self.end:
                        return Cursor(base, header.index)
        return None


def find_damage(
    reader: RecordReader,
    index: IndexSource,
    cursor: Cursor,
    end: int,
    end_position: int,
    on_run: Callable[[Run], None] = lambda _run: None,
) -> Iterator[Damage]:
    """Yields what is damaged of a store's entries, in order; changes nothing.

    Args:
        reader: the store.
        index: its index as it lies on disk.
        cursor: where to begin; its index and position must be right.
        end: the index behind the last entry that must be there.
        end_position: where that one ends.
        on_run: gets all intact records, in order.
    """
    return _Search(reader, index, end, end_position, on_run).run(cursor)


class _FarEnough(Exception):  # noqa: N818
    """The search has passed what was asked for."""


def damage_near(
    reader: RecordReader, index: IndexSource, near: int, first: tuple[int, int], end: tuple[int, int]
) -> Damage | None:
    """Returns the first damage at or shortly behind entry ``near``, or None.

    Args:
        reader: the store.
        index: its index.
        near: where damage was met.
        first: the log's first entry and its position.
        end: the index behind the last entry, and where that one ends.
    """

    def on_run(run: Run) -> None:
        if run.first_index > near + _NEAR:
            raise _FarEnough

    cursor = Cursor(first[1], first[0])
    for at in range(min(near, end[0]) - 1, max(first[0], near - _ROWS_PER_STEP) - 1, -1):
        row = index.read(at, at + 1)[0]
        header = reader.header_at(int(row["position"]))
        if header is not None and row.tolist() == (header.magic, int(row["position"]), header.size, at, header.term):
            cursor = Cursor(int(row["position"]), at)
            break
    try:
        return next(find_damage(reader, index, cursor, *end, on_run), None)
    except _FarEnough:
        return None

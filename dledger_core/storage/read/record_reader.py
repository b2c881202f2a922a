"""Reads entries by index: index rows, then the bytes they point to, then the checks. Used by the log and by readers.

Where the index does not fit the data, the records are found by walking from the head of their segment: a damaged index
makes a read slow, never wrong. Damaged data is reported with file, index and position, never returned.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from dledger_core.errors import CorruptRecordError, IndexOutOfRangeError
from dledger_core.record import (
    HEADER_BYTES,
    MAGIC_BLANK,
    PREFIX,
    Header,
    Records,
    index_records,
)
from dledger_core.storage.check.scan import Cursor, Rules, Run, Scanner, Stop, StopKind
from dledger_core.storage.files.index_file import IndexSource, contradiction
from dledger_core.storage.files.log_info import LogMeta
from dledger_core.storage.files.segments import Segments

__all__ = ["RecordReader", "corrupt", "out_of_range", "own_rules"]

"""One record's header: magic, size, index, term, position, mark, crc, length."""

_MEAN_BYTES_FIRST: Final = 256
_ROWS_EXTRA: Final = 16
_ROWS_MAX: Final = 1 << 20
_ALL: Final = (1 << 63) - 1


def own_rules(meta: LogMeta) -> Rules:
    """Returns what a valid record is in a store of ours."""
    return Rules(marked_from=meta.foreign_end if meta.profile == "B" else None, cross_checked_to=_ALL)


def corrupt(data: Segments, stop: Stop, index: int | None = None) -> CorruptRecordError:
    """Returns the error for a scan that ended where it must not."""
    at = stop.cursor.index if index is None else index
    return CorruptRecordError(
        stop.kind.value,
        str(data.path(stop.cursor.position)),
        "repair the store from a peer, or restore it",
        ({} if at is None else {"index": at}) | {"position": stop.cursor.position},
    )


def out_of_range(root: Path, start: int, end: int, first_index: int, last_index: int) -> IndexOutOfRangeError:
    """Returns the error for a read outside the log."""
    return IndexOutOfRangeError(
        f"range [{start}, {end}) is not in the log",
        str(root),
        "read inside the log",
        {"first_index": first_index, "last_index": last_index},
    )


class RecordReader:
    """Reads of one store. Any thread may call; the caller has checked that the range is in the log."""

    def __init__(self, data: Segments, index: IndexSource, rules: Rules) -> None:
        self.data = data
        self.index = index
        self.rules = rules
        self._mean_bytes = _MEAN_BYTES_FIRST

    def read(self, start: int, end: int, max_bytes: int, *, body_crc: bool = True) -> Records:
        """Returns checked records [start, ...) up to ``end`` or ``max_bytes``, at least one.

        Raises:
            CorruptRecordError: one of them is damaged.
        """
        rows = self._rows(start, end, max_bytes)
        if len(rows):
            sizes = rows["size"].astype(np.uint32)
            data = self._gather(rows["position"].astype(np.int64), sizes.astype(np.int64))
            if data is not None:
                records = Records(sizes, data)
                if self._is_good(records, rows, start, body_crc=body_crc):
                    return records
        return self._walk(start, end, max_bytes, body_crc=body_crc)

    def _is_good(self, records: Records, rows: npt.NDArray[Any], start: int, *, body_crc: bool) -> bool:
        try:
            records.check(start, body_crc=body_crc)
        except CorruptRecordError:
            return False
        headers, rules = records.headers, self.rules
        if rules.position_checked and not bool((headers["position"] == rows["position"]).all()):
            return False
        if start >= rules.cross_checked_to:
            return True
        return bool((headers["term"] == rows["term"]).all() and (headers["magic"] == rows["magic"]).all())

    def _rows(self, start: int, end: int, max_bytes: int) -> npt.NDArray[Any]:
        """Returns the rows of the records to read, as the index has them; none if the first one is senseless."""
        pieces: list[npt.NDArray[Any]] = []
        at, total = start, 0
        while at < end and (total < max_bytes or not pieces):
            count = min(end - at, (max_bytes - total) // self._mean_bytes + _ROWS_EXTRA, _ROWS_MAX)
            rows = self.index.read(at, at + count)
            sizes = rows["size"]
            sane = sizes >= HEADER_BYTES
            if not bool(sane.all()):
                rows = rows[: int(np.argmin(sane))]
                end = at + len(rows)
            pieces.append(rows)
            total += int(rows["size"].sum(dtype=np.int64))
            at += len(rows)
        rows = pieces[0] if len(pieces) == 1 else np.concatenate(pieces)
        ends = np.cumsum(rows["size"], dtype=np.int64)
        keep = max(int(np.searchsorted(ends, max_bytes, side="right")), 1)
        rows = rows[:keep]
        if len(rows):
            self._mean_bytes = max(int(ends[len(rows) - 1]) // len(rows), HEADER_BYTES)
        return rows

    def _gather(self, positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.int64]) -> bytes | None:
        """Returns the bytes of the records, or None if the files do not hold them all."""
        breaks = np.flatnonzero(positions[1:] != positions[:-1] + sizes[:-1]) + 1
        edges = [0, *breaks.tolist(), len(positions)]
        pieces = []
        for first, stop in itertools.pairwise(edges):
            at = int(positions[first])
            length = int(positions[stop - 1] + sizes[stop - 1]) - at
            if not self.data.holds(at):
                return None
            piece = self.data.read(at, length)
            if len(piece) != length:
                return None
            pieces.append(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _walk(self, start: int, end: int, max_bytes: int, *, body_crc: bool) -> Records:
        """Reads without the index's help; raises where the data itself is damaged."""
        scanner = Scanner(self.data, self.index, self.rules, self._near(start), body_crc=body_crc)
        sizes: list[npt.NDArray[np.uint32]] = []
        data: list[Any] = []
        total = 0
        for run in scanner.runs():
            if run.end_index <= start:
                continue
            if run.first_index > start and not sizes:
                break  # the walk began behind the record: what came before it is damaged
            self.cross_check(run)
            wanted = run.records.slice(max(start - run.first_index, 0), min(end - run.first_index, run.records.count))
            ends = np.cumsum(wanted.sizes, dtype=np.int64)
            keep = int(np.searchsorted(ends, max_bytes - total, side="right"))
            taken = wanted.slice(0, max(keep, 0 if sizes else 1))
            sizes.append(taken.sizes)
            data.append(taken.data)
            total += taken.nbytes
            if run.end_index >= end or taken.count < wanted.count:
                return Records(np.concatenate(sizes), b"".join(data))
        stop = scanner.stop
        if stop is None or (stop.cursor.index or 0) < start:
            position = scanner.cursor.position
            raise CorruptRecordError(
                "the record cannot be found",
                str(self.data.path(position)),
                "repair the store from a peer",
                {"index": start, "position": position},
            )
        raise corrupt(self.data, stop)

    def check_blanks(self, records: Records, following: int) -> None:
        """Looks at what no read by the index touches: the BLANK behind the last record of a segment.

        Args:
            records: consecutive ones that were read.
            following: where the record behind them lies, or will.

        Raises:
            CorruptRecordError: a BLANK is damaged; ``index`` names the record before it.
        """
        headers = records.headers
        positions = headers["position"].astype(np.int64)
        ends = positions + records.sizes
        for row in np.flatnonzero(ends != np.append(positions[1:], following)).tolist():
            end, data = int(ends[row]), self.data
            blank = PREFIX.pack(MAGIC_BLANK, data.base_of(end) + data.segment_bytes - end)
            if data.read(end, PREFIX.size) != blank:
                raise corrupt(data, Stop(StopKind.HEADER, Cursor(end, int(headers["index"][row]))))

    def cross_check(self, run: Run) -> None:
        """Raises CorruptRecordError if the index contradicts a record; see ``contradiction``."""
        count = min(run.records.count, self.rules.cross_checked_to - run.first_index)
        if count <= 0:
            return
        records = run.records.slice(0, count)
        rows = self.index.read(run.first_index, run.first_index + count)
        wrong = np.flatnonzero(contradiction(rows, index_records(records)))
        if len(wrong):
            at = int(wrong[0])
            raise corrupt(self.data, Stop(StopKind.WITNESS, Cursor(int(run.positions[at]), run.first_index + at)))

    def _near(self, start: int) -> Cursor:
        """Returns a place at or before record ``start`` from which to walk."""
        row = self.index.read(start, start + 1)[0]
        header = self.header_at(int(row["position"]))
        if header is not None and header.index == start:
            return Cursor(int(row["position"]), start)
        return self.segment_head(start)

    def segment_head(self, start: int) -> Cursor:
        """Returns the head of the last segment whose first record is at or before ``start``."""
        bases = self.data.bases
        for base in reversed(bases):
            head = self.header_at(base)
            if head is not None and head.index <= start:
                return Cursor(base, head.index)
        if not bases:
            raise CorruptRecordError(
                "the record cannot be found", str(self.data.directory), "repair the store from a peer", {"index": start}
            )
        return Cursor(bases[0])

    def header_at(self, position: int) -> Header | None:
        """Return the header of a well-formed record at ``position``, or None."""
        if position < 0 or not self.data.holds(position):
            return None
        prefix = self.data.read(position, HEADER_BYTES)
        if len(prefix) < HEADER_BYTES:
            return None
        header = Header.unpack(prefix)
        if not header.is_well_formed or (self.rules.position_checked and header.position != position):
            return None
        return header

    def term_at(self, index: int) -> int:
        """Returns the term of an entry; from the index, unless its row is senseless."""
        row = self.index.read(index, index + 1)[0]
        if int(row["index"]) == index and int(row["size"]) >= HEADER_BYTES:
            header = self.header_at(int(row["position"])) if index < self.rules.cross_checked_to else None
            if header is None or header.index != index or header.term == int(row["term"]):
                return int(row["term"])
        return int(self.read(index, index + 1, 1, body_crc=False).headers["term"][0])

    def first_record(self) -> tuple[int, int] | None:
        """Returns (index, position) of the first record held, passing a leading BLANK; None if there is none."""
        if not self.data.bases:
            return None
        position = self.data.bases[0]
        prefix = self.data.read(position, 8)
        if len(prefix) == 8 and int.from_bytes(prefix[:4], "big", signed=True) == MAGIC_BLANK:
            length = int.from_bytes(prefix[4:], "big")
            jump = self.rules.blank == "jump" or not 8 <= length <= self.data.segment_bytes
            position += self.data.segment_bytes if jump else length
        header = self.header_at(position)
        return None if header is None else (header.index, position)

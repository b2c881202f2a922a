"""Read entries by index: index rows, then the bytes at their positions, then the judge. Used by the log and by readers.

Where the index does not fit the data, the records are found by a scan from the start of their segment: a damaged index
makes a read slow, never wrong. Damaged data is reported with file, index and position, never returned.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    contiguous,
    index_records,
)
from dledger_core.storage.check.judge import (
    MISSING_FILE,
    BodyFormat,
    Fault,
    Rules,
    ScanCursor,
    ScanStop,
    corrupt,
    first_fault,
)
from dledger_core.storage.check.scan import RecordBlock, Scanner
from dledger_core.storage.files.index_file import IndexSource, contradiction
from dledger_core.storage.files.segments import Segments

_MEAN_BYTES_FIRST: Final = 256
_ROWS_EXTRA: Final = 16
_ROWS_MAX: Final = 1 << 20


def out_of_range(root: Path, start: int, end: int, first_index: int, last_index: int) -> IndexOutOfRangeError:
    """Return the error for a read outside the log."""
    return IndexOutOfRangeError(
        f"range [{start}, {end}) is not in the log",
        str(root),
        "read inside the log",
        {"first_index": first_index, "last_index": last_index},
    )


class RecordReader:
    """Reads of one store. Any thread may call; the caller has checked that the range is in the log.

    Args:
        data: the data files.
        index: the index.
        rules: evidence that the log has.
        bodies: checks the bodies of its format too; None = all bodies are opaque.
    """

    def __init__(self, data: Segments, index: IndexSource, rules: Rules, bodies: BodyFormat | None = None) -> None:
        self.data = data
        self.index = index
        self.rules = rules
        self.bodies = bodies
        self._mean_bytes = _MEAN_BYTES_FIRST

    def read(self, start: int, end: int, max_bytes: int, *, body_crc: bool = True, gather: bool = False) -> Records:
        """Return checked records [start, ...) up to ``end`` or ``max_bytes``, at least one.

        ``gather``: the caller reads ``bodies`` next; see ``Records.check``.

        Raises:
            CorruptRecordError: one of them is damaged.
        """
        records = self._records(start, end, max_bytes, body_crc=body_crc, gather=gather)
        if body_crc and self.bodies is not None:
            damaged = self.bodies.damaged(records)
            if len(damaged):
                row = int(damaged[0])
                position = int(self._position_of(records, row))
                stop = ScanStop(Fault.MESSAGE, ScanCursor(position, start + row))
                named = self.bodies.describe(records, row)
                raise corrupt(self.data, stop, named=named, reason=self.bodies.fault(records, row))
        return records

    def _position_of(self, records: Records, row: int) -> int:
        """Return where a record is; Java's generation B records no position."""
        header = records.headers[row]
        if self.rules.position_checked:
            return int(header["position"])
        return int(self.index.read(int(header["index"]), int(header["index"]) + 1)[0]["position"])

    def _records(self, start: int, end: int, max_bytes: int, *, body_crc: bool, gather: bool) -> Records:
        rows = self._rows(start, end, max_bytes)
        if len(rows):
            sizes = rows["size"].astype(np.uint32)
            positions = rows["position"].astype(np.int64)
            data = self._gather(start, positions, sizes)
            if data is not None:
                records = Records(sizes, data)
                fault = first_fault(
                    records, start, self.rules, positions=positions, rows=rows, body_crc=body_crc, gather=gather
                )
                if fault is None:
                    return records
        return self._scan(start, end, max_bytes, body_crc=body_crc)

    def _rows(self, start: int, end: int, max_bytes: int) -> npt.NDArray[Any]:
        """Return the index rows of the records to read; none if the first one has impossible values."""
        parts: list[npt.NDArray[Any]] = []
        at, total = start, 0
        while at < end and (total < max_bytes or not parts):
            count = min(end - at, (max_bytes - total) // self._mean_bytes + _ROWS_EXTRA, _ROWS_MAX)
            rows = self.index.read(at, at + count)
            sizes = rows["size"]
            sane = (sizes >= HEADER_BYTES) & (sizes <= self.data.segment_bytes)
            if not bool(sane.all()):
                rows = rows[: int(np.argmin(sane))]
                end = at + len(rows)
            parts.append(rows)
            total += int(rows["size"].sum(dtype=np.int64))
            at += len(rows)
        rows = parts[0] if len(parts) == 1 else np.concatenate(parts)
        ends = np.cumsum(rows["size"], dtype=np.int64)
        keep = max(int(np.searchsorted(ends, max_bytes, side="right")), 1)
        rows = rows[:keep]
        if len(rows):
            self._mean_bytes = max(int(ends[len(rows) - 1]) // len(rows), HEADER_BYTES)
        return rows

    def _gather(self, start: int, positions: npt.NDArray[np.int64], sizes: npt.NDArray[np.uint32]) -> bytes | None:
        """Return the bytes of the records from entry ``start`` on, or None if the files do not contain them all."""
        parts = []
        for at, length in contiguous(positions, sizes):
            if not self.data.covers(at):
                return None
            try:
                part = self.data.read(at, length)
            except CorruptRecordError as error:  # the disk cannot read them
                error.values.setdefault("index", start + int(np.argmax(positions == at)))
                raise
            if len(part) != length:
                return None
            parts.append(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def _scan(self, start: int, end: int, max_bytes: int, *, body_crc: bool) -> Records:
        """Read without the index; raise where the data itself is damaged."""
        scanner = Scanner(self.data, self.index, self.rules, self._near(start), body_crc=body_crc)
        sizes: list[npt.NDArray[np.uint32]] = []
        data: list[Any] = []
        total = 0
        for block in self._blocks(scanner, start):
            if block.end_index <= start:
                continue
            if block.first_index > start and not sizes:
                break  # the scan started after the record: data before it is damaged
            self.cross_check(block)
            first = max(start - block.first_index, 0)
            wanted = block.records.slice(first, min(end - block.first_index, block.records.count))
            ends = np.cumsum(wanted.sizes, dtype=np.int64)
            keep = int(np.searchsorted(ends, max_bytes - total, side="right"))
            taken = wanted.slice(0, max(keep, 0 if sizes else 1))
            sizes.append(taken.sizes)
            data.append(taken.data)
            total += taken.nbytes
            if block.end_index >= end or taken.count < wanted.count:
                return Records(np.concatenate(sizes), b"".join(data))
        stop = scanner.stop
        if stop is None or (stop.cursor.index or 0) < start:
            position = scanner.cursor.position
            raise CorruptRecordError(
                "the record cannot be found" if self.data.covers(position) else MISSING_FILE,
                str(self.data.path(position)),
                "repair the store from a peer",
                {"index": start, "position": position},
            )
        raise corrupt(self.data, stop, start if stop.cursor.index is None else None)

    def _blocks(self, scanner: Scanner, start: int) -> Iterator[RecordBlock]:
        try:
            yield from scanner.blocks()
        except CorruptRecordError as error:  # the disk cannot read what follows
            error.values.setdefault("index", max(start, scanner.cursor.index or 0))
            raise

    def check_blanks(self, records: Records, following: int) -> None:
        """Check the BLANK after the last record of a segment, which no read by the index touches.

        Args:
            records: consecutive records.
            following: position of the record after them, or of the next one to append.

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
                raise corrupt(data, ScanStop(Fault.HEADER, ScanCursor(end, int(headers["index"][row]))))

    def cross_check(self, block: RecordBlock) -> None:
        """Raise CorruptRecordError if the index contradicts a record; see ``contradiction``."""
        count = min(block.records.count, self.rules.cross_checked_to - block.first_index)
        if count <= 0:
            return
        rows = self.index.read(block.first_index, block.first_index + count)
        wrong = np.flatnonzero(contradiction(rows, index_records(block.records.slice(0, count))))
        if len(wrong):
            at = int(wrong[0])
            place = ScanCursor(int(block.positions[at]), block.first_index + at)
            raise corrupt(self.data, ScanStop(Fault.ROW, place))

    def _near(self, start: int) -> ScanCursor:
        """Return a place at or before record ``start`` at which to start a scan."""
        row = self.index.read(start, start + 1)[0]
        header = self.header_at(int(row["position"]))
        if header is not None and header.index == start:
            return ScanCursor(int(row["position"]), start)
        return self.segment_start(start)

    def segment_start(self, start: int) -> ScanCursor:
        """Return the start of the last segment whose first record is at or before ``start``."""
        bases = self.data.bases
        for base in reversed(bases):
            first = self.header_at(base)
            if first is not None and first.index <= start:
                return ScanCursor(base, first.index)
        if not bases:
            raise CorruptRecordError(
                "the record cannot be found", str(self.data.directory), "repair the store from a peer", {"index": start}
            )
        return ScanCursor(bases[0])

    def header_at(self, position: int) -> Header | None:
        """Return the header of a well-formed record at ``position``, or None."""
        if position < 0 or not self.data.covers(position):
            return None
        prefix = self.data.read(position, HEADER_BYTES)
        if len(prefix) < HEADER_BYTES:
            return None
        header = Header.unpack(prefix)
        if not header.is_well_formed or (self.rules.position_checked and header.position != position):
            return None
        return header

    def term_at(self, index: int) -> int:
        """Return the term of an entry; from the index, unless its row has impossible values."""
        row = self.index.read(index, index + 1)[0]
        if int(row["index"]) == index and int(row["size"]) >= HEADER_BYTES:
            header = self.header_at(int(row["position"])) if index < self.rules.cross_checked_to else None
            if header is None or header.index != index or header.term == int(row["term"]):
                return int(row["term"])
        return int(self.read(index, index + 1, 1, body_crc=False).headers["term"][0])

    def first_record(self) -> tuple[int, int] | None:
        """Return (index, position) of the first record, after a leading BLANK; None if there is none."""
        if not self.data.bases:
            return None
        position = self.data.bases[0]
        prefix = self.data.read(position, PREFIX.size)
        magic, length = PREFIX.unpack(prefix) if len(prefix) == PREFIX.size else (0, 0)
        if magic == MAGIC_BLANK:
            jump = self.rules.blank == "jump" or not PREFIX.size <= length <= self.data.segment_bytes
            position += self.data.segment_bytes if jump else length
        header = self.header_at(position)
        return None if header is None else (header.index, position)

"""Scan the records of the data files in order, up to the first one that is not good.

One scanner serves recovery, readers, ``verify`` and ``repair``. It reads the data in buffers of a few MiB. The starts
of the records are guessed from the index, all rows at once; where the index does not fit, the sizes are followed one by
one. Either way ``judge.first_fault`` then decides, so the result never depends on the index.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger_core.config import RECORD_BYTES_MAX
from dledger_core.record import (
    HEADER_BYTES,
    MAGIC_BLANK,
    MAGIC_DATA,
    MAGIC_MEMBERSHIP,
    PREFIX,
    Records,
)
from dledger_core.storage.check.judge import Fault, Rules, ScanCursor, ScanStop, first_fault
from dledger_core.storage.files.index_file import IndexSource
from dledger_core.storage.files.segments import Segments

_BUFFER_BYTES: Final = RECORD_BYTES_MAX  # large enough for any record
_FOLLOWED_COUNT_MAX: Final = 1 << 15
_HINT_COUNT_FIRST: Final = 256


@dataclass(frozen=True, slots=True)
class RecordBlock:
    """Good records that are contiguous in one segment."""

    first_index: int
    position: int
    records: Records

    @property
    def end_index(self) -> int:
        """End (exclusive) of the indexes."""
        return self.first_index + self.records.count

    @property
    def end_position(self) -> int:
        """End of the last record."""
        return self.position + self.records.nbytes

    @property
    def last_term(self) -> int:
        """The term of the last record."""
        return self.records.last.term

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Real position of each record."""
        return self.records.starts + self.position

    def slice(self, stop: int) -> RecordBlock:
        """Return the first ``stop`` records."""
        return RecordBlock(self.first_index, self.position, self.records.slice(0, stop))


class Scanner:
    """One scan of the data; iterate ``blocks()``, then read ``stop``."""

    def __init__(
        self, data: Segments, index: IndexSource, rules: Rules, cursor: ScanCursor, *, body_crc: bool = True
    ) -> None:
        self._data = data
        self._index = index
        self._rules = rules
        self._body_crc = body_crc
        self._hint_count = _HINT_COUNT_FIRST
        self.cursor = cursor
        self.stop: ScanStop | None = None

    def blocks(self) -> Iterator[RecordBlock]:
        """Yield blocks of good records; after the last one ``stop`` is set."""
        while self._data.covers(self.cursor.position):
            buffer, bytes_in_file = self._fill()
            magic, size = PREFIX.unpack_from(buffer) if len(buffer) >= 8 else (0, 0)
            if magic == MAGIC_BLANK:
                if not self._skip_blank(size):
                    return
                continue
            sizes = self._chain(buffer)
            if not len(sizes):
                self.stop = ScanStop(Fault.END if size == 0 and magic == 0 else Fault.HEADER, self.cursor)
                return
            if (yield from self._judge(buffer, sizes, bytes_in_file)):
                return
        self.stop = ScanStop(Fault.END, self.cursor)

    def _fill(self) -> tuple[bytes, int]:
        """Return the bytes at the cursor, and how many the file has; a file that is too short counts as zeros."""
        position = self.cursor.position
        length = min(_BUFFER_BYTES, self._data.base_of(position) + self._data.segment_bytes - position)
        buffer = self._data.read(position, length)
        in_file = len(buffer)
        # A crash may leave the last file short, and its records may still be complete: their CRCs decide
        # (test_first_fault_requires_a_crc_for_bytes_that_the_file_lacks).
        return (buffer + bytes(length - in_file) if in_file < length else buffer), in_file

    def _skip_blank(self, size: int) -> bool:
        position = self.cursor.position
        left = self._data.base_of(position) + self._data.segment_bytes - position
        # A native BLANK ends with its segment: any other length is damage (test_damaged_blank_is_found_and_repaired).
        # Java's generation A wrote any length.
        if self._rules.blank == "jump" or size == left:
            step = left
        elif self._rules.blank == "skip" and 8 <= size < left:
            step = size
        else:
            self.stop = ScanStop(Fault.HEADER, self.cursor)
            return False
        self.cursor = ScanCursor(position + step, self.cursor.index, self.cursor.term)
        return True

    def _chain(self, buffer: bytes) -> npt.NDArray[np.uint32]:
        """Return the sizes of the records that seem to be at the start of ``buffer``."""
        hinted = self._hinted_chain(buffer)
        if len(hinted):
            self._hint_count = max(_HINT_COUNT_FIRST, len(buffer) * len(hinted) // int(hinted.sum()) + 1)
            return hinted
        sizes: list[int] = []
        at, end, unpack = 0, len(buffer), PREFIX.unpack_from
        while at + HEADER_BYTES <= end and len(sizes) < _FOLLOWED_COUNT_MAX:
            magic, size = unpack(buffer, at)
            if not (MAGIC_DATA <= magic <= MAGIC_MEMBERSHIP and size >= HEADER_BYTES and at + size <= end):
                break
            sizes.append(size)
            at += size
        return np.array(sizes, np.uint32)

    def _hinted_chain(self, buffer: bytes) -> npt.NDArray[np.uint32]:
        first, position = self.cursor.index, self.cursor.position
        if first is None or first < 0:
            return np.empty(0, np.uint32)
        rows = self._index.read(first, first + self._hint_count)
        sizes, positions = rows["size"].astype(np.int64), rows["position"].astype(np.int64)
        ends = np.cumsum(sizes)
        fits = (positions == position + ends - sizes) & (sizes >= HEADER_BYTES) & (ends <= len(buffer))
        count = len(fits) if bool(fits.all()) else int(np.argmin(fits))
        if not count:
            return np.empty(0, np.uint32)
        chain = sizes[:count].astype(np.uint32)
        # The index only guesses. A size counts if the record itself has it, so a damaged row changes no result
        # (mutation "a batch ends where a row is lost").
        real = Records(chain, memoryview(buffer)[: int(ends[count - 1])]).headers["size"]
        same = real == sizes[:count]
        return chain if bool(same.all()) else chain[: int(np.argmin(same))]

    def _judge(
        self, buffer: bytes, sizes: npt.NDArray[np.uint32], bytes_in_file: int
    ) -> Generator[RecordBlock, None, bool]:
        """Yield the good records of a buffer; return whether a bad one follows."""
        cursor = self.cursor
        records = Records(sizes, memoryview(buffer)[: int(sizes.sum(dtype=np.int64))])
        first = cursor.index if cursor.index is not None else records.first.index
        found = first_fault(
            records,
            first,
            self._rules,
            positions=records.starts + cursor.position,
            term=cursor.term,
            body_crc=self._body_crc,
            bytes_in_file=bytes_in_file,
        )
        if found is not None:
            records = records.slice(0, found[0])
        if records.count:
            block = RecordBlock(first, cursor.position, records)
            self.cursor = ScanCursor(block.end_position, block.end_index, block.last_term)
            yield block
        if found is not None:
            # The size in a damaged header leads into the middle of a record.
            size = 0 if found[1] is Fault.HEADER else int(sizes[found[0]])
            self.stop = ScanStop(found[1], self.cursor, size)
        return found is not None

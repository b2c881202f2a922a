"""Walks the records of the data files and says exactly where, and why, the valid ones end.

One scanner serves recovery, readers and ``verify``. It takes the data in buffers of a few MiB. Where records begin is
guessed from the index, all rows at once; where the index does not fit, the sizes are followed one by one. Either way
the records are then checked column-wise, so what comes out never depends on the index.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Final, Literal

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
    append_times,
)
from dledger_core.storage.files.index_file import IndexSource
from dledger_core.storage.files.segments import Segments

__all__ = ["Cursor", "Rules", "Run", "Scanner", "Stop", "StopKind"]

_BUFFER_BYTES: Final = RECORD_BYTES_MAX  # so that any whole record fits
_WALK_COUNT_MAX: Final = 1 << 15
_HINT_COUNT_FIRST: Final = 256


@dataclass(frozen=True, slots=True)
class Rules:
    """What a valid log is; it differs with who wrote the files.

    Attributes:
        position_checked: the header's position must be where the record lies (not so in Java's generation B).
        blank: a BLANK ``exact``: must reach the segment's end; ``skip``: is skipped by its length (generation B);
            ``jump``: ends the segment whatever its length says (generation A).
        marked_from: from this index on each record carries an append time and a CRC; None = never demanded.
        cross_checked_to: below this index a row of the index that knows the record's place is a witness of its term and
            magic too, which no CRC covers; 0 = no row is.
    """

    position_checked: bool = True
    blank: Literal["exact", "skip", "jump"] = "exact"
    marked_from: int | None = None
    cross_checked_to: int = 0


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place between two records.

    Attributes:
        position: where the next record or BLANK begins.
        index: the index it must have, or None if any will do.
        term: the term of the record before; the next is not below it.
    """

    position: int
    index: int | None = None
    term: int = 0


class StopKind(Enum):
    """Why a scan ended."""

    END = "no further record"
    HEADER = "the record's header is damaged"
    BODY = "the body does not match its CRC"
    TERM = "the term is below the one before"
    INDEX = "the index does not continue the one before"
    CUT = "the file ends within the record"
    WITNESS = "the record and its row in the index say different terms or magics"


@dataclass(frozen=True, slots=True)
class Stop:
    """Where and why a scan ended; ``size`` is the record's own, 0 if its header is damaged."""

    kind: StopKind
    cursor: Cursor
    size: int = 0


@dataclass(frozen=True, slots=True)
class Run:
    """Valid records that lie one behind the other in one segment."""

    first_index: int
    position: int
    records: Records

    @property
    def end_index(self) -> int:
        """The index behind the last one."""
        return self.first_index + self.records.count

    @property
    def end_position(self) -> int:
        """The position behind the last record."""
        return self.position + self.records.nbytes

    @property
    def last_term(self) -> int:
        """The term of the last record."""
        return int(self.records.headers["term"][-1])

    @property
    def positions(self) -> npt.NDArray[np.int64]:
        """Where each record really lies."""
        return self.records.starts + self.position


class Scanner:
    """One walk over the data; iterate ``runs()``, then read ``stop``."""

    def __init__(
        self, data: Segments, index: IndexSource, rules: Rules, cursor: Cursor, *, body_crc: bool = True
    ) -> None:
        self._data = data
        self._index = index
        self._rules = rules
        self._body_crc = body_crc
        self._hint_count = _HINT_COUNT_FIRST
        self.cursor = cursor
        self.stop: Stop | None = None

    def runs(self) -> Iterator[Run]:
        """Yields runs of valid records; ends where ``stop`` says."""
        while self._data.holds(self.cursor.position):
            buffer, held = self._fill()
            magic, size = PREFIX.unpack_from(buffer) if len(buffer) >= 8 else (0, 0)
            if magic == MAGIC_BLANK:
                if not self._skip_blank(size):
                    break
                continue
            sizes = self._chain(buffer)
            if not len(sizes):
                self._stop_at_prefix(magic, size)
                return
            run, stop = self._validate(buffer, sizes, held)
            if run is not None:
                self.cursor = Cursor(run.end_position, run.end_index, run.last_term)
                yield run
            if stop is not None:
                self.stop = stop
                return
        if self.stop is None:
            self.stop = Stop(StopKind.END, self.cursor)

    def _fill(self) -> tuple[bytes, int]:
        """Returns the bytes at the cursor, and how many the file has; one that is too short counts as zeros."""
        position = self.cursor.position
        length = min(_BUFFER_BYTES, self._data.base_of(position) + self._data.segment_bytes - position)
        buffer = self._data.read(position, length)
        held = len(buffer)
        return (buffer + bytes(length - held) if held < length else buffer), held

    def _skip_blank(self, size: int) -> bool:
        position = self.cursor.position
        left = self._data.base_of(position) + self._data.segment_bytes - position
        if self._rules.blank == "jump" or size == left:
            step = left
        elif self._rules.blank == "skip" and 8 <= size < left:
            step = size
        else:
            self.stop = Stop(StopKind.HEADER, self.cursor)
            return False
        self.cursor = Cursor(position + step, self.cursor.index, self.cursor.term)
        return True

    def _stop_at_prefix(self, magic: int, size: int) -> None:
        nothing = size == 0 and magic == 0
        self.stop = Stop(StopKind.END if nothing else StopKind.HEADER, self.cursor)

    def _chain(self, buffer: bytes) -> npt.NDArray[np.uint32]:
        """Returns the sizes of records that seem to lie at the start of ``buffer``."""
        hinted = self._hinted_chain(buffer)
        if len(hinted):
            self._hint_count = max(_HINT_COUNT_FIRST, len(buffer) * len(hinted) // int(hinted.sum()) + 1)
            return hinted
        sizes: list[int] = []
        at, end, unpack = 0, len(buffer), PREFIX.unpack_from
        while at + HEADER_BYTES <= end and len(sizes) < _WALK_COUNT_MAX:
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
        real = Records(chain, memoryview(buffer)[: int(ends[count - 1])]).headers["size"]
        same = real == sizes[:count]
        return chain if bool(same.all()) else chain[: int(np.argmin(same))]

    def _validate(self, buffer: bytes, sizes: npt.NDArray[np.uint32], held: int) -> tuple[Run | None, Stop | None]:
        """Checks the records and returns the good ones and, if one is bad, why the scan stops there.

        Args:
            buffer: the records.
            sizes: of each.
            held: bytes of them that the file has; behind that only a CRC tells a record from what was invented.
        """
        cursor = self.cursor
        records = Records(sizes, memoryview(buffer)[: int(sizes.sum(dtype=np.int64))])
        first = cursor.index if cursor.index is not None else int(records.headers["index"][0])
        kind, good = self._first_bad_header(records, first)
        if kind is not None:
            records = records.slice(0, good)
        if self._body_crc and records.count:
            wrong = records.first_bad_body()
            if wrong is not None:
                kind, good = StopKind.BODY, wrong
                records = records.slice(0, good)
        if records.nbytes > held:
            headers = records.headers
            invented = (records.starts + records.sizes > held) & (headers["flags"] == 0) & (headers["crc"] == 0)
            if bool(invented.any()):
                kind, good = StopKind.CUT, int(np.argmax(invented))
                records = records.slice(0, good)
        run = Run(first, cursor.position, records) if records.count else None
        if kind is None:
            return run, None
        at = cursor.position + records.nbytes
        term = run.last_term if run is not None else cursor.term
        index = cursor.index if run is None else first + good
        size = 0 if kind is StopKind.HEADER else int(sizes[good])
        return run, Stop(kind, Cursor(at, index, term), size)

    def _first_bad_header(self, records: Records, first: int) -> tuple[StopKind | None, int]:
        headers, n = records.headers, records.count
        indexes, terms = headers["index"].astype(np.int64), headers["term"].astype(np.int64)
        whole = (headers["size"] == records.sizes) & (
            headers["length"] == records.sizes.astype(np.int64) - HEADER_BYTES
        )
        whole &= (headers["magic"] >= MAGIC_DATA) & (headers["magic"] <= MAGIC_MEMBERSHIP)
        whole &= (indexes >= 0) & (terms >= 0)
        if self._rules.position_checked:
            whole &= headers["position"] == records.starts + self.cursor.position
        if self._rules.marked_from is not None:
            unmarked = append_times(headers) == 0
            whole &= ~unmarked | (indexes < self._rules.marked_from)
        continues = indexes == np.arange(first, first + n)
        previous = np.empty(n, np.int64)
        previous[0], previous[1:] = self.cursor.term, terms[:-1]
        rising = terms >= previous
        good = whole & continues & rising
        if bool(good.all()):
            return None, n
        bad = int(np.argmin(good))
        if not whole[bad]:
            return StopKind.HEADER, bad
        return (StopKind.INDEX if not continues[bad] else StopKind.TERM), bad

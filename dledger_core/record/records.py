"""Blocks of encoded records: the bytes on disk and on the wire, checked and read column by column."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core import checksum
from dledger_core.checksum import Buffer
from dledger_core.errors import CorruptRecordError, invariant
from dledger_core.ids import NO_TERM, NUMBER_MAX
from dledger_core.raft.batch import Batch
from dledger_core.record.layout import (
    HEADER,
    HEADER_BYTES,
    INDEX_RECORD,
    MAGIC_DATA,
    MAGIC_MEMBERSHIP,
    Header,
    pack_index_record,
    total_and_smallest,
)

_I64 = npt.NDArray[np.int64]
_U32 = npt.NDArray[np.uint32]
_U8 = npt.NDArray[np.uint8]
_INLINE_BYTES = 12


def _in_range(column: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """Return which values of an int64 column are in [0, NUMBER_MAX]: as uint64 a negative value is above it."""
    found: npt.NDArray[np.bool_] = column.view(np.uint64) <= NUMBER_MAX
    return found


class Records:
    """A block of encoded records, without BLANKs. Immutable; safe to share between threads.

    Bytes from outside are checked with ``check`` before anything else is called.

    Args:
        sizes: uint32, shape (n,): bytes of each record.
        data: the concatenated records; ``sum(sizes)`` bytes.
        headers: dtype HEADER, shape (n,), if the caller has them already; else they are gathered on first use.
    """

    __slots__ = ("_bodies", "_columns", "_headers", "_payload_crc", "_rows", "_starts", "data", "sizes")

    def __init__(self, sizes: _U32, data: Buffer, headers: npt.NDArray[Any] | None = None) -> None:
        self.sizes = sizes
        self.data = data
        self._headers = headers
        self._columns: dict[str, npt.NDArray[Any]] | None = None
        self._starts: _I64 | None = None
        self._bodies: memoryview | None = None
        self._rows: _U8 | Literal[False] | None = False
        self._payload_crc: int | None = None

    @property
    def payload_crc(self) -> int:
        """CRC-32 of the sizes (little-endian uint32) and the records, as nodes send them.

        Computed once: a leader sends a batch to each follower, and that took a twentieth of its time for large ones.
        """
        if self._payload_crc is None:
            sizes = np.ascontiguousarray(self.sizes, "<u4").tobytes()
            self._payload_crc = checksum.crc32(self.data, checksum.crc32(sizes))
        return self._payload_crc

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the records."""
        return len(self.data)

    @property
    def starts(self) -> _I64:
        """int64, shape (n,): where each record starts in ``data``."""
        if self._starts is None:
            self._starts = np.zeros(len(self.sizes), np.int64)
            np.cumsum(self.sizes[:-1], out=self._starts[1:])
        return self._starts

    @property
    def first(self) -> Header:
        """The header of the first record."""
        return Header.unpack(self.data)

    @property
    def last(self) -> Header:
        """The header of the last record."""
        return Header.unpack(self.data, self.nbytes - int(self.sizes[-1]))

    @property
    def configuration(self) -> bytes | None:
        """Body of the configuration entry that starts the block, or None."""
        if not self.count or self.first.magic != MAGIC_MEMBERSHIP:
            return None
        return bytes(memoryview(self.data)[HEADER_BYTES : int(self.sizes[0])])

    def _equal_rows(self) -> _U8 | None:
        """The records after the first, which may be a control entry, as rows of bytes; None if their sizes differ.

        Slicing rows is several times faster than gathering slices of any size.
        """
        if self._rows is False:
            sizes = self.sizes
            if len(sizes) < 2 or sizes[1] <= HEADER_BYTES or bool((sizes[1:] != sizes[1]).any()):
                self._rows = None
            else:
                found = np.frombuffer(self.data, np.uint8, -1, int(sizes[0]))
                self._rows = found.reshape(len(sizes) - 1, int(sizes[1]))
        return self._rows

    @property
    def headers(self) -> npt.NDArray[Any]:
        """Structured array of dtype HEADER, shape (n,)."""
        if self._headers is None:
            self._headers = self._gather_headers()
        return self._headers

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return one field of all headers, shape (n,), in the processor's byte order.

        Converted once: a field in the file's byte order is converted again by each operation on it, which was a fifth
        of a read's CPU.
        """
        columns = self._columns
        if columns is None:
            columns = self._columns = {}
        found = columns.get(name)
        if found is None:
            field = self.headers[name]
            found = columns[name] = field.astype(field.dtype.newbyteorder("="))
        return found

    def _gather_headers(self) -> npt.NDArray[Any]:
        rows = self._equal_rows()
        if rows is not None:
            headers = np.empty((self.count, HEADER_BYTES), np.uint8)
            headers[0] = np.frombuffer(self.data, np.uint8, HEADER_BYTES)
            headers[1:] = rows[:, :HEADER_BYTES]
            return headers.view(HEADER)[:, 0]
        lengths = np.full(self.count, HEADER_BYTES, np.int64)
        return np.frombuffer(slices_of([self.data], lengths, 0, self.starts), HEADER)

    @property
    def bodies(self) -> memoryview:
        """The concatenated bodies of all records."""
        if self._bodies is None:
            self._bodies = self._gather_bodies()
        return self._bodies

    def _gather_bodies(self) -> memoryview:
        rows = self._equal_rows()
        if rows is not None:
            bodies, others = self._body_memory(rows)
            others[:] = rows[:, HEADER_BYTES:]
            return bodies.data
        return slices_of([self.data], self.sizes.astype(np.int64) - HEADER_BYTES, 0, self.starts + HEADER_BYTES)

    def _body_memory(self, rows: _U8) -> tuple[_U8, _U8]:
        """Return memory for all bodies, filled with the first one, and its part for the bodies of ``rows``."""
        first = int(self.sizes[0]) - HEADER_BYTES
        bodies = np.empty(self.nbytes - HEADER_BYTES * self.count, np.uint8)
        bodies[:first] = np.frombuffer(self.data, np.uint8, first, HEADER_BYTES)
        return bodies, bodies[first:].reshape(len(rows), -1)

    def slice(self, start: int, stop: int) -> Records:
        """Return records ``start`` to ``stop`` (counted from 0), sharing memory."""
        if start == 0 and stop == self.count:
            return self
        begin = int(self.starts[start]) if start < self.count else self.nbytes
        end = int(self.starts[stop]) if stop < self.count else self.nbytes
        return Records(self.sizes[start:stop], memoryview(self.data)[begin:end])

    def few(self) -> list[Header]:
        """Return all headers, which are few; ``headers`` has many of them as columns."""
        found, at = [], 0
        for size in self.sizes.tolist():
            found.append(Header.unpack(self.data, at))
            at += size
        return found

    def have_term(self, term: int) -> bool:
        """Whether all records have this term."""
        if self.count <= checksum.FEW:
            return all(header.term == term for header in self.few())
        return bool((self.headers["term"] == term).all())

    def check(self, first_index: int, *, body_crc: bool = True, gather: bool = False) -> None:
        """Check that the bytes are complete records with contiguous indexes from ``first_index``.

        Args:
            first_index: the index the first record must have.
            body_crc: check each body against its CRC too; one that is not ``verifiable`` passes.
            gather: ``bodies`` will be read next: gather them in the same pass where that saves one.

        Raises:
            CorruptRecordError: with the index of the first record that is wrong.
        """
        total, smallest = total_and_smallest(self.sizes)
        if total != self.nbytes or (self.count and smallest < HEADER_BYTES):
            raise CorruptRecordError("record sizes do not add up", "", "", {"index": first_index})
        if not self.count:
            return
        is_few = self.count <= checksum.FEW
        wrong = self._first_bad_of_few(first_index) if is_few else self._first_bad_header(first_index)
        reason = "the record's header is damaged"
        if wrong is None and body_crc:
            wrong, reason = self.first_bad_body(gather=gather), "the body does not match its CRC"
        if not gather:
            self._columns = None  # a follower keeps its batches in memory, and reads no columns of them again
        if wrong is not None:
            at = f"index {first_index + wrong}"
            raise CorruptRecordError(reason, at, "", {"index": first_index + wrong})

    def _first_bad_header(self, first_index: int) -> int | None:
        terms = self.column("term")
        good = self.well_formed() & _in_range(self.column("position"))
        good &= self.column("index") == np.arange(first_index, first_index + self.count)
        good[1:] &= terms[1:] >= terms[:-1]
        return None if bool(good.all()) else int(np.argmin(good))

    def _first_bad_of_few(self, first_index: int) -> int | None:
        term: int = NO_TERM
        for row, (header, size) in enumerate(zip(self.few(), self.sizes.tolist(), strict=True)):
            fits = header.is_well_formed and header.size == size and 0 <= header.position <= NUMBER_MAX
            if not fits or header.index != first_index + row or header.term < term:
                return row
            term = header.term
        return None

    def well_formed(self) -> npt.NDArray[np.bool_]:
        """Return which headers have values that a record can have; ``Header.is_well_formed`` for all of them."""
        sizes, magic = self.sizes.astype(np.int64), self.column("magic")
        found: npt.NDArray[np.bool_] = (
            (self.column("size") == sizes)
            & (self.column("length") == sizes - HEADER_BYTES)
            & (magic >= MAGIC_DATA)
            & (magic <= MAGIC_MEMBERSHIP)
            & _in_range(self.column("index"))
            & _in_range(self.column("term"))
        )
        return found

    def verifiable(self) -> npt.NDArray[np.bool_]:
        """Return which bodies have a CRC. A CRC of 0 in a record without flags means that Java wrote none."""
        found: npt.NDArray[np.bool_] = (self.column("flags") != 0) | (self.column("crc") != 0)
        return found

    def body_crcs(self) -> _U32:
        """Return the CRC-32 of each body, of checked records; computed for those whose record has none."""
        crcs = self.column("crc")
        if self.verifiable().all():
            return crcs
        return checksum.crc32_column(self.bodies, self.column("length").astype(np.int64))

    def first_bad_body(self, *, gather: bool = False) -> int | None:
        """Return the row of the first body that does not match its CRC, or None."""
        crcs = self.column("crc")
        verifiable = self.verifiable()
        if not verifiable.all():
            wrong = self.bad_bodies()
            return int(wrong[0]) if len(wrong) else None
        rows = self._equal_rows()
        if rows is not None:
            bodies, others = self._body_memory(rows) if gather else (None, None)
            first = checksum.crc32(memoryview(self.data)[HEADER_BYTES : int(self.sizes[0])])
            if first == crcs[0] and checksum.match(rows[:, HEADER_BYTES:], crcs[1:], others):
                if bodies is not None:
                    self._bodies = bodies.data
                return None
        return checksum.first_mismatch(self.bodies, self.column("length").astype(np.int64), crcs)

    def bad_bodies(self) -> npt.NDArray[np.int64]:
        """Return the rows of all bodies that do not match their CRC."""
        verifiable = self.verifiable()
        if not verifiable.any():
            return np.empty(0, np.int64)
        actual = checksum.crc32_column(self.bodies, self.column("length").astype(np.int64))
        return np.flatnonzero((actual != self.column("crc")) & verifiable)


def records_of(batch: Batch) -> Records:
    """Return the encoded records of a placed batch."""
    records = batch.payload
    invariant(isinstance(records, Records), "a batch has no records", index=batch.first_index)
    assert isinstance(records, Records)
    return records


def index_records(records: Records) -> npt.NDArray[Any]:
    """Return the index file's records (dtype INDEX_RECORD) of ``records``."""
    headers = records.headers
    out = np.empty(records.count, INDEX_RECORD)
    for name in ("magic", "position", "size", "index", "term"):
        out[name] = headers[name]
    return out


def index_rows(records: Records) -> Buffer:
    """Return the bytes of the index file's records of ``records``."""
    if records.count <= checksum.FEW:
        return b"".join([pack_index_record(h.magic, h.position, h.size, h.index, h.term) for h in records.few()])
    return index_records(records).view(np.uint8).data


def slices_of(buffers: Sequence[Any], lengths: _I64, which: Any, starts: _I64) -> memoryview:
    """Return the concatenation of the slices ``buffers[which[i]][starts[i]:starts[i] + lengths[i]]``.

    One pass in C, except for a few: the slices become an Arrow ``binary_view`` that is cast to ``binary``. The caller
    has checked that every slice is inside its buffer; Arrow trusts the views.

    Args:
        buffers: bytes-like objects, each below 2 GiB.
        lengths: int64, shape (n,).
        which: index into ``buffers``, an int for all or shape (n,).
        starts: int64, shape (n,).
    """
    n = len(lengths)
    if n <= checksum.FEW:
        return _joined(buffers, lengths, which, starts)
    views = np.zeros((n, 4), np.int32)
    views[:, 0] = lengths
    views[:, 2] = which
    views[:, 3] = starts
    short = np.flatnonzero(lengths <= _INLINE_BYTES)
    if len(short):
        _inline(views, short, buffers, which, starts)
    arrow = [pa.py_buffer(b) for b in buffers]
    array = pa.Array.from_buffers(pa.binary_view(), n, [None, pa.py_buffer(views), *arrow])
    data = array.cast(pa.large_binary()).buffers()[2]
    return memoryview(data)[: int(lengths.sum())] if data is not None else memoryview(b"")


def _joined(buffers: Sequence[Any], lengths: _I64, which: Any, starts: _I64) -> memoryview:
    views = [memoryview(buffer) for buffer in buffers]
    of = which.tolist() if isinstance(which, np.ndarray) else [int(which)] * len(lengths)
    slices = zip(of, starts.tolist(), (starts + lengths).tolist(), strict=True)
    return memoryview(b"".join([views[number][start:end] for number, start, end in slices]))


def _inline(views: Any, short: Any, buffers: Sequence[Any], which: Any, starts: _I64) -> None:
    """Put slices of up to 12 bytes into the views, as Arrow's layout requires."""
    inside = views.view(np.uint8).reshape(len(views), 16)
    for number, buffer in enumerate(buffers):
        rows = short if np.isscalar(which) else short[np.asarray(which)[short] == number]
        if np.isscalar(which) and which != number:
            continue
        source = np.frombuffer(buffer, np.uint8)
        if not len(rows) or not len(source):
            continue
        columns = np.arange(_INLINE_BYTES)
        offsets = np.minimum(starts[rows, None] + columns, len(source) - 1)
        keep = columns < views[rows, 0][:, None]
        inside[rows, 4:] = np.where(keep, source[offsets], 0)

"""Entries as columns, and their records as they lie on disk and travel between nodes.

A record is DLedger's (generation B), all integers big-endian, with the fields Java leaves 0 put to use::

    offset  0   4   magic      1 data, 2 control, 3 membership, -1 BLANK (rest of a segment)
            4   4   size       48 + body length
            8   8   index
           16   8   term
           24   8   position   byte offset of this record in the group's data files
           32   8   mark       bit 48 = last entry of its batch, bits 47-0 = append time in ms
           40   4   crc        CRC-32 of the body
           44   4   length     body length
           48   n   body

``Columns`` is what a producer sends (lengths, CRCs, bodies); ``Records`` is a run of encoded records plus their
sizes; ``encode`` makes one from the other and ``to_arrow`` makes what readers get. No function here loops over
entries in Python, except ``encode`` for a handful of them, where numpy's fixed cost would be higher.

The module is pure: no I/O, no clock. All functions are thread-safe.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core import checksum
from dledger_core.checksum import Buffer
from dledger_core.errors import BadRequestError, CorruptRecordError
from dledger_core.ids import Index, Position, Term

__all__ = [
    "BATCH_END",
    "HEADER",
    "HEADER_BYTES",
    "INDEX_RECORD",
    "INDEX_RECORD_BYTES",
    "MAGIC_BLANK",
    "MAGIC_CONTROL",
    "MAGIC_DATA",
    "MAGIC_MEMBERSHIP",
    "READ_SCHEMA",
    "RECORD_SCHEMA",
    "TIME_MASK",
    "Columns",
    "Payload",
    "Records",
    "encode",
    "index_records",
    "place",
    "slices_of",
    "to_arrow",
]

MAGIC_BLANK: Final = -1
MAGIC_DATA: Final = 1
MAGIC_CONTROL: Final = 2
MAGIC_MEMBERSHIP: Final = 3
HEADER_BYTES: Final = 48
INDEX_RECORD_BYTES: Final = 32
BATCH_END: Final = 1 << 48
TIME_MASK: Final = (1 << 48) - 1

HEADER: Final = np.dtype(
    [
        ("magic", ">i4"),
        ("size", ">i4"),
        ("index", ">i8"),
        ("term", ">i8"),
        ("position", ">i8"),
        ("mark", ">u8"),
        ("crc", ">u4"),
        ("length", ">i4"),
    ]
)
INDEX_RECORD: Final = np.dtype(
    [("magic", ">i4"), ("position", ">i8"), ("size", ">i4"), ("index", ">i8"), ("term", ">i8")]
)
READ_SCHEMA: Final = pa.schema(
    [
        ("index", pa.int64()),
        ("term", pa.int64()),
        ("position", pa.int64()),
        ("timestamp", pa.timestamp("us", tz="UTC")),
        ("body", pa.binary()),
    ]
)
RECORD_SCHEMA: Final = READ_SCHEMA.append(pa.field("magic", pa.int32()))

_STRUCT = struct.Struct(">iiqqqQIi")
_SCALAR_COUNT_MAX = 12
_INLINE_BYTES = 12

_I64 = npt.NDArray[np.int64]
_U32 = npt.NDArray[np.uint32]


@dataclass(frozen=True, slots=True)
class Columns:
    """Bodies of consecutive entries, as a producer makes and sends them.

    Attributes:
        lengths: uint32, shape (n,): bytes of each body.
        crcs: uint32, shape (n,): CRC-32 of each body, computed by the producer.
        bodies: the concatenated bodies; ``sum(lengths)`` bytes.
    """

    lengths: _U32
    crcs: _U32
    bodies: Buffer

    @property
    def count(self) -> int:
        """Number of entries."""
        return len(self.lengths)

    @property
    def record_bytes(self) -> int:
        """Bytes of the encoded records, without a BLANK."""
        return len(self.bodies) + HEADER_BYTES * self.count

    @classmethod
    def empty(cls) -> Columns:
        """Returns columns without entries."""
        return cls(np.empty(0, np.uint32), np.empty(0, np.uint32), b"")

    @classmethod
    def from_bodies(cls, bodies: Sequence[Buffer] | pa.Array | pa.ChunkedArray) -> Columns:
        """Makes columns and computes the CRCs.

        Args:
            bodies: a sequence of bytes, or an Arrow binary, large_binary, string or large_string array.

        Raises:
            BadRequestError: a body is null or not bytes.
        """
        if isinstance(bodies, (pa.Array, pa.ChunkedArray)):
            return cls._from_arrow(bodies)
        try:
            blob = b"".join(bodies)
            lengths = np.fromiter(map(len, bodies), np.uint32, len(bodies))
            return cls(lengths, checksum.crc32_list(bodies), blob)
        except TypeError as error:
            raise BadRequestError(f"a body is not bytes: {error}", "bodies", "pass bytes") from None

    @classmethod
    def _from_arrow(cls, array: pa.Array | pa.ChunkedArray) -> Columns:
        if isinstance(array, pa.ChunkedArray):
            array = array.combine_chunks()
        if array.null_count:
            first = int(np.flatnonzero(np.asarray(array.is_null()))[0])
            raise BadRequestError("a body is null", f"row {first}", "drop or fill null bodies")
        try:
            array = array.cast(pa.large_binary())
        except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
            raise BadRequestError(
                f"bodies of Arrow type {array.type} cannot be appended", "bodies", "use binary"
            ) from None
        if not len(array):
            return cls.empty()
        _, offset_buffer, data = array.buffers()
        offsets = np.frombuffer(offset_buffer, np.int64, len(array) + 1, array.offset * 8)
        lengths = np.diff(offsets).astype(np.uint32)
        blob = memoryview(data)[int(offsets[0]) : int(offsets[-1])] if data else memoryview(b"")
        return cls(lengths, checksum.crc32_column(blob, lengths), blob)

    def verify(self) -> None:
        """Raises CorruptRecordError if a body does not match its CRC."""
        wrong = checksum.first_mismatch(self.bodies, self.lengths, self.crcs)
        if wrong is not None:
            raise CorruptRecordError("a body does not match its CRC", f"entry {wrong} of the batch", "send it again")


class Payload:
    """Content of one batch while it passes through the core: proposed columns, then placed records.

    A leader's own batch starts as columns (plus a control entry) and gets its records when the log places it;
    a batch from the network or the disk starts with records. Set once, by the log's ``stage``.

    Attributes:
        columns: the data entries, or None for a batch that came as records.
        control: body of the leading control entry, or None.
        magic: magic of the control entry.
        records: the encoded batch once it has an index, a term and a position.
    """

    __slots__ = ("columns", "control", "magic", "records")

    def __init__(
        self,
        columns: Columns | None = None,
        *,
        control: bytes | None = None,
        magic: int = MAGIC_CONTROL,
        records: Records | None = None,
    ) -> None:
        self.columns = columns
        self.control = control
        self.magic = magic
        self.records = records

    @property
    def count(self) -> int:
        """Number of entries, the control entry included."""
        if self.records is not None:
            return self.records.count
        data = self.columns.count if self.columns is not None else 0
        return data + (self.control is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the records."""
        if self.records is not None:
            return self.records.nbytes
        data = self.columns.record_bytes if self.columns is not None else 0
        return data + (HEADER_BYTES + len(self.control) if self.control is not None else 0)


def slices_of(buffers: Sequence[Any], lengths: _I64, which: Any, starts: _I64) -> memoryview:
    """Returns the concatenation of pieces ``buffers[which[i]][starts[i]:starts[i] + lengths[i]]``.

    One pass in C: the pieces become an Arrow ``binary_view`` that is cast to ``binary``. The caller has checked
    that every piece lies inside its buffer; Arrow trusts the views.

    Args:
        buffers: bytes-like objects, each below 2 GiB.
        lengths: int64, shape (n,).
        which: index into ``buffers``, an int for all or shape (n,).
        starts: int64, shape (n,).
    """
    n = len(lengths)
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


def _inline(views: Any, short: Any, buffers: Sequence[Any], which: Any, starts: _I64) -> None:
    """Puts pieces of up to 12 bytes into the views themselves, as Arrow's layout demands."""
    inside = views.view(np.uint8).reshape(len(views), 16)
    for number, buffer in enumerate(buffers):
        rows = short if np.isscalar(which) else short[np.asarray(which)[short] == number]
        if np.isscalar(which) and which != number:
            continue
        source = np.frombuffer(buffer, np.uint8)
        if not len(rows) or not len(source):
            continue
        columns = np.arange(_INLINE_BYTES)
        places = np.minimum(starts[rows, None] + columns, len(source) - 1)
        keep = columns < views[rows, 0][:, None]
        inside[rows, 4:] = np.where(keep, source[places], 0)


def place(sizes: npt.NDArray[Any], position: int, segment_bytes: int) -> _I64:
    """Returns the position of each record when they are laid from ``position`` on.

    DLedger's rule: a record goes to the next segment unless at least 8 bytes (a BLANK) remain behind it.

    Args:
        sizes: shape (n,), bytes of each record; each at most ``segment_bytes - 8``.
        position: where the first record may begin.
        segment_bytes: size of a data file.
    """
    sizes64 = sizes.astype(np.int64)
    positions = np.empty(len(sizes64), np.int64)
    ends = np.cumsum(sizes64)
    done, base = 0, position
    while done < len(sizes64):
        before = int(ends[done - 1]) if done else 0
        limit = base - base % segment_bytes + segment_bytes - 8
        stop = int(np.searchsorted(ends, limit - base + before, side="right"))
        positions[done:stop] = ends[done:stop] - sizes64[done:stop] - before + base
        done = max(done, stop)
        base = limit + 8
    return positions


@dataclass(frozen=True)
class Records:
    """A run of encoded records, BLANKs left out.

    Attributes:
        sizes: uint32, shape (n,): bytes of each record.
        data: the concatenated records; ``sum(sizes)`` bytes.

    Whoever makes one from foreign bytes calls ``check`` before anything else.
    """

    sizes: _U32
    data: Buffer

    @property
    def count(self) -> int:
        """Number of records."""
        return len(self.sizes)

    @property
    def nbytes(self) -> int:
        """Bytes of the records."""
        return len(self.data)

    @cached_property
    def starts(self) -> _I64:
        """int64, shape (n,): where each record begins in ``data``."""
        starts = np.zeros(len(self.sizes), np.int64)
        np.cumsum(self.sizes[:-1], out=starts[1:])
        return starts

    @cached_property
    def headers(self) -> npt.NDArray[Any]:
        """Structured array of dtype HEADER, shape (n,)."""
        lengths = np.full(self.count, HEADER_BYTES, np.int64)
        return np.frombuffer(slices_of([self.data], lengths, 0, self.starts), HEADER)

    @cached_property
    def bodies(self) -> memoryview:
        """The concatenated bodies of all records."""
        return slices_of([self.data], self.sizes.astype(np.int64) - HEADER_BYTES, 0, self.starts + HEADER_BYTES)

    def slice(self, start: int, stop: int) -> Records:
        """Returns records ``start`` to ``stop`` (counted from 0 in this run), sharing memory."""
        if start == 0 and stop == self.count:
            return self
        begin = int(self.starts[start]) if start < self.count else self.nbytes
        end = int(self.starts[stop]) if stop < self.count else self.nbytes
        return Records(self.sizes[start:stop], memoryview(self.data)[begin:end])

    def check(self, first_index: int, *, body_crc: bool = True) -> None:
        """Checks that the bytes are whole records with contiguous indexes from ``first_index``.

        Args:
            first_index: the index the first record must have.
            body_crc: check each body against its CRC too; a CRC of 0 in a record whose mark is 0 (written by
                Java) means "not verifiable" and passes.

        Raises:
            CorruptRecordError: with the index of the first record that is wrong.
        """
        sizes = self.sizes.astype(np.int64)
        if bool((sizes < HEADER_BYTES).any()) or int(sizes.sum()) != self.nbytes:
            raise CorruptRecordError("record sizes do not add up", "", "", {"index": first_index})
        if not self.count:
            return
        headers = self.headers
        good = (
            (headers["index"] == np.arange(first_index, first_index + self.count))
            & (headers["size"] == sizes)
            & (headers["length"] == sizes - HEADER_BYTES)
            & (headers["magic"] >= MAGIC_DATA)
            & (headers["magic"] <= MAGIC_MEMBERSHIP)
            & (headers["position"] >= 0)
        )
        good[1:] &= headers["term"][1:] >= headers["term"][:-1]
        wrong = None if bool(good.all()) else int(np.argmin(good))
        reason = "the record's header is damaged"
        if wrong is None and body_crc:
            wrong, reason = self.first_bad_body(), "the body does not match its CRC"
        if wrong is not None:
            at = f"index {first_index + wrong}"
            raise CorruptRecordError(reason, at, "", {"index": first_index + wrong})

    def first_bad_body(self) -> int | None:
        """Returns the place in this run of the first body that does not match its CRC, or None.

        A CRC of 0 in a record whose mark is 0 (written by Java) means "not verifiable" and passes.
        """
        headers = self.headers
        crcs = headers["crc"].astype(np.uint32)
        lengths = headers["length"].astype(np.int64)
        foreign = (headers["mark"] == 0) & (crcs == 0)
        if not foreign.any():
            return checksum.first_mismatch(self.bodies, lengths, crcs)
        actual = checksum.crc32_column(self.bodies, lengths)
        wrong = np.flatnonzero((actual != crcs) & ~foreign)
        return int(wrong[0]) if len(wrong) else None


def encode(
    columns: Columns,
    *,
    first_index: Index | int,
    term: Term | int,
    position: Position | int,
    timestamp_ms: int,
    segment_bytes: int,
    control: bytes | None = None,
    magic: int = MAGIC_CONTROL,
) -> Records:
    """Encodes one batch: an optional control entry, then the data entries.

    Args:
        columns: the data entries; may be empty if there is a control entry.
        first_index: index of the batch's first entry.
        term: term of all its entries.
        position: end of the log; the first record may land in the next segment.
        timestamp_ms: append time, ms since the epoch.
        segment_bytes: size of a data file.
        control: body of the control entry that leads the batch, or None.
        magic: MAGIC_CONTROL or MAGIC_MEMBERSHIP, for ``control``.

    Returns:
        The records, the last one marked as the end of its batch.
    """
    if control is None:
        lengths, crcs = columns.lengths, columns.crcs
    else:
        lengths = np.concatenate([np.array([len(control)], np.uint32), columns.lengths])
        crcs = np.concatenate([np.array([checksum.crc32(control)], np.uint32), columns.crcs])
    sizes = lengths + np.uint32(HEADER_BYTES)
    positions = place(sizes, position, segment_bytes)
    fields = (first_index, term, timestamp_ms & TIME_MASK)
    magics = (MAGIC_DATA if control is None else magic), MAGIC_DATA
    if len(lengths) <= _SCALAR_COUNT_MAX:
        return Records(sizes, _encode_few(fields, magics, positions, lengths, crcs, control, columns.bodies))
    return _encode_many(fields, magics, positions, lengths, crcs, control, columns.bodies)


_Fields = tuple[int, int, int]


def _encode_few(
    fields: _Fields,
    magics: tuple[int, int],
    positions: _I64,
    lengths: _U32,
    crcs: _U32,
    control: bytes | None,
    bodies: Buffer,
) -> bytes:
    first_index, term, mark = fields
    pieces: list[Buffer] = []
    view, start, last = memoryview(bodies), 0, len(lengths) - 1
    for i, (at, length, crc) in enumerate(zip(positions.tolist(), lengths.tolist(), crcs.tolist(), strict=True)):
        marked = mark | BATCH_END if i == last else mark
        magic = magics[0 if i == 0 else 1]
        pieces.append(_STRUCT.pack(magic, length + 48, first_index + i, term, at, marked, crc, length))
        if i == 0 and control is not None:
            pieces.append(control)
        else:
            pieces.append(view[start : start + length])
            start += length
    return b"".join(pieces)


def _encode_many(
    fields: _Fields,
    magics: tuple[int, int],
    positions: _I64,
    lengths: _U32,
    crcs: _U32,
    control: bytes | None,
    bodies: Buffer,
) -> Records:
    first_index, term, mark = fields
    n = len(lengths)
    headers = np.empty(n, HEADER)
    headers["magic"] = magics[1]
    headers["magic"][0] = magics[0]
    headers["size"] = lengths + np.uint32(HEADER_BYTES)
    headers["index"] = np.arange(first_index, first_index + n)
    headers["term"] = term
    headers["position"] = positions
    headers["mark"] = mark
    headers["mark"][-1] = mark | BATCH_END
    headers["crc"] = crcs
    headers["length"] = lengths
    pieces = np.empty(2 * n, np.int64)
    pieces[0::2] = HEADER_BYTES
    pieces[1::2] = lengths
    which = np.empty(2 * n, np.int32)
    which[0::2], which[1::2] = 0, 1
    starts = np.empty(2 * n, np.int64)
    starts[0::2] = np.arange(0, HEADER_BYTES * n, HEADER_BYTES)
    ends = np.cumsum(lengths, dtype=np.int64)
    starts[1::2] = ends - lengths
    buffers: list[Any] = [headers.view(np.uint8), bodies]
    if control is not None:
        starts[3::2] -= lengths[0]
        which[1], starts[1] = 2, 0
        buffers.append(control)
    records = Records(lengths + np.uint32(HEADER_BYTES), slices_of(buffers, pieces, which, starts))
    vars(records)["headers"] = headers  # the cached property, known here and needed by whoever writes the index
    return records


def index_records(records: Records) -> npt.NDArray[Any]:
    """Returns the index file's records (dtype INDEX_RECORD) of ``records``."""
    headers = records.headers
    out = np.empty(records.count, INDEX_RECORD)
    for name in ("magic", "position", "size", "index", "term"):
        out[name] = headers[name]
    return out


def to_arrow(records: Records, keep: npt.NDArray[np.bool_] | None = None, *, magic: bool = False) -> pa.RecordBatch:
    """Returns checked records as a RecordBatch of READ_SCHEMA, or RECORD_SCHEMA with ``magic``.

    Args:
        records: checked records.
        keep: bool, shape (n,): which of them; None = all.
        magic: add the column ``magic``.
    """
    headers, starts = records.headers, records.starts
    if keep is not None and not bool(keep.all()):
        headers, starts = headers[keep], starts[keep]
    lengths = headers["length"].astype(np.int64)
    blob = slices_of([records.data], lengths, 0, starts + HEADER_BYTES)
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    body = pa.Array.from_buffers(pa.binary(), len(lengths), [None, pa.py_buffer(offsets), pa.py_buffer(blob)])
    millis = (headers["mark"] & np.uint64(TIME_MASK)).astype(np.int64)
    timestamp = pa.array(millis * 1000, pa.int64(), mask=millis == 0)
    arrays = [
        pa.array(headers["index"].astype(np.int64)),
        pa.array(headers["term"].astype(np.int64)),
        pa.array(headers["position"].astype(np.int64)),
        pc.cast(timestamp, pa.timestamp("us", tz="UTC")),
        body,
    ]
    if magic:
        arrays.append(pa.array(headers["magic"].astype(np.int32)))
    return pa.RecordBatch.from_arrays(arrays, schema=RECORD_SCHEMA if magic else READ_SCHEMA)

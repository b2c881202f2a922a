"""Bodies of consecutive entries as a producer sends them, and the batch that a leader proposes with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core import checksum
from dledger_core.checksum import Buffer
from dledger_core.errors import BadRequestError, CorruptRecordError, invariant
from dledger_core.record.layout import HEADER_BYTES, MAGIC_CONTROL, MAGIC_MEMBERSHIP

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
        """Return columns without entries."""
        return cls(np.empty(0, np.uint32), np.empty(0, np.uint32), b"")

    @classmethod
    def of_body(cls, body: bytes) -> Columns:
        """Return columns with one entry."""
        return cls(np.array([len(body)], np.uint32), np.array([checksum.crc32(body)], np.uint32), body)

    @classmethod
    def join(cls, parts: Sequence[Columns]) -> Columns:
        """Return the entries of all parts in order; at least one part. A single one is returned as it is."""
        if len(parts) == 1:
            return parts[0]
        return cls(
            np.concatenate([part.lengths for part in parts]),
            np.concatenate([part.crcs for part in parts]),
            b"".join(part.bodies for part in parts),
        )

    def split(self, counts: Sequence[int]) -> list[Columns]:
        """Return these entries in parts of these sizes, which share their memory; the sizes add up to ``count``."""
        ends = np.cumsum(counts)
        rows = ends.tolist()
        places = np.concatenate([[0], np.cumsum(self.lengths, dtype=np.int64)])[np.concatenate([[0], ends])].tolist()
        view, found, first = memoryview(self.bodies), [], 0
        for part, end in enumerate(rows):
            bodies = view[places[part] : places[part + 1]]
            found.append(Columns(self.lengths[first:end], self.crcs[first:end], bodies))
            first = end
        return found

    @classmethod
    def from_bodies(cls, bodies: Sequence[Buffer] | pa.Array | pa.ChunkedArray) -> Columns:
        """Make columns and computes the CRCs.

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
        """Raise CorruptRecordError if a body does not match its CRC."""
        wrong = checksum.first_mismatch(self.bodies, self.lengths, self.crcs)
        if wrong is not None:
            raise CorruptRecordError("a body does not match its CRC", f"entry {wrong} of the batch", "send it again")


@dataclass(frozen=True, slots=True)
class ProposedBatch:
    """A batch before it has an index, a term and a position (``raft.Proposal``); ``CommitLog.place`` encodes it.

    Attributes:
        columns: the data entries; empty if there is only a control entry.
        control: body of the leading control entry, or None.
        configuration: body of a configuration entry, which is alone in its batch, or None.
        control_rows: rows of ``columns`` that are control entries: of several appends, each before its data entries.
    """

    columns: Columns = field(default_factory=Columns.empty)
    control: bytes | None = None
    configuration: bytes | None = None
    control_rows: tuple[int, ...] = ()

    @classmethod
    def join(cls, parts: Sequence[ProposedBatch]) -> ProposedBatch:
        """Return one batch of all parts, of which none is a configuration; those with a control entry come first."""
        if len(parts) == 1:
            return parts[0]
        columns: list[Columns] = []
        rows: list[int] = []
        at = 0
        for part in parts:
            if part.control is not None:
                rows.append(at)
                columns.append(Columns.of_body(part.control))
            columns.append(part.columns)
            at += part.count
        return cls(Columns.join(columns), control_rows=tuple(rows))

    def __post_init__(self) -> None:
        alone = self.control is None and not self.columns.count
        invariant(self.configuration is None or alone, "a configuration entry is not alone in its batch")

    @property
    def has_control(self) -> bool:
        """Whether it contains a control entry."""
        return self.control is not None or bool(self.control_rows)

    @property
    def leading(self) -> bytes | None:
        """Body of the entry before the data entries, or None."""
        return self.control if self.configuration is None else self.configuration

    @property
    def magic(self) -> int:
        """Magic of ``leading``."""
        return MAGIC_CONTROL if self.configuration is None else MAGIC_MEMBERSHIP

    @property
    def count(self) -> int:
        """Number of entries, the leading one included."""
        return self.columns.count + (self.leading is not None)

    @property
    def nbytes(self) -> int:
        """Bytes of the records."""
        leading = HEADER_BYTES + len(self.leading) if self.leading is not None else 0
        return self.columns.record_bytes + leading

    @property
    def largest_body(self) -> int:
        """Bytes of the largest body."""
        lengths = self.columns.lengths
        largest = max(lengths.tolist(), default=0) if len(lengths) <= checksum.FEW else int(lengths.max())
        return max(largest, len(self.leading or b""))

    @property
    def last_body(self) -> int:
        """Bytes of the last body."""
        return int(self.columns.lengths[-1]) if self.columns.count else len(self.leading or b"")

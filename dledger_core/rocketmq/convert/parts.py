"""Chunks of entries in columns, and the two kinds of source that yield them: a classic CommitLog and a store."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core.checksum import Buffer, crc32_column
from dledger_core.errors import CorruptRecordError
from dledger_core.record import BATCH_END, MAGIC_CONTROL, MAGIC_DATA, MAGIC_MEMBERSHIP, Records, slices_of
from dledger_core.rocketmq.convert.messages import QueueCounters, located_in
from dledger_core.rocketmq.message.columns import rows_of
from dledger_core.rocketmq.store.commit_log import CommitLogFile
from dledger_core.rocketmq.store.commit_log_view import CommitLogView
from dledger_core.rocketmq.store.directory import Damaged, Deleted, readable
from dledger_core.storage.read.store_reader import StoreReader

PartName = Literal["commitlog", "log"]
_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SourceCursor:
    """The point of a source at which reading continues.

    Attributes:
        part: which part of the source, counted from 0.
        at: the part's own coordinate: a position in a classic CommitLog, an index in a log.
        number: number of messages of the CommitLog before it; in a log the index.
    """

    part: int = 0
    at: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class LostRange:
    """Entries [start, end) that could not be read, in a copy that has no-ops in their place.

    Attributes:
        start: the first one.
        end: end (exclusive).
        position: of the first one in the source; -1 = unknown.
        path: the file.
        reason: the damage.
    """

    start: int
    end: int
    position: int
    path: str
    reason: str


@dataclass(frozen=True, slots=True)
class Chunk:
    """Consecutive entries of a source; all columns have shape (n,).

    Attributes:
        name: name of their part.
        first: number of the first one: counted from 0 in a CommitLog, the index in a log.
        after: the point at which reading continues.
        magics: int32.
        terms: int64.
        flags: uint64, 0 in records of Java.
        crcs: uint32, CRC-32 of each body.
        positions: int64, of the records, as their writer recorded them.
        lengths: int64, bytes of each body.
        bodies: the concatenated bodies.
        lost: the entries that these replace, as no-ops; None: they were read.
    """

    name: PartName
    first: int
    after: SourceCursor
    magics: npt.NDArray[Any]
    terms: _I64
    flags: npt.NDArray[Any]
    crcs: npt.NDArray[Any]
    positions: _I64
    lengths: _I64
    bodies: Buffer
    lost: LostRange | None = None

    @property
    def count(self) -> int:
        """Number of entries."""
        return len(self.lengths)

    @property
    def starts(self) -> _I64:
        """int64, shape (n,): offset of each body in ``bodies``."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def numbers(self) -> _I64:
        """int64, shape (n,): the entries' numbers."""
        return np.arange(self.first, self.first + self.count, dtype=np.int64)

    def only(self, keep: npt.NDArray[np.bool_]) -> Chunk:
        """Return the entries selected by ``keep``; ``numbers`` does not apply to them."""
        if bool(keep.all()):
            return self
        lengths, starts = self.lengths[keep], self.starts[keep]
        bodies = slices_of([self.bodies], lengths, 0, starts) if len(lengths) else b""
        columns = (self.magics, self.terms, self.flags, self.crcs, self.positions)
        magics, terms, flags, crcs, positions = (column[keep] for column in columns)
        return Chunk(self.name, self.first, self.after, magics, terms, flags, crcs, positions, lengths, bodies)

    def slice(self, start: int, stop: int) -> Chunk:
        """Return entries ``start`` to ``stop``, counted from 0, sharing memory."""
        starts = self.starts
        begin = int(starts[start]) if start < self.count else len(self.bodies)
        end = int(starts[stop]) if stop < self.count else len(self.bodies)
        return Chunk(
            self.name,
            self.first + start,
            self.after,
            self.magics[start:stop],
            self.terms[start:stop],
            self.flags[start:stop],
            self.crcs[start:stop],
            self.positions[start:stop],
            self.lengths[start:stop],
            memoryview(self.bodies)[begin:end],
        )


def chunk_of(records: Records, after: SourceCursor, crcs: npt.NDArray[Any]) -> Chunk:
    """Return checked records of a log as a chunk.

    Args:
        records: at least one.
        after: the point at which reading continues.
        crcs: of their bodies.
    """
    headers = records.headers
    magics = headers["magic"].astype(np.int32)
    # The copy gets members of its own when it is bootstrapped: former ones are history, and must not take effect there.
    magics[magics == MAGIC_MEMBERSHIP] = MAGIC_CONTROL
    return Chunk(
        "log",
        int(headers["index"][0]),
        after,
        magics,
        headers["term"].astype(np.int64),
        headers["flags"].astype(np.uint64),
        crcs,
        headers["position"].astype(np.int64),
        headers["length"].astype(np.int64),
        records.bodies,
    )


_CHUNK_BYTES: Final = 8 << 20
_LOST_ROWS: Final = 1 << 16


class SourcePart(Protocol):
    """A sequence of entries that can be read from any point on."""

    @property
    def name(self) -> PartName:
        """Name of the part."""

    @property
    def begin(self) -> SourceCursor:
        """Its first point; ``part`` is 0."""

    @property
    def data_bytes(self) -> int:
        """Approximate number of bytes to read."""

    def read(self, cursor: SourceCursor) -> Iterator[Chunk]:
        """Yield checked entries from ``cursor`` on.

        Raises:
            CorruptRecordError: an entry is damaged.
        """


@dataclass(frozen=True, slots=True)
class ClassicPart:
    """The messages of a classic CommitLog.

    Attributes:
        files: from ``commit_log_files``.
        closed: a store follows, so the last file too must end with a BLANK: zeros there are lost messages.
    """

    files: tuple[CommitLogFile, ...]
    closed: bool = False
    name: PartName = "commitlog"

    @property
    def begin(self) -> SourceCursor:
        """See ``SourcePart``."""
        return SourceCursor(0, self.files[0].position, 0)

    @property
    def data_bytes(self) -> int:
        """See ``SourcePart``."""
        return sum(file.size for file in self.files)

    def read(self, cursor: SourceCursor) -> Iterator[Chunk]:
        """See ``SourcePart``."""
        view, at = CommitLogView(Path(self.files[0].path).parent, closed=self.closed), cursor
        _, end = view.bounds()
        while at.at < end:
            found = view.read(at.at, end, _CHUNK_BYTES)
            if found.batch.num_rows:
                yield self._chunk(found.batch, at)
            at = SourceCursor(at.part, found.next_position, at.number + found.batch.num_rows)

    def _chunk(self, batch: pa.RecordBatch, at: SourceCursor) -> Chunk:
        rows = rows_of(batch.column("body"))
        bodies = rows.data.data
        positions = np.asarray(batch.column("position"))
        n = len(positions)
        end = int(positions[-1] + rows.lengths[-1])
        return Chunk(
            self.name,
            at.number,
            SourceCursor(at.part, end, at.number + n),
            np.full(n, MAGIC_DATA, np.int32),
            np.zeros(n, np.int64),
            np.zeros(n, np.uint64),
            crc32_column(bodies, rows.lengths),
            positions.astype(np.int64),
            rows.lengths,
            bodies,
        )


@dataclass(frozen=True, slots=True)
class LogPart:
    """The entries of a node's store, of any writer.

    Attributes:
        reader: the opened store.
        salvage: a no-op stands for each entry that is damaged or missing, so that the others keep their indexes.
    """

    reader: StoreReader
    salvage: bool = False
    name: PartName = "log"

    @property
    def begin(self) -> SourceCursor:
        """See ``SourcePart``."""
        first = int(self.reader.first_index)
        return SourceCursor(0, first, first)

    @property
    def data_bytes(self) -> int:
        """See ``SourcePart``."""
        if self.reader.last_index < self.reader.first_index:
            return 0
        return self.reader.position_end - self.reader.position_of(self.reader.first_index)

    def read(self, cursor: SourceCursor) -> Iterator[Chunk]:
        """See ``SourcePart``."""
        at = cursor.at
        for found in readable(self.reader, at, int(self.reader.last_index) + 1):
            match found:
                case Records():
                    at += found.count
                    yield chunk_of(found, SourceCursor(cursor.part, at, at), _crcs(found))
                case Damaged() if self.salvage:
                    before = self._header_before(at)
                    for start in range(at, found.end, _LOST_ROWS):
                        at = min(start + _LOST_ROWS, found.end)
                        yield _lost_chunk(found, start, SourceCursor(cursor.part, at, at), *before)
                case Damaged():
                    raise found.error
                case Deleted():
                    raise CorruptRecordError(
                        "entries were deleted during the conversion",
                        str(self.reader.path),
                        "stop the process that writes there, remove the destination, and convert again",
                        {"index": found.start, "end": found.end},
                    )

    def _header_before(self, index: int) -> tuple[int, int]:
        """Return term and flags of the last readable entry before ``index``; zeros if there is none."""
        for before in range(index - 1, int(self.reader.first_index) - 1, -1):
            with contextlib.suppress(CorruptRecordError):
                header = self.reader.raw(before, before + 1, 1).first
                return header.term, header.flags
        return 0, 0


def _lost_chunk(damaged: Damaged, start: int, after: SourceCursor, term: int, flags: int) -> Chunk:
    """Return no-ops for lost entries, each a batch of its own with term and time of the entry before them."""
    n = after.at - start
    none = np.zeros(n, np.int64)
    marked = np.full(n, flags | BATCH_END if flags else 0, np.uint64)
    terms, magics = np.full(n, term, np.int64), np.full(n, MAGIC_CONTROL, np.int32)
    error = damaged.error
    position = int(error.values.get("position", -1)) if error.values.get("index") == start else -1
    lost = LostRange(start, after.at, position, error.where, error.what)
    return Chunk("log", start, after, magics, terms, marked, none.astype(np.uint32), none, none, b"", lost)


def _crcs(records: Records) -> npt.NDArray[np.uint32]:
    """Return the CRC-32 of each body; reading has checked those that are recorded."""
    headers = records.headers
    recorded = headers["crc"].astype(np.uint32)
    if bool((headers["flags"] != 0).all()):
        return recorded
    return crc32_column(records.bodies, headers["length"].astype(np.int64))


def queues_after(commitlog: ClassicPart | None) -> QueueCounters:
    """Return the next queue offsets after the messages of a CommitLog; all 0 without one.

    Raises:
        CorruptRecordError: a message is damaged.
    """
    counters = QueueCounters()
    for chunk in commitlog.read(commitlog.begin) if commitlog is not None else ():
        located = located_in(chunk.bodies, chunk.starts, chunk.lengths)
        counters.assign(located, np.ones(located.count, np.bool_))
    return counters

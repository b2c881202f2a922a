"""Chunks of entries in columns, and the two kinds of source that yield them: a classic CommitLog and a store."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Literal, Protocol

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import Buffer, crc32_column
from dledger_core.errors import CorruptRecordError
from dledger_core.record import MAGIC_DATA, Records, slices_of
from dledger_core.rocketmq.convert.messages import QueueCounters, located_in
from dledger_core.rocketmq.message.columns import rows_of
from dledger_core.rocketmq.store.commit_log import CommitLogFile, FileStop, fault_text, message_faults
from dledger_core.storage.read.store_reader import StoreReader

PartName = Literal["commitlog", "log"]
_I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where reading a source goes on.

    Attributes:
        part: which part of the source, counted from 0.
        at: the part's own coordinate: a position in a classic CommitLog, an index in a log.
        number: how many messages of the CommitLog lie before; in a log the index.
    """

    part: int = 0
    at: int = 0
    number: int = 0


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive entries of a source; all columns have shape (n,).

    Attributes:
        name: the part they come from.
        first: number of the first one: counted from 0 in a CommitLog, the index in a log.
        after: where reading goes on.
        magics: int32.
        terms: int64.
        marks: uint64, 0 in what Java wrote.
        crcs: uint32, CRC-32 of each body.
        positions: int64: where the writer says that the record lies.
        lengths: int64, bytes of each body.
        bodies: the concatenated bodies.
    """

    name: PartName
    first: int
    after: Cursor
    magics: npt.NDArray[Any]
    terms: _I64
    marks: npt.NDArray[Any]
    crcs: npt.NDArray[Any]
    positions: _I64
    lengths: _I64
    bodies: Buffer

    @property
    def count(self) -> int:
        """Number of entries."""
        return len(self.lengths)

    @property
    def starts(self) -> _I64:
        """int64, shape (n,): where each body begins in ``bodies``."""
        return np.cumsum(self.lengths) - self.lengths

    @property
    def numbers(self) -> _I64:
        """int64, shape (n,): the entries' numbers."""
        return np.arange(self.first, self.first + self.count, dtype=np.int64)

    def only(self, keep: npt.NDArray[np.bool_]) -> Piece:
        """Returns the entries that ``keep`` says; their numbers are the caller's business then."""
        if bool(keep.all()):
            return self
        lengths, starts = self.lengths[keep], self.starts[keep]
        bodies = slices_of([self.bodies], lengths, 0, starts) if len(lengths) else b""
        columns = (self.magics, self.terms, self.marks, self.crcs, self.positions)
        magics, terms, marks, crcs, positions = (column[keep] for column in columns)
        return Piece(self.name, self.first, self.after, magics, terms, marks, crcs, positions, lengths, bodies)

    def slice(self, start: int, stop: int) -> Piece:
        """Returns entries ``start`` to ``stop``, counted from 0, sharing memory."""
        starts = self.starts
        begin = int(starts[start]) if start < self.count else len(self.bodies)
        end = int(starts[stop]) if stop < self.count else len(self.bodies)
        return Piece(
            self.name,
            self.first + start,
            self.after,
            self.magics[start:stop],
            self.terms[start:stop],
            self.marks[start:stop],
            self.crcs[start:stop],
            self.positions[start:stop],
            self.lengths[start:stop],
            memoryview(self.bodies)[begin:end],
        )


def chunk_of(records: Records, after: Cursor, crcs: npt.NDArray[Any]) -> Piece:
    """Returns checked records of a log as a piece.

    Args:
        records: at least one.
        after: where reading goes on.
        crcs: of their bodies.
    """
    headers = records.headers
    return Piece(
        "log",
        int(headers["index"][0]),
        after,
        headers["magic"].astype(np.int32),
        headers["term"].astype(np.int64),
        headers["flags"].astype(np.uint64),
        crcs,
        headers["position"].astype(np.int64),
        headers["length"].astype(np.int64),
        records.bodies,
    )


_CHUNK_BYTES: Final = 8 << 20


class Part(Protocol):
    """A run of entries that can be read from any place on."""

    @property
    def name(self) -> PartName:
        """Which kind it is."""

    @property
    def begin(self) -> Cursor:
        """Where it begins; ``part`` is 0."""

    @property
    def data_bytes(self) -> int:
        """About how many bytes there are to read."""

    def read(self, cursor: Cursor) -> Iterator[Piece]:
        """Yields checked entries from ``cursor`` on.

        Raises:
            CorruptRecordError: something is damaged.
        """


@dataclass(frozen=True, slots=True)
class ClassicPart:
    """The messages of a classic CommitLog.

    Attributes:
        files: from ``commit_log_files``.
        closed: a store follows, so the last file too must end with a BLANK: zeros there are messages that are gone.
    """

    files: tuple[CommitLogFile, ...]
    closed: bool = False
    name: PartName = "commitlog"

    @property
    def begin(self) -> Cursor:
        """See ``Part``."""
        return Cursor(0, self.files[0].position, 0)

    @property
    def data_bytes(self) -> int:
        """See ``Part``."""
        return sum(file.size for file in self.files)

    def read(self, cursor: Cursor) -> Iterator[Piece]:
        """See ``Part``."""
        at = cursor
        for file in self.files:
            if file.end <= at.at:
                continue
            for batch in file.scan(_CHUNK_BYTES):
                if isinstance(batch, FileStop):
                    self._check_stop(file, batch)
                    at = Cursor(at.part, max(at.at, file.end), at.number)
                    continue
                positions = np.asarray(batch.column("position"))
                skip = int(np.searchsorted(positions, at.at))
                if skip < len(positions):
                    piece = self._piece(file, batch.slice(skip), positions[skip:], at)
                    yield piece
                    at = piece.after

    def _piece(self, file: CommitLogFile, batch: Any, positions: npt.NDArray[np.int64], at: Cursor) -> Piece:
        faults = message_faults(batch)
        if faults.any():
            row = int((faults != 0).argmax())
            raise CorruptRecordError(
                f"a message is damaged: {fault_text(faults[row])}",
                file.path,
                "let its broker recover the CommitLog, or restore the file",
                {"position": int(positions[row])},
            )
        rows = rows_of(batch.column("body"))
        bodies = rows.data.data
        n = len(positions)
        end = int(positions[-1] + rows.lengths[-1])
        return Piece(
            self.name,
            at.number,
            Cursor(at.part, end, at.number + n),
            np.full(n, MAGIC_DATA, np.int32),
            np.zeros(n, np.int64),
            np.zeros(n, np.uint64),
            crc32_column(bodies, rows.lengths),
            positions.astype(np.int64),
            rows.lengths,
            bodies,
        )

    def _check_stop(self, file: CommitLogFile, stop: FileStop) -> None:
        open_end = file is self.files[-1] and stop.kind == "end" and not self.closed
        if stop.kind == "blank" or open_end or stop.position == file.end:
            return
        raise CorruptRecordError(
            "no message and no end of file where a message must begin",
            file.path,
            "let its broker recover the CommitLog, or restore the file",
            {"position": stop.position},
        )


@dataclass(frozen=True, slots=True)
class LogPart:
    """The entries of a node's store, whoever wrote it.

    Attributes:
        reader: the opened store.
    """

    reader: StoreReader
    name: PartName = "log"

    @property
    def begin(self) -> Cursor:
        """See ``Part``."""
        first = int(self.reader.first_index)
        return Cursor(0, first, first)

    @property
    def data_bytes(self) -> int:
        """See ``Part``."""
        if self.reader.last_index < self.reader.first_index:
            return 0
        first = self.reader.records(self.reader.first_index, self.reader.first_index + 1, 1)
        return int(self.reader.position_end - int(first.headers["position"][0]))

    def read(self, cursor: Cursor) -> Iterator[Piece]:
        """See ``Part``."""
        at, end = cursor.at, int(self.reader.last_index) + 1
        while at < end:
            records = self.reader.records(at, end, _CHUNK_BYTES)
            at += records.count
            yield chunk_of(records, Cursor(cursor.part, at, at), _crcs(records))


def _crcs(records: Records) -> npt.NDArray[np.uint32]:
    """Returns the CRC-32 of each body; reading has checked those that are recorded."""
    headers = records.headers
    recorded = headers["crc"].astype(np.uint32)
    if bool((headers["flags"] != 0).all()):
        return recorded
    return crc32_column(records.bodies, headers["length"].astype(np.int64))


def queues_behind(commitlog: ClassicPart | None) -> QueueCounters:
    """Returns where queues go on behind the messages of a CommitLog, or of none.

    Raises:
        CorruptRecordError: a message is damaged.
    """
    counters = QueueCounters()
    for piece in commitlog.read(commitlog.begin) if commitlog is not None else ():
        located = located_in(piece.bodies, piece.starts, piece.lengths)
        counters.assign(located, np.ones(located.count, np.bool_))
    return counters

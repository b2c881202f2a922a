"""The two things a source is made of: a classic CommitLog and a log. Both are only read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dledger_core.checksum import crc32_column
from dledger_core.errors import CorruptRecordError
from dledger_core.record import MAGIC_DATA, Records
from dledger_core.rocketmq.convert.chunks import Cursor, PartName, Piece, chunk_of
from dledger_core.rocketmq.convert.messages import QueueCounters, located_in
from dledger_core.rocketmq.message.columns import rows_of
from dledger_core.rocketmq.store.commit_log import CommitLogFile, FileStop, fault_text, message_faults
from dledger_core.storage.read.store_reader import StoreReader

__all__ = ["ClassicPart", "LogPart", "Part", "queues_behind"]

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

"""A classic CommitLog by position: its bytes across files, the messages that lie in a range, and where it ends.

For whoever compares copies of a log. A slave's CommitLog is its master's, byte for byte; so positions mean the same on
all copies, and nothing else numbers what is in it.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dledger_core import checksum
from dledger_core.errors import ConfigError
from dledger_core.rocketmq.columns import join_pieces, rows_of
from dledger_core.rocketmq.commit_log import ClassicFile, classic_files, is_torn, message_batch, stop_kind, walk
from dledger_core.rocketmq.records import locate

__all__ = ["ClassicLog", "wrong_messages"]

_CHUNK_BYTES: Final = 1 << 20
_CRC_MASK: Final = 0x7FFF_FFFF
"""RocketMQ keeps a CRC-32 as a positive int."""


@dataclass(frozen=True, slots=True)
class _Walked:
    """Where a file's messages begin and end, relative to the file, and where they stop making sense, and how."""

    begins: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    stop: int
    kind: str


class ClassicLog:
    """Not thread-safe; opens files for reading only.

    Args:
        directory: RocketMQ's ``commitlog`` folder.

    Attributes:
        files: by position.

    Raises:
        ConfigError: no directory, no such files, empty ones only, or they do not continue each other.
    """

    def __init__(self, directory: Path | str) -> None:
        self.files = tuple(file for file in classic_files(directory) if file.size)
        if not self.files:
            raise ConfigError(
                f"{directory} holds empty files only", "--commitlog", "name RocketMQ's commitlog directory"
            )
        self._maps: dict[int, mmap.mmap] = {}
        self._walked: dict[int, _Walked] = {}

    def file_at(self, position: int) -> ClassicFile:
        """Returns the file that holds a position of the log."""
        return next(file for file in self.files if file.position <= position < file.end)

    def end(self) -> int:
        """Returns the position behind the last message; where the last ones make no sense, behind the last byte set."""
        file = self.files[-1]
        walked = self._walk(file)
        if walked.kind == "blank":
            return file.end
        return file.position + (walked.stop if walked.kind == "end" else _last_set(self._data(file)))

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yields the bytes [start, end) of the log in pieces of at most 1 MiB."""
        for file in self.files:
            low, high = max(start, file.position), min(end, file.end)
            for at in range(low, high, _CHUNK_BYTES):
                yield self._data(file)[at - file.position : min(high, at + _CHUNK_BYTES) - file.position]

    def messages(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yields the messages that have bytes in [start, end), columns ``position`` and ``body``; a batch per file."""
        for file in self.files:
            if file.end <= start or file.position >= end:
                continue
            walked = self._walk(file)
            first = int(np.searchsorted(walked.ends, start - file.position, "right"))
            behind = int(np.searchsorted(walked.begins, end - file.position, "left"))
            if first < behind:
                ends = walked.ends[first:behind].tolist()
                yield message_batch(self._data(file), int(walked.begins[first]), ends, file.position)

    def damage(self, start: int, end: int) -> list[tuple[int, int, str]]:
        """Returns what is damaged in [start, end) as (from, to, why): messages, or bytes that should begin one."""
        found = []
        for batch in self.messages(start, end):
            positions, sizes = np.asarray(batch.column("position")), _sizes(batch)
            for at in np.flatnonzero(wrong_messages(batch)).tolist():
                position = int(positions[at])
                found.append(
                    (position, position + int(sizes[at]), "a message whose CRC, position or lengths are wrong")
                )
        for file in self.files:
            walked = self._walk(file) if file.position < end and file.end > start else None
            if walked is not None and walked.kind == "damaged" and start <= file.position + walked.stop < end:
                at = file.position + walked.stop
                found.append((at, at + 8, "no message begins here, nor the end of a file"))
        return found

    def _data(self, file: ClassicFile) -> mmap.mmap:
        if file.position not in self._maps:
            with Path(file.path).open("rb") as opened:
                self._maps[file.position] = mmap.mmap(opened.fileno(), file.size, access=mmap.ACCESS_READ)
        return self._maps[file.position]

    def _walk(self, file: ClassicFile) -> _Walked:
        if file.position not in self._walked:
            data = self._data(file)
            found = np.array(list(walk(data)), np.int64).reshape(-1, 2)
            ends = found[:, 0] + found[:, 1]
            stop = int(ends[-1]) if len(ends) else 0
            kind = stop_kind(data, stop)
            if file is self.files[-1] and len(ends) and is_torn(data, int(found[-1, 0]), stop):
                stop, kind = int(found[-1, 0]), "end"
                found, ends = found[:-1], ends[:-1]
            self._walked[file.position] = _Walked(found[:, 0], ends, stop, kind)
        return self._walked[file.position]


def _sizes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    offsets = np.frombuffer(batch.column("body").buffers()[1], np.int32, batch.num_rows + 1)
    found: npt.NDArray[np.int64] = offsets[1:].astype(np.int64) - offsets[:-1]
    return found


def _last_set(data: mmap.mmap) -> int:
    """Returns the offset behind the last byte that is not zero."""
    for start in range((len(data) - 1) // _CHUNK_BYTES * _CHUNK_BYTES, -1, -_CHUNK_BYTES):
        piece = data[start : start + _CHUNK_BYTES].rstrip(b"\0")
        if piece:
            return start + len(piece)
    return 0


def wrong_messages(batch: pa.RecordBatch) -> npt.NDArray[np.bool_]:
    """Returns which messages are damaged: wrong lengths, another position than theirs, a body without its CRC.

    Args:
        batch: columns ``position`` and ``body``, as ``read_messages`` gives them; shape (n,).
    """
    located = locate(rows_of(batch.column("body")))
    wrong: npt.NDArray[np.bool_] = located.reasons != 0
    bodies = join_pieces(located.data, located.body, located.body_bytes)
    crcs = checksum.crc32_column(bodies, located.body_bytes) & _CRC_MASK
    positions = np.asarray(batch.column("position"))[located.rows]
    bad = crcs != located.number("body_crc").astype(np.uint32)
    bad |= located.number("physical_offset") != positions
    wrong[located.rows[bad]] = True
    return wrong

"""RocketMQ's classic CommitLog: contiguous message records in files that are named by their first position.

::

    00000000000000000000   message | message | … | BLANK (int length of the rest, int magic) | unused
    00000000001073741824   message | message | … | zeros

Files are read with ``pread`` and never written: they may belong to a running broker, and a process that maps a file
which another one truncates is killed. A file ends with a BLANK record or, the last one, with zeros; anything else where
a record should start is damage. A broker creates the next file in advance and deletes it only at an orderly stop. A
slave receives chunks that split messages, so its log may end inside one: RocketMQ's recovery ends the log there, and so
does this reader. A slave's CommitLog equals its master's byte for byte, so positions mean the same on all copies.

Sizes lead from one record to the next, so finding the records is a loop in Python; it never touches their bytes.
"""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.record import is_segment_name
from dledger_core.rocketmq.message.columns import Rows, rows_of
from dledger_core.rocketmq.message.inspection import MessageInspection
from dledger_core.rocketmq.message.integrity import POSITION, covered, fault_text, faults
from dledger_core.rocketmq.message.layout import BEFORE_HOSTS, MAGIC_V1, MAGIC_V2, PHYSICAL_OFFSET_AT, RECORD_BYTES_MIN
from dledger_core.rocketmq.message.records import locate
from dledger_core.storage.check.coverage import Coverage

BLANK_MAGIC: Final = -875286124
"""0xCBD43194; after the length, unlike in a DLedger file."""

_HEAD: Final = struct.Struct(">ii")
_MAGICS: Final = tuple(magic.to_bytes(4, "big", signed=True) for magic in (MAGIC_V1, MAGIC_V2))
_LIST_ATTEMPTS: Final = 3
_POSITION_MAX: Final = (1 << 63) - 1
_BATCH_BYTES: Final = 8 << 20
_CHUNK_BYTES: Final = 1 << 20
_LOOK_AHEAD_BYTES: Final = 4 << 20
"""Brokers accept messages of up to 4 MiB by default."""
_MAGIC_OFFSET: Final = 4
_PLACE: Final = np.dtype(">i8")


@dataclass(frozen=True, slots=True)
class FileStop:
    """End of the messages of a file, and its reason.

    Attributes:
        position: of the first byte that is not a message.
        kind: ``blank``, ``end`` (zeros, the end of the file, or part of a message and then zeros) or ``damaged``; zeros
            that messages follow are damage.
    """

    position: int
    kind: str


@dataclass(frozen=True, slots=True)
class CommitLogFile:
    """One file.

    Attributes:
        path: the file.
        position: of its first byte.
        size: bytes.
    """

    path: str
    position: int
    size: int

    @property
    def end(self) -> int:
        """Position after its last byte."""
        return self.position + self.size

    def ends_at(self, stop: FileStop, *, is_open: bool) -> bool:
        """Whether no message can be missing after ``stop``, the end of the file's messages.

        Args:
            stop: from ``scan``.
            is_open: the last file of a CommitLog that may grow: only there zeros may follow.
        """
        return stop.kind == "blank" or stop.position == self.end or (is_open and stop.kind == "end")

    def damaged_message(self, position: int, fault: int) -> CorruptRecordError:
        """Return the error for a message with a fault of ``message_faults``."""
        what = f"the message is damaged: {fault_text(fault)}"
        return CorruptRecordError(what, self.path, "compare with a replica", {"position": position})

    def is_unused(self) -> bool:
        """Whether nothing was written to the file so far."""
        with Path(self.path).open("rb") as opened:
            return not any(opened.read(_HEAD.size))

    def scan(self, batch_bytes: int = _BATCH_BYTES, start: int | None = None) -> Iterator[pa.RecordBatch | FileStop]:
        """Yield the file's messages in batches of columns ``position`` and ``body``, then a FileStop.

        Args:
            batch_bytes: about how many bytes of messages a batch contains.
            start: position of a message of the file, or of its end; None = the first one.
        """
        with Path(self.path).open("rb", buffering=0) as opened:
            fd = opened.fileno()
            size = min(self.size, opened.seek(0, os.SEEK_END))
            newest: _Block | None = None  # withheld: its last message may prove to be torn
            at = 0 if start is None else start - self.position
            while (block := _read_block(fd, at, size, batch_bytes)) is not None:
                if newest is not None:
                    yield newest.batch(self.position)
                newest, at = block, block.end
            torn = newest is not None and newest.ends_torn() and _is_zero(fd, at, size)
            if newest is not None and torn:
                newest = newest.without_last()
                at = newest.end
            if newest is not None and newest.ends:
                yield newest.batch(self.position)
            yield FileStop(self.position + at, "end" if torn else _stop_kind(fd, at, size, self.position))

    def has_message(self, position: int) -> bool:
        """Whether a message that has this position starts there."""
        data = self.read(position, position + BEFORE_HOSTS.itemsize)
        return len(data) == BEFORE_HOSTS.itemsize and _is_message(data, 0, position)

    def next_message(self, position: int) -> int:
        """Return the position of the next message after damage that can be found, or the end of the file."""
        with Path(self.path).open("rb", buffering=0) as opened:
            found = _next_message(opened.fileno(), position - self.position, self.size, self.position)
        return self.end if found is None else self.position + found

    def read(self, start: int, end: int) -> bytes:
        """Return the bytes at the positions [start, end), as far as the file contains them."""
        low, high = max(start, self.position), min(end, self.end)
        with Path(self.path).open("rb", buffering=0) as opened:
            return os.pread(opened.fileno(), max(0, high - low), low - self.position)


@dataclass(frozen=True, slots=True)
class _Block:
    """Contiguous messages of a file: their bytes, the offset of the first one, and where each ends in ``data``."""

    data: bytes
    offset: int
    ends: list[int]

    @property
    def end(self) -> int:
        return self.offset + (self.ends[-1] if self.ends else 0)

    def batch(self, position: int) -> pa.RecordBatch:
        return message_batch(self.data, self.ends, position + self.offset)

    def without_last(self) -> _Block:
        return _Block(self.data, self.offset, self.ends[:-1])

    def ends_torn(self) -> bool:
        """Whether the last message may have been written in part: its end is zero and its lengths do not fit."""
        begin, end = (self.ends[-2] if len(self.ends) > 1 else 0), self.ends[-1]
        if self.data[end - 1]:  # the zeros that were not overwritten reach to its end
            return False
        column = np.frombuffer(self.data, np.uint8, end - begin, begin)
        # Lengths after the body fit too: such a message was written completely, even if it is damaged.
        return not locate(Rows(column, np.zeros(1, np.int64), np.array([end - begin]), None)).complete


def _read_block(fd: int, at: int, size: int, batch_bytes: int) -> _Block | None:
    """Return the messages at ``at``, at least one; None if no complete message starts there."""
    data = os.pread(fd, min(max(batch_bytes, _HEAD.size), size - at), at)
    ends = [begin + length for begin, length in scan_records(data)]
    if not ends and len(data) >= _HEAD.size:
        length, magic = _HEAD.unpack_from(data)
        if magic in (MAGIC_V1, MAGIC_V2) and len(data) < length <= size - at:  # larger than a batch
            data, ends = os.pread(fd, length, at), [length]
    return _Block(data, at, ends) if ends and ends[-1] <= len(data) else None


def _stop_kind(fd: int, at: int, size: int, position: int) -> str:
    """Return the kind of the end at an offset of the file at ``position``: see ``FileStop``."""
    head = os.pread(fd, min(_HEAD.size, size - at), at)
    if len(head) < _HEAD.size:
        return "damaged" if any(head) else "end"
    if _HEAD.unpack(head)[1] == BLANK_MAGIC:
        return "blank"
    if not any(head):
        hides = _next_message(fd, at, size, position) is not None
        # A broker may have written a message here meanwhile.
        return "damaged" if hides and not any(os.pread(fd, _HEAD.size, at)) else "end"
    magic = head[4:].rstrip(b"\0")
    begun = len(magic) < len(head[4:]) and any(each.startswith(magic) for each in _MAGICS)
    return "end" if begun and _is_zero(fd, at + len(head), size) else "damaged"


def _next_message(fd: int, at: int, size: int, position: int) -> int | None:
    """Return the offset of the next message after ``at`` that has the position where it is, None if none is near."""
    data = os.pread(fd, min(_LOOK_AHEAD_BYTES, size - at), at)
    found: list[int] = []
    for magic in _MAGICS:
        begin = data.find(magic, _HEAD.size) - _MAGIC_OFFSET
        while 0 <= begin <= len(data) - BEFORE_HOSTS.itemsize:
            if _is_message(data, begin, position + at + begin):
                found.append(at + begin)
                break
            begin = data.find(magic, begin + _MAGIC_OFFSET + 1) - _MAGIC_OFFSET
    return min(found, default=None)


def _is_message(data: bytes, begin: int, position: int) -> bool:
    """Whether the head of a message that has a position is at an offset of ``data``."""
    [head] = np.frombuffer(data, BEFORE_HOSTS, 1, begin)
    magic = data[begin + _MAGIC_OFFSET : begin + _HEAD.size]
    return bool(head["physical_offset"] == position) and magic in _MAGICS


def _is_zero(fd: int, start: int, end: int) -> bool:
    chunks = (os.pread(fd, min(_CHUNK_BYTES, end - at), at) for at in range(start, end, _CHUNK_BYTES))
    return not any(chunk.strip(b"\0") for chunk in chunks)


def commit_log_files(directory: Path | str, *, gaps: bool = False) -> tuple[CommitLogFile, ...]:
    """Return the files of a CommitLog directory, by position, without unused ones at its end.

    A broker may delete its first files meanwhile.

    Args:
        directory: RocketMQ's ``commitlog`` directory.
        gaps: allow missing files between others, and files that are too short.

    Raises:
        ConfigError: not a directory, no such files, a directory among them, a name that is not a position, or they do
            not continue each other.
    """
    for _ in range(_LIST_ATTEMPTS):
        with contextlib.suppress(FileNotFoundError):
            files = _listed(Path(directory))
            if all(before.end == after.position for before, after in pairwise(files)):
                return _used(files)
    files = _listed(Path(directory))
    for before, after in pairwise(files):
        if before.end > after.position or (before.end < after.position and not gaps):
            found = {"ends_at": before.end, "next_starts_at": after.position}
            remedy = "find the file; where storePathCommitLog names several directories, link the files of all into one"
            raise ConfigError("the file does not continue the previous one", after.path, remedy, found)
    return _used(files)


def _used(files: tuple[CommitLogFile, ...]) -> tuple[CommitLogFile, ...]:
    count = len(files)
    while count > 1 and files[count - 1].is_unused():
        count -= 1
    return files[:count]


def _listed(root: Path) -> tuple[CommitLogFile, ...]:
    if not root.is_dir():
        raise ConfigError("not a directory", str(root), "name RocketMQ's commitlog directory")
    named = sorted(path for path in root.iterdir() if is_segment_name(path.name))
    files = tuple(
        CommitLogFile(str(path.absolute()), int(path.name), path.stat().st_size) for path in named if path.is_file()
    )
    if not files:
        raise ConfigError("the directory contains no CommitLog file", str(root), "name RocketMQ's commitlog directory")
    for path in named:
        if path.is_dir():
            raise ConfigError("a directory is named like a CommitLog file", str(path), "move it away")
    if files[-1].end > _POSITION_MAX:
        remedy = "a CommitLog's files are named by the position of their first byte"
        raise ConfigError("the file's name is not a position", files[-1].path, remedy)
    return files


def scan_records(data: Any) -> Iterator[tuple[int, int]]:
    """Yield start and size of the records in ``data``, as long as sizes and magics are possible."""
    at, end = 0, len(data)
    while at + _HEAD.size <= end:
        size, magic = _HEAD.unpack_from(data, at)
        if magic not in (MAGIC_V1, MAGIC_V2) or size < RECORD_BYTES_MIN or at + size > end:
            return
        yield at, size
        at += size


def message_batch(data: bytes, ends: list[int], base: int) -> pa.RecordBatch:
    """Return columns ``position`` and ``body`` of contiguous records, over the same memory.

    Args:
        data: bytes of a file, from the first record on.
        ends: where each record ends.
        base: position of the first byte of ``data``.
    """
    offsets = np.array([0, *ends], np.int64)
    buffers = [None, pa.py_buffer(offsets.astype(np.int32)), pa.py_buffer(memoryview(data)[: ends[-1]])]
    bodies = pa.Array.from_buffers(pa.binary(), len(ends), buffers)
    return pa.RecordBatch.from_pydict({"position": pa.array(offsets[:-1] + base), "body": bodies})


def as_entries(messages: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return messages as entries with the columns of ``schema``: without index, term and append time.

    Args:
        messages: columns ``position`` and ``body``; shape (n,).
        schema: ``READ_SCHEMA`` or ``RECORD_SCHEMA``.
    """
    columns: dict[str, Any] = {field.name: pa.nulls(messages.num_rows, field.type) for field in schema}
    return pa.RecordBatch.from_pydict(columns | {name: messages.column(name) for name in ("position", "body")}, schema)


def misplaced(batch: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    """Return as ``message_faults`` which messages have another position than their own: the file is another one's."""
    rows = rows_of(batch.column("body"))
    at = rows.starts[:, None] + PHYSICAL_OFFSET_AT + np.arange(_PLACE.itemsize)
    wrong = rows.data[at].view(_PLACE)[:, 0] != np.asarray(batch.column("position"))
    return np.where(wrong, np.uint8(POSITION), np.uint8(0))


def message_faults(batch: pa.RecordBatch) -> npt.NDArray[np.uint8]:
    """Return the fault of each message, 0 without one; ``fault_text`` has the meanings.

    Args:
        batch: columns ``position`` and ``body``, as ``CommitLogFile.scan`` yields them; shape (n,).
    """
    located = locate(rows_of(batch.column("body")))
    found = located.reasons.copy()
    found[located.rows] = faults(located, np.asarray(batch.column("position"))[located.rows])
    return found


@dataclass(slots=True)
class CommitLogInspection(MessageInspection):
    """Coverage and remarks of the messages of a CommitLog.

    Attributes:
        opaque: messages are not checked: only sizes and magics, which lead from one to the next, are.
    """

    opaque: bool = False

    def add(self, batch: pa.RecordBatch) -> None:
        """Add good messages: columns ``position`` and ``body``."""
        located = locate(rows_of(batch.column("body")))
        positions = np.asarray(batch.column("position"))[located.rows]
        if self.opaque:
            heads, sizes = _HEAD.size * batch.num_rows, pc.sum(pc.binary_length(batch.column("body")))
            self.coverage += Coverage(0, heads, sizes.as_py() - heads)
            return
        checksums, compared = (int(each.sum()) for each in covered(located, positions))
        self.coverage += Coverage(checksums, compared, int(located.sizes.sum()) - checksums - compared)
        self.see(located, np.asarray(batch.column("position")), None, np.ones(batch.num_rows, np.bool_))


@dataclass(frozen=True, slots=True)
class _Index:
    """Start and end of each message of a file, relative to the file, the end of all, and the end of damage there."""

    starts: npt.NDArray[np.int64]
    ends: npt.NDArray[np.int64]
    stop: FileStop
    resumes: int


class ClassicCommitLog:
    """A CommitLog by position, for callers that compare copies. Not thread-safe; each file is scanned once, on demand.

    Args:
        directory: RocketMQ's ``commitlog`` directory.
        closed: whether a DLedger store follows, so that the last file too must be full.

    Attributes:
        files: by position, without empty ones.

    Raises:
        ConfigError: as ``commit_log_files``, or all files are empty.
    """

    def __init__(self, directory: Path | str, *, closed: bool = False) -> None:
        self._closed = closed
        self.files = tuple(file for file in commit_log_files(directory) if file.size)
        if not self.files:
            raise ConfigError("all files are empty", str(directory), "name RocketMQ's commitlog directory")
        self._indexes: dict[int, _Index] = {}

    def file_at(self, position: int) -> CommitLogFile:
        """Return the file that contains a position of the log."""
        return next(file for file in self.files if file.position <= position < file.end)

    def end(self) -> int:
        """Return the position after the last message; where the end is damaged, after the last byte that is not 0.

        A closed log ends with its last file.
        """
        file = self.files[-1]
        stop = self._index(file).stop
        if self._closed or stop.kind == "blank":
            return file.end
        return stop.position if stop.kind == "end" else file.position + _last_set(file)

    def read(self, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes [start, end) of the log in chunks of at most 1 MiB."""
        for file in self.files:
            low, high = max(start, file.position), min(end, file.end)
            for at in range(low, high, _CHUNK_BYTES):
                yield file.read(at, min(high, at + _CHUNK_BYTES))

    def messages(self, start: int, end: int) -> Iterator[pa.RecordBatch]:
        """Yield the messages that have bytes in [start, end), columns ``position`` and ``body``; a batch per file."""
        for file in self.files:
            if file.end <= start or file.position >= end:
                continue
            index = self._index(file)
            first = int(np.searchsorted(index.ends, start - file.position, "right"))
            stop = int(np.searchsorted(index.starts, end - file.position, "left"))
            if first < stop:
                begin = int(index.starts[first])
                data = file.read(file.position + begin, file.position + int(index.ends[stop - 1]))
                yield message_batch(data, (index.ends[first:stop] - begin).tolist(), file.position + begin)

    def damage(self, start: int, end: int) -> list[tuple[int, int, str]]:
        """Return the damage in [start, end) as (from, to, reason): messages, or bytes where one should start."""
        found = []
        for batch in self.messages(start, end):
            positions, sizes = np.asarray(batch.column("position")), _sizes(batch)
            faults = message_faults(batch)
            for at in np.flatnonzero(faults).tolist():
                position = int(positions[at])
                found.append((position, position + int(sizes[at]), f"the message is damaged: {fault_text(faults[at])}"))
        for file in self.files:
            if file.position >= end or file.end <= start:
                continue
            index = self._index(file)
            if self._is_damage(file, index.stop) and index.stop.position < end:
                found.append((index.stop.position, index.resumes, "no message starts here, nor the end of a file"))
        return found

    def _is_damage(self, file: CommitLogFile, stop: FileStop) -> bool:
        return not file.ends_at(stop, is_open=file is self.files[-1] and not self._closed)

    def _index(self, file: CommitLogFile) -> _Index:
        if file.position not in self._indexes:
            starts, ends, stop = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)], FileStop(file.position, "end")
            for found in file.scan():
                if isinstance(found, FileStop):
                    stop = found
                    continue
                starts.append(np.asarray(found.column("position")) - file.position)
                ends.append(starts[-1] + _sizes(found))
            resumes = file.next_message(stop.position) if self._is_damage(file, stop) else stop.position
            self._indexes[file.position] = _Index(np.concatenate(starts), np.concatenate(ends), stop, resumes)
        return self._indexes[file.position]


def _sizes(batch: pa.RecordBatch) -> npt.NDArray[np.int64]:
    offsets = np.frombuffer(batch.column("body").buffers()[1], np.int32, batch.num_rows + 1)
    found: npt.NDArray[np.int64] = np.diff(offsets).astype(np.int64)
    return found


def _last_set(file: CommitLogFile) -> int:
    """Return the offset after the last byte that is not zero."""
    for start in range((file.size - 1) // _CHUNK_BYTES * _CHUNK_BYTES, -1, -_CHUNK_BYTES):
        position = file.position + start
        chunk = file.read(position, position + _CHUNK_BYTES).rstrip(b"\0")
        if chunk:
            return start + len(chunk)
    return 0

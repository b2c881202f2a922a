"""RocketMQ's classic CommitLog: message records one behind the other in files named by their first position.

Pure reading, nothing is written. A file ends with a BLANK record (int length of the rest, int magic) or, the last one,
with zeros; anything else where a record should begin is damage. A broker makes the next file ahead and deletes it only
at an orderly stop. A slave is sent pieces that cut messages, so what it has may end inside one: RocketMQ's recovery
takes that for the log's end, and so does this. Sizes lead from one record to the next, so finding the records is a walk
in Python; their bytes are never touched by it.
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa

from dledger_core.errors import ConfigError
from dledger_core.rocketmq.columns import Rows
from dledger_core.rocketmq.layout import MAGIC_V1, MAGIC_V2, RECORD_BYTES_MIN
from dledger_core.rocketmq.records import locate

__all__ = [
    "BLANK_MAGIC",
    "ClassicFile",
    "Stop",
    "classic_files",
    "is_empty",
    "is_torn",
    "message_batch",
    "named_files",
    "read_messages",
    "stop_kind",
    "walk",
]

BLANK_MAGIC: Final = -875286124
"""0xCBD43194; behind the length, unlike in a DLedger file."""

_HEAD: Final = struct.Struct(">ii")
_MAGICS: Final = tuple(magic.to_bytes(4, "big", signed=True) for magic in (MAGIC_V1, MAGIC_V2))
_NAME_DIGITS: Final = 20
_POSITION_MAX: Final = (1 << 63) - 1
_BATCH_BYTES: Final = 8 << 20


@dataclass(frozen=True, slots=True)
class ClassicFile:
    """One file.

    Attributes:
        path: where it lies.
        position: of its first byte.
        size: bytes.
    """

    path: str
    position: int
    size: int

    @property
    def end(self) -> int:
        """Position behind its last byte."""
        return self.position + self.size


@dataclass(frozen=True, slots=True)
class Stop:
    """Where and why the walk over a file ended.

    Attributes:
        position: of what is no message.
        kind: ``blank``, ``end`` (zeros, nothing is left, or part of a message and then zeros) or ``damaged``.
    """

    position: int
    kind: str


def named_files(folder: Path) -> list[Path]:
    """Returns the files of a folder that are named by a position, as a CommitLog's are, by position."""
    return sorted(p for p in folder.iterdir() if len(p.name) == _NAME_DIGITS and p.name.isdecimal() and p.is_file())


def classic_files(directory: Path | str) -> tuple[ClassicFile, ...]:
    """Returns the files of a CommitLog directory, by position, without those at its end that are empty yet.

    Raises:
        ConfigError: no directory, no such files, a folder among them, a name that is no position, or they do not
            continue each other.
    """
    folder = Path(directory)
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no directory", "--commitlog", "name RocketMQ's commitlog directory")
    files = tuple(
        ClassicFile(str(path.absolute()), int(path.name), path.stat().st_size) for path in named_files(folder)
    )
    if not files:
        raise ConfigError(f"{folder} holds no CommitLog file", "--commitlog", "name RocketMQ's commitlog directory")
    folders = [path for path in folder.iterdir() if len(path.name) == _NAME_DIGITS and path.name.isdecimal()]
    folders = sorted(path for path in folders if path.is_dir())
    if folders:
        raise ConfigError(f"{folders[0]} is named like a CommitLog file and is none", "--commitlog", "move it away")
    if files[-1].end > _POSITION_MAX:
        remedy = "a CommitLog's files are named by the position of their first byte"
        raise ConfigError(f"{files[-1].path} is named by no position", "--commitlog", remedy)
    for before, after in pairwise(files):
        if before.end != after.position:
            found = {"ends_at": before.end, "next_begins_at": after.position}
            remedy = "find the file; where storePathCommitLog names several directories, link the files of all into one"
            raise ConfigError(f"{after.path} does not continue the file before", "--commitlog", remedy, found)
    count = len(files)
    while count > 1 and is_empty(files[count - 1]):
        count -= 1
    return files[:count]


def is_empty(file: ClassicFile) -> bool:
    """Whether nothing was written to the file so far."""
    with Path(file.path).open("rb") as opened:
        return not any(opened.read(_HEAD.size))


def walk(data: Any, at: int = 0) -> Iterator[tuple[int, int]]:
    """Yields begin and size of the records in ``data``, from ``at`` on, as far as sizes and magics make sense."""
    end = len(data)
    while at + _HEAD.size <= end:
        size, magic = _HEAD.unpack_from(data, at)
        if magic not in (MAGIC_V1, MAGIC_V2) or size < RECORD_BYTES_MIN or at + size > end:
            return
        yield at, size
        at += size


def read_messages(file: ClassicFile, batch_bytes: int = _BATCH_BYTES) -> Iterator[pa.RecordBatch | Stop]:
    """Yields the file's messages in batches of columns ``position`` and ``body``, then a Stop.

    Args:
        file: from ``classic_files``; what was appended since is left out.
        batch_bytes: about how many bytes of bodies a batch holds.
    """
    with Path(file.path).open("rb") as opened:
        size = min(file.size, opened.seek(0, 2))
        if not size:
            yield Stop(file.position, "end")
            return
        data = mmap.mmap(opened.fileno(), size, access=mmap.ACCESS_READ)
    ends: list[int] = []
    first = begin = at = 0
    for begin, length in walk(data):
        if at - first >= batch_bytes:
            yield message_batch(data, first, ends, file.position)
            first, ends = at, []
        at = begin + length
        ends.append(at)
    torn = bool(ends) and is_torn(data, begin, at)
    if torn:
        at = begin
        ends.pop()
    if ends:
        yield message_batch(data, first, ends, file.position)
    yield Stop(file.position + at, "end" if torn else stop_kind(data, at))


def is_torn(data: mmap.mmap, begin: int, end: int) -> bool:
    """Whether the last record of a file was only written in part: it is not whole, and zeros follow.

    Args:
        data: the file.
        begin: where the record begins.
        end: where it ends, by its size.
    """
    if data[end - 1]:  # the zeros of what was not written reach to its end
        return False
    rows = Rows(np.frombuffer(data, np.uint8, end - begin, begin), np.zeros(1, np.int64), np.array([end - begin]), None)
    if locate(rows).complete:  # lengths that fit lie behind the body too: whatever is wrong, all of it was written
        return False
    return not np.frombuffer(data, np.uint8)[end:].any()


def message_batch(data: mmap.mmap | bytes, first: int, ends: list[int], base: int) -> pa.RecordBatch:
    """Returns columns ``position`` and ``body`` of records that lie one behind the other in a file's bytes.

    Args:
        data: the file, or a part of it.
        first: where the first one begins.
        ends: where each of them ends.
        base: position of the first byte of ``data``.
    """
    # One behind the other, so their bytes are the column's bytes.
    offsets = np.array([first, *ends], np.int64)
    buffers = [None, pa.py_buffer((offsets - first).astype(np.int32)), pa.py_buffer(data[first : ends[-1]])]
    bodies = pa.Array.from_buffers(pa.binary(), len(ends), buffers)
    return pa.RecordBatch.from_pydict({"position": pa.array(offsets[:-1] + base), "body": bodies})


def stop_kind(data: mmap.mmap, at: int) -> str:
    """Returns what lies where a walk ended: see ``Stop``."""
    rest = len(data) - at
    if rest < _HEAD.size:
        return "end" if not any(data[at:]) else "damaged"
    head = data[at : at + _HEAD.size]
    if _HEAD.unpack(head)[1] == BLANK_MAGIC:
        return "blank"
    return "end" if not any(head) or _is_torn_head(data, at, head) else "damaged"


def _is_torn_head(data: mmap.mmap, at: int, head: bytes) -> bool:
    """Whether size and magic of a message were only written in part, and nothing behind them."""
    magic = head[4:].rstrip(b"\0")
    begun = len(magic) < len(head[4:]) and any(whole.startswith(magic) for whole in _MAGICS)
    return begun and not np.frombuffer(data, np.uint8)[at + len(head) :].any()

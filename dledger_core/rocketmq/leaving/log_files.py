"""Files of a run by position: the new CommitLog, the messages that others refer to, and the map of message ids."""

from __future__ import annotations

import itertools
import struct
from contextlib import closing
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger_core.errors import CorruptRecordError
from dledger_core.record import segment_name
from dledger_core.rocketmq.leaving.rewrite import Messages
from dledger_core.rocketmq.message.columns import message_ids
from dledger_core.rocketmq.message.layout import STORE_IPV6
from dledger_core.rocketmq.store.commit_log import BLANK_MAGIC
from dledger_core.storage.files.file_system import File, Files

_I64 = npt.NDArray[np.int64]
_BLANK: Final = struct.Struct(">ii")
_PAIR: Final = np.dtype([("old", "<i8"), ("new", "<i8")])


class LogFiles:
    """CommitLog files of full size. Writing the same messages again changes nothing.

    Args:
        files: the file system.
        directory: the ``commitlog`` directory.
        file_bytes: size of a file.
    """

    def __init__(self, files: Files, directory: Path, file_bytes: int) -> None:
        self.directory = directory
        self._files = files
        self._file_bytes = file_bytes
        self._open: dict[int, File] = {}

    def write(self, messages: Messages) -> None:
        """Write messages at their positions, and a BLANK where a file ends before them."""
        for position, data in self._runs(messages):
            self._file(position - position % self._file_bytes).pwritev([data], position % self._file_bytes)

    def compare(self, messages: Messages) -> None:
        """Raise CorruptRecordError unless the files have these messages."""
        for position, data in self._runs(messages):
            base = position - position % self._file_bytes
            with closing(self._files.open(self.directory / segment_name(base))) as file:
                found = file.pread(len(data), position - base)
            if found != bytes(data):
                raise self._differs(position)

    def check_end(self, end: int) -> None:
        """Raise CorruptRecordError unless nothing follows the last message."""
        base = end - end % self._file_bytes
        path = self.directory / segment_name(base)
        following = self.directory / segment_name(base + self._file_bytes)
        with closing(self._files.open(path)) as file:
            if any(file.pread(_BLANK.size, end - base)) or following.exists():
                raise self._differs(end)

    def _differs(self, position: int) -> CorruptRecordError:
        return CorruptRecordError(
            "the CommitLog differs from its source",
            str(self.directory / segment_name(position - position % self._file_bytes)),
            "check the disk, remove the destination, and convert again",
            {"position": position},
        )

    def _runs(self, messages: Messages) -> list[tuple[int, bytes | memoryview]]:
        """Return the bytes to write: contiguous messages of a file, and a BLANK before the first of the next one."""
        positions, ends = messages.positions, messages.positions + messages.sizes
        offsets = np.cumsum(messages.sizes) - messages.sizes
        breaks = np.flatnonzero(positions[1:] != ends[:-1]) + 1
        view, found, at = memoryview(messages.data), list[tuple[int, bytes | memoryview]](), messages.after
        for first, stop in itertools.pairwise([0, *breaks.tolist(), len(positions)]):
            begin, after = int(positions[first]), int(ends[stop - 1])
            if begin != at and at % self._file_bytes:
                found.append((at, _BLANK.pack(self._file_bytes - at % self._file_bytes, BLANK_MAGIC)))
            start = int(offsets[first])
            found.append((begin, view[start : start + after - begin]))
            at = after
        return found

    def _file(self, base: int) -> File:
        file = self._open.get(base)
        if file is None:
            self._files.mkdir(self.directory)
            file = self._files.open(self.directory / segment_name(base), write=True, create=True)
            if file.size() < self._file_bytes:
                file.truncate(self._file_bytes)
            self._open[base] = file
        return file

    def sync(self) -> None:
        """Make all writes durable."""
        if self._open:
            for file in self._open.values():
                file.datasync()
            self._files.sync_dir(self.directory)
        self.close()

    def close(self) -> None:
        """Close the files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


class ReferenceFile:
    """Old and new positions of the messages that others refer to, ascending, in a file of the run.

    Args:
        files: the file system.
        path: the file.
        count: pairs of an earlier run.
        complete: whether it has all messages of the source.
    """

    def __init__(self, files: Files, path: Path, count: int, *, complete: bool = False) -> None:
        self._path = path
        self._file = files.open(path, write=True, create=True)
        self._file.truncate(count * _PAIR.itemsize)
        self.count = count
        self._complete = complete
        self._known: npt.NDArray[np.void] | None = None

    def extend(self, old: _I64, new: _I64) -> None:
        """Add messages by their old and new positions, ascending; a complete file has them."""
        if len(old) and not self._complete:
            pairs = np.empty(len(old), _PAIR)
            pairs["old"], pairs["new"] = old, new
            self._file.pwritev([pairs.tobytes()], self.count * _PAIR.itemsize)
            self.count += len(old)
            self._known = None

    def find(self, old: _I64) -> _I64:
        """Return the new position of each old one, -1 for unknown ones."""
        if not self.count:
            return np.full(len(old), -1, np.int64)
        if self._known is None:
            self._known = np.memmap(self._path, _PAIR, "r", shape=(self.count,))
        at = np.minimum(np.searchsorted(self._known["old"], old), self.count - 1)
        pairs = self._known[at]
        return np.where(pairs["old"] == old, pairs["new"], -1)

    def sync(self) -> None:
        """Make all pairs durable."""
        self._file.datasync()

    def close(self) -> None:
        """Close the file."""
        self._known = None
        self._file.close()


class IdMap:
    """Lines ``old id TAB new id`` of all messages that moved.

    Args:
        files: the file system.
        path: the file.
        size: bytes of an earlier run.
    """

    def __init__(self, files: Files, path: Path, size: int) -> None:
        self._file = files.open(path, write=True, create=True)
        self._file.truncate(size)
        self.size = size

    def add(self, messages: Messages) -> None:
        """Add messages; those that keep their positions keep their ids."""
        if not messages.moved:
            return
        located = messages.located
        ipv6 = (located.sys_flags & STORE_IPV6) != 0
        old, new = (
            message_ids(located.data, located.store_host, ipv6, positions.astype(">i8").view(np.uint8).reshape(-1, 8))
            for positions in (messages.old, messages.positions)
        )
        lines = "".join(f"{a}\t{b}\n" for a, b in zip(old.to_pylist(), new.to_pylist(), strict=True)).encode()
        self._file.pwritev([lines], self.size)
        self.size += len(lines)

    def sync(self) -> None:
        """Make all lines durable."""
        self._file.datasync()

"""Messages of the CommitLog that precedes a log, by position, for who serves them: each is checked on its way out.

They are read with ``pread``: the files may be links into a broker's directory, and a process that maps a file which
somebody cuts is killed.
"""

from __future__ import annotations

import struct
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from dledger_core.errors import ConfigError, CorruptRecordError, IndexOutOfRangeError
from dledger_core.rocketmq.classic_log import wrong_messages
from dledger_core.rocketmq.commit_log import BLANK_MAGIC, ClassicFile, classic_files, message_batch, walk
from dledger_core.rocketmq.layout import HEAD, MAGIC_V1, MAGIC_V2
from dledger_core.storage.files import Files, OsFiles

__all__ = ["MESSAGE_BYTES_MAX", "OLD_FILES", "OldMessages", "OldRun"]

OLD_FILES: Final = "commitlog"
"""Folder of the old files beside a node's store, as RocketMQ lays it out."""
MESSAGE_BYTES_MAX: Final = 16 << 20
"""Of one message that is served; a broker's own bound is 4 MiB unless it is told otherwise."""
_HEAD: Final = struct.Struct(">ii")


@dataclass(frozen=True, slots=True)
class OldRun:
    """Messages that lie one behind the other.

    Attributes:
        sizes: uint32, shape (n,): bytes of each; n may be 0.
        data: the messages.
        next_position: where to go on: behind the last one, or where the file ends.
    """

    sizes: npt.NDArray[np.uint32]
    data: memoryview
    next_position: int

    @property
    def count(self) -> int:
        """How many messages."""
        return len(self.sizes)


class OldMessages:
    """The messages in a CommitLog directory that is not written to any more. Thread-safe.

    Args:
        directory: the folder; it may be missing, and may be removed at any time.
        files: the file system.
    """

    def __init__(self, directory: Path, files: Files | None = None) -> None:
        self._directory = directory
        self._files = files or OsFiles()
        self._listed: tuple[ClassicFile, ...] = ()

    def read(self, position: int, max_bytes: int) -> OldRun | None:
        """Returns the messages from ``position`` on, of one file, up to ``max_bytes``, but at least one.

        Returns:
            None if no file holds the position; a run of nothing if the file's messages end there.

        Raises:
            IndexOutOfRangeError: no message begins at ``position``.
            CorruptRecordError: one does, and it is damaged.
        """
        try:
            file = self._file_at(position)
            data = b"" if file is None else self._bytes(file, position, max_bytes)
        except OSError:  # the old files are no longer needed, and somebody removed them
            self._listed = ()
            return None
        if file is None:
            return None
        if file.end - position < _HEAD.size or (len(data) >= _HEAD.size and _HEAD.unpack_from(data)[1] == BLANK_MAGIC):
            return OldRun(np.zeros(0, np.uint32), memoryview(b""), file.end)
        return self._checked(file, position, data)

    def _file_at(self, position: int) -> ClassicFile | None:
        if not self._listed:
            try:
                self._listed = classic_files(self._directory)
            except ConfigError:
                return None
        listed = self._listed
        at = bisect_right(listed, position, key=lambda file: file.position) - 1
        return listed[at] if at >= 0 and position < listed[at].end else None

    def _bytes(self, file: ClassicFile, position: int, max_bytes: int) -> bytes:
        """Returns up to ``max_bytes`` of a file, or the message at its beginning if that is larger."""
        left, offset = file.end - position, position - file.position
        opened = self._files.open(Path(file.path))
        try:
            data = opened.pread(min(left, max(max_bytes, HEAD.itemsize)), offset)
            size, magic = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (0, 0)
            if magic in (MAGIC_V1, MAGIC_V2) and len(data) < size <= min(left, MESSAGE_BYTES_MAX):
                data = opened.pread(size, offset)
            return data
        finally:
            opened.close()

    def _checked(self, file: ClassicFile, position: int, data: bytes) -> OldRun:
        ends = [begin + size for begin, size in walk(data)]
        good = len(ends)
        if good:
            wrong = wrong_messages(message_batch(data, 0, ends, position))
            good = int(wrong.argmax()) if wrong.any() else good
        if not good:
            raise self._no_message(file, position, data)
        sizes = np.diff(np.array([0, *ends[:good]])).astype(np.uint32)
        return OldRun(sizes, memoryview(data)[: ends[good - 1]], position + ends[good - 1])

    def _no_message(self, file: ClassicFile, position: int, data: bytes) -> CorruptRecordError | IndexOutOfRangeError:
        where, values = file.path, {"position": position}
        head = np.frombuffer(data, HEAD, 1)[0] if len(data) >= HEAD.itemsize else None
        begins = head is not None and head["magic"] in (MAGIC_V1, MAGIC_V2) and int(head["physical_offset"]) == position
        if begins or len(data) < min(HEAD.itemsize, file.end - position):
            remedy = "copy the file from a node that has it whole"
            return CorruptRecordError("a message of the CommitLog is damaged or cut", where, remedy, values)
        remedy = "take the position of a message, as its msg_id or its consume queue tells it"
        return IndexOutOfRangeError(f"no message begins at position {position} of the CommitLog", where, remedy, values)

"""Messages of a commitlog prefix by position, for the server: each is checked before it is returned.

They are read with ``pread``: the files may be links into a broker's directory, and a process that maps a file is killed
if another process truncates it.
"""

from __future__ import annotations

import re
import struct
from bisect import bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Self

import numpy as np
import numpy.typing as npt

from dledger_core.errors import BadRequestError, ConfigError, CorruptRecordError, DLedgerError, IndexOutOfRangeError
from dledger_core.rocketmq.message.layout import HEADER, MAGIC_V1, MAGIC_V2
from dledger_core.rocketmq.store.commit_log import (
    BLANK_MAGIC,
    CommitLogFile,
    commit_log_files,
    message_batch,
    message_faults,
    scan_records,
)
from dledger_core.rocketmq.store.location import COMMITLOG_DIRECTORY
from dledger_core.storage.files.file_system import Files, OsFiles

MESSAGE_BYTES_MAX: Final = 16 << 20
"""Limit of one served message; a broker's own default limit is 4 MiB."""
_HEAD: Final = struct.Struct(">ii")
_FINGERPRINT: Final = re.compile(r"(\d{1,19})-(\d{1,19})-([0-9a-f]{32})")


@dataclass(frozen=True, slots=True)
class CommitLogFingerprint:
    """The messages of a CommitLog and their positions: SHA-256 over its files as they are when they are closed.

    Attributes:
        start: position of the first file that counts; nodes may have deleted earlier ones.
        end: position after the last file.
        digest: 32 hexadecimal digits.
    """

    start: int
    end: int
    digest: str

    def __str__(self) -> str:
        return f"{self.start}-{self.end}-{self.digest}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the fingerprint for a text from ``str``; raise ConfigError if it is malformed."""
        found = _FINGERPRINT.fullmatch(text.strip())
        if found is None:
            raise ConfigError(
                f"malformed fingerprint of a CommitLog {text!r}",
                "",
                "copy the line START-END-DIGEST that 'dledger convert --fingerprint DIR' prints",
            )
        return cls(int(found[1]), int(found[2]), found[3])


@dataclass(frozen=True, slots=True)
class PrefixBatch:
    """Contiguous messages.

    Attributes:
        sizes: uint32, shape (n,): bytes of each; n may be 0.
        data: the messages.
        next_position: position to continue at: after the last message, or the end of the file.
    """

    sizes: npt.NDArray[np.uint32]
    data: memoryview
    next_position: int

    @property
    def count(self) -> int:
        """Number of messages."""
        return len(self.sizes)


class CommitLogPrefix:
    """The messages in a CommitLog directory that no broker writes to. Thread-safe.

    Args:
        directory: the directory; it may be missing, and may be removed at any time.
        files: the file system.
        end: position after its last file; a log that follows it may start there.
        message_bytes_max: limit of one message.
    """

    def __init__(
        self, directory: Path, files: Files | None = None, end: int = 0, *, message_bytes_max: int = MESSAGE_BYTES_MAX
    ) -> None:
        self._message_bytes_max = message_bytes_max
        self.end = end
        self._directory = directory
        self._files = files or OsFiles()
        self._listed: tuple[CommitLogFile, ...] = ()

    def read(self, position: int, max_bytes: int) -> PrefixBatch | None:
        """Return the messages from ``position`` on, of one file, up to ``max_bytes``, but at least one.

        Returns:
            None if no file contains the position; an empty batch if the file's messages end there.

        Raises:
            IndexOutOfRangeError: no message starts at ``position``.
            CorruptRecordError: one does, and it is damaged; or the file cannot be read.
            BadRequestError: one does, and it exceeds ``message_bytes_max``.
        """
        file = self._file_at(position)
        if file is None:
            return None
        try:
            data = self._bytes(file, position, max_bytes)
        except (FileNotFoundError, NotADirectoryError):  # the prefix is no longer needed, and was removed
            self._listed = ()
            return None
        except OSError as error:
            remedy = "check the disk and its permissions; copy the file from another node"
            raise CorruptRecordError(
                f"the file cannot be read: {error.strerror}", file.path, remedy, {"position": position}
            ) from None
        left = file.end - position
        if left < _HEAD.size or (len(data) >= _HEAD.size and _HEAD.unpack_from(data) == (left, BLANK_MAGIC)):
            return PrefixBatch(np.zeros(0, np.uint32), memoryview(b""), file.end)
        return self._checked(file, position, data)

    def _file_at(self, position: int) -> CommitLogFile | None:
        found = _containing(self._listed, position)
        if found is not None:
            return found
        try:  # created or copied since the last listing
            self._listed = commit_log_files(self._directory)
        except (ConfigError, OSError):
            return None
        return _containing(self._listed, position)

    def _bytes(self, file: CommitLogFile, position: int, max_bytes: int) -> bytes:
        """Return up to ``max_bytes`` of a file, or its first message if that is larger."""
        left, offset = file.end - position, position - file.position
        opened = self._files.open(Path(file.path))
        try:
            data = opened.pread(min(left, max(max_bytes, HEADER.itemsize)), offset)
            size, magic = _HEAD.unpack_from(data) if len(data) >= _HEAD.size else (0, 0)
            if magic in (MAGIC_V1, MAGIC_V2) and len(data) < size <= min(left, self._message_bytes_max):
                data = opened.pread(size, offset)
            return data
        finally:
            opened.close()

    def _checked(self, file: CommitLogFile, position: int, data: bytes) -> PrefixBatch:
        ends = [begin + size for begin, size in scan_records(data)]
        good = len(ends)
        if good:
            wrong = message_faults(message_batch(data, ends, position)) != 0
            good = int(wrong.argmax()) if wrong.any() else good
        if not good:
            raise self._no_message(file, position, data)
        sizes, end = np.diff(np.array([0, *ends[:good]])).astype(np.uint32), ends[good - 1]
        kept = (
            data if end > len(data) // 2 else data[:end]
        )  # a view of a few bytes would keep the complete buffer alive
        return PrefixBatch(sizes, memoryview(kept)[:end], position + end)

    def _no_message(self, file: CommitLogFile, position: int, data: bytes) -> DLedgerError:
        where, values = file.path, {"position": position}
        header = np.frombuffer(data, HEADER, 1)[0] if len(data) >= HEADER.itemsize else None
        begins = (
            header is not None
            and header["magic"] in (MAGIC_V1, MAGIC_V2)
            and int(header["physical_offset"]) == position
        )
        size = int(header["size"]) if header is not None else 0
        if begins and self._message_bytes_max < size <= file.end - position:
            remedy = f"continue at position {position + size}; 'dledger dump' prints the message from the files"
            return BadRequestError("a message of the CommitLog is too large to serve", where, remedy, values)
        if begins or len(data) < min(HEADER.itemsize, file.end - position):
            remedy = "copy the file from a node where it is intact"
            return CorruptRecordError("a message of the CommitLog is damaged or truncated", where, remedy, values)
        remedy = "use the position of a message, from its msg_id or its consume queue"
        return IndexOutOfRangeError(f"no message starts at position {position} of the CommitLog", where, remedy, values)


def open_log_prefix(store: Path, fingerprint: str) -> CommitLogPrefix:
    """Open the CommitLog that precedes a store, in the directory next to it; an ``OpenLogPrefix`` of ``NodeServer``."""
    return CommitLogPrefix(store.parent / COMMITLOG_DIRECTORY, end=CommitLogFingerprint.parse(fingerprint).end)


def _containing(files: tuple[CommitLogFile, ...], position: int) -> CommitLogFile | None:
    at = bisect_right(files, position, key=lambda file: file.position) - 1
    return files[at] if at >= 0 and position < files[at].end else None

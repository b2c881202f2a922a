"""The one seam to the operating system: every byte a store reads or writes passes through here.

``Files`` and ``File`` are what the rest of the package sees; ``OsFiles`` is the real thing. Tests put in files that
lose, tear and fail writes. Rules that hold for every implementation:

* a write is durable only after ``datasync``; a created, replaced or removed name only after ``sync_dir`` of its folder
  (``replace`` and ``mkdir`` do that themselves);
* errors are plain ``OSError``; whoever calls decides what they mean;
* a file stays usable for those who hold it after its name is gone, and closes when nobody holds it any more, so a
  reader in another thread never meets a recycled descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from dledger_core.checksum import Buffer

__all__ = ["DiskSpace", "File", "Files", "OsFile", "OsFiles"]

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
_FLAGS = os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Room on a file system, as an ordinary user may use it."""

    free_bytes: int
    total_bytes: int

    def used_ratio(self, free_bytes: int) -> float:
        """Returns which part is in use when so much is free."""
        return 1 - free_bytes / self.total_bytes if self.total_bytes else 0.0


class File(Protocol):
    """An open file. ``pread`` is safe from any thread."""

    def pread(self, length: int, offset: int) -> bytes:
        """Returns up to ``length`` bytes; fewer only at the end of the file."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Writes all of ``buffers``, one behind the other, at ``offset``."""

    def datasync(self) -> None:
        """Makes the bytes and the size durable."""

    def size(self) -> int:
        """Returns the length of the file."""

    def truncate(self, size: int) -> None:
        """Sets the length; new bytes are zeros and take no space."""

    def next_data(self, offset: int) -> int:
        """Returns the first offset at or after ``offset`` that may be other than zero, or the size if there is none."""

    def close(self) -> None:
        """Closes the file (releasing a lock held through it)."""


class Files(Protocol):
    """The file system as far as a store needs it."""

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> File:
        """Opens a file; ``create`` makes it if it is absent."""

    def read(self, path: Path) -> bytes | None:
        """Returns the content of a small file, or None if there is none."""

    def replace(self, path: Path, data: bytes) -> None:
        """Puts ``data`` in the place of ``path``, atomically and durably."""

    def listdir(self, path: Path) -> list[str] | None:
        """Returns the names in a folder, sorted, or None if there is no such folder."""

    def mkdir(self, path: Path) -> None:
        """Makes a folder and its parents durably, if absent."""

    def unlink(self, path: Path) -> None:
        """Removes a file's name."""

    def sync_dir(self, path: Path) -> None:
        """Makes created and removed names of a folder durable."""

    def space(self, path: Path) -> DiskSpace:
        """Returns how much room there is where ``path`` lies."""

    def lock(self, path: Path) -> File:
        """Locks ``path``, creating it if absent, until the result is closed.

        Raises:
            BlockingIOError: somebody else holds the lock.
        """


class OsFile:
    """A descriptor that closes with its last reference."""

    __slots__ = ("_fd",)

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def __del__(self) -> None:
        with contextlib.suppress(OSError):
            self.close()

    def pread(self, length: int, offset: int) -> bytes:
        """See ``File``."""
        return os.pread(self._fd, length, offset)

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """See ``File``."""
        for first in range(0, len(buffers), _IOV_MAX):
            offset = self._write_all(buffers[first : first + _IOV_MAX], offset)

    def _write_all(self, buffers: Sequence[Buffer], offset: int) -> int:
        left = [memoryview(b).cast("B") for b in buffers if len(b)]
        while left:
            written = os.pwritev(self._fd, left, offset)
            if not written:
                raise OSError(errno.EIO, "a write wrote nothing")
            offset += written
            while left and written >= len(left[0]):
                written -= len(left.pop(0))
            if written:
                left[0] = left[0][written:]
        return offset

    def datasync(self) -> None:
        """See ``File``."""
        os.fdatasync(self._fd)

    def size(self) -> int:
        """See ``File``."""
        return os.fstat(self._fd).st_size

    def truncate(self, size: int) -> None:
        """See ``File``."""
        os.ftruncate(self._fd, size)

    def next_data(self, offset: int) -> int:
        """See ``File``."""
        size = self.size()
        if offset >= size:
            return size
        try:
            return os.lseek(self._fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:
                return size
            if error.errno in (errno.EINVAL, errno.EOPNOTSUPP):
                return offset
            raise

    def close(self) -> None:
        """See ``File``."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class OsFiles:
    """The real file system. Stateless; one may serve any number of stores."""

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> OsFile:
        """See ``Files``."""
        flags = _FLAGS | (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        return OsFile(os.open(path, flags, 0o644))

    def read(self, path: Path) -> bytes | None:
        """See ``Files``."""
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def replace(self, path: Path, data: bytes) -> None:
        """See ``Files``."""
        temporary = path.with_name(path.name + ".tmp")
        fd = os.open(temporary, _FLAGS | os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        file = OsFile(fd)
        file.pwritev([data], 0)
        os.fsync(fd)
        file.close()
        os.replace(temporary, path)
        self.sync_dir(path.parent)

    def listdir(self, path: Path) -> list[str] | None:
        """See ``Files``."""
        try:
            return sorted(os.listdir(path))
        except FileNotFoundError:
            return None

    def mkdir(self, path: Path) -> None:
        """See ``Files``."""
        if path.is_dir():
            return
        self.mkdir(path.parent)
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, 0o755)
        self.sync_dir(path.parent)

    def unlink(self, path: Path) -> None:
        """See ``Files``."""
        os.unlink(path)

    def sync_dir(self, path: Path) -> None:
        """See ``Files``."""
        fd = os.open(path, _FLAGS | os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def space(self, path: Path) -> DiskSpace:
        """See ``Files``."""
        found = os.statvfs(path)
        return DiskSpace(found.f_bavail * found.f_frsize, found.f_blocks * found.f_frsize)

    def lock(self, path: Path) -> OsFile:
        """See ``Files``."""
        file = self.open(path, write=True, create=True)
        fcntl.flock(file._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.pwritev([f"{os.getpid()}\n".encode()], 0)
        return file

"""The only seam to the operating system: a store reads and writes every byte through this module.

The rows of the tables are the one exception: see ``table_store``.

The rest of the package uses the protocols ``Files`` and ``File``; ``OsFiles`` implements them. Tests use files that
lose, tear and fail writes. Rules for every implementation:

* a write is durable only after ``datasync``; a created, replaced or removed name only after ``sync_dir`` of its
  directory (``replace``, ``rename`` and ``mkdir`` include that);
* errors are plain ``OSError``; the caller decides their meaning;
* an open file stays usable after its name is removed, and closes with its last reference, so that a reader in another
  thread never reads from a recycled descriptor.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol, TypeVar

from dledger_core.checksum import Buffer, crc32
from dledger_core.storage.files.table_store import (
    Rows,
    SqliteTables,
    TableStore,
    move_sqlite,
    read_sqlite,
    rows_in_image,
)

_IOV_MAX = min(os.sysconf("SC_IOV_MAX"), 1024)
_FLAGS = os.O_CLOEXEC


@dataclass(frozen=True, slots=True)
class DiskSpace:
    """Space on a file system that an ordinary user may use."""

    free_bytes: int
    total_bytes: int

    def used_ratio(self, free_bytes: int) -> float:
        """Return the ratio in use with this much free space."""
        return 1 - free_bytes / self.total_bytes if self.total_bytes else 0.0


class File(Protocol):
    """An open file. ``pread`` is safe from any thread."""

    def pread(self, length: int, offset: int) -> bytes:
        """Return up to ``length`` bytes; fewer only at the end of the file."""

    def pwritev(self, buffers: Sequence[Buffer], offset: int) -> None:
        """Write all of ``buffers`` contiguously at ``offset``."""

    def datasync(self) -> None:
        """Make the bytes and the size durable."""

    def size(self) -> int:
        """Return the length of the file."""

    def truncate(self, size: int) -> None:
        """Set the length; new bytes are zeros and use no space."""

    def next_data(self, offset: int) -> int:
        """Return the first offset at or after ``offset`` that may be other than zero, or the size if there is none."""

    def close(self) -> None:
        """Close the file; a lock of it is released."""


class Files(Protocol):
    """The file system operations that a store needs."""

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> File:
        """Open a file; ``create`` makes it if it is missing."""

    def read(self, path: Path) -> bytes | None:
        """Return the content of a small file, or None if it is missing."""

    def replace(self, path: Path, data: bytes) -> None:
        """Replace the file ``path`` by one with ``data``, atomically and durably."""

    def rename(self, path: Path, name: str) -> None:
        """Give a file another name in its directory, atomically and durably; replaces a file of that name."""

    def listdir(self, path: Path) -> list[str] | None:
        """Return the names in a directory, sorted, or None if it is missing."""

    def mkdir(self, path: Path) -> None:
        """Create a directory and its parents durably, if missing."""

    def unlink(self, path: Path) -> None:
        """Remove a file's name."""

    def sync_dir(self, path: Path) -> None:
        """Make created and removed names of a directory durable."""

    def space(self, path: Path) -> DiskSpace:
        """Return the space on the file system of ``path``."""

    def lock(self, path: Path) -> File:
        """Lock ``path``, created if missing, until the result is closed.

        Raises:
            BlockingIOError: another process has the lock.
        """

    def open_tables(self, path: Path, on_failed: Callable[[OSError], object]) -> TableStore:
        """Open the rows of a store's tables for its node; see ``TableStore``."""

    def read_tables(self, path: Path) -> Rows | None:
        """Return these rows, perhaps of a running node, without changing anything; raise DamagedTablesError."""

    def move_tables(self, source: Path, target: Path) -> None:
        """Replace the rows of one closed store by those of another, durably; change nothing if there is no source."""

    def rows_in_image(self, image: bytes) -> Rows | None:
        """Return the rows of ``TableStore.image``; raise DamagedTablesError."""


T = TypeVar("T")
_NO_DESCRIPTOR: Final = (errno.EMFILE, errno.ENFILE)
_DESCRIPTOR_WAIT_S: Final = 60.0
_DESCRIPTOR_CHECK_S: Final = 0.02


def is_out_of_descriptors(error: OSError) -> bool:
    """Whether a file could not be opened because the process or the machine has no descriptor left."""
    return error.errno in _NO_DESCRIPTOR


def with_descriptor(open_file: Callable[[], T]) -> T:
    """Return the result of ``open_file``; where no descriptor is free, wait for one: the disk has not failed.

    A writer waits as for a slow disk: its leader steps down meanwhile, and no write is lost.
    """
    deadline = time.monotonic() + _DESCRIPTOR_WAIT_S
    while True:
        try:
            return open_file()
        except OSError as error:
            if not is_out_of_descriptors(error) or time.monotonic() >= deadline:
                raise
        time.sleep(_DESCRIPTOR_CHECK_S)


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


_LARGE_BYTES: Final = 16 << 20
_FREEING: Final = threading.Lock()


def _open_large(path: Path) -> int | None:
    """Open a large file, so that its blocks outlive its name; None for a small one, or if it cannot be opened."""
    with contextlib.suppress(OSError):
        if os.stat(path).st_size >= _LARGE_BYTES:
            return os.open(path, _FLAGS | os.O_RDONLY)
    return None


def _free(fd: int) -> None:
    with _FREEING:  # one file at a time: freeing blocks keeps the disk busy
        os.close(fd)


_FILE_MODE: Final = 0o600
_DIRECTORY_MODE: Final = 0o700
"""A log belongs to the user of its node; other users of the machine must not read it."""


class OsFiles:
    """The real file system. Stateless; one may serve any number of stores."""

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> OsFile:
        """See ``Files``."""
        flags = _FLAGS | (os.O_RDWR if write else os.O_RDONLY) | (os.O_CREAT if create else 0)
        return OsFile(os.open(path, flags, _FILE_MODE))

    def read(self, path: Path) -> bytes | None:
        """See ``Files``."""
        try:
            return path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None

    def replace(self, path: Path, data: bytes) -> None:
        """See ``Files``."""
        temporary = path.with_name(path.name + ".tmp")
        fd = with_descriptor(lambda: os.open(temporary, _FLAGS | os.O_WRONLY | os.O_CREAT | os.O_TRUNC, _FILE_MODE))
        file = OsFile(fd)
        file.pwritev([data], 0)
        os.fsync(fd)
        file.close()
        os.replace(temporary, path)
        self.sync_dir(path.parent)

    def rename(self, path: Path, name: str) -> None:
        """See ``Files``."""
        os.replace(path, path.with_name(name))
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
            os.mkdir(path, _DIRECTORY_MODE)
        self.sync_dir(path.parent)

    def unlink(self, path: Path) -> None:
        """See ``Files``; a thread of its own frees the blocks of a large file, which takes 0.4 s per GiB on ext4."""
        fd = _open_large(path)
        try:
            os.unlink(path)
        except OSError:
            if fd is not None:
                os.close(fd)
            raise
        if fd is not None:
            threading.Thread(target=_free, args=(fd,), name="free-blocks", daemon=True).start()

    def sync_dir(self, path: Path) -> None:
        """See ``Files``."""
        fd = with_descriptor(lambda: os.open(path, _FLAGS | os.O_RDONLY | os.O_DIRECTORY))
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

    def open_tables(self, path: Path, on_failed: Callable[[OSError], object]) -> TableStore:
        """See ``Files``."""
        return SqliteTables(path, on_failed, with_descriptor)

    def read_tables(self, path: Path) -> Rows | None:
        """See ``Files``."""
        return read_sqlite(path)

    def move_tables(self, source: Path, target: Path) -> None:
        """See ``Files``."""
        if source.exists():
            move_sqlite(source, target, self.sync_dir)

    def rows_in_image(self, image: bytes) -> Rows | None:
        """See ``Files``."""
        return rows_in_image(image)


def write_checked(files: Files, path: Path, fields: dict[str, Any]) -> None:
    """Replace a file with ``fields`` and their CRC, atomically and durably.

    The CRC is there so that a damaged value is never taken for another one.
    """
    files.replace(path, _encode(fields))


def read_checked(files: Files, path: Path) -> dict[str, Any] | None:
    """Return the fields that ``write_checked`` wrote; None if the file is missing; ``{}`` if it is damaged."""
    data = files.read(path)
    if data is None:
        return None
    with contextlib.suppress(ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError):
        found = json.loads(data)
        found.pop("crc32")
        if _encode(found) == data:
            return dict(found)
    return {}


def remove_durably(files: Files, path: Path) -> None:
    """Remove a file, durably, if it exists."""
    if files.read(path) is not None:
        files.unlink(path)
        files.sync_dir(path.parent)


def _encode(fields: dict[str, Any]) -> bytes:
    return (json.dumps(fields | {"crc32": fields_crc(fields)}, indent=2) + "\n").encode()


def fields_crc(fields: dict[str, Any]) -> int:
    """Return the CRC-32 of all fields in a fixed order, so that the layout of the file does not matter."""
    return crc32(json.dumps({key: fields[key] for key in sorted(fields) if key != "crc32"}).encode())

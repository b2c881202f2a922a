"""A file system in memory that loses, tears and fails writes, for ``dledger_core.storage``'s seam.

A write is durable only after ``datasync``, a new or removed name only after ``sync_dir``. ``crash`` draws, sector by
sector, which of the other writes survive, and makes every open file useless; ``kill`` ends the program but not the
machine, so the page cache stays. ``fail_at`` makes an operation raise EIO, and ``fail_more`` as many after it; as on
Linux, pages whose sync failed are clean afterwards: they can be read, and no later sync makes them durable. The failure
is reported once to each file that was open then, by its next sync, and to no file that is opened after the first report
(``errseq`` of the kernel). ``fail_writeback`` is the same without a sync: the kernel writes back and fails.
``crash_at`` stops the program in the middle of an operation, possibly half done.
"""

from __future__ import annotations

import copy
import errno
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from dledger_core.storage.files.file_system import DiskSpace
from dledger_core.storage.files.table_store import Rows
from tests.support.table_model import TableModel, rows_in

SECTOR = 512


class Crash(Exception):  # noqa: N818
    """The program stops here."""


class Inode:
    def __init__(self) -> None:
        self.content = bytearray()
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes | None]] = []  # (offset, data) or (size, None)
        self.failures = 0
        self.failure_errno = 0
        self.reported = True  # the last failure, to some open file

    def write(self, offset: int, data: bytes) -> None:
        _write(self.content, offset, data)
        self.pending.append((offset, data))

    def truncate(self, size: int) -> None:
        _truncate(self.content, size)
        self.pending.append((size, None))

    def sync(self) -> None:
        for offset, data in self.pending:
            if data is None:
                _truncate(self.durable, offset)
            else:
                _write(self.durable, offset, data)
        self.pending = []

    def fail_sync(self, number: int) -> None:
        self.pending = []
        self.failures += 1
        self.failure_errno, self.reported = number, False

    def clone(self) -> Inode:
        clone = Inode()
        clone.content, clone.durable, clone.pending = (
            bytearray(self.content),
            bytearray(self.durable),
            [*self.pending],
        )
        clone.failures, clone.failure_errno, clone.reported = self.failures, self.failure_errno, self.reported
        return clone

    def crash(self, chance: random.Random, keep: float) -> None:
        for offset, data in self.pending:
            if data is None:
                if chance.random() < keep:
                    _truncate(self.durable, offset)
                continue
            at = 0
            while at < len(data):
                stop = min(len(data), at + SECTOR - (offset + at) % SECTOR)
                if chance.random() < keep:
                    _write(self.durable, offset + at, data[at:stop])
                at = stop
        self.content = bytearray(self.durable)
        self.pending = []
        self.failures, self.reported = 0, True


def _write(target: bytearray, offset: int, data: bytes) -> None:
    if data and offset > len(target):
        target.extend(bytes(offset - len(target)))
    target[offset : offset + len(data)] = data


def _truncate(target: bytearray, size: int) -> None:
    if size < len(target):
        del target[size:]
    else:
        target.extend(bytes(size - len(target)))


class FaultyFile:
    def __init__(self, files: FaultyFiles, inode: Inode, path: Path) -> None:
        self.files, self.inode, self.path = files, inode, path
        self._generation = files.generation
        self._failures_reported = inode.failures - (not inode.reported)
        self._unsynced = False
        self.locked = False

    def __del__(self) -> None:
        self._note_close()

    def _live(self) -> Inode:
        if self._generation != self.files.generation:
            raise OSError(errno.EBADF, "a file of before the crash", str(self.path))
        return self.inode

    def pread(self, length: int, offset: int) -> bytes:
        return bytes(self._live().content[offset : offset + length])

    def pwritev(self, buffers: Sequence[bytes], offset: int) -> None:
        data = b"".join(bytes(b) for b in buffers)
        inode = self._live()
        try:
            self.files.operation("write", self.path)
        except Crash:
            inode.write(offset, data[: self.files.chance.randrange(len(data) + 1)])
            raise
        inode.write(offset, data)
        self._unsynced = True

    def datasync(self) -> None:
        inode = self._live()
        if self.files.before_sync is not None:
            self.files.before_sync(self.path)
        try:
            self.files.operation("sync", self.path)
        except OSError as error:
            inode.fail_sync(error.errno or errno.EIO)
        else:
            inode.sync()
        self._unsynced = False
        if self._failures_reported < inode.failures:
            self._failures_reported, inode.reported = inode.failures, True
            raise OSError(inode.failure_errno, os.strerror(inode.failure_errno), str(self.path))

    def size(self) -> int:
        return len(self._live().content)

    def truncate(self, size: int) -> None:
        inode = self._live()
        self.files.operation("truncate", self.path)
        inode.truncate(size)
        self._unsynced = True

    def next_data(self, offset: int) -> int:
        return min(offset, self.size())

    def _note_close(self) -> None:
        live = self._generation == self.files.generation and self.files.names.get(self.path) is self.inode
        if self._unsynced and live and not self.locked:
            self.files.closed_unsynced.append(self.path)
        self._unsynced = False

    def close(self) -> None:
        self._note_close()
        if self.locked and self._generation == self.files.generation:
            self.files.locks.discard(self.path)


class FaultyFiles:
    def __init__(self, seed: int = 0) -> None:
        self.chance = random.Random(seed)
        self.generation = 0
        self.locks: set[Path] = set()
        self.names: dict[Path, Inode] = {}
        self.durable_names: dict[Path, Inode] = {}
        self.pending_names: dict[Path, list[tuple[Path, Inode | None]]] = {}
        self.directories: set[Path] = set()
        self.room = DiskSpace(1 << 40, 1 << 41)
        self.operations = 0
        self.log: list[tuple[str, Path]] = []
        self.fail_at: int | None = None
        self.fail_more = 0
        self.fail_errno = errno.EIO
        self.crash_at: int | None = None
        self.before_sync: Callable[[Path], None] | None = None
        self.closed_unsynced: list[Path] = []
        """Files that were closed with writes that they had not synced: a failure of these would be reported nowhere."""

    def operation(self, kind: str, path: Path) -> None:
        self.operations += 1
        self.log.append((kind, path))
        if self.fail_at is not None and self.operations >= self.fail_at:
            self.fail_at = self.operations + 1 if self.fail_more else None
            self.fail_more = max(self.fail_more - 1, 0)
            raise OSError(self.fail_errno, os.strerror(self.fail_errno), str(path))
        if self.crash_at is not None and self.operations >= self.crash_at:
            self.crash_at = None
            raise Crash(kind, path)

    def crash(self, keep: float) -> None:
        """Lose power; each sector of an unsynced write survives with probability ``keep``."""
        for directory, pending in self.pending_names.items():
            kept = {0: 0, 1: len(pending)}.get(keep, self.chance.randrange(len(pending) + 1))
            for path, inode in pending[:kept]:
                self._apply(self.durable_names, path, inode)
            assert directory in self.directories or not pending
        self.pending_names = {}
        self.names = dict(self.durable_names)
        for inode in {id(i): i for i in self.names.values()}.values():
            inode.crash(self.chance, keep)
        self.generation += 1
        self.locks.clear()

    def fail_writeback(self, path: Path) -> None:
        """Lose the unsynced writes of a file."""
        self.names[path].fail_sync(self.fail_errno)

    def kill(self) -> None:
        """End the program but not the machine: every write stays, synced or not."""
        self.generation += 1
        self.locks.clear()

    def clone(self) -> FaultyFiles:
        """Return a copy without open files."""
        copies: dict[int, Inode] = {}

        def copy_of(inode: Inode) -> Inode:
            if id(inode) not in copies:
                copies[id(inode)] = inode.clone()
            return copies[id(inode)]

        clone = copy.copy(self)
        clone.chance = copy.copy(self.chance)
        clone.generation += 1
        clone.locks = set()
        clone.names = {path: copy_of(inode) for path, inode in self.names.items()}
        clone.durable_names = {path: copy_of(inode) for path, inode in self.durable_names.items()}
        clone.pending_names = {
            folder: [(path, inode and copy_of(inode)) for path, inode in changes]
            for folder, changes in self.pending_names.items()
        }
        clone.directories, clone.log, clone.closed_unsynced = set(self.directories), [*self.log], []
        return clone

    def content(self, path: Path) -> bytearray:
        """The bytes of a file, to look at or to damage."""
        return self.names[path].content

    @staticmethod
    def _apply(names: dict[Path, Inode], path: Path, inode: Inode | None) -> None:
        if inode is None:
            names.pop(path, None)
        else:
            names[path] = inode

    def _name(self, path: Path, inode: Inode | None) -> None:
        self._apply(self.names, path, inode)
        self.pending_names.setdefault(path.parent, []).append((path, inode))

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> FaultyFile:
        inode = self.names.get(path)
        if inode is None:
            if not create or path.parent not in self.directories:
                raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
            self.operation("create", path)
            inode = Inode()
            self._name(path, inode)
        return FaultyFile(self, inode, path)

    def read(self, path: Path) -> bytes | None:
        inode = self.names.get(path)
        return None if inode is None else bytes(inode.content)

    def replace(self, path: Path, data: bytes) -> None:
        inode = Inode()
        inode.write(0, data)
        self.operation("sync", path)
        inode.sync()
        self._name(path, inode)
        self.sync_dir(path.parent)

    def rename(self, path: Path, name: str) -> None:
        self.operation("rename", path)
        inode = self.names[path]
        self._name(path.with_name(name), inode)
        self._name(path, None)
        self.sync_dir(path.parent)

    def listdir(self, path: Path) -> list[str] | None:
        if path not in self.directories:
            return None
        folder = path.parts
        depth = len(folder)
        inside = (p.parts for p in (*self.names, *self.directories))
        return sorted({parts[depth] for parts in inside if len(parts) > depth and parts[:depth] == folder})

    def mkdir(self, path: Path) -> None:
        self.directories.update((path, *path.parents))

    def unlink(self, path: Path) -> None:
        self.operation("unlink", path)
        if path not in self.names:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(path))
        self._name(path, None)

    def sync_dir(self, path: Path) -> None:
        self.operation("sync_dir", path)
        for name, inode in self.pending_names.pop(path, []):
            self._apply(self.durable_names, name, inode)

    def space(self, path: Path) -> DiskSpace:
        return self.room

    def lock(self, path: Path) -> FaultyFile:
        if path in self.locks:
            raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable", str(path))
        file = self.open(path, write=True, create=True)
        file.locked = True
        self.locks.add(path)
        return file

    def open_tables(self, path: Path, on_failed: Callable[[OSError], object]) -> TableModel:
        return TableModel(self, path, on_failed)

    def read_tables(self, path: Path) -> Rows | None:
        data = self.read(path)
        return None if data is None else rows_in(data)

    def move_tables(self, source: Path, target: Path) -> None:
        if (data := self.read(source)) is not None:
            self.replace(target, data)
            self.unlink(source)
            self.sync_dir(source.parent)

    def rows_in_image(self, image: bytes) -> Rows | None:
        return rows_in(image) if image else None

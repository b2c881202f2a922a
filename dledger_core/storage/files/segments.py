"""A list of fixed-size files that together are one address space: the data files, or the index files, of a store.

Each file is named by the offset of its first byte, 20 decimal digits, and is created at its full size (sparse zeros).
The first one need not start at 0; neighbors have no gap between them. One descriptor per file is opened on first use. A
limited number of files stays open, the last used ones, and every file with writes that are not synced: a new descriptor
would not report a failed write of an earlier one. The kernel reports a failed write once per open file, so a thread
that syncs next to the writer opens a file of its own (``preallocate``): otherwise it could receive the report that the
writer's sync waits for.

One thread writes; any thread reads. The list itself is replaced, never changed in place.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from dledger_core.checksum import Buffer
from dledger_core.config import OPEN_SEGMENTS_MAX
from dledger_core.errors import BusyError, CorruptRecordError, StoreMismatchError
from dledger_core.record import is_segment_name, segment_name
from dledger_core.storage.files.file_system import File, Files, is_out_of_descriptors, with_descriptor

_CHUNK_BYTES: Final = 1 << 20
_ZEROS: Final = bytes(_CHUNK_BYTES)


def _write_zeros(file: File, start: int, stop: int) -> None:
    for at in range(start, stop, _CHUNK_BYTES):
        file.pwritev([memoryview(_ZEROS)[: min(_CHUNK_BYTES, stop - at)]], at)


def _bases(names: Iterable[str], directory: Path, *, strict: bool) -> list[int]:
    bases = []
    for name in names:
        if is_segment_name(name):
            bases.append(int(name))
        elif strict:
            raise StoreMismatchError(f"unexpected file {name!r}", str(directory), "move it out of the store")
    return sorted(bases)


def read_failure(error: CorruptRecordError) -> OSError | None:
    """Return the disk's error if the bytes could not be read at all, None if they were read and are damaged."""
    return error.__cause__ if isinstance(error.__cause__, OSError) else None


class Segments:
    """The files of one directory, ``data/`` or ``index/``."""

    def __init__(
        self,
        files: Files,
        directory: Path,
        segment_bytes: int,
        bases: Sequence[int],
        *,
        write: bool,
        open_max: int = OPEN_SEGMENTS_MAX,
    ) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self._files = files
        self._write = write
        self._bases: tuple[int, ...] = ()
        self._existing: frozenset[int] = frozenset()
        self._set_bases(bases)
        self._open_max = open_max
        self._lock = threading.Lock()
        self._opened: dict[int, File] = {}  # the last used one comes last
        self._unsynced: set[int] = set()

    @classmethod
    def load(
        cls,
        files: Files,
        directory: Path,
        segment_bytes: int,
        *,
        write: bool = False,
        gaps: bool = False,
        open_max: int = OPEN_SEGMENTS_MAX,
    ) -> Segments:
        """List a directory.

        Args:
            files: the file system.
            directory: ``data/`` or ``index/``.
            segment_bytes: size of each file.
            write: open for writing, and reject unexpected files.
            gaps: allow missing files in between: an index can be rebuilt, and a reader reads the other files.
            open_max: number of files without unsynced writes that stay open.

        Raises:
            StoreMismatchError: there is an unexpected file.
            CorruptRecordError: a file is missing between others.
        """
        bases = _bases(files.listdir(directory) or (), directory, strict=write)
        for base in bases:
            if base % segment_bytes:
                raise StoreMismatchError(
                    f"the name is not a multiple of the segment size {segment_bytes}",
                    str(directory / segment_name(base)),
                    "use the segment size with which the store was created",
                )
        for before, base in pairwise(bases):
            if base != before + segment_bytes and not gaps:
                missing = directory / segment_name(before + segment_bytes)
                raise CorruptRecordError("a segment is missing", str(missing), "restore it, or repair from a peer")
        return cls(files, directory, segment_bytes, bases, write=write, open_max=open_max)

    def _set_bases(self, bases: Iterable[int]) -> None:
        self._bases = tuple(sorted(bases))
        self._existing = frozenset(self._bases)

    @property
    def bases(self) -> tuple[int, ...]:
        """Offset of each segment's first byte, ascending."""
        return self._bases

    @property
    def holes(self) -> tuple[tuple[int, int], ...]:
        """Positions [start, end) between two segments whose files are missing."""
        size = self.segment_bytes
        return tuple((before + size, base) for before, base in pairwise(self._bases) if base > before + size)

    def base_of(self, position: int) -> int:
        """Return the start of the segment that covers ``position``."""
        return position - position % self.segment_bytes

    def covers(self, position: int) -> bool:
        """Whether a segment covers ``position``."""
        return position - position % self.segment_bytes in self._existing

    def path(self, position: int) -> Path:
        """Return the file that covers ``position``, whether it exists or not."""
        return self.directory / segment_name(self.base_of(position))

    def _file(self, base: int) -> File:
        with self._lock:
            file = self._opened.pop(base, None)
            if file is not None:
                self._opened[base] = file
                return file
        try:
            opened = self._files.open(self.directory / segment_name(base), write=self._write)
        except OSError as error:
            if not is_out_of_descriptors(error):
                raise
            with self._lock:
                self._close_unused(0)
            opened = self._files.open(self.directory / segment_name(base), write=self._write)
        with self._lock:
            file = self._opened.setdefault(base, opened)
            self._close_unused(self._open_max)
        return file

    def _close_unused(self, most: int) -> None:
        """Drop files from the front until ``most`` are open; each closes once no thread uses it.

        A file that is about to be written is marked before its descriptor is looked up, so it is not dropped between a
        write and its sync.
        """
        if len(self._opened) > most:
            synced = [base for base in self._opened if base not in self._unsynced]
            for base in synced[: len(self._opened) - most]:
                del self._opened[base]

    def _written(self, base: int) -> File:
        """Return a file to write to, which stays open until ``sync``; wait for a descriptor if none is free."""
        with self._lock:
            self._unsynced.add(base)
        return with_descriptor(lambda: self._file(base))

    def _sync(self, base: int) -> None:
        self._written(base).datasync()
        with self._lock:
            self._unsynced.discard(base)
            self._close_unused(self._open_max)

    def read(self, position: int, length: int) -> bytes:
        """Return bytes of one segment; fewer than ``length`` at its end or where the file is too short.

        Raises:
            CorruptRecordError: the disk cannot read them, or the file is missing.
            BusyError: no descriptor is free.
        """
        offset = position % self.segment_bytes
        base = position - offset
        try:
            return self._file(base).pread(min(length, self.segment_bytes - offset), offset)
        except PermissionError:  # not damage
            raise
        except OSError as error:
            where = str(self.directory / segment_name(base))
            if is_out_of_descriptors(error):
                remedy = "close connections, or raise the limit on open files"
                raise BusyError("no file descriptor is free", where, remedy) from error
            raise CorruptRecordError(
                f"the file cannot be read: {error.strerror}",
                where,
                "check the disk; repair the store from a peer, or restore it",
                {"position": position},
            ) from error

    def size_of(self, base: int) -> int:
        """Return the length of a segment's file."""
        return self._file(base).size()

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Write inside one segment, which must exist."""
        offset = position % self.segment_bytes
        self._written(position - offset).pwritev(buffers, offset)

    def create(self, base: int) -> None:
        """Create the segment that starts at ``base`` (if missing) at its full size; ``sync_dir`` makes it durable."""
        if base in self._existing:
            return
        file = with_descriptor(lambda: self._files.open(self.directory / segment_name(base), write=True, create=True))
        file.truncate(0)
        file.truncate(self.segment_bytes)
        file.datasync()  # so that at most the last file of the list is ever found too short
        with self._lock:
            self._opened[base] = file
            self._close_unused(self._open_max)
        self._set_bases((*self._bases, base))

    def fill_up(self, base: int) -> None:
        """Extend a file that a crash left shorter than its size."""
        if self._file(base).size() < self.segment_bytes:
            self._written(base).truncate(self.segment_bytes)

    def sync(self, bases: Iterable[int]) -> None:
        """Make the content of segments durable."""
        for base in bases:
            self._sync(base)

    def sync_dir(self) -> None:
        """Make created and removed segments durable."""
        self._files.sync_dir(self.directory)

    def drop(self, bases: Sequence[int]) -> None:
        """Remove segments in the given order, durably; threads that still read them keep their files."""
        if not bases:
            return
        removed = set(bases)
        self._set_bases(base for base in self._bases if base not in removed)
        for base in bases:
            # Before the name: the last descriptor frees the blocks, and must not be closed here. A file with unsynced
            # writes is closed only once it has no name: their failure then concerns no reader.
            unsynced = self._forget(base)
            self._files.unlink(self.directory / segment_name(base))
            del unsynced
            self._forget(base)  # a reader may have opened it meanwhile
        self.sync_dir()

    def _forget(self, base: int) -> File | None:
        """Drop a file from the list; return it if it has unsynced writes."""
        with self._lock:
            file = self._opened.pop(base, None)
            has_unsynced = base in self._unsynced
            self._unsynced.discard(base)
        return file if has_unsynced else None

    def forget(self) -> None:
        """Drop all files from the list before they are removed; threads that still read them keep them."""
        self._set_bases(())
        self.close()

    def zero(self, start: int, stop: int) -> None:
        """Write zeros over [start, stop), inside one segment."""
        offset = start % self.segment_bytes
        _write_zeros(self._written(start - offset), offset, offset + stop - start)

    def preallocate(self, start: int, stop: int) -> tuple[File, bool]:
        """Write zeros over [start, stop), inside one segment, as far as the disk has space.

        Returns:
            An open file of its own with these writes, to be synced before it is closed, and whether all were written.
        """
        offset = start % self.segment_bytes
        file = with_descriptor(lambda: self._files.open(self.path(start), write=True))
        try:
            _write_zeros(file, offset, offset + stop - start)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            return file, False
        return file, True

    def rewrite(self, position: int, end: int | None = None) -> None:
        """Write all bytes from ``position`` to ``end`` again, as they are read; make them durable.

        Sizes too: the failed sync may have been the one of a new file.
        """
        for base in self._bases:
            if base + self.segment_bytes <= position:
                continue
            at, file = max(position - base, 0), self._written(base)
            size = min(file.size(), self.segment_bytes)
            stop = size if end is None else min(size, end - base)
            while (at := file.next_data(at)) < stop:
                chunk = file.pread(min(_CHUNK_BYTES, stop - at), at)
                file.pwritev([chunk], at)
                at += len(chunk)
            if size == self.segment_bytes:
                file.pwritev([file.pread(1, size - 1)], size - 1)
            self._sync(base)

    def clear_after(self, position: int) -> None:
        """Replace all bytes from ``position`` on, which are zeros as they are read, by a hole; make that durable.

        Removed files too: they return after a loss of power if their directory was never synced.
        """
        self.sync_dir()
        for base in self._bases:
            if base + self.segment_bytes > position:
                file = self._written(base)
                # Two changes of the file's size, whatever the number of bytes: the file system's journal has both.
                file.truncate(max(position - base, 0))
                file.truncate(self.segment_bytes)
                self._sync(base)

    def written_end(self, position: int) -> int:
        """Return the end of the last byte at or after ``position`` that is not zero, else ``position``."""
        end = position
        for base in self._bases:
            if base + self.segment_bytes <= position:
                continue
            at = max(position - base, 0)
            file = self._file(base)
            size = min(file.size(), self.segment_bytes)
            while (at := file.next_data(at)) < size:
                chunk = np.frombuffer(file.pread(min(_CHUNK_BYTES, size - at), at), np.uint8)
                last = np.flatnonzero(chunk)
                if len(last):
                    end = base + at + int(last[-1]) + 1
                at += _CHUNK_BYTES
        return end

    def close(self) -> None:
        """Close all files."""
        with self._lock:
            self._opened = {}
            self._unsynced = set()

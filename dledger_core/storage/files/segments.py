"""A list of fixed-size files that together are one address space: the data files, or the index files, of a store.

Each file is named by the offset of its first byte, 20 decimal digits, and is made at its full size (sparse zeros).
The first one need not start at 0; neighbours follow each other without a gap. One descriptor per file is opened on
first use and lives as long as the file is in the list, because only then does a later sync report a failed write.

One thread writes; any thread reads. The list itself is replaced, never changed in place.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Final

import numpy as np

from dledger_core.checksum import Buffer
from dledger_core.errors import CorruptRecordError, StoreMismatchError
from dledger_core.record import is_segment_name, segment_name
from dledger_core.storage.files.file_system import File, Files

__all__ = ["Segments"]

_CHUNK_BYTES: Final = 1 << 20
_ZEROS: Final = bytes(_CHUNK_BYTES)


def _bases(names: Iterable[str], directory: Path, *, strict: bool) -> list[int]:
    bases = []
    for name in names:
        if is_segment_name(name):
            bases.append(int(name))
        elif strict:
            raise StoreMismatchError(
                f"a file named {name!r} does not belong here", str(directory), "move it out of the store"
            )
    return sorted(bases)


class Segments:
    """The files of one folder, ``data/`` or ``index/``."""

    def __init__(self, files: Files, directory: Path, segment_bytes: int, bases: Sequence[int], *, write: bool) -> None:
        self.directory = directory
        self.segment_bytes = segment_bytes
        self._files = files
        self._write = write
        self._bases: tuple[int, ...] = ()
        self._held: frozenset[int] = frozenset()
        self._set_bases(bases)
        self._opened: dict[int, File] = {}

    @classmethod
    def load(
        cls, files: Files, directory: Path, segment_bytes: int, *, write: bool = False, gaps: bool = False
    ) -> Segments:
        """Lists a folder.

        Args:
            files: the file system.
            directory: the folder.
            segment_bytes: size of each file.
            write: open for writing, and refuse stray files.
            gaps: allow missing files in between (an index can be made again).

        Raises:
            StoreMismatchError: a file does not belong here.
            CorruptRecordError: a file is missing between others.
        """
        bases = _bases(files.listdir(directory) or (), directory, strict=write)
        for base in bases:
            if base % segment_bytes:
                raise StoreMismatchError(
                    f"the name is no multiple of the segment size {segment_bytes}",
                    str(directory / segment_name(base)),
                    "use the segment size the store was made with",
                )
        for before, base in pairwise(bases):
            if base != before + segment_bytes and not gaps:
                missing = directory / segment_name(before + segment_bytes)
                raise CorruptRecordError("a segment is missing", str(missing), "restore it, or repair from a peer")
        return cls(files, directory, segment_bytes, bases, write=write)

    def _set_bases(self, bases: Iterable[int]) -> None:
        self._bases = tuple(sorted(bases))
        self._held = frozenset(self._bases)

    @property
    def bases(self) -> tuple[int, ...]:
        """Offset of each segment's first byte, ascending."""
        return self._bases

    def base_of(self, position: int) -> int:
        """Returns where the segment that holds ``position`` starts."""
        return position - position % self.segment_bytes

    def holds(self, position: int) -> bool:
        """Whether a segment covers ``position``."""
        return position - position % self.segment_bytes in self._held

    def path(self, position: int) -> Path:
        """Returns the file that covers ``position``, whether it exists or not."""
        return self.directory / segment_name(self.base_of(position))

    def _file(self, base: int) -> File:
        file = self._opened.get(base)
        if file is None:
            opened = self._files.open(self.directory / segment_name(base), write=self._write)
            file = self._opened.setdefault(base, opened)
        return file

    def read(self, position: int, length: int) -> bytes:
        """Returns bytes of one segment; fewer than ``length`` at its end or where the file is too short.

        Raises:
            CorruptRecordError: the disk cannot read them, or the file is gone.
        """
        offset = position % self.segment_bytes
        base = position - offset
        try:
            return self._file(base).pread(min(length, self.segment_bytes - offset), offset)
        except PermissionError:  # the file's owner's business, not damage
            raise
        except OSError as error:
            where = str(self.directory / segment_name(base))
            raise CorruptRecordError(
                f"the file cannot be read: {error.strerror}",
                where,
                "check the disk; repair the store from a peer, or restore it",
                {"position": position},
            ) from error

    def size_of(self, base: int) -> int:
        """Returns the length of a segment's file."""
        return self._file(base).size()

    def write(self, position: int, buffers: Sequence[Buffer]) -> None:
        """Writes inside one segment, which must exist."""
        offset = position % self.segment_bytes
        self._file(position - offset).pwritev(buffers, offset)

    def create(self, base: int) -> None:
        """Makes the segment that starts at ``base`` (if absent) at its full size; ``sync_dir`` makes it durable."""
        if base in self._held:
            return
        file = self._files.open(self.directory / segment_name(base), write=True, create=True)
        file.truncate(0)
        file.truncate(self.segment_bytes)
        file.datasync()  # so that at most the last file of the list is ever found too short
        self._opened[base] = file
        self._set_bases((*self._bases, base))

    def fill_up(self, base: int) -> None:
        """Extends a file that a crash left shorter than its size."""
        file = self._file(base)
        if file.size() < self.segment_bytes:
            file.truncate(self.segment_bytes)

    def sync(self, bases: Iterable[int]) -> None:
        """Makes the content of segments durable."""
        for base in bases:
            self._file(base).datasync()

    def sync_dir(self) -> None:
        """Makes created and removed segments durable."""
        self._files.sync_dir(self.directory)

    def drop(self, bases: Sequence[int]) -> None:
        """Removes segments in the order given, durably; threads that still read them keep their files."""
        if not bases:
            return
        gone = set(bases)
        self._set_bases(base for base in self._bases if base not in gone)
        for base in bases:
            self._files.unlink(self.directory / segment_name(base))
            self._opened.pop(base, None)
        self.sync_dir()

    def forget(self) -> None:
        """Takes note that all files are being removed; threads that still read them keep them."""
        self._set_bases(())
        self._opened = {}

    def zero(self, start: int, stop: int) -> None:
        """Writes zeros over [start, stop), which lies inside one segment."""
        for at in range(start, stop, _CHUNK_BYTES):
            length = min(_CHUNK_BYTES, stop - at)
            self.write(at, [memoryview(_ZEROS)[:length]])

    def rewrite(self, position: int, end: int | None = None) -> None:
        """Writes what lies at or behind ``position``, up to ``end``, once more, as it can be read; makes it durable.

        Their sizes too: the sync that failed may have been the one of a new file.
        """
        for base in self._bases:
            if base + self.segment_bytes <= position:
                continue
            at, file = max(position - base, 0), self._file(base)
            size = min(file.size(), self.segment_bytes)
            stop = size if end is None else min(size, end - base)
            while (at := file.next_data(at)) < stop:
                chunk = file.pread(min(_CHUNK_BYTES, stop - at), at)
                file.pwritev([chunk], at)
                at += len(chunk)
            if size == self.segment_bytes:
                file.pwritev([file.pread(1, size - 1)], size - 1)
            file.datasync()

    def written_end(self, position: int) -> int:
        """Returns the position behind the last byte at or after ``position`` that is not zero, else ``position``."""
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
        """Lets go of all files."""
        self._opened = {}

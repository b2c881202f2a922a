"""The file system of the tests, with limits on the operations of one input."""

from __future__ import annotations

import errno
from collections.abc import Sequence
from pathlib import Path

from tests.fuzz.finding import Finding
from tests.support.faulty_files import FaultyFile, FaultyFiles

OPERATIONS_MAX = 20_000
FILE_BYTES_MAX = 1 << 20
"""A file system rejects a larger file; the limit is small, because the files are in memory."""


class CountedFile(FaultyFile):
    def pread(self, length: int, offset: int) -> bytes:
        self.files.count()
        if not (0 <= length < 1 << 31 and 0 <= offset < 1 << 63):
            raise Finding(f"a read of {length} bytes at {offset}")
        return super().pread(length, offset)

    def pwritev(self, buffers: Sequence[bytes], offset: int) -> None:
        self._refuse_above(offset + sum(len(memoryview(buffer).cast("B")) for buffer in buffers if len(buffer)))
        super().pwritev(buffers, offset)

    def truncate(self, size: int) -> None:
        self._refuse_above(size)
        super().truncate(size)

    def next_data(self, offset: int) -> int:
        self.files.count()
        return super().next_data(offset)

    def _refuse_above(self, size: int) -> None:
        if size > FILE_BYTES_MAX:
            raise OSError(errno.EFBIG, "File too large", str(self.path))


class CountedFiles(FaultyFiles):
    def __init__(self, seed: int = 0) -> None:
        super().__init__(seed)
        self.counted = 0

    def count(self) -> None:
        self.counted += 1
        if self.counted > OPERATIONS_MAX:
            raise Finding(f"more than {OPERATIONS_MAX} operations on files: it does not end")

    def operation(self, kind: str, path: Path) -> None:
        self.count()
        super().operation(kind, path)

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> CountedFile:
        opened = super().open(path, write=write, create=create)
        return CountedFile(self, opened.inode, path)

"""Open files of a directory: a limited number, none with unsynced writes is dropped; no descriptor is no damage."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from dledger_core.errors import BusyError, CorruptRecordError
from dledger_core.storage.files.segments import Segments
from tests.support.faulty_files import FaultyFiles

DATA = Path("/data")
SIZE = 1024


class LimitedFiles(FaultyFiles):
    """Files of which a limited number may be open.

    Attributes:
        opened: paths in the order in which they were opened.
        refuses: the next opens that fail.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opened: list[Path] = []
        self.refuses = 0

    def open(self, path: Path, *, write: bool = False, create: bool = False):
        if self.refuses:
            self.refuses -= 1
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        self.opened.append(path)
        return super().open(path, write=write, create=create)


@pytest.fixture
def files() -> LimitedFiles:
    made = LimitedFiles()
    made.mkdir(DATA)
    return made


@pytest.fixture
def segments(files: LimitedFiles) -> Segments:
    """Ten files, each full of its number; two stay open."""
    made = Segments(files, DATA, SIZE, (), write=True, open_max=2)
    for number in range(10):
        made.create(number * SIZE)
        made.write(number * SIZE, [bytes([number]) * SIZE])
    made.sync(made.bases)
    files.opened.clear()
    return made


def read(segments: Segments, number: int) -> bytes:
    return segments.read(number * SIZE, 1)


def test_last_used_files_stay_open(files: LimitedFiles, segments: Segments) -> None:
    assert [read(segments, number) for number in (1, 2, 1, 3, 1, 2)] == [b"\1", b"\2", b"\1", b"\3", b"\1", b"\2"]
    assert [int(path.name) // SIZE for path in files.opened] == [1, 2, 3, 2]


def test_files_with_unsynced_writes_stay_open(files: LimitedFiles, segments: Segments) -> None:
    for number in range(5):
        segments.write(number * SIZE, [b"x"])
    for number in range(9, 4, -1):
        read(segments, number)
    files.opened.clear()
    segments.sync([number * SIZE for number in range(5)])
    assert files.opened == []
    assert files.closed_unsynced == []
    for number in range(9, 4, -1):
        read(segments, number)
    files.opened.clear()
    assert read(segments, 0) == b"x"
    assert len(files.opened) == 1


def test_failed_write_is_reported_after_other_files_were_used(files: LimitedFiles, segments: Segments) -> None:
    segments.write(0, [b"x"])
    files.names[segments.path(0)].fail_sync(errno.EIO)
    for number in range(1, 10):
        read(segments, number)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        segments.sync([0])


def test_read_without_descriptor_is_busy_not_damaged(files: LimitedFiles, segments: Segments) -> None:
    files.refuses = 1
    assert read(segments, 1) == b"\1", "the others that were open made room"
    files.opened.clear()
    assert [read(segments, number) for number in (1, 9)] == [b"\1", b"\x09"]
    assert files.opened == [segments.path(9 * SIZE)]
    files.refuses = 2
    with pytest.raises(BusyError) as caught:
        read(segments, 5)
    assert not isinstance(caught.value, CorruptRecordError)
    assert caught.value.retriable
    assert read(segments, 5) == b"\5"


def test_write_waits_for_descriptor(files: LimitedFiles, segments: Segments) -> None:
    files.refuses = 5
    segments.write(3 * SIZE, [b"x"])
    files.refuses = 3
    segments.create(10 * SIZE)
    segments.sync(segments.bases)
    assert (read(segments, 3), read(segments, 10)) == (b"x", b"\0")

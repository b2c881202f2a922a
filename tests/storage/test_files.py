"""The real file system behind the seam."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dledger_core.storage.files.file_system import OsFiles


def test_vectored_writes_of_any_number(tmp_path: Path) -> None:
    files = OsFiles()
    pieces = [bytes([n % 251]) * (n % 5) for n in range(3000)]
    file = files.open(tmp_path / "f", write=True, create=True)
    file.pwritev(pieces, 7)
    file.datasync()
    assert file.pread(1 << 20, 0) == bytes(7) + b"".join(pieces)


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: real(fd, [bytes(buffers[0])[:3]], offset))
    file = OsFiles().open(tmp_path / "f", write=True, create=True)
    file.pwritev([b"abcdefgh", b"", b"ijk"], 0)
    assert file.pread(100, 0) == b"abcdefghijk"
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="wrote nothing"):
        file.pwritev([b"a"], 0)


def test_holes_are_skipped(tmp_path: Path) -> None:
    file = OsFiles().open(tmp_path / "f", write=True, create=True)
    file.truncate(10 << 20)
    assert file.next_data(0) == 10 << 20
    file.pwritev([b"x"], 5 << 20)
    assert 0 < file.next_data(0) <= 5 << 20
    assert file.next_data(11 << 20) == 10 << 20


def test_an_unlinked_file_can_still_be_read(tmp_path: Path) -> None:
    files = OsFiles()
    file = files.open(tmp_path / "f", write=True, create=True)
    file.pwritev([b"abc"], 0)
    files.unlink(tmp_path / "f")
    assert file.pread(3, 0) == b"abc"
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.pread(3, 0)


def test_folders_and_small_files(tmp_path: Path) -> None:
    files = OsFiles()
    files.mkdir(tmp_path / "a" / "b")
    files.mkdir(tmp_path / "a" / "b")
    assert files.read(tmp_path / "a" / "none") is None
    assert files.listdir(tmp_path / "none") is None
    for content in (b"one", b"two"):
        files.replace(tmp_path / "a" / "file", content)
        assert files.read(tmp_path / "a" / "file") == content
    assert files.listdir(tmp_path / "a") == ["b", "file"]


def test_a_lock_is_held_once(tmp_path: Path) -> None:
    files = OsFiles()
    lock = files.lock(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        files.lock(tmp_path / "lock")
    assert files.read(tmp_path / "lock") == f"{os.getpid()}\n".encode()
    lock.close()
    files.lock(tmp_path / "lock").close()

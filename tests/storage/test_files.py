"""The operating system's file system; ``tests/contracts/test_files.py`` has the contract of all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dledger_core.storage.files.file_system import OsFiles


def test_pwritev_writes_any_number_of_buffers(tmp_path: Path) -> None:
    files = OsFiles()
    pieces = [bytes([n % 251]) * (n % 5) for n in range(3000)]
    file = files.open(tmp_path / "f", write=True, create=True)
    file.pwritev(pieces, 7)
    file.datasync()
    assert file.pread(1 << 20, 0) == bytes(7) + b"".join(pieces)


def test_pwritev_continues_short_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: real(fd, [bytes(buffers[0])[:3]], offset))
    file = OsFiles().open(tmp_path / "f", write=True, create=True)
    file.pwritev([b"abcdefgh", b"", b"ijk"], 0)
    assert file.pread(100, 0) == b"abcdefghijk"
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="wrote nothing"):
        file.pwritev([b"a"], 0)


def test_closed_file_rejects_reads(tmp_path: Path) -> None:
    files = OsFiles()
    file = files.open(tmp_path / "f", write=True, create=True)
    file.pwritev([b"abc"], 0)
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.pread(3, 0)


def test_next_data_skips_hole(tmp_path: Path) -> None:
    file = OsFiles().open(tmp_path / "f", write=True, create=True)
    file.truncate(10 << 20)
    assert file.next_data(0) == 10 << 20
    file.pwritev([b"x"], 5 << 20)
    assert 0 < file.next_data(0) <= 5 << 20


def test_lock_file_contains_process_id(tmp_path: Path) -> None:
    lock = OsFiles().lock(tmp_path / "lock")
    assert OsFiles().read(tmp_path / "lock") == f"{os.getpid()}\n".encode()
    lock.close()

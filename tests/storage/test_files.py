"""The operating system's file system; ``tests/contracts/test_files.py`` has the contract of all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from dledger_core.storage.files.file_system import OsFile, OsFiles


@pytest.fixture
def file(tmp_path: Path) -> OsFile:
    return OsFiles().open(tmp_path / "f", write=True, create=True)


def test_pwritev_writes_any_number_of_buffers(file: OsFile) -> None:
    pieces = [bytes([n % 251]) * (n % 5) for n in range(3000)]
    file.pwritev(pieces, 7)
    assert file.pread(1 << 20, 0) == bytes(7) + b"".join(pieces)


def test_pwritev_continues_short_write(file: OsFile, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwritev
    monkeypatch.setattr(os, "pwritev", lambda fd, buffers, offset: real(fd, [bytes(buffers[0])[:3]], offset))
    file.pwritev([b"abcdefgh", b"", b"ijk"], 0)
    assert file.pread(100, 0) == b"abcdefghijk"
    monkeypatch.setattr(os, "pwritev", lambda *_: 0)
    with pytest.raises(OSError, match="wrote nothing"):
        file.pwritev([b"a"], 0)


def test_closed_file_rejects_reads(file: OsFile) -> None:
    file.close()
    file.close()
    with pytest.raises(OSError, match="Bad file descriptor"):
        file.pread(3, 0)


def test_next_data_skips_hole(file: OsFile) -> None:
    file.truncate(10 << 20)
    assert file.next_data(0) == 10 << 20
    file.pwritev([b"x"], 5 << 20)
    assert 0 < file.next_data(0) <= 5 << 20

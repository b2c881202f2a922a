"""Contract of Files, for each implementation: the operating system's and the tests' disk in memory."""

from __future__ import annotations

import os
import queue
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core.storage.files.file_system import OsFiles
from tests.fuzz.counted_files import CountedFiles
from tests.support.faulty_files import FaultyFiles

ANY_FILES = pytest.mark.parametrize("kind", [OsFiles, FaultyFiles, CountedFiles])


def made(kind: type[Any], root: Path) -> Any:
    files = kind()
    files.mkdir(root)
    return files


@ANY_FILES
def test_write_after_end_leaves_zeros_before_it(kind: type[Any], tmp_path: Path) -> None:
    file = made(kind, tmp_path).open(tmp_path / "f", write=True, create=True)
    file.pwritev([b"ab", b"", b"c"], 7)
    file.datasync()
    assert file.pread(100, 0) == bytes(7) + b"abc"
    assert file.size() == 10


@ANY_FILES
def test_next_data_never_skips_data(kind: type[Any], tmp_path: Path) -> None:
    file = made(kind, tmp_path).open(tmp_path / "f", write=True, create=True)
    file.truncate(1 << 20)
    file.pwritev([b"x"], 5 << 17)
    assert 0 <= file.next_data(0) <= 5 << 17
    assert file.next_data(11 << 20) == 1 << 20


@ANY_FILES
def test_renamed_file_replaces_another_one(kind: type[Any], tmp_path: Path) -> None:
    files = made(kind, tmp_path)
    for name in ("old", "new"):
        file = files.open(tmp_path / name, write=True, create=True)
        file.pwritev([name.encode()], 0)
        file.datasync()
        file.close()
    files.rename(tmp_path / "new", "old")
    assert files.read(tmp_path / "old") == b"new"
    assert files.listdir(tmp_path) == ["old"]


@ANY_FILES
def test_unlinked_file_is_readable_while_open(kind: type[Any], tmp_path: Path) -> None:
    files = made(kind, tmp_path)
    file = files.open(tmp_path / "f", write=True, create=True)
    file.pwritev([b"abc"], 0)
    files.unlink(tmp_path / "f")
    assert file.pread(3, 0) == b"abc"
    assert files.listdir(tmp_path) == []


def test_blocks_of_large_unlinked_file_are_freed_by_another_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = queue.SimpleQueue[str]()
    close = os.close

    def closing(fd: int) -> None:
        closed.put(threading.current_thread().name)
        close(fd)

    files = OsFiles()
    for name, size in (("small", 1 << 10), ("large", 32 << 20)):
        file = files.open(tmp_path / name, write=True, create=True)
        file.truncate(size)
        file.close()
    monkeypatch.setattr(os, "close", closing)
    for name in ("small", "large"):
        files.unlink(tmp_path / name)
    assert closed.get(timeout=60) != threading.main_thread().name
    assert closed.empty()
    assert files.listdir(tmp_path) == []


@ANY_FILES
def test_missing_files_and_directories_are_none_or_errors(kind: type[Any], tmp_path: Path) -> None:
    files = made(kind, tmp_path)
    assert files.read(tmp_path / "none") is None
    assert files.listdir(tmp_path / "none") is None
    for call in (files.open, files.unlink):
        with pytest.raises(FileNotFoundError):
            call(tmp_path / "none")


@ANY_FILES
def test_mkdir_is_idempotent_and_makes_parents(kind: type[Any], tmp_path: Path) -> None:
    files = made(kind, tmp_path)
    files.mkdir(tmp_path / "a" / "b")
    files.mkdir(tmp_path / "a" / "b")
    assert files.listdir(tmp_path / "a") == ["b"]


@ANY_FILES
def test_lock_excludes_second_holder_until_closed(kind: type[Any], tmp_path: Path) -> None:
    files = made(kind, tmp_path)
    lock = files.lock(tmp_path / "lock")
    with pytest.raises(BlockingIOError):
        files.lock(tmp_path / "lock")
    lock.close()
    files.lock(tmp_path / "lock").close()


NAMES = st.sampled_from(["a", "b"])
STEPS = st.one_of(
    st.tuples(st.just("write"), NAMES, st.integers(0, 1200), st.binary(max_size=700)),
    st.tuples(st.just("truncate"), NAMES, st.integers(0, 1500)),
    st.tuples(st.just("replace"), NAMES, st.binary(max_size=20)),
    st.tuples(st.just("unlink"), NAMES),
    st.tuples(st.just("pread"), NAMES, st.integers(0, 1500), st.integers(0, 1500)),
)


def results(files: Any, root: Path, steps: list[tuple[Any, ...]]) -> list[object]:
    """Return the result of every step, with the content of all files after it."""
    found: list[object] = []
    for step, name, *arguments in steps:
        path = root / name
        try:
            match step:
                case "write":
                    files.open(path, write=True, create=True).pwritev([arguments[1]], arguments[0])
                case "truncate":
                    files.open(path, write=True).truncate(arguments[0])
                case "pread":
                    found.append(files.open(path).pread(*arguments))
                case _:
                    getattr(files, step)(path, *arguments)
        except OSError as error:
            found.append(error.errno)
        found.append({name: files.read(root / name) for name in files.listdir(root)})
    return found


@given(st.lists(STEPS, max_size=12))
@settings(max_examples=60)
def test_disk_in_memory_agrees_with_operating_system(steps: list[tuple[Any, ...]]) -> None:
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory)
        assert results(made(FaultyFiles, root), root, steps) == results(OsFiles(), root, steps)

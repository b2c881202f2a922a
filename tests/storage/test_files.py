"""The operating system's file system; ``tests/contracts/test_files.py`` has the contract of all."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from dledger_core.record import segment_name
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
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        file.pread(3, 0)


def test_next_data_skips_hole(file: OsFile) -> None:
    file.truncate(10 << 20)
    assert file.next_data(0) == 10 << 20
    file.pwritev([b"x"], 5 << 20)
    assert 0 < file.next_data(0) <= 5 << 20


RECORD_CALLS = """
import json, os, sys
from pathlib import Path
from dledger_core.ids import NodeId, Term
from dledger_core.raft.ready import HardState
from tests.support.logs import append, open_log, place

root, calls, opened = Path(sys.argv[1]), [], {}

def watch(name, path_of):
    real = getattr(os, name)
    def call(*arguments, **options):
        result = real(*arguments, **options)
        path = path_of(arguments, result)
        if path is not None:
            calls.append((name, os.path.relpath(path, root)))
        return result
    setattr(os, name, call)

def open_path(arguments, fd):
    opened[fd] = os.fspath(arguments[0])
    return opened[fd] if arguments[1] & (os.O_CREAT | os.O_RDWR) else None

watch("open", open_path)
watch("replace", lambda arguments, _: arguments[1])
for name in ("pwritev", "ftruncate", "fdatasync", "fsync"):
    watch(name, lambda arguments, _: opened[arguments[0]])
log = open_log(directory=root)
append(log, [b"x"])
for action in (
    lambda: log.persist(None, None, [place(log, 1, [b"y"])]),
    lambda: log.persist(HardState(Term(2), NodeId("n1")), None, []),
    lambda: log.persist(None, None, [place(log, 2, [b"z" * 4000], term=2)]),
):
    del calls[:]
    action()
    print(json.dumps(calls))
"""
DATA_FILE, NEXT_FILE, INDEX_FILE = f"data/{segment_name(0)}", f"data/{segment_name(4096)}", f"index/{segment_name(0)}"


def replaced(path: str) -> list[list[str]]:
    temporary, directory = f"{path}.tmp", os.path.dirname(path) or "."
    return [["open", temporary], ["pwritev", temporary], ["fsync", temporary], ["replace", path], ["fsync", directory]]


def test_each_write_is_synced_in_order_before_success(tmp_path: Path) -> None:
    """The other tests of lost writes use a disk in memory; here are the calls that reach the kernel."""
    command = [sys.executable, "-c", RECORD_CALLS, str(tmp_path)]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, check=True)
    appended, voted, rolled = map(json.loads, done.stdout.splitlines())
    assert appended == [["pwritev", DATA_FILE], ["pwritev", INDEX_FILE], ["fdatasync", DATA_FILE]]
    assert voted == [*replaced("meta/hard-state"), *replaced("meta/hard-state.2"), *replaced("currterm")]
    created = [["open", NEXT_FILE], ["ftruncate", NEXT_FILE], ["ftruncate", NEXT_FILE], ["fdatasync", NEXT_FILE]]
    assert rolled == [
        *created,
        ["fsync", "data"],
        *(["pwritev", path] for path in (DATA_FILE, NEXT_FILE, INDEX_FILE)),
        *(["fdatasync", path] for path in (DATA_FILE, NEXT_FILE, INDEX_FILE)),
        *replaced("meta/checkpoint"),
        *replaced("meta/checkpoint.2"),
    ]

"""Failing syncs: the kernel reports a lost write once per open file, to whichever sync comes first."""

from __future__ import annotations

import dataclasses
import errno
import os
import threading
from pathlib import Path

import pytest

from dledger_core.errors import DiskFailedError
from dledger_core.ids import Index, Position, Term
from dledger_core.storage.write.trim import LogStart
from tests.storage.sample import DATA, INDEX
from tests.support.faulty_files import FaultyFiles
from tests.support.logs import MEMBERS, NO_TABLES, SMALL, append, open_log, place, read_all

PREALLOCATING = dataclasses.replace(SMALL, preallocate_bytes=2000)
WAIT_S = 20.0


@pytest.fixture
def files() -> FaultyFiles:
    append(log := open_log(files := FaultyFiles()), [b"a"])
    log.close()
    return files


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_failed_sync_of_preallocation_fails_the_writers_sync(files: FaultyFiles, number: int) -> None:
    """The thread that preallocates receives the report first, and has reported nothing when the writer syncs."""
    log = open_log(files, config=PREALLOCATING)
    batch, real = place(log, 1, [b"b"]), files.replace
    failed, written = threading.Event(), threading.Event()
    thread = threading.Thread(target=log.preallocate)

    def replace(path: Path, data: bytes) -> None:
        if threading.current_thread() is thread:
            failed.set()
            assert written.wait(WAIT_S)
        real(path, data)

    def preallocate(path: Path) -> None:
        files.before_sync = None
        assert path.parent == DATA
        files.fail_errno, files.fail_at = number, files.operations + 2  # the write of zeros, their sync
        thread.start()
        failed.wait(1.0)

    files.replace, files.before_sync = replace, preallocate  # type: ignore[method-assign]
    try:
        with pytest.raises(DiskFailedError):
            log.persist(None, None, [batch])
    finally:
        written.set()
        thread.join(WAIT_S)
    with pytest.raises(DiskFailedError):
        log.persist(None, None, [])
    files.crash(0.0)
    assert read_all(open_log(files)) == [(1, b"a")], "the acknowledged entry would be lost"


def test_write_returns_no_success_after_failure_of_another_thread(files: FaultyFiles) -> None:
    log = open_log(files)
    batch = place(log, 1, [b"b"])
    files.before_sync = lambda _: log.reject_writes(RuntimeError("on purpose"))
    with pytest.raises(DiskFailedError):
        log.persist(None, None, [batch])


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_writer_that_fails_is_final_on_a_full_disk(files: FaultyFiles, number: int) -> None:
    log = open_log(files)
    batch = place(log, 1, [b"b"])
    files.before_sync = files.fail_writeback
    files.fail_errno = number
    for batches in ([batch], []):
        with pytest.raises(DiskFailedError):
            log.persist(None, None, batches)
        files.before_sync = None


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_failed_sync_of_zeros_alone_is_final_on_a_full_disk(files: FaultyFiles, number: int) -> None:
    log = open_log(files, config=PREALLOCATING)
    files.fail_errno, files.fail_at = number, files.operations + 2  # the write of zeros, their sync
    assert not log.preallocate()
    with pytest.raises(DiskFailedError):
        log.save_checkpoint(0)


def test_no_file_is_closed_with_unsynced_writes(files: FaultyFiles) -> None:
    log = open_log(files, config=PREALLOCATING)
    for number in range(12):
        append(log, [bytes([number])] * 40)
        log.preallocate()
    log.stage_truncate(Index(90))
    log.persist(None, Index(90), [])
    log.close()
    log = open_log(files, config=PREALLOCATING)
    append(log, [b"b"] * 100)
    log.trim(120, NO_TABLES, 120)
    start = LogStart(
        first_index=Index(1000),
        position=Position(1 << 16),
        previous_term=Term(1),
        log_uuid=None,
        tables=NO_TABLES,
        members=MEMBERS,
    )
    log.stage_restart(start)
    log.persist(None, None, [], start)
    append(log, [b"c"])
    log.close()
    assert [path for path in files.closed_unsynced if path.parent in (DATA, INDEX)] == []


def test_failure_is_reported_once_to_each_open_file() -> None:
    """The disk in memory behaves like the kernel's ``errseq``."""
    files, path = FaultyFiles(), Path("/d/f")
    files.mkdir(path.parent)
    first, second = (files.open(path, write=True, create=True) for _ in range(2))
    first.pwritev([b"x"], 0)
    files.fail_writeback(path)
    third = files.open(path, write=True)
    for file in (second, third, first):
        with pytest.raises(OSError, match=os.strerror(errno.EIO)):
            file.datasync()
    for file in (first, second, third, files.open(path, write=True)):
        file.datasync()
    files.crash(0.0)
    assert files.names == {}

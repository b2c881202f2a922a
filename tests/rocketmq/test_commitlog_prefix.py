"""Messages of an old CommitLog by position: all of a real broker's, in any steps; what is refused, and why."""

from __future__ import annotations

import errno
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from dledger_core.errors import BadRequestError, CorruptRecordError, DLedgerError, IndexOutOfRangeError
from dledger_core.rocketmq.store import commitlog_prefix
from dledger_core.rocketmq.store.commit_log import BLANK_MAGIC, commit_log_files
from dledger_core.rocketmq.store.commitlog_prefix import CommitLogPrefix
from dledger_core.storage.files.file_system import OsFile, OsFiles
from tests.rocketmq.golden import MIXED, extract

FILE_BYTES = 131_072
END = 2 * FILE_BYTES


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The CommitLog that a real broker closed when it was upgraded."""
    return extract(MIXED, "n0/commitlog", tmp_path_factory.mktemp("golden"))


@pytest.fixture
def folder(golden: Path, tmp_path: Path) -> Path:
    return shutil.copytree(golden, tmp_path / "commitlog")


def all_of(folder: Path) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for file in commit_log_files(folder):
        for batch in file.scan():
            if hasattr(batch, "num_rows"):
                found |= dict(zip(*(batch.column(name).to_pylist() for name in ("position", "body")), strict=True))
    return found


@pytest.mark.parametrize("max_bytes", [1, 1000, 1 << 20])
def test_reading_on_from_the_first_position_gives_every_message(golden: Path, max_bytes: int) -> None:
    old, position = CommitLogPrefix(golden), 0
    found: dict[int, bytes] = {}
    largest = max(map(len, all_of(golden).values()))
    while (run := old.read(position, max_bytes)) is not None:
        ends = np.cumsum(run.sizes, dtype=np.int64).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            found[position + begin] = bytes(run.data[begin:end])
        assert len(run.data) <= max(max_bytes, largest)
        assert run.next_position > position
        position = run.next_position
    assert found == all_of(golden)
    assert position == END


def test_what_no_file_holds_is_nothing(golden: Path, tmp_path: Path) -> None:
    old = CommitLogPrefix(golden)
    assert old.read(END, 100) is None
    assert old.read(1 << 62, 100) is None
    missing = CommitLogPrefix(tmp_path / "none")
    assert missing.read(0, 100) is None
    shutil.copytree(golden, tmp_path / "none")  # laid out after somebody asked
    assert missing.read(0, 100) is not None
    shutil.rmtree(tmp_path / "none")  # and taken away again
    assert missing.read(0, 100) is None


def test_a_later_first_file(folder: Path) -> None:
    (folder / f"{0:020}").unlink()
    old = CommitLogPrefix(folder)
    assert old.read(0, 100) is None
    run = old.read(FILE_BYTES, 100)
    assert run is not None
    assert run.count == 1


def test_only_where_a_message_begins(golden: Path) -> None:
    old, positions = CommitLogPrefix(golden), sorted(all_of(golden))
    for position in (positions[3] + 1, positions[3] + 40, positions[4] - 1):
        with pytest.raises(IndexOutOfRangeError, match=f"no message begins at position {position}") as found:
            old.read(position, 1)
        assert found.value.values["position"] == position


def spoil(path: Path, at: int, data: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(data)


@pytest.mark.parametrize(
    ("where", "error"),
    [
        (0, CorruptRecordError),  # the size
        (4, IndexOutOfRangeError),  # the magic
        (30, IndexOutOfRangeError),  # its position: nothing says that this is a message of this place
        (10, CorruptRecordError),  # the CRC
        (100, CorruptRecordError),  # the body
    ],
)
def test_damage_is_never_served_and_what_is_before_it_is(folder: Path, where: int, error: type[DLedgerError]) -> None:
    positions = sorted(at for at in all_of(folder) if at < FILE_BYTES)
    damaged = positions[5]
    path = folder / f"{0:020}"
    byte = path.read_bytes()[damaged + where]
    spoil(path, damaged + where, bytes([byte ^ 0x55]))
    old = CommitLogPrefix(folder)
    run = old.read(0, 1 << 20)
    assert run is not None
    assert (run.count, run.next_position) == (5, damaged)
    with pytest.raises(error):
        old.read(damaged, 1 << 20)
    after = old.read(positions[6], 1 << 20)
    assert after is not None
    assert after.count == len(positions) - 6


def test_the_magic_of_a_files_end_alone_is_none(folder: Path) -> None:
    positions = sorted(at for at in all_of(folder) if at < FILE_BYTES)
    spoil(folder / f"{0:020}", positions[5] + 4, struct.pack(">i", BLANK_MAGIC))
    with pytest.raises(IndexOutOfRangeError):
        CommitLogPrefix(folder).read(positions[5], 1 << 20)


def test_a_file_that_cannot_be_read_is_not_one_that_is_gone(folder: Path) -> None:
    class Failing(OsFiles):
        def open(self, path: Path, *, write: bool = False, create: bool = False) -> OsFile:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CorruptRecordError, match="cannot be read: Input/output error"):
        CommitLogPrefix(folder, Failing()).read(0, 100)


def test_a_file_that_was_copied_anew_is_read(folder: Path) -> None:
    path = folder / f"{FILE_BYTES:020}"
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    old = CommitLogPrefix(folder)
    assert old.read(FILE_BYTES + 1000, 100) is None
    path.write_bytes(whole)
    run = old.read(max(all_of(folder)), 100)
    assert run is not None
    assert run.count == 1


def test_a_message_that_is_too_large_says_where_to_go_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    messages = all_of(folder)
    largest = max(messages, key=lambda at: len(messages[at]))
    monkeypatch.setattr(commitlog_prefix, "MESSAGE_BYTES_MAX", len(messages[largest]) - 1)
    with pytest.raises(BadRequestError, match="too large to be served") as found:
        CommitLogPrefix(folder).read(largest, 1)
    assert str(largest + len(messages[largest])) in found.value.remedy


def test_a_few_bytes_do_not_hold_all_that_was_read(folder: Path) -> None:
    positions = sorted(at for at in all_of(folder) if at < FILE_BYTES)
    run = CommitLogPrefix(folder).read(positions[-1], 16 << 20)
    assert run is not None
    assert len(run.data.obj) <= 2 * len(run.data)  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [0, 7, 50])
def test_what_was_cut_from_a_file_is_damage_and_not_its_end(folder: Path, left: int) -> None:
    positions = sorted(at for at in all_of(folder) if at < FILE_BYTES)
    old = CommitLogPrefix(folder)
    assert old.read(0, 100) is not None  # it has the files' sizes now
    with (folder / f"{0:020}").open("r+b") as file:
        file.truncate(positions[2] + left)
    run = old.read(0, 1 << 20)
    assert run is not None
    assert (run.count, run.next_position) == (2, positions[2])
    with pytest.raises(CorruptRecordError):
        old.read(positions[2], 1 << 20)

"""Messages of a commitlog prefix by position: a real broker's, in any steps; damage is never served."""

from __future__ import annotations

import errno
import shutil
import struct
from pathlib import Path

import numpy as np
import pytest

from dledger_core.errors import BadRequestError, CorruptRecordError, DLedgerError, IndexOutOfRangeError
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
def directory(golden: Path, tmp_path: Path) -> Path:
    return shutil.copytree(golden, tmp_path / "commitlog")


def all_of(directory: Path) -> dict[int, bytes]:
    found: dict[int, bytes] = {}
    for file in commit_log_files(directory):
        for each in file.scan():
            if hasattr(each, "num_rows"):
                found |= dict(zip(*(each.column(name).to_pylist() for name in ("position", "body")), strict=True))
    return found


@pytest.mark.parametrize("max_bytes", [1, 1000, 1 << 20])
def test_reads_from_first_position_return_every_message(golden: Path, max_bytes: int) -> None:
    prefix, position = CommitLogPrefix(golden), 0
    found: dict[int, bytes] = {}
    largest = max(map(len, all_of(golden).values()))
    while (batch := prefix.read(position, max_bytes)) is not None:
        ends = np.cumsum(batch.sizes, dtype=np.int64).tolist()
        for begin, end in zip([0, *ends], ends, strict=False):
            found[position + begin] = bytes(batch.data[begin:end])
        assert len(batch.data) <= max(max_bytes, largest)
        assert batch.next_position > position
        position = batch.next_position
    assert found == all_of(golden)
    assert position == END


def test_read_returns_none_without_file_at_position(golden: Path, tmp_path: Path) -> None:
    prefix = CommitLogPrefix(golden)
    assert prefix.read(END, 100) is None
    assert prefix.read(1 << 62, 100) is None
    missing = CommitLogPrefix(tmp_path / "none")
    assert missing.read(0, 100) is None
    shutil.copytree(golden, tmp_path / "none")  # created after the first read
    assert missing.read(0, 100) is not None
    shutil.rmtree(tmp_path / "none")  # and removed again
    assert missing.read(0, 100) is None


def test_read_works_after_first_file_was_deleted(directory: Path) -> None:
    (directory / f"{0:020}").unlink()
    prefix = CommitLogPrefix(directory)
    assert prefix.read(0, 100) is None
    batch = prefix.read(FILE_BYTES, 100)
    assert batch is not None
    assert batch.count == 1


def test_read_inside_message_is_out_of_range(golden: Path) -> None:
    prefix, positions = CommitLogPrefix(golden), sorted(all_of(golden))
    for position in (positions[3] + 1, positions[3] + 40, positions[4] - 1):
        with pytest.raises(IndexOutOfRangeError) as found:
            prefix.read(position, 1)
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
        (30, IndexOutOfRangeError),  # its position: it may belong elsewhere
        (10, CorruptRecordError),  # the CRC
        (100, CorruptRecordError),  # the body
    ],
)
def test_damaged_message_is_rejected_and_others_are_served(
    directory: Path, where: int, error: type[DLedgerError]
) -> None:
    positions = sorted(at for at in all_of(directory) if at < FILE_BYTES)
    damaged = positions[5]
    path = directory / f"{0:020}"
    byte = path.read_bytes()[damaged + where]
    spoil(path, damaged + where, bytes([byte ^ 0x55]))
    prefix = CommitLogPrefix(directory)
    batch = prefix.read(0, 1 << 20)
    assert batch is not None
    assert (batch.count, batch.next_position) == (5, damaged)
    with pytest.raises(error):
        prefix.read(damaged, 1 << 20)
    after = prefix.read(positions[6], 1 << 20)
    assert after is not None
    assert after.count == len(positions) - 6


def test_blank_magic_without_length_is_no_file_end(directory: Path) -> None:
    positions = sorted(at for at in all_of(directory) if at < FILE_BYTES)
    spoil(directory / f"{0:020}", positions[5] + 4, struct.pack(">i", BLANK_MAGIC))
    with pytest.raises(IndexOutOfRangeError):
        CommitLogPrefix(directory).read(positions[5], 1 << 20)


def test_unreadable_file_is_an_error_and_not_missing(directory: Path) -> None:
    class Failing(OsFiles):
        def open(self, path: Path, *, write: bool = False, create: bool = False) -> OsFile:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CorruptRecordError):
        CommitLogPrefix(directory, Failing()).read(0, 100)


def test_recopied_file_is_read(directory: Path) -> None:
    path = directory / f"{FILE_BYTES:020}"
    content = path.read_bytes()
    path.write_bytes(content[:100])
    prefix = CommitLogPrefix(directory)
    assert prefix.read(FILE_BYTES + 1000, 100) is None
    path.write_bytes(content)
    batch = prefix.read(max(all_of(directory)), 100)
    assert batch is not None
    assert batch.count == 1


def test_too_large_message_names_next_position(directory: Path) -> None:
    messages = all_of(directory)
    largest = max(messages, key=lambda at: len(messages[at]))
    prefix = CommitLogPrefix(directory, message_bytes_max=len(messages[largest]) - 1)
    with pytest.raises(BadRequestError) as found:
        prefix.read(largest, 1)
    assert str(largest + len(messages[largest])) in found.value.remedy


def test_short_batch_does_not_keep_read_buffer_alive(directory: Path) -> None:
    positions = sorted(at for at in all_of(directory) if at < FILE_BYTES)
    batch = CommitLogPrefix(directory).read(positions[-1], 16 << 20)
    assert batch is not None
    assert len(batch.data.obj) <= 2 * len(batch.data)  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [0, 7, 50])
def test_truncated_file_is_damage_and_not_its_end(directory: Path, left: int) -> None:
    positions = sorted(at for at in all_of(directory) if at < FILE_BYTES)
    prefix = CommitLogPrefix(directory)
    assert prefix.read(0, 100) is not None  # the file sizes are known now
    with (directory / f"{0:020}").open("r+b") as file:
        file.truncate(positions[2] + left)
    batch = prefix.read(0, 1 << 20)
    assert batch is not None
    assert (batch.count, batch.next_position) == (2, positions[2])
    with pytest.raises(CorruptRecordError):
        prefix.read(positions[2], 1 << 20)

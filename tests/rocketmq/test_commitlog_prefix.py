"""Messages of a commitlog prefix by position: a real broker's, in any steps; damage is never served."""

from __future__ import annotations

import errno
import os
import shutil
import struct
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from dledger_core.errors import BadRequestError, CorruptRecordError, DLedgerError, IndexOutOfRangeError
from dledger_core.rocketmq.store.commit_log import BLANK_MAGIC
from dledger_core.rocketmq.store.commitlog_prefix import CommitLogPrefix, PrefixBatch
from dledger_core.storage.files.file_system import OsFile, OsFiles
from tests.rocketmq.golden import MIXED, messages
from tests.support.damage import flip, overwrite

FILE_BYTES = 131_072
END = 2 * FILE_BYTES
MESSAGES = {at: body for at, body in messages(MIXED).items() if at < END}
FIRST = sorted(at for at in MESSAGES if at < FILE_BYTES)
"""Positions of the messages in the first file."""


def read(prefix: CommitLogPrefix, position: int, max_bytes: int = 1 << 20) -> PrefixBatch:
    batch = prefix.read(position, max_bytes)
    assert batch is not None
    return batch


@pytest.mark.parametrize("max_bytes", [1, 1000, 1 << 20])
def test_reads_from_first_position_return_every_message(classic: Path, max_bytes: int) -> None:
    prefix, position = CommitLogPrefix(classic), 0
    found: dict[int, bytes] = {}
    largest = max(map(len, MESSAGES.values()))
    while (batch := prefix.read(position, max_bytes)) is not None:
        for begin, end in pairwise([0, *np.cumsum(batch.sizes, dtype=np.int64).tolist()]):
            found[position + begin] = bytes(batch.data[begin:end])
        assert len(batch.data) <= max(max_bytes, largest)
        assert batch.next_position > position
        position = batch.next_position
    assert (found, position) == (MESSAGES, END)


def test_read_returns_none_without_file_at_position(classic: Path, tmp_path: Path) -> None:
    prefix = CommitLogPrefix(classic)
    assert prefix.read(END, 100) is None
    assert prefix.read(1 << 62, 100) is None
    missing = CommitLogPrefix(tmp_path / "none")
    assert missing.read(0, 100) is None
    shutil.copytree(classic, tmp_path / "none")  # created after the first read
    assert missing.read(0, 100) is not None
    shutil.rmtree(tmp_path / "none")  # and removed again
    assert missing.read(0, 100) is None
    (classic / f"{0:020}").unlink()
    later = CommitLogPrefix(classic)
    assert later.read(0, 100) is None
    assert read(later, FILE_BYTES, 100).count == 1


@pytest.mark.parametrize("position", [FIRST[3] + 1, FIRST[3] + 40, FIRST[4] - 1])
def test_read_inside_message_is_out_of_range(classic: Path, position: int) -> None:
    with pytest.raises(IndexOutOfRangeError) as found:
        CommitLogPrefix(classic).read(position, 1)
    assert found.value.values["position"] == position


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
    classic: Path, where: int, error: type[DLedgerError]
) -> None:
    flip(classic / f"{0:020}", FIRST[5] + where, 0x55)
    prefix = CommitLogPrefix(classic)
    batch = read(prefix, 0)
    assert (batch.count, batch.next_position) == (5, FIRST[5])
    with pytest.raises(error):
        prefix.read(FIRST[5], 1 << 20)
    assert read(prefix, FIRST[6]).count == len(FIRST) - 6


def test_blank_magic_without_length_is_no_file_end(classic: Path) -> None:
    overwrite(classic / f"{0:020}", FIRST[5] + 4, struct.pack(">i", BLANK_MAGIC))
    with pytest.raises(IndexOutOfRangeError):
        CommitLogPrefix(classic).read(FIRST[5], 1 << 20)


def test_unreadable_file_is_an_error_and_not_missing(classic: Path) -> None:
    class Failing(OsFiles):
        def open(self, path: Path, *, write: bool = False, create: bool = False) -> OsFile:
            raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(CorruptRecordError):
        CommitLogPrefix(classic, Failing()).read(0, 100)


def test_recopied_file_is_read(classic: Path) -> None:
    path = classic / f"{FILE_BYTES:020}"
    content = path.read_bytes()
    path.write_bytes(content[:100])
    prefix = CommitLogPrefix(classic)
    assert prefix.read(FILE_BYTES + 1000, 100) is None
    path.write_bytes(content)
    assert read(prefix, max(MESSAGES), 100).count == 1


def test_too_large_message_names_next_position(classic: Path) -> None:
    largest = max(MESSAGES, key=lambda at: len(MESSAGES[at]))
    prefix = CommitLogPrefix(classic, message_bytes_max=len(MESSAGES[largest]) - 1)
    with pytest.raises(BadRequestError) as found:
        prefix.read(largest, 1)
    assert str(largest + len(MESSAGES[largest])) in found.value.remedy


def test_short_batch_does_not_keep_read_buffer_alive(classic: Path) -> None:
    batch = read(CommitLogPrefix(classic), FIRST[-1], 16 << 20)
    assert len(batch.data.obj) <= 2 * len(batch.data)  # type: ignore[arg-type]


@pytest.mark.parametrize("left", [0, 7, 50])
def test_truncated_file_is_damage_and_not_its_end(classic: Path, left: int) -> None:
    prefix = CommitLogPrefix(classic)
    assert prefix.read(0, 100) is not None  # the file sizes are known now
    os.truncate(classic / f"{0:020}", FIRST[2] + left)
    batch = read(prefix, 0)
    assert (batch.count, batch.next_position) == (2, FIRST[2])
    with pytest.raises(CorruptRecordError):
        prefix.read(FIRST[2], 1 << 20)

"""Reading classic CommitLog files: where records end, and what is damage."""

from __future__ import annotations

import struct
from pathlib import Path

import pyarrow as pa
import pytest

from dledger_core.errors import ConfigError
from dledger_core.rocketmq import encode_messages
from dledger_core.rocketmq.store.commit_log import (
    BLANK_MAGIC,
    ClassicCommitLog,
    CommitLogFile,
    FileStop,
    commit_log_files,
)
from tests.rocketmq import golden

BODIES = encode_messages("T", 0, [b"a" * n for n in (1, 50, 300)]).to_pylist()


def read(path: Path, position: int = 0, batch_bytes: int = 1 << 20) -> tuple[dict[int, bytes], FileStop]:
    *batches, stop = CommitLogFile(str(path), position, path.stat().st_size).scan(batch_bytes)
    found = {}
    for batch in batches:
        assert isinstance(batch, pa.RecordBatch)
        found.update(zip(batch.column("position").to_pylist(), batch.column("body").to_pylist(), strict=True))
    assert isinstance(stop, FileStop)
    return found, stop


@pytest.mark.parametrize("batch_bytes", [1, 5_000, 1 << 30])
def test_golden_commitlog_is_read(tmp_path: Path, batch_bytes: int) -> None:
    files = commit_log_files(golden.extract(golden.MIXED, "n0/commitlog", tmp_path))
    found: dict[int, bytes] = {}
    for file in files:
        messages, stop = read(Path(file.path), file.position, batch_bytes)
        assert stop.kind == "blank"
        found |= messages
    expected = golden.messages(golden.MIXED)
    assert found == {at: body for at, body in expected.items() if at < files[-1].end}
    assert len(found) == 325


@pytest.mark.parametrize(
    ("rest", "kind"),
    [
        (b"", "end"),
        (bytes(7), "end"),
        (bytes(100), "end"),
        (b"\1", "damaged"),
        (struct.pack(">ii", 100, BLANK_MAGIC) + b"whatever", "blank"),
        (struct.pack(">ii", 100, 77), "damaged"),
        (BODIES[0][:-1], "damaged"),
        (struct.pack(">i", 90) + BODIES[0][4:], "damaged"),
        (struct.pack(">i", -1) + BODIES[0][4:], "damaged"),
        (BODIES[2][:6] + bytes(200) + b"x" + bytes(100), "damaged"),
    ],
    ids=[
        "nothing",
        "few zeros",
        "zeros",
        "one byte",
        "blank",
        "unknown magic",
        "cut",
        "too short",
        "negative",
        "partial",
    ],
)
def test_file_stop_kinds(tmp_path: Path, rest: bytes, kind: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"".join(BODIES) + rest)
    found, stop = read(path, 1000)
    assert list(found.values()) == BODIES
    assert stop == FileStop(1000 + sum(map(len, BODIES)), kind)


@pytest.mark.parametrize(
    "files", [None, {}, {"lock": 0}, {f"{0:020d}": 100, f"{200:020d}": 100}, {f"{0:020d}": 100, f"{100:020d}": -1}]
)
def test_other_directories_are_rejected(tmp_path: Path, files: dict[str, int] | None) -> None:
    """A directory that is named like a file may replace the next file: no group may start after the first alone."""
    for name, size in (files or {}).items():
        (tmp_path / name).write_bytes(bytes(size)) if size >= 0 else (tmp_path / name).mkdir()
    with pytest.raises(ConfigError):
        commit_log_files(tmp_path if files is not None else tmp_path / "nothing")


def test_commitlog_in_several_directories_is_rejected(tmp_path: Path) -> None:
    """A broker may put its files into the directories by turns; links to all of them are the log."""
    for number in range(4):
        path = tmp_path / f"path{number % 2}" / f"{number * 100:020d}"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(BODIES[0].ljust(100, b"\1"))
    with pytest.raises(ConfigError):
        commit_log_files(tmp_path / "path0")
    (tmp_path / "all").mkdir()
    for path in tmp_path.glob("path?/*"):
        (tmp_path / "all" / path.name).symlink_to(path)
    assert [file.position for file in commit_log_files(tmp_path / "all")] == [0, 100, 200, 300]


@pytest.mark.parametrize("cut", [1, 4, 5, 7, 8, 60, 95, -12, -5, -4])
def test_partial_message_is_end_of_log(tmp_path: Path, cut: int) -> None:
    """A slave is sent pieces that cut messages; RocketMQ's recovery ends there too."""
    torn = bytearray(BODIES[2])
    torn[cut:] = bytes(len(torn[cut:]))
    path = tmp_path / f"{0:020d}"
    path.write_bytes(b"".join(BODIES) + torn + bytes(1000))
    end = sum(map(len, BODIES))
    for batch_bytes in (1, 1 << 20):
        found, stop = read(path, batch_bytes=batch_bytes)
        assert list(found.values()) == BODIES
        assert stop == FileStop(end, "end")
    log = ClassicCommitLog(tmp_path)
    assert log.end() == end
    assert log.damage(end, end + 1000) == []
    assert [body for batch in log.messages(0, end + 1000) for body in batch.column("body").to_pylist()] == BODIES


@pytest.mark.parametrize("spoil", [(84, 1), (20, 0xFF), (8, 1)], ids=["body length", "queue offset", "body CRC"])
def test_complete_message_is_never_partial(tmp_path: Path, spoil: tuple[int, int]) -> None:
    """The last message, followed by zeros, may be damaged but is complete."""
    at, value = spoil
    last = bytearray(encode_messages("T", 0, [b"a" * 300], "tag").to_pylist()[0])
    last[at] ^= value
    path = tmp_path / "file"
    path.write_bytes(b"".join(BODIES) + last + bytes(1000))
    found, _ = read(path)
    assert list(found.values()) == [*BODIES, bytes(last)]


def test_preallocated_files_are_skipped(tmp_path: Path) -> None:
    for number in range(4):
        (tmp_path / f"{number * 1000:020d}").write_bytes(bytes(1000))
    assert [file.position for file in commit_log_files(tmp_path)] == [0]
    assert ClassicCommitLog(tmp_path).end() == 0
    (tmp_path / f"{0:020d}").write_bytes(b"".join(BODIES).ljust(1000, b"\0"))
    assert [file.position for file in commit_log_files(tmp_path)] == [0]
    assert ClassicCommitLog(tmp_path).end() == sum(map(len, BODIES))
    (tmp_path / f"{2000:020d}").write_bytes(BODIES[0].ljust(1000, b"\0"))
    assert [file.position for file in commit_log_files(tmp_path)] == [0, 1000, 2000]
    (tmp_path / f"{4000:020d}").touch()
    assert [file.position for file in commit_log_files(tmp_path)] == [0, 1000, 2000]

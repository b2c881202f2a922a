"""Directories of brokers in controller mode, written as RocketMQ writes them; one file of the CommitLog."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from pathlib import Path

from dledger_core.rocketmq import encode_messages

FILE_BYTES = 1 << 16
TIME = 1_700_000_000_000


def epoch_file(*epochs: tuple[int, int], crc: int | None = None) -> str:
    """The content of ``epochFileCheckpoint``."""
    lines = "".join(f"{number}-{start}\n" for number, start in epochs)
    found = zlib.crc32(lines.encode()) & 0x7FFFFFFF if crc is None else crc
    return f"{len(epochs)}\n{found}\n{lines}"


def message(
    body: bytes, position: int, offset: int, time: int, queue: int = 0, host: str = "10.0.0.1:10911", topic: str = "T"
) -> bytes:
    """A message as a broker has stored it."""
    found = encode_messages(
        topic, queue, [body], keys=["k"], queue_offset=offset, physical_offset=position, born_timestamp=time,
        store_timestamp=time, store_host=host,
    )  # fmt: skip
    record: bytes = found[0].as_py()
    return record


def messages(
    bodies: Iterable[bytes], start: int = 0, offset: int = 0, time: int = TIME, host: str = "10.0.0.1:10911"
) -> bytes:
    """Messages from a position on, with consecutive queue offsets, one each second."""
    log = bytearray()
    for number, body in enumerate(bodies):
        log += message(body, start + len(log), offset + number, time + 1000 * number, host=host)
    return bytes(log)


def broker(directory: Path, log: bytes, *epochs: tuple[int, int], number: int = 1, confirmed: int = 0) -> Path:
    """A broker's directory."""
    (directory / "commitlog").mkdir(parents=True)
    (directory / "commitlog" / f"{0:020d}").write_bytes(log.ljust(FILE_BYTES, b"\0"))
    if epochs:
        (directory / "epochFileCheckpoint").write_text(epoch_file(*epochs))
    (directory / "brokerIdentity").write_text(f"C#broker#{number}")
    checkpoint = struct.pack(">qqqqq", 1_700_000_000_000, 1, 1, 0, confirmed)
    (directory / "checkpoint").write_bytes(checkpoint.ljust(4096, b"\0"))
    return directory

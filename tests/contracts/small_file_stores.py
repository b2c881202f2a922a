"""Each kind of stored log, in files of a few KiB: what makes it, for the tables of damage and of missing files.

A maker returns the directory to look at, and the one with its data files.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

from tests.jobs.broker_store import STORED_MS, messages, write_broker_store
from tests.rocketmq.golden import MIXED, extract
from tests.spark_connector.store_writer import StoreWriter

COUNT, FILE_BYTES = 100, 1 << 12
CONVERT = ("--group", "g", "--self-id", "n0", "--peers", "n0-127.0.0.1:1", "--dry-run")
"""Options of ``convert`` for a broker's log."""
_BLANK = struct.pack(">i", -875286124)


def bodies() -> list[bytes]:
    return messages(range(COUNT), body=b"twenty bytes of body", born_timestamp=STORED_MS, store_timestamp=STORED_MS)


def native(directory: Path, file_bytes: int = FILE_BYTES) -> tuple[Path, Path]:
    with StoreWriter(directory, segment_bytes=file_bytes) as store:
        for start in range(0, COUNT, 5):
            store.append(bodies()[start : start + 5])
    return store.path, store.path / "data"


def generation_a(directory: Path, file_bytes: int = FILE_BYTES) -> tuple[Path, Path]:
    path = directory / "g" / "dledger-n0"
    write_broker_store(path, bodies(), committed=COUNT - 1, data_bytes=file_bytes)
    return path, path / "data"


def generation_b(directory: Path, file_bytes: int = FILE_BYTES) -> tuple[Path, Path]:
    path = directory / "g" / "dledger-n0"
    write_broker_store(path, bodies(), data_bytes=file_bytes)
    return path, path / "data"


def classic(directory: Path, file_bytes: int = FILE_BYTES) -> tuple[Path, Path]:
    """A CommitLog as its broker writes it: a file ends with a BLANK."""
    path = directory / "commitlog"
    path.mkdir(parents=True)
    base, content = 0, bytearray()
    for body in bodies():
        if len(content) + len(body) + 8 > file_bytes:
            blank = struct.pack(">i", file_bytes - len(content)) + _BLANK
            (path / f"{base:020d}").write_bytes((content + blank).ljust(file_bytes, b"\0"))
            base, content = base + file_bytes, bytearray()
        content += body[:28] + struct.pack(">q", base + len(content)) + body[36:]
    (path / f"{base:020d}").write_bytes(content.ljust(file_bytes, b"\0"))
    return path, path


def mixed(directory: Path) -> tuple[Path, Path]:
    """The directory of a real broker; the DLedger part is damaged."""
    extract(MIXED, "n0/commitlog", directory)
    store = extract(MIXED, "n0/dledger-n0", directory)
    return store.parent, store / "data"


def mixed_before_upgrade(directory: Path) -> tuple[Path, Path]:
    """The same; its CommitLog is damaged."""
    path, _ = mixed(directory)
    return path, path / "commitlog"


Maker = Callable[..., tuple[Path, Path]]
WRITTEN: dict[str, Maker] = {make.__name__: make for make in (native, generation_a, generation_b, classic)}
"""Those that are written here, with files of any size."""
STORES: dict[str, Maker] = WRITTEN | {make.__name__: make for make in (mixed, mixed_before_upgrade)}

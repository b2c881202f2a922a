"""A database of consume queues as a broker with storeType=defaultRocksDB writes it; needs the package rocksdict."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import rocksdict

Unit = tuple[int, int, int, int]
"""Physical offset, size, tags code, store time."""


def queue_key(topic: str, queue_id: int, slot: int) -> bytes:
    name = topic.encode()
    return struct.pack(f">ic{len(name)}scicq", len(name), b"\1", name, b"\1", queue_id, b"\1", slot)


def offset_key(topic: str, queue_id: int, kind: bytes = b"max") -> bytes:
    name = topic.encode()
    return struct.pack(f">ic{len(name)}sc3sci", len(name), b"\1", name, b"\1", kind, b"\1", queue_id)


def open_database(directory: Path) -> Any:
    """Open a database to write it; the log of RocksDB is next to it, as of a broker."""
    options = rocksdict.Options(raw_mode=True)
    options.create_if_missing(True)
    options.create_missing_column_families(True)
    options.set_db_log_dir(str(directory.parent))
    families = {name: rocksdict.Options(raw_mode=True) for name in ("default", "offset")}
    return rocksdict.Rdict(str(directory), options, column_families=families)


def put(database: Any, units: Mapping[tuple[str, int], Sequence[tuple[int, Unit]]]) -> None:
    """Add units: per topic and queue the slot and the unit."""
    offsets, end = database.get_column_family("offset"), 0
    for (topic, queue_id), queue in units.items():
        for slot, unit in queue:
            database[queue_key(topic, queue_id, slot)] = struct.pack(">qiqq", *unit)
            end = max(end, unit[0] + unit[1])
        slot, unit = queue[-1]
        offsets[offset_key(topic, queue_id)] = struct.pack(">qq", unit[0], slot)
        offsets[offset_key(topic, queue_id, b"min")] = struct.pack(">qq", queue[0][1][0], queue[0][0])
    offsets[offset_key("CHECKPOINT_TOPIC", 0)] = struct.pack(">q", end)


def write_database(directory: Path, units: Mapping[tuple[str, int], Sequence[tuple[int, Unit]]]) -> None:
    database = open_database(directory)
    put(database, units)
    database.close()

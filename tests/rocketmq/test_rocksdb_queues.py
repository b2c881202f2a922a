"""Consume queues in RocksDB: those of a real RocketMQ 5.3.3, running brokers, damage, and no change of the database."""

from __future__ import annotations

import struct
import sys
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dledger_core.errors import ConfigError, CorruptRecordError
from dledger_core.rocketmq import RocksDBQueues, queues_in_rocksdb

pytest.importorskip("rocksdict")
from tests.rocketmq.rocksdb_writer import Unit, offset_key, open_database, put, queue_key, write_database

FEW: dict[tuple[str, int], list[tuple[int, Unit]]] = {
    ("orders", 0): [(5, (100, 50, 7, 1000)), (6, (200, 60, -8, 1001)), (7, (300, 70, 9, 1002))],
    ("orders", 10): [(0, (150, 50, 0, 1000))],
    ("ord", 0): [(0, (260, 40, 1 << 40, 1003))],
    ("größer", 3): [(2, (370, 30, 0, 1004))],
}


def snapshot(directory: Path) -> dict[str, tuple[int, int, bytes]]:
    """Time, inode and content of each file, and those of the directory."""
    files = {path.name: path.read_bytes() for path in directory.iterdir()} | {".": b""}
    stats = {name: (directory / name).stat() for name in files}
    return {name: (stats[name].st_mtime_ns, stats[name].st_ino, content) for name, content in files.items()}


def all_units(queues: RocksDBQueues) -> dict[tuple[str, int], list[tuple[int, Any]]]:
    found: dict[tuple[str, int], list[tuple[int, Any]]] = {queue: [] for queue in queues.ends}
    for queue, known in found.items():
        for slots, units in queues.units(*queue):
            known.extend(zip(slots.tolist(), units.tolist(), strict=True))
    return found


def test_units_and_ends_are_those_of_database_which_stays_as_it_is(tmp_path: Path) -> None:
    database = tmp_path / "consumequeue"
    write_database(database, FEW)
    before = snapshot(database)
    with RocksDBQueues(database) as queues:
        assert all_units(queues) == FEW
        ends = {queue: (end.slots, end.position) for queue, end in queues.ends.items()}
        assert ends == {queue: (units[-1][0] + 1, units[-1][1][0]) for queue, units in FEW.items()}
        assert queues.indexed_end == 400
        assert queues.unit("orders", 0, 6) == {"physical_offset": 200, "size": 60, "tags_code": -8, "stored_ms": 1001}
        assert [queues.unit("orders", 0, slot) for slot in (4, 8)] == [None, None]
        assert queues.unit("absent", 0, 0) is None
    assert snapshot(database) == before
    assert sorted(path.name for path in tmp_path.iterdir() if "LOG" not in path.name) == ["consumequeue"]


def test_queue_of_several_chunks_has_all_units_in_order(tmp_path: Path) -> None:
    count = 150_000
    many = {("t", 0): [(slot, (slot * 100, 100, slot, slot)) for slot in range(count)]}
    write_database(tmp_path / "consumequeue", many)
    with RocksDBQueues(tmp_path / "consumequeue") as queues:
        parts = list(queues.units("t", 0))
    assert len(parts) > 1
    assert np.concatenate([slots for slots, _ in parts]).tolist() == list(range(count))
    assert np.concatenate([units["physical_offset"] for _, units in parts]).tolist() == list(range(0, count * 100, 100))


def test_database_of_running_broker_shows_its_files_and_stays_as_it_is(tmp_path: Path) -> None:
    database = tmp_path / "consumequeue"
    broker = open_database(database)
    try:
        put(broker, FEW)
        broker.flush()
        broker.get_column_family("offset").flush()
        before = snapshot(database)
        with RocksDBQueues(database) as queues:
            assert all_units(queues) == FEW
            put(broker, {("orders", 0): [(8, (500, 50, 1, 1005))]})
            broker.flush()
            assert all_units(queues) == FEW
        names = set(snapshot(database))
        assert set(before) <= names | {name for name in before if name.endswith(".log")}
        assert not [name for name in names if "LOG" in name]
        with RocksDBQueues(database) as queues:
            assert queues.ends["orders", 0].slots == 9
    finally:
        broker.close()


def test_units_after_end_of_queue_are_not_served(tmp_path: Path) -> None:
    """They are left over from a log that was truncated."""
    database = open_database(tmp_path / "consumequeue")
    put(database, FEW)
    database[queue_key("orders", 0, 8)] = struct.pack(">qiqq", 400, 50, 1, 1)
    database.close()
    with RocksDBQueues(tmp_path / "consumequeue") as queues:
        assert all_units(queues) == FEW
        assert queues.unit("orders", 0, 8) is None


@pytest.mark.parametrize("damage", ["unit", "key", "offset", "file", "manifest", "other database"])
def test_damaged_database_is_error_that_names_it(tmp_path: Path, damage: str) -> None:
    directory = tmp_path / "consumequeue"
    if damage == "other database":
        import rocksdict

        rocksdict.Rdict(str(directory)).close()
    else:
        database = open_database(directory)
        put(database, FEW)
        if damage == "unit":
            database[queue_key("orders", 0, 5)] = b"short"
        elif damage == "key":
            database.get_column_family("offset")[b"\0\0\0\1?"] = bytes(16)
        elif damage == "offset":
            database.get_column_family("offset")[offset_key("orders", 0)] = b"short"
        database.close()
        for path in directory.glob("*.sst" if damage == "file" else "MANIFEST*" if damage == "manifest" else "none"):
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    assert queues_in_rocksdb(directory)
    with pytest.raises(CorruptRecordError) as caught, RocksDBQueues(directory) as queues:
        all_units(queues)
    assert caught.value.where == str(directory)
    assert caught.value.remedy


def test_missing_binding_is_named_as_extra_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    project = tomllib.loads((Path(__file__).resolve().parents[2] / "pyproject.toml").read_text())
    [requirement] = project["project"]["optional-dependencies"]["rocksdb"]
    monkeypatch.setitem(sys.modules, "rocksdict", None)
    with pytest.raises(ConfigError) as caught:
        RocksDBQueues(tmp_path)
    assert caught.value.remedy == f"pip install '{requirement}'"

"""Consume queues in RocksDB, compared with the log: those that a real RocketMQ 5.3.3 wrote, with and without faults."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path
from typing import Any

import pytest

from dledger_core.rocketmq import RocksDBQueues, decode_units
from tests.jobs.conftest import Rebuild
from tests.rocketmq import golden

pytest.importorskip("rocksdict")
from tests.rocketmq.rocksdb_writer import offset_key, open_database, queue_key

pytestmark = pytest.mark.spark


def files_of(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def test_database_of_broker_is_consistent_and_files_have_its_units(
    spark: Any, tmp_path: Path, run_rebuild: Rebuild
) -> None:
    del spark
    root, out = golden.extract_broker(golden.ROCKSDB, tmp_path), tmp_path / "out"
    before = files_of(root)
    code, summary = run_rebuild(commitlog=root / "commitlog", table=tmp_path / "table", compare=root, files=out)
    assert (code, summary["verdict"], summary["compare"]["differences"]) == (0, "CONSISTENT", {})
    assert (summary["compare"]["queues"], summary["compare"]["unindexed_messages"]) == (9, 0)
    assert files_of(root) == before
    with RocksDBQueues(root / "consumequeue") as queues:
        assert sum(end.slots for end in queues.ends.values()) == summary["rows"]
        for topic, queue_id in queues.ends:
            [(slots, units)] = queues.units(topic, queue_id)
            [file] = (out / "consumequeue" / topic / str(queue_id)).iterdir()
            written = decode_units(file.read_bytes()[: 20 * len(slots)])
            assert slots.tolist() == list(range(len(slots)))
            assert all((written[name] == units[name]).all() for name in written.dtype.names)


def test_faults_of_database_are_named_and_it_is_never_written(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    del spark
    root, report = golden.extract_broker(golden.ROCKSDB, tmp_path), tmp_path / "report.html"
    database = open_database(root / "consumequeue")
    del database[queue_key("orders", 1, 3)]
    for slot, change in ((5, (0, 0, 7)), (6, (0, 1, 0))):
        unit = struct.unpack(">qiqq", database[queue_key("orders", 1, slot)])
        changed = [value + more for value, more in zip(unit, (*change, 0), strict=True)]
        database[queue_key("orders", 1, slot)] = struct.pack(">qiqq", *changed)
    database.close()
    before = files_of(root)
    given = {"commitlog": root / "commitlog", "compare": root, "report": report}
    code, summary = run_rebuild(table=tmp_path / "table", **given)
    assert (code, summary["verdict"]) == (1, "INCONSISTENT")
    assert summary["compare"]["differences"] == {"CQ_MISSING": 1, "CQ_WRONG_SIZE": 1, "CQ_WRONG_TAG": 1}
    slots = {one["kind"]: (one["topic"], one["queue_id"], one["start"]) for one in summary["compare"]["findings"]}
    assert slots == {
        "CQ_MISSING": ("orders", 1, 3), "CQ_WRONG_SIZE": ("orders", 1, 6), "CQ_WRONG_TAG": ("orders", 1, 5)
    }  # fmt: skip
    assert all("storeType=default" in one["next"] for one in summary["compare"]["findings"])
    page = report.read_text().replace("<wbr>", "")
    assert {name for name in slots if name in page} == set(slots)
    assert files_of(root) == before


def test_units_that_broker_has_in_memory_are_no_fault(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    """A killed broker indexes the log again from the position that its database has."""
    del spark
    root = golden.extract_broker(golden.ROCKSDB, tmp_path)
    shutil.copytree(root / "consumequeue", tmp_path / "all")
    with RocksDBQueues(tmp_path / "all") as queues:
        kept = {queue: [*zip(*map(list, next(queues.units(*queue))), strict=True)] for queue in queues.ends}
        middle = sorted(unit[1][0] for units in kept.values() for unit in units)[len(kept) * 5]
    database = open_database(root / "consumequeue")
    offsets, lost = database.get_column_family("offset"), set()
    for (topic, queue_id), units in kept.items():
        for slot, unit in units:
            if unit[0] >= middle:
                del database[queue_key(topic, queue_id, slot)]
                lost.add((topic, queue_id, slot))
        last_slot, last = [each for each in units if each[1][0] < middle][-1]
        offsets[offset_key(topic, queue_id)] = struct.pack(">qq", last[0], last_slot)
    offsets[offset_key("CHECKPOINT_TOPIC", 0)] = struct.pack(">q", middle)
    database.close()
    code, summary = run_rebuild(commitlog=root / "commitlog", table=tmp_path / "table", compare=root)
    assert (code, summary["compare"]["differences"]) == (0, {})
    assert summary["compare"]["unindexed_messages"] == len(lost) > 0

"""Files for queues that no healthy broker has, and the classes of differences."""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dledger_core.rocketmq import UNIT
from jobs._rebuild.compare import compare
from jobs._rebuild.files import write_files
from jobs._rebuild.table import TABLE_SCHEMA

pytestmark = pytest.mark.spark
PREFILL = (0, 0x7FFFFFFF, 0)
ZERO = (0, 0, 0)


def unit(offset: int) -> tuple[int, int, int]:
    return 1000 * offset, 100 + offset % 100, -offset


def rows_of(spark: Any, rows: list[dict[str, Any]]) -> Any:
    """Rows of the table; missing columns are those of a message that has its slot alone."""
    names = [column.split()[0].strip("`") for column in TABLE_SCHEMA.split(", ")]
    full = [
        {"group": "g", "queue_id": 0, "broker_serves": True, "rebuild_slot": row["queue_offset"], **row} for row in rows
    ]
    return spark.createDataFrame([tuple(row.get(name) for name in names) for row in full], TABLE_SCHEMA)


def row(offset: int, **more: Any) -> dict[str, Any]:
    position, size, tags = unit(offset)
    found = {"topic": "T", "queue_offset": offset, "position": position, "size": size, "tags_code": tags}
    return {**found, **more}


def units(spark: Any, topics: dict[str, list[int]]) -> Any:
    return rows_of(spark, [row(offset, topic=topic) for topic, offsets in topics.items() for offset in offsets])


def slots(path: Path) -> list[tuple[int, int, int]]:
    return [tuple(map(int, slot)) for slot in np.fromfile(path, UNIT)]


def test_files_have_prefill_holes_and_no_invalid_queues(spark: Any, tmp_path: Path) -> None:
    frame = units(spark, {"T": [6, 7, 13], "../up": [1], "x/y": [0], "lies": [0, 1 << 50], "below": [-1]})
    written = write_files(frame, str(tmp_path / "out"), 4 * UNIT.itemsize)
    directory = tmp_path / "out" / "consumequeue" / "T" / "0"
    found = {int(path.name) // UNIT.itemsize: slots(path) for path in directory.iterdir()}
    assert found == {
        4: [PREFILL, PREFILL, unit(6), unit(7)],
        8: [PREFILL] * 4,
        12: [PREFILL, unit(13), ZERO, ZERO],
    }
    assert written.files == 3
    reasons = {row["topic"]: row["reason"] for row in written.refused}
    assert set(reasons) == {"../up", "x/y", "lies", "below"}
    assert len(set(reasons.values())) == 3
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["consumequeue"]
    assert not (tmp_path / "up").exists()


@pytest.mark.soak
def test_other_directories_are_left_out(spark: Any, tmp_path: Path) -> None:
    (tmp_path / "T" / "0").mkdir(parents=True)
    (tmp_path / "T" / "0" / f"{0:020d}").write_bytes(np.array([unit(0)], UNIT).tobytes())
    for strange in (b"T/99999999999", "T/\u0663".encode(), b"\xff/0", b"T/x"):
        directory = os.path.join(os.fsencode(tmp_path), strange)
        os.makedirs(directory)
        Path(os.fsdecode(directory), f"{0:020d}").write_bytes(bytes(200))
    report = compare(spark, rows_of(spark, [row(0, position=1)]), str(tmp_path))
    assert report.files == 1


def test_each_class_of_difference_is_found(spark: Any, tmp_path: Path) -> None:
    """Slots 1-9 of a queue are damaged in turn; the leftover in slot 0 is older than the log."""
    root = tmp_path / "consumequeue"
    directory = root / "T" / "0"
    directory.mkdir(parents=True)
    there = [(7, 100, 0), *(unit(offset) for offset in range(1, 8)), (99_000, 100, 0), (98_000, 100, 0)]
    there[2] = (2001, 102, -2)
    there[3] = (3000, 1, -3)
    there[4] = (4000, 104, 9)
    there[5:7] = [unit(6), unit(7)]
    (directory / f"{0:020d}").write_bytes(np.array([*there, *[ZERO] * 5], UNIT).tobytes())
    claims = [row(offset) for offset in range(1, 9)]
    first = row(3, queue_id=1, position=1200, size=100, broker_serves=False)
    last = row(3, queue_id=1, position=1300, size=100, rebuild_slot=None)
    (root / "T" / "1").mkdir()
    (root / "T" / "1" / f"{0:020d}").write_bytes(np.array([*[PREFILL] * 3, (1300, 100, -3)], UNIT).tobytes())
    addressed = [row(offset, queue_id=2, position=1000 * offset + 1500) for offset in range(3)]
    units = [(1000 * offset + 1500, unit(offset)[1], offset * 20 - (1 << 63)) for offset in range(3)]
    extension = b"".join(struct.pack(">hqqh", 20, tags, 0, 0) for tags in (unit(0)[2], 77)) + bytes(100)
    for name, data in (("consumequeue", np.array(units, UNIT).tobytes()), ("consumequeue_ext", extension)):
        (tmp_path / name / "T" / "2").mkdir(parents=True)
        (tmp_path / name / "T" / "2" / f"{0:020d}").write_bytes(data)
    consumers = {("T", 0): {"readers": 3}}
    report = compare(spark, rows_of(spark, [*claims, first, last, *addressed]), str(root), "first", consumers)
    ranges = {(found["kind"], found["queue_id"], found["start"], found["end"]): found for found in report.findings}
    assert set(ranges) == {
        ("CQ_WRONG_POSITION", 0, 2, 3),
        ("CQ_WRONG_SIZE", 0, 3, 4),
        ("CQ_WRONG_TAG", 0, 4, 5),
        ("CQ_MISSING", 0, 5, 6),
        ("CQ_ORDER", 0, 5, 7),
        ("CQ_WRONG_POSITION", 0, 8, 9),
        ("CQ_EXTRA", 0, 9, 10),
        ("CQ_DUPLICATE_OFFSET", 1, 3, 4),
        ("CQ_WRONG_TAG", 2, 1, 2),
        ("CQ_EXT_MISSING", 2, 2, 3),
    }
    doubled = ranges["CQ_DUPLICATE_OFFSET", 1, 3, 4]
    assert (doubled["expected_position"], doubled["found_position"]) == (1200, 1300)
    shifted = ranges["CQ_ORDER", 0, 5, 7]
    assert (shifted["expected_position"], shifted["found_position"]) == (5000, 6000)
    assert report.counts["CQ_WRONG_POSITION"] == 2
    assert ranges["CQ_MISSING", 0, 5, 6]["consumers"] == {"readers": 3}
    assert all(found["cause"] and found["next"] for found in report.findings)

"""The rebuild's files and comparisons on stores that a real RocketMQ wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from jobs import rebuild_consume_queue
from tests.rocketmq import golden
from tests.support.run_job import run_in_process

pytestmark = pytest.mark.spark


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    return run_in_process(rebuild_consume_queue.command, capsys, *arguments)[:2]


def queues(directory: Path) -> dict[str, bytes]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


def check_table(spark: Any, table: Path, name: str, summary: dict[str, Any]) -> None:
    """Every message has a row, and those with a slot in RocketMQ's own rebuild say what its oracle says."""
    expected = {
        (*(unit[key] for key in ("topic", "queueId", "queueOffset", "physicalOffset", "size", "tagsCode", "msgId")),
         unit["bornTimestamp"], unit["storeTimestamp"], unit["keys"] or None)
        for unit in golden.units(name)
    }  # fmt: skip
    rows = spark.read.format("delta").load(str(table))
    names = ["topic", "queue_id", "rebuild_slot", "position", "size", "tags_code", "msg_id"]
    times = ["unix_millis(born_timestamp)", "unix_millis(store_timestamp)"]
    found = rows.where("rebuild_slot is not null").selectExpr(*names, *times, "keys").collect()
    assert {tuple(row) for row in found} == expected
    assert rows.count() == summary["rows"] == len(golden.messages(name))
    assert rows.where("committed is null").count() == 0
    assert (summary["slots"], summary["queues"]) == (len(expected), len({unit[:2] for unit in expected}))
    assert (summary["dense"], summary["duplicate_slots"]) == (True, summary["rows"] - len(expected))
    assert summary["skipped"]["not_messages"] == 0
    assert spark.sql(f"describe detail delta.`{table}`").first()["clusteringColumns"] == ["topic", "queue_id"]
    logs = (table / "_delta_log").glob("*.json")
    actions = [json.loads(line) for log in logs for line in log.read_text().splitlines()]
    bounded = {
        name for action in actions if "add" in action for name in json.loads(action["add"]["stats"])["minValues"]
    }
    assert bounded == {"topic", "queue_id", "queue_offset", "position", "index", "store_timestamp", "msg_id"}


def info(name: str, node: str) -> dict[str, Any]:
    (content,) = golden.members(name, "/info.json").values()
    found: dict[str, Any] = json.loads(content)["replicas"][node]
    return found


def test_files_and_comparison_of_healthy_and_damaged_broker(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The files of n0 and n2 equal the rebuilt ones byte for byte; n1 lost units, and each is named."""
    store = golden.extract(golden.THREE, "n0/dledger-n0", tmp_path)
    own = {node: golden.extract(golden.THREE, f"{node}/consumequeue", tmp_path) for node in ("n0", "n1", "n2")}
    before = queues(own["n1"])
    common = ("--store", str(store), "--table", str(tmp_path / "table"))
    code, summary = run(
        capsys, *common, "--files", str(tmp_path / "out"), "--consume-queue-file-size", "1999",
        "--compare", str(own["n1"].parent),
    )  # fmt: skip
    assert queues(tmp_path / "out" / "consumequeue") == queues(own["n0"]) == queues(own["n2"])
    check_table(spark, tmp_path / "table", golden.THREE, summary)
    assert summary["files"]["files"] == len(queues(own["n0"]))
    damage = info(golden.THREE, "n1")
    compared = summary["compare"]
    assert compared["differences"] == {
        "CQ_MISSING": len(damage["unitsMissingFromOwnConsumeQueue"]),
        "CQ_ORDER": damage["unitsAtWrongSlot"],
    }
    found = {
        (finding["topic"], finding["queue_id"], slot)
        for finding in compared["findings"]
        if finding["kind"] == "CQ_MISSING"
        for slot in range(finding["start"], finding["end"])
    }
    lost = damage["unitsMissingFromOwnConsumeQueue"]
    assert found == {(unit["topic"], unit["queueId"], unit["queueOffset"]) for unit in lost}
    assert code == 1
    assert queues(own["n1"]) == before


def test_slots_given_out_twice(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With --on-duplicate last the files are those the broker itself has; the comparison names the nine slots."""
    store = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path)
    own = golden.extract(golden.REUSED, "n0/consumequeue", tmp_path)
    code, summary = run(
        capsys, "--store", str(store), "--table", str(tmp_path / "table"), "--on-duplicate", "last",
        "--files", str(tmp_path / "out"), "--consume-queue-file-size", "2000", "--compare", str(own),
    )  # fmt: skip
    assert queues(tmp_path / "out" / "consumequeue") == queues(own)
    assert (code, summary["compare"]["differences"]) == (1, {"CQ_DUPLICATE_OFFSET": 9})
    check_table(spark, tmp_path / "table", golden.REUSED, summary)
    (content,) = golden.members(golden.REUSED, "/info.json").values()
    reused = {
        (slot["topic"], slot["queueId"], slot["queueOffset"]) for slot in json.loads(content)["reusedQueueOffsets"]
    }
    ranges = summary["duplicates"]["ranges"]
    assert {(r["topic"], r["queue_id"], at) for r in ranges for at in range(r["start"], r["end"])} == reused
    assert summary["duplicates"]["get_back"]


def test_mixed_log(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = golden.extract(golden.MIXED, "n0/dledger-n0", tmp_path)
    classic = golden.extract(golden.MIXED, "n0/commitlog", tmp_path)
    own = golden.extract(golden.MIXED, "n0/consumequeue", tmp_path)
    code, summary = run(
        capsys, "--store", str(store), "--commitlog", str(classic), "--table", str(tmp_path / "table"),
        "--files", str(tmp_path / "out"), "--consume-queue-file-size", "1200", "--compare", str(own),
    )  # fmt: skip
    assert queues(tmp_path / "out" / "consumequeue") == queues(own)
    assert (code, summary["rows"], summary["compare"]["differences"]) == (0, len(golden.messages(golden.MIXED)), {})
    assert summary["commitlog"] == {"files": 2, "start": 0, "end": 262144}
    assert summary["damaged_files"] == []
    check_table(spark, tmp_path / "table", golden.MIXED, summary)
    rows = spark.read.format("delta").load(str(tmp_path / "table")).where("index is null").count()
    assert rows == 325


def test_store_that_does_not_continue_commit_log(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = golden.extract(golden.MIXED, "n0/dledger-n0", tmp_path)
    classic = golden.extract(golden.MIXED, "n0/commitlog", tmp_path)
    (classic / "00000000000000131072").unlink()
    code, summary = run(capsys, "--store", str(store), "--commitlog", str(classic), "--table", str(tmp_path / "t"))
    assert code == 3
    assert "CommitLog" in summary["message"]
    assert not (tmp_path / "t").exists()

"""The rebuild's table, files and comparisons on stores that a real RocketMQ wrote."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core import Client, LocalCluster
from dledger_core.rocketmq import decode_messages, encode_messages
from dledger_core.rocketmq.convert import read_commitlog
from tests.jobs.conftest import Rebuild
from tests.rocketmq import golden
from tests.support.slow_elections import SLOW_ELECTIONS

pytestmark = pytest.mark.spark


def queues(directory: Path) -> dict[str, bytes]:
    """The files of consume queues."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("0*") if path.is_file()}


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


def info(name: str) -> dict[str, Any]:
    (content,) = golden.members(name, "/info.json").values()
    found: dict[str, Any] = json.loads(content)
    return found


def test_files_and_comparison_of_healthy_and_damaged_broker(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    """The files of n0 and n2 equal the rebuilt ones byte for byte; n1 lost units, and each is named."""
    store = golden.extract(golden.THREE, "n0/dledger-n0", tmp_path)
    own = {node: golden.extract(golden.THREE, f"{node}/consumequeue", tmp_path) for node in ("n0", "n1", "n2")}
    index = [golden.extract(golden.THREE, f"{node}/index", tmp_path) for node in ("n0", "n1")]
    before = queues(own["n1"])
    table, out, conf = tmp_path / "table", tmp_path / "out", tmp_path / "broker.conf"
    conf.write_bytes(*golden.members(golden.THREE, "/broker-n1.conf").values())
    code, summary = run_rebuild(
        store=store,
        table=table,
        files=out,
        consume_queue_file_size=1999,
        compare=own["n1"].parent,
        indexes=out,
        broker_conf=conf,
    )
    assert [path.read_bytes() for path in (out / "index").iterdir()] == [
        path.read_bytes() for path in index[0].iterdir()
    ]
    assert summary["compare_indexes"]["differences"] == {"INDEX_MISSING": 1496}
    assert queues(out / "consumequeue") == queues(own["n0"]) == queues(own["n2"])
    check_table(spark, table, golden.THREE, summary)
    assert summary["files"]["files"] == len(queues(own["n0"]))
    damage = info(golden.THREE)["replicas"]["n1"]
    lost = damage["unitsMissingFromOwnConsumeQueue"]
    assert code == 1
    assert summary["compare"]["differences"] == {"CQ_MISSING": len(lost), "CQ_ORDER": damage["unitsAtWrongSlot"]}
    found = {
        (finding["topic"], finding["queue_id"], slot)
        for finding in summary["compare"]["findings"]
        if finding["kind"] == "CQ_MISSING"
        for slot in range(finding["start"], finding["end"])
    }
    assert found == {(unit["topic"], unit["queueId"], unit["queueOffset"]) for unit in lost}
    assert queues(own["n1"]) == before


@pytest.mark.soak
def test_slots_given_out_twice(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    """With --on-duplicate last the files are those the broker itself has; the comparison names the nine slots."""
    store = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path)
    own = golden.extract(golden.REUSED, "n0/consumequeue", tmp_path)
    table, out = tmp_path / "table", tmp_path / "out"
    code, summary = run_rebuild(
        store=store, table=table, files=out, on_duplicate="last", consume_queue_file_size=2000, compare=own
    )
    assert queues(out / "consumequeue") == queues(own)
    assert (code, summary["compare"]["differences"]) == (1, {"CQ_DUPLICATE_OFFSET": 9})
    check_table(spark, table, golden.REUSED, summary)
    slots = info(golden.REUSED)["reusedQueueOffsets"]
    ranges = summary["duplicates"]["ranges"]
    assert {(r["topic"], r["queue_id"], at) for r in ranges for at in range(r["start"], r["end"])} == {
        (slot["topic"], slot["queueId"], slot["queueOffset"]) for slot in slots
    }
    assert summary["duplicates"]["get_back"]


@pytest.mark.soak
def test_mixed_log(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    store = golden.extract(golden.MIXED, "n0/dledger-n0", tmp_path)
    classic = golden.extract(golden.MIXED, "n0/commitlog", tmp_path)
    own = golden.extract(golden.MIXED, "n0/consumequeue", tmp_path)
    table, out = tmp_path / "table", tmp_path / "out"
    sources: dict[str, Any] = {"store": store, "commitlog": classic}
    code, summary = run_rebuild(**sources, table=table, files=out, consume_queue_file_size=1200, compare=own)
    assert queues(out / "consumequeue") == queues(own)
    assert (code, summary["rows"], summary["compare"]["differences"]) == (0, len(golden.messages(golden.MIXED)), {})
    assert (summary["commitlog"], summary["damaged_files"]) == ({"files": 2, "start": 0, "end": 262144}, [])
    check_table(spark, table, golden.MIXED, summary)
    assert spark.read.format("delta").load(str(table)).where("index is null").count() == 325
    (classic / "00000000000000131072").unlink()
    code, summary = run_rebuild(**sources, table=tmp_path / "other")
    assert (code, summary["error"]) == (3, "STORE_MISMATCH"), "the store does not continue the CommitLog"
    assert not (tmp_path / "other").exists()


@pytest.mark.soak
def test_batch_queues_are_in_table_only(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    """A broker that finds them among its plain queues does not start."""
    root, out = golden.extract_broker("rmq5-batch-queues", tmp_path), tmp_path / "out"
    source: dict[str, Any] = {"commitlog": root / "commitlog", "table": tmp_path / "table"}
    code, summary = run_rebuild(**source, files=out, consume_queue_file_size=2000, compare=root)
    assert (code, summary["dense"], summary["compare"]["differences"]) == (0, True, {})
    assert summary["batch_topics"] == ["batchcq"]
    assert queues(out / "consumequeue") == queues(root / "consumequeue")
    assert spark.read.format("delta").load(str(source["table"])).where("topic = 'batchcq'").count() > 0


@pytest.mark.soak
@pytest.mark.parametrize("kept", ["first", "last"])
def test_queues_that_message_names_twice(spark: Any, tmp_path: Path, run_rebuild: Rebuild, kept: str) -> None:
    """Their offsets run ahead of their slots, and after a restart fall back to them: no hole, none given out twice."""
    root, table, out = golden.extract_broker("rmq5-named-twice", tmp_path), tmp_path / "table", tmp_path / "out"
    code, summary = run_rebuild(
        commitlog=root / "commitlog", table=table, compare=root, files=out, consume_queue_file_size=2000,
        on_duplicate=kept,
    )  # fmt: skip
    assert (code, summary["dense"], summary["duplicate_slots"], "duplicates" in summary) == (0, True, 0, False)
    assert (summary["rows"], summary["compare"]["differences"]) == (471, {})
    assert queues(out / "consumequeue") == queues(root / "consumequeue")
    rows = spark.read.format("delta").load(str(table)).where("topic = '%LMQ%one'").orderBy("position")
    found = rows.select("queue_offset", "rebuild_slot", "broker_serves").collect()
    assert [tuple(row) for row in found] == [(slot, slot, True) for slot in range(len(found))]


def test_quiet_running_broker_is_healthy(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    """Its next CommitLog file is there already, and empty."""
    del spark
    root = golden.extract_broker(golden.RUNNING_CLASSIC, tmp_path)
    code, summary = run_rebuild(commitlog=root / "commitlog", table=tmp_path / "table", compare=root)
    assert (code, summary["rows"], summary["damaged_files"], summary["commitlog"]["end"]) == (0, 20, [], 4920)
    assert summary["compare"]["differences"] == {}


@pytest.mark.soak
@pytest.mark.integration
def test_native_log_continues_queues_of_commitlog(spark: Any, tmp_path: Path, run_rebuild: Rebuild) -> None:
    """A broker's queues keep their offsets, and the native log continues the same queues."""
    classic = golden.extract(golden.MIXED, "n0/commitlog", tmp_path)
    old = [(at, body) for at, body in golden.messages(golden.MIXED).items() if at < 2 * 131_072]
    last = decode_messages(pa.array([body for _, body in old]), ["topic", "queue_id", "queue_offset"]).to_pylist()[-1]
    fingerprint = str(read_commitlog(classic).fingerprint)
    options = {"commitlog": str(classic), "fingerprint": fingerprint, **SLOW_ELECTIONS}
    with LocalCluster(1, tmp_path / "nodes", **options) as cluster, Client(cluster.peers) as client:
        client.append(encode_messages(last["topic"], last["queue_id"], [b"x", b"y"]))
    store, table = tmp_path / "nodes" / "default" / "dledger-n0", tmp_path / "table"
    code, summary = run_rebuild(store=store, commitlog=classic, table=table, files=tmp_path)
    assert (code, summary["rows"], summary["dense"]) == (0, len(old) + 2, True)
    rows = spark.read.format("delta").load(str(table)).orderBy("position").collect()
    assert [row["position"] for row in rows[: len(old)]] == [at for at, _ in old]
    assert [row["queue_offset"] for row in rows[-3:]] == [last["queue_offset"] + more for more in range(3)]
    assert [row["index"] for row in rows[-3:]] == [None, 1, 2]
    assert run_rebuild(store=store, commitlog=tmp_path, table=table)[0] == 3

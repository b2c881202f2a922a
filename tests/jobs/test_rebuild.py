"""The rebuild of consume queues: the pure parts, bad options, and whole runs on a broker's stores and our logs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pyarrow as pa
import pytest

from dledger_core import Client, ConfigError, LocalCluster, LogRange, open_store
from dledger_core.rocketmq import decode_messages, encode_messages
from dledger_core.rocketmq.convert import read_commitlog
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.log_info import LogMeta, save_log_meta
from jobs import rebuild_consume_queue
from jobs._rebuild.compare import check_compared
from jobs._rebuild.plan import RebuildOptions, RebuildPlan, check_assignable, plan_for
from jobs._rebuild.units import ALL_ENTRIES, UNIT_ARROW, EntryRules, decoded, ranges_and_units
from jobs.rebuild_consume_queue import rebuild
from tests.jobs.broker_store import INDEX_BYTES, write_broker_store
from tests.rocketmq import golden
from tests.spark_connector.store_writer import StoreWriter
from tests.support.run_job import run_in_process
from tests.support.slow_elections import SLOW_ELECTIONS


def entries(bodies: list[bytes], group: str = "default", first: int = 0) -> pa.RecordBatch:
    indexes = list(range(first, first + len(bodies)))
    columns = {"group": [group] * len(bodies), "index": indexes, "position": [i * 1000 for i in indexes]}
    return pa.RecordBatch.from_pydict({**columns, "body": pa.array(bodies, pa.binary())})


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    return run_in_process(rebuild_consume_queue.command, capsys, *arguments)[:2]


def options(**given: Any) -> RebuildOptions:
    return RebuildOptions.parse(given)


def units_in(batch: pa.RecordBatch, **rules: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = ranges_and_units(batch, EntryRules(**rules))[1].to_pylist()
    return rows


def runs_in(batch: pa.RecordBatch, **rules: Any) -> list[dict[str, Any]]:
    runs: list[dict[str, Any]] = ranges_and_units(batch, EntryRules(**rules))[0].sort_by("position").to_pylist()
    return runs


def test_units_are_dispatched_messages() -> None:
    bodies = encode_messages("T", [1, 2, 3, 4], [b"a", b"b", b"c", b"d"], "TagA", sys_flag=[0, 4, 8, 12]).to_pylist()
    batch = entries([*bodies, b"no message"], first=7)
    rows = units_in(batch, committed_end=9)
    assert [(row["index"], row["committed"]) for row in rows] == [(7, True), (9, None)]
    assert (rows[0]["position"], rows[0]["size"], rows[0]["tags_code"]) == (7048, len(bodies[0]), 2598919)
    skipped = [(row["position"], row["skipped"]) for row in runs_in(batch) if row["skipped"]]
    assert skipped == [(8048, "prepared_or_rolled_back"), (10048, "prepared_or_rolled_back"), (11048, "not_messages")]


def test_range_ends_at_gap_in_offsets() -> None:
    """0 is always a run of its own; what is assigned later makes one run."""
    offsets = [3, 4, 0, 1, 2, 0, 1, 7, 6]
    bodies = encode_messages("T", 0, [b"x"] * 9, queue_offset=offsets).to_pylist()
    for rules, expected in (
        ({}, [(3, 2), (0, 1), (1, 2), (0, 1), (1, 1), (7, 1), (6, 1)]),
        ({"broker_end": 3}, [(3, 2), (0, 1), (0, 6)]),
    ):
        runs = runs_in(entries(bodies), **rules)
        assert [(row["first"], row["units"]) for row in runs] == expected
        assert [row["range_id"] for row in runs] == list(range(len(expected)))


def test_decoded_rows_are_ranges_and_batches_of_units_per_group() -> None:
    """A task may read several logs: the units of each are counted on their own, hidden entries not at all."""
    bodies = encode_messages("T", 0, [b"x"] * 3).to_pylist()
    both = pa.Table.from_batches([entries(bodies, "a"), entries(bodies, "b")]).combine_chunks().to_batches()
    rows = pa.Table.from_batches(decoded(both, EntryRules(broker_end=0, hidden=((0, 1),)))).to_pylist()
    assert [(row["group"], row["units"]) for row in rows if row["batch"] is None] == [("a", 2), ("b", 2)]
    kept = [pa.ipc.open_stream(row["batch"]).read_all() for row in rows if row["batch"] is not None]
    assert [table.schema for table in kept] == [UNIT_ARROW] * 2
    assert [table.column("number").to_pylist() for table in kept] == [[0, 1]] * 2


LISTS = {"INNER_MULTI_DISPATCH": "%LMQ%a,b,x/y,%LMQ%a,T,,", "INNER_MULTI_QUEUE_OFFSET": "5,6,7,8,9"}


@pytest.mark.parametrize(
    ("topic", "lists", "expected"),
    [
        ("T", LISTS, [("T", 3, 4), ("%LMQ%a", 0, 5), ("b", 3, 6)]),
        ("%RETRY%T", LISTS, []),
        ("rmq_sys_T", LISTS, []),
        ("SCHEDULE_TOPIC_XXXX", LISTS, []),
        ("T", LISTS | {"INNER_MULTI_QUEUE_OFFSET": "5,6"}, []),
        ("T", LISTS | {"INNER_MULTI_QUEUE_OFFSET": "5,6,7,8,nine"}, []),
        ("T", {"INNER_MULTI_DISPATCH": "b"}, []),
        ("T", {"INNER_MULTI_DISPATCH": ",b", "INNER_MULTI_QUEUE_OFFSET": "1,2"}, [("T", 3, 4), ("b", 3, 2)]),
    ],
)
def test_further_queues_of_message(topic: str, lists: dict[str, str], expected: list[tuple[str, int, int]]) -> None:
    """As RocketMQ's ConsumeQueue.multiDispatchLmqQueue does; a queue that is named twice gets the message once."""
    properties = pa.array([[], list(lists.items()), []], pa.map_(pa.string(), pa.string()))
    bodies = encode_messages(topic, 3, [b"a", b"b", b"c"], "TagA", properties=properties, queue_offset=4).to_pylist()
    found = units_in(entries(bodies))
    rows = [row for row in found if row["index"] == 1]
    assert [(r["topic"], r["queue_id"], r["queue_offset"]) for r in rows] == (expected or [(topic, 3, 4)])
    assert {(r["position"], r["size"], r["tags_code"]) for r in rows} == {(1048, len(bodies[1]), 2598919)}
    assert [row["index"] for row in found] == [0, *[1] * len(rows), 2]
    assert len(units_in(entries(bodies), multi_dispatch=False)) == 3


def test_queue_that_is_named_again() -> None:
    """The message has no second unit there; other queues and other offsets are not affected."""
    names, offsets = "%LMQ%a,b,%LMQ%a,%LMQ%a,b,%LMQ%c,%LMQ%c", "5,6,5,5,6,7,8"
    lists = [("INNER_MULTI_DISPATCH", names), ("INNER_MULTI_QUEUE_OFFSET", offsets)]
    bodies = encode_messages(
        "T", 3, [b"x"], properties=pa.array([lists], pa.map_(pa.string(), pa.string()))
    ).to_pylist()
    rows = [(row["topic"], row["queue_offset"]) for row in units_in(entries(bodies))]
    assert rows == [("T", 0), ("%LMQ%a", 5), ("b", 6), ("%LMQ%c", 7)]
    (again,) = [row for row in runs_in(entries(bodies)) if row["skipped"]]
    assert (again["topic"], again["first"], again["units"], again["skipped"]) == ("%LMQ%a", 5, 2, "named_again")
    ours = units_in(entries(bodies), broker_end=0)
    assert [row["topic"] for row in ours] == ["T", "%LMQ%a", "b", "%LMQ%c"]


def test_further_queues_in_native_logs_need_no_offsets() -> None:
    properties = pa.array([[("INNER_MULTI_DISPATCH", "%LMQ%a,b")]], pa.map_(pa.string(), pa.string()))
    rows = units_in(entries(encode_messages("T", 3, [b"x"], properties=properties).to_pylist()), broker_end=0)
    assert [(row["topic"], row["queue_id"]) for row in rows] == [("T", 3), ("%LMQ%a", 0), ("b", 3)]


def test_how_far_store_is_read(tmp_path: Path) -> None:
    """A recorded commit index is a lower bound: it says which rows are known to be committed, or narrows."""
    bodies = encode_messages("T", 0, [b"x"] * 9, queue_offset=list(range(9))).to_pylist()
    store, bare = tmp_path / "dledger-n0", tmp_path / "b" / "dledger-n0"
    write_broker_store(store, bodies, committed=4)
    write_broker_store(bare, bodies)
    given = {"table": str(tmp_path / "t"), "store": str(store)}
    plan = plan_for(options(**given))
    assert (plan.ranges, plan.rules.committed_end, plan.lost) == ({tmp_path.name: (0, 9)}, 5, None)
    assert plan_for(options(**given, until="committed")).ranges == {tmp_path.name: (0, 5)}
    unknown = {**given, "store": str(bare)}
    assert plan_for(options(**unknown)).rules.committed_end == 0
    assert plan_for(options(**unknown, until="committed")).ranges == {"b": (0, 9)}
    (store / "checkpoint").write_text("committedIndex=4\nendIndex=11\n")
    assert plan_for(options(**given)).lost == (9, 12)


def test_broker_end_is_read_from_converted_store(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.append(encode_messages("T", 0, [b"x"] * 4).to_pylist())
    meta = writer.path / "meta" / "log.json"
    found = json.loads(meta.read_text())
    meta.write_text(
        json.dumps({key: value for key, value in found.items() if "crc" not in key} | {"broker_end_index": 3})
    )
    assert plan_for(options(table=str(tmp_path / "t"), store=str(writer.path))).rules.broker_end == 3


@pytest.mark.parametrize(("written", "expected"), [(3, 3), (9, ALL_ENTRIES)], ids=["converted", "a broker continued"])
def test_broker_end_after_broker_continued_converted_log(tmp_path: Path, written: int, expected: int) -> None:
    """It assigns queue offsets as usual; native messages do not contain their position."""
    store = tmp_path / "dledger-n0"
    bodies = encode_messages("T", 0, [b"x"] * written, queue_offset=list(range(written))).to_pylist()
    write_broker_store(store, bodies)
    meta = LogMeta(
        profile="A", group="g", node_id="n0", data_segment_bytes=1 << 14, index_segment_bytes=INDEX_BYTES,
        log_uuid="0" * 32, foreign_end=3, broker_end_index=3,
    )  # fmt: skip
    (store / "meta").mkdir()
    save_log_meta(OsFiles(), store / "meta" / "log.json", meta)
    given = options(table=str(tmp_path / "t"), store=str(store))
    assert plan_for(given).rules.broker_end == expected


class OneEntry:
    """A client of a log whose entries are those of a store."""

    def __init__(self, store: Path) -> None:
        self.read = open_store(store).read


def test_log_starting_with_broker_messages_is_rejected(tmp_path: Path) -> None:
    store = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path)
    with pytest.raises(ConfigError, match="--broker-end-index"):
        check_assignable(cast("Client", OneEntry(store)), "n0", LogRange(0, 9, 8))
    with StoreWriter(tmp_path) as writer:
        writer.append(encode_messages("T", 0, [b"x"] * 4).to_pylist())
    check_assignable(cast("Client", OneEntry(writer.path)), "default", LogRange(0, 4, 3))


def test_broker_store_with_checkpoint_is_rejected(tmp_path: Path) -> None:
    """A broker's served messages depend on all of its offsets."""
    store = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path)
    with pytest.raises(ConfigError, match="--checkpoint"):
        plan_for(options(table=str(tmp_path / "t"), store=str(store), checkpoint=str(tmp_path / "c")))


@pytest.mark.spark
def test_second_run_replaces_table(spark: Any, tmp_path: Path) -> None:
    store = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path)
    for end in (50, 40):
        plan = RebuildPlan(source={"path": str(store)}, ranges={"n0": (0, end)}, table=str(tmp_path / "table"))
        assert rebuild(spark, plan).summary["rows"] == end


@pytest.mark.spark
def test_table_with_other_columns_is_rejected(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path)
    spark.range(3).write.format("delta").save(str(tmp_path / "table"))
    code, summary = run(capsys, "--store", str(store), "--table", str(tmp_path / "table"))
    assert code == 3
    assert "other columns" in summary["message"]
    assert spark.read.format("delta").load(str(tmp_path / "table")).count() == 3


@pytest.mark.spark
@pytest.mark.integration
def test_native_log_continues_queues_of_commitlog(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A broker's queues keep their offsets, and the native log continues the same queues."""
    classic = golden.extract(golden.MIXED, "n0/commitlog", tmp_path)
    old = [(at, body) for at, body in golden.messages(golden.MIXED).items() if at < 2 * 131_072]
    last = decode_messages(pa.array([body for _, body in old]), ["topic", "queue_id", "queue_offset"]).to_pylist()[-1]
    fingerprint = str(read_commitlog(classic).fingerprint)
    options = {"commitlog": str(classic), "fingerprint": fingerprint, **SLOW_ELECTIONS}
    with LocalCluster(1, tmp_path / "nodes", **options) as cluster, Client(cluster.peers) as client:
        client.append(encode_messages(last["topic"], last["queue_id"], [b"x", b"y"]))
    store, table = tmp_path / "nodes" / "default" / "dledger-n0", tmp_path / "table"
    code, summary = run(
        capsys, "--store", str(store), "--commitlog", str(classic), "--table", str(table), "--files", str(tmp_path)
    )
    assert (code, summary["rows"], summary["dense"]) == (0, len(old) + 2, True)
    rows = spark.read.format("delta").load(str(table)).orderBy("position").collect()
    assert [row["position"] for row in rows[: len(old)]] == [at for at, _ in old]
    behind = last["queue_offset"]
    assert [row["queue_offset"] for row in rows[-3:]] == [behind, behind + 1, behind + 2]
    assert [row["index"] for row in rows[-3:]] == [None, 1, 2]
    code, summary = run(capsys, "--store", str(store), "--commitlog", str(tmp_path), "--table", str(table))
    assert code == 3


@pytest.mark.spark
@pytest.mark.integration
def test_logs_of_cluster(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our own logs: offsets are assigned per group, topic and queue in index order; other entries have none."""
    table = tmp_path / "table"
    with LocalCluster(groups=("a", "b"), **SLOW_ELECTIONS) as cluster:
        for group in ("a", "b"):
            with Client(cluster.peers, group) as client:
                client.append([b"no message", *encode_messages("T", [0, 1, 0], [b"x", b"y", b"z"]).to_pylist()])
                client.append(encode_messages(["T", "U"], 0, [b"x", b"y"]))
        code, summary = run(capsys, "--peers", cluster.peers, "--groups", "a,b", "--table", str(table))
    assert (code, summary["rows"], summary["queues"], summary["dense"]) == (0, 10, 6, True)
    assert summary["skipped"]["not_messages"] == 2
    rows = spark.read.format("delta").load(str(table)).orderBy("group", "index").collect()
    for group in ("a", "b"):
        found = [(row["topic"], row["queue_id"], row["queue_offset"]) for row in rows if row["group"] == group]
        assert found == [("T", 0, 0), ("T", 1, 0), ("T", 0, 1), ("T", 0, 2), ("U", 0, 0)]


def test_queues_in_rocksdb_are_not_compared(tmp_path: Path) -> None:
    """Else all messages would be called missing, and the broker's database a folder to replace."""
    folder = tmp_path / "consumequeue"
    folder.mkdir()
    for name in ("000004.log", "CURRENT", "IDENTITY", "LOCK", "MANIFEST-000005", "OPTIONS-000007"):
        (folder / name).write_text("MANIFEST-000005")
    for named in (tmp_path, folder):
        with pytest.raises(ConfigError, match="RocksDB"):
            check_compared(str(named))
    (folder / "CURRENT").unlink()
    (folder / "CURRENT").mkdir()
    assert check_compared(str(tmp_path)) == str(folder)

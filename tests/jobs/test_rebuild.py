"""The rebuild of consume queues: the pure parts, the transformations, and whole runs on a broker's stores."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core import Client, LocalCluster
from dledger_core.rocketmq import encode_messages
from jobs import rebuild_consume_queue
from jobs._rebuild.units import TABLE_COLUMNS, TABLE_SCHEMA, UNIT_SCHEMA, assign_offsets, keep_one, unit_batches
from jobs.rebuild_consume_queue import RebuildPlan, rebuild
from tests.rocketmq import golden
from tests.support.run_job import run_in_process


def entries(bodies: list[bytes], group: str = "default", first: int = 0) -> pa.RecordBatch:
    indexes = list(range(first, first + len(bodies)))
    columns = {"group": [group] * len(bodies), "index": indexes, "position": [i * 1000 for i in indexes]}
    return pa.RecordBatch.from_pydict({**columns, "body": pa.array(bodies, pa.binary())})


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    return run_in_process(rebuild_consume_queue.command, capsys, *arguments)[:2]


def test_units_of_entries() -> None:
    bodies = encode_messages("T", [1, 2, 3, 4], [b"a", b"b", b"c", b"d"], "TagA", sys_flag=[0, 4, 8, 12]).to_pylist()
    (batch,) = unit_batches([entries([*bodies, b"no message"], first=7)])
    assert batch.schema.names == [*TABLE_COLUMNS, "skipped"]
    rows = batch.to_pylist()
    assert [row["skipped"] for row in rows] == [
        None,
        "prepared_or_rolled_back",
        None,
        "prepared_or_rolled_back",
        "not_messages",
    ]
    assert [row["index"] for row in rows] == [7, 8, 9, 10, 11]
    assert (rows[0]["position"], rows[0]["size"], rows[0]["tags_code"]) == (7048, len(bodies[0]), 2598919)


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        ((), "Missing option '--table'"),
        (("--table", "t"), "exactly one of --peers and --store"),
        (("--table", "t", "--store", "s", "--peers", "p"), "exactly one of --peers and --store"),
        (("--table", "t", "--store", "s", "--groups", "a"), "a store holds one group"),
        (("--table", "t", "--peers", "p", "--commitlog", "c"), "--commitlog goes with --store"),
        (("--table", "t", "--store", "s", "--files", __file__), "is a file"),
        (("--table", "t", "--store", "s", "--compare", "/nowhere"), "/nowhere is no directory"),
        (("--table", "t", "--commitlog", "/nowhere"), "/nowhere is no directory"),
        (("--table", "t", "--commitlog", str(Path(__file__).parent)), "holds no CommitLog file"),
        (("--table", "t", "--store", "s", "--checkpoint", "c"), "--checkpoint works with --peers only"),
        (("--table", "t", "--peers", "p", "--trigger", "available-now"), "--trigger needs --checkpoint"),
        (("--table", "t", "--peers", "p", "--checkpoint", "c", "--trigger", "soon"), "wrong trigger 'soon'"),
        (("--table", "t", "--peers", "p", "--groups", "a,b", "--files", "f"), "files are of one group"),
        (("--table", "t", "--store", "s", "--tls-ca", "f"), "--tls-ca is not available yet"),
        (("--table", "t", "--store", "s", "--protocol", "dledger-java"), "is not available yet"),
        (("--table", "t", "--peers", "nonsense"), "malformed peer"),
        (("--table", __file__, "--store", "s"), "is a file"),
        (("--table", "/proc/t", "--store", "s"), "/proc/t cannot be written"),
        (("--table", "t", "--store", "s", "--files", "/proc"), "/proc/consumequeue cannot be written"),
        (("--table", "t", "--peers", "n0-h:1", "--checkpoint", "t"), "t is given twice at --table, --checkpoint"),
        (
            ("--table", "t/u", "--peers", "n0-h:1", "--checkpoint", "t"),
            "at --table, --checkpoint; name two",
        ),
        (("--table", "s/t", "--store", "s"), "at --table, --store; name two"),
        (("--table", "t", "--store", "t/s"), "at --table, --store; name two"),
        (
            ("--table", "c/t", "--commitlog", "c"),
            "at --table, --commitlog; name two",
        ),
        (
            ("--table", "t", "--store", "s", "--files", "t"),
            "at --table, --files; name two",
        ),
        (
            ("--table", "t", "--store", "s", "--files", "s"),
            "at --files, --store; name two",
        ),
        (
            ("--table", "q/t", "--store", "s", "--compare", "q"),
            "at --table, --compare; name two",
        ),
        (("--table", str(Path(__file__).parent), "--store", "s"), "is no Delta table"),
        (("--table", "t", "--store", "/nowhere"), "/nowhere"),
        (("--table", "t", "--unknown", "s"), "No such option"),
    ],
    ids=str,
)
def test_bad_input_is_one_line_and_exit_code_3(
    arguments: tuple[str, ...], part: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    code, summary = run(capsys, *arguments)
    assert code == 3
    assert part in summary["message"]
    assert "\n" not in summary["message"]
    assert not list(tmp_path.iterdir())


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
def test_offsets_are_assigned_in_index_order(spark: Any) -> None:
    chance = random.Random(5)
    indexes = sorted(chance.sample(range(5_000), 800))
    rows = [("g", f"T{chance.randrange(2)}", chance.randrange(3), None, 0, 0, 0, None, i) for i in indexes]
    chance.shuffle(rows)
    placed = assign_offsets(spark.createDataFrame(rows, TABLE_SCHEMA), range_entries=64)
    found = {row["index"]: row["queue_offset"] for row in placed.collect()}
    counts: Counter[tuple[str, int]] = Counter()
    for row in sorted(rows, key=lambda row: row[-1]):
        assert found.pop(row[-1]) == counts[row[1:3]]
        counts[row[1:3]] += 1
    assert not found


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
@pytest.mark.parametrize("on_duplicate", ["first", "last"])
def test_a_slot_that_two_messages_claim(spark: Any, on_duplicate: str) -> None:
    rows = [("g", "T", 0, offset, index, 0, 0, None, index) for index, offset in enumerate([0, 1, 1, 2, 0])]
    kept = keep_one(spark.createDataFrame(rows, TABLE_SCHEMA), on_duplicate).collect()
    expected = {0: 0, 1: 1, 2: 3} if on_duplicate == "first" else {0: 4, 1: 2, 2: 3}
    assert {row["queue_offset"]: row["index"] for row in kept} == expected


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
def test_entries_become_units_in_spark(spark: Any) -> None:
    bodies = list(golden.messages(golden.THREE).values())
    frame = spark.createDataFrame(entries(bodies).to_pylist(), "`group` string, index long, position long, body binary")
    units = frame.mapInArrow(unit_batches, UNIT_SCHEMA)
    assert units.where("skipped is null").count() == len(bodies)


def units_of(spark: Any, table: Path) -> set[tuple[Any, ...]]:
    rows = spark.read.format("delta").load(str(table)).collect()
    return {
        (row["topic"], row["queue_id"], row["queue_offset"], row["position"], row["size"], row["tags_code"])
        for row in rows
    }


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
@pytest.mark.parametrize("name", [golden.THREE, golden.REUSED])
def test_a_brokers_store(
    name: str, spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table equals RocketMQ's own rebuild; queue offsets given out twice are reported."""
    store = golden.extract(name, "n0/dledger-n0", tmp_path)
    monkeypatch.chdir(tmp_path)
    table = tmp_path / "table"
    code, summary = run(capsys, "--store", str(store), "--table", "table")
    expected = {
        (unit["topic"], *(unit[key] for key in ("queueId", "queueOffset", "physicalOffset", "size", "tagsCode")))
        for unit in golden.units(name)
    }
    assert units_of(spark, table) == expected
    assert summary["rows"] == len(expected)
    assert summary["queues"] == len({unit[:2] for unit in expected})
    assert (summary["start"], summary["end"]) == (0, len(golden.messages(name)))
    assert summary["dense"] is True
    assert summary["skipped"]["not_messages"] == 0
    assert summary["duplicate_slots"] == len(golden.messages(name)) - len(expected)
    assert code == (1 if summary["duplicate_slots"] else 0)
    clustering = spark.sql(f"describe detail delta.`{table}`").first()["clusteringColumns"]
    assert clustering == ["topic", "queue_id"]


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
def test_a_second_run_replaces_the_table(spark: Any, tmp_path: Path) -> None:
    store = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path)
    for end in (50, 40):
        plan = RebuildPlan(
            source={"path": str(store)}, ranges={"n0": (0, end)}, foreign=True, table=str(tmp_path / "table")
        )
        outcome = rebuild(spark, plan)
        assert outcome.summary["rows"] + outcome.summary["duplicate_slots"] == end


@pytest.mark.spark
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
def test_a_table_of_something_else_is_refused(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path)
    spark.range(3).write.format("delta").save(str(tmp_path / "table"))
    code, summary = run(capsys, "--store", str(store), "--table", str(tmp_path / "table"))
    assert code == 3
    assert "a table of something else" in summary["message"]
    assert spark.read.format("delta").load(str(tmp_path / "table")).count() == 3


def test_dry_run_reads_the_extent_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = golden.extract(golden.REUSED, "n0/dledger-n0", tmp_path)
    code, summary = run(capsys, "--store", str(store), "--table", str(tmp_path / "table"), "--dry-run")
    assert (code, summary["dry_run"], summary["start"], summary["end"]) == (0, True, 0, 229)
    assert not (tmp_path / "table").exists()


@pytest.mark.spark
@pytest.mark.integration
@pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas")
def test_the_logs_of_a_cluster(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Our own logs: offsets are assigned per group, topic and queue in index order; other entries have none."""
    table = tmp_path / "table"
    with LocalCluster(groups=("a", "b")) as cluster:
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

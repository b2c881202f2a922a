"""Data files that tasks write themselves: their rows, what Delta's log says of them, and their one transaction."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from py4j.protocol import Py4JNetworkError

from dledger_core.errors import StoreMismatchError
from dledger_core.rocketmq import encode_messages
from jobs import rebuild_consume_queue
from jobs._rebuild import data_files, whole
from jobs._rebuild.data_files import TABLE_ARROW, DataFile, files_at, rows_of
from jobs._rebuild.replacement import Replacement, rows_in
from jobs._rebuild.table import TABLE_COLUMNS, make_table
from jobs._rebuild.units import SEARCHED, EntryRules, Units, unit_batches
from tests.jobs.broker_store import write_broker_store
from tests.spark_connector.store_writer import StoreWriter
from tests.support.run_job import run_in_process

QUEUES = [0, 1, 0, 0, 1, 0]


def messages(offsets: list[int], topic: str = "T", **given: Any) -> list[bytes]:
    rows = len(offsets)
    queues = [QUEUES[row % len(QUEUES)] for row in range(rows)]
    bodies = [f"{row:03d}".encode() for row in range(rows)]
    given.setdefault("store_timestamp", [1_700_000_000_123 + row for row in range(rows)])
    encoded = encode_messages(topic, queues, bodies, "TagA", queue_offset=offsets, **given)
    found: list[bytes] = encoded.to_pylist()
    return found


def units(bodies: list[bytes], **rules: Any) -> pa.RecordBatch:
    indexes = list(range(len(bodies)))
    columns = {"group": ["g"] * len(bodies), "index": indexes, "position": [i * 1000 for i in indexes]}
    entries = pa.RecordBatch.from_pydict({**columns, "body": pa.array(bodies, pa.binary())})
    (batch,) = unit_batches([entries], EntryRules(**rules))
    return batch


def offsets_of(rows: pa.RecordBatch) -> list[int]:
    assert rows.column("rebuild_slot").equals(rows.column("queue_offset"))
    assert set(rows.column("broker_serves").to_pylist()) <= {True}
    found: list[int] = rows.column("queue_offset").to_pylist()
    return found


def test_rows_have_the_offsets_that_messages_carry() -> None:
    batch = units([*messages([4, 7, 5, 6, 8, 7]), b"no message"])
    rows = rows_of(batch, {})
    assert rows.schema == TABLE_ARROW
    assert tuple(rows.schema.names) == TABLE_COLUMNS
    assert offsets_of(rows) == [4, 7, 5, 6, 8, 7]
    assert rows.column("index").to_pylist() == list(range(6))


def test_rows_have_the_offsets_that_are_assigned() -> None:
    batch = units(messages([0] * 6), broker_end=0)
    assert offsets_of(rows_of(batch, {48: {("T", 0): 10, ("T", 1): 3, ("T", 2): 0}})) == [10, 3, 11, 12, 4, 13]


def test_a_batch_in_which_a_brokers_offsets_end() -> None:
    """A base counts from the queue's first unit in the batch, also where that one carries its offset."""
    batch = units(messages([9, 9, 10, 0, 0, 0]), broker_end=3)
    assert offsets_of(rows_of(batch, {48: {("T", 0): 9, ("T", 1): 9}})) == [9, 9, 10, 11, 10, 12]


@pytest.mark.parametrize("bases", [{}, {47: {("T", 0): 0, ("T", 1): 0}}, {48: {("T", 0): 0}}])
def test_other_batches_than_before_are_noticed(bases: data_files.Bases) -> None:
    with pytest.raises(StoreMismatchError, match="other batches the second time"):
        rows_of(units(messages([0] * 6), broker_end=0), bases)


def test_a_file_and_what_deltas_log_says_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds and nulls hold for all row groups; a column of nulls has no bounds."""
    monkeypatch.setattr(data_files, "_ROW_GROUP_ROWS", 2)
    rows = rows_of(units(messages([4, 7, 5, 6, 8, 7])), {})
    classic = rows.set_column(rows.schema.get_field_index("index"), "index", pa.nulls(6, pa.int64()))
    with DataFile(str(tmp_path / "part")) as file:
        for start in (4, 0, 2):
            file.append(classic.slice(start, 2))
        action = file.finish()
    assert action is not None
    add = json.loads(action)["add"]
    path = tmp_path / add["path"]
    assert (add["size"], add["partitionValues"], add["dataChange"]) == (path.stat().st_size, {}, True)
    found = pq.ParquetFile(path)
    assert found.num_row_groups == 3
    assert found.read().sort_by("position").to_pylist() == classic.to_pylist()
    stats = json.loads(add["stats"])
    assert stats["numRecords"] == rows_in([action]) == 6
    assert stats["nullCount"] == dict.fromkeys(SEARCHED, 0) | {"index": 6}
    assert set(stats["minValues"]) == set(stats["maxValues"]) == set(SEARCHED) - {"index"}
    ids = classic.column("msg_id").to_pylist()
    bounds = {name: (stats["minValues"][name], stats["maxValues"][name]) for name in stats["minValues"]}
    assert bounds["queue_offset"] == (4, 8)
    assert bounds["msg_id"] == (min(ids), max(ids))
    assert bounds["store_timestamp"] == ("2023-11-14T22:13:20.123Z", "2023-11-14T22:13:20.128Z")


@pytest.mark.parametrize(
    ("millis", "bounds"),
    [
        (-(10**14), (None, None)),
        (253_402_300_799_999, ("2023-11-14T22:13:20.123Z", "9999-12-31T23:59:59.999Z")),
    ],
)
def test_times_that_no_calendar_has_leave_the_bounds_out(
    tmp_path: Path, millis: int, bounds: tuple[str | None, str | None]
) -> None:
    with DataFile(str(tmp_path / "part")) as file:
        file.append(rows_of(units(messages([0, 0], store_timestamp=[1_700_000_000_123, millis])), {}))
        action = file.finish()
    assert action is not None
    stats = json.loads(json.loads(action)["add"]["stats"])
    least, greatest = stats["minValues"], stats["maxValues"]
    assert (least.pop("store_timestamp", None), greatest.pop("store_timestamp", None)) == bounds
    assert least.keys() == greatest.keys() == set(SEARCHED) - {"store_timestamp"}


def test_a_file_is_made_with_its_first_row_and_gone_if_it_does_not_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_files, "_ROW_GROUP_ROWS", 2)
    with DataFile(str(tmp_path / "part")) as file:
        assert file.finish() is None
    (runs,) = files_at(str(tmp_path / "part")).make(iter([Units(units([b"no message"]))]))
    assert runs.column("file").to_pylist() == [None]
    assert list(tmp_path.iterdir()) == []
    writing = files_at(str(tmp_path / "part")).make(iter([Units(units(messages([0, 0])))] * 2))
    next(writing)
    writing.close()  # as Spark does where a task is killed
    assert list(tmp_path.iterdir()) == []
    failing = files_at(str(tmp_path / "part"), {}).make(
        iter([Units(units(messages([0, 0]))), Units(pa.record_batch({}))])
    )
    with pytest.raises(KeyError):
        list(failing)
    assert list(tmp_path.iterdir()) == []


def rows_in_table(spark: Any, table: Path) -> list[Any]:
    found: list[Any] = spark.read.format("delta").load(str(table)).orderBy("topic", "queue_id", "position").collect()
    return found


def written_files(table: Path) -> set[str]:
    return {path.name for path in table.glob("part-*.parquet")}


@pytest.mark.spark
def test_tasks_write_what_spark_would(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A broker's log in one pass, ours in two; beside each the table as Spark places and writes it."""
    broker, ours = tmp_path / "b" / "dledger-n0", tmp_path / "o"
    write_broker_store(broker, [*messages(list(range(40))), b"no message"], committed=20)
    with StoreWriter(ours) as writer:
        writer.append(messages([0] * 25))
        writer.append(messages([0] * 10, "U", keys=[f"k{row}" for row in range(10)]))
    for name, store in (("broker", broker), ("ours", writer.path)):
        code, found = run_in_process(
            rebuild_consume_queue.command, capsys, "--store", str(store), "--table", str(tmp_path / name)
        )[:2]
        with monkeypatch.context() as patched:
            patched.setattr(whole.Replacement, "begin", lambda *_: None)
            by_spark = run_in_process(
                rebuild_consume_queue.command, capsys, "--store", str(store), "--table", str(tmp_path / f"{name}s")
            )[:2]
        differ = {"table": "", "duration_s": 0}
        assert (code, found | differ) == (by_spark[0], by_spark[1] | differ)
        assert rows_in_table(spark, tmp_path / name) == rows_in_table(spark, tmp_path / f"{name}s")
        assert found["rows"] == len(rows_in_table(spark, tmp_path / name)) > 30


@pytest.mark.spark
def test_files_of_a_tangled_log_are_thrown_away(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store, table = tmp_path / "dledger-n0", tmp_path / "table"
    write_broker_store(store, messages([0, 0, 1, 2, 1, 1]))
    given = ["--store", str(store), "--table", str(table)]
    code, found, _ = run_in_process(rebuild_consume_queue.command, capsys, *given)
    assert (code, found["rows"], found["duplicate_slots"]) == (1, 6, 1)
    assert [row["broker_serves"] for row in rows_in_table(spark, table)] == [True, False, True, True, True, True]
    log = [json.loads(line) for path in (table / "_delta_log").glob("*.json") for line in path.read_text().splitlines()]
    assert written_files(table) == {action["add"]["path"] for action in log if "add" in action}


@pytest.mark.spark
def test_a_replacement_is_one_transaction(spark: Any, tmp_path: Path) -> None:
    """All rows before are gone, another's commit in between is a conflict, other properties are left to Spark."""
    table = str(tmp_path / "table")
    make_table(spark, table)
    for round_ in range(2):
        first, late = Replacement.begin(spark, table), Replacement.begin(spark, table)
        assert first is not None
        assert late is not None
        with DataFile(first.stem) as file:
            file.append(rows_of(units(messages([round_] * 6)), {}))
            action = file.finish()
        assert action is not None
        first.commit([action])
        assert {row["queue_offset"] for row in rows_in_table(spark, Path(table))} == {round_}
        with DataFile(late.stem) as file:
            file.append(rows_of(units(messages([9] * 6)), {}))
            unused = file.finish()
        assert unused is not None
        with pytest.raises(Exception, match=r"(?i)concurrent"):
            late.commit([unused])
        first.discard()
        late.discard()  # what was offered to Delta is left alone, whatever it said
        unused_one = Replacement.begin(spark, table)
        assert unused_one is not None
        with DataFile(unused_one.stem) as file:
            file.append(rows_of(units(messages([9] * 6)), {}))
            file.finish()
        unused_one.discard()
        assert len(written_files(Path(table))) == 2 * (round_ + 1)
    history = spark.sql(f"describe history delta.`{table}`").collect()
    assert [row["operation"] for row in history] == ["WRITE", "WRITE", "CREATE TABLE"]
    assert spark.read.format("delta").load(table).where("queue_offset = 0").count() == 0
    spark.sql(f"alter table delta.`{table}` set tblproperties ('delta.appendOnly' = 'true')")
    assert Replacement.begin(spark, table) is None


def test_files_are_deleted_where_spark_is_gone(tmp_path: Path) -> None:
    class Gone:
        @property
        def sparkContext(self) -> Any:
            raise Py4JNetworkError("the JVM has ended")

    replacement = Replacement(Gone(), None, str(tmp_path))  # type: ignore[arg-type]
    mine, other = Path(f"{replacement.stem}-0.parquet"), tmp_path / "part-other.parquet"
    mine.touch()
    other.touch()
    replacement.discard()
    assert list(tmp_path.iterdir()) == [other]

"""A classic CommitLog through the source: rows by position, streams over a broker that writes, losses and damage."""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core import CorruptRecordError, DLedgerError
from dledger_core.rocketmq import CommitLogView, decode_messages
from spark_connector.errors import DataLossError, OptionError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.admission import ReadMaxRows
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader
from tests.contracts.small_file_stores import COUNT, FILE_BYTES, bodies, classic
from tests.rocketmq.golden import MIXED, extract, units
from tests.support.damage import messages_in, overwrite

NO_LIMIT = ReadMaxRows((1 << 63) - 1)


@pytest.fixture
def commitlog(tmp_path: Path) -> Path:
    """A CommitLog of 100 messages in files of 4 KiB; the last one is not full."""
    return classic(tmp_path / "broker-a")[0]


def options(path: Path, **changes: Any) -> DLedgerOptions:
    return DLedgerOptions.for_reading({"path": str(path), "decode": "message", "pollMs": "1"} | changes)


def rows(reader: DLedgerBatchReader) -> list[dict[str, Any]]:
    parts = [batch for part in reader.partitions() for batch in reader.read(part)]
    return pa.Table.from_batches(parts).to_pylist() if parts else []


def batch_rows(path: Path, **changes: Any) -> list[dict[str, Any]]:
    return rows(DLedgerBatchReader(options(path, **changes)))


def starts_of(commitlog: Path) -> list[int]:
    files = sorted(commitlog.iterdir())
    return [int(file.name) + at for file in files for at in messages_in(file.read_bytes())]


def test_batch_has_each_message_with_its_position_and_no_index(commitlog: Path) -> None:
    found = batch_rows(commitlog.parent, minPartitions="7", groups="orders")
    assert [row["position"] for row in found] == starts_of(commitlog)
    assert {(row["group"], row["index"], row["term"], row["error"]) for row in found} == {("orders", None, None, None)}
    known = decode_messages(pa.array(bodies()), ["queue_offset", "body", "keys"]).to_pylist()
    assert [{name: row[name] for name in known[0]} for row in found] == known
    raw = batch_rows(commitlog, decode="none")
    assert [row["position"] for row in raw] == starts_of(commitlog)
    assert {row["group"] for row in raw} == {"broker-a"}


def test_ranges_that_continue_each_other_have_each_message_once(commitlog: Path) -> None:
    view = CommitLogView(commitlog)
    first, end = view.bounds()
    for step in (61, 1000, FILE_BYTES, FILE_BYTES + 1):
        found = []
        for low, high in itertools.pairwise([*range(first, end, step), end]):
            at = low
            while at < high:
                chunk = view.read(at, high, 512)
                found += chunk.batch.column("position").to_pylist()
                assert chunk.next_position > at
                at = chunk.next_position
        assert found == starts_of(commitlog)
    for position in range(first, end, 97):
        before = view.message_before(position + 1)
        assert before.position <= position < before.end


def test_damage_belongs_to_range_that_begins_with_it(commitlog: Path) -> None:
    starts = starts_of(commitlog)
    damaged, after = starts[2], starts[3]
    overwrite(commitlog / f"{0:020d}", damaged, bytes(8))
    view = CommitLogView(commitlog)
    assert view.read(0, damaged, 1 << 20).batch.column("position").to_pylist() == starts[:2]
    for low in range(damaged, after):
        with pytest.raises(CorruptRecordError):
            CommitLogView(commitlog).read(low, low + FILE_BYTES, 1 << 20)
    for low in (after, after + 1, starts[4]):
        found = CommitLogView(commitlog).read(low, FILE_BYTES, 1 << 20).batch.column("position").to_pylist()
        assert found == [at for at in starts if low <= at < FILE_BYTES]


def test_time_and_topic_select_messages(commitlog: Path) -> None:
    view = CommitLogView(commitlog)
    stored = decode_messages(pa.array(bodies()), ["store_timestamp"]).column(0).cast(pa.int64()).to_pylist()
    assert view.position_at_time(stored[0] // 1000) == 0
    assert view.position_at_time(stored[-1] // 1000 + 1) is None
    assert batch_rows(commitlog, topics="no such topic") == []
    late = str(stored[-1] // 1000 + 1)
    assert batch_rows(commitlog, startingTimestamp=late, startingOffsetsByTimestampStrategy="latest") == []
    assert len(batch_rows(commitlog, endingTimestamp=late)) == COUNT


def test_mixed_log_is_two_logs_in_one_read(tmp_path: Path) -> None:
    commitlog = extract(MIXED, "n0/commitlog", tmp_path)
    extract(MIXED, "n0/dledger-n0", tmp_path)
    wanted = {unit["physicalOffset"] for unit in units(MIXED)}
    found = batch_rows(commitlog.parent, isolation="read_uncommitted")
    before = [row["position"] for row in found if row["index"] is None]
    after = {row["index"]: row["position"] for row in found if row["index"] is not None}
    assert (len(before), sorted(after)) == (325, list(range(263)))
    assert {*before, *(at + 48 for at in after.values())} >= wanted
    assert {row["group"] for row in found} == {"n0", "n0.commitlog"}
    starts = json.dumps({"orders": 260, "orders.commitlog": before[-3]})
    options_given = {"groups": "orders", "isolation": "read_uncommitted", "startingOffsets": starts}
    assert len(batch_rows(commitlog.parent, **options_given)) == 6
    reader, start = stream(commitlog.parent, isolation="read_uncommitted")
    assert len(micro_batches(reader, start)[0]) == 588
    last = max(commitlog.iterdir())
    lost = messages_in(last.read_bytes())[-1]
    overwrite(last, lost, bytes(131072 - lost))
    with pytest.raises(DLedgerError):
        batch_rows(commitlog.parent, isolation="read_uncommitted")
    last.unlink()
    with pytest.raises(OptionError):
        batch_rows(commitlog.parent, isolation="read_uncommitted")


@pytest.mark.parametrize("option", ["maxOffsetsPerTrigger", "minOffsetsPerTrigger", "maxRecordsPerPartition"])
def test_option_that_counts_indexes_is_refused(commitlog: Path, option: str) -> None:
    with pytest.raises(OptionError):
        batch_rows(commitlog, **{option: "10"})


def micro_batches(reader: DLedgerStreamReader, start: dict[str, Any]) -> tuple[list[int], dict[str, Any]]:
    """Positions of the rows until nothing is new, and the last offset."""
    found: list[int] = []
    while (end := reader.latestOffset(start, NO_LIMIT)) != start:
        for part in reader.partitions(start, end):
            found += [at for batch in reader.read(part) for at in batch.column("position").to_pylist()]
        start = end
    return found, start


def stream(path: Path, **changes: Any) -> tuple[DLedgerStreamReader, dict[str, Any]]:
    reader = DLedgerStreamReader(options(path, startingOffsets="earliest", **changes))
    start = reader.initialOffset()
    assert reader.latestOffset(start, NO_LIMIT) == start, "the first micro-batch is empty"
    return reader, start


def test_stream_follows_broker_across_restarts_and_files(tmp_path: Path) -> None:
    complete = classic(tmp_path / "complete")[0]
    growing = tmp_path / "growing" / "commitlog"
    growing.mkdir(parents=True)
    found: list[int] = []
    start: dict[str, Any] | None = None
    for file in sorted(complete.iterdir()):
        content, path = file.read_bytes(), growing / file.name
        for at in messages_in(content)[::10]:  # messages before it are there, and half of the next one
            path.write_bytes((content[: at + 40]).ljust(len(content), b"\0"))
            reader = DLedgerStreamReader(options(growing, startingOffsets="earliest", maxBytesPerTrigger="2000"))
            if start is None:
                start = reader.initialOffset()
            more, start = micro_batches(reader, start)
            found += more
            assert reader.reportLatestOffset() is not None
        path.write_bytes(content)
    assert start is not None
    more, start = micro_batches(DLedgerStreamReader(options(growing)), start)
    assert found + more == starts_of(complete)


def test_stream_reports_files_that_broker_deleted(commitlog: Path) -> None:
    reader, start = stream(commitlog)
    _, *others = sorted(commitlog.iterdir())
    (commitlog / f"{0:020d}").unlink()
    with pytest.raises(DataLossError):
        micro_batches(reader, start)
    reader = DLedgerStreamReader(options(commitlog, failOnDataLoss="false"))
    found, _ = micro_batches(reader, start)
    assert found == [at for at in starts_of(commitlog) if at >= int(others[0].name)]


def test_stream_notices_another_log_at_its_path(commitlog: Path, tmp_path: Path) -> None:
    reader, start = stream(commitlog)
    _, end = micro_batches(reader, start)
    last = max(commitlog.iterdir())
    at = messages_in(last.read_bytes())[-1]
    overwrite(last, at + 90, b"other")
    with pytest.raises(DataLossError):
        micro_batches(DLedgerStreamReader(options(commitlog)), end)
    shutil.rmtree(commitlog)


@pytest.mark.parametrize("damage", ["zeros", "lost file", "body"])
def test_damage_is_an_error_and_no_fewer_rows(commitlog: Path, damage: str) -> None:
    second = sorted(commitlog.iterdir())[1]
    at = messages_in(second.read_bytes())[3]
    match damage:
        case "zeros":
            overwrite(second, at, bytes(50))
        case "lost file":
            second.unlink()
        case _:
            overwrite(second, at + 90, b"?")
    with pytest.raises(DLedgerError):
        batch_rows(commitlog, decode="none")
    if damage == "body":
        assert [row["position"] for row in batch_rows(commitlog) if row["error"]] == [int(second.name) + at]
        with pytest.raises(DLedgerError):
            batch_rows(commitlog, onDecodeError="fail")
    else:
        with pytest.raises(CorruptRecordError):
            batch_rows(commitlog)


@pytest.mark.spark
def test_spark_reads_and_streams_commitlog(spark: Any, commitlog: Path, tmp_path: Path) -> None:
    source = {"decode": "message", "startingOffsets": "earliest", "minPartitions": "3"}
    table = spark.read.format("dledger").options(**source).load(str(commitlog))
    assert [row["position"] for row in table.orderBy("position").collect()] == starts_of(commitlog)
    assert table.where("index is not null or term is not null").count() == 0
    stream = spark.readStream.format("dledger").options(**source, maxBytesPerTrigger="5000").load(str(commitlog))
    written = stream.writeStream.format("parquet").trigger(availableNow=True)
    written.option("checkpointLocation", str(tmp_path / "checkpoint")).start(str(tmp_path / "rows")).awaitTermination(
        120
    )
    rows = spark.read.parquet(str(tmp_path / "rows")).orderBy("position").collect()
    assert [row["position"] for row in rows] == starts_of(commitlog)

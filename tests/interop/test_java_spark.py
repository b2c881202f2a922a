"""Spark and the ingest job read a live group of real Java nodes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.rocketmq import encode_messages
from jobs import ingest
from spark_connector.columns import schema_for
from spark_connector.errors import OptionError, TermMismatchError
from spark_connector.offsets import StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.reading.opening import open_log
from spark_connector.reading.readers import DLedgerBatchReader
from spark_connector.reading.tracking import Tracker
from tests.interop.java_group import JavaGroup
from tests.support.run_job import run_in_process

pytestmark = [pytest.mark.integration, pytest.mark.slow]


@pytest.fixture
def group(group_b: JavaGroup) -> JavaGroup:
    return group_b


def options(running: JavaGroup, **more: str) -> dict[str, str]:
    return {"peers": running.peers, "protocol": "dledger-java", "fetchTimeoutMs": "60000", **more}


def reading(running: JavaGroup, **more: str) -> dict[str, str]:
    return options(running, groups="g", safetyLag="500ms", **more)


def test_offsets_are_checked_against_log_at_each_batch(group: JavaGroup) -> None:
    with group.client(timeout_ms=60_000) as client:
        client.append([b"%d" % number for number in range(10)])
    tracker = Tracker(DLedgerOptions.for_reading(reading(group)))
    bounds = tracker.bounds()
    end = bounds["g"].end
    assert bounds["g"].log_uuid is None
    good = tracker.offset_at({"g": end}, bounds)
    assert tracker.adopt(good, bounds) == good
    known = good.groups["g"]
    assert known.check is not None
    for wrong in (replace(known, term=known.term + 1), replace(known, check=known.check ^ 1)):
        with pytest.raises(TermMismatchError):
            tracker.adopt(StreamOffset({"g": wrong}), bounds)
    with pytest.raises(OptionError):
        tracker.index_at_time("g", 0, bounds["g"])
    assert tracker.wait(bounds, 10) is False


def test_uncommitted_reads_end_at_stored_end(group: JavaGroup) -> None:
    with group.client(timeout_ms=60_000) as client:
        last = client.append([b"just now"]).last_index
    more = {"groups": "g", "safetyLag": "1h", "isolation": "read_uncommitted"}
    log = open_log(DLedgerOptions.for_reading(options(group, **more)), "g")
    assert log.bounds().end == last + 1
    assert log.read(Range("g", last, last + 1), last, 0).batch.column("body").to_pylist() == [b"just now"]


def test_decoded_messages_keep_offsets_of_their_broker(group: JavaGroup) -> None:
    messages = encode_messages(
        topic=pa.array(["orders", "orders"]), queue_id=1, body=pa.array([b"one", b"two"]), queue_offset=pa.array([7, 8])
    )
    with group.client(timeout_ms=60_000) as client:
        first = client.append(messages).first_index
    more = {"decode": "message", "commitProbe": "true", "startingOffsets": f'{{"g": {first}}}'}
    chosen = DLedgerOptions.for_reading(reading(group, **more))
    reader = DLedgerBatchReader(chosen)
    batches = [batch for part in reader.partitions() for batch in reader.read(part)]
    assert {batch.schema for batch in batches} == {schema_for("message", "dledger-java")}
    rows = sorted(pa.Table.from_batches(batches).to_pylist(), key=lambda row: row["queue_offset"])
    assert [(row["topic"], row["queue_offset"], row["body"], row["committed"]) for row in rows] == [
        ("orders", 7, b"one", True),
        ("orders", 8, b"two", True),
    ]


def collected(frame: Any) -> list[Any]:
    return [(row["index"], bytes(row["body"]), row["committed"]) for row in frame.collect()]


@pytest.mark.spark
def test_batches_and_streams(spark: Any, group: JavaGroup, tmp_path: Path) -> None:
    from spark_connector import register

    register(spark)
    with group.client(timeout_ms=60_000) as client:
        start = client.append([b"start"]).last_index + 1
        client.append([b"%d" % number for number in range(300)])
    wanted = {b"%d" % number for number in range(300)}
    source = {"startingOffsets": f'{{"g": {start}}}'}

    lagging = spark.read.format("dledger").options(**reading(group, **source)).load()
    found = collected(lagging)
    assert [index for index, _, _ in found] == list(range(start, start + 300))
    assert {body for _, body, _ in found} == wanted
    assert {committed for _, _, committed in found} == {None}

    probed = spark.read.format("dledger").options(**reading(group, commitProbe="true", **source)).load()
    found = collected(probed)
    assert {(body, committed) for _, body, committed in found} == {(body, True) for body in wanted}

    def run(checkpoint: Path) -> None:
        stream = spark.readStream.format("dledger").options(**reading(group, **source)).load()
        query = (
            stream.writeStream.format("parquet")
            .options(path=str(tmp_path / "out"), checkpointLocation=str(checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    run(tmp_path / "checkpoint")
    assert {bytes(row["body"]) for row in spark.read.parquet(str(tmp_path / "out")).collect()} == wanted

    with group.client(timeout_ms=60_000) as client:
        client.append([b"streamed 0", b"streamed 1"])
    run(tmp_path / "checkpoint")  # continues after its last row: each row once
    bodies = [bytes(row["body"]) for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert sorted(bodies) == sorted([*wanted, b"streamed 0", b"streamed 1"])


@pytest.mark.soak
@pytest.mark.spark
def test_ingest_appends_new_entries_of_java_group(
    spark: Any, group: JavaGroup, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def append(*bodies: bytes) -> int:
        with group.client(timeout_ms=60_000) as client:
            return client.append(list(bodies)).first_index

    def rows() -> list[tuple[bytes, Any]]:
        found = spark.read.format("delta").load(str(tmp_path / "table")).collect()
        return sorted((bytes(row["body"]), row["committed"]) for row in found)

    first = append(b"one", b"two")
    arguments = ["--peers", group.peers, "--groups", "g", "--protocol", "dledger-java", "--safety-lag", "500ms"]
    arguments += ["--table", str(tmp_path / "table"), "--checkpoint", str(tmp_path / "checkpoint")]
    arguments += ["--starting-offsets", json.dumps({"g": first})]
    code, told, _ = run_in_process(ingest.command, capsys, *arguments, "--commit-probe", "--dry-run")
    assert (code, told["available"]["g"]["end"]) == (0, first + 2)
    assert append(b"three") == first + 2, "a dry run has appended a probe"
    code, told, _ = run_in_process(ingest.command, capsys, *arguments)
    bodies = [b"one", b"three", b"two"]  # Java's servers keep no order of requests in flight
    assert (code, told["rows"], rows()) == (0, 3, [(body, None) for body in bodies])
    append(b"zero")
    code, told, _ = run_in_process(ingest.command, capsys, *arguments)
    assert (code, told["rows"], rows()) == (0, 1, [(body, None) for body in (*bodies, b"zero")])
    code, told, _ = run_in_process(ingest.command, capsys, *arguments[:4], *arguments[6:])
    assert (code, told["error"]) == (3, "DLEDGER_OPTION")

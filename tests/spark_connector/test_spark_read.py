"""Reading with real Spark from a real cluster."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.spark,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"),
]


def bodies(start: int, end: int) -> list[bytes]:
    return [f"body-{number}".encode() for number in range(start, end)]


def source(reader: Any, cluster: Any, log: Any, **options: Any) -> Any:
    return reader.format("dledger").options(peers=cluster.peers, groups=log.group, **options)


def stream(spark: Any, cluster: Any, log: Any, target: Path, **options: Any) -> Any:
    """Run one AvailableNow query into JSON files; returns it."""
    rows = source(spark.readStream, cluster, log, **options).load().selectExpr("index", "CAST(body AS STRING) body")
    writer = rows.writeStream.format("json").option("checkpointLocation", str(target / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(target / "out"))
    query.awaitTermination()
    return query


def read_out(target: Path) -> list[str]:
    found = [json.loads(line) for file in (target / "out").glob("*.json") for line in file.read_text().splitlines()]
    return [row["body"] for row in sorted(found, key=lambda row: row["index"])]


def texts(start: int, end: int) -> list[str]:
    return [body.decode() for body in bodies(start, end)]


def test_batch_read_from_servers_and_from_store(dledger: Any, cluster: Any, log: Any, new_group: Any) -> None:
    from dledger_core import Client

    log.append(bodies(0, 20_000))
    with Client(cluster.peers, new_group()) as other:
        other.append(bodies(0, 5))
        frame = (
            dledger.read.format("dledger")
            .options(peers=cluster.peers, groups=f"{log.group},{other.group}", minPartitions=4, readFrom="follower")
            .load()
        )
        assert [(field.name, field.dataType.simpleString()) for field in frame.schema] == [
            ("group", "string"),
            ("index", "bigint"),
            ("term", "bigint"),
            ("position", "bigint"),
            ("timestamp", "timestamp"),
            ("body", "binary"),
        ]
        counts = {row["group"]: row["count"] for row in frame.groupBy("group").count().collect()}
        assert counts == {log.group: 20_000, other.group: 5}
    rows = frame.where(frame.group == log.group).orderBy("index").collect()
    assert [bytes(row["body"]) for row in rows] == bodies(0, 20_000)
    store = cluster.store_path(cluster.leader(log.group), log.group)
    from_store = dledger.read.format("dledger").load(str(store))
    assert from_store.count() == 20_000


def test_stream_available_now_limits_and_restart(dledger: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    log.append(bodies(0, 250))
    options = {"startingOffsets": "earliest", "maxOffsetsPerTrigger": 100}
    query = stream(dledger, cluster, log, tmp_path, **options)
    sizes = [report["numInputRows"] for report in query.recentProgress]
    assert max(sizes) <= 100
    assert sum(sizes) == 250
    log.append(bodies(250, 300))
    stream(dledger, cluster, log, tmp_path, **options)
    assert read_out(tmp_path) == texts(0, 300)
    offset = json.loads((tmp_path / "checkpoint" / "offsets" / "0").read_text().splitlines()[-1])
    assert offset["groups"][log.group]["next"] == 0  # the pin batch


def test_stream_from_latest_sees_what_is_appended_while_it_starts(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path
) -> None:
    log.append(bodies(0, 50))
    stream(dledger, cluster, log, tmp_path)
    log.append(bodies(50, 80))
    stream(dledger, cluster, log, tmp_path)
    assert read_out(tmp_path) == texts(50, 80)


def test_running_stream_follows_log_through_leader_change(dledger: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    log.append(bodies(0, 10))
    rows = source(dledger.readStream, cluster, log, startingOffsets="earliest").load()
    writer = rows.selectExpr("index", "CAST(body AS STRING) body").writeStream.format("json")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start(str(tmp_path / "out"))
    try:
        query.processAllAvailable()
        leader = cluster.leader(log.group)
        log.transfer_leadership(next(node for node in cluster.node_ids if node != leader))
        log.append(bodies(10, 20))
        query.processAllAvailable()
    finally:
        query.stop()
    assert read_out(tmp_path) == texts(0, 20)


def test_checkpoint_of_another_log_fails_with_stable_code(
    dledger: Any, cluster: Any, log: Any, new_group: Any, tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException

    from dledger_core import Client

    log.append(bodies(0, 20))
    stream(dledger, cluster, log, tmp_path, startingOffsets="earliest")
    shutil.rmtree(tmp_path / "out")
    with Client(cluster.peers, new_group()) as other:
        other.append(bodies(0, 30))
        offsets = tmp_path / "checkpoint" / "offsets"
        for file in offsets.glob("[0-9]*"):
            file.write_text(file.read_text().replace(f'"{log.group}"', f'"{other.group}"'))
            (offsets / f".{file.name}.crc").unlink()
        with pytest.raises(StreamingQueryException, match=r"\[DLEDGER_DATA_LOSS.LOG_RECREATED\] group"):
            stream(dledger, cluster, other, tmp_path)


def test_messages_as_columns(dledger: Any, cluster: Any, log: Any) -> None:
    from dledger_core.rocketmq import encode_messages

    log.append(encode_messages("orders", [0, 1], [b"one", b"two"], tags="t", properties={"a": "b"}))
    rows = source(dledger.read, cluster, log, decode="message").load().orderBy("index").collect()
    assert [(bytes(row.body), row.topic, row.queue_id, row.tags) for row in rows] == [
        (b"one", "orders", 0, "t"),
        (b"two", "orders", 1, "t"),
    ]
    assert rows[0].queue_offset is None
    assert rows[0].properties["a"] == "b"
    assert rows[0].error is None

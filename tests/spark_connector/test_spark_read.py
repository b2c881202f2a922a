"""Reading with real Spark: batches and streams, SQL, metadata tables, a broker's own files, several groups."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.rocketmq.golden import THREE, extract, units

pytestmark = [pytest.mark.spark, pytest.mark.integration]


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The store of a RocketMQ broker."""
    return str(extract(THREE, "n0", tmp_path_factory.mktemp("broker")) / "dledger-n0")


def run(frame: Any, target: Path) -> Any:
    """Run one AvailableNow query into JSON files; returns it."""
    writer = frame.writeStream.format("json").option("checkpointLocation", str(target / "checkpoint"))
    query = writer.trigger(availableNow=True).start(str(target / "out"))
    query.awaitTermination()
    return query


def read_out(target: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in (target / "out").glob("*.json") for line in file.read_text().splitlines()]


def test_views_in_sql(dledger: Any, cluster: Any, log: Any, broker: str) -> None:
    first = log.append([f"body-{number}".encode() for number in range(10)]).first_index
    options = f"peers '{cluster.peers}', groups '{log.group}'"
    offsets = (
        f"startingOffsets '{json.dumps({log.group: first + 2})}', endingOffsets '{json.dumps({log.group: first + 5})}'"
    )
    dledger.sql(f"CREATE OR REPLACE TEMPORARY VIEW entries USING dledger OPTIONS ({options}, {offsets})")
    found = dledger.sql("SELECT index, CAST(body AS STRING) body FROM entries ORDER BY index").collect()
    assert [tuple(row) for row in found] == [(first + n, f"body-{n}") for n in (2, 3, 4)]
    dledger.sql(f"CREATE OR REPLACE TEMPORARY VIEW nodes USING dledger OPTIONS ({options}, table 'nodes')")
    assert dledger.sql("SELECT count(*) FROM nodes WHERE reachable").first()[0] == 3
    messages = f"path '{broker}', decode 'message'"
    dledger.sql(f"CREATE OR REPLACE TEMPORARY VIEW messages USING dledger OPTIONS ({messages})")
    by_topic = dict(dledger.sql("SELECT topic, count(*) FROM messages WHERE error IS NULL GROUP BY topic").collect())
    expected = {row["topic"] for row in units(THREE)}
    assert expected <= set(by_topic)
    for view in ("entries", "nodes", "messages"):
        dledger.catalog.dropTempView(view)


def test_metadata_tables(dledger: Any, cluster: Any, log: Any) -> None:
    end = log.append([b"x"]).last_index + 1
    source = dledger.read.format("dledger").option("peers", cluster.peers)
    groups = source.option("table", "groups").load().where(f"`group` = '{log.group}'").collect()
    assert [(row["end"], row["nodes"], row["leader"]) for row in groups] == [(end, 3, cluster.leader(log.group))]
    assert source.option("table", "terms").load().columns == ["group", "first_index", "end", "term"]
    stream = dledger.readStream.format("dledger").options(peers=cluster.peers, table="terms").load()
    query = stream.writeStream.format("noop").trigger(availableNow=True)
    with pytest.raises(Exception, match=r"DLEDGER_OPTION.* table"):
        query.start().awaitTermination()


def test_brokers_store_as_batch_and_stream(dledger: Any, broker: str, tmp_path: Path) -> None:
    topics = sorted({row["topic"] for row in units(THREE) if not row["topic"].startswith("%")})[:2]
    source = {"path": broker, "decode": "message", "topics": ",".join(topics)}
    batch = dledger.read.format("dledger").options(**source).load()
    expected = {(r["topic"], r["queueId"], r["queueOffset"]) for r in units(THREE) if r["topic"] in topics}
    rows = batch.select("topic", "queue_id", "queue_offset", "msg_id", "index").collect()
    assert {tuple(row)[:3] for row in rows} == expected
    assert {row["msg_id"] for row in rows} == {r["msgId"] for r in units(THREE) if r["topic"] in topics}
    stream = dledger.readStream.format("dledger").options(
        **source, startingOffsets="earliest", maxOffsetsPerTrigger=400
    )
    stream = stream.load()
    assert stream.schema == batch.schema
    query = run(stream.select("index", "topic"), tmp_path)
    assert sorted(row["index"] for row in read_out(tmp_path)) == sorted(row["index"] for row in rows)
    assert len([report for report in query.recentProgress if report["numInputRows"]]) >= 2
    run(stream.select("index", "topic"), tmp_path)
    assert len(read_out(tmp_path)) == len(rows), "a restart finds nothing new"


def test_several_groups_by_pattern_up_to_end(dledger: Any, cluster: Any, new_group: Any, tmp_path: Path) -> None:
    from dledger_core import Client

    first, second = new_group(), new_group()
    begins = {}
    for group, count in ((first, 900), (second, 90)):
        with Client(cluster.peers, group) as client:
            begins[group] = client.append([group.encode()] * count).first_index
    options = {"groupsPattern": f"{first}|{second}", "maxOffsetsPerTrigger": "100", "startingOffsets": "earliest"}
    options |= {"endingOffsets": json.dumps({first: 500, second: 50}), "minPartitions": "3"}
    frame = dledger.readStream.format("dledger").options(peers=cluster.peers, **options).load()
    query = run(frame.select("group", "index"), tmp_path)
    found = read_out(tmp_path)
    for group, end in ((first, 500), (second, 50)):
        assert sorted(row["index"] for row in found if row["group"] == group) == list(range(begins[group], end))
    rows = [report["numInputRows"] for report in query.recentProgress]
    assert max(rows) <= 100
    offsets = [report["sources"][0]["endOffset"] for report in query.recentProgress if report["numInputRows"]]
    nexts = [json.loads(text)["groups"] if isinstance(text, str) else text["groups"] for text in offsets]
    assert all(at[second]["next"] > 0 for at in nexts), "the small group is in every micro-batch"


def test_other_body_fails_query_with_on_decode_error_fail(dledger: Any, cluster: Any, log: Any) -> None:
    index = log.append([b"no message"]).first_index
    source = dledger.read.format("dledger").options(peers=cluster.peers, groups=log.group, decode="message")
    [row] = source.load().collect()
    assert row["body"] is None
    assert row["error"]
    with pytest.raises(Exception, match=rf"\[DLEDGER_DECODE\] entry {index} "):
        source.option("onDecodeError", "fail").load().collect()


def test_user_schema_selects_columns_or_is_rejected(dledger: Any, cluster: Any, log: Any) -> None:
    source = dledger.read.format("dledger").options(peers=cluster.peers, groups=log.group)
    with pytest.raises(Exception, match="DLEDGER_SCHEMA"):
        source.schema("body string").load().collect()
    [row] = source.option("table", "groups").schema("leader string, group string").load().collect()
    assert (list(row.asDict()), row["group"]) == (["leader", "group"], log.group)


def bodies(start: int, end: int) -> list[bytes]:
    return [f"body-{number}".encode() for number in range(start, end)]


def source(reader: Any, cluster: Any, log: Any, **options: Any) -> Any:
    return reader.format("dledger").options(peers=cluster.peers, groups=log.group, **options)


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
    query = run(source(dledger.readStream, cluster, log, **options).load(), tmp_path)
    sizes = [report["numInputRows"] for report in query.recentProgress]
    assert max(sizes) <= 100
    assert sum(sizes) == 250
    log.append(bodies(250, 300))
    run(source(dledger.readStream, cluster, log, **options).load(), tmp_path)
    assert len(read_out(tmp_path)) == len({row["index"] for row in read_out(tmp_path)}) == 300
    offset = json.loads((tmp_path / "checkpoint" / "offsets" / "0").read_text().splitlines()[-1])
    assert offset["groups"][log.group]["next"] == 0  # the pin batch


def test_running_stream_follows_log_through_leader_change(dledger: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    log.append(bodies(0, 10))
    rows = source(dledger.readStream, cluster, log, startingOffsets="earliest").load()
    writer = rows.selectExpr("CAST(body AS STRING) body").writeStream.format("json")
    query = writer.option("checkpointLocation", str(tmp_path / "checkpoint")).start(str(tmp_path / "out"))
    try:
        query.processAllAvailable()
        leader = cluster.leader(log.group)
        log.transfer_leadership(next(node for node in cluster.node_ids if node != leader))
        log.append(bodies(10, 20))
        query.processAllAvailable()
    finally:
        query.stop()
    assert sorted(row["body"].encode() for row in read_out(tmp_path)) == sorted(bodies(0, 20))


def test_checkpoint_of_another_log_fails_with_stable_code(
    dledger: Any, cluster: Any, log: Any, new_group: Any, tmp_path: Path
) -> None:
    from pyspark.errors import StreamingQueryException

    from dledger_core import Client

    log.append(bodies(0, 20))
    run(source(dledger.readStream, cluster, log, startingOffsets="earliest").load(), tmp_path)
    shutil.rmtree(tmp_path / "out")
    with Client(cluster.peers, new_group()) as other:
        other.append(bodies(0, 30))
        offsets = tmp_path / "checkpoint" / "offsets"
        for file in offsets.glob("[0-9]*"):
            file.write_text(file.read_text().replace(f'"{log.group}"', f'"{other.group}"'))
            (offsets / f".{file.name}.crc").unlink()
        with pytest.raises(StreamingQueryException, match=r"\[DLEDGER_DATA_LOSS.LOG_RECREATED\] group"):
            run(source(dledger.readStream, cluster, other).load(), tmp_path)

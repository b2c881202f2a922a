"""Writing with real Spark to a real cluster: each row once, whatever Spark repeats."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from tests.spark_connector.sink_runs import put_lines, read_all, run_stream, sink

pytestmark = [
    pytest.mark.spark,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"),
]


def test_batch_write_of_any_body_type_is_whole(dledger: Any, cluster: Any, log: Any) -> None:
    frame = dledger.range(0, 30_000, 1, 3).selectExpr("CONCAT('row-', id) AS body")
    expected = Counter(f"row-{number}".encode() for number in range(30_000))
    sink(frame.write, cluster, log, appendMaxBytes=100_000).mode("append").save()
    assert Counter(read_all(log)) == expected
    dledger.conf.set("spark.sql.execution.arrow.useLargeVarTypes", "true")
    try:
        binary = dledger.range(0, 10, 1, 2).selectExpr("CAST(CONCAT('big-', id) AS BINARY) AS body")
        sink(binary.write, cluster, log).mode("append").save()
    finally:
        dledger.conf.unset("spark.sql.execution.arrow.useLargeVarTypes")
    assert Counter(read_all(log)) == expected + Counter(f"big-{number}".encode() for number in range(10))


def test_failing_batch_write_leaves_nothing_visible(dledger: Any, cluster: Any, log: Any) -> None:
    frame = dledger.range(0, 2000, 1, 2).selectExpr("IF(id = 1999, NULL, CAST(id AS STRING)) AS body")
    with pytest.raises(Exception, match="column 'body' is null in row 999 of partition 1"):
        sink(frame.write, cluster, log).mode("append").save()
    log.append([b"after"])
    assert read_all(log) == [b"after"]


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        (["CAST(id AS STRING) AS text"], "column 'text' cannot be written"),
        (["id AS body"], "column 'body' has type bigint"),
        (["CAST(id AS STRING) AS topic"], "DLEDGER_SCHEMA.*'body'"),
    ],
)
def test_columns_that_do_not_fit_fail_before_query(
    dledger: Any, cluster: Any, log: Any, expression: list[str], said: str
) -> None:
    from pyspark.errors import AnalysisException

    with pytest.raises(AnalysisException, match=said):
        sink(dledger.range(3).selectExpr(*expression).write, cluster, log).mode("append").save()


def test_rows_go_to_group_they_name_as_messages(dledger: Any, cluster: Any, log: Any, new_group: Any) -> None:
    from dledger_core import Client
    from dledger_core.rocketmq import decode_messages

    with Client(cluster.peers, new_group()) as other:
        frame = dledger.range(0, 100, 1, 2).selectExpr(
            f"IF(id % 2 = 0, '{log.group}', '{other.group}') AS group",
            "'orders' AS topic",
            "CAST(id % 4 AS INT) AS queue_id",
            "MAP('number', CAST(id AS STRING)) AS properties",
            "CAST(id AS STRING) AS body",
        )
        frame.write.format("dledger").option("peers", cluster.peers).mode("append").save()
        for client, rest in ((log, 0), (other, 1)):
            rows = decode_messages(pa.array(read_all(client), pa.binary())).to_pylist()
            numbers = [int(row["body"]) for row in rows]
            assert sorted(numbers) == list(range(rest, 100, 2))
            assert all(row["queue_id"] == int(row["body"]) % 4 for row in rows)
            assert all(dict(row["properties"])["number"] == row["body"].decode() for row in rows)


def test_stream_write_with_failed_first_attempt_and_replayed_batch(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path
) -> None:
    flag = tmp_path / "failed"

    def fail_once(rows: Any) -> Any:
        def passing(batches: Any) -> Any:
            yield from batches
            if not flag.exists():
                flag.touch()
                raise RuntimeError("the first attempt fails after all its rows")

        return rows.mapInArrow(passing, rows.schema)

    expected = put_lines(tmp_path, "a", 0, 3000)
    dledger.conf.set("spark.sql.execution.arrow.maxRecordsPerBatch", "50")
    try:
        run_stream(dledger, cluster, log, tmp_path, fail_once)
    finally:
        dledger.conf.unset("spark.sql.execution.arrow.maxRecordsPerBatch")
    assert flag.exists()
    assert Counter(read_all(log)) == Counter(expected)
    assert len(read_all(log, isolation="read_uncommitted")) > len(expected)
    newest = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    newest.unlink()
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    expected += put_lines(tmp_path, "b", 3000, 3100)
    run_stream(dledger, cluster, log, tmp_path)
    assert Counter(read_all(log)) == Counter(expected)


def test_log_to_log_keeps_order_and_counts(
    dledger: Any, cluster: Any, log: Any, new_group: Any, tmp_path: Path
) -> None:
    from dledger_core import Client

    with Client(cluster.peers, new_group()) as target:
        bodies = [f"body-{number}".encode() for number in range(3000)]
        log.append(bodies)
        rows = (
            dledger.readStream.format("dledger")
            .options(peers=cluster.peers, groups=log.group, startingOffsets="earliest", maxOffsetsPerTrigger=1000)
            .load()
        )
        writer = sink(rows.select("body").writeStream, cluster, target, checkpointLocation=str(tmp_path / "checkpoint"))
        writer.trigger(availableNow=True).start().awaitTermination()
        assert read_all(target) == bodies

"""Writing with real Spark to a real cluster: each row once, visible together, or an error with its reason."""

from __future__ import annotations

import os
import re
import shutil
import signal
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import PythonException, StreamingQueryException
from pyspark.sql.functions import col
from pyspark.taskcontext import TaskContext

from dledger_core import Client
from dledger_core.rocketmq import decode_messages
from tests.spark_connector.engine import read_all
from tests.support.soon import soon
from tests.test_guides import blocks

pytestmark = [pytest.mark.spark, pytest.mark.integration]
WAIT_S = 200.0
GUIDE = Path(__file__).resolve().parents[2] / "spark_connector" / "README.md"


def sink(writer: Any, cluster: Any, log: Any, **options: Any) -> Any:
    return writer.format("dledger").options(peers=cluster.peers, group=log.group, **options)


def run_stream(rows: Any, cluster: Any, log: Any, checkpoint: Path, **options: Any) -> None:
    """Stream rows into the log, one AvailableNow run."""
    writer = sink(rows.writeStream, cluster, log, checkpointLocation=str(checkpoint), **options)
    writer.trigger(availableNow=True).start().awaitTermination()


def stream_lines(
    spark: Any, cluster: Any, log: Any, directory: Path, transform: Callable[[Any], Any] = lambda rows: rows
) -> None:
    """Stream the lines under ``directory/in`` into the log in small appends."""
    rows = transform(spark.readStream.format("text").load(str(directory / "in")).selectExpr("value AS body"))
    run_stream(rows, cluster, log, directory / "checkpoint", appendMaxBytes=5000)


def put_lines(directory: Path, name: str, start: int, end: int) -> list[bytes]:
    (directory / "in").mkdir(exist_ok=True)
    lines = [f"line-{number:0200}" for number in range(start, end)]
    (directory / "in" / name).write_text("\n".join(lines) + "\n")
    return [line.encode() for line in lines]


def forget_newest_commit(checkpoint: Path) -> None:
    """Let the next run replay the newest micro-batch, as after a crash."""
    newest = max((checkpoint / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    newest.unlink()
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)


def partition_and_attempt() -> tuple[int, int]:
    context = TaskContext.get()
    assert context is not None
    return context.partitionId(), context.attemptNumber()


@pytest.fixture
def settings(dledger: Any) -> Iterator[Callable[..., None]]:
    """Return a function that changes settings of the session, for this test."""
    changed: set[str] = set()

    def change(**values: object) -> None:
        for name, value in values.items():
            changed.add(name)
            dledger.conf.set(f"spark.sql.{name.replace('__', '.')}", str(value))

    yield change
    for name in changed:
        dledger.conf.unset(f"spark.sql.{name.replace('__', '.')}")


def failing_once(flag: Path) -> Any:
    """Rows pass; the first attempt of each task has the reverse order, and fails or dies after its last row."""

    def passing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        partition, attempt = partition_and_attempt()
        for batch in batches:
            order = list(range(batch.num_rows))
            if attempt == 0:
                order.reverse()
            yield batch.take(pa.array(order, pa.int64()))
        if attempt == 0:
            flag.touch()
            if partition:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RuntimeError("the first attempt fails after all its rows")

    return lambda rows: rows.mapInArrow(passing, rows.schema)


def test_shuffled_task_retry_and_replayed_batch_write_each_row_once(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path, settings: Callable[..., None]
) -> None:
    expected = put_lines(tmp_path, "a", 0, 2000)
    settings(execution__arrow__maxRecordsPerBatch=50)
    failing = failing_once(tmp_path / "failed")
    stream_lines(dledger, cluster, log, tmp_path, lambda rows: failing(rows.repartition(2)))
    assert (tmp_path / "failed").exists()
    assert Counter(read_all(log)) == Counter(expected)
    assert len(read_all(log, isolation="read_uncommitted")) > len(expected)
    forget_newest_commit(tmp_path / "checkpoint")
    expected += put_lines(tmp_path, "b", 2000, 2100)
    stream_lines(dledger, cluster, log, tmp_path)
    assert Counter(read_all(log)) == Counter(expected)


def test_foreach_batch_of_guide_writes_each_row_once(dledger: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    """Though a worker is killed after its last row, and a micro-batch is replayed."""
    (code,) = blocks(GUIDE.read_text(), "Writing")[-1:]
    expected = put_lines(tmp_path, "a", 0, 20)
    lines = dledger.readStream.format("text").load(str(tmp_path / "in"))
    killed = tmp_path / "killed"

    def kill_once(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)

    rows = lines.selectExpr("value AS body", f"'{log.group}' AS group")
    names = {
        "peers": cluster.peers,
        "stream": rows.mapInArrow(kill_once, rows.schema),
        "checkpoint": str(tmp_path / "checkpoint"),
    }

    def run() -> None:
        exec(code, names)
        query: Any = names["query"]
        query.processAllAvailable()
        query.stop()

    run()
    assert killed.exists()
    forget_newest_commit(tmp_path / "checkpoint")
    expected += put_lines(tmp_path, "b", 20, 30)
    run()
    assert Counter(read_all(log)) == Counter(expected)


def test_failed_batch_write_does_not_block_readers(dledger: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    """One task fails at once, and the driver aborts; the other one appends afterwards."""
    peers, group, late = cluster.peers, log.group, tmp_path / "late"

    def waiting(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            if None not in batch.column("body").to_pylist():
                with Client(peers, group) as client:
                    until = time.monotonic() + 1.5  # Spark ends the worker of a cancelled task after two seconds
                    while time.monotonic() < until and not client.describe("producers").num_rows:
                        time.sleep(0.05)
                late.touch()
            yield batch

    rows = dledger.sql("SELECT CAST(NULL AS STRING) AS body UNION ALL SELECT 'x'").mapInArrow(waiting, "body string")
    with pytest.raises(PythonException, match="DLEDGER_SCHEMA"):
        sink(rows.write, cluster, log).mode("append").save()
    soon(late.exists, WAIT_S, every_s=0.05)
    for _ in range(2):
        sink(dledger.sql("SELECT 'after' AS BODY").write, cluster, log).mode("append").save()
    assert read_all(log) == [b"after"] * 2


def test_copied_checkpoint_is_fenced(dledger: Any, cluster: Any, log: Any, target: Any, tmp_path: Path) -> None:
    reading = {"peers": cluster.peers, "groups": log.group, "startingOffsets": "earliest"}

    def run(checkpoint: Path) -> None:
        bodies = dledger.readStream.format("dledger").options(**reading).load().select("body")
        run_stream(bodies, cluster, target, checkpoint)

    log.append([b"both have read this"])
    run(tmp_path / "first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    log.append([b"the first reads this alone"])
    run(tmp_path / "first")
    log.append([b"the copy takes this into its next micro-batch"])
    with pytest.raises(StreamingQueryException, match="FENCED"):
        run(tmp_path / "copy")
    assert read_all(target, isolation="read_uncommitted") == read_all(log)[:2]
    run(tmp_path / "first")  # the first one is not harmed
    assert read_all(target) == read_all(log)


def test_failed_stream_does_not_block_readers(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path, settings: Callable[..., None]
) -> None:
    """None of its tasks has finished: the driver aborts by run and batch id; the restart writes the rows again."""
    broken, appended = tmp_path / "broken", tmp_path / "appended"
    broken.touch()
    settings(execution__arrow__maxRecordsPerBatch=50)

    def failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        yield from batches
        if broken.exists():
            soon(appended.exists, WAIT_S, every_s=0.05)
            raise RuntimeError("this task always fails")

    def watch() -> bool:
        if read_all(log, isolation="read_uncommitted"):
            appended.touch()
        return appended.exists()

    def transform(rows: Any) -> Any:
        return rows.coalesce(1).mapInArrow(failing, rows.schema)

    expected = put_lines(tmp_path, "a", 0, 5000)  # more than the buffers between the tasks hold
    watching = threading.Thread(target=soon, args=(watch, WAIT_S))
    watching.start()
    with pytest.raises(StreamingQueryException, match="this task always fails"):
        stream_lines(dledger, cluster, log, tmp_path, transform)
    watching.join()
    after = log.append([b"after"]).last_index
    soon(lambda: max(node.visible_end for node in log.metadata().nodes) > after, WAIT_S, every_s=0.05)
    assert read_all(log) == [b"after"]
    broken.unlink()
    stream_lines(dledger, cluster, log, tmp_path, transform)
    assert Counter(read_all(log)) == Counter([*expected, b"after"])


def test_batch_write_is_one_transaction_while_leader_is_killed(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path, settings: Callable[..., None]
) -> None:
    settings(execution__arrow__maxRecordsPerBatch=100)
    go = tmp_path / "go"

    def halting(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for number, batch in enumerate(batches):
            until = time.monotonic() + WAIT_S
            while number == 15 and not go.exists() and time.monotonic() < until:
                time.sleep(0.01)
            yield batch

    rows = dledger.range(0, 6000, 1, 2).selectExpr("CONCAT(id, REPEAT('x', 300)) AS body")
    writer = sink(rows.mapInArrow(halting, rows.schema).write, cluster, log, appendMaxBytes=5000).mode("append")
    seen: list[list[bytes]] = []

    def kill_leader() -> None:
        try:
            soon(lambda: len(read_all(log, isolation="read_uncommitted")) > 500, WAIT_S, every_s=0.05)
            seen.append(read_all(log))
            leader = cluster.leader(log.group)
            cluster.kill(leader)
            cluster.leader(log.group)
            cluster.restart(leader)
            seen.append(read_all(log))
        finally:
            go.touch()

    killing = threading.Thread(target=kill_leader)
    killing.start()
    writer.save()  # in this thread: Spark finds registered sources only where the session is active
    killing.join()
    assert seen == [[], []]
    assert Counter(read_all(log)) == Counter(f"{number}{'x' * 300}".encode() for number in range(6000))


def test_sorted_messages_keep_their_order_in_queue_of_their_group(
    dledger: Any, cluster: Any, log: Any, target: Any
) -> None:
    """As the README says: a queue's rows in one partition, sorted there."""
    rows = dledger.range(0, 6000, 1, 4).selectExpr(
        f"IF(id % 2 = 0, '{log.group}', '{target.group}') AS group",
        "'orders' AS topic",
        "CAST(id % 4 AS INT) AS queue_id",
        "CAST(id AS STRING) AS keys",
        "MAP('number', CAST(id AS STRING)) AS properties",
        "CAST(id AS STRING) AS body",
    )
    rows = rows.repartition(2, "queue_id").sortWithinPartitions(col("keys").cast("long"))
    rows.write.format("dledger").options(peers=cluster.peers, appendMaxBytes=5000).mode("append").save()
    for client, rest in ((log, 0), (target, 1)):
        queues: dict[int, list[int]] = defaultdict(list)
        for message in decode_messages(pa.array(read_all(client), pa.binary())).to_pylist():
            assert dict(message["properties"])["number"] == message["body"].decode()
            queues[message["queue_id"]].append(int(message["body"]))
        assert queues == {queue: list(range(queue, 6000, 4)) for queue in (rest, rest + 2)}


def test_batch_write_of_any_body_type_is_complete_and_failing_one_invisible(
    dledger: Any, cluster: Any, log: Any, settings: Callable[..., None]
) -> None:
    failing = dledger.range(0, 2000, 1, 2).selectExpr("IF(id = 1999, NULL, CAST(id AS STRING)) AS body")
    with pytest.raises(Exception, match="row 999 of partition 1"):
        sink(failing.write, cluster, log).mode("append").save()
    rows = dledger.range(0, 30_000, 1, 3).selectExpr("CONCAT('row-', id) AS body")
    sink(rows.write, cluster, log, appendMaxBytes=100_000).mode("append").save()
    settings(execution__arrow__useLargeVarTypes="true")
    binary = dledger.range(30_000, 30_010, 1, 2).selectExpr("CAST(CONCAT('row-', id) AS BINARY) AS body")
    sink(binary.write, cluster, log).mode("append").save()
    assert Counter(read_all(log)) == Counter(b"row-%d" % number for number in range(30_010))


def test_statements_of_sql_guide_read_and_write_as_printed(dledger: Any, cluster: Any, log: Any) -> None:
    guide = GUIDE.with_name("SQL.md").read_text()
    log.append([b"one"])
    for section in ("Read", "Metadata", "Write"):
        for block in blocks(guide, section, "sql"):
            text = block.replace("127.0.0.1:40911,127.0.0.1:40912,127.0.0.1:40913", cluster.peers.replace(";", ","))
            text = re.sub(r"(groups?) 'default'", rf"\1 '{log.group}'", text)
            for statement in filter(str.strip, text.split(";\n")):
                dledger.sql(statement).collect()
    # The view shows the log as of its first query.
    assert sorted(read_all(log)) == [b"copy of one", b"one", b"order 1", b"order 2"]


VIEW = "CREATE OR REPLACE TEMPORARY VIEW entries USING dledger OPTIONS (peers '{peers}', groups '{group}')"
TO_WRITE = (
    "CREATE OR REPLACE TEMPORARY VIEW appended (body STRING) USING dledger OPTIONS (peers '{peers}', group '{group}')"
)


def test_cached_view_has_old_rows_until_it_is_created_again(dledger: Any, cluster: Any, log: Any) -> None:
    view = VIEW.format(peers=cluster.peers, group=log.group)

    def counts() -> tuple[int, int]:
        return dledger.table("entries").count(), dledger.table("kept").count()

    log.append([b"one"])
    for statement in (view, "CACHE TABLE entries", "CACHE TABLE kept AS SELECT * FROM entries"):
        dledger.sql(statement)
    assert counts() == (1, 1)
    log.append([b"two"])
    for statement in ("REFRESH TABLE entries", "REFRESH TABLE kept"):
        dledger.sql(statement)
        assert counts() == (1, 1)
    dledger.sql(view)
    assert counts() == (2, 2)
    dledger.sql("CACHE TABLE entries")
    log.append([b"three"])
    dledger.sql("UNCACHE TABLE entries")
    assert counts() == (2, 2)
    for statement in ("CLEAR CACHE", "DROP VIEW kept", "DROP VIEW entries"):
        dledger.sql(statement)


REFUSED = {
    "CREATE TABLE t USING dledger {read}": "DLEDGER_OPTION.*use a temporary view; CREATE TEMPORARY VIEW",
    "CREATE TABLE t USING dledger {write} AS SELECT 'x' AS body": "INTERNAL_ERROR",
    "CREATE OR REPLACE TABLE t USING dledger {write} AS SELECT 'x' AS body": "INTERNAL_ERROR",
    "INSERT OVERWRITE appended VALUES ('x')": "DLEDGER_OPTION.*a log cannot be overwritten",
    "INSERT INTO appended REPLACE WHERE body = 'one' VALUES ('x')": "does not support overwrite by filter",
    "INSERT INTO appended REPLACE USING (body) VALUES ('x')": "does not support INSERT INTO ... REPLACE",
    "INSERT INTO entries VALUES ('x')": "not enough data columns",
    "INSERT INTO entries (body) VALUES (X'61')": "DLEDGER_OPTION",
    "INSERT INTO entries SELECT * FROM entries": "DLEDGER_OPTION",
    "INSERT INTO appended VALUES (NULL)": "DLEDGER_SCHEMA",
    "CACHE TABLE appended": "DLEDGER_OPTION",
    "TRUNCATE TABLE appended": "expects a table",
    "DELETE FROM entries": "does not support deletes",
    "UPDATE entries SET body = X'00'": "does not support UPDATE",
    "MERGE INTO entries USING (SELECT 1 AS i) ON index = i WHEN MATCHED THEN DELETE": "does not support MERGE",
    "CREATE VIEW t AS SELECT * FROM entries": "temporary object",
    "SELECT * FROM entries VERSION AS OF 1": "Time travel",
}
"""Statements in a session with Delta's catalog, and what the error of each says."""


def test_refused_statements_write_nothing_and_leave_no_table(dledger: Any, cluster: Any, log: Any) -> None:
    names = {"peers": cluster.peers, "group": log.group}
    read, write = (f"OPTIONS (peers '{cluster.peers}', {name} '{log.group}')" for name in ("groups", "group"))
    for view in (VIEW, TO_WRITE):
        dledger.sql(view.format(**names))
    log.append([b"one"])
    for statement, reason in REFUSED.items():
        with pytest.raises(Exception, match=reason):
            dledger.sql(statement.format(read=read, write=write)).collect()
        assert not dledger.catalog.tableExists("t"), statement
    rows = dledger.sql("SELECT 'x' AS body")
    for mode in ("append", "overwrite"):
        with pytest.raises(Exception, match="INTERNAL_ERROR"):
            sink(rows.write, cluster, log).mode(mode).saveAsTable("t")
        assert not dledger.catalog.tableExists("t")
    with pytest.raises(Exception, match="a log cannot be overwritten"):
        rows.write.insertInto("appended", overwrite=True)
    assert read_all(log, isolation="read_uncommitted") == [b"one"]


def test_table_without_options_cannot_be_used_and_its_drop_deletes_no_row(dledger: Any, cluster: Any, log: Any) -> None:
    log.append([b"one"])
    dledger.sql(f"CREATE TABLE t (body STRING) USING dledger OPTIONS (peers '{cluster.peers}', group '{log.group}')")
    try:
        for statement in ("SELECT * FROM t", "INSERT INTO t VALUES ('x')", "CACHE TABLE t", "TRUNCATE TABLE t"):
            with pytest.raises(Exception, match="not a valid Spark SQL Data Source"):
                dledger.sql(statement).collect()
    finally:
        dledger.sql("DROP TABLE t")
    assert read_all(log) == [b"one"]


@pytest.mark.soak
def test_view_is_source_of_merge_into_delta_table(dledger: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    view, table = VIEW.format(peers=cluster.peers, group=log.group), f"delta.`{tmp_path / 'table'}`"
    log.append([b"one", b"two"])
    dledger.sql(view)
    dledger.sql(f"CREATE TABLE {table} USING delta AS SELECT * FROM entries")
    log.append([b"three"])
    dledger.sql(view)
    merge = f"MERGE INTO {table} AS t USING entries AS e ON t.index = e.index WHEN NOT MATCHED THEN INSERT *"
    for _ in range(2):
        dledger.sql(merge)
    assert sorted(bytes(row["body"]) for row in dledger.sql(f"SELECT body FROM {table}").collect()) == [
        b"one", b"three", b"two",
    ]  # fmt: skip

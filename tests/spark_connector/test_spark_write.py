"""Writing with real Spark to a real cluster: each row once, visible together, or an error with its reason."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.rocketmq import decode_messages
from tests.spark_connector.sink_runs import put_lines, read_all, run_stream, sink

pytestmark = [pytest.mark.spark, pytest.mark.integration]
WAIT_S = 200.0


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
    """Rows pass; the first attempt of each task has the reverse order, and fails after its last row."""

    def passing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark.taskcontext import TaskContext

        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            order = list(range(batch.num_rows))
            if context.attemptNumber() == 0:
                order.reverse()
            yield batch.take(pa.array(order, pa.int64()))
        if context.attemptNumber() == 0:
            flag.touch()
            raise RuntimeError("the first attempt fails after all its rows")

    return lambda rows: rows.mapInArrow(passing, rows.schema)


def test_shuffled_task_retry_and_replayed_batch_write_each_row_once(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path, settings: Callable[..., None]
) -> None:
    expected = put_lines(tmp_path, "a", 0, 2000)
    settings(execution__arrow__maxRecordsPerBatch=50)
    failing = failing_once(tmp_path / "failed")
    run_stream(dledger, cluster, log, tmp_path, lambda rows: failing(rows.repartition(2)))
    assert (tmp_path / "failed").exists()
    assert Counter(read_all(log)) == Counter(expected)
    assert len(read_all(log, isolation="read_uncommitted")) > len(expected)
    newest = max((tmp_path / "checkpoint" / "commits").glob("[0-9]*"), key=lambda file: int(file.name))
    newest.unlink()
    (newest.parent / f".{newest.name}.crc").unlink(missing_ok=True)
    expected += put_lines(tmp_path, "b", 2000, 2100)
    run_stream(dledger, cluster, log, tmp_path)
    assert Counter(read_all(log)) == Counter(expected)


def test_copied_checkpoint_is_fenced(dledger: Any, cluster: Any, log: Any, new_group: Any, tmp_path: Path) -> None:
    from pyspark.errors import StreamingQueryException

    from dledger_core import Client

    reading = {"peers": cluster.peers, "groups": log.group, "startingOffsets": "earliest"}

    def run(checkpoint: Path) -> None:
        bodies = dledger.readStream.format("dledger").options(**reading).load().select("body")
        writer = sink(bodies.writeStream, cluster, target, checkpointLocation=str(checkpoint))
        writer.trigger(availableNow=True).start().awaitTermination()

    with Client(cluster.peers, new_group()) as target:
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


def test_failed_stream_does_not_block_readers(dledger: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    """One of its two tasks has finished, so its driver can abort; the restart writes the micro-batch again."""
    from pyspark.errors import StreamingQueryException

    broken, finished = tmp_path / "broken", tmp_path / "finished"
    broken.touch()

    def failing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark.taskcontext import TaskContext

        context = TaskContext.get()
        assert context is not None
        yield from batches
        if context.partitionId() == 1 and broken.exists():
            _await(finished.exists, "the other task does not finish")
            raise RuntimeError("this task always fails")

    def watch() -> bool:
        tracker = dledger.sparkContext.statusTracker()
        stages = (tracker.getStageInfo(stage) for stage in tracker.getActiveStageIds())
        if any(stage is not None and stage.numTasks == 2 and stage.numCompletedTasks == 1 for stage in stages):
            finished.touch()
        return finished.exists()

    def transform(rows: Any) -> Any:
        return rows.repartition(2).mapInArrow(failing, rows.schema)

    expected = put_lines(tmp_path, "a", 0, 500)
    watching = threading.Thread(target=_await, args=(watch, "no task finishes"))
    watching.start()
    with pytest.raises(StreamingQueryException, match="this task always fails"):
        run_stream(dledger, cluster, log, tmp_path, transform)
    watching.join()
    after = log.append([b"after"]).last_index
    _await(lambda: max(node.visible_end for node in log.metadata().nodes) > after, "readers are held back")
    assert read_all(log) == [b"after"]
    broken.unlink()
    run_stream(dledger, cluster, log, tmp_path, transform)
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
            _await(lambda: len(read_all(log, isolation="read_uncommitted")) > 500, "nothing is appended")
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


def test_sorted_rows_of_queue_keep_their_order(dledger: Any, cluster: Any, log: Any) -> None:
    """As the README says: a queue's rows in one partition, sorted there."""
    from pyspark.sql.functions import col

    rows = dledger.range(0, 6000, 1, 4).selectExpr(
        "'orders' AS topic",
        "CAST(id % 5 AS INT) AS queue_id",
        "CAST(id AS STRING) AS keys",
        "CAST(id AS STRING) AS body",
    )
    sorted_rows = rows.repartition(2, "queue_id").sortWithinPartitions(col("keys").cast("long"))
    sink(sorted_rows.write, cluster, log, appendMaxBytes=5000).mode("append").save()
    queues: dict[int, list[int]] = defaultdict(list)
    for message in decode_messages(pa.array(read_all(log), pa.binary())).to_pylist():
        queues[message["queue_id"]].append(int(message["body"]))
    assert queues == {queue: list(range(queue, 6000, 5)) for queue in range(5)}


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"peers": "n0-127.0.0.1:1", "fetchRetryMs": "500"}, "UNREACHABLE.*n0-127.0.0.1:1"),
        ({"group": "absent"}, "DLEDGER_OPTION.*'absent'"),
    ],
)
def test_wrong_options_fail_before_any_task(dledger: Any, cluster: Any, options: dict[str, str], error: str) -> None:
    from pyspark.errors import AnalysisException

    writer = dledger.range(3).selectExpr("CAST(id AS STRING) AS body").write.format("dledger").mode("append")
    with pytest.raises(AnalysisException, match=f"(?s){error}"):
        writer.options(**{"peers": cluster.peers, **options}).save()


def _await(condition: Callable[[], Any], said: str) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, said
        time.sleep(0.05)


def test_batch_write_of_any_body_type_is_complete(dledger: Any, cluster: Any, log: Any) -> None:
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
    with pytest.raises(Exception, match="row 999 of partition 1"):
        sink(frame.write, cluster, log).mode("append").save()
    log.append([b"after"])
    assert read_all(log) == [b"after"]


def test_message_rows_are_written_to_their_group(dledger: Any, cluster: Any, log: Any, new_group: Any) -> None:
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

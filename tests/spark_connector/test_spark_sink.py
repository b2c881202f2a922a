"""The sink under real Spark when something goes wrong: each row once, visible together, or an error that says why."""

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

pytestmark = [
    pytest.mark.spark,
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore:PySpark does not yet fully support pandas"),
]
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


def failing_once(flag: Path, *, shuffled: bool = False) -> Any:
    """Rows pass; the first attempt of each task fails after its last one. With ``shuffled`` each has its own order."""

    def passing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark.taskcontext import TaskContext

        context = TaskContext.get()
        assert context is not None
        for batch in batches:
            order = list(range(batch.num_rows))
            if shuffled and context.attemptNumber() == 0:
                order.reverse()
            yield batch.take(pa.array(order, pa.int64()))
        if context.attemptNumber() == 0:
            flag.touch()
            raise RuntimeError("the first attempt fails after all its rows")

    return lambda rows: rows.mapInArrow(passing, rows.schema)


def test_shuffle_whose_rows_come_in_another_order_at_each_attempt(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path, settings: Callable[..., None]
) -> None:
    expected = put_lines(tmp_path, "a", 0, 2000)
    settings(execution__arrow__maxRecordsPerBatch=50)
    failing = failing_once(tmp_path / "failed", shuffled=True)
    run_stream(dledger, cluster, log, tmp_path, lambda rows: failing(rows.repartition(2)))
    assert (tmp_path / "failed").exists()
    assert Counter(read_all(log)) == Counter(expected)
    assert len(read_all(log, isolation="read_uncommitted")) > len(expected)


def test_copied_checkpoint_is_fenced_and_drops_nothing_silently(
    dledger: Any, cluster: Any, log: Any, new_group: Any, tmp_path: Path
) -> None:
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
        with pytest.raises(StreamingQueryException, match=r"FENCED.*was committed with other input"):
            run(tmp_path / "copy")
        assert read_all(target, isolation="read_uncommitted") == read_all(log)[:2]
        run(tmp_path / "first")  # the first one is not harmed
        assert read_all(target) == read_all(log)


def test_stream_that_fails_for_good_does_not_hold_readers_back(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path
) -> None:
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
            raise RuntimeError("this task fails whenever it is tried")

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
    with pytest.raises(StreamingQueryException, match="this task fails whenever it is tried"):
        run_stream(dledger, cluster, log, tmp_path, transform)
    watching.join()
    after = log.append([b"after"]).last_index
    _await(lambda: max(node.visible_end for node in log.metadata().nodes) > after, "readers are held back")
    assert read_all(log) == [b"after"]
    broken.unlink()
    run_stream(dledger, cluster, log, tmp_path, transform)
    assert Counter(read_all(log)) == Counter([*expected, b"after"])


def test_batch_write_is_one_transaction_through_death_of_leader(
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


def test_messages_of_queue_keep_their_order(dledger: Any, cluster: Any, log: Any) -> None:
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
    ("options", "said"),
    [
        ({"peers": "n0-127.0.0.1:1", "fetchRetryMs": "500"}, "UNREACHABLE.*n0-127.0.0.1:1"),
        ({"group": "absent"}, "DLEDGER_OPTION.*'absent'"),
        ({"appendMaxByte": "1"}, "DLEDGER_OPTION.*did you mean 'appendMaxBytes'"),
        ({"appendMaxBytes": "9000000"}, "DLEDGER_OPTION.*9000000.*appendMaxBytes"),
    ],
)
def test_wrong_options_fail_before_any_task(dledger: Any, cluster: Any, options: dict[str, str], said: str) -> None:
    from pyspark.errors import AnalysisException

    writer = dledger.range(3).selectExpr("CAST(id AS STRING) AS body").write.format("dledger").mode("append")
    with pytest.raises(AnalysisException, match=f"(?s){said}"):
        writer.options(**{"peers": cluster.peers, **options}).save()


def _await(condition: Callable[[], Any], said: str) -> None:
    until = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < until, said
        time.sleep(0.05)

"""A client of Spark Connect: what it sees of queries, whose driver is the server, when something fails."""

from __future__ import annotations

import os
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.errors import StreamingQueryException

from dledger_core import Client, LocalCluster
from dledger_core.cluster import free_ports
from spark_connector import register
from tests.spark_connector.engine import read_all
from tests.spark_connector.spark_processes import DELTA, connect_server, make_package, make_python
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon
from tests.support.spark_jvm import jvm_pid

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow, pytest.mark.soak]

BODIES = [b"body %06d %s" % (number, b"x" * 300) for number in range(20_000)]


@pytest.fixture(scope="module")
def installation(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The server's interpreter, and the package for its path."""
    scratch = tmp_path_factory.mktemp("installation")
    return make_python(scratch / "environment"), make_package(scratch)


@pytest.fixture(scope="module")
def server(installation: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    directory = tmp_path_factory.mktemp("server") / "server"
    with pytest.MonkeyPatch.context() as patch, connect_server(directory, *installation, *DELTA) as url:
        patch.setenv("SPARK_CONNECT_MODE_ENABLED", "1")  # PySpark sets it, and other modules have a JVM
        yield url


@pytest.fixture
def remote(server: str) -> Iterator[Any]:
    """A session of a client, which has no JVM."""
    session = connected(server)
    yield session
    session.stop()


def connected(url: str) -> Any:
    from pyspark.sql import SparkSession

    session: Any = SparkSession.builder.remote(url).create()
    register(session)
    return session


def source(session: Any, peers: str, group: str, **options: str) -> Any:
    reading = {"peers": peers, "groups": group, "startingOffsets": "earliest", **options}
    return session.readStream.format("dledger").options(**reading).load()


def sink(rows: Any, peers: str, group: str, checkpoint: Path) -> Any:
    writing = {"peers": peers, "group": group, "checkpointLocation": str(checkpoint)}
    return rows.select("body").writeStream.format("dledger").options(**writing)


def run(writer: Any, path: str | None = None) -> None:
    """Run a query over all that is there."""
    writer.trigger(availableNow=True).start(path).awaitTermination()


def test_query_of_killed_server_continues_once_client_starts_it(
    remote: Any, installation: tuple[Path, Path], cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    log.append(BODIES)
    with connect_server(tmp_path / "killed", *installation) as url:
        first = connected(url)
        sink(source(first, cluster.peers, log.group), cluster.peers, target.group, tmp_path / "checkpoint").start()
        soon(lambda: read_all(target, isolation="read_uncommitted"), 200)
        os.kill(jvm_pid(first), signal.SIGKILL)
        first.client.close()
    run(sink(source(remote, cluster.peers, log.group), cluster.peers, target.group, tmp_path / "checkpoint"))
    assert Counter(read_all(target)) == Counter(BODIES)


def dying_once() -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Rows pass; in the first attempt of each task its worker dies after the last one."""

    # Within a function, so that it travels as code: the server does not have this module.
    def passing(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        from pyspark.taskcontext import TaskContext

        yield from batches
        context = TaskContext.get()
        assert context is not None
        if context.attemptNumber() == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    return passing


def test_tasks_whose_workers_are_killed_write_each_row_once(
    remote: Any, cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    log.append(BODIES[:2000])
    rows = source(remote, cluster.peers, log.group).select("body").mapInArrow(dying_once(), "body binary")
    run(sink(rows, cluster.peers, target.group, tmp_path / "checkpoint"))
    assert Counter(read_all(target)) == Counter(BODIES[:2000])
    batch = remote.read.format("dledger").options(peers=cluster.peers, groups=log.group).load().select("body")
    assert batch.mapInArrow(dying_once(), "body binary").distinct().count() == 2000


@pytest.mark.parametrize("act", ["kill", "pause"])
def test_stream_continues_while_leader_is_killed_or_hangs(
    remote: Any, cluster: Any, log: Any, target: Any, tmp_path: Path, act: str
) -> None:
    rows = source(remote, cluster.peers, log.group)
    query = sink(rows, cluster.peers, target.group, tmp_path / "checkpoint").start()
    log.append(BODIES[:100])
    query.processAllAvailable()
    node = cluster.leader(target.group)
    getattr(cluster, act)(node)
    try:
        log.append(BODIES[100:2000])
        query.processAllAvailable()
        assert Counter(read_all(target)) == Counter(BODIES[:2000])
    finally:
        {"kill": cluster.restart, "pause": cluster.resume}[act](node)
    query.stop()


def test_query_with_copied_checkpoint_is_fenced(
    remote: Any, cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    def write(name: str) -> None:
        run(sink(source(remote, cluster.peers, log.group), cluster.peers, target.group, tmp_path / name))

    log.append([b"both have read this"])
    write("first")
    shutil.copytree(tmp_path / "first", tmp_path / "copy")
    log.append([b"the first reads this alone"])
    write("first")
    log.append([b"the copy takes this into its next micro-batch"])
    with pytest.raises(StreamingQueryException, match="FENCED"):
        write("copy")
    write("first")
    assert read_all(target) == read_all(log)


def test_restored_table_lacks_rows_that_query_has_read(remote: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    table = tmp_path / "table"

    def write(*bodies: bytes) -> int:
        """Append, and stream all there is; return the table's version."""
        log.append(list(bodies))
        rows = source(remote, cluster.peers, log.group).select("body").writeStream.format("delta")
        run(rows.option("checkpointLocation", str(tmp_path / "checkpoint")), str(table))
        return int(remote.sql(f"DESCRIBE HISTORY delta.`{table}` LIMIT 1").first()["version"])

    version = write(b"one")
    write(b"two")
    remote.sql(f"RESTORE delta.`{table}` TO VERSION AS OF {version}").collect()
    write(b"three")
    assert {bytes(row["body"]) for row in remote.read.format("delta").load(str(table)).collect()} == {b"one", b"three"}


def test_log_that_was_created_again_is_refused_by_source_and_sink(remote: Any, tmp_path: Path) -> None:
    ports = free_ports(1)

    def write(peers: str, **options: str) -> None:
        run(sink(source(remote, peers, "in", **options), peers, "out", tmp_path / "checkpoint"))

    for name, count in (("old", 10), ("new", 20)):
        with (
            LocalCluster(1, tmp_path / name, ("in", "out"), ports=ports, **SLOW_ELECTIONS) as nodes,
            Client(nodes.peers, "in") as read,
            Client(nodes.peers, "out") as written,
        ):
            read.append([b"%d" % number for number in range(count)])
            if name == "old":
                write(nodes.peers)
                assert len(read_all(written)) == count
                continue
            with pytest.raises(StreamingQueryException, match=r"DLEDGER_DATA_LOSS\.LOG_RECREATED"):
                write(nodes.peers)
            with pytest.raises(StreamingQueryException, match="QUERY_UNKNOWN"):
                write(nodes.peers, failOnDataLoss="false")
            assert not read_all(written, isolation="read_uncommitted")


def test_deleted_entries_are_a_loss_or_left_out(remote: Any, tmp_path: Path) -> None:
    small: dict[str, Any] = {"data_segment_bytes": 64 << 10, "index_segment_bytes": 32 << 10, "retain_bytes": 256 << 10}
    with (
        LocalCluster(1, groups=("in", "out"), **small, **SLOW_ELECTIONS) as nodes,
        Client(nodes.peers, "in") as read,
        Client(nodes.peers, "out") as written,
    ):

        def write(**options: str) -> None:
            rows = source(remote, nodes.peers, "in", pinFor="1s", **options)
            run(sink(rows, nodes.peers, "out", tmp_path / "checkpoint"))

        def first_index() -> int:
            return max(node.first_index for node in read.metadata().nodes)

        end = read.append([b"read"]).last_index + 1
        write()
        read.append(BODIES[:5000])
        soon(lambda: first_index() > end, every_s=0.2)
        with pytest.raises(StreamingQueryException, match=r"DLEDGER_DATA_LOSS\.RETENTION"):
            write()
        write(failOnDataLoss="false")
        left = read_all(written)
        assert left == [b"read", *BODIES[5001 - len(left) : 5000]]
        assert 1 < len(left) < 5001

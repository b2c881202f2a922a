"""Spark Declarative Pipelines: the example project runs as it is, and each row is written once, whatever fails."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyspark
import pytest
from deltalake import DeltaTable

from dledger_core import Client, LocalCluster
from dledger_core.cluster import free_ports
from dledger_core.environment import find_java
from tests.spark_connector.engine import read_all
from tests.spark_connector.spark_processes import DELTA, connect_server, kill_workers_of_tasks
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon
from tests.support.spark_jvm import short_lived_environment

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
ORDERS = [f"order {number:06} {'paid' if number % 2 else 'open'} {'x' * 300}".encode() for number in range(40_000)]
PAID = Counter(body for body in ORDERS if b" paid " in body)
LOCAL = "local[2]"


TABLE = """
from pyspark import pipelines as dp
from pyspark.sql import DataFrame, SparkSession

dp.create_sink("table", "delta", {{"path": "{}"}})


@dp.append_flow(target="table")
def all_orders() -> DataFrame:
    return SparkSession.active().readStream.table("orders").select("body")
"""
"""A second flow for the example: all orders to a Delta table. Delta 4.4 refuses a second run of a ``dp.table``."""


@dataclass(frozen=True)
class Pipeline:
    """A copy of the example, with a storage directory and groups of its own.

    Attributes:
        project: its directory.
        peers: the nodes.
        remote: where it runs: a Spark that each run starts for itself, or the URL of a server of Spark Connect.
    """

    project: Path
    peers: str
    remote: str = LOCAL

    @classmethod
    def make(
        cls, directory: Path, peers: str, groups: tuple[str, str] = ("default", "paid"), remote: str = LOCAL
    ) -> Pipeline:
        project = shutil.copytree(ROOT / "examples" / "pipeline", directory / "pipeline")
        spec, flows = project / "spark-pipeline.yml", project / "transformations" / "orders.py"
        spec.write_text(spec.read_text().replace("/tmp/orders-pipeline", str(directory / "storage")))
        text = flows.read_text().replace('groups="default"', f'groups="{groups[0]}"')
        flows.write_text(text.replace('"group": "paid"', f'"group": "{groups[1]}"'))
        return cls(project, peers, remote)

    @property
    def output(self) -> str:
        return (self.project / "output").read_text(errors="replace")

    @property
    def storage(self) -> Path:
        return self.project.parent / "storage"

    def add_table(self) -> Path:
        """Let a second flow write all orders to a Delta table; return its path."""
        table = self.project.parent / "table"
        (self.project / "transformations" / "table.py").write_text(TABLE.format(table))
        return table

    def change(self, old: str, new: str) -> None:
        """Change its program in one place."""
        flows = self.project / "transformations" / "orders.py"
        before, after = flows.read_text().split(old)
        flows.write_text(before + new + after)

    @contextmanager
    def running(self, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
        """Run it in a group of processes, which are killed at the end of the block."""
        command = [HOME / "bin" / "spark-pipelines", "run", "--remote", self.remote, *arguments]
        if self.remote == LOCAL:
            command += ["--conf", "spark.ui.enabled=false"]
        environment = os.environ | {"SPARK_HOME": str(HOME), "JAVA_HOME": str(find_java()), "DLEDGER_PEERS": self.peers}
        environment |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
        environment |= short_lived_environment()
        with (self.project / "output").open("wb") as output:
            process = subprocess.Popen(
                command,
                cwd=self.project,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                yield process
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def run(self, *arguments: str) -> None:
        with self.running(*arguments) as process:
            assert process.wait(400) == 0, self.output[-4000:]

    def fail(self) -> str:
        """Run it, and return its output; a scheduler sees the failure by the exit code."""
        with self.running() as process:
            assert process.wait(400) == 1, self.output[-4000:]
        return self.output


def bodies_of(table: Path) -> list[bytes]:
    return sorted(DeltaTable(table).to_pyarrow_table().column("body").to_pylist())


def append_orders(client: Client) -> None:
    for start in range(0, len(ORDERS), 5000):
        client.append(ORDERS[start : start + 5000])


def test_pipeline_killed_in_a_micro_batch_writes_each_row_once(tmp_path: Path) -> None:
    with (
        LocalCluster(3, groups=("default", "paid"), **SLOW_ELECTIONS) as cluster,
        Client(cluster.peers) as orders,
        Client(cluster.peers, "paid") as paid,
    ):
        append_orders(orders)
        pipeline = Pipeline.make(tmp_path, cluster.peers)
        with pipeline.running():
            soon(lambda: read_all(paid, isolation="read_uncommitted"), 200)
        pipeline.run()
        assert Counter(read_all(paid)) == PAID
        orders.append([b"order 7 paid", b"order 8 open"])
        pipeline.run()
        assert Counter(read_all(paid)) == PAID + Counter([b"order 7 paid"])


@pytest.mark.parametrize("fault", ["workers killed", "node killed", "node hung"])
def test_pipeline_that_meets_a_fault_writes_each_row_once(
    cluster: Any, log: Any, target: Any, tmp_path: Path, fault: str
) -> None:
    append_orders(log)
    pipeline, node = Pipeline.make(tmp_path, cluster.peers, (log.group, target.group)), ""
    try:
        with pipeline.running() as process:
            soon(lambda: read_all(target, isolation="read_uncommitted"), 200)
            node = cluster.leader(target.group)
            if fault == "workers killed":
                assert kill_workers_of_tasks(process.pid)
            else:
                {"node killed": cluster.kill, "node hung": cluster.pause}[fault](node)
            assert process.wait(400) == 0, pipeline.output[-4000:]
        assert Counter(read_all(target)) == PAID
    finally:
        if node and fault != "workers killed":
            {"node killed": cluster.restart, "node hung": cluster.resume}[fault](node)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of Spark Connect with Delta, on which pipelines run."""
    directory = tmp_path_factory.mktemp("server") / "server"
    with connect_server(directory, Path(sys.executable), ROOT, *DELTA) as url:
        yield url


def test_old_copy_of_checkpoints_is_fenced_by_log_and_skipped_by_delta(
    server: str, cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    pipeline = Pipeline.make(tmp_path, cluster.peers, (log.group, target.group), server)
    table, storage, copy, newest = pipeline.add_table(), pipeline.storage, tmp_path / "copy", tmp_path / "newest"
    log.append([b"1 paid before the copy"])
    pipeline.run()
    shutil.copytree(storage, copy)
    log.append([b"2 paid after it"])
    pipeline.run()
    storage.rename(newest)
    copy.rename(storage)
    log.append([b"3 paid, and the copy takes it into its next micro-batch"])
    assert "[FENCED]" in pipeline.fail()
    assert bodies_of(table) == read_all(target) == read_all(log)[:2]  # Delta reports nothing
    shutil.rmtree(storage)
    newest.rename(storage)
    pipeline.run()
    assert read_all(target) == read_all(log)
    assert bodies_of(table) == read_all(log)


def test_table_that_went_back_lacks_rows_that_its_flow_has_read(
    server: str, cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    pipeline = Pipeline.make(tmp_path, cluster.peers, (log.group, target.group), server)
    table = pipeline.add_table()

    def write(body: bytes) -> int:
        log.append([body])
        pipeline.run()
        return DeltaTable(table).version()

    version = write(b"1 paid")
    write(b"2 paid")
    DeltaTable(table).restore(version)
    write(b"3 paid")
    assert bodies_of(table) == [b"1 paid", b"3 paid"]
    assert read_all(target) == read_all(log)


def test_flow_refuses_logs_that_were_created_again_until_remedies_are_typed(server: str, tmp_path: Path) -> None:
    ports, pipeline = free_ports(1), None
    for name, count in (("old", 10), ("new", 20)):
        with (
            LocalCluster(1, tmp_path / name, ("default", "paid"), ports=ports, **SLOW_ELECTIONS) as nodes,
            Client(nodes.peers) as orders,
            Client(nodes.peers, "paid") as paid,
        ):
            orders.append([b"%s paid %d" % (name.encode(), number) for number in range(count)])
            if pipeline is None:
                pipeline = Pipeline.make(tmp_path, nodes.peers, remote=server)
                pipeline.run()
                assert len(read_all(paid)) == count
                continue
            assert "[DLEDGER_DATA_LOSS.LOG_RECREATED]" in pipeline.fail()
            pipeline.change("groups=", 'failOnDataLoss="false", groups=')
            shown = pipeline.fail()
            assert "[QUERY_UNKNOWN]" in shown
            assert not read_all(paid, isolation="read_uncommitted")
            (batch,) = set(re.findall(r"set the option firstBatchId=(\d+) once", shown))
            pipeline.change('PEERS, "group"', f'PEERS, "firstBatchId": "{batch}", "group"')
            pipeline.run()
            assert read_all(paid) == read_all(orders)


def test_flow_whose_entries_were_deleted_names_them_until_loss_is_accepted(server: str, tmp_path: Path) -> None:
    small: dict[str, Any] = {"data_segment_bytes": 64 << 10, "index_segment_bytes": 32 << 10, "retain_bytes": 256 << 10}
    with (
        LocalCluster(1, groups=("default", "paid"), **small, **SLOW_ELECTIONS) as nodes,
        Client(nodes.peers) as orders,
        Client(nodes.peers, "paid") as paid,
    ):
        pipeline = Pipeline.make(tmp_path, nodes.peers, remote=server)
        pipeline.change("groups=", 'pinFor="1s", groups=')
        end = orders.append([b"paid and read"]).last_index + 1
        pipeline.run()
        orders.append(ORDERS[:5000])
        soon(lambda: max(node.first_index for node in orders.metadata().nodes) > end, every_s=0.2)
        shown = pipeline.fail()
        assert "[DLEDGER_DATA_LOSS.RETENTION]" in shown
        assert f"entries [{end}, " in shown
        pipeline.change("groups=", 'failOnDataLoss="false", groups=')
        pipeline.run()
        first, *left = read_all(paid)
        assert first == b"paid and read"
        assert left == [body for body in ORDERS[:5000] if b" paid " in body][-len(left) :]
        assert 0 < len(left) < 2500

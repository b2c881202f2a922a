"""Spark Declarative Pipelines: the example project runs as it is, and each row is written once, whatever fails."""

from __future__ import annotations

import os
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

from dledger_core import Client, LocalCluster
from dledger_core.environment import find_java
from tests.spark_connector.engine import read_all
from tests.spark_connector.spark_processes import kill_workers_of_tasks
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon
from tests.support.spark_jvm import short_lived_environment

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow, pytest.mark.soak]

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
ORDERS = [f"order {number:06} {'paid' if number % 2 else 'open'} {'x' * 300}".encode() for number in range(40_000)]
PAID = Counter(body for body in ORDERS if b" paid " in body)


@dataclass(frozen=True)
class Pipeline:
    """A copy of the example, with a storage directory and groups of its own."""

    project: Path
    peers: str

    @classmethod
    def make(cls, directory: Path, peers: str, groups: tuple[str, str] = ("default", "paid")) -> Pipeline:
        project = shutil.copytree(ROOT / "examples" / "pipeline", directory / "pipeline")
        spec, flows = project / "spark-pipeline.yml", project / "transformations" / "orders.py"
        spec.write_text(spec.read_text().replace("/tmp/orders-pipeline", str(directory / "storage")))
        text = flows.read_text().replace('groups="default"', f'groups="{groups[0]}"')
        flows.write_text(text.replace('"group": "paid"', f'"group": "{groups[1]}"'))
        return cls(project, peers)

    @property
    def output(self) -> str:
        return (self.project / "output").read_text(errors="replace")

    @contextmanager
    def running(self) -> Iterator[subprocess.Popen[bytes]]:
        """Run it in a group of processes, which are killed at the end of the block."""
        command = [HOME / "bin" / "spark-pipelines", "run", "--remote", "local[2]", "--conf", "spark.ui.enabled=false"]
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

    def run(self) -> None:
        with self.running() as process:
            assert process.wait(400) == 0, self.output[-4000:]


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

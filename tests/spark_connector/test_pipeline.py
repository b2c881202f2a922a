"""Spark Declarative Pipelines: the example project runs as it is, and each row is written once, whatever is killed."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pyspark
import pytest

from dledger_core import Client, LocalCluster
from dledger_core.environment import find_java
from tests.spark_connector.engine import read_all
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
HOME = Path(pyspark.__file__).parent
ORDERS = [f"order {number:06} {'paid' if number % 2 else 'open'} {'x' * 300}".encode() for number in range(40_000)]
PAID = Counter(body for body in ORDERS if b" paid " in body)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A copy of the example, with a storage directory of its own."""
    copy = shutil.copytree(ROOT / "examples" / "pipeline", tmp_path / "pipeline")
    spec = (copy / "spark-pipeline.yml").read_text()
    (copy / "spark-pipeline.yml").write_text(spec.replace("/tmp/orders-pipeline", str(tmp_path / "storage")))
    return copy


@contextmanager
def running(project: Path, peers: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run the pipeline in a group of processes, which are killed at the end of the block."""
    command = [HOME / "bin" / "spark-pipelines", "run", "--remote", "local[2]", "--conf", "spark.ui.enabled=false"]
    environment = os.environ | {"SPARK_HOME": str(HOME), "JAVA_HOME": str(find_java()), "DLEDGER_PEERS": peers}
    environment |= {"PYSPARK_PYTHON": sys.executable, "PYSPARK_DRIVER_PYTHON": sys.executable}
    with (project / "output").open("wb") as output:
        process = subprocess.Popen(
            command, cwd=project, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def run(project: Path, peers: str) -> None:
    with running(project, peers) as process:
        code = process.wait(400)
        assert code == 0, (project / "output").read_text(errors="replace")[-4000:]


@pytest.mark.soak
def test_pipeline_killed_in_a_micro_batch_writes_each_row_once(project: Path) -> None:
    with (
        LocalCluster(3, groups=("default", "paid"), **SLOW_ELECTIONS) as cluster,
        Client(cluster.peers) as orders,
        Client(cluster.peers, "paid") as paid,
    ):
        for start in range(0, len(ORDERS), 5000):
            orders.append(ORDERS[start : start + 5000])
        with running(project, cluster.peers):
            soon(lambda: read_all(paid, isolation="read_uncommitted"), 200)
        run(project, cluster.peers)
        assert Counter(read_all(paid)) == PAID
        orders.append([b"order 7 paid", b"order 8 open"])
        run(project, cluster.peers)
        assert Counter(read_all(paid)) == PAID + Counter([b"order 7 paid"])

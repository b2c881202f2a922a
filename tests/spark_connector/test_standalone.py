"""On a distributed Spark: driver, executors and nodes are processes of their own that share nothing but the network.

The package comes with ``--py-files``; the Python of driver and executors does not have it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark_connector.spark_processes import Standalone, make_package, make_python, standalone, submit

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]
JOB = Path(__file__).with_name("distributed_job.py")
SPECULATION = Path(__file__).with_name("speculation_job.py")
BODIES = [f"body-{number:05}".encode() for number in range(30_000)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def spark_cluster(scratch: Path) -> Iterator[Standalone]:
    with standalone(scratch / "spark") as running:
        yield running


@pytest.fixture(scope="module")
def package(scratch: Path) -> Path:
    return make_package(scratch)


def run_job(
    python: Path, master: str, package: Path, directory: Path, cluster: Any, log: Any, target: Any
) -> dict[str, Any]:
    """Submit the job and check its input and output; return its report."""
    log.append(BODIES)
    options = ["--master", master, "--py-files", package, "--conf", "spark.executor.cores=1"]
    # Spark 4.2.0 gives --py-files to tasks, but not to the process that plans a stream.
    options += ["--conf", f"spark.executorEnv.PYTHONPATH={package}"]
    done = submit(directory, python, options, JOB, cluster.peers, log.group, target.group, directory)
    assert done.returncode == 0, done.stderr[-6000:]
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["read"] == [len(BODIES), sum(map(len, BODIES)), len(BODIES)]
    written = Counter(b"streamed-" + body for body in BODIES) + Counter(b"written-%d" % n for n in range(1000))
    end = max(node.visible_end for node in target.metadata().nodes)
    assert Counter(target.read(0, end, consistency="linearizable")["body"].to_pylist()) == written
    assert str(package.name) in told["driver"]
    return told


@pytest.fixture
def target(cluster: Any, new_group: Any) -> Iterator[Any]:
    from dledger_core import Client

    with Client(cluster.peers, new_group()) as client:
        yield client


def test_standalone_cluster_reads_streams_and_writes(
    spark_cluster: Standalone, package: Path, cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    told = run_job(spark_cluster.python, spark_cluster.master, package, tmp_path / "driver", cluster, log, target)
    folders = {
        folder for folder in spark_cluster.workers for at, _, _ in told["tasks"] if Path(at).is_relative_to(folder)
    }
    assert folders == set(spark_cluster.workers)  # both took part
    for at, module, _ in told["tasks"]:
        assert Path(at, module).is_relative_to(at), "an executor has the connector from elsewhere"


def test_only_one_of_two_concurrent_attempts_is_committed(
    spark_cluster: Standalone, package: Path, cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    """Speculation: the first attempt has appended all its rows, and lives until the second one has won."""
    bodies = [b"%05d" % number + b"x" * 400 for number in range(4000)]
    log.append(bodies)
    settings = {
        "spark.executor.cores": "1",
        "spark.speculation": "true",
        "spark.speculation.interval": "100ms",
        "spark.speculation.multiplier": "1",
        "spark.speculation.quantile": "0.5",
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
    }
    settings["spark.executorEnv.PYTHONPATH"] = str(package)
    options: list[Any] = ["--master", spark_cluster.master, "--py-files", package]
    options += [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    shared = tmp_path / "shared"
    shared.mkdir()
    driver = tmp_path / "driver"
    done = submit(driver, spark_cluster.python, options, SPECULATION, cluster.peers, log.group, target.group, shared)
    assert done.returncode == 0, done.stderr[-6000:]
    assert json.loads(done.stdout.strip().splitlines()[-1]) == {"attempts": ["attempt-0", "attempt-1"]}
    status = max(target.metadata(space=True).nodes, key=lambda node: node.visible_end)
    assert Counter(target.read(0, status.visible_end)["body"].to_pylist()) == Counter(bodies)
    assert status.lost_entries > 1000, "the first attempt had not appended its rows"


def test_local_cluster_reads_streams_and_writes(
    scratch: Path, package: Path, cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    python = make_python(scratch / "local-cluster")
    told = run_job(python, "local-cluster[2,1,1024]", package, tmp_path / "driver", cluster, log, target)
    assert len({pid for _, _, pid in told["tasks"]}) >= 2

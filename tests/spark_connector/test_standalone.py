"""On a distributed Spark: driver, executors and nodes are processes of their own that share nothing but the network.

The package comes with ``--py-files``, or with the server of Spark Connect; the Python of the processes does not have
it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client
from tests.spark_connector.engine import read_all
from tests.spark_connector.spark_processes import (
    Standalone,
    connect_server,
    make_package,
    make_python,
    run_client,
    standalone,
    submit,
)

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]
JOB = Path(__file__).with_name("deployed_job.py")
SPECULATION = Path(__file__).with_name("speculation_job.py")
BODIES = [b"body-%05d" % number for number in range(30_000)]
NEVER_STOPPED = """
import sys
from pyspark.sql import SparkSession
from spark_connector import monitor
monitor(SparkSession.builder.remote(sys.argv[1]).getOrCreate(), log=False, json="lag.jsonl")
"""


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def package(scratch: Path) -> Path:
    return make_package(scratch)


@pytest.fixture(scope="module")
def python(scratch: Path) -> Path:
    return make_python(scratch / "environment")


@pytest.fixture(scope="module")
def spark_cluster(scratch: Path, python: Path) -> Iterator[Standalone]:
    with standalone(scratch / "spark", python) as running:
        yield running


def submit_job(
    spark_cluster: Standalone, python: Path, package: Path, job: tuple[object, ...], directory: Path, **settings: str
) -> dict[str, Any]:
    """Submit a program with its arguments; return its report."""
    # Spark 4.2.0 gives --py-files to tasks, but not to the process that plans a stream.
    settings = {"executor.cores": "1", "executorEnv.PYTHONPATH": str(package), **settings}
    options: list[object] = ["--master", spark_cluster.master, "--py-files", package]
    options += [part for name, value in settings.items() for part in ("--conf", f"spark.{name}={value}")]
    told: dict[str, Any] = json.loads(submit(directory, python, options, *job).strip().splitlines()[-1])
    return told


def check_report(told: dict[str, Any], last: int, target: Client) -> None:
    """The program has read BODIES and written them, and rows of its own, to ``target``."""
    assert told["read"] == [len(BODIES), sum(map(len, BODIES)), len(BODIES)]
    assert "[DLEDGER_OPTION] peers: " in told["wrong"]
    assert told["lag"] == [len(BODIES), last + 1 - 20_000, 0]
    written = Counter(b"streamed-" + body for body in BODIES) + Counter(b"written-%d" % n for n in range(1000))
    assert Counter(read_all(target)) == written


def test_standalone_cluster_reads_streams_and_writes(
    spark_cluster: Standalone, python: Path, package: Path, cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    last, driver = log.append(BODIES).last_index, tmp_path / "driver"
    job = (JOB, "", cluster.peers, log.group, target.group, driver)
    told = submit_job(spark_cluster, python, package, job, driver)
    check_report(told, last, target)
    assert package.name in told["driver"]
    folders = {folder for folder in spark_cluster.workers for at, _ in told["tasks"] if Path(at).is_relative_to(folder)}
    assert folders == set(spark_cluster.workers)  # both took part
    for at, module in told["tasks"]:
        assert Path(at, module).is_relative_to(at), "an executor has the connector from elsewhere"


@pytest.mark.soak
def test_only_one_of_two_concurrent_attempts_is_committed(
    spark_cluster: Standalone, python: Path, package: Path, cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    """Speculation: the first attempt has appended all its rows, and lives until the second one has won."""
    bodies = [b"%05d" % number + b"x" * 400 for number in range(4000)]
    log.append(bodies)
    speculation = {"": "true", ".interval": "100ms", ".multiplier": "1", ".quantile": "0.5"}
    settings = {f"speculation{name}": value for name, value in speculation.items()}
    settings["sql.execution.arrow.maxRecordsPerBatch"] = "100"
    shared = tmp_path / "shared"
    shared.mkdir()
    job = (SPECULATION, cluster.peers, log.group, target.group, shared)
    told = submit_job(spark_cluster, python, package, job, tmp_path / "driver", **settings)
    assert told == {"attempts": ["attempt-0", "attempt-1"]}
    assert Counter(read_all(target)) == Counter(bodies)
    lost = max(node.lost_entries for node in target.metadata(space=True).nodes)
    assert lost > 1000, "the first attempt had not appended its rows"


@pytest.mark.soak
def test_client_of_spark_connect_reads_streams_writes_and_sees_lag(
    python: Path, package: Path, cluster: Any, log: Any, target: Any, tmp_path: Path
) -> None:
    """The server is a process of its own, and the client has no JVM."""
    last, directory = log.append(BODIES).last_index, tmp_path / "client"
    with connect_server(tmp_path / "server", python, package) as url:
        arguments = (url, cluster.peers, log.group, target.group, directory)
        told = json.loads(run_client(directory, python, package, JOB, *arguments).splitlines()[-1])
        (tmp_path / "never_stopped.py").write_text(NEVER_STOPPED)
        # It ends although PySpark's thread, which waits for the listener's events, is no daemon.
        assert run_client(tmp_path / "second", python, package, tmp_path / "never_stopped.py", url) == ""
    assert told["kind"] == "pyspark.sql.connect.session"
    check_report(told, last, target)

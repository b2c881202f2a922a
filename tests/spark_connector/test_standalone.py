"""On a distributed Spark: driver, executors and nodes are processes of their own that share nothing but the network.

The package comes with ``--py-files``; the Python of driver and executors does not have it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from dledger_core.config import format_peers
from tests.spark_connector.spark_processes import make_package, make_python, standalone, submit

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]
JOB = Path(__file__).with_name("distributed_job.py")
BODIES = [f"body-{number:05}".encode() for number in range(30_000)]
LARGE_BODIES = [b"%05d" % number + b"x" * 400 for number in range(4000)]
BOTH_EXECUTORS = {
    "spark.executor.cores": "1",
    "spark.cores.max": "2",
    "spark.scheduler.minRegisteredResourcesRatio": "1.0",  # no task starts before both are there
    "spark.scheduler.maxRegisteredResourcesWaitingTime": "200s",
}
SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "100ms",
    "spark.speculation.multiplier": "1",
    "spark.speculation.quantile": "0.5",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("distributed")


@pytest.fixture(scope="module")
def package(scratch: Path) -> Path:
    return make_package(scratch)


@pytest.fixture
def new_log(cluster: Any, new_group: Any) -> Iterator[Callable[[], Any]]:
    """Makes clients of empty groups."""
    from dledger_core import Client

    with ExitStack() as stack:
        yield lambda: stack.enter_context(Client(cluster.peers, new_group()))


def confs(settings: dict[str, str]) -> list[str]:
    return [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]


def contents(log: Any) -> Counter[bytes]:
    end = max(node.visible_end for node in log.metadata().nodes)
    return Counter(log.read(0, end, consistency="linearizable")["body"].to_pylist())


def run_job(
    python: Path, options: list[Any], package: Path, directory: Path, source: Any, target: Any, *twice: Any
) -> dict[str, Any]:
    """Submits the job and checks what it read and wrote; returns what it told."""
    source.append(BODIES)
    options = ["--py-files", package, *confs(BOTH_EXECUTORS), *options]
    groups = [log.group for log in twice]
    peers = format_peers(source.peers)
    done = submit(directory, python, options, JOB, peers, source.group, target.group, directory, *groups)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    told: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    assert told["read"] == [len(BODIES), sum(map(len, BODIES)), len(BODIES)]
    assert contents(target) == Counter(b"streamed-" + body for body in BODIES) + Counter(
        b"written-%d" % number for number in range(1000)
    )
    assert str(package.name) in told["driver"]
    return told


def test_a_standalone_cluster_reads_streams_and_writes_and_of_two_attempts_of_a_task_one_counts(
    scratch: Path, package: Path, new_log: Callable[[], Any], tmp_path: Path
) -> None:
    """Speculation: the first attempt has appended all its rows, and lives until the second one has won."""
    source, target, large, once = (new_log() for _ in range(4))
    large.append(LARGE_BODIES)
    with standalone(scratch / "spark") as spark:
        options = ["--master", spark.master, *confs(SPECULATION)]
        told = run_job(spark.python, options, package, tmp_path / "driver", source, target, large, once)
    folders = {folder for folder in spark.workers for at, _, _ in told["tasks"] if Path(at).is_relative_to(folder)}
    assert folders == set(spark.workers)  # both took part
    for at, module, _ in told["tasks"]:
        assert Path(at, module).is_relative_to(at), "an executor has the connector from elsewhere"
    assert told["attempts"] == ["attempt-0", "attempt-1"]
    assert contents(once) == Counter(LARGE_BODIES)
    assert max(n.lost_entries for n in once.metadata(space=True).nodes) > 1000, "the first attempt had appended nothing"


def test_local_cluster_reads_streams_and_writes(
    scratch: Path, package: Path, new_log: Callable[[], Any], tmp_path: Path
) -> None:
    python = make_python(scratch / "local-cluster")
    options = ["--master", "local-cluster[2,1,1024]"]
    told = run_job(python, options, package, tmp_path / "driver", new_log(), new_log())
    assert len({pid for _, _, pid in told["tasks"]}) >= 2

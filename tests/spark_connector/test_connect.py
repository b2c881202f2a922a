"""Over Spark Connect: the server is a process of its own, and the client has no JVM."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.spark_connector.spark_processes import connect_server, make_package, make_python, run_client

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]
JOB = Path(__file__).with_name("connect_job.py")
NEVER_STOPPED = """
import sys
from pyspark.sql import SparkSession
from spark_connector import monitor
monitor(SparkSession.builder.remote(sys.argv[1]).getOrCreate(), log=False, json="lag.jsonl")
"""


@pytest.fixture
def target(cluster: Any, new_group: Any) -> Iterator[Any]:
    from dledger_core import Client

    with Client(cluster.peers, new_group()) as client:
        yield client


def test_client_reads_streams_writes_and_sees_lag(cluster: Any, log: Any, target: Any, tmp_path: Path) -> None:
    bodies = [f"body-{number:05}".encode() for number in range(1000)]
    last = log.append(bodies).last_index
    python, package = make_python(tmp_path / "environment"), make_package(tmp_path)
    with connect_server(tmp_path / "server", python, package) as url:
        arguments = (url, cluster.peers, log.group, target.group, tmp_path / "client")
        told = json.loads(run_client(tmp_path / "client", python, package, JOB, *arguments).splitlines()[-1])
        (tmp_path / "never_stopped.py").write_text(NEVER_STOPPED)
        # It ends although PySpark's thread, which waits for the listener's events, is no daemon.
        assert run_client(tmp_path / "second", python, package, tmp_path / "never_stopped.py", url) == ""
    assert told["kind"] == "pyspark.sql.connect.session"
    assert told["read"] == [1000, sum(map(len, bodies))]
    assert told["by_sql"] == [1000]
    assert [line["lag_records"] for line in told["lag"]] == [1000, last + 1 - 600, 0]
    assert sum(line["rows"] for line in told["lag"]) == 1000
    assert "[DLEDGER_OPTION] peers: " in told["wrong"]
    assert told["version"].startswith("[DLEDGER_SPARK_VERSION] the session runs on Spark 4.1.1")
    written = Counter(b"streamed-" + body for body in bodies) + Counter(b"written-%d" % n for n in range(1000))
    end = max(node.visible_end for node in target.metadata().nodes)
    assert Counter(target.read(0, end, consistency="linearizable")["body"].to_pylist()) == written

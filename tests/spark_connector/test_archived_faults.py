"""Archives with real Spark: job and readers go on when the workers of tasks are killed, and when the leader hangs."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from jobs.archive import command
from spark_connector import register
from tests.spark_connector.spark_processes import while_stages_run, workers_killed
from tests.support.archiving import DirectJob
from tests.support.run_job import run_in_process
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon
from tests.support.spark_jvm import jvm_pid

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow, pytest.mark.soak]

run = partial(run_in_process, command)
COUNT = 30_000


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    """Nodes that keep about a tenth of what the tests write."""
    with LocalCluster(
        3, groups=("killed", "hung"), data_segment_bytes=1 << 20, retain_bytes=4 << 20, **SLOW_ELECTIONS
    ) as nodes:
        yield nodes


def body(number: int) -> bytes:
    return b"%09d" % number + b"x" * 1000


def append(client: Client, first: int, count: int) -> None:
    for at in range(first, first + count, 1000):
        client.append([body(number) for number in range(at, at + 1000)])


def numbers_in(spark: Any, peers: str, group: str) -> list[int]:
    """Return the number at the begin of each body, of all that a batch reads from archive and log."""
    rows = spark.read.format("dledger").options(peers=peers, groups=group, archive="true", startingOffsets="earliest")
    bodies = rows.load().selectExpr("cast(cast(substr(body, 1, 9) as string) as long) as number")
    return sorted(bodies.toArrow().column("number").to_pylist())


def begin_archive(client: Client, table: Path) -> None:
    """Append and prove the first entries: from here on retention waits for proofs."""
    append(client, 0, 1000)
    assert DirectJob(client, table).start().prove(client.bounds().end).findings == []


def test_workers_killed_in_each_stage_change_no_row(
    spark: Any, cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(spark)
    with Client(cluster.peers, "killed") as client:
        begin_archive(client, tmp_path / "table")
        append(client, 1000, COUNT - 1000)
        end = client.bounds().end
        arguments = ["--peers", cluster.peers, "--group", "killed", "--table", str(tmp_path / "table")]
        # The stage that writes, and the one that computes digests.
        with workers_killed(spark, jvm_pid(spark), 2) as kill, while_stages_run(spark, kill):
            code, done, _ = run(capsys, *arguments, "--until", str(end), "--write")
        assert (code, done["archived_end"], done["findings"]) == (0, end, [])
        append(client, COUNT, 2000)
        soon(lambda: client.bounds().first_index > end // 2, every_s=0.2)
        with workers_killed(spark, jvm_pid(spark)) as kill, while_stages_run(spark, kill):
            assert numbers_in(spark, cluster.peers, "killed") == list(range(COUNT + 2000))


def test_job_and_readers_go_on_while_leader_hangs(
    spark: Any, cluster: LocalCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    register(spark)
    with Client(cluster.peers, "hung") as client:
        begin_archive(client, tmp_path / "table")
        append(client, 1000, COUNT - 1000)
        end, leader = client.bounds().end, cluster.leader("hung")
    arguments = ["--peers", cluster.peers, "--group", "hung", "--table", str(tmp_path / "table")]
    hung = threading.Event()

    def hang(stage: int) -> None:
        del stage
        if not hung.is_set():
            cluster.pause(leader)
            hung.set()

    try:
        with while_stages_run(spark, hang):
            code, done, _ = run(capsys, *arguments, "--until", str(end), "--write")
        assert hung.is_set()
        assert (code, done["archived_end"], done["findings"]) == (0, end, [])
        with Client(cluster.peers, "hung") as client:
            append(client, COUNT, 2000)
            soon(lambda: client.bounds().first_index > end // 2, every_s=0.2)
        assert numbers_in(spark, cluster.peers, "hung") == list(range(COUNT + 2000))
    finally:
        if hung.is_set():
            cluster.resume(leader)

"""Driver, executor, node and leader die by SIGKILL at each step of an archive: write, prove, trim, read.

One history: each test appends to the same log, and continues with the archive, and with the checkpoint of a stream that
copies archive and log to another table. That table has each entry once, in order, at the end of each test of a stream.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from deltalake import DeltaTable

from dledger_core import Client, LocalCluster, Producer
from jobs.archive import command
from spark_connector import register
from tests.spark_connector.archive_driver import Run, at_step, start_stream
from tests.spark_connector.spark_processes import workers_killed
from tests.support.archiving import DirectJob
from tests.support.run_job import run_in_process
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import awaited, soon
from tests.support.spark_jvm import jvm_pid

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

VICTIMS = ("driver", "executor", "node", "leader")
IN_TEST = [("prove", "leader")]
"""The other cells are in ``make soak``: each is a run of Spark."""
ROWS = 1000
"""Rows that are appended at a time: twice as many as the nodes keep."""

run_job = partial(run_in_process, command)


class History:
    """The log, its archive, the copy, and the number of entries so far."""

    def __init__(self, cluster: LocalCluster, client: Client, directory: Path) -> None:
        self.cluster, self.client, self.directory = cluster, client, directory
        self.count = self.runs = 0
        self._producer = Producer(client, "history")
        self._job = DirectJob(client, directory / "archive")

    def append(self) -> int:
        """Append the next rows; return the end of the log."""
        numbers = range(self.count, self.count + ROWS)
        self._producer.append([b"%09d" % number + b"x" * 1000 for number in numbers])
        self.count += ROWS
        return self.client.bounds().end

    def prove(self) -> int:
        """Prove all of the log, and return its end; each proof is an entry of it."""
        end = self.client.bounds().end
        assert self._job.start().prove(end).end == end
        return end

    def trim(self, beyond: int, kill: Callable[[], None] = lambda: None) -> None:
        """Append and prove, until the log begins at an index or above; ``kill`` once the nodes begin to delete."""
        stored = self.client.bounds().first_index
        self.append()
        self.prove()
        self._await_first_index(stored + 1)
        kill()
        self._await_first_index(beyond)

    def _await_first_index(self, least: int) -> None:
        found = awaited(lambda: self.client.bounds().first_index >= least, 120.0, every_s=0.05)
        assert found, (least, self.client.metadata())

    def run(self, step: str, until: int = 0) -> Run:
        folder = self.directory / f"run {self.runs}"
        folder.mkdir()
        self.runs += 1
        return Run(self.cluster.peers, str(self.directory), str(folder), step, until)

    @contextmanager
    def killing(self, victim: str) -> Iterator[Any]:
        """Yield a function that kills the leader, or another node, once; it is started again at the end."""
        leader, killed = self.cluster.leader(), list[str]()
        node = leader if victim == "leader" else next(each for each in self.cluster.node_ids if each != leader)

        def kill(*_: Any) -> None:
            if not killed:
                killed.append(node)
                self.cluster.kill(node)

        try:
            yield kill
            assert killed
        finally:
            for each in killed:
                self.cluster.restart(each)

    def check_copy(self) -> None:
        """The copy has each entry once, with indexes in the order of the numbers."""
        rows = DeltaTable(self.directory / "copy").to_pyarrow_table().sort_by("index")
        numbers = pc.binary_slice(rows["body"], 0, 9).cast(pa.string()).cast(pa.int64()).to_numpy()
        assert np.array_equal(numbers, np.arange(self.count))
        indexes = rows["index"].to_numpy()
        assert (indexes[1:] > indexes[:-1]).all()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    small: dict[str, Any] = {"data_segment_bytes": 1 << 17, "retain_bytes": 1 << 19}
    with LocalCluster(3, **small, **SLOW_ELECTIONS) as cluster, Client(cluster.peers, timeout_ms=60_000) as client:
        yield History(cluster, client, tmp_path_factory.mktemp("archived"))


@contextmanager
def driver(run: Run) -> Iterator[subprocess.Popen[bytes]]:
    """A driver as a process of its own."""
    checkout = Path(__file__).resolve().parents[2]
    path = os.pathsep.join(filter(None, [str(checkout), os.environ.get("PYTHONPATH", "")]))
    with Path(run.folder, "output").open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark_connector.archive_driver", str(run.save())],
            cwd=checkout,
            env=os.environ | {"PYTHONPATH": path, "SPARK_MASTER": "local[2]"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                process.kill()
            process.wait()


def output(run: Run) -> str:
    return Path(run.folder, "output").read_text(errors="replace")[-10_000:]


def tasks_of(run: Run) -> list[Path]:
    """A file for each attempt of a task that waits."""
    return list(Path(run.folder).glob("task *"))


def cells(*steps: str) -> Any:
    """Each victim at each of the steps."""
    marks = {cell: [] if cell in IN_TEST else [pytest.mark.soak] for cell in ((s, v) for s in steps for v in VICTIMS)}
    return pytest.mark.parametrize(("step", "victim"), [pytest.param(*cell, marks=marks[cell]) for cell in marks])


@cells("write", "prove")
def test_victim_dies_while_the_job_runs(
    spark: Any, history: History, capsys: pytest.CaptureFixture[str], step: str, victim: str
) -> None:
    start, end = history.prove(), history.append()
    run = history.run(step, end)
    if victim == "driver":
        with driver(run) as process:
            assert process.wait(300) == -signal.SIGKILL, output(run)
        state = history.client.metadata().archive
        assert state is not None
        assert state.end == start
        code, done, _ = run_job(capsys, *run.arguments)
    elif victim == "executor":
        with workers_killed(spark, jvm_pid(spark)) as kill, at_step(step, kill):
            code, done, _ = run_job(capsys, *run.arguments)
    else:
        with history.killing(victim) as kill, at_step(step, kill):
            code, done, _ = run_job(capsys, *run.arguments)
    assert (code, done["archived_end"], done["findings"]) == (0, end, [])
    # After a driver that died between its write and its proof there is nothing to write.
    assert done["written_indexes"] == (0 if (step, victim) == ("prove", "driver") else end - start)


@cells("trim", "read")
def test_victim_dies_while_a_stream_reads(spark: Any, history: History, step: str, victim: str) -> None:
    history.append()
    end = history.prove()
    if step == "read":
        history.trim(end - 1)  # all that was appended is in the archive alone
    run = history.run(step)
    if victim == "driver":
        with driver(run) as process:
            soon(lambda: process.poll() is not None or tasks_of(run), 300)
            assert process.poll() is None, output(run)
            if step == "trim":  # the entries of the micro-batch, which Spark has recorded
                history.trim(end - 1)
            for pid in json.loads(Path(run.folder, "pids").read_text()):
                os.kill(pid, signal.SIGKILL)
    else:
        register(spark)
        pid = jvm_pid(spark)
        query = start_stream(spark, run)
        soon(lambda: not query.isActive or tasks_of(run), 300)
        assert query.isActive, query.exception()
        killing = workers_killed(spark, pid) if victim == "executor" else history.killing(victim)
        with killing as kill:
            if victim == "executor":
                if step == "trim":  # its next attempt finds in the archive what the first one was planned to read
                    history.trim(end - 1)
                tasks = len(tasks_of(run))
                kill()
                soon(lambda: len(tasks_of(run)) > tasks, 300)
            elif step == "trim":
                history.trim(end - 1, kill)
            else:
                kill()
            Path(run.folder, "go").touch()
            query.awaitTermination()
    Path(run.folder, "go").touch()
    start_stream(spark, run).awaitTermination()
    history.check_copy()


@pytest.mark.soak
def test_archive_and_log_are_one_log_after_all(
    spark: Any, history: History, capsys: pytest.CaptureFixture[str]
) -> None:
    end = history.append()
    run = history.run("trim", end)
    code, done, _ = run_job(capsys, *run.arguments)
    assert (code, done["archived_end"]) == (0, end)
    code, done, _ = run_job(capsys, *run.arguments[:4], "--verify")
    recorded = history.client.archived_ranges().ranges
    assert (code, done["ranges"], done["findings"]) == (0, len(recorded), [])
    assert [one.start for one in recorded] == [0, *(one.end for one in recorded[:-1])]
    assert history.client.bounds().first_index > 0
    Path(run.folder, "go").touch()
    start_stream(spark, run).awaitTermination()
    history.check_copy()

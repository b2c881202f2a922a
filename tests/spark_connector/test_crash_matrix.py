"""The driver dies, by SIGKILL, before and after each step of a micro-batch; every entry arrives once, in order.

One history: each test continues with the checkpoints of the previous one, and starts one driver with three queries
(source to Delta, log to log, Delta to log) that dies when each of them stands at its step. Meanwhile leaders die, and
retention deletes read entries. A restart has another ``maxRecordsPerBatch`` than the run that died.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from dledger_core import Client, LocalCluster
from tests.spark_connector.dying_source import FOLDER, newest
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon

pytestmark = [pytest.mark.spark, pytest.mark.integration, pytest.mark.slow]

CHECKOUT = Path(__file__).resolve().parents[2]
SOURCES = {"s1": "t1", "s2": "t2"}
ROWS = 100
"""Rows that each group, and each file of the Delta table, gets before a run: half a micro-batch, or a whole one."""

PIPELINES = ("log to delta", "log to log", "delta to log")
Steps = dict[str, str]
MATRIX: dict[str, Steps] = {
    "first micro-batch": {
        "log to delta": "before the offset log",
        "log to log": "offset log written",
        "delta to log": "offset log written",
    },
    "offset log written": {
        "log to delta": "offset log written",
        "log to log": "before the offset log",
        "delta to log": "offset log written",
    },
    "tasks running": dict.fromkeys(PIPELINES, "tasks running"),
    "tasks done": dict.fromkeys(PIPELINES, "tasks done"),
    "sink committed in one of two groups": {
        "log to delta": "commit log refused",
        "log to log": "sink committed in part",
        "delta to log": "sink committed",
    },
    "sink committed": {
        "log to delta": "before the offset log",
        "log to log": "sink committed",
        "delta to log": "ended",
    },
}
"""Each query stands at each of its steps; what comes before an offset log comes after a commit log. A query that has
ended has read everything there is, so that is the last one's."""


class History:
    """The cluster, the tables, the checkpoints, and the rows written so far."""

    def __init__(self, cluster: LocalCluster, directory: Path) -> None:
        self.cluster = cluster
        self.directory = directory
        self.written: dict[str, list[tuple[int, bytes]]] = defaultdict(list)
        self.numbers = 0
        self.shown: dict[str, list[bytes]] = defaultdict(list)
        self.runs = 0
        self._at: dict[str, int] = defaultdict(int)
        for _ in range(3):
            self.write()

    def write(self) -> None:
        """Give each query something to read: entries in two groups, a file in the Delta table."""
        for group in SOURCES:
            start = len(self.written[group])
            bodies = [f"{group}-{number:06}-".encode() + b"x" * 600 for number in range(start, start + ROWS)]
            with Client(self.cluster.peers, group) as client:
                first = client.append(bodies).first_index
            self.written[group] += [(first + at, body) for at, body in enumerate(bodies)]
        numbers = pa.table({"number": pa.array(range(self.numbers, self.numbers + ROWS), pa.int64())})
        write_deltalake(str(self.directory / "numbers"), numbers, mode="append")
        self.numbers += ROWS

    def checkpoint(self, pipeline: str) -> str:
        return str(self.directory / f"{pipeline} checkpoint")

    def log_state(self, pipeline: str) -> tuple[int, int]:
        """Newest micro-batch in the offset log and in the commit log."""
        checkpoint = self.checkpoint(pipeline)
        return newest(checkpoint, "offsets"), newest(checkpoint, "commits")

    def start(self, steps: Mapping[str, str | None], act: str = "kill", batch: int | None = None) -> Driver:
        """Start a driver; ``batch`` is the micro-batch in which it dies, by default its second one."""
        for pipeline in steps:  # the folder that stood in the way of a commit log's entry
            for entry in Path(self.checkpoint(pipeline), "commits").glob("[0-9]*"):
                if entry.is_dir():
                    shutil.rmtree(entry)
        folder = self.directory / f"run {self.runs}"
        folder.mkdir()
        settings = {"spark.sql.execution.arrow.maxRecordsPerBatch": (7, 1000, 60)[self.runs % 3]}
        run = {"peers": self.cluster.peers, "directory": str(self.directory), "pipelines": dict(steps), "act": act}
        (folder / "run.json").write_text(json.dumps(run | {"batch": batch, "settings": settings}))
        self.runs += 1
        return Driver(folder)

    def expected(self, pipeline: str, group: str, *, committed: bool) -> list[bytes]:
        """The bodies of a group that the sink has: up to the newest offset, or up to the previous one."""
        offsets, commits = self.log_state(pipeline)
        batch_id = offsets if committed else commits
        if batch_id < 0:
            return []
        entry = Path(self.checkpoint(pipeline), "offsets", str(batch_id)).read_text().splitlines()[-1]
        end = json.loads(entry)["groups"][group]["next"]
        return [body for index, body in self.written[group] if index < end]

    def show(self, group: str) -> list[bytes]:
        """Read on from where the last call ended; what was visible once does not change."""
        with Client(self.cluster.peers, group) as client:
            end = max(node.visible_end for node in client.metadata().nodes)
            while self._at[group] < end:
                found = client.fetch(self._at[group], end, consistency="linearizable")
                self.shown[group] += found.batch.column("body").to_pylist()
                self._at[group] = found.next_index
        return self.shown[group]

    def table(self) -> dict[str, list[bytes]]:
        """The bodies of the Delta table by group, in the order of their indexes."""
        if not (self.directory / "table" / "_delta_log").exists():
            return {group: [] for group in SOURCES}
        rows = DeltaTable(str(self.directory / "table")).to_pyarrow_table().sort_by("index").to_pylist()
        return {group: [row["body"] for row in rows if row["group"] == group] for group in SOURCES}

    def kill_leader(self, group: str) -> None:
        leader = self.cluster.leader(group)
        self.cluster.kill(leader)
        for name in self.cluster.groups:
            self.cluster.leader(name)
        self.cluster.restart(leader)


class Driver:
    """A running driver process."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._output = (folder / "output").open("w+b")
        path = os.pathsep.join(filter(None, [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]))
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.spark_connector.crash_driver"],
            cwd=CHECKOUT,
            env=os.environ | {FOLDER: str(folder), "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=subprocess.STDOUT,
        )

    def wait(self) -> tuple[int, str]:
        """Return exit code and output."""
        try:
            code = self._process.wait(400)
        except subprocess.TimeoutExpired:
            self.kill()
            code = 99
        self._output.close()
        return code, (self.folder / "output").read_text(errors="replace")[-40_000:]

    def kill(self) -> None:
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Iterator[History]:
    groups = (*SOURCES, *SOURCES.values(), "d")
    small: dict[str, Any] = {"data_segment_bytes": 64 << 10, "index_segment_bytes": 32 << 10, "retain_bytes": 512 << 10}
    with LocalCluster(3, groups=groups, **small, **SLOW_ELECTIONS) as cluster:
        yield History(cluster, tmp_path_factory.mktemp("matrix"))


IN_SOAK = ("offset log written", "tasks running", "sink committed", "sink committed in one of two groups")
"""Other steps have queries at the first and the last one; "tasks done" repeats what the second one leaves.

In ``test_replay_of_version_finishes_remaining_groups`` the sink alone dies between two groups.
"""


@pytest.mark.parametrize(
    "step", [pytest.param(step, marks=[pytest.mark.soak] if step in IN_SOAK else []) for step in MATRIX]
)
def test_driver_that_dies(history: History, step: str) -> None:
    steps = MATRIX[step]
    history.write()
    first = step.startswith("first")
    before = {group: list(history.show(group)) for group in (*SOURCES.values(), "d")}
    code, output = history.start(steps, batch=0 if first else None).wait()
    assert code == -signal.SIGKILL, output
    _check_logs(history, steps, first)
    if step in ("tasks running", "sink committed"):
        history.kill_leader("t1")
    _check_table(history, steps)
    _check_targets(history, steps, before)


def _check_logs(history: History, steps: Steps, first: bool) -> None:
    """It was killed at its point: Spark's own logs show the progress of the micro-batch."""
    for pipeline, point in steps.items():
        offsets, commits = history.log_state(pipeline)
        ahead = point not in ("before the offset log", "ended")  # during a micro-batch
        assert offsets == commits + ahead, (pipeline, point)
        assert not first or commits == -1, (pipeline, point)


def _check_table(history: History, steps: Steps) -> None:
    committed = steps["log to delta"] == "commit log refused"
    found = history.table()
    for group in SOURCES:
        assert found[group] == history.expected("log to delta", group, committed=committed), group


def _check_targets(history: History, steps: Steps, before: dict[str, list[bytes]]) -> None:
    point = steps["log to log"]
    for source, target in SOURCES.items():
        committed = point == "sink committed" or (point == "sink committed in part" and target == "t1")
        assert history.show(target) == history.expected("log to log", source, committed=committed), target
    shown = history.show("d")
    assert shown == [str(number).encode() for number in range(len(shown))]
    assert len(shown) % ROWS == 0, "a part of a micro-batch is visible"
    if steps["delta to log"] != "ended":
        assert len(shown) - len(before["d"]) <= 2 * ROWS


@pytest.mark.soak
def test_older_of_two_drivers_is_fenced_and_each_row_arrives_once(history: History) -> None:
    """The older one stalls between its tasks and its commit; the newer one replays its micro-batch, and more."""
    history.write()
    history.write()  # each has two micro-batches to go
    steps = {"log to log": "tasks done", "delta to log": "tasks done"}
    older = history.start(steps, act="hold")
    try:
        soon(lambda: all((older.folder / f"{pipeline}.arrived").exists() for pipeline in steps), 200)
        code, output = history.start(dict.fromkeys(PIPELINES), act="none").wait()
        assert code == 0, output
        (older.folder / "go").touch()
        code, output = older.wait()
    finally:
        (older.folder / "go").touch()
        older.kill()
    assert code == 1, output
    assert output.count("[FENCED]") >= len(steps), output
    history.kill_leader("d")
    everything = {group: [body for _, body in history.written[group]] for group in SOURCES}
    assert history.table() == everything
    assert {source: history.show(target) for source, target in SOURCES.items()} == everything
    assert history.show("d") == [str(number).encode() for number in range(history.numbers)]
    if history.runs == len(MATRIX) + 2:  # the whole history, in which retention deleted entries that were read
        for group in SOURCES:
            with Client(history.cluster.peers, group) as client:
                assert max(node.first_index for node in client.metadata().nodes) > 0, group

"""The stages of the demo: append with a failover, ingest beside it, compare, rebuild, audit.

Each stage works with real processes: the cluster's nodes, and the jobs as their users run them.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from dledger_core.client import Client, Producer
from dledger_core.cluster import LocalCluster
from dledger_core.errors import ConfigError, DLedgerError, error_from_wire
from dledger_core.rocketmq import encode_messages

__all__ = [
    "AppendReport",
    "Job",
    "append_with_failover",
    "body_hash",
    "check_session",
    "delta_bodies_hash",
    "delta_row_count",
    "jobs_folder",
]

BATCH_ROWS: Final = 500
STOP_TIMEOUT_S: Final = 30.0
RESTART_AFTER_S: Final = 3.0
_JOB_ENVIRONMENT: Final = {
    "PYSPARK_PYTHON": sys.executable,
    "PYSPARK_DRIVER_PYTHON": sys.executable,
    # These JVMs live for a minute: on two cores the optimising compiler would take more time than it saves.
    "JDK_JAVA_OPTIONS": os.environ.get("JDK_JAVA_OPTIONS", "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m"),
}

_CHECK_SESSION: Final = """
import json
from dledger_core.errors import DLedgerError
from jobs._session import check_versions
try:
    check_versions()
except DLedgerError as error:
    print(json.dumps(error.to_wire()))
"""
"""Run apart: the core never imports the jobs, and they import PySpark."""


def jobs_folder() -> Path:
    """Returns the folder of the spark-submit jobs, which live beside the package in a checkout.

    Raises:
        ConfigError: the package was installed without them.
    """
    folder = Path(__file__).resolve().parents[2] / "jobs"
    if not (folder / "ingest.py").exists():
        raise ConfigError("the jobs are not here", str(folder), "run the demo from a checkout: make demo")
    return folder


def check_session() -> None:
    """Checks what the jobs need of Spark and Java, before anything is started.

    Raises:
        ConfigError: something is missing or of a version that was not tried.
    """
    command = [sys.executable, "-c", _CHECK_SESSION]
    done = subprocess.run(command, cwd=jobs_folder().parent, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["unknown"])[-1]
        raise ConfigError(f"the jobs cannot be loaded: {reason}", "dledger demo", "pip install 'dledger[all]'")
    if done.stdout.strip():
        raise error_from_wire(json.loads(done.stdout))


class Job:
    """One job as a process: its stderr goes to a file, its last stdout line is its JSON summary.

    Args:
        name: file name in ``jobs/`` without ``.py``.
        arguments: its command line.
        directory: where its log goes and where Spark may leave files.
    """

    def __init__(self, name: str, arguments: list[str], directory: Path) -> None:
        self.name = name
        self.log_path = directory / f"{name}.log"
        with self.log_path.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(jobs_folder() / f"{name}.py"), *arguments],
                stdout=subprocess.PIPE,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=directory,
                env={**os.environ, **_JOB_ENVIRONMENT},
                start_new_session=True,
            )

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self._process.poll() is None

    def result(self, timeout_s: float) -> dict[str, Any]:
        """Waits for its end and returns its summary, with ``exit_code``.

        Raises:
            DLedgerError: it did not end in time, or printed no summary.
        """
        try:
            out, _ = self._process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise DLedgerError(
                f"{self.name} did not end in {timeout_s:.0f} s", str(self.log_path), "see its log"
            ) from None
        lines = out.decode().strip().splitlines()
        try:
            summary: dict[str, Any] = json.loads(lines[-1])
        except (IndexError, ValueError):
            raise DLedgerError(
                f"{self.name} failed with exit code {self._process.returncode}", str(self.log_path), "see its log"
            ) from None
        if summary.get("status") == "error":
            raise DLedgerError(f"{self.name} failed: {summary.get('message')}", str(self.log_path), "see its log")
        return summary | {"exit_code": self._process.returncode}

    def stop(self) -> dict[str, Any]:
        """Asks it to finish (SIGTERM) and returns its summary."""
        self._process.terminate()
        return self.result(STOP_TIMEOUT_S * 2)

    def kill(self) -> None:
        """Ends it and whatever it started; harmless if it has ended."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 15 if self.running else 9)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._process.pid, 9)
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


@dataclass(slots=True)
class AppendReport:
    """What the producer saw.

    Attributes:
        events: rows appended and acknowledged.
        duration_s: from the first append to the last ack.
        latencies_ms: per append, in order.
        killed: the leader that was killed, and the one that followed.
        without_leader_s: last ack before the kill to the first ack after it.
        body_bytes: bytes of the appended messages.
    """

    events: int = 0
    duration_s: float = 0.0
    latencies_ms: list[float] = field(default_factory=list)
    killed: tuple[str, str] = ("", "")
    without_leader_s: float = 0.0
    body_bytes: int = 0

    def percentile(self, percent: float) -> float:
        """Returns a percentile of the commit latency, ms."""
        return float(np.percentile(self.latencies_ms, percent)) if self.latencies_ms else 0.0


def append_with_failover(
    cluster: LocalCluster,
    messages: pa.Table,
    *,
    pace_s: float,
    may_kill: Callable[[], bool],
    on_progress: Callable[[int], None],
) -> AppendReport:
    """Appends all messages in order and kills the leader with SIGKILL in the middle; it comes back a bit later.

    Args:
        cluster: the running cluster.
        messages: columns of ``flight_messages``.
        pace_s: seconds over which to spread the appends, so that there is a middle.
        may_kill: asked in the middle, until it says yes.
        on_progress: gets the number of acknowledged events.
    """
    report = AppendReport()
    restarts: list[threading.Thread] = []
    with Client(cluster.peers, timeout_ms=30_000) as client:
        producer = Producer(client, "demo-producer")
        began = time.monotonic()
        for bodies in _batches(messages):
            _wait_until(began + pace_s * report.events / len(messages))
            if not restarts and report.events >= len(messages) // 2:
                while not may_kill():
                    time.sleep(0.1)
                began = max(began, time.monotonic() - pace_s * report.events / len(messages))
                restarts.append(_kill_leader(cluster, report))
                last_ack = time.monotonic()
            else:
                last_ack = 0.0
            sent = time.monotonic()
            producer.append(bodies)
            acked = time.monotonic()
            if last_ack:
                report.without_leader_s = acked - last_ack
            report.latencies_ms.append((acked - sent) * 1000)
            report.events += len(bodies)
            report.body_bytes += bodies.nbytes
            on_progress(report.events)
        report.duration_s = time.monotonic() - began
    for thread in restarts:
        thread.join()
    report.killed = (report.killed[0], cluster.leader())
    return report


def _batches(messages: pa.Table) -> Iterator[pa.Array]:
    for batch in messages.combine_chunks().to_batches(BATCH_ROWS):
        columns = {name: batch[name] for name in batch.schema.names}
        yield encode_messages(**columns)


def _kill_leader(cluster: LocalCluster, report: AppendReport) -> threading.Thread:
    leader = cluster.leader()
    report.killed = (leader, "")
    cluster.kill(leader)

    def restart() -> None:
        time.sleep(RESTART_AFTER_S)
        cluster.restart(leader)

    thread = threading.Thread(target=restart, name="restart")
    thread.start()
    return thread


def _wait_until(moment: float) -> None:
    time.sleep(max(0.0, moment - time.monotonic()))


def body_hash(bodies: pa.Array | pa.ChunkedArray) -> str:
    """Returns the SHA-256 over all bodies in order, each followed by a line feed."""
    chunks = bodies.chunks if isinstance(bodies, pa.ChunkedArray) else [bodies]
    digest = hashlib.sha256()
    line_feed, nothing = pa.scalar(b"\n", pa.large_binary()), pa.scalar(b"", pa.large_binary())
    for chunk in chunks:
        lines = pc.binary_join_element_wise(chunk.cast(pa.large_binary()), line_feed, nothing)
        _, offsets, data = lines.buffers()
        ends = np.frombuffer(offsets, np.int64, len(lines) + 1, lines.offset * 8)
        if data is not None:
            digest.update(memoryview(data)[int(ends[0]) : int(ends[-1])])
    return digest.hexdigest()


def delta_row_count(table: Path) -> int:
    """Returns the rows of a Delta table from its log's statistics; 0 if it does not exist yet."""
    from deltalake import DeltaTable
    from deltalake.exceptions import TableNotFoundError

    try:
        actions = pa.table(DeltaTable(table).get_add_actions(flatten=True))
    except TableNotFoundError:
        return 0
    return int(pc.sum(actions["num_records"]).as_py() or 0)


def delta_bodies_hash(table: Path) -> tuple[int, int, str]:
    """Reads the ingested table: returns rows, distinct indexes, and ``body_hash`` of the bodies in index order."""
    from deltalake import DeltaTable

    rows = DeltaTable(table).to_pyarrow_table(columns=["index", "body"]).sort_by("index")
    return len(rows), int(pc.count_distinct(rows["index"]).as_py()), body_hash(rows["body"])

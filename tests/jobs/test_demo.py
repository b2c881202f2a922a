"""The demo on fewer events: real nodes, a real failover, real Spark and Delta, everything compared."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from jobs._demo.flights import FLIGHTS_COUNT, ORIGINS, flight_messages
from tests.support.soon import soon

ROOT = Path(__file__).parents[2]
COMMAND = [sys.executable, str(ROOT / "jobs" / "demo.py")]


@pytest.mark.slow
def test_flights_are_complete_and_in_departure_order() -> None:
    messages = flight_messages()
    assert messages.num_rows == FLIGHTS_COUNT
    departures = messages["born_timestamp"].to_pylist()
    assert departures == sorted(departures)
    for row in messages.slice(100_000, 50).to_pylist():
        flight = json.loads(row["body"])
        assert ORIGINS[row["queue_id"]] == flight["origin"]
        assert (row["tags"], row["keys"], row["topic"]) == (flight["carrier"], flight["tailnum"], "departures")


@pytest.mark.spark
@pytest.mark.integration
@pytest.mark.slow
def test_demo_with_tls_moves_each_event_exactly_once_through_failover(tmp_path: Path) -> None:
    keep = tmp_path / "kept"
    done = subprocess.run(
        [*COMMAND, "--tls", "--events", "30000", "--seconds", "5", "--keep", str(keep)],
        capture_output=True,
        text=True,
        check=False,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    facts = json.loads(done.stdout.splitlines()[-1])
    assert facts["rows_in_delta"] == facts["events"] == 30_000
    assert facts["appends_per_s_batched"] > facts["appends_per_s_one_by_one"] > 0
    notes = done.stderr.splitlines()
    assert len(notes) < 40, "no messages of Spark and Ivy"
    for name in ("look", "dump"):
        [command] = [line.partition(": ")[2] for line in notes if f"dledger {name} " in line]
        shown = subprocess.run(shlex.split(command), capture_output=True, text=True, check=True, timeout=60, cwd=ROOT)
        assert shown.stdout
    assert len(facts["checks"]) == 5
    assert all(facts["checks"].values())
    assert facts["audit_verdict"] == "CONSISTENT"
    assert facts["consume_queues"] == len(ORIGINS)
    assert facts["seconds_without_leader"] > 0
    assert (keep / "departures" / "_delta_log").is_dir()
    token = (keep / "cluster" / "tls" / "token").read_bytes().strip()
    written = [path for path in keep.rglob("*") if path.is_file() and path.parent.name != "tls"]
    assert [path for path in written if token in path.read_bytes()] == []


@pytest.mark.integration
@pytest.mark.slow
@pytest.mark.soak
def test_demo_leaves_no_process_and_no_file_when_interrupted(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [*COMMAND, "--seconds", "60"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "TMPDIR": str(tmp_path)},
    )
    soon(lambda: len(psutil.Process(process.pid).children(recursive=True)) >= 4, 400, every_s=0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    assert process.wait(200) == 2
    assert len(children) >= 4
    _, alive = psutil.wait_procs(children, 20)
    assert alive == []
    assert [path for path in tmp_path.iterdir() if path.name.startswith("dledger")] == []

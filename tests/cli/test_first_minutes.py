"""The first minutes of a newcomer: a measurement, nodes that are not there, the last entries, a new leader."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from pathlib import Path

import psutil
import pytest

from dledger_core import Client, LocalCluster
from dledger_core.cluster import free_ports
from tests.cli.command import DLEDGER, error_of, result_of, rows_of, run_process
from tests.support.soon import soon

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> object:
    with LocalCluster(3, tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


def test_perf_appends_to_own_nodes_unless_both_options_are_typed(
    cluster: LocalCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Client(cluster.peers) as client:
        mine = client.append([b"mine"]).first_index
        monkeypatch.setenv("DLEDGER_PEERS", cluster.peers)
        monkeypatch.setenv("DLEDGER_GROUP", "default")
        assert result_of("perf", "append", "--seconds", "0.2")["entries"] > 0
        assert "--group" in error_of("perf", "append", "--peers", cluster.peers, "--seconds", "0.2")
        bounds = client.bounds()
        assert client.read(mine, bounds.end).column("body").to_pylist() == [b"mine"]
        result_of("perf", "append", "--peers", cluster.peers, "--group", "default", "--seconds", "0.2")
        assert client.bounds().end > bounds.end


def test_append_names_the_addresses_of_nodes_that_do_not_answer() -> None:
    (port,) = free_ports(1)
    done = run_process("append", "x", "--peers", f"n0-127.0.0.1:{port}", "--timeout", "3", code=2)
    waiting, error = done.stderr.strip().splitlines()
    assert f"127.0.0.1:{port}" in waiting
    assert error.startswith("error: ")


@pytest.mark.parametrize("count", [1, 10, 200])
def test_tail_shows_as_many_of_the_last_entries_as_asked_for(cluster: LocalCluster, count: int) -> None:
    with Client(cluster.peers) as client:
        client.append([b"x"] * 200)
        leader = cluster.leader()
        # Each new leader writes a control entry, which takes an index.
        client.transfer_leadership(next(node for node in ("n0", "n1", "n2") if node != leader))
        last = client.append([b"last"]).last_index
    rows = rows_of("tail", "--peers", cluster.peers, "--from", f"-{count}", "--no-follow")
    assert (len(rows), rows[-1]["index"]) == (count, last)
    assert result_of("get", "last", "--peers", cluster.peers)["index"] == last
    assert result_of("get", f"-{count}", "--peers", cluster.peers)["index"] == rows[0]["index"]
    assert result_of("get", "first", "--peers", cluster.peers)["index"] <= rows[0]["index"]


def test_dev_shows_new_leader_and_node_that_was_killed(tmp_path: Path) -> None:
    command = [*DLEDGER, "dev", "--format", "json", "--dir", str(tmp_path / "dev")]
    with (tmp_path / "errors").open("w+") as errors:
        dev = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ))
    with dev:
        assert dev.stdout is not None
        started = json.loads(dev.stdout.readline())
        leader = started["leader of default"]
        soon(lambda: "Ctrl-C" in (tmp_path / "errors").read_text())
        with Client(started["peers"]) as client:
            client.append([b"x"])
        (pid,) = (
            child.pid
            for child in psutil.Process(dev.pid).children()
            if f"--self-id {leader} " in " ".join(child.cmdline())
        )
        os.kill(pid, signal.SIGKILL)
        text = soon(lambda: (found := (tmp_path / "errors").read_text()) and "leads in term" in found and found)
        assert re.search(r"group default: n\d leads in term", text)
        assert re.search(rf"node {leader} ended .*SIGKILL", text)
        (restart,) = (line for line in text.splitlines() if line.startswith("  dledger serve"))
        with subprocess.Popen([*DLEDGER, *shlex.split(restart)[1:]], stderr=subprocess.DEVNULL) as node:
            with Client(started["peers"]) as client:
                soon(lambda: all(each.reachable for each in client.metadata().nodes))
            node.terminate()
        dev.send_signal(signal.SIGINT)
        assert dev.wait(150) == 0
    assert "Traceback" not in (tmp_path / "errors").read_text()

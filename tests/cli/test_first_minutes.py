"""The first minutes of a newcomer: a measurement, nodes that are not there, the last entries, a new leader."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.cluster import free_ports, local_ports
from tests.cli.command import DLEDGER, error_of, result_of, rows_of, run, run_process
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
        error_of("perf", "append", "--peers", cluster.peers, "--seconds", "0.2")
        bounds = client.bounds()
        assert client.read(mine, bounds.end).column("body").to_pylist() == [b"mine"]
        result_of("perf", "append", "--peers", cluster.peers, "--group", "default", "--seconds", "0.2")
        assert client.bounds().end > bounds.end


def addresses(cluster: LocalCluster) -> list[str]:
    return [each.partition("-")[2] for each in cluster.peers.split(";")]


ALL = ["n0", "n1", "n2"]
CALLS: dict[str, tuple[Callable[[Client], Any], Any]] = {
    "append": (lambda client: client.append([b"x"]).term > 0, True),
    "bounds": (lambda client: client.bounds().first_index, 0),
    "groups": (lambda client: list(client.groups()), ["default"]),
    "member": (lambda client: [each.node_id for each in client.members().members], ALL),
    "metadata": (lambda client: [each.node_id for each in client.metadata().nodes], ALL),
    "node": (lambda client: client.bounds() and client.fetch(0, 1, node="n2").next_index, 1),
    "pin": (lambda client: list(client.pin("reader", 0, 1)), ALL),
    "read": (lambda client: client.fetch(0, 1).next_index, 1),
    "watch": (lambda client: sorted(each.node_id for each in islice(client.role_changes(), 3)), ALL),
}


@pytest.mark.parametrize("call", CALLS)
def test_client_learns_all_nodes_from_one_address(cluster: LocalCluster, call: str) -> None:
    ask, expected = CALLS[call]
    one, closed = addresses(cluster)[1], f"127.0.0.1:{free_ports(1)[0]}"
    for peers in (one, f"{closed},{one.replace('127.0.0.1', 'localhost')}", f"{one};{cluster.peers.split(';')[0]}"):
        with Client(peers) as client:
            assert ask(client) == expected
            soon(lambda client=client: [peer.node_id for peer in client.peers] == ALL)  # type: ignore[misc]


def test_commands_take_one_address(cluster: LocalCluster) -> None:
    one = addresses(cluster)[2]
    index = result_of("append", "one address", "--peers", one)["first_index"]
    assert result_of("get", index, "--peers", one)["body"] == "one address"
    assert [each["node_id"] for each in result_of("status", "--peers", one)["nodes"]] == ALL
    assert [each["node_id"] for each in result_of("look", one)["nodes"]] == ALL
    error_of("recover", "--dry-run", "--peers", one)  # which needs each node with its id


def test_command_without_peers_asks_the_local_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nodes of another program may run there: the test only reads, and takes any result.
    result = run("status", "--timeout", "0.5", code=None)
    assert result.exit_code in (0, 1, 2)
    assert "127.0.0.1:40911" in result.stderr.splitlines()[0]
    monkeypatch.setenv("DLEDGER_PEERS", "127.0.0.1:1")
    assert "40911" not in run("status", code=2).stderr
    monkeypatch.delenv("DLEDGER_PEERS")
    for words in ("recover", "member add n3 --address 127.0.0.1:3", "member remove n3", "init"):
        error_of(*words.split())


def test_host_name_that_was_read_as_id_and_host_is_named() -> None:
    line = error_of("status", "--peers", "db-1.invalid:1", "--timeout", "5", code=2)
    assert (line.code, " 1.invalid " in line) == ("UNREACHABLE", True)


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
    ports = local_ports(3)
    with (tmp_path / "errors").open("w+") as errors:
        dev = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=dict(os.environ))
    with dev:
        assert dev.stdout is not None
        line = dev.stdout.readline()
        assert line, (tmp_path / "errors").read_text()
        started = json.loads(line)
        assert ports is None or started["peers"].count(":4091") in (0, 3)  # 0: another program was faster
        leader = started["leader of default"]
        soon(lambda: "Ctrl-C" in (tmp_path / "errors").read_text())
        with Client(started["peers"]) as client:
            client.append([b"x"])
        os.kill(started["pids"][leader], signal.SIGKILL)
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


@pytest.mark.parametrize(("number", "options"), [(signal.SIGINT, ()), (signal.SIGTERM, ("--memory",))])
def test_dev_serves_until_signal(number: signal.Signals, options: tuple[str, ...]) -> None:
    command = [*DLEDGER, "dev", "--nodes", "1", "--format", "json", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as dev:
        assert dev.stdout is not None
        peers = json.loads(dev.stdout.readline())["peers"]
        assert result_of("append", "--peers", peers, "hello")["entries"] == 1
        dev.send_signal(number)
        errors = dev.communicate(timeout=150)[1]
        assert (dev.returncode, "Traceback" in errors) == (0, False), errors
    error_of("append", "--peers", peers, "--timeout", "1", "hello", code=2)

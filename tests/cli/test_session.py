"""The commands against a real cluster: what a person does by hand."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dledger_core import Client
from dledger_core.cli import main
from dledger_core.cluster import LocalCluster
from dledger_core.control import TransactionId

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    with LocalCluster(
        3, tmp_path_factory.mktemp("cluster"), ("default", "empty"), data_segment_bytes=4 << 20
    ) as cluster:
        yield cluster


def call(*arguments: str, stdin: bytes | None = None, code: int = 0) -> str:
    result = CliRunner().invoke(main, list(arguments), input=stdin)
    assert result.exit_code == code, result.output
    return result.stdout


def facts(*arguments: str, stdin: bytes | None = None) -> Any:
    return json.loads(call(*arguments, "--format", "json", stdin=stdin))


def lines(*arguments: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in call(*arguments, "--format", "json").splitlines()]


def test_append_get_and_tail(cluster: LocalCluster, tmp_path: Path) -> None:
    peers = ("--peers", cluster.peers)
    first = facts("append", *peers, "hello", "wörld")
    assert first["entries"] == 2
    assert first["last_index"] == first["first_index"] + 1
    piped = facts("append", *peers, stdin=b"one\n\ntwo\r\nunfinished")
    assert piped["entries"] == 4
    assert piped["first_index"] == first["last_index"] + 1
    file = tmp_path / "many"
    file.write_bytes(b"line\n" * 100_000)
    many = facts("append", *peers, "--file", str(file), "--producer-id", "me")
    assert many["entries"] == 100_000
    whole = facts("append", *peers, "--file", str(file), "--whole")
    assert call("get", *peers, str(whole["last_index"]), "--body") == file.read_text()

    begin = str(first["first_index"])
    shown = lines("tail", *peers, "--from", begin, "--count", "6")
    assert [row["body"] for row in shown] == ["hello", "wörld", "one", "", "two\r", "unfinished"]
    assert len(lines("tail", *peers, "--from", str(many["first_index"]), "--no-follow")) == 100_001
    assert [row["index"] for row in lines("tail", *peers, "--from", "-1", "--no-follow")] == [whole["last_index"]]
    assert lines("tail", *peers, "--from", "end", "--no-follow") == []
    when = shown[0]["timestamp"]
    assert lines("tail", *peers, "--from", when, "--count", "1")[0]["index"] <= first["first_index"]
    assert "hello" in call("get", *peers, begin)


def test_a_failure_in_the_middle_says_what_was_appended_before(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"x\n" * 700_000 + b"y" * (5 << 20))
    result = CliRunner().invoke(main, ["append", "--peers", cluster.peers, "--file", str(file)])
    assert result.exit_code == 3
    before, error = result.stderr.splitlines()
    assert before.startswith("700000 entries were appended before, the last one with index ")
    assert error.startswith("error: [BAD_REQUEST] ")


def test_nothing_to_append(cluster: LocalCluster) -> None:
    assert facts("append", "--peers", cluster.peers, stdin=b"")["entries"] == 0
    assert lines("tail", "--peers", cluster.peers, "--group", "empty", "--no-follow") == []


def test_an_index_beyond_the_end_is_one_line(cluster: LocalCluster) -> None:
    result = CliRunner().invoke(main, ["get", "--peers", cluster.peers, "123456789"])
    assert result.exit_code == 3
    assert "INDEX_OUT_OF_RANGE" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_an_unknown_group_is_one_line(cluster: LocalCluster) -> None:
    result = CliRunner().invoke(main, ["append", "--peers", cluster.peers, "--group", "other", "x"])
    assert (result.exit_code, "UNKNOWN_GROUP" in result.stderr) == (3, True), result.output


def test_status_and_transfer(cluster: LocalCluster) -> None:
    peers = ("--peers", cluster.peers)
    before = facts("status", *peers)
    assert [node["node_id"] for node in before["nodes"]] == list(cluster.node_ids)
    assert all(node["reachable"] for node in before["nodes"])
    target = next(node for node in cluster.node_ids if node != before["leader_id"])
    facts("transfer", *peers, target)
    assert cluster.leader() == target
    assert target in call("status", *peers)
    assert "lost" not in call("status", *peers)
    transaction = TransactionId("query", 1, "run")
    with Client(cluster.peers) as client:
        client.append_attempt([b"row"] * 3, transaction=transaction, attempt="5f0c1d3e-8a52-4c55-9d61-9a8f5c2f0e10")
        client.abort_transaction(transaction)
    assert "lost entries" in call("status", *peers)


def test_status_finds_a_missing_node(cluster: LocalCluster) -> None:
    follower = next(node for node in cluster.node_ids if node != cluster.leader())
    cluster.stop(follower)
    try:
        assert "reachable" in call("status", "--peers", cluster.peers, code=1)
    finally:
        cluster.restart(follower)
    cluster.leader()


def test_dump_and_verify_while_the_node_runs(cluster: LocalCluster) -> None:
    appended = facts("append", "--peers", cluster.peers, "to be dumped")
    store = str(cluster.store_path(cluster.leader()))
    shown = lines("dump", store, "--from", str(appended["last_index"]))
    assert [(row["index"], row["body"], row["magic"]) for row in shown] == [(appended["last_index"], "to be dumped", 1)]
    assert lines("dump", store, "--from", "0", "--to", "1")[0]["magic"] == 2
    assert "control" in call("dump", store, "--to", "1")
    (report,) = facts("verify", store)
    assert report["findings"] == []
    assert report["last_index"] >= appended["last_index"]


def test_verify_finds_a_flipped_bit(cluster: LocalCluster, tmp_path: Path) -> None:
    facts("append", "--peers", cluster.peers, "x" * 1000)
    store = tmp_path / "dledger-copy"
    shutil.copytree(cluster.store_path(cluster.leader()), store)
    segment = min((store / "data").iterdir())
    content = bytearray(segment.read_bytes())
    content[content.index(b"hello")] ^= 1
    segment.write_bytes(content)
    (report,) = json.loads(call("verify", str(store), "--format", "json", code=1))
    assert "CORRUPT" in {finding["kind"] for finding in report["findings"]}
    assert "CORRUPT" in call("verify", str(store), code=1)


def test_perf_measures(cluster: LocalCluster) -> None:
    found = facts("perf", "append", "--peers", cluster.peers, "--group", "empty", "--seconds", "0.5")
    assert found["entries"] > 0
    assert found["p50_ms"] <= found["p99_ms"] <= found["max_ms"]


def test_doctor_knows_the_cluster(cluster: LocalCluster) -> None:
    result = CliRunner().invoke(main, ["doctor", "--peers", cluster.peers, "--self-id", "n0", "--format", "json"])
    rows = {row["what"]: row["result"] for row in json.loads(result.stdout)}
    assert (rows["port of n0"], rows["peer n1"], rows["peer n2"]) == ("wrong", "ok", "ok")
    assert result.exit_code == 1


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_dev_serves_until_it_is_told_to_stop(number: signal.Signals) -> None:
    command = [sys.executable, "-m", "dledger_core.cli", "dev", "--nodes", "1", "--format", "json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as dev:
        assert dev.stdout is not None
        peers = json.loads(dev.stdout.readline())["peers"]
        assert facts("append", "--peers", peers, "hello")["entries"] == 1
        dev.send_signal(number)
        assert dev.wait(150) == 0
    result = CliRunner().invoke(main, ["append", "--peers", peers, "--timeout", "1", "hello"])
    assert result.exit_code == 3

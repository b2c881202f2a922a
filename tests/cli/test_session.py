"""The commands with a real cluster: the README's first session, and notifications of role changes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dledger_core import Client
from dledger_core.cluster import LocalCluster
from dledger_core.control import TransactionId
from tests.cli.command import DLEDGER, ErrorLine, error_of, result_of, rows_of, run
from tests.support.damage import flip
from tests.support.soon import soon

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    directory = tmp_path_factory.mktemp("cluster")
    line = '"$DLEDGER_GROUP $DLEDGER_NODE $DLEDGER_ROLE $DLEDGER_BROKER_ROLE $DLEDGER_TERM $DLEDGER_LEADER"'
    command = shlex.join(["sh", "-c", f"echo {line} >>{shlex.quote(str(directory / 'notified'))}"])
    # The order of the groups differs from that in which their leaders are spread.
    options = {"data_segment_bytes": 4 << 20, "on_role_change": command, "log_format": "json"}
    with LocalCluster(3, directory, ("empty", "default"), **options) as nodes:
        yield nodes


@contextmanager
def watching(cluster: LocalCluster, group: str, output: Path, form: str, *more: str) -> Iterator[None]:
    """Run ``dledger status --watch``; its lines are in ``output``."""
    command = [*DLEDGER, "status", "--watch", "--peers", cluster.peers, "--group", group, "--format", form, *more]
    errors = output.with_suffix(".errors")
    with output.open("wb") as file, errors.open("wb") as other:
        process = subprocess.Popen([*command], stdout=file, stderr=other)
    with process:
        try:
            yield
        finally:
            process.terminate()
            assert process.wait(120) == 130
    assert "Traceback" not in errors.read_text()


def test_leaders_of_groups_are_spread_over_nodes(cluster: LocalCluster) -> None:
    for group, home in (("default", "n0"), ("empty", "n1")):
        found = result_of("status", "--peers", cluster.peers, "--group", group)
        assert (found["preferred_leaders"], found["leader_id"]) == ([home], home)


def test_all_groups_are_shown_in_one_line_each(cluster: LocalCluster) -> None:
    found = json.loads(run("status", "--all-groups", "--peers", cluster.peers, "--format", "json").stdout)
    assert [(each["group"], each["leader_id"], each["survives_failures"]) for each in found] == [
        ("default", "n0", 1),
        ("empty", "n1", 1),
    ]
    lines = run("status", "--all-groups", "--peers", cluster.peers).stdout.splitlines()
    for each in found:
        assert any({each["group"], each["leader_id"]} <= set(line.split()) for line in lines)


def test_watch_of_all_groups_names_the_group_of_each_change(cluster: LocalCluster, tmp_path: Path) -> None:
    with watching(cluster, "default", tmp_path / "all", "json", "--all-groups"):

        def seen() -> set[tuple[str, str]]:
            lines = [json.loads(line) for line in (tmp_path / "all").read_text().splitlines()]
            return {(line["group"], line["node_id"]) for line in lines}

        soon(lambda: seen() == {(group, node) for group in ("default", "empty") for node in ("n0", "n1", "n2")})


def test_level_of_json_log_changes_at_run_time(cluster: LocalCluster) -> None:
    def levels() -> list[str]:
        lines = [json.loads(line) for line in cluster.log_path("n0").read_text().splitlines() if line.startswith("{")]
        assert all(line["node"] and line["event"] and line["time"] for line in lines)
        return [line["level_now"] for line in lines if line["event"] == "log level changed"]

    os.kill(cluster.pid("n0"), signal.SIGUSR1)
    soon(lambda: levels() == ["debug"])
    os.kill(cluster.pid("n0"), signal.SIGUSR1)
    soon(lambda: levels() == ["debug", "info"])


def test_role_change_reaches_watch_and_command_after_kill_9(cluster: LocalCluster, tmp_path: Path) -> None:
    def newest() -> dict[str, dict[str, Any]]:
        lines = [json.loads(line) for line in (tmp_path / "watch").read_text().splitlines()]
        return {line["node_id"]: line for line in lines}

    def commands() -> list[list[str]]:
        return [line.split() for line in (cluster.directory / "notified").read_text().splitlines()]

    with watching(cluster, "empty", tmp_path / "watch", "json"):
        soon(lambda: newest().get("n1", {}).get("broker_role") == "master")
        soon(lambda: set(newest()) == {"n0", "n1", "n2"})
        term, count = newest()["n1"]["term"], len(commands())
        cluster.kill("n1")
        soon(lambda: newest()["n1"]["role"] == "unreachable")
        new = soon(lambda: next((n for n in ("n0", "n2") if newest()[n]["role"] == "leader"), None))
        seen = newest()[new]
        assert (seen["broker_role"], seen["leader_id"], seen["group"]) == ("master", new, "empty")
        assert seen["term"] > term
        other = "n2" if new == "n0" else "n0"
        soon(lambda: newest()[other]["leader_id"] == new)
        soon(lambda: ["empty", new, "leader", "master", str(seen["term"]), new] in commands()[count:])
        soon(lambda: ["empty", other, "follower", "slave", str(seen["term"]), new] in commands()[count:])
        assert {row[0] for row in commands()[count:]} == {"empty"}, "the other group's leader lives"
        cluster.restart("n1")
        soon(lambda: newest()["n1"]["role"] not in ("unreachable", "leader"))


def test_watch_as_text_shows_broker_roles(cluster: LocalCluster, tmp_path: Path) -> None:
    with watching(cluster, "default", tmp_path / "watch", "table"):
        soon(lambda: "n0  leader (master)" in (tmp_path / "watch").read_text())


def test_entries_from_arguments_stdin_and_file_are_read_back(cluster: LocalCluster, tmp_path: Path) -> None:
    peers = ("--peers", cluster.peers)
    first = result_of("append", *peers, "hello", "wörld")
    assert first["entries"] == 2
    assert first["last_index"] == first["first_index"] + 1
    piped = result_of("append", *peers, stdin=b"one\n\ntwo\r\nunfinished")
    assert piped["entries"] == 4
    assert piped["first_index"] == first["last_index"] + 1
    file = tmp_path / "many"
    file.write_bytes(b"line\n" * 100_000)
    many = result_of("append", *peers, "--file", str(file), "--producer-id", "me")
    assert many["entries"] == 100_000
    whole = result_of("append", *peers, "--file", str(file), "--whole")
    assert run("get", *peers, whole["last_index"], "--body").stdout == file.read_text()

    begin = str(first["first_index"])
    shown = rows_of("tail", *peers, "--from", begin, "--count", "6")
    assert [row["body"] for row in shown] == ["hello", "wörld", "one", "", "two\r", "unfinished"]
    assert len(rows_of("tail", *peers, "--from", str(many["first_index"]), "--no-follow")) == 100_001
    assert [row["index"] for row in rows_of("tail", *peers, "--from", "-1", "--no-follow")] == [whole["last_index"]]
    assert rows_of("tail", *peers, "--from", "end", "--no-follow") == []
    when = shown[0]["timestamp"]
    assert rows_of("tail", *peers, "--from", when, "--count", "1")[0]["index"] <= first["first_index"]
    assert "hello" in run("get", *peers, begin).stdout


def test_producer_is_listed_until_it_is_expired(cluster: LocalCluster) -> None:
    peers = ("--peers", cluster.peers, "--group", "default")
    result_of("append", *peers, "hello", "--producer-id", "listed")
    assert {"producer_id": "listed", "next_sequence": 1, "once": False}.items() <= rows_of_producer(peers).items()
    assert [found["rows"] >= 1 for found in result_of("status", *peers)["tables"]][:2] == [True, False]
    for expired, unknown in ((["listed"], ["nosuch"]), ([], ["listed", "nosuch"])):
        found = run("producer", "expire", *peers, "listed", "nosuch", "listed", "--format", "json")
        assert json.loads(found.stdout) == {"expired": expired, "unknown": unknown}
        assert all(repr(name) in found.stderr for name in unknown)
        assert rows_of_producer(peers) == {}


def test_open_transaction_is_listed_until_it_is_aborted(cluster: LocalCluster) -> None:
    peers = ("--peers", cluster.peers, "--group", "empty")
    with Client(cluster.peers, "empty") as client:
        for query_id, batch_id in (("failed", 0), ("failed", 1), ("alive", 0)):
            key = TransactionId(query_id, batch_id, "run")
            client.append_attempt([b"a", b"b"], transaction=key, attempt="attempt")

    def listed() -> list[dict[str, Any]]:
        return json.loads(run("transaction", "list", *peers, "--format", "json").stdout)

    alive, *failed = listed()
    assert [(row["query_id"], row["batch_id"]) for row in failed] == [("failed", 0), ("failed", 1)]
    assert alive["inactive_ms"] >= 0
    assert {"query_id": "alive", "run_id": "run", "parts": 1, "rows": 2}.items() <= alive.items()
    assert "failed" in run("transaction", "list", *peers).stdout
    for more, aborted in ((("--batch-id", "1"), [1]), ((), [0]), ((), [])):
        assert result_of("transaction", "abort", *peers, "failed", *more) == {"query_id": "failed", "aborted": aborted}
    assert [row["query_id"] for row in listed()] == ["alive"]
    for more in (("nosuch",), ("alive", "--batch-id", "7")):
        assert more[0] in run("transaction", "abort", *peers, *more).stderr, "nothing was aborted"
    assert not run("transaction", "abort", *peers, "alive").stderr


def rows_of_producer(peers: tuple[str, ...]) -> dict[str, Any]:
    found = json.loads(run("producer", "list", *peers, "--format", "json").stdout)
    return next((row for row in found if row["producer_id"] == "listed"), {})


def test_append_reports_last_index_before_failure(cluster: LocalCluster, tmp_path: Path) -> None:
    file = tmp_path / "lines"
    file.write_bytes(b"x\n" * 700_000 + b"y" * (5 << 20))
    # A slow machine shows progress before.
    *_, before, error = run("append", "--peers", cluster.peers, "--file", file, code=3).stderr.splitlines()
    assert before.startswith("700000 ")
    assert ErrorLine(error).code == "BAD_REQUEST"


def test_append_of_empty_stdin_appends_nothing(cluster: LocalCluster) -> None:
    assert result_of("append", "--peers", cluster.peers, stdin=b"")["entries"] == 0
    assert rows_of("tail", "--peers", cluster.peers, "--group", "empty", "--no-follow") == []


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ("get 123456789", "INDEX_OUT_OF_RANGE"),
        ("append --group other x", "UNKNOWN_GROUP"),
        ("status --watch --group nowhere", "UNKNOWN_GROUP"),
    ],
)
def test_rejected_request_is_one_line(cluster: LocalCluster, command: str, error: str) -> None:
    assert error_of(*command.split(), "--peers", cluster.peers).code == error


def test_status_shows_leader_transfer_and_orphaned_entries(cluster: LocalCluster) -> None:
    peers = ("--peers", cluster.peers)
    before = result_of("status", *peers)
    assert [node["node_id"] for node in before["nodes"]] == list(cluster.node_ids)
    assert all(node["reachable"] for node in before["nodes"])
    assert all(0 < node["disk_free_bytes"] < node["disk_size_bytes"] for node in before["nodes"])
    target = next(node for node in cluster.node_ids if node != before["leader_id"])
    result_of("transfer", *peers, target)
    assert cluster.leader() == target
    assert target in run("status", *peers).stdout
    leader = next(node for node in before["nodes"] if node["node_id"] == target)
    assert leader["lost_entries"] in (0, None)
    transaction = TransactionId("query", 0, "run")
    with Client(cluster.peers) as client:
        client.append_attempt([b"row"] * 3, transaction=transaction, attempt="5f0c1d3e-8a52-4c55-9d61-9a8f5c2f0e10")
        client.abort_transaction(transaction)
    # The leader counts them once its own disk has them, perhaps after the commit.
    soon(lambda: "lost entries" in run("status", *peers).stdout)


def test_status_names_transaction_that_committed_entries_wait_for(cluster: LocalCluster) -> None:
    peers = ("--peers", cluster.peers)
    transaction = TransactionId("orders-query", 0, "run-1")
    with Client(cluster.peers) as client:
        first = client.append_attempt([b"row"] * 3, transaction=transaction, attempt="a").first_index
        client.append([b"entry"] * 5)
    found = result_of("status", *peers)
    assert found["waiting"] == 9, "the attempt's control entry, its rows, and the others"
    named = {"query_id": "orders-query", "batch_id": 0, "run_id": "run-1"}
    assert found["open_transaction"] == named | {"first_index": first - 1}
    assert "orders-query" in run("status", *peers).stderr
    with Client(cluster.peers) as client:
        client.abort_transaction(transaction)
    found = result_of("status", *peers)
    assert (found["waiting"], found["open_transaction"]) == (0, None)


def test_status_exits_1_if_node_is_missing(cluster: LocalCluster) -> None:
    follower = next(node for node in cluster.node_ids if node != cluster.leader())
    cluster.stop(follower)
    try:
        assert follower in run("status", "--peers", cluster.peers, code=1).stderr
    finally:
        cluster.restart(follower)
    cluster.leader()


def test_dump_and_verify_read_store_of_running_node(cluster: LocalCluster) -> None:
    appended = result_of("append", "--peers", cluster.peers, "to be dumped")
    store = str(cluster.store_path(cluster.leader()))
    shown = rows_of("dump", store, "--from", str(appended["last_index"]))
    assert [(row["index"], row["body"], row["magic"]) for row in shown] == [(appended["last_index"], "to be dumped", 1)]
    assert rows_of("dump", store, "--from", "0", "--to", "1")[0]["magic"] == 2
    (report,) = result_of("verify", store)
    assert report["findings"] == []
    assert report["last_index"] >= appended["last_index"]


def test_verify_finds_flipped_bit(cluster: LocalCluster, tmp_path: Path) -> None:
    result_of("append", "--peers", cluster.peers, "x" * 1000)
    store = tmp_path / "dledger-copy"
    shutil.copytree(cluster.store_path(cluster.leader()), store)
    segment = min((store / "data").iterdir())
    flip(segment, segment.read_bytes().index(b"hello"))
    (report,) = result_of("verify", store, code=1)
    assert {"CORRUPT"} <= {finding["kind"] for finding in report["findings"]}
    assert run("verify", store, code=1).stdout.split().count("CORRUPT") == 1

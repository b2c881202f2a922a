"""How far a checkpoint is behind a real group, and what is said where it does not fit."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dledger_core import Client, TransactionId
from dledger_core.cli import main
from dledger_core.cli.lag import _finding
from dledger_core.cli.spark_checkpoint import Position
from dledger_core.cluster import LocalCluster
from tests.cli.spark_directory import QUERY_ID, tree, write_checkpoint

NOBODY = "n0-127.0.0.1:1"
GROUPS = ("a", "b", "c", "d", "e")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["lag", *map(str, arguments)])


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, groups=GROUPS, data_segment_bytes=1 << 20) as running:
        yield running


def checkpoint(directory: Path, **positions: tuple[int, str | None, int]) -> Path:
    groups = {g: {"check": 7, "log": log, "next": at, "term": term} for g, (at, log, term) in positions.items()}
    return write_checkpoint(directory, json.dumps({"groups": groups, "v": 1}), committed=1)


def rows(cluster: LocalCluster, directory: Path, *arguments: object, code: int = 0) -> dict[str, dict[str, Any]]:
    result = run("--peers", cluster.peers, directory, "--format", "json", *arguments)
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert (found["query_id"], found["batch_id"]) == (QUERY_ID, 0)
    return {row["group"]: row for row in found["groups"]}


@pytest.mark.integration
def test_lag_in_records_bytes_and_seconds(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster.peers, "a") as client:
        first = client.append([b"x" * 100] * 10).first_index
        uuid, term = client.metadata().log_uuid, client.metadata().term
        path = checkpoint(tmp_path / "c", a=(first + 4, uuid, term))
        before = tree(path)
        row = rows(cluster, path)["a"]
        oldest = client.get(first + 4)
        record = client.get(first + 5).position - oldest.position
    assert (row["records"], row["bytes"], row["finding"]) == (6, 6 * record, None)
    assert (row["next_index"], row["end_index"]) == (first + 4, first + 10)
    assert 0 <= row["seconds"] < 600
    table = run("--peers", cluster.peers, path)
    assert table.exit_code == 0
    assert f"query {QUERY_ID}, micro-batch 0" in table.stdout
    assert tree(path) == before


@pytest.mark.integration
def test_a_limit_that_is_passed_is_a_finding(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster.peers, "b") as client:
        first = client.append([b"x"] * 10).first_index
        uuid, term = client.metadata().log_uuid, client.metadata().term
    path = checkpoint(tmp_path / "c", b=(first + 1, uuid, term))
    rows(cluster, path, "--max-records", 9, "--max-seconds", 3600)
    rows(cluster, path, "--max-records", 8, code=1)
    rows(cluster, path, "--max-seconds", 0, code=1)
    assert "group b is further behind" in run("--peers", cluster.peers, path, "--max-records", 0).stderr


@pytest.mark.integration
def test_control_entries_and_aborted_attempts_at_the_end_are_no_lag(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster.peers, "c") as client:
        read_to = client.append([b"x"] * 3).last_index + 1
        uuid, term = client.metadata().log_uuid, client.metadata().term
        lost = TransactionId("query", 1, "run")
        for attempt in range(3):
            client.append_attempt([b"lost"] * 50, transaction=lost, attempt=f"attempt-{attempt}")
        # A query with isolation=read_uncommitted is further than others may see.
        ahead = checkpoint(tmp_path / "ahead", c=(read_to + 100, uuid, term))
        row = rows(cluster, ahead)["c"]
        assert (row["end_index"] < read_to + 100, row["records"], row["finding"]) == (True, 0, None)
        client.abort_transaction(lost)
        leader = cluster.leader("c")
        client.transfer_leadership(next(node for node in cluster.node_ids if node != leader))
        path = checkpoint(tmp_path / "c", c=(read_to, uuid, term))
        row = rows(cluster, path, "--max-records", 0)["c"]
        assert row["end_index"] > read_to + 150
        assert (row["records"], row["bytes"], row["seconds"], row["finding"]) == (0, 0, 0.0, None)
        index = client.append([b"new"]).last_index
        row = rows(cluster, path)["c"]
        assert (row["records"], row["end_index"]) == (1, index + 1)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("place", "other_log", "other_term", "finding"),
    [
        (1, True, 0, "LOG_RECREATED"),
        (100_000, False, 0, "OFFSET_BEYOND_END"),
        (2, False, 5, "TERM_MISMATCH"),
    ],
)
def test_a_checkpoint_that_does_not_fit_is_a_finding(
    cluster: LocalCluster, tmp_path: Path, place: int, other_log: bool, other_term: int, finding: str
) -> None:
    with Client(cluster.peers, "d") as client:
        client.append([b"x"] * 3)
        metadata = client.metadata()
    log = "another" if other_log else metadata.log_uuid
    path = checkpoint(tmp_path / "c", d=(place, log, metadata.term + other_term))
    assert rows(cluster, path, code=1)["d"]["finding"] == finding
    assert f"[DLEDGER_DATA_LOSS.{finding}]" in run("--peers", cluster.peers, path).stderr


@pytest.mark.integration
def test_a_group_that_is_not_there_leaves_the_answer_incomplete(cluster: LocalCluster, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", e=(0, None, -1), gone=(5, None, 1))
    assert set(rows(cluster, path, code=2)) == {"e"}
    alone = checkpoint(tmp_path / "alone", gone=(5, None, 1))
    result = run("--peers", cluster.peers, alone)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "UNKNOWN_GROUP" in result.stderr


def test_a_position_before_the_first_entry_is_a_finding() -> None:
    with Client(NOBODY) as nobody_asked:
        assert _finding(nobody_asked, Position(9, "log-1", 1), "log-1", 10, 20) == "RETENTION"
        assert _finding(nobody_asked, Position(10, "log-1", 1), "log-1", 10, 20) is None


def test_nobody_answers_is_exit_3(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", a=(0, None, -1))
    result = run("--peers", NOBODY, "--timeout", "0.3", path)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "[UNREACHABLE]" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent"], "does not exist"),
        ([], "Missing argument 'DIR'"),
        (["c", "--max-records", "-1"], "--max-records"),
        (["c", "--max-seconds", "soon"], "--max-seconds"),
        (["c", "--peers", "nonsense"], "malformed peer"),
    ],
)
def test_wrong_usage_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    checkpoint(tmp_path / "c", a=(0, None, -1))
    monkeypatch.chdir(tmp_path)
    result = run("--peers", NOBODY, *arguments)
    assert (result.exit_code, result.stdout) == (3, ""), result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert said in result.stderr

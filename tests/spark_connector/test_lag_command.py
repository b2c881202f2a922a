"""``dledger lag`` against real groups, and checkpoints that do not match their log."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dledger_core import Client, LocalCluster, TransactionId, check_of
from dledger_core.cli import main
from spark_connector.errors import DataLossError
from spark_connector.offsets import GroupOffset, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.reading.tracking import Tracker
from tests.spark_connector.spark_directory import QUERY_ID, tree, write_checkpoint

UNREACHABLE = "n0-127.0.0.1:1"
GROUPS = ("a", "b", "c", "d", "e")


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["lag", *map(str, arguments)])


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(3, groups=GROUPS, data_segment_bytes=1 << 20) as running:
        yield running


def checkpoint(directory: Path, **positions: GroupOffset) -> Path:
    return write_checkpoint(directory, json.dumps(StreamOffset(positions).to_json()), committed=1)


def after(client: Client, next_index: int) -> GroupOffset:
    """The offset of a query that has read everything before ``next_index``."""
    last = client.get(next_index - 1)
    check = check_of(last.index, last.term, last.position, last.body)
    return GroupOffset(next_index, client.metadata().log_uuid, last.term, check)


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
        path = checkpoint(tmp_path / "c", a=after(client, first + 4))
        before = tree(path)
        row = rows(cluster, path)["a"]
        oldest = client.get(first + 4)
        record = client.get(first + 5).position - oldest.position
    assert (row["lag_records"], row["lag_bytes"], row["loss"]) == (6, 6 * record, None)
    assert (row["next_index"], row["end_index"]) == (first + 4, first + 10)
    assert 0 <= row["lag_seconds"] < 600
    table = run("--peers", cluster.peers, path)
    assert table.exit_code == 0
    assert f"query {QUERY_ID}, micro-batch 0" in table.stdout
    assert tree(path) == before


@pytest.mark.integration
def test_limit_that_is_passed_is_finding(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster.peers, "b") as client:
        first = client.append([b"x"] * 10).first_index
        path = checkpoint(tmp_path / "c", b=after(client, first + 1))
    rows(cluster, path, "--max-records", 9, "--max-seconds", 3600)
    rows(cluster, path, "--max-records", 8, code=1)
    rows(cluster, path, "--max-seconds", 0, code=1)
    assert "group b " in run("--peers", cluster.peers, path, "--max-records", 0).stderr


@pytest.mark.integration
def test_control_entries_and_aborted_attempts_are_not_lag(cluster: LocalCluster, tmp_path: Path) -> None:
    with Client(cluster.peers, "c") as client:
        read_to = client.append([b"x"] * 3).last_index + 1
        reached = after(client, read_to)
        lost = TransactionId("query", 1, "run")
        for attempt in range(3):
            open_to = client.append_attempt([b"lost"] * 50, transaction=lost, attempt=f"attempt-{attempt}").last_index
        # A query with isolation=read_uncommitted is further than others may see.
        [last] = client.records(open_to, open_to + 1, max_bytes=1, min_commit=open_to).batch.to_pylist()[:1]
        check = check_of(open_to, last["term"], last["position"], last["body"])
        ahead = checkpoint(tmp_path / "ahead", c=GroupOffset(open_to + 1, reached.log, last["term"], check))
        row = rows(cluster, ahead)["c"]
        assert (row["end_index"] < open_to, row["lag_records"], row["loss"]) == (True, 0, None)
        client.abort_transaction(lost)
        leader = cluster.leader("c")
        client.transfer_leadership(next(node for node in cluster.node_ids if node != leader))
        path = checkpoint(tmp_path / "c", c=reached)
        row = rows(cluster, path, "--max-records", 0)["c"]
        assert row["end_index"] > read_to + 150
        assert (row["lag_records"], row["lag_bytes"], row["lag_seconds"], row["loss"]) == (0, 0, 0.0, None)
        index = client.append([b"new"]).last_index
        row = rows(cluster, path)["c"]
        assert (row["lag_records"], row["end_index"]) == (1, index + 1)


@pytest.mark.integration
@pytest.mark.parametrize(
    ("changed", "loss"),
    [
        ({"log": "another"}, "LOG_RECREATED"),
        ({"next": 100_000}, "OFFSET_BEYOND_END"),
        ({"term": 99}, "TERM_MISMATCH"),
        ({"check": 99}, "TERM_MISMATCH"),
    ],
    ids=str,
)
def test_lag_reports_losses_that_fail_query(
    cluster: LocalCluster, tmp_path: Path, changed: dict[str, Any], loss: str
) -> None:
    with Client(cluster.peers, "d") as client:
        offset = replace(after(client, client.append([b"x"] * 3).last_index), **changed)
    path = checkpoint(tmp_path / "c", d=offset)
    assert rows(cluster, path, code=1)["d"]["loss"] == loss
    assert f"[DLEDGER_DATA_LOSS.{loss}]" in run("--peers", cluster.peers, path).stderr
    tracker = Tracker(DLedgerOptions.for_reading({"peers": cluster.peers, "groups": "d", "fetchRetryMs": "100"}))
    with pytest.raises(DataLossError) as refused:
        tracker.adopt(StreamOffset({"d": offset}), tracker.bounds())
    assert refused.value.name == f"DLEDGER_DATA_LOSS.{loss}"


@pytest.mark.integration
def test_missing_group_makes_lag_incomplete(cluster: LocalCluster, tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", e=GroupOffset(0), gone=GroupOffset(5))
    assert set(rows(cluster, path, code=2)) == {"e"}
    alone = checkpoint(tmp_path / "alone", gone=GroupOffset(5))
    result = run("--peers", cluster.peers, alone)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "UNKNOWN_GROUP" in result.stderr


def test_unreachable_nodes_exit_3(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c", a=GroupOffset(0))
    result = run("--peers", UNREACHABLE, "--timeout", "0.3", path)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "[UNREACHABLE]" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent"], "does not exist"),
        ([], "missing argument 'DIR'"),
        (["c", "--max-records", "-1"], "--max-records"),
        (["c", "--max-seconds", "soon"], "--max-seconds"),
        (["c", "--peers", "nonsense"], "malformed peer"),
    ],
)
def test_wrong_usage_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str
) -> None:
    checkpoint(tmp_path / "c", a=GroupOffset(0))
    monkeypatch.chdir(tmp_path)
    result = run("--peers", UNREACHABLE, *arguments)
    assert (result.exit_code, result.stdout) == (3, ""), result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert said in result.stderr

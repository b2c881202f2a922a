"""The lag of real queries: ``monitor`` in a session, and ``dledger lag`` from a checkpoint."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dledger_core import Client, TransactionId
from dledger_core.cli import main
from dledger_core.client import check_of
from spark_connector import DLedgerListener, lag_reports, monitor
from spark_connector.errors import DataLossError, OptionError
from spark_connector.offsets import GroupOffset, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.reading.tracking import Tracker
from tests.cli.command import ErrorLine
from tests.spark_connector.spark_directory import QUERY_ID, tree, write_checkpoint
from tests.support.soon import soon

UNREACHABLE = "n0-127.0.0.1:1"


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, [*map(str, arguments)])


def shown(*arguments: object, code: int = 0) -> Any:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def transfer_leadership(cluster: Any, log: Client) -> None:
    leader = cluster.leader(log.group)
    log.transfer_leadership(next(node for node in cluster.node_ids if node != leader))


# --- the command, without Spark ----------------------------------------------------------------------------------


def checkpoint(directory: Path, **positions: GroupOffset) -> Path:
    return write_checkpoint(directory, json.dumps(StreamOffset(positions).to_json()), committed=1)


@pytest.fixture
def lag_at(cluster: Any, log: Client, tmp_path: Path) -> Callable[..., dict[str, Any]]:
    """Return a function that shows the lag of a query at an offset of ``log``."""

    def measure(at: GroupOffset, *arguments: object, code: int = 0) -> dict[str, Any]:
        shutil.rmtree(tmp_path / "c", ignore_errors=True)
        path = checkpoint(tmp_path / "c", **{log.group: at})
        before = tree(path)
        found = shown("lag", "--peers", cluster.peers, path, *arguments, code=code)
        assert (found["query_id"], found["batch_id"]) == (QUERY_ID, 0)
        assert tree(path) == before
        [row] = found["groups"]
        return dict(row)

    return measure


def after(client: Client, next_index: int) -> GroupOffset:
    """The offset of a query that has read everything before ``next_index``."""
    last = client.get(next_index - 1)
    check = check_of(last.index, last.term, last.position, last.body)
    return GroupOffset(next_index, client.metadata().log_uuid, last.term, check)


@pytest.mark.integration
def test_lag_in_records_bytes_and_seconds_and_its_limits(
    cluster: Any, log: Client, lag_at: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    first = log.append([b"x" * 100] * 10).first_index
    at = after(log, first + 4)
    row = lag_at(at)
    assert (row["lag_records"], row["loss"], row["next_index"], row["end_index"]) == (6, None, first + 4, first + 10)
    assert row["lag_bytes"] == 6 * (log.get(first + 5).position - log.get(first + 4).position)
    assert 0 <= row["lag_seconds"] < 600
    lag_at(at, "--max-records", 6, "--max-seconds", 3600)
    lag_at(at, "--max-records", 5, code=1)
    lag_at(at, "--max-seconds", 0, code=1)
    table = run("lag", "--peers", cluster.peers, tmp_path / "c", "--max-records", 0)
    assert f"query {QUERY_ID}, micro-batch 0" in table.stdout
    assert f"group {log.group} " in table.stderr


@pytest.mark.integration
def test_control_entries_and_aborted_attempts_are_not_lag(
    cluster: Any, log: Client, lag_at: Callable[..., dict[str, Any]]
) -> None:
    read_to = log.append([b"x"] * 3).last_index + 1
    reached = after(log, read_to)
    lost = TransactionId("query", 0, "run")
    for attempt in range(3):
        open_to = log.append_attempt([b"lost"] * 50, transaction=lost, attempt=f"attempt-{attempt}").last_index
    # A query with isolation=read_uncommitted is further than others may see.
    [last] = log.records(open_to, open_to + 1, max_bytes=1, min_commit=open_to).batch.to_pylist()[:1]
    check = check_of(open_to, last["term"], last["position"], last["body"])
    row = lag_at(GroupOffset(open_to + 1, reached.log, last["term"], check))
    assert (row["end_index"] < open_to, row["lag_records"], row["loss"]) == (True, 0, None)
    log.abort_transaction(lost)
    transfer_leadership(cluster, log)
    row = lag_at(reached, "--max-records", 0)
    assert row["end_index"] > read_to + 150
    assert (row["lag_records"], row["lag_bytes"], row["lag_seconds"], row["loss"]) == (0, 0, 0.0, None)
    index = log.append([b"new"]).last_index
    row = lag_at(reached)
    assert (row["lag_records"], row["end_index"]) == (1, index + 1)


@pytest.mark.integration
def test_lag_counts_entries_that_wait_for_open_transaction_and_names_it(
    cluster: Any, log: Client, lag_at: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    reached = after(log, log.append([b"x"] * 3).last_index + 1)
    unfinished = TransactionId("orders-query", 0, "run-1")
    log.append_attempt([b"row"] * 3, transaction=unfinished, attempt="attempt")
    last = log.append([b"y" * 52] * 115).last_index
    row = lag_at(reached, "--max-records", 118, code=1)
    assert (row["lag_records"], row["waiting_records"]) == (last + 1 - reached.next, 119) == (119, 119)
    assert (row["end_index"], row["lag_bytes"] > 115 * 100, row["lag_seconds"] > 0) == (reached.next, True, True)
    assert row["transaction"] == "query orders-query, micro-batch 0, run run-1"
    assert "orders-query" in run("lag", "--peers", cluster.peers, tmp_path / "c").stderr
    log.abort_transaction(unfinished)
    row = lag_at(reached)
    assert (row["lag_records"], row["waiting_records"], row["transaction"]) == (116, 0, None)


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
    cluster: Any, log: Client, lag_at: Callable[..., dict[str, Any]], changed: dict[str, Any], loss: str
) -> None:
    offset = replace(after(log, log.append([b"x"] * 3).last_index), **changed)
    assert lag_at(offset, code=1)["loss"] == loss
    given = {"peers": cluster.peers, "groups": log.group, "fetchRetryMs": "100"}
    tracker = Tracker(DLedgerOptions.for_reading(given))
    with pytest.raises(DataLossError) as refused:
        tracker.adopt(StreamOffset({log.group: offset}), tracker.bounds())
    assert refused.value.name == f"DLEDGER_DATA_LOSS.{loss}"


@pytest.mark.integration
def test_missing_group_makes_lag_incomplete(cluster: Any, log: Client, tmp_path: Path) -> None:
    both = checkpoint(tmp_path / "c", **{log.group: GroupOffset(0), "gone": GroupOffset(5)})
    found = shown("lag", "--peers", cluster.peers, both, code=2)
    assert [row["group"] for row in found["groups"]] == [log.group]
    result = run("lag", "--peers", cluster.peers, checkpoint(tmp_path / "alone", gone=GroupOffset(5)))
    assert (result.exit_code, result.stdout) == (3, "")
    assert ErrorLine(result.stderr).code == "UNKNOWN_GROUP"


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["c", "--timeout", "0.3"], 2, "UNREACHABLE"),
        (["absent"], 3, "CONFIG"),
        ([], 3, ""),
        (["c", "--max-records", "-1"], 3, ""),
        (["c", "--max-seconds", "soon"], 3, ""),
        (["c", "--peers", "nonsense"], 3, "CONFIG"),
    ],
)
def test_wrong_usage_and_unreachable_nodes_differ_by_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], code: int, error: str
) -> None:
    checkpoint(tmp_path / "c", a=GroupOffset(0))
    monkeypatch.chdir(tmp_path)
    result = run("lag", "--peers", UNREACHABLE, *arguments)
    assert (result.exit_code, result.stdout) == (code, ""), result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert ErrorLine(result.stderr).code == error


# --- monitor, with Spark -----------------------------------------------------------------------------------------


def start(spark: Any, cluster: Any, log: Any, target: Path, *, once: bool = True, **options: Any) -> Any:
    given = {"peers": cluster.peers, "groups": log.group, "startingOffsets": "earliest", **options}
    rows = spark.readStream.format("dledger").options(**given).load()
    writer = rows.writeStream.format("noop").queryName(log.group).option("checkpointLocation", str(target))
    return (writer.trigger(availableNow=True) if once else writer).start()


def wait_for(listener: DLedgerListener, group: str, next_index: int) -> Any:
    """The report that says that the query has come to an index."""

    def found() -> Any:
        return [report for report in listener.latest if report.group == group and report.next_index >= next_index]

    return soon(found, 200)[0]


@pytest.mark.spark
@pytest.mark.integration
def test_every_output_reports_lag_of_each_micro_batch(dledger: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    lines, metrics, checkpoint = (tmp_path / name for name in ("lag.jsonl", "lag.prom", "checkpoint"))
    last = log.append([b"x" * 52] * 250).last_index
    with monitor(dledger, log=False, json=lines, prometheus=metrics):
        query = start(dledger, cluster, log, checkpoint, maxOffsetsPerTrigger=100)
        query.awaitTermination()
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(line["batch_id"], line["query"], line["group"]) for line in told] == [
        (number, log.group, log.group) for number in range(4)
    ]
    assert [line["lag_records"] for line in told] == [250, last + 1 - 100, last + 1 - 200, 0]
    assert [line["lag_bytes"] for line in told] == [100 * line["lag_records"] for line in told]
    assert (told[0]["lag_seconds"] > 0, told[-1]["lag_seconds"]) == (True, 0)
    assert sum(line["rows"] for line in told) == 250
    assert "dledger_query_active" in metrics.read_text()
    spoken = json.loads(query.lastProgress.json)["sources"][0]["latestOffset"]  # Spark's own progress
    assert spoken["groups"][log.group]["behind"] == {"records": 0, "bytes": 0, "seconds": 0}
    (last_report,) = lag_reports(query.lastProgress)
    assert (last_report.batch_id, last_report.lag_records, last_report.rows) == (3, 0, told[-1]["rows"])
    # The commands read the checkpoint that Spark wrote.
    found = shown("checkpoint", "show", checkpoint)
    assert (found["query_id"], found["planned_batch_id"], found["committed_batch_id"]) == (str(query.id), 3, 3)
    log.append([b"new"] * 3)
    (row,) = shown("lag", "--peers", cluster.peers, checkpoint)["groups"]
    assert (row["next_index"], row["lag_records"], row["loss"]) == (last + 1, 3, None)
    for outputs in ({"table": "lag"}, {"table_seconds": 5}):  # withdrawn
        with pytest.raises(OptionError):
            monitor(dledger, log=False, **outputs)
    options = shown("checkpoint", "export", checkpoint)
    assert dledger.read.format("dledger").options(peers=cluster.peers, **options).load().count() == 3


@pytest.mark.spark
@pytest.mark.integration
def test_running_query_follows_log_through_leader_change_and_has_no_lag(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path
) -> None:
    metrics = tmp_path / "lag.prom"
    index = log.append([b"x"] * 10).last_index
    dledger.conf.set("spark.sql.streaming.noDataProgressEventInterval", "200")
    with monitor(dledger, log=False, prometheus=metrics) as listener:
        query = start(dledger, cluster, log, tmp_path / "c", once=False, failOnDataLoss="false")
        try:
            assert wait_for(listener, log.group, index + 1).processed_rows_per_second > 0
            idle = re.compile(rf'processed_rows_per_second{{query="{log.group}".*}} 0.0\n')
            soon(lambda: idle.search(metrics.read_text()), 200)
            transfer_leadership(cluster, log)
            report = wait_for(listener, log.group, index + 2)  # the new leader's control entry
            assert (report.lag_records, report.lag_bytes, report.lag_seconds) == (0, 0, 0.0)
            assert (report.losses, report.rows) == (0, 0)
            index = log.append([b"y"] * 5).last_index
            report = wait_for(listener, log.group, index + 1)
            assert (report.rows, report.lag_records) == (5, 0)
        finally:
            query.stop()
            dledger.conf.unset("spark.sql.streaming.noDataProgressEventInterval")

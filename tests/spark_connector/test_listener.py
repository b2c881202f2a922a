"""``monitor`` in a real session: its reports of a reading and an idle query, and failing outputs."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from dledger_core.cli import main
from spark_connector import DLedgerListener, lag_reports, monitor
from spark_connector.errors import OptionError

pytestmark = [pytest.mark.spark, pytest.mark.integration]


def start(spark: Any, cluster: Any, log: Any, target: Path, *, once: bool = True, **options: Any) -> Any:
    rows = spark.readStream.format("dledger").options(peers=cluster.peers, groups=log.group, **options).load()
    writer = rows.writeStream.format("noop").queryName(log.group).option("checkpointLocation", str(target))
    return (writer.trigger(availableNow=True) if once else writer).start()


def command(*arguments: object) -> Any:
    result = CliRunner().invoke(main, [*map(str, arguments), "--format", "json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def wait_for(listener: DLedgerListener, group: str, next_index: int) -> Any:
    """The report that says that the query has come to an index."""
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        for report in listener.latest:
            if report.group == group and report.next_index >= next_index:
                return report
        time.sleep(0.05)
    raise AssertionError(listener.latest)


def wait_for_text(file: Path, pattern: str) -> None:
    deadline = time.monotonic() + 200
    while not re.search(pattern, text := file.read_text()):
        assert time.monotonic() < deadline, text
        time.sleep(0.05)


def test_every_output_reports_lag_of_each_micro_batch(dledger: Any, cluster: Any, log: Any, tmp_path: Path) -> None:
    lines, metrics, table, checkpoint = (tmp_path / name for name in ("lag.jsonl", "lag.prom", "table", "checkpoint"))
    last = log.append([b"x" * 52] * 250).last_index
    with monitor(dledger, log=False, json=lines, prometheus=metrics, table=str(table)):
        query = start(dledger, cluster, log, checkpoint, startingOffsets="earliest", maxOffsetsPerTrigger=100)
        query.awaitTermination()
    told = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [(line["batch_id"], line["query"], line["group"]) for line in told] == [
        (number, log.group, log.group) for number in range(4)
    ]
    assert [line["lag_records"] for line in told] == [250, last + 1 - 100, last + 1 - 200, 0]
    assert [line["lag_bytes"] for line in told] == [100 * line["lag_records"] for line in told]
    assert told[0]["lag_seconds"] > 0
    assert told[-1]["lag_seconds"] == 0
    assert sum(line["rows"] for line in told) == 250
    assert "dledger_query_active" in metrics.read_text()
    rows = dledger.read.format("delta").load(str(table)).orderBy("batch_id").collect()
    assert [row.asDict() for row in rows] == [report_row(line) for line in told]
    spoken = json.loads(query.lastProgress.json)["sources"][0]["latestOffset"]  # Spark's own progress
    assert spoken["groups"][log.group]["behind"] == {"records": 0, "bytes": 0, "seconds": 0}
    (last_report,) = lag_reports(query.lastProgress)
    assert (last_report.batch_id, last_report.lag_records, last_report.rows) == (3, 0, told[-1]["rows"])
    shown = command("checkpoint", "show", checkpoint)
    assert (shown["query_id"], shown["planned_batch_id"], shown["committed_batch_id"]) == (str(query.id), 3, 3)
    (row,) = command("lag", "--peers", cluster.peers, checkpoint)["groups"]
    assert (row["next_index"], row["lag_records"], row["loss"]) == (last + 1, 0, None)
    log.append([b"new"] * 3)
    (row,) = command("lag", "--peers", cluster.peers, checkpoint)["groups"]
    assert row["lag_records"] == 3
    options = command("checkpoint", "export", checkpoint)
    fresh = dledger.read.format("dledger").options(peers=cluster.peers, **options).load()
    assert fresh.count() == 3


def report_row(line: dict[str, Any]) -> dict[str, Any]:
    from datetime import datetime

    return line | {"time": datetime.fromisoformat(line["time"]).replace(tzinfo=None)}


def test_idle_query_has_no_lag_and_its_losses_are_counted(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = tmp_path / "lag.prom"
    index = log.append([b"x"] * 10).last_index
    dledger.conf.set("spark.sql.streaming.noDataProgressEventInterval", "200")
    with monitor(dledger, log=False, prometheus=metrics) as listener:
        options = {"startingOffsets": "earliest", "failOnDataLoss": "false"}
        query = start(dledger, cluster, log, tmp_path / "c", once=False, **options)
        try:
            assert wait_for(listener, log.group, index + 1).processed_rows_per_second > 0
            wait_for_text(metrics, rf'processed_rows_per_second{{query="{log.group}".*}} 0.0\n')
            leader = cluster.leader(log.group)
            log.transfer_leadership(next(node for node in cluster.node_ids if node != leader))
            report = wait_for(listener, log.group, index + 2)  # the new leader's control entry
            assert (report.lag_records, report.lag_bytes, report.lag_seconds) == (0, 0, 0.0)
            assert (report.losses, report.rows) == (0, 0)
            index = log.append([b"y"] * 5).last_index
            report = wait_for(listener, log.group, index + 1)
            assert (report.rows, report.lag_records) == (5, 0)
        finally:
            query.stop()
            dledger.conf.unset("spark.sql.streaming.noDataProgressEventInterval")


def test_output_that_fails_does_not_hurt_query(
    dledger: Any, cluster: Any, log: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    log.append([b"x"] * 10)
    (tmp_path / "gone").mkdir()
    with monitor(dledger, log=False, json=tmp_path / "gone" / "lag.jsonl", prometheus=tmp_path / "m.prom") as listener:
        shutil.rmtree(tmp_path / "gone")
        query = start(dledger, cluster, log, tmp_path / "c", startingOffsets="earliest")
        query.awaitTermination()
        assert query.exception() is None
        wait_for(listener, log.group, 10)
    assert "output=JsonOutput" in caplog.text
    assert "dledger_query_active" in (tmp_path / "m.prom").read_text()


@pytest.mark.parametrize(
    ("outputs", "said"),
    [
        ({"json": "/nowhere/lag.jsonl"}, "/nowhere/lag.jsonl cannot be written"),
        ({"prometheus": "nonsense"}, "prometheus"),
        ({"table": __file__}, "cannot be written as a Delta table"),
        ({"table": "x", "table_seconds": 0}, "table_seconds"),
    ],
    ids=str,
)
def test_monitor_rejects_invalid_output(dledger: Any, outputs: dict[str, Any], said: str) -> None:
    with pytest.raises(OptionError, match=said):
        monitor(dledger, log=False, **outputs)

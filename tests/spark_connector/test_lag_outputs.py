"""Lag reports from progress reports, and their outputs: log lines, JSON lines and metrics; without Spark."""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
import socket
import urllib.request
import uuid
from collections.abc import Sequence
from dataclasses import astuple
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spark_connector import DLedgerListener, LagReport, lag_reports
from spark_connector.errors import OptionError
from spark_connector.monitoring.outputs import JsonOutput, LogOutput, PrometheusOutput, parse_target
from spark_connector.offsets import LatestOffset, LogEnd
from tests.spark_connector.spark_directory import offset

QUERY_ID = uuid.UUID("fd71ea2d-fd54-45c0-a396-24b68d750fc4")
RUN_ID = uuid.UUID("0a562d20-3b4e-46ea-9ad3-0a5a3215d868")


# --- progress reports, as PySpark 4.2 hands them to listeners ----------------------------------------------------


def latest(losses: tuple[int, int] = (0, 0), **groups: tuple[int, Sequence[float | None] | None]) -> str:
    """A latest offset: per group its end and the lag (records, bytes, seconds) of the micro-batch."""
    told = {}
    for group, (end, behind) in groups.items():
        lag = None if behind is None else dict(zip(("records", "bytes", "seconds"), behind, strict=True))
        told[group] = {"check": None, "log": "log-1", "next": end, "term": -1, "behind": lag}
    return json.dumps({"groups": told, "losses": {"events": losses[0], "entries": losses[1]}, "v": 1})


def source(start: str | None, end: str, last: str, rows: int = 0, rate: float = 0.0) -> dict[str, Any]:
    rates = {"numInputRows": rows, "inputRowsPerSecond": rate, "processedRowsPerSecond": rate}
    return {"startOffset": str(start), "endOffset": end, "latestOffset": last, **rates}


def progress(*sources: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {
        "id": QUERY_ID,
        "runId": RUN_ID,
        "name": "q",
        "timestamp": "2026-11-21T10:39:55.781Z",
        "batchId": 3,
        "durationMs": {"addBatch": 100, "triggerExecution": 250},
        "sources": list(sources),
        **fields,
    }


def test_lag_reports_cover_each_group_of_native_sources() -> None:
    last = latest(a=(500, (300, 9000, 12.5)), b=(7, (0, 0, 0.0)), losses=(2, 40))
    ours = source(offset(a=100, b=5), offset(a=200, b=5), last, rows=98, rate=392.04444)
    foreign = source('{"topic":{"0":1}}', '{"topic":{"0":5}}', '{"topic":{"0":5}}')
    first, second = lag_reports(progress(foreign, ours))
    time = datetime(2026, 11, 21, 10, 39, 55, 781_000, UTC)
    ours_of_a = (time, "q", str(QUERY_ID), str(RUN_ID), 3, 1, "a")
    assert astuple(first) == (*ours_of_a, 100, 200, 500, 300, 9000, 12.5, 400.0, 98, 392.0, 392.0, 2, 40, 0, None)
    assert (second.group, second.next_index, second.end_index, second.lag_records) == ("b", 5, 7, 0)
    assert {"300", "9,000", "12.5", "200", "392", "2", "40"} <= set(re.findall(r"[\d,.]*\d", str(first)))
    assert first.to_json()["time"] == "2026-11-21T10:39:55.781+00:00"


def test_unknown_lag_is_none() -> None:
    told = source("null", offset(a=5), latest(a=(9, None)), rate=math.nan)
    (report,) = lag_reports(progress(told, name=None, durationMs={}))
    assert report.query == str(QUERY_ID)
    assert (report.start_index, report.next_index) == (5, 5)
    assert (report.lag_records, report.lag_bytes, report.lag_seconds) == (None, None, None)
    assert (report.records_per_second, report.input_rows_per_second) == (None, None)
    (java,) = lag_reports(progress(source(None, offset(a=5), latest(a=(9, (4, 80, None))))))
    assert {"4", "80", "5", "0"} <= set(re.findall(r"\d+", str(java)))


def test_spark_4_1_reports_rows_and_neither_lag_nor_start_of_query() -> None:
    """It shows the end of the micro-batch as the latest offset, and the first micro-batch of a query has rows."""

    def shown(**ends: int) -> str:
        return str(json.loads(offset(**ends)))  # as PySpark 4.1 makes it: no JSON

    (first,) = lag_reports(progress(source(None, shown(a=5), shown(a=5), rows=4)))
    assert (first.rows, first.start_index, first.next_index, first.end_index) == (4, None, 5, None)
    assert (first.lag_records, first.records_per_second) == (None, None)
    (later,) = lag_reports(progress(source(shown(a=5), shown(a=8), shown(a=8), rows=3)))
    assert (later.rows, later.start_index, later.next_index, later.end_index) == (3, 5, 8, None)


def test_lag_of_commitlog_is_in_bytes_and_no_number_of_messages() -> None:
    ends = LatestOffset({"a": LogEnd(9000, None, None, 700, 3.5)}, 1, 512)
    shown = ends.to_json()
    assert {float(value) for value in shown["metrics"].values()} == {700.0}
    (report,) = lag_reports(progress(source(offset(a=100), offset(a=8300), json.dumps(shown))))
    assert (report.lag_records, report.lag_bytes, report.lag_seconds) == (None, 700, 3.5)
    assert (report.by_position, report.records_per_second) == (True, None)
    assert {"700 bytes", "position 8300", "512 bytes"} <= set(re.findall(r"position \d+|\d+ bytes", str(report)))
    (native,) = lag_reports(progress(source(offset(a=1), offset(a=5), latest(a=(9, (4, 80, None))))))
    assert not native.by_position


def test_report_names_transaction_that_entries_wait_for() -> None:
    ends = LatestOffset({"a": LogEnd(9, "log-1", 120, 9000, 3.5, 119, "query q, micro-batch 5, run r1")})
    (report,) = lag_reports(progress(source(None, offset(a=8), json.dumps(ends.to_json()))))
    assert (report.lag_records, report.waiting_records) == (120, 119)
    assert report.transaction == "query q, micro-batch 5, run r1"
    assert "query q, micro-batch 5, run r1" in str(report)
    assert "119" in str(report)


def test_metrics_have_names_of_kafka_source() -> None:
    ends = {"a": LogEnd(9, "log-1", 4, 0, 0.0), "b": LogEnd(9, "log-2", 7, 0, 0.0), "c": LogEnd(9, "log-3")}
    assert LatestOffset(ends).to_json()["metrics"] == {
        "avgOffsetsBehindLatest": "5.5",
        "maxOffsetsBehindLatest": "7",
        "minOffsetsBehindLatest": "4",
    }
    assert LatestOffset({"c": ends["c"]}).to_json()["metrics"] == {}


@pytest.mark.parametrize("told", ["None", "null", "", "{", "17", '{"topic":{"0":5}}'])
def test_source_that_tells_nothing_is_left_out(told: str) -> None:
    assert lag_reports(None) == []
    assert lag_reports(progress(source(None, told, told))) == []
    assert lag_reports(progress(source(None, offset(a=1), told))) == []


# --- outputs -----------------------------------------------------------------------------------------------------


def reports(at: int, batch: int, *, losses: tuple[int, int] = (0, 0), **fields: Any) -> list[LagReport]:
    """Micro-batch ``batch`` read up to ``at`` of 100 entries of group a, and all of b."""
    lag = (100 - at, 10 * (100 - at), 1.5 if at < 100 else 0.0)
    lags = latest(a=(100, lag), b=(4, None), losses=losses)
    return lag_reports(progress(source(offset(a=0, b=0), offset(a=at, b=4), lags, rows=30), batchId=batch, **fields))


def samples(text: str) -> dict[str, dict[str, float]]:
    """Metric without its prefix -> group (else query) -> value."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("dledger_")
            found.setdefault(name, {})[sample.labels.get("group", sample.labels["query"])] = sample.value
    return found


def test_metrics_show_newest_reports_and_sums_through_idle_end_and_restart(tmp_path: Path) -> None:
    file = tmp_path / "dledger.prom"
    output = PrometheusOutput(file)
    assert samples(file.read_text()) == {}
    output.take(reports(40, 1))
    output.take(reports(70, 2, losses=(1, 5)))
    found = samples(file.read_text())
    assert {name: value for name, value in found.items() if not name.endswith(("_created", "rows_per_second"))} == {
        "lag_records": {"a": 30},  # unknown for b
        "lag_bytes": {"a": 300},
        "lag_seconds": {"a": 1.5},
        "waiting_records": {"a": 0, "b": 0},
        "next_index": {"a": 70, "b": 4},
        "end_index": {"a": 100, "b": 4},
        "records_per_second": {"a": 280, "b": 16},
        "rows_total": {"q": 60},
        "losses_total": {"q": 1},
        "lost_records_total": {"q": 5},
        "query_active": {"q": 1},
        "last_progress_timestamp_seconds": {"q": 1795257595.781},
    }
    labels = next(family for family in text_string_to_metric_families(file.read_text())).samples[0].labels
    assert labels == {"query": "q", "query_id": str(QUERY_ID), "source": "0", "group": "a"}
    output.idle(str(RUN_ID))
    assert samples(file.read_text())["records_per_second"] == {"a": 0, "b": 0}
    assert samples(file.read_text())["lag_records"] == {"a": 30}
    output.ended("another run")
    assert samples(file.read_text())["query_active"] == {"q": 1}
    output.ended(str(RUN_ID))
    found = samples(file.read_text())
    assert "lag_records" not in found
    assert (found["query_active"], found["lost_records_total"]) == ({"q": 0}, {"q": 5})
    output.take(reports(70, 1, losses=(2, 6), runId="run-2"))
    found = samples(file.read_text())
    assert (found["query_active"], found["lag_records"]) == ({"q": 1}, {"a": 30})
    assert (found["rows_total"], found["lost_records_total"]) == ({"q": 90}, {"q": 11})


def test_output_that_fails_hurts_neither_query_nor_other_outputs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "gone").mkdir()
    outputs = [JsonOutput(tmp_path / "gone" / "lag.jsonl"), JsonOutput(tmp_path / "lag.jsonl")]
    shutil.rmtree(tmp_path / "gone")
    listener = DLedgerListener(outputs)
    wrong, right = progress({"endOffset": "none"}), progress(source(None, offset(a=5), latest(a=(9, None))))
    for report in (wrong, right):
        listener.onQueryProgress(cast("Any", SimpleNamespace(progress=report)))
    assert "output=JsonOutput" in caplog.text
    assert [report.next_index for report in listener.latest] == [5]
    assert json.loads((tmp_path / "lag.jsonl").read_text())["next_index"] == 5


class StoppedSession:
    """A session that was stopped: its streams raise."""

    @property
    def streams(self) -> Any:
        raise RuntimeError("the session is stopped")


def test_metrics_are_served_until_listener_of_stopped_session_is_closed() -> None:
    output = PrometheusOutput("127.0.0.1:0")
    listener = DLedgerListener([output])
    listener.spark = cast("Any", StoppedSession())
    try:
        output.take(reports(40, 1))
        with urllib.request.urlopen(f"http://127.0.0.1:{output.port}/metrics", timeout=60) as response:
            assert samples(response.read().decode())["lag_records"] == {"a": 60}
        with pytest.raises(OptionError):
            PrometheusOutput(output.port or 0)
    finally:
        listener.close()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", output.port or 0))


@pytest.mark.parametrize("target", ["", "nonsense", "host:", ":80", "h:99999", "-1", "/nowhere/x.prom"])
def test_prometheus_output_rejects_invalid_target(target: str) -> None:
    with pytest.raises(OptionError, match="prometheus"):
        PrometheusOutput(target)


@pytest.mark.parametrize("host", ["0.0.0.0", "[::]", "192.0.2.1", "example.org"])
def test_prometheus_output_rejects_exposed_host_without_insecure(host: str) -> None:
    with pytest.raises(OptionError):
        PrometheusOutput(f"{host}:0")
    assert parse_target(f"{host}:0", insecure=True) == (host.strip("[]"), 0)


@pytest.mark.parametrize("target", ["0", "127.0.0.1:0", "localhost:0", "[::1]:0"])
def test_prometheus_target_on_loopback_needs_nothing(target: str) -> None:
    assert parse_target(target) == (target.rpartition(":")[0].strip("[]") or "127.0.0.1", 0)


def test_json_output_creates_new_file_after_move(tmp_path: Path) -> None:
    file, moved = tmp_path / "lag.jsonl", tmp_path / "lag.jsonl.1"
    output = JsonOutput(file)
    output.take(reports(40, 1))
    file.rename(moved)
    output.take(reports(100, 2))
    lags = [[json.loads(line)["lag_records"] for line in each.read_text().splitlines()] for each in (moved, file)]
    assert lags == [[60, None], [0, None]]
    with pytest.raises(OptionError, match="json"):
        JsonOutput(tmp_path / "absent" / "lag.jsonl")


def test_log_output_limits_rate_and_logs_losses_and_last_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_connector.lag")
    output = LogOutput()

    def logged() -> list[int]:
        return [record.args[0].lag_records for record in caplog.records]

    for batch, (at, lost) in enumerate([(40, 0), (50, 0), (60, 5)]):
        output.take(reports(at, batch, losses=(min(lost, 1), lost))[:1])
    output.idle(str(RUN_ID))
    assert logged() == [60, 40], "the report of a loss replaces the one that was held back"
    output.take(reports(100, 3, losses=(1, 5))[:1])
    assert logged() == [60, 40]
    output.ended(str(RUN_ID))
    assert logged() == [60, 40, 0]


def test_log_output_uses_stderr_without_logging_setup(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    logger = logging.getLogger("spark_connector.lag")
    for name in ("handlers", "level", "propagate"):
        monkeypatch.setattr(logger, name, getattr(logger, name))
    logger.setLevel(logging.NOTSET)
    monkeypatch.setattr(logger, "handlers", [])
    output = LogOutput()
    LogOutput()
    output.take(reports(40, 1)[:1])
    assert capsys.readouterr().err.count("60 records behind") == 1
    logger.setLevel(logging.NOTSET)

"""Log lines, JSON lines and metrics from reports, without Spark."""

from __future__ import annotations

import json
import logging
import socket
import urllib.request
from pathlib import Path
from typing import Any, cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spark_connector import DLedgerListener, LagReport, lag_reports
from spark_connector.errors import OptionError
from spark_connector.monitoring.outputs import JsonOutput, LogOutput
from spark_connector.monitoring.prometheus import PrometheusOutput
from tests.spark_connector.progress_reports import QUERY_ID, RUN_ID, latest, offset, progress, source


def reports(at: int, batch: int, *, losses: tuple[int, int] = (0, 0), **fields: Any) -> list[LagReport]:
    """Micro-batch ``batch`` read up to ``at`` of 100 entries of group a, and all of b."""
    lag = (100 - at, 10 * (100 - at), 1.5 if at < 100 else 0.0)
    lags = latest(a=(100, lag), b=(4, None), losses=losses)
    return lag_reports(progress(source(offset(a=0, b=0), offset(a=at, b=4), lags, rows=30), batch=batch, **fields))


def samples(text: str) -> dict[str, dict[str, float]]:
    """Metric -> group (else query) -> value."""
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, {})[sample.labels.get("group", sample.labels["query"])] = sample.value
    return found


def test_metrics_show_newest_reports_and_sums(tmp_path: Path) -> None:
    file = tmp_path / "dledger.prom"
    output = PrometheusOutput(file)
    assert samples(file.read_text()) == {}
    output.take(reports(40, 1))
    output.take(reports(70, 2, losses=(1, 5)))
    found = samples(file.read_text())
    assert found["dledger_lag_records"] == {"a": 30}  # unknown for b
    assert found["dledger_lag_bytes"] == {"a": 300}
    assert found["dledger_lag_seconds"] == {"a": 1.5}
    assert found["dledger_next_index"] == {"a": 70, "b": 4}
    assert found["dledger_end_index"] == {"a": 100, "b": 4}
    assert found["dledger_rows_total"] == {"q": 60}
    assert found["dledger_losses_total"] == {"q": 1}
    assert found["dledger_lost_records_total"] == {"q": 5}
    assert found["dledger_query_active"] == {"q": 1}
    assert found["dledger_last_progress_timestamp_seconds"] == {"q": 1795257595.781}
    labels = next(family for family in text_string_to_metric_families(file.read_text())).samples[0].labels
    assert labels == {"query": "q", "query_id": str(QUERY_ID), "source": "0", "group": "a"}


def test_counters_continue_after_restart_and_ended_query_has_no_lag(tmp_path: Path) -> None:
    file = tmp_path / "dledger.prom"
    output = PrometheusOutput(file)
    output.take(reports(40, 1, losses=(1, 5)))
    output.ended("another run")
    assert samples(file.read_text())["dledger_query_active"] == {"q": 1}
    output.ended(str(RUN_ID))
    found = samples(file.read_text())
    assert "dledger_lag_records" not in found
    assert found["dledger_query_active"] == {"q": 0}
    assert found["dledger_lost_records_total"] == {"q": 5}
    output.take(reports(70, 1, losses=(2, 6), runId="run-2"))
    found = samples(file.read_text())
    assert found["dledger_query_active"] == {"q": 1}
    assert found["dledger_lag_records"] == {"a": 30}
    assert found["dledger_rows_total"] == {"q": 60}
    assert found["dledger_lost_records_total"] == {"q": 11}


def test_idle_query_has_no_rates(tmp_path: Path) -> None:
    file = tmp_path / "dledger.prom"
    output = PrometheusOutput(file)
    output.take(reports(100, 1))
    assert samples(file.read_text())["dledger_records_per_second"]["a"] == 400
    output.idle(str(RUN_ID))
    found = samples(file.read_text())
    assert found["dledger_records_per_second"] == {"a": 0, "b": 0}
    assert (found["dledger_lag_records"], found["dledger_lag_seconds"]) == ({"a": 0}, {"a": 0})


def test_metrics_are_served_until_closed() -> None:
    output = PrometheusOutput("127.0.0.1:0")
    try:
        output.take(reports(40, 1))
        with urllib.request.urlopen(f"http://127.0.0.1:{output.port}/metrics", timeout=60) as response:
            assert samples(response.read().decode())["dledger_lag_records"] == {"a": 60}
    finally:
        output.close()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", output.port or 0))


@pytest.mark.parametrize("target", ["", "nonsense", "host:", ":80", "h:99999", "-1", "/nowhere/x.prom"])
def test_prometheus_output_rejects_invalid_target(target: str) -> None:
    with pytest.raises(OptionError, match=r"\[DLEDGER_OPTION\] prometheus"):
        PrometheusOutput(target)


def test_prometheus_output_rejects_used_port() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(OptionError, match="Address already in use"):
            PrometheusOutput(taken.getsockname()[1])


def test_json_output_creates_new_file_after_move(tmp_path: Path) -> None:
    file = tmp_path / "lag.jsonl"
    output = JsonOutput(file)
    output.take(reports(40, 1))
    file.rename(tmp_path / "lag.jsonl.1")
    output.take(reports(100, 2))
    lines = [json.loads(line) for line in (tmp_path / "lag.jsonl.1").read_text().splitlines()]
    assert [(line["group"], line["lag_records"], line["lag_seconds"]) for line in lines] == [
        ("a", 60, 1.5),
        ("b", None, None),
    ]
    assert json.loads(file.read_text().splitlines()[0])["lag_records"] == 0


def test_json_output_rejects_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"\[DLEDGER_OPTION\] json.*No such file or directory"):
        JsonOutput(tmp_path / "absent" / "lag.jsonl")


def test_log_output_limits_rate_and_logs_last_report(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_connector.lag")
    output = LogOutput()
    for batch, at in enumerate((40, 50, 100)):
        output.take(reports(at, batch)[:1])
    assert [record.args[0].lag_records for record in caplog.records] == [60]
    output.idle(str(RUN_ID))
    output.ended(str(RUN_ID))
    assert [record.args[0].lag_records for record in caplog.records] == [60, 0]


def test_log_output_logs_loss_immediately(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "spark_connector.lag")
    output = LogOutput()
    output.take(reports(40, 1)[:1])
    output.take(reports(50, 2, losses=(1, 5))[:1])
    assert "1 losses, 5 records" in caplog.text


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


class StoppedSession:
    """A session that was stopped: its streams raise."""

    @property
    def streams(self) -> Any:
        raise RuntimeError("the session is stopped")


def test_listener_close_closes_outputs_after_session_was_stopped(tmp_path: Path) -> None:
    output = PrometheusOutput("127.0.0.1:0")
    listener = DLedgerListener([output])
    listener.spark = cast("Any", StoppedSession())
    listener.close()
    with socket.socket() as free:
        free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        free.bind(("127.0.0.1", output.port or 0))

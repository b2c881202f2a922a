"""The report of the table: figures, ratios, verdicts, as JSON and as Markdown. Nothing is measured here."""

from __future__ import annotations

import json
from pathlib import Path

from tests.benchmarks.spark_table.report import DLEDGER, KAFKA, MEMORY, Line, Report, Run, Target

TARGETS = (Target(2.0, KAFKA), Target(0.7, MEMORY))


def runs(*values: float) -> list[Run]:
    return [Run(value, {"spark": value / 1e3, "python": 5.0}) for value in values]


def test_report_line_compares_medians() -> None:
    figures = {DLEDGER: runs(3e6, 9e6, 1e6), KAFKA: runs(1.5e6), MEMORY: runs(5e6)}
    line = Line("read", "rows/s", figures, TARGETS)
    assert line.figures == {DLEDGER: 3e6, KAFKA: 1.5e6, MEMORY: 5e6}
    assert line.verdicts == ["reached", "missed"]
    assert line.to_json()["ratio"] == {KAFKA: 2.0, MEMORY: 0.6}
    assert line.to_json()["cpu_ns_per_row"][DLEDGER] == {"spark": 3000, "python": 5}


def test_report_gives_no_verdict_for_missing_measurement() -> None:
    assert Line("read", "rows/s", {DLEDGER: runs(3e6)}, TARGETS).verdicts == ["not measured", "not measured"]
    assert Line("read", "rows/s", {DLEDGER: [], MEMORY: runs(1)}, TARGETS).verdicts == ["not measured", "not measured"]


def test_upper_limit_includes_limit_itself() -> None:
    verdicts = [Target(1.5, most=True).verdict({DLEDGER: value}) for value in (1.4, 1.5, 1.6)]
    assert verdicts == ["reached", "reached", "missed"]


def test_report_is_written_as_json_and_markdown(tmp_path: Path) -> None:
    lines = [
        Line("batch read", "rows/s", {DLEDGER: runs(3e6), MEMORY: runs(4e6)}, TARGETS),
        Line("start", "s", {DLEDGER: [Run(1.25)]}, (Target(1.5, most=True),)),
        Line("worker", "MiB", {DLEDGER: [Run(211.4)]}, note="peak RSS"),
    ]
    report = Report({"date": "2026-11-21"}, lines, {"Kafka": "no Maven"})
    report.write(tmp_path / "deep" / "speed.json")
    content = json.loads((tmp_path / "deep" / "speed.json").read_text())
    assert content["date"] == "2026-11-21"
    assert content["left_out"] == {"Kafka": "no Maven"}
    assert [line["name"] for line in content["lines"]] == ["batch read", "start", "worker"]
    assert [target["verdict"] for target in content["lines"][0]["targets"]] == ["not measured", "reached"]
    text = (tmp_path / "deep" / "speed.md").read_text().splitlines()
    wanted = "≥ 2 x Kafka; ≥ 0.7 x in memory | 0.75 x in memory | not measured; reached |"
    assert f"| batch read | 3.00 M/s |  | 4.00 M/s | {wanted}" in text
    assert "| start | 1.25 s |  |  | ≤ 1.50 s |  | reached |" in text
    assert "| worker | 211 MiB |  |  |  |  |  |" in text
    assert "- worker: peak RSS" in text
    assert "- left out: Kafka: no Maven" in text
    assert "| batch read | DLedger | python 5, spark 3000 |" in text
    table = [row for row in text if row.startswith(("| | DLedger", "| batch read | 3.00", "| start", "| worker"))]
    assert {row.count("|") for row in table} == {8}

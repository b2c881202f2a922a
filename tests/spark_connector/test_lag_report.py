from __future__ import annotations

import math
from dataclasses import fields
from datetime import UTC, datetime

import pytest

from spark_connector import LagReport, lag_reports
from spark_connector.monitoring.lag import REPORT_SCHEMA
from tests.spark_connector.progress_reports import QUERY_ID, RUN_ID, latest, offset, progress, source


def test_lag_reports_cover_each_group_of_native_sources() -> None:
    ours = source(
        offset(a=100, b=5),
        offset(a=200, b=5),
        latest(a=(500, (300, 9000, 12.5)), b=(7, (0, 0, 0.0)), losses=(2, 40)),
        rows=98,
        rate=392.04444,
    )
    foreign = source('{"topic":{"0":1}}', '{"topic":{"0":5}}', '{"topic":{"0":5}}')
    first, second = lag_reports(progress(foreign, ours))
    assert first == LagReport(
        time=datetime(2026, 11, 21, 10, 39, 55, 781_000, UTC),
        query="q",
        query_id=str(QUERY_ID),
        run_id=str(RUN_ID),
        batch_id=3,
        source=1,
        group="a",
        start_index=100,
        next_index=200,
        end_index=500,
        lag_records=300,
        lag_bytes=9000,
        lag_seconds=12.5,
        records_per_second=400.0,
        rows=98,
        input_rows_per_second=392.0,
        processed_rows_per_second=392.0,
        losses=2,
        lost_records=40,
    )
    assert (second.group, second.next_index, second.end_index, second.lag_records) == ("b", 5, 7, 0)
    assert str(first) == (
        "query q, group a: 300 records behind (9,000 bytes, 12.5 s) at index 200; 392 rows/s; 2 losses, 40 records"
    )
    assert first.to_json()["time"] == "2026-11-21T10:39:55.781+00:00"


def test_unknown_lag_is_none() -> None:
    told = source("null", offset(a=5), latest(a=(9, None)), rate=math.nan)
    (report,) = lag_reports(progress(told, name=None, durationMs={}))
    assert report.query == str(QUERY_ID)
    assert (report.start_index, report.next_index) == (5, 5)
    assert (report.lag_records, report.lag_bytes, report.lag_seconds) == (None, None, None)
    assert (report.records_per_second, report.input_rows_per_second) == (None, None)
    assert "an unknown number of records behind" in str(report)
    (java,) = lag_reports(progress(source(None, offset(a=5), latest(a=(9, (4, 80, None))))))
    assert str(java) == "query q, group a: 4 records behind (80 bytes) at index 5; 0 rows/s"


@pytest.mark.parametrize("told", ["None", "null", "", "{", "17", '{"topic":{"0":5}}'])
def test_source_that_tells_nothing_is_left_out(told: str) -> None:
    assert lag_reports(None) == []
    assert lag_reports(progress(source(None, told, told))) == []
    assert lag_reports(progress(source(None, offset(a=1), told))) == []


def test_report_schema_has_fields_in_their_order() -> None:
    assert REPORT_SCHEMA.names == [field.name for field in fields(LagReport)]

"""The lag that a stream reports to Spark; the reader alone, without Spark."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadMaxRows

from dledger_core import LogRange
from spark_connector.errors import LossPolicy
from spark_connector.monitoring.lag import LagMeter
from spark_connector.offsets import GroupOffset, LogEnd, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerStreamReader
from tests.spark_connector.store_writer import StoreWriter

ALL = ReadAllAvailable()


def make_reader(store: StoreWriter, **options: str) -> DLedgerStreamReader:
    given = {"path": str(store.path), "pollMs": "1", "fetchRetryMs": "1", "startingOffsets": "earliest", **options}
    return DLedgerStreamReader(DLedgerOptions.for_reading(given))


def behind(reader: DLedgerStreamReader) -> dict[str, Any]:
    report = reader.reportLatestOffset()
    assert report is not None
    assert json.loads(json.dumps(report)) == report
    found: dict[str, Any] = report["groups"]["default"]["behind"]
    return found


def test_lag_shrinks_with_each_micro_batch_to_nothing(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        reader = make_reader(store)
        at = reader.initialOffset()
        assert reader.reportLatestOffset() is None
        at = reader.latestOffset(at, ReadMaxRows(4))  # the pin batch: nothing is read yet
        record = 48 + len(b"body-0")
        assert (behind(reader)["records"], behind(reader)["bytes"]) == (10, 10 * record)
        seconds = behind(reader)["seconds"]
        assert seconds > 86_400
        found = []
        for _ in range(3):
            at = reader.latestOffset(at, ReadMaxRows(4))
            found.append((behind(reader)["records"], behind(reader)["bytes"]))
        assert found == [(6, 6 * record), (2, 2 * record), (0, 0)]
        assert behind(reader)["seconds"] == 0.0


def test_control_entries_at_end_are_no_lag(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(4)
        reader = make_reader(store)
        at = reader.latestOffset(reader.initialOffset(), ALL)
        store.append([], noop=True)
        at = reader.latestOffset(at, ReadMaxRows(4))
        assert (at["groups"]["default"]["next"], store.end) == (4, 5)
        assert behind(reader) == {"bytes": 0, "records": 0, "seconds": 0.0}
        store.append([b"new"])
        reader.latestOffset(at, ReadMaxRows(1))
        assert behind(reader)["records"] == 1


def test_losses_are_counted_in_report(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, uuid="log-1") as store:
        store.append_numbers(5)
        reader = make_reader(store, failOnDataLoss="false")
        gone = StreamOffset({"default": GroupOffset(3, "log-0", 1, 9)}).to_json()
        reader.latestOffset(gone, ALL)
        report = reader.reportLatestOffset()
        assert report is not None
        assert report["losses"] == {"entries": 3, "events": 1}


def test_unreachable_nodes_leave_lag_unknown() -> None:
    given = {"peers": "n0-127.0.0.1:1", "fetchTimeoutMs": "200", "fetchRetryMs": "200"}
    meter = LagMeter(DLedgerOptions.for_reading(given))
    bounds = {"default": LogRange(0, 9, 8, "log-1")}
    report = meter.report(StreamOffset({"default": GroupOffset(3)}), bounds, LossPolicy(fail=True))
    assert report.groups == {"default": LogEnd(9, "log-1")}
    done = meter.report(StreamOffset({"default": GroupOffset(9)}), bounds, LossPolicy(fail=True))
    assert done.groups == {"default": LogEnd(9, "log-1", 0, 0, 0.0)}


@pytest.mark.parametrize("known", [{}, {"default": GroupOffset(0)}])
def test_lag_of_new_group_counts_from_first_entry(tmp_path: Path, known: dict[str, GroupOffset]) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(3)
        meter = LagMeter(DLedgerOptions.for_reading({"path": str(store.path)}))
        bounds = {"default": LogRange(0, 3, -1, "log-1")}
        report = meter.report(StreamOffset(known), bounds, LossPolicy(fail=True))
        assert report.groups["default"].records == 3

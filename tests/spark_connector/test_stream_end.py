"""A stream with an end: it never passes it with any trigger, and sends no request once it is there."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadMaxRows

from dledger_core import open_store
from spark_connector.errors import OptionError
from tests.spark_connector.engine import ALL, Engine, make_batch_reader, make_reader, next_of
from tests.spark_connector.store_writer import StoreWriter


def times(store: StoreWriter) -> list[int]:
    with open_store(store.path) as reader:
        return [round(time.timestamp() * 1000) for time in reader.read(0, store.end).column("timestamp").to_pylist()]


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(4)])
@pytest.mark.parametrize("available_now", [False, True])
def test_stream_stops_at_ending_index(store: StoreWriter, limit: Any, available_now: bool) -> None:
    store.append_numbers(10)
    engine = Engine(limit)
    for end in (7, 12):
        reader = make_reader(store, startingOffsets="earliest", endingOffsets=json.dumps({"default": end}))
        if available_now:
            reader.prepareForTriggerAvailableNow()
        for _ in range(6):
            engine.start(reader)
        store.append_numbers(10)
        for _ in range(3):
            engine.start(reader)
    assert engine.read == list(range(12))
    without_end = make_reader(store)
    for _ in range(6):
        engine.start(without_end)
    assert engine.read == list(range(store.end))


def test_stream_stops_at_ending_time_once_log_reaches_it(store: StoreWriter) -> None:
    store.append_numbers(3)
    store.append_numbers(3)
    first, second = sorted(set(times(store)))
    engine, reader = Engine(), make_reader(store, startingOffsets="earliest", endingTimestamp=2 * second - first + 1)
    for _ in range(3):
        engine.start(reader)
    assert engine.read == list(range(6)), "not there yet"
    for _ in range(3):
        store.append_numbers(2)
    assert times(store)[6] == 2 * second - first, "appended at the same pace"
    for _ in range(4):
        engine.start(reader)
    assert engine.read == list(range(8))
    restarted = make_reader(store, endingTimestamp=json.dumps({"default": second}))
    engine.start(restarted)
    assert engine.read == list(range(8)), "an end before the checkpoint reads nothing"


def test_stream_at_its_end_neither_polls_nor_lags(store: StoreWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append_numbers(10)
    reader = make_reader(store, startingOffsets="earliest", endingOffsets='{"default": 4}')
    at = reader.latestOffset(reader.latestOffset(reader.initialOffset(), ALL), ALL)
    assert next_of(at) == 4
    asked: list[int] = []
    bounds = reader.tracker.bounds
    monkeypatch.setattr(reader.tracker, "bounds", lambda: (asked.append(1), bounds())[1])
    for _ in range(20):
        assert reader.latestOffset(at, ALL) == at
    assert not asked
    reported = reader.reportLatestOffset()
    assert reported is not None
    assert next_of(reported) == 4


@pytest.mark.parametrize("end", ["latest", "earliest", '{"default": -1}', '{"default": "earliest"}'])
def test_word_is_rejected_as_end(store: StoreWriter, end: str) -> None:
    with pytest.raises(OptionError, match="endingOffsets"):
        make_reader(store, endingOffsets=end)


def test_end_before_start_is_rejected(store: StoreWriter) -> None:
    store.append_numbers(10)
    for options in (
        {"startingOffsets": '{"default": 6}', "endingOffsets": '{"default": 5}'},
        {"startingOffsets": "latest", "endingTimestamp": times(store)[0]},
    ):
        with pytest.raises(OptionError, match="DLEDGER_OPTION"):
            make_reader(store, **options).initialOffset()
    with pytest.raises(OptionError, match="DLEDGER_OPTION"):
        make_batch_reader(store, startingOffsets='{"default": 6}', endingOffsets='{"default": 5}').partitions()

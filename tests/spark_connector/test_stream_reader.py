"""The stream reader as a plain object, over a real store: Spark's calls in the orders Spark makes them."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.streaming.datasource import ReadMaxBytes, ReadMaxRows

from spark_connector.errors import (
    CheckpointError,
    DataLossError,
    GroupGoneError,
    LogRecreatedError,
    OffsetBeyondEndError,
    OptionError,
    RetentionError,
    TermMismatchError,
)
from spark_connector.reading.partitions import RangesPartition
from tests.spark_connector.engine import ALL, Engine, make_batch_reader, make_reader, next_of
from tests.spark_connector.reading_as_executor import indexes
from tests.spark_connector.store_writer import StoreWriter


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("starting", ["latest", "earliest"])
def test_entries_appended_between_first_calls_are_read(store: StoreWriter, starting: str, crash: bool) -> None:
    store.append_numbers(10)
    engine, reader = Engine(), make_reader(store, startingOffsets=starting)
    first = 10 if starting == "latest" else 0
    assert next_of(reader.initialOffset()) == first
    store.append_numbers(5)
    assert next_of(reader.latestOffset(reader.initialOffset(), ALL)) == first
    reader = make_reader(store, startingOffsets=starting)
    engine.start(reader, crash_before_commit=crash)
    begun = next_of(json.loads(engine.offsets[0]))
    if crash:
        store.append_numbers(5)
        reader = make_reader(store, startingOffsets=starting)
    engine.start(reader)
    engine.start(reader)
    assert engine.read == list(range(begun, store.end))
    assert begun == (15 if starting == "latest" else 0)


def test_available_now_reads_to_end_at_its_start_in_bounded_batches(store: StoreWriter) -> None:
    store.append_numbers(25)
    engine = Engine(ReadMaxRows(10))
    reader = make_reader(store, startingOffsets="earliest", maxOffsetsPerTrigger=10)
    assert reader.getDefaultReadLimit() == ReadMaxRows(10)
    reader.prepareForTriggerAvailableNow()
    store.append_numbers(5)
    for _ in range(6):
        engine.start(reader)
    assert engine.read == list(range(25))
    assert [next_of(json.loads(text)) for text in engine.offsets] == [0, 10, 20, 25]
    again = make_reader(store)
    again.prepareForTriggerAvailableNow()
    engine.start(again)
    assert engine.read == list(range(30))


def test_replayed_first_batch_does_not_end_available_now_early(store: StoreWriter) -> None:
    store.append_numbers(5)
    engine = Engine()
    engine.start(make_reader(store, startingOffsets="earliest"), crash_before_commit=True)
    reader = make_reader(store, startingOffsets="earliest")
    reader.prepareForTriggerAvailableNow()
    engine.start(reader)
    engine.start(reader)
    assert engine.read == list(range(5))


def test_offsets_never_decrease_and_idle_query_repeats_offset(store: StoreWriter) -> None:
    store.append_numbers(5)
    reader = make_reader(store, startingOffsets="earliest")
    begin = reader.latestOffset(reader.initialOffset(), ALL)
    end = reader.latestOffset(begin, ALL)
    assert next_of(end) == 5
    assert json.dumps(reader.latestOffset(end, ALL)) == json.dumps(end)
    reader.prepareForTriggerAvailableNow()
    store.append_numbers(5)
    beyond = make_reader(store).latestOffset(end, ALL)
    assert next_of(reader.latestOffset(beyond, ALL)) == 10
    reported = reader.reportLatestOffset()
    assert reported is not None
    assert next_of(reported) == 10


def test_control_entries_have_no_rows_and_count_in_offsets(store: StoreWriter) -> None:
    store.append([b"a", b"b"], noop=True)
    store.append([b"c"], noop=True)
    reader = make_reader(store, startingOffsets="earliest")
    end = reader.latestOffset(reader.latestOffset(reader.initialOffset(), ALL), ALL)
    assert next_of(end) == 5
    assert indexes(reader, reader.partitions(reader.initialOffset(), end)) == [1, 2, 4]


def test_explicit_indexes_start_query(store: StoreWriter) -> None:
    store.append_numbers(9)
    reader = make_reader(store, startingOffsets='{"default": 4}')
    begin = reader.latestOffset(reader.initialOffset(), ALL)
    assert (next_of(begin), begin["groups"]["default"]["term"]) == (4, 1)
    assert indexes(reader, reader.partitions(begin, reader.latestOffset(begin, ALL))) == [4, 5, 6, 7, 8]
    with pytest.raises(OffsetBeyondEndError, match=r"\[9, 40\) \(31 entries\)"):
        make_reader(store, startingOffsets='{"default": 40}').initialOffset()


def test_limit_of_bytes_is_exact_and_one_entry_always_fits(store: StoreWriter) -> None:
    store.append([b"x" * 52] * 10 + [b"y" * 952] + [b"x" * 52] * 10)
    engine = Engine(ReadMaxBytes(350))
    reader = make_reader(store, startingOffsets="earliest", maxBytesPerTrigger=350)
    assert reader.getDefaultReadLimit() == ReadMaxBytes(350)
    for _ in range(12):
        engine.start(reader)
    assert engine.read == list(range(21))
    assert [next_of(json.loads(text)) for text in engine.offsets] == [0, 3, 6, 9, 10, 11, 14, 17, 20, 21]


@pytest.mark.parametrize(("entries", "nbytes", "expected"), [(4, 350, 3), (2, 350, 2), (2, 1, 1)])
def test_whichever_limit_comes_first(store: StoreWriter, entries: int, nbytes: int, expected: int) -> None:
    store.append([b"x" * 52] * 10)
    options = {"maxOffsetsPerTrigger": entries, "maxBytesPerTrigger": nbytes}
    reader = make_reader(store, startingOffsets="earliest", **options)
    begin = reader.latestOffset(reader.initialOffset(), ALL)
    assert next_of(reader.latestOffset(begin, reader.getDefaultReadLimit())) == expected
    assert next_of(make_reader(store, **options).latestOffset(begin, ALL)) == 10  # Trigger.Once


def test_minimum_of_entries_delays_micro_batch(store: StoreWriter) -> None:
    store.append_numbers(5)
    reader = make_reader(store, startingOffsets="earliest", minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    limit = reader.getDefaultReadLimit()
    begin = reader.latestOffset(reader.initialOffset(), limit)
    first = reader.latestOffset(begin, limit)
    assert next_of(first) == 5
    store.append_numbers(9)
    assert reader.latestOffset(first, limit) == first
    store.append_numbers(1)
    assert next_of(reader.latestOffset(first, limit)) == 15
    soon = make_reader(store, minOffsetsPerTrigger=10, maxTriggerDelay="1ms")
    assert next_of(soon.latestOffset(first, limit)) == 15


def test_query_starts_at_time(store: StoreWriter) -> None:
    for _ in range(4):
        store.append_numbers(3)
    times = [row.timestamp() * 1000 for row in open_times(store)]
    reader = make_reader(store, startingTimestamp=int(times[4]))
    assert next_of(reader.initialOffset()) == 3
    assert next_of(make_reader(store, startingTimestamp=int(times[4]) + 1).initialOffset()) == 6
    after = {"startingTimestamp": json.dumps({"default": int(times[-1]) + 1})}
    with pytest.raises(OptionError, match="startingTimestamp"):
        make_reader(store, **after).initialOffset()
    latest = make_reader(store, **after, startingOffsetsByTimestampStrategy="latest")
    assert next_of(latest.initialOffset()) == 12
    until = make_batch_reader(store, startingTimestamp=0, endingTimestamp=int(times[4]))
    assert indexes(until, until.partitions()) == [0, 1, 2]
    assert indexes(until, make_batch_reader(store, endingTimestamp="2100-01-01").partitions()) == list(range(12))


def open_times(store: StoreWriter) -> list[Any]:
    from dledger_core import open_store

    with open_store(store.path) as reader:
        return list(reader.read(0, store.end).column("timestamp").to_pylist())


# --- losses ------------------------------------------------------------------------------------------------------


def consumed(store: StoreWriter) -> dict[str, Any]:
    """The checkpoint of a query that has read the whole store."""
    reader = make_reader(store, startingOffsets="earliest")
    return reader.latestOffset(reader.latestOffset(reader.initialOffset(), ALL), ALL)


def other_store(tmp_path: Path, bodies: int, **options: Any) -> StoreWriter:
    """The store at the same path after the first log was deleted."""
    shutil.rmtree(tmp_path / "default")
    writer = StoreWriter(tmp_path, **options)
    if bodies:
        writer.append_numbers(bodies, "other")
    return writer


@pytest.mark.parametrize(
    ("changes", "error", "said", "lost"),
    [
        ({"bodies": 20, "uuid": "log-2"}, LogRecreatedError, "log-1 up to index 10", 10),
        ({"bodies": 20, "uuid": "log-1"}, TermMismatchError, "entry 9 is not the one this query consumed", 1),
        ({"bodies": 20, "uuid": "log-1", "term": 2}, TermMismatchError, "entry 9 is not the one this query", 1),
        ({"bodies": 4, "uuid": "log-1"}, OffsetBeyondEndError, "entries [4, 10) (6 entries) are missing", 6),
    ],
)
def test_checkpoint_of_another_log_is_error_or_counted_warning(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    changes: dict[str, Any],
    error: type[DataLossError],
    said: str,
    lost: int,
) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        checkpoint = consumed(store)
    with other_store(tmp_path, **changes) as store:
        with pytest.raises(error) as caught:
            make_reader(store).latestOffset(checkpoint, ALL)
        assert str(caught.value).startswith(f"[{error.name}] ")
        assert said in str(caught.value)
        tolerant = make_reader(store, failOnDataLoss="false")
        with caplog.at_level(logging.WARNING, "spark_connector"):
            end = tolerant.latestOffset(checkpoint, ALL)
            assert next_of(tolerant.latestOffset(end, ALL)) == next_of(end) == max(10, store.end)
        assert (tolerant.tracker.policy.events, tolerant.tracker.policy.entries) == (1, lost)
        assert said in caplog.text


def test_query_waits_for_accepted_shorter_log_without_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        checkpoint = consumed(store)
    with other_store(tmp_path, bodies=4, uuid="log-1") as store:
        tolerant = make_reader(store, failOnDataLoss="false")
        at = tolerant.latestOffset(checkpoint, ALL)
        asked: list[int] = []
        bounds = tolerant.tracker.bounds
        monkeypatch.setattr(tolerant.tracker, "bounds", lambda: (asked.append(1), bounds())[1])
        for _ in range(5):
            assert tolerant.latestOffset(at, ALL) == at
        assert not asked, "nothing has grown"
        store.append_numbers(8, "other")
        end = at
        while next_of(end) == next_of(at):
            end = tolerant.latestOffset(end, ALL)
        assert indexes(tolerant, tolerant.partitions(at, end)) == [10, 11]
        assert tolerant.tracker.policy.entries == 7  # [4, 10), and entry 9 is another one than was consumed


def test_deleted_prefix_is_named_exactly(store: StoreWriter, caplog: pytest.LogCaptureFixture) -> None:
    store.append_numbers(4000)
    reader = make_reader(store, startingOffsets='{"default": 10}')
    begin = reader.latestOffset(reader.initialOffset(), ALL)
    first = delete_first_segments(store.path)
    assert first > 10
    with pytest.raises(RetentionError, match=rf"\[10, {first}\) \({first - 10} entries\)"):
        make_reader(store).latestOffset(begin, ALL)
    tolerant = make_reader(store, failOnDataLoss="false")
    end = tolerant.latestOffset(begin, ReadMaxRows(5))
    with caplog.at_level(logging.WARNING, "spark_connector"):
        partitions = tolerant.partitions(begin, end)
    rest = tolerant.partitions(end, tolerant.latestOffset(end, ALL))
    assert indexes(tolerant, partitions) + indexes(tolerant, rest) == list(range(first, 4000))
    assert (tolerant.tracker.policy.events, tolerant.tracker.policy.entries) == (1, first - 10)


def test_entries_deleted_between_plan_and_read(store: StoreWriter) -> None:
    store.append_numbers(4000)
    planned = make_batch_reader(store, minPartitions=1).partitions()
    first = delete_first_segments(store.path)
    with pytest.raises(RetentionError, match=rf"\[0, {first}\)"):
        indexes(make_batch_reader(store), planned)
    assert indexes(make_batch_reader(store, failOnDataLoss="false"), planned) == list(range(first, 4000))


def delete_first_segments(path: Path) -> int:
    """Delete the oldest data file and the index files below it, as retention does; returns the first index left."""
    from dledger_core import open_store

    oldest = sorted((path / "data").iterdir())[0]
    oldest.unlink()
    first = open_store(path).first_index
    for file in sorted((path / "index").iterdir()):
        if (int(file.name) + (1 << 12)) // 32 <= first:
            file.unlink()
    return open_store(path).first_index


def test_checkpoint_of_another_group_or_version_is_rejected(store: StoreWriter) -> None:
    store.append_numbers(3)
    checkpoint = consumed(store)
    foreign = {"groups": {"orders": checkpoint["groups"]["default"]}, "v": 1}
    with pytest.raises(GroupGoneError, match=r"\[DLEDGER_DATA_LOSS.GROUP_GONE\] group 'orders'"):
        make_reader(store).latestOffset(foreign, ALL)
    with pytest.raises(CheckpointError, match="version 2"):
        make_reader(store).latestOffset({**checkpoint, "v": 2}, ALL)


# --- batch reader ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, range(30)),
        ({"startingOffsets": '{"default": 5}', "endingOffsets": '{"default": 9}'}, range(5, 9)),
        ({"startingOffsets": '{"default": 30}'}, range(0)),
        ({"minPartitions": 7, "fetchMaxBytes": 100}, range(30)),
        ({"groups": "renamed"}, range(30)),
    ],
)
def test_batch_ranges(store: StoreWriter, options: dict[str, Any], expected: range) -> None:
    store.append_numbers(30)
    reader = make_batch_reader(store, **options)
    partitions = reader.partitions()
    assert len(partitions) == (min(options.get("minPartitions", 1), len(expected)))
    assert indexes(reader, partitions) == list(expected)
    assert all(isinstance(partition, RangesPartition) for partition in partitions)


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"startingOffsets": "latest"}, OptionError, "startingOffsets"),
        ({"endingOffsets": '{"default": -2}'}, OptionError, "endingOffsets"),
        (
            {"startingOffsets": '{"default": 5}', "endingOffsets": '{"default": 3}'},
            OptionError,
            "end 3",
        ),
        ({"startingOffsets": '{"default": 31}'}, OffsetBeyondEndError, "the log ends at 30"),
        ({"endingOffsets": '{"default": 31}'}, OffsetBeyondEndError, "the log ends at 30"),
    ],
)
def test_batch_bounds_that_do_not_fit(
    store: StoreWriter, options: dict[str, Any], error: type[Exception], said: str
) -> None:
    store.append_numbers(30)
    with pytest.raises(error) as caught:
        make_batch_reader(store, **options).partitions()
    assert said in str(caught.value)


def test_batches_have_exactly_schema_spark_checks(store: StoreWriter) -> None:
    for _ in range(60):
        store.append([b"x" * 50_000])
    reader = make_batch_reader(store, fetchMaxBytes=200_000, minPartitions=1)
    [part] = reader.partitions()
    batches = list(reader.read(part))
    assert len(batches) == 3
    assert all(1 << 20 <= batch.nbytes <= 8 << 20 for batch in batches[:-1])
    names = ["group", "index", "term", "position", "timestamp", "body"]
    kinds = [pa.string(), pa.int64(), pa.int64(), pa.int64(), pa.timestamp("us", tz="UTC"), pa.binary()]
    assert all((batch.schema.names, batch.schema.types) == (names, kinds) for batch in batches)
    assert pa.Table.from_batches(batches).column("body").to_pylist() == [b"x" * 50_000] * 60

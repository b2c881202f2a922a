"""The readers as plain objects, over a real store: Spark's calls in the orders Spark makes them."""

from __future__ import annotations

import copy
import json
import logging
import pickle
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pyspark.sql.streaming.datasource import ReadMaxBytes, ReadMaxRows

from dledger_core import LogRange, open_store
from dledger_core.client import EntryCheck, LogPosition, Loss, LossKind
from dledger_core.lineage import AncestorLog
from spark_connector.errors import (
    CheckpointError,
    DataLossError,
    GroupGoneError,
    LogRecreatedError,
    LossPolicy,
    OffsetBeyondEndError,
    OptionError,
    RetentionError,
    TermMismatchError,
)
from spark_connector.monitoring.lag import LagMeter
from spark_connector.offsets import GroupOffset, LogEnd, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.reading.logs import StoreLog
from spark_connector.reading.readers import DLedgerStreamReader
from tests.spark_connector.engine import (
    ALL,
    ONCE,
    Engine,
    indexes,
    make_batch_reader,
    make_reader,
    next_of,
    pin_batch,
    read_batch,
)
from tests.spark_connector.store_writer import StoreWriter


def append_times(store: StoreWriter) -> list[int]:
    """Milliseconds since the epoch, per entry."""
    with open_store(store.path) as reader:
        return [round(time.timestamp() * 1000) for time in reader.read(0, store.end).column("timestamp").to_pylist()]


def report_of(reader: DLedgerStreamReader) -> dict[str, Any]:
    report = reader.reportLatestOffset()
    assert report is not None
    assert json.loads(json.dumps(report)) == report
    return report


def count_requests(reader: DLedgerStreamReader, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that grows with each request for the ends of the logs."""
    asked: list[int] = []
    bounds = reader.tracker.bounds
    monkeypatch.setattr(reader.tracker, "bounds", lambda: (asked.append(1), bounds())[1])
    return asked


# --- offsets and micro-batches -----------------------------------------------------------------------------------


steps = st.lists(
    st.integers(1, 40)
    | st.sampled_from(["micro-batch", "crash", "restart", "available now", "crash in available now"]),
    max_size=25,
)
limits = st.sampled_from([{}, {"maxOffsetsPerTrigger": 7}, {"maxBytesPerTrigger": 300}, {"minOffsetsPerTrigger": 5}])


class Run:
    """One query over one store."""

    def __init__(self, store: StoreWriter, options: dict[str, Any]) -> None:
        self.store, self.options, self.engine = store, options, Engine()
        self.restart()

    def restart(self, *, available_now: bool = False) -> None:
        self.reader = make_reader(self.store, **self.options)
        if available_now:
            self.reader.prepareForTriggerAvailableNow()
        self.engine.limit = self.reader.getDefaultReadLimit()

    def drain(self, *, crash: bool = False) -> None:
        """Run until Spark would see that nothing is left."""
        self.restart(available_now=True)
        before = None
        while before != (before := (len(self.engine.offsets), self.engine.commits)):
            self.engine.start(self.reader, crash_before_commit=crash)
            if crash:
                return

    def do(self, step: Any) -> None:
        if isinstance(step, int):
            self.store.append_numbers(step)
            return
        if step in ("micro-batch", "crash"):
            self.engine.start(self.reader, crash_before_commit=step == "crash")
        elif step != "restart":
            self.drain(crash=step.startswith("crash"))
        if step != "micro-batch":
            self.restart()


@pytest.mark.slow
@pytest.mark.parametrize("starting", ["earliest", "latest", '{"default": 5}'])
@settings(max_examples=25, deadline=None)
@given(todo=steps, limit=limits)
@example(todo=["crash"], limit={})  # the replayed empty first micro-batch does not end a run with AvailableNow
def test_every_entry_once_and_in_order(starting: str, todo: list[Any], limit: dict[str, Any]) -> None:
    with tempfile.TemporaryDirectory() as directory, StoreWriter(Path(directory)) as store:
        store.append_numbers(10)
        run = Run(store, {"startingOffsets": starting, **limit})
        for step in todo:
            run.do(step)
        store.append_numbers(3)
        run.drain()
        begin = next_of(run.engine.offsets[0])
        assert run.engine.read == list(range(begin, store.end))
        assert begin == {"earliest": 0, '{"default": 5}': 5}.get(starting, max(begin, 10))


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("starting", [None, "earliest"])
def test_entries_appended_between_first_calls_are_read(store: StoreWriter, starting: str | None, crash: bool) -> None:
    store.append_numbers(10)
    engine, reader = Engine(), make_reader(store, startingOffsets=starting)
    first = 0 if starting else 10
    assert next_of(reader.initialOffset()) == first
    store.append_numbers(5)
    assert next_of(pin_batch(reader)) == first
    reader = make_reader(store, startingOffsets=starting)
    engine.start(reader, crash_before_commit=crash)
    if crash:
        store.append_numbers(5)
        reader = make_reader(store, startingOffsets=starting)
    engine.run(reader, 2)
    assert engine.read == list(range(0 if starting else 15, store.end))


def test_available_now_reads_to_end_at_its_start_in_bounded_batches(store: StoreWriter) -> None:
    store.append_numbers(25)
    engine, reader = Engine(ReadMaxRows(10)), make_reader(store, maxOffsetsPerTrigger=10)
    assert reader.getDefaultReadLimit() == ReadMaxRows(10)
    reader.prepareForTriggerAvailableNow()
    store.append_numbers(5)
    engine.run(reader, 6)
    assert engine.read == list(range(25))
    assert list(map(next_of, engine.offsets)) == [0, 10, 20, 25]


@pytest.mark.parametrize("crash", [False, True])
@pytest.mark.parametrize("starting", ["earliest", "latest"])
def test_once_reads_to_end_at_its_start_in_one_batch(store: StoreWriter, starting: str, crash: bool) -> None:
    store.append_numbers(25)
    engine, options = Engine(ONCE), {"startingOffsets": starting, "maxOffsetsPerTrigger": 10}
    reader = make_reader(store, **options)
    reader.initialOffset()
    store.append_numbers(5)
    engine.start(reader, crash_before_commit=crash)
    assert list(map(next_of, engine.offsets)) == [25]
    for _ in range(3):
        engine.start(make_reader(store, **options))
    assert list(map(next_of, engine.offsets)) == [25, 30]
    assert engine.read == list(range(0 if starting == "earliest" else 25, 30))


def test_reader_of_spark_4_1_starts_where_it_was(store: StoreWriter) -> None:
    """Spark 4.1 passes no start and no limit; a restarted query plans an empty range at its last offset first."""
    store.append_numbers(25)
    last = make_reader(store).latestOffset(pin_batch(make_reader(store)), ReadMaxRows(7))
    reader = make_reader(store, maxOffsetsPerTrigger=10)
    assert reader.partitions(last, last) == []
    assert [next_of(reader.latestOffset()) for _ in range(3)] == [17, 25, 25]


def test_reader_of_spark_4_1_reads_an_available_now_run_to_its_end(store: StoreWriter) -> None:
    """Spark 4.1 asks for the end before it asks for the start, and an AvailableNow run ends there."""
    store.append_numbers(25)
    reader = make_reader(store, maxOffsetsPerTrigger=10)
    end = reader.latestOffset()
    assert next_of(end) == 25
    store.append_numbers(15)
    parts = reader.partitions(reader.initialOffset(), end)
    assert sum(batch.num_rows for part in parts for batch in reader.read(part)) == 25
    assert [next_of(reader.latestOffset()) for _ in range(3)] == [35, 40, 40], "with limits, if the query continues"


def test_limits_have_the_names_of_spark_where_it_has_none() -> None:
    code = """
import importlib.util
find = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "pyspark.sql.streaming.datasource" else find(name, *rest)
from spark_connector.reading import admission
assert not admission.PASSES_START
from spark_connector.reading.readers import DLedgerStreamReader
limits = [admission.ReadMaxRows(1), admission.ReadMaxBytes(2), admission.ReadMinRows(3), admission.ReadAllAvailable()]
assert all(isinstance(each, admission.ReadLimit) for each in limits)
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_offsets_never_decrease_and_idle_query_repeats_offset(store: StoreWriter) -> None:
    store.append_numbers(5)
    reader = make_reader(store)
    end = reader.latestOffset(pin_batch(reader), ALL)
    assert next_of(end) == 5
    assert json.dumps(reader.latestOffset(end, ALL)) == json.dumps(end)
    reader.prepareForTriggerAvailableNow()
    store.append_numbers(5)
    beyond = make_reader(store).latestOffset(end, ALL)
    assert next_of(reader.latestOffset(beyond, ALL)) == next_of(report_of(reader)) == 10


def test_explicit_index_starts_query(store: StoreWriter) -> None:
    store.append_numbers(9)
    engine = Engine()
    engine.run(make_reader(store, startingOffsets='{"default": 4}'), 2)
    assert json.loads(engine.offsets[0])["groups"]["default"]["term"] == 1
    assert engine.read == [4, 5, 6, 7, 8]
    with pytest.raises(OffsetBeyondEndError) as caught:
        make_reader(store, startingOffsets='{"default": 40}').initialOffset()
    assert (caught.value.start, caught.value.end) == (9, 40)


def test_query_starts_and_ends_at_time(store: StoreWriter) -> None:
    for _ in range(4):
        store.append_numbers(3)
    times = append_times(store)

    def start(moment: Any, **options: str) -> int:
        return next_of(make_reader(store, startingTimestamp=moment, **options).initialOffset())

    assert (start(times[4]), start(times[4] + 1)) == (3, 6)
    after = json.dumps({"default": times[-1] + 1})
    with pytest.raises(OptionError, match="startingTimestamp"):
        start(after)
    assert start(after, startingOffsetsByTimestampStrategy="latest") == 12
    assert read_batch(make_batch_reader(store, startingTimestamp=0, endingTimestamp=times[4])) == [0, 1, 2]
    assert read_batch(make_batch_reader(store, endingTimestamp="2100-01-01")) == list(range(12))


# --- limits ------------------------------------------------------------------------------------------------------


def test_limit_of_bytes_is_exact_and_one_entry_always_fits(store: StoreWriter) -> None:
    store.append([b"x" * 52] * 10 + [b"y" * 952] + [b"x" * 52] * 10)
    engine, reader = Engine(ReadMaxBytes(350)), make_reader(store, maxBytesPerTrigger=350)
    assert reader.getDefaultReadLimit() == ReadMaxBytes(350)
    engine.run(reader, 12)
    assert engine.read == list(range(21))
    assert list(map(next_of, engine.offsets)) == [0, 3, 6, 9, 10, 11, 14, 17, 20, 21]


@pytest.mark.parametrize(("entries", "nbytes", "expected"), [(4, 350, 3), (2, 350, 2), (2, 1, 1)])
def test_whichever_limit_comes_first(store: StoreWriter, entries: int, nbytes: int, expected: int) -> None:
    store.append([b"x" * 52] * 10)
    reader = make_reader(store, maxOffsetsPerTrigger=entries, maxBytesPerTrigger=nbytes)
    begin = pin_batch(reader)
    assert next_of(reader.latestOffset(begin, reader.getDefaultReadLimit())) == expected
    assert next_of(reader.latestOffset(begin, ONCE)) == 10


def test_minimum_of_entries_delays_micro_batch(store: StoreWriter) -> None:
    store.append_numbers(5)
    reader = make_reader(store, minOffsetsPerTrigger=10, maxTriggerDelay="1h")
    limit = reader.getDefaultReadLimit()
    first = reader.latestOffset(pin_batch(reader), limit)
    assert next_of(first) == 5
    store.append_numbers(9)
    assert reader.latestOffset(first, limit) == first
    store.append_numbers(1)
    assert next_of(reader.latestOffset(first, limit)) == 15
    soon = make_reader(store, minOffsetsPerTrigger=10, maxTriggerDelay="1ms")
    assert next_of(soon.latestOffset(first, limit)) == 15


# --- the end of a stream -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [ALL, ReadMaxRows(4)])
@pytest.mark.parametrize("available_now", [False, True])
def test_stream_stops_at_ending_index(store: StoreWriter, limit: Any, available_now: bool) -> None:
    store.append_numbers(10)
    engine = Engine(limit)
    for end in (7, 12):
        reader = make_reader(store, endingOffsets=json.dumps({"default": end}))
        if available_now:
            reader.prepareForTriggerAvailableNow()
        engine.run(reader, 6)
        store.append_numbers(10)
        engine.run(reader, 3)
    assert engine.read == list(range(12))
    engine.run(make_reader(store), 6)
    assert engine.read == list(range(store.end))


def test_stream_stops_at_ending_time_once_log_reaches_it(store: StoreWriter) -> None:
    store.append_numbers(3)
    store.append_numbers(3)
    first, second = sorted(set(append_times(store)))
    engine, reader = Engine(), make_reader(store, endingTimestamp=2 * second - first + 1)
    engine.run(reader, 3)
    assert engine.read == list(range(6)), "not there yet"
    for _ in range(3):
        store.append_numbers(2)
    assert append_times(store)[6] == 2 * second - first, "appended at the same rate"
    engine.run(reader, 4)
    assert engine.read == list(range(8))
    engine.start(make_reader(store, endingTimestamp=json.dumps({"default": second})))
    assert engine.read == list(range(8)), "an end before the checkpoint reads nothing"


def test_stream_at_its_end_neither_polls_nor_lags(store: StoreWriter, monkeypatch: pytest.MonkeyPatch) -> None:
    store.append_numbers(10)
    reader = make_reader(store, endingOffsets='{"default": 4}')
    at = reader.latestOffset(pin_batch(reader), ALL)
    asked = count_requests(reader, monkeypatch)
    assert [reader.latestOffset(at, ALL) for _ in range(20)] == [at] * 20
    assert not asked
    assert next_of(at) == next_of(report_of(reader)) == 4


@pytest.mark.parametrize("end", ["latest", "earliest", '{"default": -1}', '{"default": "earliest"}'])
def test_word_is_rejected_as_end_of_stream(store: StoreWriter, end: str) -> None:
    with pytest.raises(OptionError, match="endingOffsets"):
        make_reader(store, endingOffsets=end)


def test_end_before_start_is_rejected(store: StoreWriter) -> None:
    store.append_numbers(10)
    for options in (
        {"startingOffsets": '{"default": 6}', "endingOffsets": '{"default": 5}'},
        {"startingOffsets": "latest", "endingTimestamp": append_times(store)[0]},
    ):
        with pytest.raises(OptionError):
            make_reader(store, **options).initialOffset()


# --- losses ------------------------------------------------------------------------------------------------------


CHAIN = (AncestorLog("aa", 39, 3, None),)


def recreated(view: LogRange) -> Loss:
    return Loss(LossKind.LOG_RECREATED, LogPosition(50, "aa", 3, 255), view)


@pytest.mark.parametrize(
    ("error", "code", "start", "end", "resume"),
    [
        (RetentionError.of("g", 1200, 1874), "RETENTION", 1200, 1874, 1874),
        (RetentionError.of("g", 1200, 1874, 1300), "RETENTION", 1200, 1300, 1874),
        (LogRecreatedError.of("g", recreated(LogRange(0, 9, 8, "bb"))), "LOG_RECREATED", 50, 50, 0),
        (LogRecreatedError.of("g", recreated(LogRange(2, 90, 8, "bb")), 70), "LOG_RECREATED", 50, 70, 2),
        (LogRecreatedError.of("g", recreated(LogRange(2, 90, 8, "bb", CHAIN)), 70), "LOG_RECREATED", 50, 70, 40),
        (TermMismatchError.of("g", 50, EntryCheck(3, 255), EntryCheck(4, 16), 2), "TERM_MISMATCH", 49, 50, 2),
        (OffsetBeyondEndError.of("g", 50, 9), "OFFSET_BEYOND_END", 9, 50, 9),
        (GroupGoneError.of("g", 50, ["other"]), "GROUP_GONE", 50, 50, 50),
    ],
)
def test_loss_has_code_range_and_resume_index(
    error: DataLossError, code: str, start: int, end: int, resume: int
) -> None:
    text = str(error)
    assert text.startswith(f"[DLEDGER_DATA_LOSS.{code}] group 'g': ")
    assert f'startingOffsets={{"g": {resume}}}' in text
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy), copy.values) == (type(error), text, {"start": start, "end": end})


def consumed(store: StoreWriter) -> dict[str, Any]:
    """The offset of a query that has read the whole store."""
    reader = make_reader(store)
    return reader.latestOffset(pin_batch(reader), ALL)


def other_store(directory: Path, *, bodies: int, uuid: str = "log-1", term: int = 1) -> StoreWriter:
    """Replace the store in a directory."""
    shutil.rmtree(directory / "default")
    writer = StoreWriter(directory, uuid=uuid, term=term)
    writer.append_numbers(bodies, "other")
    return writer


@pytest.mark.parametrize(
    ("changes", "error", "lost"),
    [
        ({"bodies": 20, "uuid": "log-2"}, LogRecreatedError, range(10, 10)),
        ({"bodies": 20}, TermMismatchError, range(9, 10)),
        ({"bodies": 20, "term": 2}, TermMismatchError, range(9, 10)),
        ({"bodies": 4}, OffsetBeyondEndError, range(4, 10)),
    ],
)
def test_checkpoint_of_another_log_is_error_or_counted_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, changes: dict[str, Any], error: type[DataLossError], lost: range
) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        checkpoint = consumed(store)
    with other_store(tmp_path, **changes) as store:
        with pytest.raises(error) as caught:
            make_reader(store).latestOffset(checkpoint, ALL)
        assert (caught.value.start, caught.value.end) == (lost.start, lost.stop)
        tolerant = make_reader(store, failOnDataLoss="false")
        with caplog.at_level(logging.WARNING, "spark_connector"):
            end = tolerant.latestOffset(checkpoint, ALL)
            assert next_of(tolerant.latestOffset(end, ALL)) == next_of(end) == max(10, store.end)
        read = indexes(tolerant, tolerant.partitions(checkpoint, end))
        assert read == list(range(0 if error is LogRecreatedError else 10, store.end))
        assert report_of(tolerant)["losses"] == {"events": 1, "entries": len(lost)}
        assert error.name in caplog.text


def test_offset_of_another_log_is_no_start_unless_loss_is_accepted(tmp_path: Path) -> None:
    file = tmp_path / "offset"
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        file.write_text(json.dumps(consumed(store)))
        assert read_batch(make_batch_reader(store, startingOffsets=f"@{file}")) == []
        store.append_numbers(2)
        assert read_batch(make_batch_reader(store, startingOffsets=f"@{file}")) == [10, 11]
    with other_store(tmp_path, bodies=15, uuid="log-2") as store:
        for start in (f"@{file}", file.read_text()):
            with pytest.raises(LogRecreatedError):
                make_batch_reader(store, startingOffsets=start).partitions()
            with pytest.raises(LogRecreatedError):
                make_reader(store, startingOffsets=start).initialOffset()
            tolerant = {"startingOffsets": start, "failOnDataLoss": "false"}
            assert read_batch(make_batch_reader(store, **tolerant)) == list(range(15))
            assert next_of(make_reader(store, **tolerant).initialOffset()) == 0


@pytest.mark.parametrize("bodies", [4, 30])
def test_recreated_log_is_read_from_first_entry_in_bounded_batches(tmp_path: Path, bodies: int) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        checkpoint = consumed(store)
        tolerant = make_reader(store, failOnDataLoss="false")
        tolerant.latestOffset(checkpoint, ALL)
        store.append_numbers(7)
        assert tolerant.tracker.bounds()["default"].end == 17  # seen, and never read
    with other_store(tmp_path, bodies=bodies, uuid="log-2") as store:
        found, at = list[int](), checkpoint
        for _ in range(5):
            end = tolerant.latestOffset(at, ReadMaxRows(8))
            restarted = make_reader(store, failOnDataLoss="false")
            planned = tolerant.partitions(at, end)
            assert indexes(restarted, restarted.partitions(at, end)) == indexes(tolerant, planned), "replayed"
            found, at = found + indexes(tolerant, planned), end
        assert found == list(range(bodies))
        assert report_of(tolerant)["losses"] == {"events": 1, "entries": 7}


def test_replay_in_former_log_is_one_loss(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        reader = make_reader(store)
        begin = reader.latestOffset(pin_batch(reader), ReadMaxRows(6))
        end = reader.latestOffset(begin, ALL)
    with other_store(tmp_path, bodies=4, uuid="log-2") as store:
        with pytest.raises(LogRecreatedError):
            make_reader(store).partitions(begin, end)
        tolerant = make_reader(store, failOnDataLoss="false")
        for _ in range(2):
            assert tolerant.partitions(begin, end) == []
        following = tolerant.latestOffset(end, ALL)
        assert indexes(tolerant, tolerant.partitions(end, following)) == [0, 1, 2, 3]
        assert (tolerant.tracker.policy.events, tolerant.tracker.policy.entries) == (1, 4)


def test_lost_end_is_reported_once_and_asked_for_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        reader = make_reader(store)
        begin = reader.latestOffset(pin_batch(reader), ReadMaxRows(6))
        end = reader.latestOffset(begin, ALL)
    with other_store(tmp_path, bodies=4) as store:
        tolerant = make_reader(store, failOnDataLoss="false")
        asked: list[int] = []
        bounds = StoreLog.bounds

        def counted(log: StoreLog, min_end: int = -1, wait_ms: int = 0) -> LogRange:
            asked.append(min_end)
            return bounds(log, min_end, wait_ms)

        monkeypatch.setattr(StoreLog, "bounds", counted)
        for _ in range(2):
            assert tolerant.partitions(begin, end) == []
        assert [index for index in asked if index >= 0] == [10]
        assert (tolerant.tracker.policy.events, tolerant.tracker.policy.entries) == (1, 6)


def test_query_waits_for_accepted_shorter_log_without_requests(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        checkpoint = consumed(store)
    with other_store(tmp_path, bodies=4) as store:
        tolerant = make_reader(store, failOnDataLoss="false")
        at = tolerant.latestOffset(checkpoint, ALL)
        asked = count_requests(tolerant, monkeypatch)
        assert [tolerant.latestOffset(at, ALL) for _ in range(5)] == [at] * 5
        assert not asked, "nothing has grown"
        store.append_numbers(8, "other")
        end = at
        while next_of(end) == next_of(at):
            end = tolerant.latestOffset(end, ALL)
        assert indexes(tolerant, tolerant.partitions(at, end)) == [10, 11]
        assert report_of(tolerant)["losses"]["entries"] == 7  # [4, 10), and entry 9 is another one than was consumed


def test_copies_of_a_checkpoint_read_all_entries_after_the_copy(store: StoreWriter) -> None:
    store.append_numbers(10)
    first = Engine()
    first.run(make_reader(store), 2)
    second = copy.deepcopy(first)
    store.append_numbers(7)
    first.start(make_reader(store))
    store.append_numbers(3)
    for query in (first, second):
        query.start(make_reader(store))
        assert query.read == list(range(20))


def delete_first_segments(path: Path) -> int:
    """Delete the oldest data file and the index files below it, as retention does; return the new first index."""
    sorted((path / "data").iterdir())[0].unlink()
    first = open_store(path).first_index
    for file in sorted((path / "index").iterdir()):
        if (int(file.name) + (1 << 12)) // 32 <= first:
            file.unlink()
    return open_store(path).first_index


def test_deleted_prefix_is_error_or_counted(store: StoreWriter) -> None:
    store.append_numbers(4000)
    begin = pin_batch(make_reader(store, startingOffsets='{"default": 10}'))
    first = delete_first_segments(store.path)
    assert first > 10
    with pytest.raises(RetentionError) as caught:
        make_reader(store).latestOffset(begin, ALL)
    assert (caught.value.start, caught.value.end) == (10, first)
    tolerant = make_reader(store, failOnDataLoss="false")
    end = tolerant.latestOffset(begin, ReadMaxRows(5))
    found = indexes(tolerant, tolerant.partitions(begin, end))
    found += indexes(tolerant, tolerant.partitions(end, tolerant.latestOffset(end, ALL)))
    assert found == list(range(first, 4000))
    assert report_of(tolerant)["losses"] == {"events": 1, "entries": first - 10}


def test_entries_deleted_between_plan_and_read(store: StoreWriter) -> None:
    store.append_numbers(4000)
    planned = make_batch_reader(store, minPartitions=1).partitions()
    first = delete_first_segments(store.path)
    with pytest.raises(RetentionError) as caught:
        indexes(make_batch_reader(store), planned)
    assert (caught.value.start, caught.value.end) == (0, first)
    assert indexes(make_batch_reader(store, failOnDataLoss="false"), planned) == list(range(first, 4000))


def test_checkpoint_of_another_group_or_version_is_rejected(store: StoreWriter) -> None:
    store.append_numbers(3)
    checkpoint = consumed(store)
    foreign = {"groups": {"orders": checkpoint["groups"]["default"]}, "v": 1}
    with pytest.raises(GroupGoneError):
        make_reader(store).latestOffset(foreign, ALL)
    with pytest.raises(CheckpointError):
        make_reader(store).latestOffset({**checkpoint, "v": 2}, ALL)


# --- the lag that a stream reports to Spark ----------------------------------------------------------------------


def test_lag_shrinks_with_each_micro_batch_to_nothing(store: StoreWriter) -> None:
    store.append_numbers(10)
    reader, at = make_reader(store), None
    assert reader.reportLatestOffset() is None
    found = []
    for _ in range(4):  # the first one is the pin batch
        at = reader.latestOffset(at or reader.initialOffset(), ReadMaxRows(4))
        found.append(report_of(reader)["groups"]["default"]["behind"])
    assert [lag["records"] for lag in found] == [10, 6, 2, 0]
    assert [lag["bytes"] for lag in found] == [lag["records"] * (48 + len(b"body-0")) for lag in found]
    assert found[0]["seconds"] > 86_400
    assert found[-1]["seconds"] == 0.0


def test_control_entries_at_end_are_no_lag(store: StoreWriter) -> None:
    store.append_numbers(4)
    reader = make_reader(store)
    at = pin_batch(reader)
    store.append([], noop=True)
    at = reader.latestOffset(at, ReadMaxRows(4))
    assert (next_of(at), store.end) == (4, 5)
    assert report_of(reader)["groups"]["default"]["behind"] == {"bytes": 0, "records": 0, "seconds": 0.0}
    store.append([b"new"])
    reader.latestOffset(at, ReadMaxRows(1))
    assert report_of(reader)["groups"]["default"]["behind"]["records"] == 1


@pytest.mark.parametrize(("at", "lag"), [(3, LogEnd(9, "log-1")), (9, LogEnd(9, "log-1", 0, 0, 0.0))])
def test_lag_is_unknown_while_nodes_are_unreachable(at: int, lag: LogEnd) -> None:
    given = {"peers": "n0-127.0.0.1:1", "fetchTimeoutMs": "200", "fetchRetryMs": "200"}
    meter = LagMeter(DLedgerOptions.for_reading(given))
    bounds = {"default": LogRange(0, 9, 8, "log-1")}
    report = meter.report(StreamOffset({"default": GroupOffset(at)}), bounds, LossPolicy(fail=True))
    assert report.groups == {"default": lag}


def test_lag_of_new_group_counts_from_first_entry(store: StoreWriter) -> None:
    store.append_numbers(3)
    meter = LagMeter(DLedgerOptions.for_reading({"path": str(store.path)}))
    report = meter.report(StreamOffset({}), {"default": LogRange(0, 3, -1, "log-1")}, LossPolicy(fail=True))
    assert report.groups["default"].records == 3


def test_entries_after_open_transaction_are_lag_and_name_it(store: StoreWriter) -> None:
    store.append_numbers(4)
    reader = make_reader(store)
    at = reader.latestOffset(pin_batch(reader), ALL)
    part = store.append_attempt(3, batch=5)
    store.append_numbers(115)
    reader = make_reader(store)
    assert reader.latestOffset(at, ALL) == at
    found = report_of(reader)
    shown = found["groups"]["default"]
    assert (shown["next"], shown["behind"]["records"], shown["waiting"]["records"]) == (4, 119, 119)
    assert shown["behind"]["bytes"] > 119 * 48
    assert shown["behind"]["seconds"] > 86_400
    assert shown["waiting"]["transaction"] == "query q, micro-batch 5, run r1"
    assert found["metrics"] == {
        "avgOffsetsBehindLatest": "119.0",
        "maxOffsetsBehindLatest": "119",
        "minOffsetsBehindLatest": "119",
    }
    store.commit(part, batch=5)
    at = reader.latestOffset(at, ReadMaxRows(100))
    shown = report_of(reader)["groups"]["default"]
    assert shown["behind"]["records"] == store.end - next_of(at) == 20
    assert "waiting" not in shown


def test_idle_query_finds_entries_that_wait_for_open_transaction(store: StoreWriter) -> None:
    store.append_numbers(4)
    now = 0.0
    meter = LagMeter(DLedgerOptions.for_reading({"path": str(store.path)}), clock=lambda: now)
    at, bounds = StreamOffset({"default": GroupOffset(4)}), {"default": LogRange(0, 4, 3, "log-1")}
    found = []
    for number in range(3):
        if number == 1:
            store.append_attempt(6, batch=5)
        report = meter.report(at, bounds, LossPolicy(fail=True)).groups["default"]
        found.append((report.end, report.records, report.waiting))
        now += 11
    assert found == [(4, 0, 0), (4, 7, 7), (4, 7, 7)]


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
    assert len(reader.partitions()) == min(options.get("minPartitions", 1), len(expected))
    assert read_batch(reader) == list(expected)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"startingOffsets": "latest"}, OptionError),
        ({"endingOffsets": '{"default": -2}'}, OptionError),
        ({"startingOffsets": '{"default": 5}', "endingOffsets": '{"default": 3}'}, OptionError),
        ({"startingOffsets": '{"default": 31}'}, OffsetBeyondEndError),
        ({"endingOffsets": '{"default": 31}'}, OffsetBeyondEndError),
    ],
)
def test_batch_bounds_that_do_not_fit(store: StoreWriter, options: dict[str, Any], error: type[Exception]) -> None:
    store.append_numbers(30)
    with pytest.raises(error):
        make_batch_reader(store, **options).partitions()


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"startingOffsets": '{"default": 31}'}, range(0)),
        ({"endingOffsets": '{"default": 40}'}, range(30)),
        ({"startingOffsets": '{"default": 35}', "endingOffsets": '{"default": 40}'}, range(0)),
    ],
)
def test_batch_counts_lost_end_once_if_loss_is_accepted(
    store: StoreWriter, caplog: pytest.LogCaptureFixture, options: dict[str, Any], expected: range
) -> None:
    store.append_numbers(30)
    with caplog.at_level(logging.WARNING, "spark_connector"):
        assert read_batch(make_batch_reader(store, failOnDataLoss="false", **options)) == list(expected)
    assert caplog.text.count(OffsetBeyondEndError.name) == 1


def test_batches_have_size_and_schema_that_spark_checks(store: StoreWriter) -> None:
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

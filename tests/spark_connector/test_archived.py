"""Archive and log read as one log: readers as Spark calls them, over a leader in memory and a table on disk."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyspark.sql.datasource import GreaterThanOrEqual, LessThan

from dledger_core import rows_digest
from dledger_core.archive import ArchiveTable
from dledger_core.lineage import AncestorLog
from spark_connector.errors import (
    ArchiveDamagedError,
    ArchiveTableError,
    LogRecreatedError,
    OptionError,
    RetentionError,
    TermMismatchError,
)
from spark_connector.offsets import GroupOffset, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.reading import logs
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader, FilteredBatchReader
from tests.spark_connector.engine import Engine, indexes, next_of, pin_batch
from tests.support.archived_log import CONTROLS, GROUP, UUID, ArchivedGroup, append, delete, entry, new_table, overwrite
from tests.support.object_store import KEY, SECRET, bucket_on_loopback
from tests.test_guides import blocks

GUIDE = Path(__file__).parents[2] / "spark_connector" / "HISTORY.md"
ROWS = [index for index in range(300) if index not in CONTROLS]


@pytest.fixture
def table(tmp_path: Path) -> str:
    """A table with all rows of a log of 300 entries."""
    return new_table(tmp_path / "table", ArchivedGroup())


@pytest.fixture
def log(table: str, monkeypatch: pytest.MonkeyPatch) -> ArchivedGroup:
    """The log, archived up to 300, of which the servers have the entries from 250 on."""
    found = ArchivedGroup()
    archive = ArchiveTable(table)
    for start in range(0, 300, 100):
        found.prove_archived(start, start + 100, rows_digest(archive.rows(GROUP, start, start + 100)), table=table)
    found.first_index = 250
    monkeypatch.setattr(logs, "client_for", lambda *_, **__: found)
    return found


def options(**more: Any) -> DLedgerOptions:
    given = {"peers": "127.0.0.1:1", "groups": GROUP, "archive": "true", "pollMs": "1", "startingOffsets": "earliest"}
    return DLedgerOptions.for_reading({**given, **{name: str(value) for name, value in more.items()}})


def read_rows(reader: Any) -> list[dict[str, Any]]:
    executor = pickle.loads(pickle.dumps(reader))
    found = [batch for partition in reader.partitions() for batch in executor.read(partition)]
    return pa.Table.from_batches(found).to_pylist() if found else []


@pytest.mark.parametrize("more", [{}, {"minPartitions": 7}, {"maxRecordsPerPartition": 23}, {"fetchMaxBytes": 400}])
def test_batch_returns_every_entry_once_and_in_order(log: ArchivedGroup, more: dict[str, Any]) -> None:
    rows = read_rows(DLedgerBatchReader(options(**more)))
    assert [row["index"] for row in rows] == ROWS
    assert [row["body"] for row in rows] == [entry(index)["body"] for index in ROWS]
    assert [row["timestamp"] is None for row in rows] == [index % 7 == 0 for index in ROWS]


@pytest.mark.parametrize(("start", "end"), [(30, 70), (30, 260), (99, 101), (240, 250), (249, 251), (250, 300), (0, 1)])
def test_bounds_within_ranges_are_exact(log: ArchivedGroup, start: int, end: int) -> None:
    bounds = {"startingOffsets": json.dumps({GROUP: start}), "endingOffsets": json.dumps({GROUP: end})}
    rows = read_rows(DLedgerBatchReader(options(**bounds)))
    assert [row["index"] for row in rows] == [index for index in ROWS if start <= index < end]


@pytest.mark.parametrize(
    "limit", [{}, {"maxOffsetsPerTrigger": 7}, {"maxOffsetsPerTrigger": 130}, {"maxBytesPerTrigger": 7000}]
)
def test_stream_reads_all_and_ends_micro_batches_at_range_ends(log: ArchivedGroup, limit: dict[str, Any]) -> None:
    engine, reader = Engine(), DLedgerStreamReader(options(**limit))
    engine.limit = reader.getDefaultReadLimit()
    engine.run(reader, 30)
    assert engine.read == ROWS
    ends = [next_of(offset, GROUP) for offset in engine.offsets]
    assert {end for end in ends if end < log.first_index} <= {0, 100, 200}
    assert ends[-1] == 300
    if "maxOffsetsPerTrigger" in limit:
        assert 100 in ends


def test_task_reads_entries_that_were_trimmed_after_the_plan(log: ArchivedGroup) -> None:
    log.first_index = 0
    reader = DLedgerBatchReader(options(minPartitions=3))
    planned = reader.partitions()
    log.first_index = 280
    assert indexes(reader, planned) == ROWS


@pytest.mark.parametrize("node_hangs", [False, True])
@pytest.mark.parametrize("step", ["records", "split_points"])
def test_entries_trimmed_while_they_are_planned_are_read(log: ArchivedGroup, step: str, node_hangs: bool) -> None:
    log.first_index, log.node_hangs = 50, node_hangs
    log.trim_before(step, 280)
    reader = DLedgerBatchReader(options(minPartitions=3))
    assert indexes(reader, reader.partitions()) == ROWS


@pytest.mark.parametrize("trimmed_at", [0, 50])
def test_trimmed_entries_are_read_while_a_node_hangs(
    log: ArchivedGroup, monkeypatch: pytest.MonkeyPatch, trimmed_at: int
) -> None:
    log.node_hangs, log.first_index = True, 0 if trimmed_at else 280
    reader, fetch = DLedgerBatchReader(options(minPartitions=3)), log.fetch

    def trimming(start: int, end: int, **more: Any) -> Any:
        if trimmed_at <= start < 280:
            log.first_index = 280
        return fetch(start, end, **more)

    monkeypatch.setattr(log, "fetch", trimming)
    assert indexes(reader, reader.partitions()) == ROWS


def test_task_reads_on_from_newest_version_after_vacuum(log: ArchivedGroup, table: str) -> None:
    reader = DLedgerBatchReader(options(fetchMaxBytes=400))
    [partition] = reader.partitions()
    rows = reader.read(partition)
    first = next(rows)
    DeltaTable(table).optimize.compact()
    DeltaTable(table).vacuum(0, dry_run=False, enforce_retention_duration=False)
    found = [
        *first.column("index").to_pylist(),
        *(index for batch in rows for index in batch.column("index").to_pylist()),
    ]
    assert found == ROWS


@pytest.mark.parametrize(
    "change",
    [
        lambda path, log: delete(path, '"index" = 142'),
        lambda path, log: overwrite(path, [one | {"term": 9} for one in log.entries(0, 300)]),
        lambda path, log: DeltaTable(path).restore(0),
    ],
    ids=["a row deleted", "another log", "RESTORE"],
)
def test_range_that_is_not_the_proven_one_is_an_error_and_never_a_row(
    log: ArchivedGroup, table: str, change: Any
) -> None:
    change(table, log)
    bounds = {"startingOffsets": json.dumps({GROUP: 120}), "endingOffsets": json.dumps({GROUP: 130})}
    with pytest.raises(ArchiveDamagedError) as caught:
        read_rows(DLedgerBatchReader(options(**bounds)))
    assert (caught.value.values["start"], caught.value.values["end"]) == (100, 200)
    assert table in caught.value.where


def test_location_of_the_option_overrides_that_of_the_log(log: ArchivedGroup, table: str, tmp_path: Path) -> None:
    moved = Path(table).rename(tmp_path / "moved")
    assert len(read_rows(DLedgerBatchReader(options(archive=str(moved))))) == len(ROWS)


@pytest.mark.parametrize("index", [1, 100, 101, 150, 250, 299])
def test_offset_of_an_old_checkpoint_is_accepted_in_the_archive(log: ArchivedGroup, index: int) -> None:
    check = log.check_at(index - 1)
    start = {"groups": {GROUP: {"next": index, "log": UUID, "term": check.term, "check": check.check}}, "v": 1}
    reader = DLedgerStreamReader(options())
    end = reader.latestOffset(start, reader.getDefaultReadLimit())
    assert indexes(reader, reader.partitions(start, end)) == [each for each in ROWS if each >= index]


def test_offset_of_a_continued_log_is_accepted_and_of_another_not(log: ArchivedGroup) -> None:
    def planned(index: int, uuid: str, check: int = 7) -> Any:
        reader = DLedgerStreamReader(options())
        start = StreamOffset({GROUP: GroupOffset(index, uuid, 1, check)}).to_json()
        return reader.latestOffset(start, reader.getDefaultReadLimit())

    with pytest.raises(LogRecreatedError):
        planned(50, "another")
    log.chain = (AncestorLog("another", 120, 1, 5),)
    assert next_of(planned(50, "another"), GROUP) == 300
    with pytest.raises(LogRecreatedError):
        planned(150, "another")
    with pytest.raises(TermMismatchError):  # at the end of a range the log has recorded the check
        planned(100, UUID)


def test_start_and_end_by_time_are_exact_in_the_archive(log: ArchivedGroup) -> None:
    at = {index: entry(index)["timestamp"] // 1000 for index in (120, 240)}
    rows = read_rows(DLedgerBatchReader(options(startingTimestamp=at[120], endingTimestamp=at[240])))
    assert [row["index"] for row in rows] == list(range(120, 240))


@pytest.mark.parametrize("index", [60, 120, 240, 285])
def test_time_is_exact_where_one_node_has_trimmed_more(log: ArchivedGroup, index: int) -> None:
    log.first_index = 50
    log.trim_before("offset_for_time", 280)
    rows = read_rows(DLedgerBatchReader(options(startingTimestamp=entry(index)["timestamp"] // 1000)))
    assert [row["index"] for row in rows] == [each for each in ROWS if each >= index]


def test_filters_of_term_and_index_narrow_the_archive(log: ArchivedGroup) -> None:
    for filters, expected in (
        ([GreaterThanOrEqual(("term",), 2)], [index for index in ROWS if index >= 150]),
        ([LessThan(("term",), 2)], [index for index in ROWS if index < 150]),
        ([GreaterThanOrEqual(("index",), 120), LessThan(("index",), 140)], list(range(120, 140))),
    ):
        reader = FilteredBatchReader(options(filterPushdown="one_query"))
        list(reader.pushFilters(filters))
        assert [row["index"] for row in read_rows(reader)] == expected


def test_term_is_exact_where_entries_are_trimmed_meanwhile(log: ArchivedGroup) -> None:
    log.first_index = 50
    log.trim_before("records", 280)
    reader = FilteredBatchReader(options(filterPushdown="one_query"))
    list(reader.pushFilters([GreaterThanOrEqual(("term",), 2)]))
    assert [row["index"] for row in read_rows(reader)] == [index for index in ROWS if index >= 150]


def test_without_or_after_the_end_of_an_archive_deleted_entries_are_a_loss(log: ArchivedGroup) -> None:
    log.recorded, log.table = [], None
    bounds = {"startingOffsets": json.dumps({GROUP: 100})}
    with pytest.raises(RetentionError) as caught:
        read_rows(DLedgerBatchReader(options(**bounds)))
    assert (caught.value.start, caught.value.end) == (100, 250)
    assert [row["index"] for row in read_rows(DLedgerBatchReader(options()))] == [each for each in ROWS if each >= 250]


def test_archive_that_was_begun_again_starts_where_its_first_range_does(log: ArchivedGroup) -> None:
    recorded = log.recorded
    log.first_index, log.recorded = 50, recorded[:1]
    reader = DLedgerStreamReader(options())
    start = pin_batch(reader)
    assert next_of(start, GROUP) == 0
    log.first_index, log.recorded = 250, recorded[2:]
    with pytest.raises(RetentionError) as caught:
        reader.latestOffset(start, reader.getDefaultReadLimit())
    assert (caught.value.start, caught.value.end) == (0, 200)


def test_entries_are_pinned_only_without_an_archive(log: ArchivedGroup) -> None:
    Engine().run(DLedgerStreamReader(options()), 3)
    assert log.pins == []
    log.recorded, log.table = [], None
    Engine().run(DLedgerStreamReader(options()), 3)
    assert min(log.pins) == 250


@pytest.mark.parametrize("archive", ["true", "false"])
def test_pins_end_with_an_available_now_run_and_not_before(log: ArchivedGroup, archive: str) -> None:
    """Spark 4.1 to 4.3 do not tell a source that its query has ended."""
    log.recorded, log.table, log.first_index = [], None, 0
    reader, engine = DLedgerStreamReader(options(archive=archive, maxOffsetsPerTrigger=200)), Engine()
    engine.limit = reader.getDefaultReadLimit()
    reader.prepareForTriggerAvailableNow()
    engine.run(reader, 3)  # the first one records the start
    assert (engine.read, log.pins, log.pinned) == (ROWS, [0, 200], True)  # Spark may not have recorded the commit yet
    engine.run(reader, 1)
    assert (engine.read, log.pinned) == (ROWS, False)


def test_pin_is_released_although_an_archive_was_begun_since(log: ArchivedGroup) -> None:
    recorded, table = log.recorded, log.table
    log.recorded, log.table = [], None
    reader = DLedgerStreamReader(options())
    Engine().run(reader, 2)
    assert log.pinned
    log.recorded, log.table = recorded, table
    Engine().run(reader, 1)  # it learns of the archive
    reader.stop()
    assert not log.pinned


def test_lag_in_the_archive_is_known_without_reading_it(log: ArchivedGroup, table: str) -> None:
    reader = DLedgerStreamReader(options(maxOffsetsPerTrigger=100))
    start = pin_batch(reader)
    DeltaTable(table).delete()
    reader.latestOffset(start, reader.getDefaultReadLimit())
    report = reader.reportLatestOffset()
    assert report is not None
    assert report["groups"][GROUP]["behind"] == {
        "records": 200,
        "bytes": 200 * 60,
        "seconds": pytest.approx(9e7, rel=0.9),
    }


def test_credentials_are_in_no_text_of_the_options() -> None:
    found = options(**{"archive.AWS_SECRET_ACCESS_KEY": "s3cr3t"})
    assert found.archive_storage == (("aws_secret_access_key", "s3cr3t"),)
    assert "s3cr3t" not in f"{found!r} {found}"


def test_archive_on_object_storage_is_read_and_errors_show_no_credentials(
    table: str, log: ArchivedGroup, caplog: pytest.LogCaptureFixture
) -> None:
    with bucket_on_loopback() as bucket:
        bucket.upload(Path(table), "moved")
        caplog.set_level("DEBUG")
        storage = {f"archive.{name}": value for name, value in bucket.storage.items()}
        moved = f"s3a://{bucket.name}/moved"
        rows = read_rows(DLedgerBatchReader(options(archive=moved, **storage)))
        assert [row["index"] for row in rows] == ROWS
        texts = []
        for location in (f"s3a://{bucket.name}/none", "s3a://none/moved"):
            with pytest.raises(ArchiveTableError, match=location) as failed:
                read_rows(DLedgerBatchReader(options(archive=location, **storage)))
            texts.append(f"{failed.value} {failed.value.values} {failed.getrepr(chain=True)}")
        append(moved, [entry(7)], storage=bucket.storage)
        with pytest.raises(ArchiveDamagedError):
            read_rows(DLedgerBatchReader(options(archive=moved, **storage)))
    with pytest.raises(ArchiveTableError) as unreachable:
        read_rows(DLedgerBatchReader(options(archive=moved, **storage, **{"archive.max_retries": "0"})))
    texts.append(str(unreachable.value))
    assert [text for text in (*texts, caplog.text) if KEY in text or SECRET in text] == []


def test_error_of_storage_shows_no_signature_of_an_address(log: ArchivedGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError("\x1b[31mGET http://127.0.0.1:1/t/_delta_log?sv=1&sig=c2ln%3D failed")

    monkeypatch.setattr("deltalake.DeltaTable", fail)
    with pytest.raises(ArchiveTableError, match=r"GET http://127.0.0.1:1/t/_delta_log failed") as failed:
        read_rows(DLedgerBatchReader(options(**{"archive.azure_storage_sas_token": "sv=1&sig=c2ln="})))
    assert "sig" not in str(failed.value)


@pytest.mark.parametrize(
    ("given", "named"),
    [
        ({"archive": ""}, "archive"),
        ({"archive": "true", "isolation": "read_uncommitted"}, "isolation"),
        ({"archive": "true", "peers": "", "path": "d"}, "archive"),
        ({"archive": "false", "archive.region": "eu"}, "archive.region"),
        ({"archive": "true", "table": "groups"}, "archive"),
    ],
)
def test_options_that_do_not_go_with_an_archive_are_errors(given: dict[str, str], named: str) -> None:
    with pytest.raises(OptionError, match=named):
        DLedgerOptions.for_reading(
            {name: value for name, value in ({"peers": "a:1"} | given).items() if value or name != "peers"}
        )


@pytest.mark.soak
def test_polars_and_duckdb_read_the_table_as_the_guide_says(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With ``pip install polars duckdb``: 250 MB that only this test would need."""
    log = ArchivedGroup()
    table = new_table(tmp_path / "history", log)
    for name, code in zip(("polars", "duckdb"), blocks(GUIDE.read_text(), "Other engines"), strict=True):
        pytest.importorskip(name)
        exec(code.replace("/tmp/history", table).replace("'default'", "'g'").replace('"default"', '"g"'), {})
    shown = capsys.readouterr().out
    assert str(len(ROWS)) in shown
    assert "2023-11-14" in shown

"""Reading from files: a broker's store with new entries, re-created, or with a tail that may not be committed."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from dledger_core import open_store
from spark_connector.errors import TermMismatchError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader
from tests.spark_connector.engine import ALL, Engine, next_of
from tests.spark_connector.reading_as_executor import indexes
from tests.spark_connector.store_writer import StoreWriter
from tests.support.archives import unpack
from tests.support.growing_store import GrowingStore

TESTDATA = Path(__file__).parents[1] / "storage" / "testdata"
GENERATIONS = ("dledger-0.3.1.2-single", "dledger-0.4.0-single")


@pytest.fixture(params=GENERATIONS)
def java(request: pytest.FixtureRequest, tmp_path: Path) -> GrowingStore:
    """A store that Java wrote, of which the files hold as much as a test says."""
    with tarfile.open(TESTDATA / f"{request.param}.tar.gz") as archive:
        unpack(archive, tmp_path / "whole")
    source = next((tmp_path / "whole").rglob("dledger-n*"))
    (tmp_path / "orders").mkdir()
    return GrowingStore(source, tmp_path / "orders" / source.name, with_index=True)


def options(store: GrowingStore, **more: str) -> DLedgerOptions:
    fixed = {"path": str(store.path), "pollMs": "1", "isolation": "read_uncommitted"}
    return DLedgerOptions.for_reading(fixed | more)


def java_generation_a(store: GrowingStore) -> bool:
    return open_store(store.path).writer == "java-a"


def data_indexes(store: GrowingStore, end: int) -> list[int]:
    return [row["index"] for row in store.rows[:end] if row["magic"] == 1]


def test_stream_follows_new_entries_in_files_of_broker(java: GrowingStore) -> None:
    total = len(java.rows)
    java.hold(total // 4)
    engine, reader = Engine(), DLedgerStreamReader(options(java, startingOffsets="earliest"))
    for count in (total // 4, total // 2, total - 1, total):
        java.hold(count)
        for _ in range(3):
            engine.start(reader)
        assert engine.read == data_indexes(java, count)
        reader = DLedgerStreamReader(options(java))  # a restart
    at = json.loads(engine.offsets[-1])
    assert list(at["groups"]) == ["orders"], "the directory above has the group's name"
    assert at["groups"]["orders"]["log"] is None
    assert next_of(at, "orders") == total


def test_recreated_log_without_uuid_is_detected(java: GrowingStore) -> None:
    total = len(java.rows)
    java.hold(total // 2)
    engine, reader = Engine(), DLedgerStreamReader(options(java, startingOffsets="earliest"))
    for _ in range(3):
        engine.start(reader)
    at = json.loads(engine.offsets[-1])
    shutil.rmtree(java.path)
    with StoreWriter(java.path.parent.parent / "other", group="x", uuid=None) as other:
        other.append_numbers(total)
    for folder in ("data", "index"):
        shutil.copytree(other.path / folder, java.path / folder)
    with pytest.raises(TermMismatchError, match="TERM_MISMATCH"):
        DLedgerStreamReader(options(java)).latestOffset(at, ALL)


def test_uncommitted_entries_of_store_need_read_uncommitted(java: GrowingStore) -> None:
    if java_generation_a(java):
        (java.path / "checkpoint").write_text("committedIndex=9\n")
    committed = DLedgerBatchReader(options(java, isolation="read_committed"))
    found = indexes(committed, committed.partitions())
    end = 10 if java_generation_a(java) else len(java.rows)
    assert found == data_indexes(java, end)
    everything = DLedgerBatchReader(options(java))
    assert indexes(everything, everything.partitions()) == data_indexes(java, len(java.rows))


def test_tasks_share_view_and_see_later_entries(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        given: dict[str, Any] = {"path": str(store.path), "minPartitions": "3"}
        store.append_numbers(100)
        old = DLedgerBatchReader(DLedgerOptions.for_reading(given))
        planned = old.partitions()
        store.append_numbers(100)
        new = DLedgerBatchReader(DLedgerOptions.for_reading(given))
        assert indexes(new, new.partitions()) == list(range(200))
        assert indexes(old, planned) == list(range(100))


def test_orphaned_and_open_attempts_are_hidden(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        fixed = {"path": str(store.path), "pollMs": "1"}
        stream = DLedgerStreamReader(DLedgerOptions.for_reading(fixed | {"startingOffsets": "earliest"}))
        engine = Engine()
        store.append_numbers(10)
        lost = store.append_attempt(3000, batch=0)
        won = store.append_attempt(5, batch=0)
        engine.start(stream)
        engine.start(stream)
        assert engine.read == list(range(10)), "a transaction is open"
        store.commit(won, batch=0)
        behind = store.end
        store.append_numbers(3)
        opened = store.append_attempt(5, batch=1)
        store.append_numbers(2)
        whole, every = range(won.first, won.last + 1), range(behind, behind + 3)
        hidden = [*range(lost.first, lost.last + 1)], [*range(opened.first, opened.last + 3)]
        for _ in range(3):
            engine.start(stream)
        assert engine.read == [*range(10), *whole, *every]
        for isolation, expected in (
            ("read_committed", engine.read),
            (
                "read_uncommitted",
                [*range(10), *hidden[0], *whole, *every, *hidden[1]],
            ),
        ):
            reader = DLedgerBatchReader(DLedgerOptions.for_reading(fixed | {"isolation": isolation}))
            assert indexes(reader, reader.partitions()) == expected
        store.commit(batch=1)  # none of its parts won: they are lost, and what was behind them is seen
        reader = DLedgerBatchReader(DLedgerOptions.for_reading(fixed))
        assert indexes(reader, reader.partitions()) == [*engine.read, opened.last + 1, opened.last + 2]

"""A trimmed native store is converted with its tables, or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from dledger_core import control
from dledger_core.config import StorageConfig
from dledger_core.errors import CorruptRecordError
from dledger_core.ids import Term
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import clear_recovering, mark_recovering
from dledger_core.storage.tables.tables import LogTables, TablesSnapshot
from tests.rocketmq.convert.stores import converted, entries
from tests.support.logs import append

SMALL = StorageConfig(data_segment_bytes=4096, index_segment_bytes=1024, preallocate_bytes=0)


@pytest.fixture
def store(tmp_path: Path) -> Path:
    path = tmp_path / "old" / "dledger-n0"
    log = CommitLog.open(path, group="g", node_id="n0", config=SMALL)
    for at in range(30):
        fields = {"k": "producer", "p": "p", "e": 0, "s": at, "n": 9, "c": at}
        append(log, [bytes([at]) * 30] * 9, control=control.pack(fields))
    tables = LogTables()
    for index, time_ms, body in log.control_entries(0, 300):
        tables.apply(index, time_ms, body)
    first = log.segment_summaries()[2].first_index
    assert log.trim(first, TablesSnapshot.of(tables), 299) == first > 0
    log.close(299)
    return path


def test_tables_are_converted_with_trimmed_log(store: Path, tmp_path: Path) -> None:
    new = tmp_path / "new"
    converted(store, new)
    assert entries(new) == entries(store)
    assert open_store(new).first_index == open_store(store).first_index > 0
    log = CommitLog.open(new, group="g", node_id="n0")
    assert log.load_tables().producers.get("p").next_sequence == 30
    log.close()
    (new / "meta" / "tables").unlink()
    with pytest.raises(CorruptRecordError):
        CommitLog.open(new, group="g", node_id="n0")


def test_trimmed_log_without_tables_is_rejected(store: Path, tmp_path: Path) -> None:
    (store / "meta" / "tables").write_bytes(b"rot")
    with pytest.raises(CorruptRecordError):
        converted(store, tmp_path / "new")


def test_store_of_recovering_voter_is_rejected(store: Path, tmp_path: Path) -> None:
    """The new node would vote at once although acknowledged entries may be lost."""
    files = OsFiles()
    mark_recovering(files, Layout(store), Term(3))
    with pytest.raises(CorruptRecordError):
        converted(store, tmp_path / "new")
    clear_recovering(files, Layout(store))
    converted(store, tmp_path / "new")
    assert entries(tmp_path / "new") == entries(store)

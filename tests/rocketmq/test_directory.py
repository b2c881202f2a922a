"""One rule for what a directory contains, and one for where the log of a store ends."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

from dledger_core import StoreMismatchError, open_store
from dledger_core.rocketmq import CommitLogEnd, end_of, locate, log_around
from dledger_core.rocketmq.store.location import Part
from tests.support.damage import flip, overwrite, place_of


def test_locate_distinguishes_stores_commitlogs_and_brokers(mixed: Path) -> None:
    store, commitlog = mixed / "dledger-n0", mixed / "commitlog"
    found = locate(mixed)
    assert (found.store, found.commitlog, found.stores) == (store, commitlog, (store,))
    assert (found.is_store, found.is_commitlog) == (False, False)
    assert locate(store).is_store
    assert locate(commitlog).is_commitlog
    assert locate(store / "index").store is None
    with pytest.raises(StoreMismatchError):
        locate(commitlog).one_store()


def test_locate_names_stores_below_node_directory(tmp_path: Path, mixed: Path) -> None:
    node = tmp_path / "node"
    for group in ("a", "b"):
        shutil.copytree(mixed / "dledger-n0", node / group / "dledger-n0")
    found = locate(node)
    assert found.store is None
    assert found.stores == (node / "a" / "dledger-n0", node / "b" / "dledger-n0")
    for reject in (found.one_store, found.check):
        with pytest.raises(StoreMismatchError) as caught:
            reject()
        assert all(str(store) in caught.value.remedy for store in found.stores)


def test_open_store_finds_the_only_store_of_a_broker_or_node(tmp_path: Path, mixed: Path) -> None:
    node = tmp_path / "node"
    shutil.copytree(mixed / "dledger-n0", node / "group" / "dledger-n0")
    (node / "group" / "consumequeue" / "orders" / "0").mkdir(parents=True)
    for path in (node, node / "group", node / "group" / "dledger-n0"):
        with open_store(path) as view:
            assert repr(view) == f"StoreReader({str(view.path)!r}, java-a, indexes 0 to {LAST})"
            assert (view.path, view.last_index) == (node / "group" / "dledger-n0", LAST)
        with open_store(path, since=view) as newer:
            assert newer.path == view.path


def test_open_store_rejects_a_store_after_a_commitlog(mixed: Path) -> None:
    """Its messages have no indexes: readers by index would skip them silently."""
    with pytest.raises(StoreMismatchError) as caught:
        open_store(mixed)
    assert str(mixed / "dledger-n0") in caught.value.remedy
    with open_store(mixed / "dledger-n0") as view:
        assert view.first_index == 0


@pytest.mark.parametrize("make", [lambda path: None, Path.mkdir, Path.touch], ids=["missing", "empty", "file"])
def test_locate_rejects_paths_without_log(tmp_path: Path, make: object) -> None:
    path = tmp_path / "x"
    make(path)  # type: ignore[operator]
    with pytest.raises(StoreMismatchError):
        locate(path).check()
    with pytest.raises(StoreMismatchError):
        locate(path).one_store()


def test_locate_finds_native_store_without_data(tmp_path: Path) -> None:
    (tmp_path / "s" / "meta").mkdir(parents=True)
    (tmp_path / "s" / "meta" / "log.json").write_text("{}")
    assert locate(tmp_path / "s").is_store


def test_locate_lists_brokers_of_all_kinds_and_names_others(tmp_path: Path, mixed: Path) -> None:
    """A classic broker, a DLedger broker and two neighbors with a directory data/ of something else."""
    shutil.copytree(mixed / "commitlog", tmp_path / "all" / "classic" / "commitlog")
    shutil.copytree(mixed / "dledger-n0", tmp_path / "all" / "dledger" / "dledger-n0")
    shutil.copytree(mixed, tmp_path / "all" / "mixed")
    for name, file in (("app", "rows.csv"), ("other", "00000000000000000000.txt")):
        (tmp_path / "all" / name / "data").mkdir(parents=True)
        (tmp_path / "all" / name / "data" / file).touch()
    found = locate(tmp_path / "all")
    assert [(each.path.name, each.store, each.commitlog) for each in found.logs] == [
        ("classic", None, tmp_path / "all" / "classic" / "commitlog"),
        ("dledger-n0", tmp_path / "all" / "dledger" / "dledger-n0", None),
        ("mixed", tmp_path / "all" / "mixed" / "dledger-n0", tmp_path / "all" / "mixed" / "commitlog"),
    ]
    assert [(each.path.name, each.part) for each in found.skipped] == [
        ("app", Part.OTHER_DATA),
        ("other", Part.OTHER_DATA),
    ]
    with pytest.raises(StoreMismatchError):
        found.check()
    for name in ("classic", "mixed"):
        shutil.rmtree(tmp_path / "all" / name)
    assert locate(tmp_path / "all").one_store() == tmp_path / "all" / "dledger" / "dledger-n0"


def test_locate_prefers_the_log_of_a_broker_to_one_kept_in_its_directory(tmp_path: Path, mixed: Path) -> None:
    shutil.copytree(mixed / "commitlog", tmp_path / "b" / "commitlog")
    shutil.copytree(mixed / "commitlog", tmp_path / "b" / "old" / "commitlog")
    found = locate(tmp_path / "b")
    assert found.commitlog == tmp_path / "b" / "commitlog"
    assert [(each.path.name, each.part) for each in found.skipped] == [("old", Part.ANOTHER)]


def test_data_files_apart_from_their_store_are_linked_by_the_remedy(tmp_path: Path, mixed: Path) -> None:
    """``storePathDLedgerCommitLog``, with one path or several: no damaged CommitLog, but a way to read them."""
    shutil.copytree(mixed / "dledger-n0", tmp_path / "b" / "dledger-n0")
    for number, file in enumerate(sorted((tmp_path / "b" / "dledger-n0" / "data").iterdir())):
        disk = tmp_path / "b" / ("commitlog" if number % 2 else "disk")
        disk.mkdir(exist_ok=True)
        file.rename(disk / file.name)
    (tmp_path / "b" / "dledger-n0" / "data").rmdir()
    found = locate(tmp_path / "b")
    assert found.logs == ()
    assert [each.part for each in found.skipped] == [Part.DATA_FILES, Part.DATA_FILES, Part.WITHOUT_DATA]
    with pytest.raises(StoreMismatchError) as caught:
        found.check()
    command = caught.value.remedy.partition("mkdir")
    typed = f"mkdir{command[2]}".removesuffix(" && dledger look linked")
    subprocess.run(typed, shell=True, check=True, cwd=tmp_path)
    with open_store(tmp_path / "linked") as view:
        assert (view.writer, view.last_index) == ("java-a", LAST)
    for part in ("disk", "commitlog", "dledger-n0"):
        with pytest.raises(StoreMismatchError) as caught:
            locate(tmp_path / "b" / part).check()
        assert "storePathDLedgerCommitLog" in caught.value.what


def test_log_around_finds_only_logs_that_a_directory_is_part_of(tmp_path: Path, mixed: Path) -> None:
    shutil.copytree(mixed / "dledger-n0", tmp_path / "b" / "dledger-n0")
    for path in (tmp_path / "b" / "config", tmp_path / "etc"):
        path.mkdir()
    assert log_around(tmp_path / "b" / "config") == tmp_path / "b"
    assert log_around(tmp_path / "b" / "dledger-n0" / "index") == tmp_path / "b" / "dledger-n0"
    assert log_around(tmp_path / "etc") is None


@pytest.fixture
def store(mixed: Path) -> Path:
    return mixed / "dledger-n0"


LAST = 262
"""Index of the last entry."""


def read_end(store: Path) -> CommitLogEnd:
    with open_store(store) as reader:
        end = end_of(reader)
        assert (end.end, end.position) == (reader.last_index + 1, reader.position_end)
    return end


def test_end_of_intact_store_is_clean(store: Path) -> None:
    end = read_end(store)
    assert (end.end, end.damaged, end.torn, end.missing_committed, end.lost) == (LAST + 1, None, False, None, None)


def test_damage_before_complete_entries_is_lost(store: Path) -> None:
    file, offset = place_of(store, LAST - 3)
    overwrite(file, offset, bytes(4))  # its magic: Java's recovery ends the log there
    end = read_end(store)
    assert (end.end, end.damaged) == (LAST + 1, (LAST - 3, LAST - 2))
    assert end.lost is not None
    assert end.lost[0] == LAST - 3


def test_changed_last_record_is_torn(store: Path) -> None:
    file, offset = place_of(store, LAST)
    overwrite(file, offset + 8, b"\x7f")  # its index
    end = read_end(store)
    assert (end.end, end.torn) == (LAST, True)


def test_changed_term_before_lower_term_is_damage(store: Path) -> None:
    file, offset = place_of(store, LAST - 1)
    flip(file, offset + 23)
    assert read_end(store).damaged == (LAST - 1, LAST)


def test_zeros_before_committed_end_are_missing_entries(store: Path) -> None:
    with open_store(store) as reader:
        committed = reader.commit_index
    assert committed is not None
    file, offset = place_of(store, LAST - 5)
    overwrite(file, offset, bytes(file.stat().st_size - offset))
    end = read_end(store)
    assert (end.end, end.missing_committed) == (LAST - 5, (LAST - 5, committed + 1))
    assert end.lost == (LAST - 5, max(committed + 1, end.recorded_end or 0))


def test_short_last_file_is_damage(store: Path) -> None:
    """Java's files have one size."""
    file, offset = place_of(store, LAST)
    assert file != min((store / "data").iterdir())
    os.truncate(file, offset + 20)
    end = read_end(store)
    assert (end.end, end.damaged) == (LAST, (LAST, LAST + 1))

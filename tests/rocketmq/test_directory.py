"""One rule for what a directory contains, and one for where the log of a store ends."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from dledger_core import StoreMismatchError, open_store
from dledger_core.rocketmq import CommitLogEnd, end_of, locate
from tests.rocketmq.convert.stores import flip, overwrite, place_of


def test_locate_distinguishes_stores_commitlogs_and_brokers(mixed: Path) -> None:
    store, commitlog = mixed / "dledger-n0", mixed / "commitlog"
    found = locate(mixed)
    assert (found.store, found.commitlog, found.stores) == (store, commitlog, (store,))
    assert (found.is_store, found.is_commitlog) == (False, False)
    assert locate(store).is_store
    assert locate(commitlog).is_commitlog
    assert locate(store / "index").store is None
    with pytest.raises(StoreMismatchError) as caught:
        locate(commitlog).one_store()
    assert "audit_replicas.py" in caught.value.remedy


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

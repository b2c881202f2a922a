"""Contract of TableStore, for each implementation: SQLite, and the tests' model on a disk in memory."""

from __future__ import annotations

import shutil
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.table_store import (
    DamagedTablesError,
    SqliteTables,
    TableStore,
    read_sqlite,
    rows_in_image,
)
from tests.support.faulty_files import FaultyFiles
from tests.support.only_reading import only_reading
from tests.support.soon import soon

ANY_STORE = pytest.mark.parametrize("kind", [OsFiles, FaultyFiles])


class Tables:
    """A store and the file system that it is on."""

    def __init__(self, kind: type[Any], root: Path) -> None:
        self.files = kind()
        self.files.mkdir(root)
        self.path = root / "tables"
        self.failures: list[OSError] = []
        self.store: TableStore = self.files.open_tables(self.path, self.failures.append)

    def again(self) -> TableStore:
        self.store.close()
        self.store = self.files.open_tables(self.path, self.failures.append)
        return self.store

    def damage(self, value: bytes) -> None:
        """Change one byte of a value."""
        self.store.close()
        content = self.files.read(self.path)
        assert content.count(value) == 1
        self.files.replace(self.path, content.replace(value, value[:-1] + b"?"))
        self.again()


@pytest.fixture(params=[OsFiles, FaultyFiles])
def tables(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    found = Tables(request.param, tmp_path / "meta")
    yield found
    found.store.close()


def test_store_without_transaction_has_no_file(tables: Tables) -> None:
    assert tables.store.read() is None
    assert tables.store.scan(b"", b"z", 9) == []
    assert tables.files.rows_in_image(tables.store.image()) is None
    tables.store.sync()
    tables.store.rewrite()
    tables.store.close()
    assert tables.files.listdir(tables.path.parent) == []
    assert tables.files.read_tables(tables.path) is None


def test_transactions_are_durable_after_sync_in_order_of_keys(tables: Tables) -> None:
    tables.store.write({b"b": b"1", b"a": b"2", b"\xff": b""})
    tables.store.write({b"c": b"3", b"b": None, b"missing": None})
    tables.store.write({b"a": b"4"})
    tables.store.sync()
    expected = [(b"a", b"4"), (b"c", b"3"), (b"\xff", b"")]
    assert tables.store.read() == tables.files.read_tables(tables.path) == expected
    assert tables.store.scan(b"a", b"\xff", 9) == expected[1:2]
    assert tables.store.scan(b"", b"\xff\xff", 2) == expected[:2]
    assert tables.files.rows_in_image(tables.store.image()) == expected
    tables.store.rewrite()
    assert tables.again().read() == expected
    assert not tables.failures


def test_close_ends_transactions(tables: Tables) -> None:
    tables.store.write({b"a": b"1"})
    assert tables.again().read() == [(b"a", b"1")]


def test_replacement_removes_all_other_rows(tables: Tables) -> None:
    tables.store.write({b"a": b"1", b"b": b"2"})
    tables.store.write({b"b": b"3"}, replace=True)
    tables.store.write({b"c": b"4"})
    tables.store.sync()
    assert tables.store.read() == [(b"b", b"3"), (b"c", b"4")]


@pytest.mark.parametrize("rubbish", [None, b"rubbish" * 1000], ids=["one byte", "all"])
def test_damaged_rows_are_not_read_and_can_be_replaced(tables: Tables, rubbish: bytes | None) -> None:
    tables.store.write({b"a": b"a value to damage", b"b": b"2"})
    if rubbish is None:
        tables.damage(b"a value to damage")
    else:
        tables.store.close()
        tables.files.replace(tables.path, rubbish)
        tables.again()
    for read in (tables.store.read, lambda: tables.files.read_tables(tables.path)):
        with pytest.raises(DamagedTablesError):
            read()
    tables.store.write({b"c": b"3"}, replace=True)
    tables.store.sync()
    assert tables.again().read() == [(b"c", b"3")]


def test_failed_transaction_is_final(tables: Tables) -> None:
    tables.store.write({b"a": b"1"})
    tables.again()
    if isinstance(tables.files, FaultyFiles):
        tables.files.fail_at = tables.files.operations + 1
    else:
        tables.path.unlink()
        tables.path.mkdir()
    tables.store.write({b"b": b"2"})
    with pytest.raises(OSError, match="tables") as caught:
        tables.store.sync()
    soon(lambda: tables.failures == [caught.value])
    tables.store.write({b"c": b"3"})
    with pytest.raises(OSError, match="tables"):
        tables.store.sync()
    assert tables.failures == [caught.value]


@ANY_STORE
@settings(max_examples=20, deadline=None)
@given(st.lists(st.tuples(st.dictionaries(st.binary(max_size=1), st.none() | st.binary(max_size=3)), st.booleans())))
def test_rows_are_those_of_all_transactions(kind: type[Any], tmp_path_factory: Any, written: list[Any]) -> None:
    tables = Tables(kind, tmp_path_factory.mktemp("tables"))
    rows: dict[bytes, bytes | None] = {}
    for changes, replace in written:
        tables.store.write(changes, replace=replace)
        rows = ({} if replace else rows) | changes
    expected = sorted((key, value) for key, value in rows.items() if value is not None)
    assert (tables.again().read() or []) == expected
    tables.store.close()


# --- SQLite -----------------------------------------------------------------------------------------------------------


def interrupted(path: Path, copy: Path) -> None:
    """Copy a store as a crash in the middle of a transaction leaves it: some new pages, and the journal of the old."""
    with closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = TRUNCATE")
        connection.execute("PRAGMA cache_size = 2")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE rows SET value = zeroblob(400)")
        for name in ("tables", "tables-journal"):
            shutil.copyfile(path.with_name(name), copy.with_name(name))
        connection.execute("ROLLBACK")


def test_moved_rows_replace_others_and_nothing_is_moved_without_a_source(tables: Tables) -> None:
    source = tables.path.with_name("tables.new")
    tables.store.write({b"old": b"1"})
    tables.store.close()
    tables.files.move_tables(source, tables.path)
    assert tables.again().read() == [(b"old", b"1")]
    tables.store.close()
    new = tables.files.open_tables(source, tables.failures.append)
    new.write({b"new": b"2"}, replace=True)
    new.close()
    tables.files.move_tables(source, tables.path)
    assert tables.again().read() == [(b"new", b"2")]
    assert {name.removesuffix("-journal") for name in tables.files.listdir(source.parent)} == {"tables"}


def test_moved_rows_are_not_changed_by_a_transaction_that_a_crash_interrupted(tmp_path: Path) -> None:
    store = SqliteTables(tmp_path / "tables", print)
    store.write({number.to_bytes(4, "big"): bytes([number % 256]) * 400 for number in range(500)})
    store.close()
    crashed = tmp_path / "crashed" / "tables"
    crashed.parent.mkdir()
    interrupted(tmp_path / "tables", crashed)
    new = SqliteTables(crashed.with_name("tables.new"), print)
    new.write({b"new": b"1"})
    new.close()
    OsFiles().move_tables(crashed.with_name("tables.new"), crashed)
    assert read_sqlite(crashed) == [(b"new", b"1")]


@pytest.mark.parametrize("by_node", [True, False], ids=["node", "another program"])
def test_interrupted_transaction_leaves_rows_before_it(tmp_path: Path, by_node: bool) -> None:
    rows = {number.to_bytes(4, "big"): bytes([number % 256]) * 400 for number in range(500)}
    store = SqliteTables(tmp_path / "tables", print)
    store.write(rows)
    store.close()
    copy = tmp_path / "crashed" / "tables"
    copy.parent.mkdir()
    interrupted(tmp_path / "tables", copy)
    assert copy.read_bytes() != (tmp_path / "tables").read_bytes()
    before = copy.read_bytes(), copy.with_name("tables-journal").read_bytes()
    if by_node:
        store = SqliteTables(copy, print)
        assert store.read() == sorted(rows.items())
        store.close()
    else:
        with only_reading(copy.parent):
            assert read_sqlite(copy) == sorted(rows.items())
        assert before == (copy.read_bytes(), copy.with_name("tables-journal").read_bytes())


def test_reader_of_another_program_sees_whole_transactions(tmp_path: Path) -> None:
    store = SqliteTables(tmp_path / "tables", print)
    for number in range(30):
        store.write({key.to_bytes(2, "big"): bytes([number]) for key in range(500)})
        found = read_sqlite(tmp_path / "tables") or []
        assert len({value for _, value in found}) <= 1
        assert len(found) in (0, 500)
    store.close()


def test_image_has_the_transaction_that_has_begun(tmp_path: Path) -> None:
    """Its pages may be in the file already, without the others."""
    begun, free = threading.Event(), threading.Event()

    def delayed(function: Callable[[], Any]) -> Any:
        begun.set()
        free.wait()
        return function()

    store = SqliteTables(tmp_path / "tables", print, delayed)
    store.write({b"a": b"1"})
    begun.wait()
    timer = threading.Timer(0.1, free.set)
    timer.start()
    assert rows_in_image(store.image()) == [(b"a", b"1")]
    timer.join()
    store.close()

"""Stored tables: changed rows, their durability, and a start with tables that do not fit the log."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dledger_core import control
from dledger_core.errors import DiskFailedError, ProducerUnknownError
from dledger_core.ids import Index
from dledger_core.server.replica.replica import Controls
from dledger_core.storage import CommitLog
from dledger_core.storage.files.ab_file import copies
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.table_store import DamagedTablesError
from dledger_core.storage.tables.orphaned import ORPHANED
from dledger_core.storage.tables.tables import LogTables, TableChanges
from tests.storage.sample import Sample
from tests.support.faulty_files import FaultyFiles
from tests.support.logs import SMALL, STORE, append, open_log
from tests.support.replica_group import Asker, HandDriven

TABLES = STORE / "meta" / "tables"


def producer_entry(name: str, sequence: int = 0, count: int = 1) -> bytes:
    return control.pack({"k": "producer", "p": name, "e": 0, "s": sequence, "n": count, "c": 1})


def filled(files: FaultyFiles) -> CommitLog:
    """A log with ten appends of a producer; the tables include all of them."""
    log = open_log(files)
    tables = log.load_tables()
    for number in range(10):
        index = log.last_index() + 1
        append(log, [b"x"], control=producer_entry("p", number))
        tables.apply(Index(index), 0, producer_entry("p", number))
    log.save_tables(tables.take_changes())
    return log


def with_tables_of(ahead: FaultyFiles, *, installed: bool = False) -> FaultyFiles:
    """A store with three entries whose tables are those of another one, perhaps from a snapshot install."""
    files = FaultyFiles()
    log = open_log(files)
    append(log, [b"x"], control=producer_entry("p"))
    append(log, [b"y"])
    log.close()
    tables = LogTables.from_rows(ahead.read_tables(TABLES) or ())
    if installed:
        tables = LogTables.restore(tables.snapshot())
    store = files.open_tables(TABLES, print)
    store.write(TableChanges.complete(tables).rows, replace=True)
    store.sync()
    return files


@pytest.mark.parametrize("installed", [False, True], ids=["lost entries", "snapshot install"])
def test_log_that_ends_before_its_tables_is_recovering_unless_installed(installed: bool) -> None:
    ahead = FaultyFiles()
    filled(ahead).close()
    log = open_log(with_tables_of(ahead, installed=installed))
    assert (log.floor is not None) is not installed
    assert (log.load_tables().applied_index > log.last_index()) is installed
    log.close()


@pytest.mark.parametrize("trimmed", [False, True], ids=["complete log", "trimmed log"])
def test_tables_ahead_of_log_are_cut_back_durably_before_other_entries_get_indexes(trimmed: bool) -> None:
    log = open_log(files := FaultyFiles())
    tables = log.load_tables()
    bodies = {name: producer_entry(name) for name in ("kept", "lost", "other")}
    append(log, [bytes(600)], control=bodies["kept"])
    tables.apply(Index(0), 0, bodies["kept"])
    for _ in range(9):
        append(log, [bytes(600)])
    if trimmed:
        assert log.trim(9, tables.take_changes(), log.last_index()) > 1
    lost = log.last_index() + 1
    append(log, [b"x"] * 9, control=bodies["lost"])
    tables.apply(Index(lost), 0, bodies["lost"])
    disk = Sample(files, SMALL, [int(log.position_of(Index(lost)))], [])
    log.save_tables(tables.take_changes())
    log.close()
    for path in copies(Layout(STORE).checkpoint):
        files.unlink(path)
    disk.record(0)[:] = bytes(len(disk.record(0)))
    log = open_log(files)
    assert (log.last_index(), log.floor is not None) == (lost - 1, True)
    append(log, [b"y"] * 20, control=bodies["other"])
    files.crash(0.0)  # before the next checkpoint stores tables
    log = open_log(files)
    controls = Controls(log)
    controls.commit(log.last_index())
    assert list(controls.tables.producers) == ["kept", "other"]
    log.close()


def test_producer_of_lost_entries_is_unknown_once_they_are_forgotten() -> None:
    tables = LogTables()
    for index, (name, sequence) in enumerate([("kept", 0), ("both", 0), ("lost", 0), ("both", 1)]):
        tables.apply(Index(2 * index), 0, producer_entry(name, sequence))
    tables.take_changes()
    tables.forget_after(Index(3))
    assert list(tables.producers) == ["kept"]
    with pytest.raises(ProducerUnknownError):
        tables.producers.check("both", 0, 1, 1)
    changes = tables.take_changes()
    assert changes.applied_index == 3
    tables.apply(Index(4), 0, producer_entry("new"))
    assert "new" in tables.producers, "another entry has this index now"


def changed(stored: Mapping[bytes, bytes], changes: TableChanges) -> dict[bytes, bytes]:
    """Return the rows of a store after a transaction."""
    rows = {**({} if changes.is_complete else stored), **changes.rows}
    return {key: value for key, value in rows.items() if value is not None}


def test_store_has_no_row_of_lost_entries_whose_indexes_are_used_again() -> None:
    tables = LogTables()
    for index, name in enumerate(["kept", "lost"]):
        tables.apply(Index(2 * index), 0, producer_entry(name))
    stored = changed({}, tables.take_changes())
    tables.forget_after(Index(1))
    for sequence in range(2):  # its first row has the key of the lost one
        tables.apply(Index(2 + 2 * sequence), 0, producer_entry("new", sequence))
    stored = changed(stored, tables.take_changes())
    assert LogTables.from_rows(sorted(stored.items())).snapshot() == tables.snapshot()
    tables.apply(Index(6), 0, producer_entry("new", 2))
    assert len(tables.take_changes().rows) == 3, "the next transaction changes single rows again"


def test_orphaned_ranges_of_trimmed_entries_leave_the_store() -> None:
    tables = LogTables()
    for at, kind in enumerate(["attempt", "abort"]):
        tables.apply(Index(2 * at), 0, control.pack({"k": kind, "q": "q", "b": 0, "r": "r", "n": 1}))
    stored = changed({}, tables.take_changes())
    assert any(key.startswith(ORPHANED) for key in stored)
    tables.trim(Index(3))
    tables.apply(Index(4), 0, producer_entry("p"))
    stored = changed(stored, tables.take_changes())
    assert not any(key.startswith(ORPHANED) for key in stored)


def test_stored_tables_that_lack_a_row_are_damaged() -> None:
    tables = LogTables()
    for number in range(3):
        tables.apply(Index(2 * number), 0, producer_entry(f"p{number}"))
    tables.apply(Index(6), 0, control.pack({"k": "commit", "q": "q", "b": 0, "r": "r", "parts": []}))
    rows = tables.rows()
    assert LogTables.from_rows(rows).snapshot() == tables.snapshot()
    for at in range(len(rows)):
        with pytest.raises(DamagedTablesError):
            LogTables.from_rows([*rows[:at], *rows[at + 1 :]])


def test_tables_are_stored_after_the_entries_they_include_are_synced() -> None:
    files = FaultyFiles()
    log = open_log(files, config=replace(SMALL, durability="page-cache"))
    append(log, [b"in a new segment, whose name is synced with it"])
    append(log, [b"x"], control=producer_entry("p"))
    tables = log.load_tables()
    tables.apply(Index(1), 0, producer_entry("p"))
    log.save_tables(tables.take_changes())
    assert log.scan_tables(b"p", b"q", 9), "the transaction has ended"
    files.crash(0.0)
    log = open_log(files)
    assert log.load_tables().applied_index <= log.last_index()
    assert log.floor is None
    log.close()


def test_changes_are_those_of_the_applied_entries_alone() -> None:
    tables = LogTables()
    for number in range(2000):
        tables.apply(Index(2 * number), 0, producer_entry(f"p{number}"))
    stored = changed({}, tables.take_changes())
    for at in range(3):
        tables.apply(Index(5000 + 2 * at), 0, producer_entry("p7", 1 + at))
    tables.apply(Index(6000), 0, control.pack({"k": "expire", "p": "p8"}))
    changes = tables.take_changes()
    assert not changes.is_complete
    assert len(changes.rows) == 4, "two old rows, a new one, and the applied index"
    assert not tables.take_changes().rows
    restored = LogTables.from_rows(sorted(changed(stored, changes).items()))
    assert restored.snapshot() == tables.snapshot()
    assert list(restored.producers) == list(tables.producers), "in order of activity, by which they expire"


def test_start_applies_only_entries_after_the_stored_ones() -> None:
    files = FaultyFiles()
    filled(files).close()
    log = open_log(files)
    assert log.load_tables().applied_index == 18
    assert len(log.load_tables().producers) == 1


def test_tables_are_stored_after_the_entries_they_include() -> None:
    files = FaultyFiles()
    with HandDriven(Path("/store"), voters=("n0", "n1", "n2"), files=files) as n0:
        n0.lead()
        n0.replica.store.save_checkpoint()
        n0.run()
        n0.stalled = True
        ask = Asker(n0)
        ask.produced("p", 0, 0, b"x")
        n0.acknowledge()  # the others have it, this disk does not
        assert "p" in n0.replica.tables.producers
        n0.replica.store.save_checkpoint()
        n0.run()
        rows = files.read_tables(Path("/store/meta/tables"))
        assert rows is None or LogTables.from_rows(rows).applied_index <= n0.log.last_index()
        n0.stalled = False
        n0.run()
        assert "p" in n0.log.load_tables().producers
        assert not n0.failures


class NoTables(FaultyFiles):
    """A disk on which the tables cannot be written."""

    def operation(self, kind: str, path: Path) -> None:
        if path.name == "tables":
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        super().operation(kind, path)


def test_failed_transaction_of_tables_is_final_for_the_replica() -> None:
    with HandDriven(Path("/store"), files=NoTables()) as n0:
        n0.lead()
        ask = Asker(n0)
        for number in range(20):  # each transaction may wait for the next one
            if n0.failures:
                break
            ask.produced("p", 0, number, b"x")
            n0.run()
            n0.replica.store.save_checkpoint()
            n0.run()
        assert [type(error) for error in n0.failures] == [DiskFailedError]
        assert not n0.replica.is_leader


ENTRIES = st.one_of(
    st.builds(
        lambda name, sequence, once: {"k": "producer", "p": name, "e": 0, "s": sequence, "n": 1, "c": 1, "o": once},
        st.sampled_from("abc"),
        st.integers(0, 2),
        st.booleans(),
    ),
    st.builds(lambda name: {"k": "expire", "p": name}, st.sampled_from("abc")),
    st.builds(
        lambda query, batch, run, rows, once: {
            "k": "attempt", "q": query, "b": batch, "r": run, "a": "a", "n": rows, "c": 1, "f": rows, "o": once,
        },
        st.sampled_from("xyz"),
        st.integers(0, 3),
        st.sampled_from("rs"),
        st.integers(0, 3),
        st.booleans(),
    ),
    st.builds(
        lambda kind, query, batch, run: {"k": kind, "q": query, "b": batch, "r": run},
        st.sampled_from(["commit", "abort"]),
        st.sampled_from("xyz"),
        st.integers(0, 3),
        st.sampled_from("rs"),
    ),
    st.just({}),
)  # fmt: skip
DAYS = st.sampled_from([0, 0, 0, 0, 2, 8, 401])


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(ENTRIES, DAYS, st.booleans(), st.booleans()), max_size=60))
def test_stored_changes_restore_to_the_same_tables(steps: list[tuple[dict[str, Any], int, bool, bool]]) -> None:
    """Whichever entries are applied between two transactions, and wherever the log is trimmed."""
    tables, stored, days = LogTables(), dict[bytes, bytes](), 0
    for number, (fields, more, trims, stores) in enumerate(steps):
        days += more
        parts: dict[str, Any] = {}
        if fields.get("k") == "commit":
            key = (fields["q"], fields["b"])
            found = tables.transactions.open.get(key)
            parts["parts"] = [list(part) for part in list(found.parts if found else ())[:1]]
        tables.apply(Index(10 * number), 0, control.pack(fields | parts | {"t": days * 24 * 3_600_000}))
        if trims:
            tables.trim(Index(10 * number))
        if stores:
            stored = changed(stored, tables.take_changes())
            restored = LogTables.from_rows(sorted(stored.items()))
            assert restored.snapshot() == tables.snapshot()
            if number % 5 == 0:
                tables = restored

"""Backups of stopped stores, and restored ones: refusals, later runs, interruptions, trimmed logs."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from dledger_core.bootstrap import ARCHIVE_VERSION
from dledger_core.control import pack
from dledger_core.errors import (
    ConfigError,
    CorruptRecordError,
    DiskFullError,
    DLedgerError,
    EndLostError,
    QuarantinedError,
    StoreBusyError,
    StoreIncompleteError,
    StoreMismatchError,
)
from dledger_core.ids import Index, Term
from dledger_core.lineage import AncestorLog
from dledger_core.raft.floor import Floor
from dledger_core.server.maintenance.backup import BackupReport, back_up_stores, stores_in
from dledger_core.server.maintenance.restore import RestoreReport, restore
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.backup_files import is_intact, load_manifest, locked, save_manifest
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.identity import load_identity
from dledger_core.storage.files.layout import FORMAT_VERSION_MAX, Layout, load_log_meta, save_log_meta
from dledger_core.storage.files.meta_files import hard_state_file, mark_needs_verification, save_floor
from dledger_core.storage.files.quarantine import mark_quarantined
from dledger_core.storage.tables.tables import LogTables, TableChanges, load_tables, save_tables
from tests.storage.test_archived import range_of
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.logs import LOG_UUID, STORE, append, found_store, open_log

DESTINATION = Path("/backup")
DIRECTORY = Path("/node")
BODY = b"x" * 400


@contextmanager
def opened(files: Files, path: Path = STORE) -> Iterator[CommitLog]:
    found_store(path, files=files)
    log = open_log(files, path)
    yield log
    log.close()


def grow(files: Files, count: int, *, path: Path = STORE, commit: int | None = None, term: int = 1) -> None:
    """Append entries, one batch each, and commit them, or only those up to ``commit``."""
    with opened(files, path) as log:
        for number in range(log.last_index() + 1, log.last_index() + 1 + count):
            append(log, [b"%d " % number + BODY], term)
        log.save_checkpoint(log.last_index() if commit is None else commit)


def backed_up(files: Files, path: Path = STORE, to: Path = DESTINATION) -> BackupReport:
    (report,) = back_up_stores([path], to, files=files)
    return report


def restored(files: Files, to: Path = DIRECTORY, *, node: str | None = None) -> RestoreReport:
    (report,) = restore(DESTINATION, to, node_id=node, files=files)
    return report


def entries(files: Files, path: Path | str) -> list[tuple[int, int, bytes]]:
    with open_store(path, files=files) as store:
        found = store.read(store.first_index, store.last_index + 1)
        return [(row["index"], row["term"], row["body"]) for row in found.to_pylist()]


def kept_files(files: Files) -> list[str]:
    return [name for name in files.listdir(DESTINATION / "g") or () if not name.endswith(".json")]


def test_restored_store_has_all_committed_entries_and_never_votes() -> None:
    files = FaultyFiles()
    grow(files, 30, commit=19)
    report = backed_up(files)
    assert (report.first_index, report.end_index) == (0, 20)
    found = restored(files)
    assert entries(files, found.store) == entries(files, STORE)[:20]
    layout = Layout(Path(found.store))
    assert not hard_state_file(layout.hard_state).load(files).exists
    identity = load_identity(files, layout)
    assert not identity.is_member
    assert identity.recovery is not None
    end = identity.recovery.retired.end
    assert (end.last_index, end.commit_index, end.last_term) == (19, 19, 1)
    assert end.is_recovering
    with open_store(found.store, files=files) as store:
        assert list(store.verify().findings) == []


def test_later_backup_copies_new_entries_only() -> None:
    files = FaultyFiles()
    grow(files, 30)
    first = backed_up(files)
    before = {name: files.names[DESTINATION / "g" / name] for name in kept_files(files)}
    grow(files, 15, term=3)
    second = backed_up(files)
    assert (second.kept_files, second.end_index) == (first.copied_files - 1, 45)
    same = [name for name in kept_files(files) if files.names[DESTINATION / "g" / name] is before.get(name)]
    assert len([name for name in same if not name.startswith("tables")]) == second.kept_files
    assert len(kept_files(files)) == second.kept_files + second.copied_files + 1, "the others are removed"
    found = restored(files)
    assert entries(files, found.store) == entries(files, STORE)
    third = backed_up(files)
    assert (third.copied_files, third.kept_files) == (0, second.kept_files + second.copied_files)


def test_damaged_file_of_backup_is_refused_by_restore_and_copied_again() -> None:
    files = FaultyFiles()
    grow(files, 30)
    first = backed_up(files)
    name = kept_files(files)[0]
    files.content(DESTINATION / "g" / name)[100] ^= 1
    with pytest.raises(CorruptRecordError) as error:
        restored(files)
    assert name in error.value.where
    again = backed_up(files)
    assert (again.copied_files, again.kept_files) == (1, first.copied_files - 1)
    assert entries(files, restored(files).store) == entries(files, STORE)


def test_store_that_a_node_has_open_is_refused() -> None:
    files = FaultyFiles()
    with opened(files) as log:
        append(log, [b"body"])
        with pytest.raises(StoreBusyError):
            backed_up(files)


def test_store_that_may_lack_entries_is_refused() -> None:
    files = FaultyFiles()
    grow(files, 3)
    save_floor(files, Layout(STORE), Floor(Term(1), Index(9)))
    backed_up(files)  # its committed entries are complete
    save_floor(files, Layout(STORE), Floor(Term(1)))
    with pytest.raises(EndLostError):
        backed_up(files)


@pytest.mark.parametrize(
    "copies", [("checkpoint", "checkpoint.2"), ("members", "members.2")], ids=["checkpoint", "members"]
)
def test_store_without_checkpoint_or_members_is_refused(copies: Sequence[str]) -> None:
    files = FaultyFiles()
    grow(files, 3)
    for name in copies:
        files.unlink(STORE / "meta" / name)
    with pytest.raises(EndLostError):
        backed_up(files)


def test_quarantined_store_and_one_with_failed_write_are_refused() -> None:
    files = FaultyFiles()
    grow(files, 3)
    mark_needs_verification(files, Layout(STORE), "a write failed")
    with pytest.raises(CorruptRecordError):
        backed_up(files)
    mark_quarantined(files, Layout(STORE), "an invariant")
    with pytest.raises(QuarantinedError):
        backed_up(files)


def test_damaged_store_is_refused_and_earlier_backup_stays() -> None:
    files = FaultyFiles()
    grow(files, 10)
    backed_up(files)
    before = load_manifest(files, DESTINATION / "g")
    grow(files, 10)
    files.content(STORE / "data" / "00000000000000004096")[3000] ^= 1
    with pytest.raises(CorruptRecordError) as error:
        backed_up(files)
    assert error.value.remedy
    assert load_manifest(files, DESTINATION / "g") == before
    assert before is not None
    assert all(is_intact(files, DESTINATION / "g", each) for each in before.files)


def test_directory_of_other_backup_or_with_other_files_is_refused(tmp_path: Path) -> None:
    files = FaultyFiles()
    grow(files, 12)
    backed_up(files)
    other = Path("/other/g/dledger-n0")
    found_store(other, files=files)
    meta = Layout(other).log_meta
    files.replace(meta, (files.read(meta) or b"").replace(b"f0f0f0f0", b"abababab"))
    remove_crc(files, meta)
    grow(files, 3, path=other)
    with pytest.raises(StoreMismatchError):
        backed_up(files, other)
    older = Path("/older/g/dledger-n0")
    grow(files, 5, path=older)
    with pytest.raises(StoreMismatchError):  # it ends before the backup
        backed_up(files, older)
    rewritten = Path("/rewritten/g/dledger-n0")
    grow(files, 20, path=rewritten, term=2)
    with pytest.raises(StoreMismatchError):  # the log has lost entries of the backup
        backed_up(files, rewritten)
    with pytest.raises(StoreMismatchError):
        backed_up(files, to=STORE)


def remove_crc(files: Files, path: Path) -> None:
    """Remove the checksum of an edited file, as an operator does by hand."""
    lines = (files.read(path) or b"").splitlines()
    kept = [line for line in lines if b"crc32" not in line]
    files.replace(path, b"\n".join(kept).replace(b",\n}", b"\n}"))


def test_second_backup_into_directory_at_once_is_refused() -> None:
    files = FaultyFiles()
    grow(files, 3)
    with locked(files, DESTINATION), pytest.raises(StoreBusyError):
        backed_up(files)
    backed_up(files)


def test_full_disk_is_an_error_with_remedy_and_backup_continues() -> None:
    files = FaultyFiles()
    grow(files, 60)
    files.fail_errno, files.fail_at = errno.ENOSPC, files.operations + 40
    with pytest.raises(DiskFullError):
        backed_up(files)
    assert backed_up(files).kept_files > 1
    files.fail_at = files.operations + 40
    with pytest.raises(DiskFullError):
        restored(files)
    assert entries(files, restored(files).store) == entries(files, STORE)


def test_backup_interrupted_at_any_operation_leaves_a_complete_backup() -> None:
    ready = FaultyFiles(seed=5)
    grow(ready, 12)
    backed_up(ready)
    grow(ready, 22)
    operations = ready.operations
    for number in range(1, 1_000):
        files = ready.clone()
        files.chance.seed(number)
        files.crash_at = operations + number
        with suppress(Crash):
            backed_up(files)
            break
        files.crash(keep=0.5)
        found = load_manifest(files, DESTINATION / "g")
        assert found is not None
        assert found.end.index in (11, 33)
        assert all(is_intact(files, DESTINATION / "g", each) for each in found.files)
        assert backed_up(files).end_index == 34
        assert len(kept_files(files)) == len(load_manifest(files, DESTINATION / "g").files)  # type: ignore[union-attr]
    assert 20 < number < 999


def test_restore_interrupted_at_any_operation_runs_again() -> None:
    ready = FaultyFiles(seed=5)
    grow(ready, 14)
    backed_up(ready)
    operations, expected = ready.operations, entries(ready, STORE)
    path = DIRECTORY / "g" / "dledger-n0"
    for number in range(1, 1_000):
        files = ready.clone()
        files.chance.seed(number)
        files.crash_at = operations + number
        with suppress(Crash):
            restored(files)
            break
        files.crash(keep=0.5)
        with suppress(StoreIncompleteError, StoreMismatchError):
            assert entries(files, path) == expected
        with suppress(StoreMismatchError):  # it was complete
            restored(files)
        assert entries(files, path) == expected
    assert 20 < number < 999


def test_restore_refuses_directory_with_files() -> None:
    files = FaultyFiles()
    grow(files, 3)
    backed_up(files)
    restored(files)
    with pytest.raises(StoreMismatchError):
        restored(files)
    with pytest.raises(StoreMismatchError):  # of another node
        restored(files, node="n1")
    files.mkdir(Path("/full/sub"))
    with pytest.raises(StoreMismatchError):
        restored(files, Path("/full"))
    with pytest.raises(DLedgerError):
        restored(files, Path("/new"), node="../n1")
    assert restored(files, Path("/new"), node="n7").store == "/new/g/dledger-n7"


def test_incomplete_restore_is_refused_by_every_reader() -> None:
    files = FaultyFiles()
    grow(files, 3)
    backed_up(files)
    path = Path(restored(files).store)
    files.replace(Layout(path).restoring, b"")
    with pytest.raises(StoreIncompleteError):
        open_store(path, files=files)
    with pytest.raises(StoreIncompleteError):
        backed_up(files, path, Path("/other"))
    restored(files)
    assert len(entries(files, path)) == 3


def test_directory_without_backup_is_refused() -> None:
    files = FaultyFiles()
    with pytest.raises(StoreMismatchError):
        restored(files)
    grow(files, 60)
    files.fail_errno, files.fail_at = errno.ENOSPC, files.operations + 40
    with pytest.raises(DiskFullError):
        backed_up(files)
    with pytest.raises(StoreIncompleteError):  # the first backup is not complete
        restored(files)


def test_backup_of_trimmed_log_has_its_tables_and_no_deleted_entries() -> None:
    files = FaultyFiles()
    grow(files, 40)
    backed_up(files)
    before = len(kept_files(files))
    with opened(files) as log:
        first = log.trim(25, TableChanges.complete(LogTables()), 39)
    assert first > 10
    assert backed_up(files).first_index == first
    assert len(kept_files(files)) < before
    path = restored(files).store
    assert entries(files, path) == entries(files, STORE)
    with open_store(path, files=files) as store, open_store(STORE, files=files) as source:
        assert store.meta is not None
        assert source.meta is not None
        assert store.meta.previous_term == source.meta.previous_term == 1
        assert list(store.verify().findings) == []


def test_node_directory_has_store_per_group(tmp_path: Path) -> None:
    for group in ("a", "b"):
        grow(OsFiles(), 2, path=tmp_path / group / "dledger-n0")
    assert stores_in(tmp_path) == [tmp_path / "a/dledger-n0", tmp_path / "b/dledger-n0"]
    assert stores_in(tmp_path / "a/dledger-n0") == [tmp_path / "a/dledger-n0"]
    grow(OsFiles(), 2, path=tmp_path / "b/dledger-n1")
    with pytest.raises(StoreMismatchError):
        stores_in(tmp_path)
    with pytest.raises(StoreMismatchError):
        stores_in(tmp_path / "a/dledger-n0/data")


def test_restored_store_is_backed_up_and_restored_like_any_other() -> None:
    files = FaultyFiles()
    grow(files, 20, term=4)
    backed_up(files)
    first = restored(files)
    assert backed_up(files, Path(first.store), Path("/second")).end_index == 20
    (second,) = restore(Path("/second"), Path("/third"), files=files)
    assert entries(files, second.store) == entries(files, STORE)
    found = [load_identity(files, Layout(Path(path))).recovery for path in (first.store, second.store)]
    assert found[0] is not None
    assert found[1] is not None
    assert found[0].retired.end == found[1].retired.end
    assert found[0].retired.store != found[1].retired.store, "two restores are two stores"


@pytest.mark.parametrize(("last", "is_accepted"), [(19, True), (25, True), (18, False)])
def test_backup_of_log_is_continued_by_log_that_has_its_entries(last: int, is_accepted: bool) -> None:
    files = FaultyFiles()
    grow(files, 20)
    first = backed_up(files)
    meta = load_log_meta(files, Layout(STORE).log_meta)
    assert meta is not None
    link = AncestorLog(str(meta.log_uuid), last, 1, None)
    save_log_meta(files, Layout(STORE).log_meta, replace(meta, log_uuid="new", continues=(link,)))
    grow(files, 10, term=3)
    if not is_accepted:
        with pytest.raises(StoreMismatchError):
            backed_up(files)
        return
    second = backed_up(files)
    assert (second.log, second.end_index, second.kept_files) == ("new", 30, first.copied_files - 1)
    identity = load_identity(files, Layout(Path(restored(files).store)))
    assert identity.recovery is not None
    assert identity.recovery.retired.log_uuid == "new"


def test_backup_with_logs_of_several_nodes_is_restored_for_named_node() -> None:
    files = FaultyFiles()
    grow(files, 3)
    backed_up(files)
    found = load_manifest(files, DESTINATION / "g")
    assert found is not None
    other = DESTINATION / "h"
    for name in kept_files(files):
        files.mkdir(other)
        files.replace(other / name, files.read(DESTINATION / "g" / name) or b"")
    save_manifest(files, other, replace(found, meta=replace(found.meta, group="h", node_id="n5")))
    with pytest.raises(ConfigError):
        restore(DESTINATION, DIRECTORY, files=files)
    reports = restore(DESTINATION, DIRECTORY, node_id="n1", files=files)
    assert [(report.group, report.store) for report in reports] == [
        ("g", "/node/g/dledger-n1"),
        ("h", "/node/h/dledger-n1"),
    ]


def tables_of(index: int) -> LogTables:
    """Tables whose newest entry has this index."""
    tables = LogTables()
    tables.apply(Index(index), 1000, pack({"k": "log", "u": LOG_UUID}))
    return tables


@pytest.mark.parametrize("keep", [None, 0, 1])
def test_entries_in_tables_are_committed_although_checkpoint_is_older(keep: float | None) -> None:
    files = FaultyFiles()
    grow(files, 4)
    log = open_log(files)
    for _ in range(5):
        append(log, [], term=1, control=pack({"k": "log", "u": LOG_UUID}))
    append(log, [b"not committed"])
    # The checkpoint has not been written again, and the index may lack the last rows.
    files.kill() if keep is None else files.crash(keep)
    save_tables(files, Layout(STORE).tables, TableChanges.complete(tables_of(7)))
    assert backed_up(files).end_index == 8
    with open_store(restored(files).store, files=files) as store:
        assert store.last_index == 7
        assert list(store.verify().findings) == []


@pytest.mark.parametrize("committed", [10, 11, 12, 13])
def test_restored_log_has_the_archive_as_of_its_end_and_older_programs_refuse_it(committed: int) -> None:
    files = FaultyFiles()
    grow(files, 10)
    with opened(files) as log:
        log.adopt_group_version(ARCHIVE_VERSION)
        tables = LogTables()
        for index, (start, end) in enumerate([(0, 4), (4, 9), (9, 11)], 10):
            fields = {"k": "archived", "r": range_of(start, end).row(), "u": "file:///archive", "b": index == 10}
            append(log, [], control=pack(fields))
            if index <= committed:
                tables.apply(Index(index), 1000, pack(fields))
        append(log, [b"one more"])
        log.save_checkpoint(committed)
        log.save_tables(tables.take_changes())
    assert backed_up(files).end_index == committed + 1
    layout = Layout(Path(restored(files).store))
    meta = load_log_meta(files, layout.log_meta)
    assert meta is not None
    assert meta.format_version == FORMAT_VERSION_MAX
    archive = load_tables(files, layout, meta).archive
    assert [found.end for found in archive.containing(-1)] == [4, 9, 11][: committed - 9]
    assert archive.table == "file:///archive"


def test_store_that_ends_before_its_tables_is_refused() -> None:
    files = FaultyFiles()
    grow(files, 4)
    save_tables(files, Layout(STORE).tables, TableChanges.complete(tables_of(30)))
    with pytest.raises(EndLostError):
        backed_up(files)


def test_store_that_has_not_caught_up_after_snapshot_install_is_refused() -> None:
    files = FaultyFiles()
    grow(files, 4)
    installed = LogTables.installed(tables_of(30).rows())
    save_tables(files, Layout(STORE).tables, TableChanges.complete(installed))
    with pytest.raises(EndLostError):
        backed_up(files)

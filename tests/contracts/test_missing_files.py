"""Files that are missing, that retention deletes while they are read, and that the disk cannot read.

The good files are shown in every kind of store; the others are named by index or position, and by time.
"""

from __future__ import annotations

import errno
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core import open_store
from dledger_core.rocketmq import Damaged, Deleted, LogDirectory, locate, open_log_directory
from dledger_core.rocketmq.inspection import inspect_directory
from dledger_core.rocketmq.message.bodies import MESSAGES
from dledger_core.storage.files.file_system import OsFile, OsFiles
from dledger_core.storage.read import store_reader
from jobs._audit.replicas import open_source, stored_logs
from jobs._audit.source import Gap
from tests.cli import command
from tests.contracts.small_file_stores import CONVERT, WRITTEN
from tests.spark_connector.store_writer import StoreWriter

FILE_BYTES = 1 << 11


Without = tuple["Store", "Store", list[Path]]
"""A store without some files, what they contained, and the files."""


@dataclass(frozen=True)
class Store:
    """A store, its files, and all rows that ``dump`` shows of it."""

    path: Path
    data: Path
    rows: list[dict[str, Any]]

    @property
    def files(self) -> list[Path]:
        return sorted(self.data.iterdir())

    def of(self, files: list[Path]) -> list[dict[str, Any]]:
        """The rows in files."""
        bases = {int(file.name) for file in files}
        size = int(self.files[1].name) - int(self.files[0].name)
        return [row for row in self.rows if row["position"] // size * size in bases]


def made(kind: str, directory: Path) -> Store:
    path, data = WRITTEN[kind](directory, FILE_BYTES)
    return Store(path, data, command.rows_of("dump", path))


@pytest.fixture(params=WRITTEN)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return made(request.param, tmp_path / "store")


@pytest.fixture(scope="module", params=[(kind, at) for kind in WRITTEN for at in ("middle", "end")], ids=" ".join)
def without(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Without:
    """A store without two files in its middle, or without the last file but one; and these files."""
    kind, at = request.param
    store = made(kind, tmp_path_factory.mktemp("store"))
    files = store.files
    assert len(files) > 5
    lost = files[2:4] if at == "middle" else files[-2:-1]
    kept = Store(store.path, store.data, [row for row in store.rows if row not in store.of(lost)])
    missing = Store(store.path, store.data, store.of(lost))
    for file in lost:
        file.unlink()
    return kept, missing, lost


def shown(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_dump_shows_all_but_missing_files_and_names_them(without: Without) -> None:
    store, missing, lost = without
    result = command.run("dump", store.path, "--format", "json", code=4)
    assert shown(result.stdout) == store.rows
    (line,) = [line for line in result.stderr.splitlines() if line.startswith("---")]
    first, last = missing.rows[0], missing.rows[-1]
    if first["index"] is not None:
        assert f"indexes {first['index']} to {last['index']} are missing" in line
    assert f"positions {int(lost[0].name)} to" in line
    assert str(lost[0]) in line
    assert re.search(r"after 20\d\d-.* and before 20\d\d-", line), "the times of the entries around them"


@pytest.mark.parametrize("form", ["index", "position"])
def test_dump_starts_and_ends_around_missing_files(without: Without, form: str) -> None:
    store, missing, _ = without
    if form == "index" and missing.rows[0]["index"] is None:
        return
    number = "index" if form == "index" else "position"
    sign = "" if form == "index" else "@"
    start, end = store.rows[0][number], missing.rows[0][number]
    before = command.rows_of("dump", store.path, "--from", f"{sign}{start}", "--to", f"{sign}{end}")
    assert before == [row for row in store.rows if row[number] < end]
    after = [row for row in store.rows if row[number] > end]
    assert command.rows_of("dump", store.path, "--from", f"{sign}{after[0][number]}") == after


def test_verify_finds_missing_files_and_nothing_else(without: Without) -> None:
    store, missing, lost = without
    [report] = command.result_of("verify", store.path, code=1)
    [found] = [each for each in report["findings"] if each["severity"] == "error"]
    assert found["path"] == str(lost[0])
    assert found["position"] == int(lost[0].name)
    if missing.rows[0]["index"] is not None:
        assert (found["start"], found["end"]) == (missing.rows[0]["index"], missing.rows[-1]["index"] + 1)
        assert report["last_index"] == store.rows[-1]["index"]


def test_look_inspects_the_rest_of_missing_files(without: Without) -> None:
    store, _, lost = without
    found = command.result_of("look", store.path, code=1)
    [damage] = [each for each in found["damage"] if str(lost[0]) in each]
    assert "missing" in damage
    assert found["entries"] == len(store.rows)
    assert found["last"][-1]["position"] == store.rows[-1]["position"]


def test_export_writes_the_rest_of_missing_files(without: Without, tmp_path: Path) -> None:
    store, _, lost = without
    key = "index" if store.rows[0]["index"] is not None else "position"
    for _ in range(2):  # the second one continues the dataset
        result = command.run("export", store.path, tmp_path, "--to", "jsonl", "--until", "end", code=4)
        assert str(lost[0]) in result.stderr.splitlines()[-1]
        files = sorted(tmp_path.glob("*.jsonl"))
        rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
        assert [row[key] for row in rows] == [row[key] for row in store.rows]


def test_missing_first_file_of_a_native_store_is_named(tmp_path: Path) -> None:
    store = made("native", tmp_path / "s")
    first = store.files[0]
    rest = [row for row in store.rows if row not in store.of([first])]
    first.unlink()
    result = command.run("dump", store.path, "--format", "json", code=4)
    assert shown(result.stdout) == rest
    assert f"indexes 0 to {rest[0]['index'] - 1} are missing" in result.stderr
    [damage] = command.result_of("look", store.path, code=1)["damage"]
    assert str(first) in damage
    [report] = command.result_of("verify", store.path, code=1)
    assert [(each["start"], each["end"]) for each in report["findings"]] == [(0, rest[0]["index"])]
    command.run("dump", store.path, "--from", rest[0]["index"] + 1)
    command.run("export", store.path, tmp_path / "out", code=4)
    assert command.run("convert", store.path, tmp_path / "copy", *CONVERT, code=None).exit_code in (3, 4)


def test_convert_refuses_missing_files_and_names_them(without: Without, tmp_path: Path) -> None:
    store, missing, lost = without
    for more in ((), ("--cut-tail",)):
        result = command.run("convert", store.path, tmp_path / "copy", *CONVERT, *more, code=None)
        assert result.exit_code in (3, 4)
        assert str(int(lost[0].name)) in result.stderr
        if missing.rows[0]["index"] is not None:
            assert f"index={missing.rows[0]['index']} end={missing.rows[-1]['index'] + 1}" in result.stderr


@pytest.mark.parametrize("kind", ["native", "generation_a", "generation_b"])
def test_missing_index_file_hides_no_entry(tmp_path: Path, kind: str) -> None:
    store = made(kind, tmp_path)
    files = sorted((store.path / "index").iterdir())
    files[len(files) // 2].unlink()
    assert command.rows_of("dump", store.path) == store.rows
    assert command.run("verify", store.path, code=None).exit_code in (0, 1)
    assert command.result_of("look", store.path)["entries"] == len(store.rows)


# --- retention deletes files of an opened store ---------------------------------------------------------------------


def read(opened: LogDirectory) -> tuple[list[Any], list[dict[str, Any]]]:
    """Return everything but entries, and the entries."""
    found, rows = [], []
    for each in opened.batches():
        if isinstance(each, pa.RecordBatch):
            rows += each.to_pylist()
        else:
            found.append(each)
    return found, rows


@pytest.mark.parametrize("when", ["before", "between"])
def test_rest_is_read_if_retention_deletes_files_meanwhile(store: Store, when: str) -> None:
    gone = store.files[:2]
    by = "index" if store.rows[0]["index"] is not None else "position"
    rest = [row[by] for row in store.rows if row not in store.of(gone)]
    with open_log_directory(store.path) as opened:
        if when == "between":
            assert read(opened)[0] == []  # files are open now, and others of an index too
        for file in gone:
            file.unlink()
        found, rows = read(opened)
        opened.check_read()
        assert opened.check_end() is None
        assert inspect_directory(opened).damage == []
    if found:
        assert all(isinstance(each, Deleted) for each in found)
        assert (found[0].start, found[-1].end) == (store.rows[0][by], rest[0])
    assert [row[by] for row in rows][-len(rest) :] == rest
    assert bool(found) == (len(rows) == len(rest))
    assert bool(found) or (when == "between" and by == "index"), "a file that was open before is still read"


@pytest.mark.parametrize("kind", WRITTEN)
def test_audit_calls_files_deleted_meanwhile_no_damage(tmp_path: Path, kind: str) -> None:
    stores = {name: made(kind, tmp_path / name) for name in ("one", "two")}
    replicas = stored_logs({name: store.path for name, store in stores.items()})
    stores["one"].files[0].unlink()
    [found] = replicas.values()
    for replica in found:
        with open_source(replica) as source:
            digests = list(source.digests(replica.first_index, replica.end, 16))
            entries = list(source.entries(replica.first_index, replica.end))
        kinds = {each.kind for each in [*digests, *entries] if isinstance(each, Gap)}
        assert kinds == ({"deleted"} if replica.name == "one" else set())


@pytest.mark.parametrize("kind", ["native", "generation_a", "generation_b"])
def test_verify_checks_the_rest_if_retention_deletes_files(tmp_path: Path, kind: str) -> None:
    store = made(kind, tmp_path)
    gone = store.files[:2]
    rest = [row["index"] for row in store.rows if row not in store.of(gone)]
    with open_store(store.path) as reader:
        for file in gone:
            file.unlink()
        report = reader.verify()
    assert report.deleted == (0, rest[0])
    assert (report.first_index, report.last_index) == (rest[0], rest[-1])
    lost_start = [each for each in report.findings if each.severity == "error"]
    assert [each.position for each in lost_start] == ([0] if kind == "native" else []), "its identity names its start"


class Deleting(OsFiles):
    """Deletes the first data file after the first listing, as retention of a broker does."""

    def __init__(self, files: list[Path]) -> None:
        self.left = files

    def listdir(self, path: Path) -> list[str] | None:
        names = super().listdir(path)
        if path.name == "data" and self.left:
            self.left.pop(0).unlink()
        return names


@pytest.mark.parametrize("kind", ["native", "generation_a", "generation_b"])
def test_open_store_succeeds_while_retention_deletes_files(tmp_path: Path, kind: str) -> None:
    store = made(kind, tmp_path)
    gone = store.files[:3]
    expected = [row["index"] for row in store.rows if row not in store.of(gone)]
    with store_reader.open_store(store.path, files=Deleting(list(gone))) as reader:
        assert reader.first_index_now == expected[0]
        assert reader.last_index == expected[-1]
        assert [gap for gap in reader.gaps if gap.start >= expected[0]] == []


def test_entries_appended_meanwhile_are_no_torn_end(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, segment_bytes=4096) as writer:
        writer.append_numbers(5)
        with open_log_directory(writer.path) as opened:
            writer.append_numbers(5)
            assert read(opened)[0] == []
            assert opened.check_end() is None


# --- a disk that cannot read ----------------------------------------------------------------------------------------


@dataclass
class _Shown(OsFile):
    """An open file of a ``Disk``."""

    file: OsFile
    disk: Disk

    def pread(self, length: int, offset: int) -> bytes:
        return self.disk.read(self.file.pread(length, offset), offset)

    def size(self) -> int:
        return self.file.size()

    def next_data(self, offset: int) -> int:
        self.disk.is_written = True
        return self.file.next_data(offset)

    def close(self) -> None:
        self.file.close()


@dataclass
class Disk(OsFiles):
    """A disk that cannot read some bytes of a file, or to which they are written while it is read."""

    path: Path
    bytes: range
    is_bad: bool
    is_written: bool = False

    def open(self, path: Path, *, write: bool = False, create: bool = False) -> OsFile:
        file = super().open(path, write=write, create=create)
        return _Shown(file, self) if path == self.path else file

    def read(self, data: Any, offset: Any = None) -> Any:
        if offset is None:
            return super().read(data)
        within = range(max(offset, self.bytes.start), min(offset + len(data), self.bytes.stop))
        if not within or (not self.is_bad and self.is_written):
            return data
        if self.is_bad:
            raise OSError(errno.EIO, "Input/output error")
        return data[: within.start - offset] + bytes(len(within)) + data[within.stop - offset :]


def test_verify_finds_no_torn_end_while_entries_are_appended(tmp_path: Path) -> None:
    store = made("native", tmp_path)
    file = store.files[-1]
    disk = Disk(file, range(FILE_BYTES), is_bad=False)
    for copy in (store.path / "meta").glob("checkpoint*"):
        copy.unlink()
    with store_reader.open_store(store.path, files=disk) as log:
        assert log.last_index == 94
        assert log.verify().findings == ()


@pytest.fixture(params=["native", "generation_a", "generation_b"])
def unreadable(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[Store, int, Any]]:
    """A store, the entry that the disk cannot read, and an open view."""
    store = made(request.param, tmp_path)
    row = store.of([store.files[2]])[3]
    at = row["position"] - int(store.files[2].name)
    files = Disk(store.files[2], range(at + 60, at + 61), is_bad=True)
    with store_reader.open_store(locate(store.path).one_store(), bodies=MESSAGES, files=files) as log:
        yield store, row["index"], log


def test_one_unreadable_entry_hides_no_other(unreadable: tuple[Store, int, Any]) -> None:
    store, index, log = unreadable
    found, rows = read(LogDirectory(store.path, log, ()))
    assert [(type(each), each.start, each.end) for each in found] == [(Damaged, index, index + 1)]
    assert [row["index"] for row in rows] == [row["index"] for row in store.rows if row["index"] != index]


def test_verify_reports_an_unreadable_file_as_finding(unreadable: tuple[Store, int, Any]) -> None:
    store, index, log = unreadable
    [found] = [each for each in log.verify().findings if each.severity == "error"]
    assert found.path == str(store.files[2])
    assert found.start <= index < found.end

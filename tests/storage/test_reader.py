"""``open_store`` over stores that Java wrote, against Java's own account of them, and over damaged copies.

What it shows of a native store is the rule of ``read_committed``; servers and ``convert`` call the same code.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
import tarfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.control import TransactionId
from dledger_core.errors import BadRequestError, CorruptRecordError
from dledger_core.record import HEADER_BYTES, RECORD_SCHEMA, Fetch
from dledger_core.storage import StoreReader, Visibility, open_store
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import Checkpoint, save_checkpoint
from dledger_core.storage.read.visibility import SKIPPED_MIN
from tests.spark_connector.store_writer import StoreWriter
from tests.support.archives import unpack
from tests.support.damage import flip, overwrite
from tests.support.logs import visible
from tests.support.only_reading import only_reading

TESTDATA = Path(__file__).parent / "testdata"
GOLDEN = sorted(path.name.removesuffix(".tar.gz") for path in TESTDATA.glob("dledger-*.tar.gz"))
SINGLE = [name for name in GOLDEN if name.endswith("single")]
THREE = ["dledger-0.3.1.2-three", "dledger-0.4.0-three"]
GENERATION_B = "dledger-0.4.0-single"


@dataclass(frozen=True)
class JavaStore:
    """A store, and Java's account of it: ``lines`` has one map per entry."""

    path: Path
    node: str
    lines: list[dict[str, Any]]
    info: dict[str, Any]

    def overwrite(self, position: int, data: bytes) -> str:
        """Write into a data file; return its path."""
        file = self.path / "data" / f"{position - position % 65536:020d}"
        overwrite(file, position % 65536, data)
        return str(file)

    def flip(self, position: int, bit: int = 0) -> str:
        file = self.path / "data" / f"{position - position % 65536:020d}"
        flip(file, position % 65536, 1 << bit)
        return str(file)

    def lines_of(self, batch: pa.RecordBatch) -> list[dict[str, Any]]:
        """Return read entries in the form of ``lines``."""
        names = ("index", "term", "magic", "position", "body")
        return [
            {"n": self.node, "i": i, "t": t, "m": m, "p": p, "s": len(body) + 48, "h": hashlib.sha256(body).hexdigest()}
            for i, t, m, p, body in zip(*(batch[name].to_pylist() for name in names), strict=True)
        ]


def source_of(golden: Path, name: str, node: str | None = None) -> Path:
    return next(p for p in sorted((golden / name).glob("dledger-*")) if node in (None, p.name.removeprefix("dledger-")))


Copied = Callable[..., JavaStore]


@pytest.fixture(scope="module")
def golden(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stores that Java wrote, unpacked."""
    directory = tmp_path_factory.mktemp("golden")
    for name in GOLDEN:
        with tarfile.open(TESTDATA / f"{name}.tar.gz") as archive:
            unpack(archive, directory)
    return directory


@pytest.fixture
def copied(golden: Path, tmp_path: Path) -> Copied:
    """Returns a copy of one of Java's stores."""

    def copy(name: str, node: str | None = None) -> JavaStore:
        source = source_of(golden, name, node)
        node = source.name.removeprefix("dledger-")
        with gzip.open(golden / name / "manifest.jsonl.gz") as file:
            lines = [line for line in map(json.loads, file) if line["n"] == node]
        info = json.loads((golden / name / "info.json").read_text())["nodes"][node]
        return JavaStore(Path(shutil.copytree(source, tmp_path / source.name)), node, lines, info)

    return copy


@pytest.mark.parametrize(
    ("name", "node"),
    [(name, node) for name in GOLDEN for node in ("n0", "n1", "n2") if name.endswith(("three", "diverged"))]
    + [(name, None) for name in GOLDEN if name.endswith(("single", "rejoined"))],
)
def test_java_store_entry_by_entry(copied: Copied, name: str, node: str | None) -> None:
    store = copied(name, node)
    with only_reading(store.path):
        check_entry_by_entry(store, name)


def check_entry_by_entry(store: JavaStore, name: str) -> None:
    reader = open_store(store.path)
    ends = (store.info["begin"], store.info["end"])
    assert reader.writer == ("java-a" if "0.3.1.2" in name else "java-b")
    assert (reader.node_id, reader.group, reader.log_uuid) == (store.node, None, None)
    assert (reader.first_index, reader.last_index) == ends
    batch = reader.read(reader.first_index, reader.last_index + 1, max_bytes=1 << 30)
    assert batch.schema == RECORD_SCHEMA
    assert batch.column("timestamp").null_count == batch.num_rows
    assert store.lines_of(batch) == store.lines
    assert [[found.term, found.first_index] for found in reader.term_ranges()] == [t[:2] for t in store.info["terms"]]
    committed = None if "0.4.0" in name else store.info["committed_after_recover"]
    assert reader.commit_index == committed
    assert reader.fetch(*ends).commit_index == (-1 if committed is None else committed)
    assert reader.shown().end == (reader.last_index if committed is None else committed) + 1
    assert reader.committed_end("end") == reader.last_index + 1
    report = reader.verify()
    assert (report.first_index, report.last_index, report.findings) == (*ends, ())
    assert reader.damaged == ()
    with pytest.raises(BadRequestError):
        reader.index_at_time(0)


def test_generation_b_store_may_start_with_a_blank(copied: Copied) -> None:
    store = copied(GENERATION_B)
    for directory, size in (("data", store.lines[40]["p"]), ("index", 40 * 32)):
        with (store.path / directory / ("0" * 20)).open("r+b") as file:
            file.write(b"\xff\xff\xff\xff" + size.to_bytes(4, "big") + bytes(size - 8))
    reader = open_store(store.path)
    assert reader.first_index == 40
    assert store.lines_of(reader.read(40, 1 << 40, max_bytes=1 << 30)) == store.lines[40:]
    assert reader.verify().findings == ()


def test_remaining_checkpoint_copy_is_read(copied: Copied) -> None:
    store = copied("dledger-0.3.1.2-single")
    (store.path / "checkpoint").rename(store.path / "checkpoint.bak")
    assert open_store(store.path).commit_index == 899


# --- damage ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", THREE)
def test_torn_java_tail_ends_the_log(copied: Copied, name: str) -> None:
    store = copied(name, "n0")
    store.overwrite(store.lines[-1]["p"] + 16, b"\x80")  # a negative term
    reader = open_store(store.path)
    report = reader.verify()
    assert reader.last_index == report.last_index == store.lines[-1]["i"] - 1
    assert [finding.kind for finding in report.findings] == ["MISSING"]


@pytest.mark.parametrize("name", SINGLE)
@pytest.mark.parametrize(
    ("at", "byte"),
    [(500, 4), (880, 4), (300, 23)],
    ids=["size in the middle", "size in the tail", "term above the next"],
)
def test_damaged_header_is_reported_wherever_it_is(copied: Copied, name: str, at: int, byte: int) -> None:
    store = copied(name)
    position = store.lines[at]["p"]
    file = store.flip(position + byte)
    reader = open_store(store.path)
    report = reader.verify()
    found = [(f.kind, f.start, f.end, f.position, f.path) for f in report.findings if f.kind != "INDEX_MISMATCH"]
    assert found == [("CORRUPT", at, at + 1, position, file)]
    assert report.last_index == 899
    assert reader.read(0, at, max_bytes=1 << 30).num_rows == at


@pytest.mark.parametrize("name", THREE)
@pytest.mark.parametrize(("offset", "bit"), [(0, 6), (4, 0), (8, 0), (14, 0), (44, 2)])
def test_entries_after_a_damaged_header_of_java_are_read(
    golden: Path, copied: Copied, name: str, offset: int, bit: int
) -> None:
    """In the last files Java's recovery reads record by record, and would delete all after the damaged one."""
    store = copied(name, "n1")
    store.flip(store.lines[100]["p"] + offset, bit)
    reader, intact = open_store(store.path), open_store(source_of(golden, name, "n1"))
    assert (reader.last_index, reader.damaged) == (intact.last_index, ((100, 101),))
    assert reader.read(99, 101, max_bytes=1) == intact.read(99, 100)
    assert reader.read(101, intact.last_index + 1) == intact.read(101, intact.last_index + 1)
    with pytest.raises(CorruptRecordError) as caught:
        reader.read(98, 103)
    assert caught.value.values["index"] == 100
    assert reader.damage_end(caught.value) == 101
    assert reader.checkpoint_commit_index == (266 if "0.3.1.2" in name else None)


def test_entries_that_java_truncated_are_not_damage(copied: Copied) -> None:
    store = copied("dledger-0.4.0-three", "n1")
    lines = store.lines
    at = next(i for i, line in enumerate(lines) if i and line["t"] > lines[i - 1]["t"])
    store.overwrite(lines[at + 1]["p"], b"\1")  # after a new term's first entry only older ones
    for line in lines[at + 2 :]:
        store.overwrite(line["p"] + 16, bytes(8))
    reader = open_store(store.path)
    assert (reader.last_index, reader.damaged) == (at, ())


@pytest.mark.parametrize("name", SINGLE)
def test_reader_invents_no_bytes_after_a_short_file(copied: Copied, name: str) -> None:
    """Java's records carry no CRC: zeros after a shortened body would be served, and converted, as the body."""
    store = copied(name)
    last = max((store.path / "data").iterdir())
    for line in reversed([line for line in store.lines if line["p"] >= int(last.name)]):
        os.truncate(last, line["p"] - int(last.name) + line["s"] - 1)
        reader = open_store(store.path)
        assert reader.last_index == line["i"] - 1
        assert ("CORRUPT", "error") in [(finding.kind, finding.severity) for finding in reader.verify().findings]
        assert reader.checkpoint_commit_index in (899, None)
        assert reader.commit_index in (reader.last_index, None)


# --- a store that is opened again while it grows --------------------------------------------------------------------


class CountingFiles(OsFiles):
    """Counts the bytes that are read from data files."""

    def __init__(self) -> None:
        self.nbytes = 0

    def open(self, path: Path, *, write: bool = False, **options: Any) -> Any:
        file = super().open(path, write=write, **options)
        if path.parent.name != "data":
            return file
        read = file.pread

        class Counting:
            def __getattr__(self, name: str) -> Any:
                return getattr(file, name)

            def pread(_, length: int, offset: int) -> bytes:  # noqa: N805
                data = read(length, offset)
                self.nbytes += len(data)
                return data

        return Counting()


@pytest.mark.parametrize("name", SINGLE)
def test_refreshed_view_reads_little_if_nothing_is_new(golden: Path, name: str) -> None:
    path, first, again = source_of(golden, name), CountingFiles(), CountingFiles()
    open_store(path, files=again, since=open_store(path, files=first))
    assert again.nbytes < first.nbytes / 2


# --- read_committed -------------------------------------------------------------------------------------------------


def shown(view: StoreReader, start: int = 0) -> list[int]:
    return list(map(int, visible(view, start)["index"].to_pylist()))


def indexes(fetch: Fetch) -> list[int]:
    return list(map(int, fetch.batch["index"].to_pylist()))


def with_commit_index(view: StoreReader, commit_index: int) -> StoreReader:
    """The same store as one that records less as committed."""
    checkpoint = Checkpoint(view.last_index, commit_index, view.position_end)
    save_checkpoint(OsFiles(), Layout(view.path).checkpoint, checkpoint)
    return open_store(view.path)


def test_visible_end_is_the_oldest_open_transaction(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        store.append_attempt(5, batch=3, run="r2")
        store.append_numbers(2)
        view = open_store(store.path)
    assert (view.shown().end, view.committed_end(), view.commit_index) == (10, 18, 17)
    assert view.shown().open_transaction == TransactionId("q", 3, "r2")
    assert shown(view) == list(range(10))
    everything = view.fetch(0, 100, max_bytes=1 << 20, isolation="read_uncommitted")
    assert indexes(everything) == [*range(10), *range(11, 18)]
    assert everything.next_index == 18


@pytest.mark.parametrize("rows", [3, SKIPPED_MIN + 1])
def test_orphaned_attempts_are_left_out(tmp_path: Path, rows: int) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(2)
        lost = store.append_attempt(rows, batch=0)
        won = store.append_attempt(2, batch=0)
        store.commit(won, batch=0)
        view = open_store(store.path)
    assert view.shown().open_transaction is None
    assert view.shown().orphaned(0, view.last_index) == [(lost.first, lost.last + 1)]
    assert shown(view) == [0, 1, won.first, won.last]
    assert shown(view, lost.first) == [won.first, won.last]
    assert view.fetch(lost.first, lost.last, max_bytes=1).next_index == lost.last


def test_outcomes_after_the_committed_end_decide_nothing(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
        opened = store.append_attempt(5, batch=0)
        committed = store.end
        store.commit(opened, batch=0)
        store.append_numbers(1)
        end = store.end
    view = with_commit_index(open_store(store.path), committed - 1)
    assert (view.committed_end(), view.shown().end) == (committed, 10)
    assert (view.committed_end("end"), view.shown(until="end").end) == (end, end), "taken for committed"
    assert indexes(view.fetch(0, end, max_bytes=1 << 20)) == list(range(10))
    assert indexes(view.fetch(0, end, max_bytes=1 << 20, until="end")) == [*range(10), *range(11, 16), 17]


def test_hidden_names_reason_of_each_entry_that_fetch_leaves_out(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(2)
        store.append_attempt(2, batch=0)
        won = store.append_attempt(2, batch=0)
        store.commit(won, batch=0)
        store.append_attempt(2, batch=1)
        store.append_numbers(1)
        store.append([], entry={"k": "abort", "q": "q", "b": 1, "r": "r1"})
        store.append_attempt(1, batch=2)
        store.append_numbers(2)
    view = with_commit_index(open_store(store.path), store.end - 2)
    reasons = view.hidden(view.read(0, store.end)).to_pylist()
    opened = ["control", "open", "open", "uncommitted"]
    expected = [None, None, "control", "aborted", "aborted", "control", None, None, "control"]
    assert reasons == [*expected, "control", "aborted", "aborted", None, "control", *opened]
    assert [index for index, reason in enumerate(reasons) if reason is None] == shown(view)
    assert view.hidden(view.read(0, store.end).slice(0, 0)).to_pylist() == []


def test_refreshed_view_applies_only_new_control_entries(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        lost = store.append_attempt(5, batch=0)
        won = store.append_attempt(5, batch=0)
        store.commit(won, batch=0)
        view = open_store(store.path)
        assert shown(view) == list(range(won.first, won.last + 1))
        with (store.path / "data" / f"{0:020d}").open("r+b") as file:
            file.seek(HEADER_BYTES)
            file.write(b"damaged")
        opened = store.append_attempt(3, batch=1)
        with pytest.raises(CorruptRecordError):
            open_store(store.path).shown()
        newer = open_store(store.path, since=view)
        assert newer.shown().end == opened.first - 1
        assert newer.shown().orphaned(0, store.end) == [(lost.first, lost.last + 1)]


def test_outcomes_are_found_without_index_rows(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, segment_bytes=1 << 24) as store:
        store.append_attempt(2_000, batch=0)
        won = store.append_attempt(5, batch=0)
        store.commit(won, batch=0)
    for path in (store.path / "index").iterdir():
        path.write_bytes(bytes(path.stat().st_size))
    assert shown(open_store(store.path)) == list(range(won.first, won.last + 1))


def test_span_ends_before_a_long_orphaned_range_and_after_the_given_number() -> None:
    visibility = Visibility(10_000, None, [(5, 6), (7, 8), (9, 10), (100, 2000), (9_990, 20_000)])
    assert visibility.span(0, 50) == (0, 50, [(5, 6), (7, 8), (9, 10)])
    assert visibility.span(5, 50, ranges_max=1) == (6, 9, [(7, 8)])
    assert visibility.span(0, 5000) == (0, 100, [(5, 6), (7, 8), (9, 10)])
    assert visibility.span(300, 5000) == (2000, 5000, [])
    assert visibility.span(9_995, 50_000) == (10_000, 10_000, [])
    assert visibility.span(20_000, 30_000) == (20_000, 20_000, [])

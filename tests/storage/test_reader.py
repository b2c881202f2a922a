"""``open_store`` over stores that Java wrote, against Java's own account of them, and over damaged copies."""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.errors import BadRequestError, CorruptRecordError, IndexOutOfRangeError, StoreMismatchError
from dledger_core.record import RECORD_SCHEMA
from dledger_core.storage import StoreReader, open_store
from dledger_core.storage.files.file_system import OsFiles
from tests.spark_connector.store_writer import StoreWriter
from tests.storage.conftest import GOLDEN
from tests.support.growing_store import GrowingStore, everything

CASES = [(name, node) for name in GOLDEN for node in ("n0", "n1", "n2") if name.endswith(("three", "diverged"))] + [
    (name, None) for name in GOLDEN if name.endswith(("single", "rejoined"))
]


def store_of(golden: Path, name: str, node: str | None) -> tuple[Path, str]:
    path = next(p for p in sorted((golden / name).glob("dledger-*")) if node in (None, p.name.removeprefix("dledger-")))
    return path, path.name.removeprefix("dledger-")


def manifest(golden: Path, name: str, node: str) -> list[dict[str, Any]]:
    with gzip.open(golden / name / "manifest.jsonl.gz") as file:
        return [line for line in map(json.loads, file) if line["n"] == node]


def as_manifest(batch: pa.RecordBatch, node: str) -> list[dict[str, Any]]:
    columns = batch.to_pydict()
    names = ("index", "term", "magic", "position", "body")
    return [
        {"n": node, "i": i, "t": t, "m": m, "p": p, "s": len(body) + 48, "h": hashlib.sha256(body).hexdigest()}
        for i, t, m, p, body in zip(*(columns[name] for name in names), strict=True)
    ]


def overwrite(path: Path, position: int, data: bytes) -> None:
    with (path / "data" / f"{position - position % 65536:020d}").open("r+b") as file:
        file.seek(position % 65536)
        file.write(data)


@pytest.mark.parametrize(("name", "node"), CASES)
def test_java_store_entry_by_entry(golden: Path, name: str, node: str | None) -> None:
    path, node = store_of(golden, name, node)
    info = json.loads((golden / name / "info.json").read_text())["nodes"][node]
    reader = open_store(path)
    assert reader.writer == ("java-a" if "0.3.1.2" in name else "java-b")
    assert (reader.node_id, reader.group, reader.log_uuid) == (node, None, None)
    assert (reader.first_index, reader.last_index) == (info["begin"], info["end"])
    batch = reader.read(reader.first_index, reader.last_index + 1, max_bytes=1 << 30)
    assert batch.schema == RECORD_SCHEMA
    assert batch.column("timestamp").null_count == batch.num_rows
    assert as_manifest(batch, node) == manifest(golden, name, node)
    assert [(run.term, run.first_index) for run in reader.term_ranges()] == [
        (t, first) for t, first, _ in info["terms"]
    ]
    committed = info["committed_after_recover"]
    assert reader.commit_index == (None if "0.4.0" in name else committed)
    report = reader.verify()
    assert (report.first_index, report.last_index) == (info["begin"], info["end"])
    assert report.findings == ()
    assert reader.damaged == ()


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.endswith("single")])
@pytest.mark.parametrize("lost", ["index", "index files", "first index file", "index tail"])
def test_java_store_is_read_without_its_index(golden: Path, tmp_path: Path, name: str, lost: str) -> None:
    source, node = store_of(golden, name, None)
    path = Path(shutil.copytree(source, tmp_path / source.name))
    files = sorted((path / "index").iterdir())
    if lost == "index":
        shutil.rmtree(path / "index")
    elif lost == "index files":
        for file in files:
            file.unlink()
    elif lost == "first index file":
        files[0].unlink()
    else:
        files[-1].write_bytes(bytes(4096))
    reader = open_store(path)
    batches, at = [], int(reader.first_index)
    while at <= reader.last_index:
        batch = reader.read(at, reader.last_index + 1, max_bytes=20_000)
        batches += as_manifest(batch, node)
        at += batch.num_rows
    assert batches == manifest(golden, name, node)
    assert {finding.kind for finding in reader.verify().findings} == {"INDEX_MISMATCH"}
    expected = range(890, 900) if lost.startswith("index") and lost != "index tail" else ()
    assert reader.index_mismatches(reader.records(890, 900)) == list(expected)


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.endswith("single")])
def test_java_store_with_its_first_files_deleted(golden: Path, tmp_path: Path, name: str) -> None:
    source, node = store_of(golden, name, None)
    path = Path(shutil.copytree(source, tmp_path / source.name))
    for file in sorted((path / "data").iterdir())[:2]:
        file.unlink()
    expected = [line for line in manifest(golden, name, node) if line["p"] >= 2 * 65536]
    reader = open_store(path)
    assert reader.first_index == expected[0]["i"]
    assert as_manifest(reader.read(reader.first_index, 1 << 40, max_bytes=1 << 30), node) == expected
    assert reader.verify().findings == ()
    with pytest.raises(IndexOutOfRangeError) as caught:
        reader.read(0, 1)
    assert caught.value.values == {"first_index": expected[0]["i"], "last_index": expected[-1]["i"]}


def test_generation_b_store_may_start_with_a_blank(golden: Path, tmp_path: Path) -> None:
    source, node = store_of(golden, "dledger-0.4.0-single", None)
    path = Path(shutil.copytree(source, tmp_path / source.name))
    lines = manifest(golden, "dledger-0.4.0-single", node)
    start = lines[40]["p"]
    data, index = path / "data" / ("0" * 20), path / "index" / ("0" * 20)
    with data.open("r+b") as file:
        file.write(b"\xff\xff\xff\xff" + start.to_bytes(4, "big") + bytes(start - 8))
    with index.open("r+b") as file:
        file.write(b"\xff\xff\xff\xff" + (40 * 32).to_bytes(4, "big") + bytes(40 * 32 - 8))
    reader = open_store(path)
    assert reader.first_index == 40
    assert as_manifest(reader.read(40, 1 << 40, max_bytes=1 << 30), node) == lines[40:]
    assert reader.verify().findings == ()


@pytest.mark.parametrize("name", ["dledger-0.3.1.2-three", "dledger-0.4.0-three"])
def test_torn_java_tail_ends_the_log(golden: Path, tmp_path: Path, name: str) -> None:
    source, node = store_of(golden, name, "n0")
    path = Path(shutil.copytree(source, tmp_path / source.name))
    last = manifest(golden, name, node)[-1]
    file = path / "data" / f"{last['p'] - last['p'] % 65536:020d}"
    content = bytearray(file.read_bytes())
    content[last["p"] % 65536 + 16] = 0x80  # a negative term
    file.write_bytes(content)
    reader = open_store(path)
    assert reader.last_index == last["i"] - 1
    report = reader.verify()
    assert report.last_index == last["i"] - 1
    assert [finding.kind for finding in report.findings] == ["TORN_TAIL"]


@pytest.mark.parametrize("name", ["dledger-0.3.1.2-single", "dledger-0.4.0-single"])
@pytest.mark.parametrize(("at", "kind"), [(100, "CORRUPT"), (500, "CORRUPT"), (880, "CORRUPT"), (300, "TERM")])
def test_verify_reports_a_damaged_header_and_continues(
    golden: Path, tmp_path: Path, name: str, at: int, kind: str
) -> None:
    source, node = store_of(golden, name, None)
    path = Path(shutil.copytree(source, tmp_path / source.name))
    line = manifest(golden, name, node)[at]
    file = path / "data" / f"{line['p'] - line['p'] % 65536:020d}"
    content = bytearray(file.read_bytes())
    content[line["p"] % 65536 + (23 if kind == "TERM" else 4)] ^= 1
    file.write_bytes(content)
    report = open_store(path).verify()
    found = [(f.kind, f.start, f.end, f.position) for f in report.findings if f.kind != "INDEX_MISMATCH"]
    assert found == [("CORRUPT", at, at + 1, line["p"])]
    assert report.last_index == 899
    assert next(f.path for f in report.findings if f.kind == "CORRUPT") == str(file)


@pytest.mark.parametrize("name", ["dledger-0.3.1.2-single", "dledger-0.4.0-single"])
def test_read_never_returns_a_record_with_a_damaged_header(golden: Path, tmp_path: Path, name: str) -> None:
    source, node = store_of(golden, name, None)
    path = Path(shutil.copytree(source, tmp_path / source.name))
    line = manifest(golden, name, node)[100]
    file = path / "data" / f"{line['p'] - line['p'] % 65536:020d}"
    content = bytearray(file.read_bytes())
    content[line["p"] % 65536 + 4] ^= 1
    file.write_bytes(content)
    reader = open_store(path)
    assert reader.last_index == 899
    assert reader.read(0, 100, max_bytes=1 << 30).num_rows == 100
    assert reader.read(101, 200, max_bytes=1 << 30).num_rows == 99
    for start, end in ((100, 101), (50, 150)):
        with pytest.raises(CorruptRecordError) as caught:
            reader.read(start, end, max_bytes=1 << 30)
        assert caught.value.values == {"index": 100, "position": line["p"]}
        assert caught.value.where == str(file)


@pytest.mark.parametrize("name", ["dledger-0.3.1.2-three", "dledger-0.4.0-three"])
@pytest.mark.parametrize(("offset", "bit"), [(0, 6), (4, 0), (8, 0), (14, 0), (44, 2)])
def test_entries_after_a_damaged_header_of_java_are_read(
    golden: Path, tmp_path: Path, name: str, offset: int, bit: int
) -> None:
    """In the last files Java's recovery reads record by record, and would delete all after the damaged one."""
    source, node = store_of(golden, name, "n1")
    path = Path(shutil.copytree(source, tmp_path / source.name))
    line = manifest(golden, name, node)[100]
    at = line["p"] + offset
    byte = (path / "data" / f"{at - at % 65536:020d}").read_bytes()[at % 65536]
    overwrite(path, at, bytes([byte ^ 1 << bit]))
    reader = open_store(path)
    intact = open_store(source)
    assert (reader.last_index, reader.damaged) == (intact.last_index, ((100, 101),))
    assert reader.read(99, 101, max_bytes=1) == intact.read(99, 100)
    assert reader.read(101, intact.last_index + 1) == intact.read(101, intact.last_index + 1)
    with pytest.raises(CorruptRecordError) as caught:
        reader.read(98, 103)
    assert caught.value.values["index"] == 100
    assert reader.damage_end(caught.value) == 101
    assert reader.checkpoint_commit_index == (266 if "0.3.1.2" in name else None)


def test_entries_that_java_truncated_are_not_damage(golden: Path, tmp_path: Path) -> None:
    source, node = store_of(golden, "dledger-0.4.0-three", "n1")
    path = Path(shutil.copytree(source, tmp_path / source.name))
    lines = manifest(golden, "dledger-0.4.0-three", node)
    at = next(i for i, line in enumerate(lines) if i and line["t"] > lines[i - 1]["t"])
    overwrite(path, lines[at + 1]["p"], b"\1")  # a new term's first entry, and behind it nothing but what is older
    for line in lines[at + 2 :]:
        overwrite(path, line["p"] + 16, bytes(8))
    reader = open_store(path)
    assert (reader.last_index, reader.damaged) == (at, ())


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.endswith("single")])
def test_reader_invents_no_bytes_after_a_short_file(golden: Path, tmp_path: Path, name: str) -> None:
    """Java's records carry no CRC: zeros after a shortened body would be served, and converted, as the body."""
    source, node = store_of(golden, name, None)
    path = Path(shutil.copytree(source, tmp_path / source.name))
    last = sorted((path / "data").iterdir())[-1]
    inside = [line for line in manifest(golden, name, node) if line["p"] >= int(last.name)]
    for line in reversed(inside):
        os.truncate(last, line["p"] - int(last.name) + line["s"] - 1)
        reader = open_store(path)
        assert reader.last_index == line["i"] - 1
        found = [(finding.kind, finding.severity) for finding in reader.verify().findings]
        assert ("CORRUPT", "error") in found
        assert reader.checkpoint_commit_index in (899, None)
        assert reader.commit_index in (reader.last_index, None)


def test_remaining_checkpoint_copy_is_read(golden: Path, tmp_path: Path) -> None:
    source, _ = store_of(golden, "dledger-0.3.1.2-single", None)
    path = Path(shutil.copytree(source, tmp_path / source.name))
    (path / "checkpoint").rename(path / "checkpoint.bak")
    assert open_store(path).commit_index == 899


@pytest.mark.parametrize("make", [[], ["index"], ["data.txt"]])
def test_open_store_rejects_a_directory_without_data(tmp_path: Path, make: list[str]) -> None:
    for name in make:
        (tmp_path / name).mkdir()
    with pytest.raises(StoreMismatchError) as caught:
        open_store(tmp_path)
    assert caught.value.where == str(tmp_path)
    assert caught.value.exit_code == 3


def test_empty_java_store_has_no_entries(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    reader = open_store(str(tmp_path))
    assert (reader.first_index, reader.last_index, reader.commit_index) == (0, -1, None)
    assert (reader.term_ranges(), reader.verify().findings) == ([], ())
    with pytest.raises(IndexOutOfRangeError):
        reader.read(0, 1)


# --- a store that is opened again while it grows ------------------------------------------------------------------

SINGLE = [name for name in GOLDEN if name.endswith("single")]


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


@pytest.mark.parametrize("with_index", [True, False])
@pytest.mark.parametrize("name", SINGLE)
def test_refreshed_view_equals_a_new_one(golden: Path, tmp_path: Path, name: str, with_index: bool) -> None:
    source = next((golden / name).glob("dledger-*"))
    store = GrowingStore(source, tmp_path / source.name, with_index=with_index)
    total = len(store.rows)
    view: StoreReader | None = None
    for count in (1, 2, total // 3, total // 3, total // 2, total - 1, total):
        store.hold(count)
        view = open_store(store.path, since=view)
        assert view.last_index + 1 - view.first_index == count
        assert everything(view) == store.rows[:count]
    assert view is not None
    assert view.term_ranges() == open_store(store.path).term_ranges()


@pytest.mark.parametrize("name", SINGLE)
def test_refreshed_view_reads_little_if_nothing_is_new(golden: Path, tmp_path: Path, name: str) -> None:
    source = next((golden / name).glob("dledger-*"))
    path = Path(shutil.copytree(source, tmp_path / source.name))
    first, again = CountingFiles(), CountingFiles()
    view = open_store(path, files=first)
    open_store(path, files=again, since=view)
    assert again.nbytes < first.nbytes / 2


@pytest.mark.parametrize("name", SINGLE)
def test_refreshed_view_of_a_shorter_log_is_scanned_again(golden: Path, tmp_path: Path, name: str) -> None:
    source = next((golden / name).glob("dledger-*"))
    store = GrowingStore(source, tmp_path / source.name, with_index=True)
    view = open_store(store.path)
    store.hold(len(store.rows) // 2)
    shorter = open_store(store.path, since=view)
    assert everything(shorter) == store.rows[: len(store.rows) // 2]


# --- search by time and position ----------------------------------------------------------------------------------


@pytest.mark.parametrize("with_index", [True, False])
def test_index_at_time_returns_the_first_entry_at_or_after_it(tmp_path: Path, with_index: bool) -> None:
    with StoreWriter(tmp_path) as store:
        for _ in range(4):
            store.append_numbers(3)
    if not with_index:
        for path in (store.path / "index").iterdir():
            path.write_bytes(bytes(path.stat().st_size))
    view = open_store(store.path)
    times = [int(time.timestamp() * 1000) for time in view.read(0, 12)["timestamp"].to_pylist()]
    assert [view.index_at_time(time) for time in times[::3]] == [0, 3, 6, 9]
    assert [view.index_at_time(time + 1) for time in times[::3]] == [3, 6, 9, 12]
    assert view.index_at_time(0) == 0


@pytest.mark.parametrize("name", [name for name in GOLDEN if name.endswith("single")])
def test_index_at_time_rejects_a_java_store(golden: Path, name: str) -> None:
    with pytest.raises(BadRequestError):
        open_store(next((golden / name).glob("dledger-*"))).index_at_time(0)


def test_index_at_position_returns_the_entry_that_contains_it(tmp_path: Path) -> None:
    with StoreWriter(tmp_path, segment_bytes=1 << 12) as store:
        store.append([bytes(1000)] * 8)  # each segment ends with a BLANK
    view = open_store(store.path)
    positions = view.read(0, 8)["position"].to_pylist()
    assert [view.index_at_position(position) for position in positions] == list(range(8))
    assert [view.index_at_position(position + 1047) for position in positions] == list(range(8))
    assert [view.index_at_position(position + 1048) for position in positions] == list(range(1, 9))
    assert view.index_at_position((1 << 12) - 1) == 3, "a BLANK belongs to no entry"

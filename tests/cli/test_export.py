"""``dledger export``: the same entries in every format, in parts, after an interruption, and up to damage."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import csv, ipc, parquet

from dledger_core import open_store
from dledger_core.cli.dataset import Dataset
from dledger_core.rocketmq import decode_messages, encode_messages
from dledger_core.storage import CommitLog
from tests.cli.command import error_of, result_of, rows_of, run
from tests.jobs.broker_store import messages as store_messages
from tests.jobs.broker_store import write_commitlog
from tests.rocketmq.convert.stores import store_of, unpacked
from tests.rocketmq.golden import MIXED, THREE, extract, messages
from tests.spark_connector.store_writer import StoreWriter
from tests.support.damage import flip, place_of
from tests.support.logs import append


def table_of(kind: str, directory: Path) -> pa.Table:
    files = sorted(directory.glob(f"*.{kind}"))
    readers: dict[str, Callable[[Path], pa.Table]] = {
        "parquet": parquet.read_table,
        "arrow": lambda path: ipc.open_file(str(path)).read_all(),
    }
    return pa.concat_tables([readers[kind](file) for file in files])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract(THREE, "n0/dledger-n0", tmp_path_factory.mktemp("store"))


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@pytest.mark.parametrize("part_bytes", [1 << 30, 100_000])
def test_export_has_the_messages_of_the_store(store: Path, tmp_path: Path, kind: str, part_bytes: int) -> None:
    found = result_of("export", store, tmp_path / "out", "--to", kind, "--part-bytes", part_bytes)
    assert (found["end_index"], found["files"] > 1) == (1024, part_bytes == 100_000)
    with open_store(store) as reader:
        assert table_of(kind, tmp_path / "out") == reader.messages().read_all()


def test_export_as_text_has_every_body(store: Path, tmp_path: Path) -> None:
    with open_store(store) as reader:
        expected = reader.messages(0, 200).read_all().to_pylist()

    def body(row: dict[str, Any]) -> bytes:
        coded = row.get("body_base64")
        return base64.b64decode(coded) if coded else (row.get("body") or "").encode()

    for kind in ("csv", "jsonl"):
        run("export", store, tmp_path / kind, "--to", kind, "--until", 200)
    (lines,) = (tmp_path / "jsonl").glob("*.jsonl")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [body(row) for row in rows] == [row["body"] or b"" for row in expected]
    assert [row["keys"] for row in rows] == [row["keys"] for row in expected]
    (sheet,) = (tmp_path / "csv").glob("*.csv")
    text = csv.ConvertOptions(column_types={"body": pa.string(), "body_base64": pa.string()})
    options = csv.ParseOptions(newlines_in_values=True)
    table = csv.read_csv(sheet, convert_options=text, parse_options=options)
    assert table.column("index").to_pylist() == list(range(200))


def test_export_continues_after_an_interruption(store: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run("export", store, out, "--part-bytes", 100_000)
    files = sorted(out.glob("*.parquet"))
    before = {file.name: file.stat().st_mtime_ns for file in files[:2]}
    for file in files[2:]:
        file.unlink()
    (out / "77.part").write_bytes(b"unfinished")
    found = result_of("export", store, out, "--part-bytes", 100_000)
    assert found["continued_from"] == int(files[1].stem.partition("-")[2])
    assert {file.name: file.stat().st_mtime_ns for file in sorted(out.iterdir())[:2]} == before
    assert table_of("parquet", out).num_rows == 1024
    assert result_of("export", store, out)["files"] == 0


def test_export_ends_with_code_4_at_damage(store: Path, tmp_path: Path) -> None:
    damaged = extract(THREE, "n0/dledger-n0", tmp_path)
    file, offset = place_of(damaged, 500)
    flip(file, offset + 150)
    error = error_of("export", damaged, tmp_path / "out", code=4)
    assert (error.code, error.values["index"]) == ("CORRUPT", "500")
    assert table_of("parquet", tmp_path / "out").num_rows == 500
    assert not list((tmp_path / "out").glob("*.part"))
    run("export", damaged, tmp_path / "rest", "--from", 501)
    assert table_of("parquet", tmp_path / "rest").num_rows == 523


def test_export_of_plain_entries_and_bad_ranges(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    append(log, [b"one", b"\xff\x00"])
    log.close(1)
    run("export", tmp_path / "s", tmp_path / "out", "--opaque")
    assert table_of("parquet", tmp_path / "out").column("body").to_pylist() == [b"one", b"\xff\x00"]
    error_of("export", tmp_path / "s", tmp_path / "out", "--from", 3)


def test_export_of_a_broker_has_the_messages_of_its_commitlog(tmp_path: Path) -> None:
    classic = extract(MIXED, "n0/commitlog", tmp_path)
    extract(MIXED, "n0/dledger-n0", tmp_path)
    expected = [record for place, record in messages(MIXED).items() if place < 262144]
    for number, source in enumerate((classic, classic.parent)):
        out = tmp_path / str(number)
        result_of("export", source, out, "--part-bytes", 20_000)
        files = sorted(out.glob("commitlog-*.parquet"))
        table = pa.concat_tables([parquet.read_table(file) for file in files])
        decoded = decode_messages(pa.array(expected, pa.binary()))
        assert table.column("body").to_pylist() == decoded.column("body").to_pylist()
        assert table.column("position").to_pylist() == decoded.column("physical_offset").to_pylist()
        assert len(files) > 2
        assert len(list(out.iterdir())) > len(files) * number
        files[-1].unlink()
        assert result_of("export", source, out, "--part-bytes", 20_000)["files"] == 1
        assert result_of("export", source, out, "--part-bytes", 20_000)["files"] == 0
        assert not list(out.glob("*.part"))


def test_export_continues_a_commitlog_that_has_grown(tmp_path: Path) -> None:
    bodies = store_messages(range(20))
    write_commitlog(tmp_path / "before", bodies[:10])
    write_commitlog(tmp_path / "after", bodies)
    for source, count in (("before", 10), ("after", 20)):
        assert result_of("export", tmp_path / source, tmp_path / "out")["files"] == 1
        assert table_of("parquet", tmp_path / "out").num_rows == count


# --- a dataset is continued only where it fits its log ---------------------------------------------------------------


def indexes(directory: Path) -> list[int]:
    return [int(index) for index in table_of("parquet", directory).column("index").to_pylist()]


def test_nightly_export_after_retention_has_each_entry_once(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with StoreWriter(tmp_path) as store:
        store.append_numbers(2000)
        result_of("export", store.path, out)
        assert 0 < store.trim() < 2000
        store.append_numbers(500)
        found = result_of("export", store.path, out)
    assert (found["first_index"], found["continued_from"], found["rows"], found["files"]) == (0, 2000, 500, 1)
    assert indexes(out) == list(range(2500))


def commitlog_of(directory: Path, bodies: list[bytes], per_file: int) -> Path:
    """Write a classic CommitLog of full files, of messages of the same size."""
    directory.mkdir()
    size = len(bodies[0])
    for start in range(0, len(bodies), per_file):
        file = directory / f"{start * size:020d}"
        numbered = [(body, (start + at) * size) for at, body in enumerate(bodies[start : start + per_file])]
        file.write_bytes(b"".join(body[:28] + place.to_bytes(8, "big") + body[36:] for body, place in numbered))
    return directory


def test_nightly_export_of_commitlog_after_retention_has_each_message_once(tmp_path: Path) -> None:
    bodies, out = store_messages(range(100, 160)), tmp_path / "out"
    result_of("export", commitlog_of(tmp_path / "a", bodies[:40], 20), out)
    later = commitlog_of(tmp_path / "b", bodies, 20)
    min(later.iterdir()).unlink()
    assert result_of("export", later, out)["rows"] == 20
    assert table_of("parquet", out).column("queue_offset").to_pylist() == list(range(100, 160))
    other = commitlog_of(tmp_path / "c", store_messages(range(900, 960)), 20)
    assert error_of("export", other, out).code == "STORE_MISMATCH"
    before = commitlog_of(tmp_path / "d", bodies[:40], 20)
    assert error_of("export", before, out).code == "STORE_MISMATCH", "it ends before the dataset"
    late = commitlog_of(tmp_path / "e", store_messages(range(100, 200)), 20)
    for file in sorted(late.iterdir())[:4]:
        file.unlink()
    error = error_of("export", late, out)
    assert error.code == "INDEX_OUT_OF_RANGE"
    run("export", late, out, "--from", error.partition("--from ")[2].partition(" ")[0])
    assert table_of("parquet", out).column("queue_offset").to_pylist() == [*range(100, 160), *range(180, 200)]


def with_tail(directory: Path, tail: list[bytes], *, committed: int, term: int = 1) -> Path:
    """Write a store of ten entries and a tail of a term, closed with a commit index."""
    log = CommitLog.open(directory, group="g", node_id="n0")
    log.adopt_uuid("log-1")
    append(log, [b"kept"] * 10)
    append(log, tail, term)
    log.close(committed)
    return directory


def test_export_leaves_out_entries_that_were_never_committed(tmp_path: Path) -> None:
    old = with_tail(tmp_path / "old", [b"ghost"] * 3, committed=9)
    found = result_of("export", old, tmp_path / "out")
    assert (found["rows"], found["commit_index"], found["above_commit_index"]) == (10, 9, 3)
    everything = result_of("export", old, tmp_path / "all", "--until", "end")
    assert everything["rows"] == 13
    for again in (everything, result_of("export", old, tmp_path / "all")):
        assert (again["end_index"], again["above_commit_index"]) == (13, 3)
    assert result_of("export", old, tmp_path / "some", "--until", 12)["end_index"] == 10, "an index commits nothing"

    rejoined = with_tail(tmp_path / "rejoined", [b"acknowledged"] * 5, committed=14, term=2)
    assert result_of("export", rejoined, tmp_path / "out")["continued_from"] == 10
    assert table_of("parquet", tmp_path / "out")["body"].to_pylist() == [b"kept"] * 10 + [b"acknowledged"] * 5
    before = sorted((tmp_path / "all").iterdir())
    error = error_of("export", rejoined, tmp_path / "all")
    assert error.code == "STORE_MISMATCH"
    assert sorted((tmp_path / "all").iterdir()) == before


@pytest.mark.parametrize(("version", "node"), [("0.3.1.2", "n1"), ("0.4.0", "n2")])
def test_export_of_old_leader_of_java_that_rejoined_has_one_history(tmp_path: Path, version: str, node: str) -> None:
    before, after = (
        store_of(unpacked(f"dledger-{version}-{state}", tmp_path), node)[0] for state in ("diverged", "rejoined")
    )
    for out, until in (("committed", "committed"), ("end", "end")):
        found = result_of("export", before, tmp_path / out, "--until", until)
        if found["above_commit_index"] and until == "committed":  # only generation A records a commit index
            run("export", after, tmp_path / out)
            with open_store(after) as reader:
                assert indexes(tmp_path / out) == list(range(reader.last_index + 1))
        else:
            assert error_of("export", after, tmp_path / out).code == "STORE_MISMATCH"


def test_export_reads_store_without_commit_index_to_its_end(tmp_path: Path) -> None:
    copy = extract(THREE, "n0/dledger-n0", tmp_path)
    for file in copy.glob("checkpoint*"):
        file.unlink()
    found = result_of("export", copy, tmp_path / "out")
    assert (found["rows"], found["commit_index"], found["note"] is None) == (1024, None, False)


def test_export_continues_no_other_log(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with StoreWriter(tmp_path / "a", uuid="log-a") as first, StoreWriter(tmp_path / "b", uuid="log-b") as other:
        first.append_numbers(10)
        other.append_numbers(20)
    run("export", first.path, out)
    assert error_of("export", other.path, out).code == "STORE_MISMATCH"
    with StoreWriter(tmp_path / "c", uuid="log-a") as shorter:
        shorter.append_numbers(5)
    assert error_of("export", shorter.path, out).values["log_end"] == "5"
    commitlog = commitlog_of(tmp_path / "commitlog", store_messages(range(5)), 5)
    assert error_of("export", commitlog, out).code == "STORE_MISMATCH"
    run("export", commitlog, tmp_path / "classic")
    assert error_of("export", first.path, tmp_path / "classic").code == "STORE_MISMATCH"
    assert indexes(out) == list(range(10))


@pytest.mark.parametrize(
    ("option", "named"),
    [
        (("--to", "csv"), "csv"),
        (("--opaque",), "opaque"),
        (("--isolation", "read-uncommitted"), "read-uncommitted"),
        (("--topic", "other"), "other"),
        (("--from", "2026-01-31"), "2026-01-31"),
    ],
)
def test_export_continues_with_the_same_options_only(tmp_path: Path, option: tuple[str, ...], named: str) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
    run("export", store.path, tmp_path / "out")
    error = error_of("export", store.path, tmp_path / "out", *option)
    assert error.code == "CONFIG"
    assert named in error


def test_export_with_from_never_repeats_entries(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with StoreWriter(tmp_path) as store:
        store.append_numbers(2000)
    run("export", store.path, out, "--from", 100, "--until", 200)
    for inside in (0, 150, 199):
        assert error_of("export", store.path, out, "--from", inside, "--until", 300).code == "INDEX_OUT_OF_RANGE"
    run("export", store.path, out, "--from", 100, "--until", 300)
    run("export", store.path, out, "--from", 300, "--until", 400)
    assert indexes(out) == list(range(100, 400))
    with StoreWriter(tmp_path) as store:
        first = store.trim()
    assert first > 400
    error = error_of("export", store.path, out)
    assert error.code == "INDEX_OUT_OF_RANGE"
    run("export", store.path, out, "--from", error.partition("--from ")[2].split()[0])
    assert indexes(out) == [*range(100, 400), *range(first, 2000)]
    assert result_of("export", store.path, out, "--from", 100)["files"] == 0, "entry 100 is deleted now"


def test_second_export_into_the_same_directory_is_refused(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as store:
        store.append_numbers(10)
    with Dataset.open(tmp_path / "out", {}):
        assert error_of("export", store.path, tmp_path / "out").code == "STORE_BUSY"
    run("export", store.path, tmp_path / "out")
    assert indexes(tmp_path / "out") == list(range(10))


def test_export_refuses_files_that_its_manifest_does_not_fit(tmp_path: Path) -> None:
    out = tmp_path / "out"
    with StoreWriter(tmp_path) as store:
        store.append_numbers(100)
    run("export", store.path, out, "--part-bytes", 200)
    files = sorted(out.glob("*.parquet"))
    content = files[1].read_bytes()
    files[1].unlink()
    assert files[1].name in error_of("export", store.path, out)
    files[1].write_bytes(content)
    assert result_of("export", store.path, out)["files"] == 0
    (manifest,) = out.glob("*.json")
    text = manifest.read_text()
    for damaged in ("{", "[]", '{"v": 1}', text.replace('"v": 1', '"v": 2'), text.replace('"first"', '"start"')):
        manifest.write_text(damaged)
        assert error_of("export", store.path, out).code == "CONFIG"
    manifest.unlink()
    assert error_of("export", store.path, out).code == "CONFIG", "version 0.2 wrote no manifest"


def test_export_filters_as_dump_does(tmp_path: Path) -> None:
    bodies = encode_messages(
        ["a", "a", "b", "b"] * 5, [0, 1] * 10, [b"one", b"two"] * 10, tags=["x", "y", "y", None] * 5, keys=["k"] * 20
    )
    with StoreWriter(tmp_path) as store:
        for body in bodies.to_pylist():
            store.append([body])
        times = [row["timestamp"] for row in open_store(store.path).read(0, 20).to_pylist()]
    since, until = (time.isoformat(timespec="milliseconds").removesuffix("+00:00") for time in (times[4], times[15]))
    for number, options in enumerate(
        [
            ("--topic", "a"),
            ("--topic", "b", "--tag", "y", "--queue", 0),
            ("--key", "k", "--from", since),
            ("--grep", "tw"),
            ("--topic", "none"),
        ]
    ):
        out = tmp_path / str(number)
        found = result_of("export", store.path, out, "--to", "jsonl", *options)
        lines = [json.loads(line) for file in sorted(out.glob("*.jsonl")) for line in file.read_text().splitlines()]
        dumped = rows_of("dump", store.path, *options)
        assert [row["index"] for row in lines] == [row["index"] for row in dumped]
        assert (found["rows"], found["end_index"]) == (len(dumped), 20)
        assert result_of("export", store.path, out, "--to", "jsonl", *options)["files"] == 0
    found = result_of("export", store.path, tmp_path / "time", "--from", since, "--until", until)
    assert found["rows"] == 11

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
from dledger_core.rocketmq import decode_messages
from dledger_core.storage import CommitLog
from tests.cli.command import error_of, result_of, run
from tests.jobs.broker_store import messages as store_messages
from tests.jobs.broker_store import write_commitlog
from tests.rocketmq.convert.stores import flip, place_of
from tests.rocketmq.golden import MIXED, THREE, extract, messages
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
    files = sorted(out.iterdir())
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
    assert "index=500" in error_of("export", damaged, tmp_path / "out", code=4)
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

"""``dledger checkpoint``: content of a checkpoint, and the options that start a new query there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dledger_core.cli import main
from spark_connector.offsets import GroupOffset, StreamOffset, read_checkpoint
from spark_connector.options import DLedgerOptions
from tests.spark_connector.spark_directory import QUERY_ID, offset, tree, write_checkpoint


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def shown_by(*arguments: object) -> Any:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """Two groups; micro-batch 2 is planned and not committed."""
    offsets = [offset(a=0, b=5), offset(a=100, b=5), offset(a=200, b=50)]
    return write_checkpoint(tmp_path / "c", *offsets, committed=2)


def test_show_prints_query_batches_and_positions(running: Path) -> None:
    before = tree(running)
    shown = shown_by("show", running)
    positions = shown.pop("positions")
    assert shown == {
        "checkpoint": str(running),
        "query_id": QUERY_ID,
        "planned_batch_id": 2,
        "committed_batch_id": 1,
        "a_restart": shown["a_restart"],
    }
    assert [(row["batch_id"], row["committed"], row["group"], row["next_index"]) for row in positions] == [
        (0, True, "a", 0),
        (0, True, "b", 5),
        (1, True, "a", 100),
        (1, True, "b", 5),
        (2, False, "a", 200),
        (2, False, "b", 50),
    ]
    assert positions[-1] == {
        "batch_id": 2,
        "committed": False,
        "planned_at": "2023-11-14T22:13:20.002+00:00",
        "source": 0,
        "group": "b",
        "next_index": 50,
        "term": 1,
        "log": "log-1",
    }
    assert len(shown_by("show", running, "--last", "1")["positions"]) == 2
    table = run("show", running).stdout
    assert "log-1" in table
    assert tree(running) == before


@pytest.mark.parametrize(
    ("arguments", "offsets"),
    [
        ([], {"a": 100, "b": 5}),
        (["--at", "planned"], {"a": 200, "b": 50}),
    ],
)
def test_export_prints_options_for_new_query(running: Path, arguments: list[str], offsets: dict[str, int]) -> None:
    options = shown_by("export", running, *arguments)
    parsed = DLedgerOptions.for_reading({"peers": "n0-h:1", **options})
    assert (parsed.groups, parsed.starting_offsets) == (("a", "b"), offsets)
    result = run("export", running, *arguments)
    assert "micro-batch 2" in result.stderr
    assert result.stdout.splitlines() == [
        ".option(\"groups\", 'a,b')",
        f'.option("startingOffsets", {json.dumps(offsets)!r})',
    ]


def test_committed_query_exports_end_of_last_batch(tmp_path: Path) -> None:
    done = write_checkpoint(tmp_path / "c", offset(a=7), offset(a=9), committed=2, first=120)
    assert shown_by("show", done)["committed_batch_id"] == 121
    assert shown_by("export", done)["startingOffsets"] == '{"a": 9}'


def test_query_without_commit_exports_its_start(tmp_path: Path) -> None:
    begun = write_checkpoint(tmp_path / "c", offset(a=7), committed=0)
    assert shown_by("export", begun)["startingOffsets"] == '{"a": 7}'
    assert shown_by("show", begun)["committed_batch_id"] is None


def test_each_native_source_gets_its_options(tmp_path: Path) -> None:
    lines = "\n".join([offset(a=7), '{"topic":{"0":5}}', offset(b=8), "-"])
    joined = write_checkpoint(tmp_path / "c", lines, committed=1)
    assert [row["groups"] for row in shown_by("export", joined)] == ["a", "b"]
    assert [(row["source"], row["group"]) for row in shown_by("show", joined)["positions"]] == [(0, "a"), (2, "b")]
    assert run("export", joined).stdout.splitlines()[0] == "# source 0"


def test_written_offset_is_read_unchanged(tmp_path: Path) -> None:
    written = StreamOffset({"a": GroupOffset(12, "log-9", 3, 99), "b": GroupOffset(0)}).to_json()
    path = write_checkpoint(tmp_path / "c", json.dumps(written), committed=1)
    (ends,) = read_checkpoint(path).reached.ends
    assert ends is not None
    assert ends.to_json() == written


def damage(path: Path, file: str, text: str) -> None:
    (path / file).write_text(text)


@pytest.mark.parametrize("command", ["show", "export"])
@pytest.mark.parametrize(
    ("file", "text", "said"),
    [
        ("offsets/1", "", "v1"),
        ("offsets/1", "v2\n{}\n{}", "'v2'"),
        ("offsets/1", "v1\n{}\n{", "damaged"),
        ("offsets/1", 'v1\n{}\n{"groups": {"a": {"next": "x"}}, "v": 1}', "not an offset"),
        ("offsets/1", 'v1\n{}\n{"groups": {}, "v": 2}', "version 2"),
        ("metadata", "{", "damaged"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_damaged_checkpoint_is_reported_in_one_line(
    tmp_path: Path, command: str, file: str, text: str, said: str
) -> None:
    path = write_checkpoint(tmp_path / "c", offset(a=0), offset(a=5), committed=2)
    damage(path, file, text)
    before = tree(path)
    result = run(command, path)
    assert (result.exit_code, result.stdout) == (3, ""), result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert said in result.stderr
    assert str(path / file) in result.stderr
    assert tree(path) == before


@pytest.mark.parametrize("command", ["show", "export"])
@pytest.mark.parametrize(
    ("made", "code"),
    [
        ("absent", "CONFIG"),
        ("file", "CONFIG"),
        ("empty", "DLEDGER_CHECKPOINT"),
        ("unused", "DLEDGER_CHECKPOINT"),
        ("kafka", "DLEDGER_CHECKPOINT"),
        ("s3a://bucket/c", "CONFIG"),
    ],
)
def test_other_directory_is_rejected_in_one_line(tmp_path: Path, command: str, made: str, code: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unused").mkdir()
    (tmp_path / "unused" / "metadata").write_text("{}")
    write_checkpoint(tmp_path / "kafka", '{"topic":{"0":5}}', committed=1)
    before = tree(tmp_path)
    result = run(command, made if "://" in made else tmp_path / made)
    assert (result.exit_code, result.stdout) == (3, ""), result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert f"[{code}]" in result.stderr
    assert made in result.stderr
    assert tree(tmp_path) == before


def test_query_without_group_exports_nothing(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", offset(), committed=1)
    assert shown_by("show", path)["positions"] == []
    result = run("export", path)
    assert (result.exit_code, result.stdout) == (3, "")
    assert str(path) in result.stderr


def test_missing_commits_are_error(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", offset(a=5), committed=0, first=40)
    result = run("export", path)
    assert result.exit_code == 3
    assert "[DLEDGER_CHECKPOINT]" in result.stderr


def test_file_uri_is_accepted(running: Path) -> None:
    assert shown_by("show", f"file://{running}")["query_id"] == QUERY_ID

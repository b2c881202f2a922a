"""What the checkpoint of a query holds, and the options that start a new one there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from dledger_core.cli import main
from spark_connector.offsets import GroupOffset, StreamOffset
from spark_connector.options import DLedgerOptions
from spark_connector.spark_checkpoint import read_checkpoint
from tests.spark_connector.spark_directory import QUERY_ID, offset, tree, write_checkpoint


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def facts(*arguments: object) -> Any:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """Two groups; micro-batch 2 is begun and not committed."""
    offsets = [offset(a=0, b=5), offset(a=100, b=5), offset(a=200, b=50)]
    return write_checkpoint(tmp_path / "c", *offsets, committed=2)


def test_show_tells_query_batches_and_positions(running: Path) -> None:
    before = tree(running)
    shown = facts("show", running)
    positions = shown.pop("positions")
    assert shown == {
        "checkpoint": str(running),
        "query_id": QUERY_ID,
        "planned_batch_id": 2,
        "committed_batch_id": 1,
        "a_restart": "runs micro-batch 2 again",
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
    assert len(facts("show", running, "--last", "1")["positions"]) == 2
    table = run("show", running).stdout
    assert "runs micro-batch 2 again" in table
    assert "log-1" in table
    assert tree(running) == before


@pytest.mark.parametrize(
    ("arguments", "offsets", "said"),
    [
        ([], {"a": 100, "b": 5}, "micro-batch 2 was begun and is not committed: a query that starts here reads its"),
        (["--at", "planned"], {"a": 200, "b": 50}, "a query that starts here may miss its rows"),
    ],
)
def test_export_gives_the_options_of_a_new_query(
    running: Path, arguments: list[str], offsets: dict[str, int], said: str
) -> None:
    options = facts("export", running, *arguments)
    parsed = DLedgerOptions.for_reading({"peers": "n0-h:1", **options})
    assert (parsed.groups, parsed.starting_offsets) == (("a", "b"), offsets)
    result = run("export", running, *arguments)
    assert said in result.stderr
    assert result.stdout.splitlines() == [
        ".option(\"groups\", 'a,b')",
        f'.option("startingOffsets", {json.dumps(offsets)!r})',
    ]


def test_a_query_that_is_done_goes_on_behind_its_last_batch(tmp_path: Path) -> None:
    done = write_checkpoint(tmp_path / "c", offset(a=7), offset(a=9), committed=2, first=120)
    shown = facts("show", done)
    assert (shown["committed_batch_id"], shown["a_restart"]) == (121, "goes on with micro-batch 122")
    assert facts("export", done)["startingOffsets"] == '{"a": 9}'


def test_a_query_that_has_committed_nothing_begins_at_its_empty_first_batch(tmp_path: Path) -> None:
    begun = write_checkpoint(tmp_path / "c", offset(a=7), committed=0)
    result = run("export", begun)
    assert "this is where the query begins" in result.stderr
    assert facts("export", begun)["startingOffsets"] == '{"a": 7}'
    assert facts("show", begun)["committed_batch_id"] is None


def test_several_sources_each_get_their_options_and_foreign_ones_none(tmp_path: Path) -> None:
    lines = "\n".join([offset(a=7), '{"topic":{"0":5}}', offset(b=8), "-"])
    joined = write_checkpoint(tmp_path / "c", lines, committed=1)
    assert [row["groups"] for row in facts("export", joined)] == ["a", "b"]
    assert [(row["source"], row["group"]) for row in facts("show", joined)["positions"]] == [(0, "a"), (2, "b")]
    assert run("export", joined).stdout.splitlines()[0] == "# source 0"


def test_it_reads_what_the_connector_writes(tmp_path: Path) -> None:
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
        ("offsets/1", "", "not with v1"),
        ("offsets/1", "v2\n{}\n{}", "'v2', not with v1"),
        ("offsets/1", "v1\n{}\n{", "the file is damaged"),
        ("offsets/1", 'v1\n{}\n{"groups": {"a": {"next": "x"}}, "v": 1}', "is not an offset of this source"),
        ("offsets/1", 'v1\n{}\n{"groups": {}, "v": 2}', "version 2, this connector reads up to 1"),
        ("metadata", "{", "the file is damaged"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_a_damaged_checkpoint_is_one_line(tmp_path: Path, command: str, file: str, text: str, said: str) -> None:
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
    ("made", "said"),
    [
        ("absent", "does not exist"),
        ("file", "is not a directory"),
        ("empty", "no checkpoint is here"),
        ("unused", "no micro-batch was planned here yet"),
        ("kafka", "reads no dledger log"),
        ("s3a://bucket/c", "is not on this machine"),
    ],
)
def test_what_is_no_checkpoint_is_one_line(tmp_path: Path, command: str, made: str, said: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unused").mkdir()
    (tmp_path / "unused" / "metadata").write_text("{}")
    write_checkpoint(tmp_path / "kafka", '{"topic":{"0":5}}', committed=1)
    before = tree(tmp_path)
    result = run(command, made if "://" in made else tmp_path / made)
    assert (result.exit_code, result.stdout) == (3, ""), result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert said in result.stderr
    assert tree(tmp_path) == before


def test_a_query_that_waits_for_its_first_group_has_no_options(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", offset(), committed=1)
    assert facts("show", path)["positions"] == []
    result = run("export", path)
    assert (result.exit_code, result.stdout) == (3, "")
    assert "has found no group yet" in result.stderr


def test_lost_commits_are_not_taken_for_a_beginning(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", offset(a=5), committed=0, first=40)
    result = run("export", path)
    assert result.exit_code == 3
    assert "no micro-batch of this checkpoint is committed" in result.stderr


def test_a_file_uri_is_a_path(running: Path) -> None:
    assert facts("show", f"file://{running}")["query_id"] == QUERY_ID

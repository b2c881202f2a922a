"""Stream offsets, the files of a Spark checkpoint, and ``dledger checkpoint``."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from dledger_core.cli import main
from dledger_core.client import EntryCheck
from spark_connector.errors import CheckpointError
from spark_connector.offsets import (
    GroupOffset,
    StreamOffset,
    has_committed,
    local_path,
    planned_offset,
    read_checkpoint,
    read_offsets,
)
from spark_connector.options import DLedgerOptions
from tests.spark_connector.spark_directory import QUERY_ID, offset, tree, write_checkpoint

# --- offsets -----------------------------------------------------------------------------------------------------


group_offsets = st.builds(
    GroupOffset,
    st.integers(0, 2**62),
    st.none() | st.uuids().map(str),
    st.integers(-1, 2**40),
    st.none() | st.integers(0, 2**32 - 1),
)
offsets = st.dictionaries(st.text("abcz", min_size=1), group_offsets).map(StreamOffset)


@given(offsets)
def test_offset_round_trip_has_same_text_in_any_order(offset: StreamOffset) -> None:
    text = json.dumps(offset.to_json())
    reversed_order = StreamOffset(dict(reversed(list(offset.groups.items()))))
    assert StreamOffset.from_json(json.loads(text)) == offset
    assert text == json.dumps(reversed_order.to_json()) == json.dumps(json.loads(text), sort_keys=True)


def test_text_that_checkpoints_hold() -> None:
    offset = StreamOffset({"default": GroupOffset.at(1200, "abc", EntryCheck(7, 305419896))})
    assert json.dumps(offset.to_json()) == (
        '{"groups": {"default": {"check": 305419896, "log": "abc", "next": 1200, "term": 7}}, "v": 1}'
    )
    assert GroupOffset.at(0, None, None) == GroupOffset(0, None, -1, None)


GOOD = {"next": 1, "log": None, "term": 1, "check": None}


@pytest.mark.parametrize(
    "data",
    [
        {"v": 2, "groups": {}},
        {},
        {"v": 1, "groups": []},
        {"topicA": {"0": 23}},
        {"v": 1, "groups": {"a": {"next": 1}}},
        {"v": 1, "groups": {"a": GOOD | {"next": "1"}}},
        {"v": 1, "groups": {"a": GOOD | {"next": True}}},
        {"v": 1, "groups": {"a": GOOD | {"log": 5}}},
    ],
)
def test_foreign_and_newer_offsets_are_rejected(data: dict[str, object]) -> None:
    with pytest.raises(CheckpointError):
        StreamOffset.from_json(data)


# --- files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("location", "path"),
    [
        *((location, Path("/tmp/a%20b")) for location in ("file:/tmp/a%20b", "file:///tmp/a%20b", "/tmp/a%20b")),
        *((location, None) for location in ("", "s3a://bucket/c", "hdfs://host/c", "file://host/c")),
    ],
)
def test_local_path_takes_locations_literally(location: str, path: Path | None) -> None:
    assert local_path(location) == path


def test_written_checkpoint_is_read_unchanged(tmp_path: Path) -> None:
    written = StreamOffset({"a": GroupOffset(12, "log-9", 3, 99), "b": GroupOffset(0)})
    path = write_checkpoint(tmp_path / "with space", offset(a=0), json.dumps(written.to_json()), committed=2)
    assert read_checkpoint(path).reached.ends == (written,)
    assert planned_offset(str(path)) == written
    assert has_committed(str(path))


def test_missing_and_remote_checkpoints_are_unknown(tmp_path: Path) -> None:
    begun = write_checkpoint(tmp_path / "begun", offset(a=0), committed=0)
    assert (has_committed(str(begun)), has_committed(str(tmp_path))) == (False, False)
    for location in ("", "s3a://bucket/c"):
        assert (has_committed(location), planned_offset(location)) == (None, None)
    for directory in (tmp_path, tmp_path / "absent"):
        assert planned_offset(str(directory)) is None


def test_other_sources_have_no_offset(tmp_path: Path) -> None:
    lines = "\n".join([offset(a=7), '{"topic":{"0":5}}', "-", "17"])
    path = write_checkpoint(tmp_path / "c", lines, committed=1)
    first, *others = read_offsets(path / "offsets" / "0")
    assert first is not None
    assert (first.next_indexes, others) == ({"a": 7}, [None] * 3)
    with pytest.raises(CheckpointError):
        planned_offset(str(path))


# --- the command -------------------------------------------------------------------------------------------------


def run(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["checkpoint", *map(str, arguments)])


def shown_by(*arguments: object) -> Any:
    result = run(*arguments, "--format", "json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def assert_rejected(path: Path, command: str, *said: str) -> None:
    """The command prints one line of error and changes nothing."""
    before = tree(path)
    result = run(command, path)
    assert (result.exit_code, result.stdout) == (3, ""), result.output
    assert len(result.stderr.strip().splitlines()) == 1
    assert [text for text in said if text not in result.stderr] == []
    assert tree(path) == before


@pytest.fixture
def running(tmp_path: Path) -> Path:
    """Two groups; micro-batch 2 is planned and not committed."""
    offsets = [offset(a=0, b=5), offset(a=100, b=5), offset(a=200, b=50)]
    return write_checkpoint(tmp_path / "c", *offsets, committed=2)


def test_show_prints_query_batches_and_positions(running: Path) -> None:
    before = tree(running)
    shown = shown_by("show", f"file://{running}")
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
    more = {"planned_at": "2023-11-14T22:13:20.002+00:00", "source": 0, "term": 1, "log": "log-1"}
    assert positions[-1] == {"batch_id": 2, "committed": False, "group": "b", "next_index": 50} | more
    assert shown_by("show", running, "--last", "1")["positions"] == positions[-2:]
    assert tree(running) == before


@pytest.mark.parametrize(
    ("arguments", "offsets"), [([], {"a": 100, "b": 5}), (["--at", "planned"], {"a": 200, "b": 50})]
)
def test_export_prints_options_for_new_query(running: Path, arguments: list[str], offsets: dict[str, int]) -> None:
    options = shown_by("export", running, *arguments)
    parsed = DLedgerOptions.for_reading({"peers": "n0-h:1", **options})
    assert (parsed.groups, parsed.starting_offsets) == (("a", "b"), offsets)
    result = run("export", running, *arguments)
    assert "2" in re.findall(r"\d+", result.stderr), "the micro-batch"
    assert result.stdout.splitlines() == [
        ".option(\"groups\", 'a,b')",
        f'.option("startingOffsets", {json.dumps(offsets)!r})',
    ]


@pytest.mark.parametrize(
    ("offsets", "committed", "first", "batch_id", "start", "said"),
    [
        ([offset(a=7), offset(a=9)], 2, 120, 121, '{"a": 9}', "micro-batch 121"),
        ([offset(a=7)], 0, 0, None, '{"a": 7}', "start of the query"),
    ],
)
def test_query_exports_progress_of_its_sink(
    tmp_path: Path, offsets: list[str], committed: int, first: int, batch_id: int | None, start: str, said: str
) -> None:
    path = write_checkpoint(tmp_path / "c", *offsets, committed=committed, first=first)
    assert shown_by("show", path)["committed_batch_id"] == batch_id
    assert shown_by("export", path)["startingOffsets"] == start
    assert said in run("export", path).stderr


def test_each_native_source_gets_its_options(tmp_path: Path) -> None:
    lines = "\n".join([offset(a=7), '{"topic":{"0":5}}', offset(b=8), "-"])
    joined = write_checkpoint(tmp_path / "c", lines, committed=1)
    assert [row["groups"] for row in shown_by("export", joined)] == ["a", "b"]
    assert [(row["source"], row["group"]) for row in shown_by("show", joined)["positions"]] == [(0, "a"), (2, "b")]
    assert run("export", joined).stdout.splitlines()[0] == "# source 0"


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
def test_damaged_checkpoint_is_rejected(tmp_path: Path, command: str, file: str, text: str, said: str) -> None:
    path = write_checkpoint(tmp_path / "c", offset(a=0), offset(a=5), committed=2)
    (path / file).write_text(text)
    assert_rejected(path, command, said, str(path / file))


@pytest.mark.parametrize("command", ["show", "export"])
@pytest.mark.parametrize(
    ("made", "code"),
    [
        ("absent", "CONFIG"),
        ("file", "CONFIG"),
        ("empty", "DLEDGER_CHECKPOINT"),
        ("unused", "DLEDGER_CHECKPOINT"),
        ("kafka", "DLEDGER_CHECKPOINT"),
    ],
)
def test_other_directory_is_rejected(tmp_path: Path, command: str, made: str, code: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "unused").mkdir()
    (tmp_path / "unused" / "metadata").write_text("{}")
    write_checkpoint(tmp_path / "kafka", '{"topic":{"0":5}}', committed=1)
    assert_rejected(tmp_path / made, command, f"[{code}]", made)


def test_checkpoint_without_start_is_not_exported(tmp_path: Path) -> None:
    no_group = write_checkpoint(tmp_path / "c", offset(), committed=1)
    assert shown_by("show", no_group)["positions"] == []
    assert_rejected(no_group, "export", str(no_group))
    no_commits = write_checkpoint(tmp_path / "d", offset(a=5), committed=0, first=40)
    assert_rejected(no_commits, "export", "[DLEDGER_CHECKPOINT]")
    assert run("show", "s3a://bucket/c").exit_code == 3

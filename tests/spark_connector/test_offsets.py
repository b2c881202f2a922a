"""Stream offsets, and the files of a Spark checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dledger_core import EntryCheck
from spark_connector.errors import CheckpointError
from spark_connector.offsets import (
    GroupOffset,
    StreamOffset,
    has_committed,
    input_of,
    local_path,
    planned_offset,
    read_offsets,
)
from tests.spark_connector.spark_directory import offset, write_checkpoint

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
    again = StreamOffset.from_json(json.loads(text))
    reversed_order = StreamOffset(dict(reversed(list(offset.groups.items()))))
    assert again == offset
    assert json.dumps(again.to_json()) == json.dumps(reversed_order.to_json()) == text
    assert text == json.dumps(json.loads(text), sort_keys=True)


def test_text_that_checkpoints_hold() -> None:
    offset = StreamOffset({"default": GroupOffset.at(1200, "abc", EntryCheck(7, 305419896))})
    assert json.dumps(offset.to_json()) == (
        '{"groups": {"default": {"check": 305419896, "log": "abc", "next": 1200, "term": 7}}, "v": 1}'
    )
    assert GroupOffset.at(0, None, None) == GroupOffset(0, None, -1, None)


@pytest.mark.parametrize(
    ("data", "said"),
    [
        ({"v": 2, "groups": {}}, "has version 2, this connector reads up to 1"),
        ({}, "not an offset of this source"),
        ({"v": 1, "groups": []}, "not an offset of this source"),
        ({"topicA": {"0": 23}}, "not an offset of this source"),
        ({"v": 1, "groups": {"a": {"next": 1}}}, "not an offset of this source"),
        ({"v": 1, "groups": {"a": {"next": "1", "log": None, "term": 1, "check": None}}}, "not an offset"),
        ({"v": 1, "groups": {"a": {"next": True, "log": None, "term": 1, "check": None}}}, "not an offset"),
        ({"v": 1, "groups": {"a": {"next": 1, "log": 5, "term": 1, "check": None}}}, "not an offset"),
    ],
)
def test_foreign_and_newer_offsets_are_refused(data: dict[str, object], said: str) -> None:
    with pytest.raises(CheckpointError, match=said) as caught:
        StreamOffset.from_json(data)
    assert str(caught.value).startswith("[DLEDGER_CHECKPOINT] ")


@pytest.mark.parametrize("location", ["file:/tmp/a%20b", "file:///tmp/a%20b", "/tmp/a%20b"])
def test_local_path_takes_file_locations_literally(location: str) -> None:
    assert local_path(location) == Path("/tmp/a%20b")


@pytest.mark.parametrize("location", ["", "s3a://bucket/c", "hdfs://host/c", "file://host/c"])
def test_local_path_is_none_elsewhere(location: str) -> None:
    assert local_path(location) is None


def test_planned_offset_is_that_of_newest_micro_batch(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", offset(a=0), offset(a=5), committed=1)
    planned = planned_offset(str(path))
    assert planned is not None
    assert planned.next_indexes == {"a": 5}
    for location in (str(tmp_path / "absent"), str(tmp_path), "s3a://bucket/c"):
        assert planned_offset(location) is None


def test_planned_offset_rejects_query_with_several_sources(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c", offset(a=0) + "\n" + offset(b=0), committed=1)
    with pytest.raises(CheckpointError, match="has 2 sources"):
        planned_offset(str(path))


def test_read_offsets_is_none_for_other_sources(tmp_path: Path) -> None:
    lines = "\n".join([offset(a=7), '{"topic":{"0":5}}', "-", "17"])
    path = write_checkpoint(tmp_path / "c", lines, committed=1)
    first, *others = read_offsets(path / "offsets" / "0")
    assert first is not None
    assert (first.next_indexes, others) == ({"a": 7}, [None] * 3)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    for name, text in (("offsets/0", "v1\na"), ("offsets/1", "v1\nb"), ("commits/0", "v1\n{}")):
        (tmp_path / "with space" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "with space" / name).write_text(text)
    return tmp_path / "with space"


def test_input_id_is_digest_of_offset_log_entry(checkpoint: Path) -> None:
    first, second = (input_of(str(checkpoint), batch_id) for batch_id in (0, 1))
    assert (len(first), len(second), first != second) == (32, 32, True)
    assert input_of(f"file://{checkpoint}", 0) == first
    assert {input_of(place, 0) for place in ("", "s3a://bucket/c", "hdfs://host/c", str(checkpoint / "none"))} == {""}
    assert input_of(str(checkpoint), 2) == ""


def test_has_committed_is_none_for_unreadable_checkpoint(checkpoint: Path) -> None:
    assert has_committed(str(checkpoint))
    (checkpoint / "commits" / "0").unlink()
    assert not has_committed(str(checkpoint))
    assert not has_committed(str(checkpoint / "none"))
    assert has_committed("") is None
    assert has_committed("s3a://bucket/c") is None

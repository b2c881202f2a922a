"""Locations as Spark takes them, and a checkpoint's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from spark_connector.errors import CheckpointError
from spark_connector.spark_checkpoint import has_committed, input_of, local_path, planned_offset, read_offsets
from tests.spark_connector.spark_directory import offset, write_checkpoint


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


def test_read_offsets_leaves_out_sources_that_are_not_ours(tmp_path: Path) -> None:
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


def test_has_committed_is_none_where_checkpoint_cannot_be_read(checkpoint: Path) -> None:
    assert has_committed(str(checkpoint))
    (checkpoint / "commits" / "0").unlink()
    assert not has_committed(str(checkpoint))
    assert not has_committed(str(checkpoint / "none"))
    assert has_committed("") is None
    assert has_committed("s3a://bucket/c") is None

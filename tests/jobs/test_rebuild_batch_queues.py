"""Stores of a real RocketMQ 5.3.3: one that keeps batch consume queues, one as a quiet running broker has it."""

from __future__ import annotations

import json
import tarfile
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jobs._rebuild.broker import batch_topics
from jobs.rebuild_consume_queue import command
from tests.rocketmq.golden import TESTDATA
from tests.support.archives import unpack
from tests.support.run_job import run_in_process

BATCHES, RUNNING, NAMED_TWICE = "rmq5-batch-queues", "rmq5-running-classic", "rmq5-named-twice"

run = partial(run_in_process, command)


def extract(name: str, directory: Path) -> Path:
    with tarfile.open(TESTDATA / f"rocketmq-{name}.tar.xz") as archive:
        unpack(archive, directory)
    return directory / name / "n0"


def files_below(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("0*") if path.is_file()}


def test_which_topics_have_batch_queues(tmp_path: Path) -> None:
    assert batch_topics(None) == batch_topics(str(tmp_path)) == ()
    config = tmp_path / "config" / "topics.json"
    config.parent.mkdir()
    for text in ("", "[]", '{"topicConfigTable": {"a": null}}', '{"topicConfigTable": []}', "\x00"):
        config.write_text(text)
        assert batch_topics(str(tmp_path)) == ()
    kinds = {"a": {"attributes": {"queue.type": "BatchCQ"}}, "b": {"attributes": {"queue.type": "SimpleCQ"}}, "c": {}}
    config.write_text(json.dumps({"topicConfigTable": kinds}))
    (tmp_path / "batchconsumequeue" / "d" / "0").mkdir(parents=True)
    assert batch_topics(str(tmp_path)) == ("a", "d")


@pytest.mark.spark
def test_batch_queues_are_in_table_only(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A broker that finds them among its plain queues does not start."""
    root, table = extract(BATCHES, tmp_path), str(tmp_path / "table")
    arguments = ["--commitlog", str(root / "commitlog"), "--table", table, "--consume-queue-file-size", "2000"]
    code, summary, _ = run(capsys, *arguments, "--no-multi-dispatch")
    assert (code, summary["dense"], summary["batch_topics"]) == (0, True, ["batchcq"])
    code, summary, _ = run(capsys, *arguments, "--files", str(tmp_path / "out"), "--compare", str(root))
    assert (code, summary["dense"], summary["compare"]["differences"]) == (0, True, {})
    assert files_below(tmp_path / "out" / "consumequeue") == files_below(root / "consumequeue")
    rows = spark.read.format("delta").load(table).where("topic = 'batchcq'")
    assert rows.count() > 0


@pytest.mark.spark
@pytest.mark.parametrize("kept", ["first", "last"])
def test_queues_that_message_names_twice(
    spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], kept: str
) -> None:
    """Their offsets run ahead of their slots, and after a restart fall back to them: no hole, none given out twice."""
    root = extract(NAMED_TWICE, tmp_path)
    code, summary, _ = run(
        capsys, "--commitlog", str(root / "commitlog"), "--table", str(tmp_path / "table"), "--compare", str(root),
        "--files", str(tmp_path / "out"), "--consume-queue-file-size", "2000", "--on-duplicate", kept,
    )  # fmt: skip
    assert (code, summary["dense"], summary["duplicate_slots"], "duplicates" in summary) == (0, True, 0, False)
    assert (summary["rows"], summary["compare"]["differences"]) == (471, {})
    assert files_below(tmp_path / "out" / "consumequeue") == files_below(root / "consumequeue")
    rows = spark.read.format("delta").load(str(tmp_path / "table")).where("topic = '%LMQ%one'").orderBy("position")
    found = rows.select("queue_offset", "rebuild_slot", "broker_serves").collect()
    assert [tuple(row) for row in found] == [(slot, slot, True) for slot in range(len(found))]


@pytest.mark.spark
def test_quiet_running_broker_is_healthy(spark: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its next CommitLog file is there already, and empty."""
    root = extract(RUNNING, tmp_path)
    arguments = ["--commitlog", str(root / "commitlog"), "--table", str(tmp_path / "table"), "--compare", str(root)]
    code, summary, _ = run(capsys, *arguments)
    assert (code, summary["rows"], summary["damaged_files"], summary["commitlog"]["end"]) == (0, 20, [], 4920)
    assert summary["compare"]["differences"] == {}

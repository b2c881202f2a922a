"""``look`` and ``verify`` compare the parts of a broker's directory with its log."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from dledger_core.rocketmq import lost_units, open_log_directory, queue_statistics
from dledger_core.rocketmq.leaving.broker import not_converted
from tests.cli.command import error_of, result_of, rows_of
from tests.rocketmq.golden import MIXED, REUSED, THREE, extract


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return extract(THREE, "n0", tmp_path_factory.mktemp("three"))


def found_in(broker: Path) -> tuple[set[str], set[str], set[str]]:
    """Names of the damaged parts by ``look`` and by ``verify``, and the kinds of remarks."""
    view = result_of("look", broker, code=1)
    rows: Any = rows_of("verify", broker, code=1)[0]
    of_look = {text.rsplit("/", 1)[-1].rstrip(")") for text in view["damage"] if text.endswith(")")}
    findings = [finding for row in rows for finding in row["findings"] if finding["start"] is None]
    assert {finding["kind"] for finding in findings} == {"MISSING"}
    kinds = {remark["kind"] for row in rows for remark in row["remarks"]}
    return of_look, {Path(finding["path"]).name for finding in findings}, kinds


def without_queue(broker: Path) -> None:
    shutil.rmtree(broker / "consumequeue" / "Clicks")


def without_queues(broker: Path) -> None:
    shutil.rmtree(broker / "consumequeue")


def without_end(broker: Path) -> None:
    max((broker / "dledger-n0" / "data").iterdir()).unlink()


def without_store(broker: Path) -> None:
    shutil.rmtree(broker / "dledger-n0")


AHEAD = {"consumequeue", "index", "checkpoint"}


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (without_queue, {"consumequeue"}),
        (without_queues, {"consumequeue"}),
        (without_end, AHEAD),
        (without_store, AHEAD),  # the CommitLog before it looks complete
    ],
)
def test_lost_part_of_a_brokers_directory_is_damage(
    tmp_path: Path, damage: Callable[[Path], None], expected: set[str]
) -> None:
    broker = extract(MIXED, "n0", tmp_path)
    damage(broker)
    of_look, of_verify, _ = found_in(broker)
    assert of_look == of_verify == expected


def test_queues_without_any_log_are_damage(tmp_path: Path) -> None:
    broker = extract(MIXED, "n0", tmp_path)
    without_store(broker)
    for file in (broker / "commitlog").iterdir():
        file.unlink()
    assert result_of("look", broker, code=1)["damage"]


def test_deleted_topic_is_a_note_and_no_damage(tmp_path: Path) -> None:
    broker = extract(MIXED, "n0", tmp_path)
    without_queue(broker)
    for name in ("topics.json", "topics.json.bak"):
        path = broker / "config" / name
        path.write_text(path.read_text().replace('"Clicks"', '"Other"'))
    view = result_of("look", broker)
    assert (view["damage"], len(view["notes"])) == ([], 1)
    rows: Any = rows_of("verify", broker)[0]
    assert [row["findings"] for row in rows] == [[], []]


def test_parts_of_real_brokers_agree_except_a_damaged_one(tmp_path: Path, three: Path) -> None:
    """RocketMQ itself lost units of the broker n1."""
    for broker in (three, extract(MIXED, "n0", tmp_path), extract(REUSED, "n0", tmp_path)):
        view = result_of("look", broker)
        assert (view["damage"], view["notes"]) == ([], [])
    damaged = extract(THREE, "n1", tmp_path)
    of_look, of_verify, kinds = found_in(damaged)
    assert of_look == of_verify == {"consumequeue"}
    assert "CONSUME_QUEUES" in kinds


def test_checkpoint_that_lags_behind_the_queues_is_no_damage(tmp_path: Path) -> None:
    broker = extract(THREE, "n0", tmp_path)
    (broker / "dledger-n0" / "checkpoint").write_text("committedIndex=700\nendIndex=1023\n")
    found = result_of("look", broker)
    assert (found["damage"], found["hidden"], found["last"][-1]["index"]) == ([], {"uncommitted": 323}, 700)
    assert [row["findings"] for row in rows_of("verify", broker)[0]] == [[]]


def test_queues_in_rocksdb_are_named_and_not_called_lost(tmp_path: Path) -> None:
    broker = extract(MIXED, "n0", tmp_path)
    without_queues(broker)
    database = broker / "consumequeue"
    database.mkdir()
    for name in ("000004.log", "CURRENT", "MANIFEST-000005"):
        (database / name).write_text("MANIFEST-000005")
    view = result_of("look", broker)
    assert (view["damage"], [note for note in view["notes"] if "RocksDB" in note]) == ([], view["notes"])
    assert len(view["notes"]) == 1
    rows: Any = rows_of("verify", broker)[0]
    assert [row["findings"] for row in rows] == [[], []]
    assert "CONSUME_QUEUES" in {remark["kind"] for row in rows for remark in row["remarks"]}
    assert "RocksDB" in str(error_of("look", database))
    opened = open_log_directory(broker)
    with opened:
        queues = queue_statistics(each for each in opened.batches() if isinstance(each, pa.RecordBatch)).queues
    assert lost_units(broker, queues) is None
    assert [each for each in not_converted(broker) if "RocksDB" in each]

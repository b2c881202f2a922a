"""Out of DLedger mode: the queues of topics of type BatchCQ, next to those of a real broker."""

from __future__ import annotations

import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pytest

from dledger_core.errors import ConfigError
from dledger_core.rocketmq import ClassicCommitLog, decode_messages
from dledger_core.rocketmq.leaving.batch_queues import BatchSlots, BatchTotals
from dledger_core.rocketmq.store.consume_queue import BATCH_UNIT
from tests.jobs.broker_store import write_broker_store
from tests.rocketmq import golden
from tests.rocketmq.convert.test_moved import OwnLog
from tests.rocketmq.leaving.test_kills import PARTS, check_kills, kill_by_exception, killed_processes
from tests.rocketmq.leaving.test_leaving import keep_queue_offsets, left, units
from tests.rocketmq.test_inner_batches import batch
from tests.support.archives import unpack

FILE_BYTES = 7 * 46
CONF = f"mappedFileSizeCommitLog=1048576\nmapperFileSizeBatchConsumeQueue={FILE_BYTES}\n"


def classic(directory: Path) -> Path:
    """The directory of a real broker with a batch topic."""
    with tarfile.open(golden.TESTDATA / "rocketmq-rmq5-batch-queues.tar.xz") as archive:
        unpack(archive, directory)
    return directory / "rmq5-batch-queues/n0"


def in_dledger_mode(old: Path, root: Path) -> tuple[Path, list[bytes]]:
    """The messages of a classic broker in a log with its configuration."""
    log = ClassicCommitLog(old / "commitlog")
    bodies = [body for batch in log.messages(0, log.end()) for body in batch["body"].to_pylist()]
    own = OwnLog(root / "dledger-n0")
    own.append([], k="log", u="0" * 32)
    for at in range(0, len(bodies), 50):
        own.append(bodies[at : at + 50])
    keep_queue_offsets(own.close())
    shutil.copytree(old / "config", root / "config")
    return root, bodies


def conf_in(directory: Path) -> Path:
    (directory / "broker.conf").write_text(CONF)
    return directory / "broker.conf"


def batch_units(directory: Path) -> dict[tuple[str, int], npt.NDArray[Any]]:
    """The units of each queue of a batch topic, in log order."""
    found = dict[tuple[str, int], npt.NDArray[Any]]()
    for queue in sorted((directory / "batchconsumequeue").glob("*/*")):
        parts = [np.frombuffer(path.read_bytes(), BATCH_UNIT) for path in sorted(queue.iterdir())]
        all_units = np.concatenate(parts)
        found[queue.parent.name, int(queue.name)] = all_units[all_units["size"] > 0]
    return found


def test_units_of_batch_topics_equal_those_of_broker_except_positions(tmp_path: Path) -> None:
    old = classic(tmp_path)
    root, bodies = in_dledger_mode(old, tmp_path / "broker")
    new = tmp_path / "new"
    report = left(root, new, conf_in(tmp_path))
    assert (report.messages, report.verified, report.duplicates_left_out) == (len(bodies), True, 0)
    assert set(units(new)) == set(units(old))
    assert not [note for note in report.notes if "BatchCQ" in note]
    expected, found = batch_units(old), batch_units(new)
    assert list(found) == list(expected) == [("batchcq", queue) for queue in range(4)]
    log = ClassicCommitLog(new / "commitlog")
    for queue, rows in expected.items():
        assert [row[1:] for row in found[queue].tolist()] == [row[1:] for row in rows.tolist()]
        for row in found[queue].tolist():
            [body] = next(log.messages(row[0], row[0] + row[1]))["body"].to_pylist()
            [message] = decode_messages(pa.array([body]), ["topic", "queue_id", "queue_offset"]).to_pylist()
            assert tuple(message.values()) == (*queue, row[4])
    sizes = {path.stat().st_size for path in (new / "batchconsumequeue").glob("*/*/*")}
    assert sizes == {FILE_BYTES}
    assert f"mapperFileSizeBatchConsumeQueue={FILE_BYTES}" in (new / "broker.conf.proposed").read_text()


def test_files_of_batch_topics_have_size_of_source_without_configuration(tmp_path: Path) -> None:
    old = classic(tmp_path)
    root, _ = in_dledger_mode(old, tmp_path / "broker")
    shutil.copytree(old / "batchconsumequeue", root / "batchconsumequeue")
    left(root, tmp_path / "new")
    sizes = {path.stat().st_size for path in (tmp_path / "new/batchconsumequeue").glob("*/*/*")}
    assert sizes == {300_000 * 46}


def test_file_of_batch_topics_holds_at_least_one_unit(tmp_path: Path) -> None:
    source = written_by_broker(tmp_path / "broker", [batch(0, "AAB")])
    conf = conf_in(tmp_path)
    conf.write_text("mapperFileSizeBatchConsumeQueue=45\n")
    with pytest.raises(ConfigError, match="less than a unit of 46 bytes"):
        left(source, tmp_path / "new", conf)


@pytest.mark.soak
@pytest.mark.parametrize("part", range(PARTS))
def test_run_with_batch_topics_resumes_after_kill_of_its_process(tmp_path: Path, part: int) -> None:
    root, _ = in_dledger_mode(classic(tmp_path), tmp_path / "broker")
    with killed_processes() as kill:
        check_kills(tmp_path, root, conf_in(tmp_path), PARTS, kill, 1 + part)


def test_run_with_batch_topics_resumes_after_kill_at_some_operations(tmp_path: Path) -> None:
    root, _ = in_dledger_mode(classic(tmp_path), tmp_path / "broker")
    check_kills(tmp_path, root, conf_in(tmp_path), 41, kill_by_exception)


def written_by_broker(directory: Path, records: list[bytes], attributes: dict[str, str] | None = None) -> Path:
    """The directory of a broker in DLedger mode."""
    write_broker_store(directory / "dledger-n0", records, committed=len(records) - 1)
    table = {"Batch": {"topicName": "Batch", "attributes": attributes or {"queue.type": "BatchCQ"}}}
    (directory / "config").mkdir()
    (directory / "config/topics.json").write_text(json.dumps({"topicConfigTable": table}))
    return directory


def rows_of(directory: Path) -> list[tuple[int, int]]:
    """Queue offset and number of messages of each unit."""
    [found] = batch_units(directory).values()
    return list(zip(found["queue_offset"].tolist(), found["messages"].tolist(), strict=True))


def test_number_of_messages_ends_where_next_batch_starts(tmp_path: Path) -> None:
    """A broker in DLedger mode that restarts assigns queue offsets of the last batch again."""
    source = written_by_broker(tmp_path / "broker", [batch(0, "AAB"), batch(1, "BABA"), batch(5, "A"), batch(6, "AA")])
    report = left(source, tmp_path / "new", conf_in(tmp_path))
    assert rows_of(tmp_path / "new") == [(0, 1), (1, 4), (5, 1), (6, 2)]
    [note] = [note for note in report.notes if "queue offsets of the next one" in note]
    assert note.startswith("queue 0 of topic Batch has 1 batches")


def test_repeated_queue_offset_of_batch_needs_decision(tmp_path: Path) -> None:
    source = written_by_broker(tmp_path / "broker", [batch(0, "AAB"), batch(3, "BA"), batch(3, "AB"), batch(5, "A")])
    with pytest.raises(ConfigError, match="queue 0 of topic Batch has offset 3 twice") as refused:
        left(source, tmp_path / "new", conf_in(tmp_path))
    assert "--on-duplicate first" in refused.value.remedy
    for choice, rows in (("first", [(0, 3), (3, 2), (5, 1)]), ("last", [(0, 3), (3, 2), (3, 2), (5, 1)])):
        report = left(source, tmp_path / choice, conf_in(tmp_path), on_duplicate=choice)
        assert rows_of(tmp_path / choice) == rows
        assert (report.units, report.duplicates_left_out, report.messages) == (len(rows), 4 - len(rows), 4)


def test_batches_of_unknown_topic_are_named_as_not_converted(tmp_path: Path) -> None:
    source = written_by_broker(tmp_path / "broker", [batch(0, "AAB"), batch(3, "BA")], {"queue.type": "SimpleCQ"})
    report = left(source, tmp_path / "new", conf_in(tmp_path))
    [note] = [note for note in report.notes if note.startswith("not converted: the queues of 2 batches")]
    assert "config/topics.json does not have" in note
    assert not list((tmp_path / "new").glob("*consumequeue/*"))


def test_slots_of_batches_do_not_depend_on_size_of_parts() -> None:
    generator = np.random.default_rng(48)
    for _ in range(200):
        every = np.zeros(int(generator.integers(1, 30)), BATCH_UNIT)
        every["messages"] = generator.integers(1, 6, len(every))
        every["queue_offset"] = np.cumsum(generator.integers(-1, 6, len(every))).clip(0)
        mode = "first" if generator.random() < 0.5 else "last"
        edges = np.sort(generator.integers(1, len(every) + 1, 3))
        whole, parts, totals = BatchSlots(mode), BatchSlots(mode), BatchTotals()
        expected = [whole.take(every), whole.rest()]
        found = list[tuple[Any, Any]]()
        for part in filter(len, np.split(every, edges)):
            found.append(parts.take(part))
            totals.add(part)
            parts = BatchSlots(mode, parts.used, parts.end, tuple(json.loads(json.dumps(parts.held))))  # saved
        found.append(parts.rest())
        for at in (0, 1):
            assert (
                np.concatenate([each[at] for each in found]).tolist()
                == np.concatenate([each[at] for each in expected]).tolist()
            )
        got = np.concatenate([units for _, units in found])
        assert len(got) == totals.units - (totals.repeated if mode == "first" else 0)
        if mode == "first":
            offsets = got["queue_offset"].astype(np.int64)
            assert (np.diff(offsets) > 0).all()
            assert (offsets[:-1] + got["messages"][:-1] <= offsets[1:]).all()

"""``StoreReader.messages``: the messages of a stopped store as a stream of Arrow batches."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from dledger_core import BadRequestError, CorruptRecordError, IndexOutOfRangeError, open_store
from dledger_core.rocketmq import MESSAGE_SCHEMA, commit_log_files, decode_messages
from dledger_core.rocketmq.convert.parts import ClassicPart
from dledger_core.storage import CommitLog
from tests.contracts.small_file_stores import COUNT, bodies, classic
from tests.rocketmq.golden import THREE, extract
from tests.spark_connector.store_writer import StoreWriter
from tests.support.damage import MESSAGE_BODY_AT, flip_entry, messages_in, overwrite
from tests.support.logs import append, visible


def test_messages_of_store_are_those_that_decode_gives(tmp_path: Path) -> None:
    with open_store(extract(THREE, "n0/dledger-n0", tmp_path)) as reader:
        found = reader.messages().read_all()
        entries = reader.read(0, 1024, max_bytes=1 << 30)
        expected = pa.Table.from_batches([decode_messages(entries.column("body"))])
        assert found.select(MESSAGE_SCHEMA.names) == expected
        assert found.column("index").to_pylist() == list(range(1024))
        part = reader.messages(100, 200).read_all()
        assert part == found.slice(100, 100)
        assert reader.messages(1024).read_all().num_rows == 0
        with pytest.raises(IndexOutOfRangeError):
            reader.messages(1025)
        assert reader.messages().read_pandas()["topic"].notna().all()


def test_messages_of_plain_entries_keep_their_bodies(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    append(log, [b"one", b"two"])
    log.close(1)
    with open_store(tmp_path / "s") as reader:
        found = reader.messages().read_all()
    assert found.column("body").to_pylist() == [b"one", b"two"]
    assert found.column("error").null_count == 0
    with open_store(tmp_path / "s", opaque=True) as reader, pytest.raises(BadRequestError):
        reader.messages()


def test_messages_are_those_of_read_committed(tmp_path: Path) -> None:
    with StoreWriter(tmp_path) as writer:
        writer.append_attempt(2, batch=0)
        won = writer.append_attempt(2, batch=0)
        writer.commit(won, batch=0)
        writer.append_attempt(2, batch=1)
        writer.append_numbers(1)
    with open_store(writer.path) as reader:
        found = reader.messages().read_all()["index"].to_pylist()
        assert found == visible(reader)["index"].to_pylist() == [won.first, won.last]
        assert reader.messages(won.last, 99).read_all()["index"].to_pylist() == [won.last]
        stored = reader.messages(isolation="read_uncommitted").read_all()["index"].to_pylist()
        assert stored == [1, 2, 4, 5, 8, 9, 10]


def test_messages_end_at_commit_index_unless_asked_for_end(tmp_path: Path) -> None:
    log = CommitLog.open(tmp_path / "s", group="g", node_id="n0")
    append(log, [b"one", b"two", b"never committed"])
    log.close(1)
    with open_store(tmp_path / "s") as reader:
        assert reader.messages().read_all()["body"].to_pylist() == [b"one", b"two"]
        assert reader.messages(until="end").read_all().num_rows == 3


def test_messages_raise_at_a_damaged_one(tmp_path: Path) -> None:
    store = extract(THREE, "n0/dledger-n0", tmp_path)
    flip_entry(store, 0, 48 + 90)
    with open_store(store) as reader, pytest.raises(CorruptRecordError) as caught:
        reader.messages().read_all()
    assert caught.value.values["index"] == 0


def test_messages_of_classic_commitlog_have_positions_and_no_indexes(tmp_path: Path) -> None:
    commitlog, _ = classic(tmp_path / "broker-a")
    with open_store(commitlog.parent) as opened:
        found = opened.messages().read_all()
        positions = found["position"].to_pylist()
        part = opened.messages(positions[3], positions[60]).read_all()
        assert opened.messages(opened.bounds()[1]).read_all().num_rows == 0
        with pytest.raises(IndexOutOfRangeError):
            opened.messages(opened.bounds()[1] + 1)
    assert part == found.slice(3, 57)
    names = ["topic", "queue_offset", "keys", "body", "store_timestamp"]
    assert found.select(names) == pa.Table.from_batches([decode_messages(pa.array(bodies()), names)])
    assert found["physical_offset"].to_pylist() == positions
    assert (found["index"].null_count, found["term"].null_count) == (COUNT, COUNT)
    file = sorted(commitlog.iterdir())[0]
    overwrite(file, positions[2] + MESSAGE_BODY_AT, b"?")
    with open_store(commitlog) as opened, pytest.raises(CorruptRecordError):
        opened.messages().read_all()


def test_damaged_commitlog_is_refused_again_by_conversion_that_continues(tmp_path: Path) -> None:
    commitlog, _ = classic(tmp_path / "broker-a")
    overwrite(commitlog / f"{0:020d}", messages_in((commitlog / f"{0:020d}").read_bytes())[2], bytes(8))
    part = ClassicPart(commit_log_files(commitlog))
    chunks = part.read(part.begin)
    first = next(chunks)
    assert first.count == 2
    for rest in (chunks, part.read(first.after)):
        with pytest.raises(CorruptRecordError):
            next(rest)

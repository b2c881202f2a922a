"""The executor's side without servers: files of a broker, chunks fetched ahead, bounded memory, the pool of clients."""

from __future__ import annotations

import gc
import json
import os
import shutil
import subprocess
import sys
import tarfile
import threading
import zlib
from collections.abc import Generator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyspark.sql.datasource import LessThan

from dledger_core import READ_SCHEMA, BehindError, open_store
from dledger_core.client import NODE_HEALTH
from dledger_core.rocketmq import encode_messages
from spark_connector.connections import client_for
from spark_connector.errors import TermMismatchError
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.reading.logs import Chunk
from spark_connector.reading.partitions import RangesPartition, read_partition
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader, FilteredBatchReader
from tests.spark_connector.engine import (
    ALL,
    Engine,
    indexes,
    make_batch_reader,
    make_reader,
    next_of,
    pin_batch,
    read_batch,
)
from tests.spark_connector.store_writer import StoreWriter
from tests.support.archives import unpack
from tests.support.growing_store import GrowingStore

# --- files -------------------------------------------------------------------------------------------------------


TESTDATA = Path(__file__).parents[1] / "storage" / "testdata"


@pytest.fixture(params=["dledger-0.3.1.2-single", "dledger-0.4.0-single"])
def java(request: pytest.FixtureRequest, tmp_path: Path) -> GrowingStore:
    """A store that Java wrote, of which the files hold as much as a test says."""
    with tarfile.open(TESTDATA / f"{request.param}.tar.gz") as archive:
        unpack(archive, tmp_path / "whole")
    source = next((tmp_path / "whole").rglob("dledger-n*"))
    (tmp_path / "orders").mkdir()
    return GrowingStore(source, tmp_path / "orders" / source.name, with_index=True)


def options(store: GrowingStore, **more: str) -> DLedgerOptions:
    return DLedgerOptions.for_reading(
        {"path": str(store.path), "pollMs": "1", "isolation": "read_uncommitted", "startingOffsets": "earliest", **more}
    )


def data_indexes(store: GrowingStore, end: int) -> list[int]:
    return [row["index"] for row in store.rows[:end] if row["magic"] == 1]


def test_stream_follows_new_entries_in_files_of_broker(java: GrowingStore) -> None:
    total = len(java.rows)
    engine, reader = Engine(), DLedgerStreamReader(options(java))
    for count in (total // 4, total // 2, total - 1, total):
        java.hold(count)
        engine.run(reader, 3)
        assert engine.read == data_indexes(java, count)
        if count == total // 2:
            reader = DLedgerStreamReader(options(java))  # a restart
    assert list(json.loads(engine.offsets[-1])["groups"]) == ["orders"], "the directory above has the group's name"
    assert next_of(engine.offsets[-1], "orders") == total


def test_recreated_log_without_uuid_is_detected(java: GrowingStore) -> None:
    total = len(java.rows)
    java.hold(total // 2)
    engine = Engine()
    engine.run(DLedgerStreamReader(options(java)), 3)
    at = json.loads(engine.offsets[-1])
    assert at["groups"]["orders"]["log"] is None
    shutil.rmtree(java.path)
    with StoreWriter(java.path.parent.parent / "other", group="x", uuid=None) as other:
        other.append_numbers(total)
    for folder in ("data", "index"):
        shutil.copytree(other.path / folder, java.path / folder)
    with pytest.raises(TermMismatchError):
        DLedgerStreamReader(options(java)).latestOffset(at, ALL)


def test_uncommitted_entries_of_store_need_read_uncommitted(java: GrowingStore) -> None:
    end = total = len(java.rows)
    if open_store(java.path).writer == "java-a":
        (java.path / "checkpoint").write_text("committedIndex=9\n")
        end = 10
    for isolation, visible in (("read_committed", end), ("read_uncommitted", total)):
        assert read_batch(DLedgerBatchReader(options(java, isolation=isolation))) == data_indexes(java, visible)


def test_filter_by_time_limits_nothing_where_java_wrote_the_store(java: GrowingStore) -> None:
    java.hold(len(java.rows))
    reader = FilteredBatchReader(options(java))
    reader.pushFilters([LessThan(("timestamp",), datetime(2001, 1, 1, tzinfo=UTC))])
    assert read_batch(reader) == data_indexes(java, len(java.rows))


def test_tasks_share_view_and_see_later_entries(store: StoreWriter) -> None:
    store.append_numbers(100)
    old = make_batch_reader(store, minPartitions=3)
    planned = old.partitions()
    store.append_numbers(100)
    assert read_batch(make_batch_reader(store, minPartitions=3)) == list(range(200))
    assert indexes(old, planned) == list(range(100))


def test_orphaned_and_open_attempts_are_hidden(store: StoreWriter) -> None:
    stream, engine = make_reader(store), Engine()
    store.append_numbers(10)
    lost = store.append_attempt(3000, batch=0)
    won = store.append_attempt(5, batch=0)
    engine.run(stream, 2)
    assert engine.read == list(range(10)), "a transaction is open"
    store.commit(won, batch=0)
    after = store.end
    store.append_numbers(3)
    opened = store.append_attempt(5, batch=1)
    store.append_numbers(2)
    shown = [*range(won.first, won.last + 1), *range(after, after + 3)]
    engine.run(stream, 3)
    assert engine.read == read_batch(make_batch_reader(store)) == [*range(10), *shown]
    hidden = [*range(lost.first, lost.last + 1)], [*range(opened.first, opened.last + 3)]
    everything = [*range(10), *hidden[0], *shown, *hidden[1]]
    assert read_batch(make_batch_reader(store, isolation="read_uncommitted")) == everything
    store.commit(batch=1)  # none of its parts won: they are lost, and what was behind them is seen
    assert read_batch(make_batch_reader(store)) == [*engine.read, opened.last + 1, opened.last + 2]


def test_copy_of_store_with_its_own_later_history_serves_no_row(store: StoreWriter, tmp_path: Path) -> None:
    """The driver's path leads to one store, that of the tasks to a copy, whose log has the same uuid."""
    store.append_numbers(50)
    for name in ("other", "lagging"):
        shutil.copytree(store.path, tmp_path / name / "default" / "dledger-n0")
    store.append_numbers(50, "ours")
    planned = make_batch_reader(store, minPartitions=3).partitions()
    stream = make_reader(store)
    start = pin_batch(stream)
    micro_batch = stream.partitions(start, stream.latestOffset(start, ALL))
    with StoreWriter(tmp_path / "other", uuid=None) as other, StoreWriter(tmp_path / "lagging", uuid=None) as lagging:
        other.append_numbers(50, "theirs")
        for partitions in (planned, micro_batch):
            for partition in partitions:
                with pytest.raises(TermMismatchError):
                    next(make_batch_reader(other).read(partition), None)
                with pytest.raises(BehindError):
                    next(make_batch_reader(lagging).read(partition), None)
            assert indexes(make_batch_reader(store), partitions) == list(range(100))


# --- chunks fetched ahead ----------------------------------------------------------------------------------------


END = 20


class CountingLog:
    """A log whose entries are a chunk and a batch each."""

    group = "default"

    def __init__(self, fails_at: int = END) -> None:
        self.asked: list[int] = []
        self.given = 0
        self.ahead: list[int] = []
        self._fails_at = fails_at

    def read(self, part: Range, start: int, replica: int, columns: object = None) -> Chunk:
        self.asked.append(start)
        self.ahead.append(len(self.asked) - self.given)
        if start >= self._fails_at:
            raise ValueError(f"at {start}")
        row = {"index": start, "term": 1, "position": start, "timestamp": None, "body": bytes(1 << 20)}
        return Chunk(pa.RecordBatch.from_pylist([row], schema=READ_SCHEMA), start + 1)

    def indexes(self) -> Generator[list[int]]:
        """Yield the indexes of each batch."""
        options = DLedgerOptions.for_reading({"peers": "n0-127.0.0.1:1"})
        log: Any = self
        partition = RangesPartition((Range("default", 0, END),), 0)
        for batch in read_partition(partition, options, lambda _options, _group: log):
            yield batch.column("index").to_pylist()
            self.given += 1


def test_chunks_come_in_order_and_at_most_three_are_in_memory() -> None:
    log = CountingLog()
    assert list(log.indexes()) == [[index] for index in range(END)]
    assert log.asked == list(range(END))
    assert max(log.ahead) <= 3


def test_task_knows_the_nodes_that_hang_as_its_driver_sees_it() -> None:
    address = "127.0.0.1:2"
    partition = RangesPartition((Range("default", 0, 1),), 0, unresponsive=(address,))
    log: Any = CountingLog()
    list(read_partition(partition, DLedgerOptions.for_reading({"peers": "n0-127.0.0.1:1"}), lambda *_: log))
    assert address in NODE_HEALTH.unresponsive()
    NODE_HEALTH.responded(address)


def test_prefetch_stops_with_task() -> None:
    log = CountingLog()
    batches = log.indexes()
    next(batches)
    batches.close()
    assert 1 <= len(log.asked) <= 3


def test_error_comes_after_earlier_chunks() -> None:
    log = CountingLog(fails_at=5)
    with pytest.raises(ValueError, match="at 5"):
        list(log.indexes())
    assert (log.asked, log.given) == (list(range(6)), 5)


# --- memory, in a process that reads as a Python worker does -----------------------------------------------------


BOUND_KIB = 300 << 10
WORKER = """
import json, sys
from spark_connector.reading.readers import DLedgerBatchReader
from spark_connector.options import DLedgerOptions
import pyspark.worker

reader = DLedgerBatchReader(DLedgerOptions.for_reading(json.loads(sys.argv[1])))
rows = nbytes = largest = 0
for partition in reader.partitions():
    for batch in reader.read(partition):
        rows, nbytes, largest = rows + batch.num_rows, nbytes + batch.nbytes, max(largest, batch.nbytes)
        del batch
[peak] = [line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")]
print(json.dumps([rows, nbytes, largest, int(peak)]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("content", ["small and large entries", "messages that grow a hundredfold"])
def test_memory_of_reader_is_bounded_whatever_backlog(tmp_path: Path, content: str) -> None:
    with StoreWriter(tmp_path, segment_bytes=64 << 20) as store:
        if content.startswith("messages"):
            more, count, size = {"decode": "message"}, 600, 600_000_000
            packed = zlib.compress(bytes(range(200)) * 5000)
            store.append(encode_messages("t", 0, [packed] * count, sys_flag=1).to_pylist())
        else:
            more, count, size = {}, 120_060, 230_000_000
            for body, number in ((bytes(1000), 4000), (bytes(2 << 20), 2)):
                for _ in range(30):
                    store.append([body] * number)
        given = {"path": str(store.path), "minPartitions": "1", **more}
        command = [sys.executable, "-c", WORKER, json.dumps(given)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    rows, nbytes, largest, peak = json.loads(done.stdout)
    assert rows == count
    assert nbytes > size
    assert largest <= 8 << 20
    assert peak <= BOUND_KIB


# --- the pool of clients -----------------------------------------------------------------------------------------


OPTIONS = DLedgerOptions(peers="n0-127.0.0.1:1", fetch_retry_ms=7_000)


async def answer() -> int:
    return 42


def test_client_is_shared_by_group_and_options() -> None:
    shared = client_for(OPTIONS, "pool-a")
    assert client_for(OPTIONS, "pool-a") is shared
    others = [
        client_for(OPTIONS, "pool-b"),
        client_for(OPTIONS, "pool-a", measuring=True),
        client_for(DLedgerOptions(peers="n0-127.0.0.1:2"), "pool-a"),
    ]
    assert shared not in others


def test_pool_is_bounded_and_closes_only_unused_clients() -> None:
    used = client_for(OPTIONS, "pool-used")
    for number in range(300):
        client_for(OPTIONS, f"pool-{number}")
    gc.collect()
    assert sum(thread.name.startswith("dledger-client-pool-") for thread in threading.enumerate()) <= 257
    assert used.call(answer()) == 42
    assert client_for(OPTIONS, "pool-used") is not used


def test_pool_is_empty_after_fork() -> None:
    parent = client_for(OPTIONS, "pool-fork")
    child = os.fork()
    if child == 0:
        try:
            mine = client_for(OPTIONS, "pool-fork")
            os._exit(0 if mine is not parent and mine.call(answer()) == 42 else 1)
        finally:
            os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert client_for(OPTIONS, "pool-fork") is parent

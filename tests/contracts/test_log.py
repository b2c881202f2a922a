"""Contract of the connector's ``Log``: servers, native stores, Java's and the Java protocol behave the same."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest

from dledger_core import BehindError, Client, LocalCluster, UnsupportedError
from dledger_core.client import check_of
from spark_connector.errors import OptionError, RetentionError
from spark_connector.options import DLedgerOptions
from spark_connector.planning import Range
from spark_connector.reading.logs import Log
from spark_connector.reading.opening import open_log
from tests.contracts.stores import Broker, JavaA, JavaB, Store, copy_of
from tests.spark_connector.store_writer import StoreWriter
from tests.support.growing_store import GrowingStore
from tests.support.slow_elections import SLOW_ELECTIONS

COUNT = 20


@dataclass
class Source:
    """A log with at least COUNT entries, and a way to add one."""

    log: Log
    append: Callable[[], object]
    has_times: bool = True
    has_split_points: bool = True
    delete: Callable[[], object] | None = None
    """Deletes the first entries, as retention does."""


def log_of(**options: str) -> Log:
    return open_log(DLedgerOptions.for_reading({"fetchRetryMs": "2000", **options}))


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(1, groups=("native", "java"), **SLOW_ELECTIONS) as running:
        yield running


def read(log: Log, start: int, end: int, max_bytes: int | None = None) -> list[dict[str, Any]]:
    bounds, rows, at = log.bounds(), list[dict[str, Any]](), start
    part = Range(log.group, start, end, bounds.commit_index, bounds.log_uuid)
    while at < end:
        chunk = log.read(part, at, max_bytes=max_bytes)
        assert at < chunk.next_index <= end
        rows += chunk.batch.to_pylist()
        at = chunk.next_index
    return rows


class LogContract:
    def test_bounds_include_new_entries(self, source: Source) -> None:
        before = source.log.bounds()
        assert before.end - before.first_index >= COUNT
        source.append()
        after = source.log.bounds(min_end=before.end + 1)
        assert (after.first_index, after.log_uuid) == (before.first_index, before.log_uuid)
        assert after.end > before.end

    def test_bounds_give_up_waiting_for_end_that_does_not_exist(self, source: Source) -> None:
        end = source.log.bounds().end
        assert source.log.bounds(min_end=end + 1000, wait_ms=100).end >= end

    def test_chunks_cover_range_in_order_whatever_their_size(self, source: Source) -> None:
        bounds = source.log.bounds()
        rows = read(source.log, bounds.first_index, bounds.end)
        indexes = [row["index"] for row in rows]
        assert indexes == sorted(set(indexes))
        assert indexes[-1] < bounds.end
        assert read(source.log, bounds.first_index, bounds.end, max_bytes=1) == rows
        middle = indexes[len(indexes) // 2]
        assert [row["index"] for row in read(source.log, middle, bounds.end)] == [i for i in indexes if i >= middle]

    def test_threads_read_the_same_rows(self, source: Source) -> None:
        bounds = source.log.bounds()
        rows = read(source.log, bounds.first_index, bounds.end)
        with ThreadPoolExecutor(4) as pool:
            found = pool.map(lambda _: read(source.log, bounds.first_index, bounds.end, max_bytes=500), range(4))
        assert all(each == rows for each in found)

    def test_range_after_end_is_behind_and_no_loss(self, source: Source) -> None:
        bounds = source.log.bounds()
        start = bounds.end + 1000  # the end that is known to be safe may be below that of the log
        part = Range(source.log.group, start, start + 5, bounds.commit_index, bounds.log_uuid)
        with pytest.raises(BehindError):
            source.log.read(part, start)

    def test_deleted_entries_are_loss_by_retention(self, source: Source) -> None:
        if source.delete is None:  # real nodes delete nothing so young; test_stream_reader.py has their response
            return
        bounds = source.log.bounds()
        source.delete()
        first = source.log.bounds().first_index
        assert bounds.first_index < first
        part = Range(source.log.group, bounds.first_index, bounds.end, bounds.commit_index, bounds.log_uuid)
        with pytest.raises(RetentionError):
            source.log.read(part, bounds.first_index)
        assert read(source.log, first, bounds.end)[0]["index"] >= first

    def test_record_has_check_and_contiguous_positions(self, source: Source) -> None:
        bounds = source.log.bounds()
        rows = read(source.log, bounds.first_index, bounds.end)[-5:]
        for row in rows:
            record = source.log.record(row["index"])
            expected = check_of(row["index"], row["term"], row["position"], row["body"])
            assert (record.check.term, record.check.check, record.position) == (row["term"], expected, row["position"])
            assert record.end_position >= record.position + 48 + len(row["body"])

    def test_split_points_are_nearest_indexes_or_unsupported(self, source: Source) -> None:
        bounds = source.log.bounds()
        part = Range(source.log.group, bounds.first_index + 1, bounds.end, bounds.commit_index, bounds.log_uuid)
        if not source.has_split_points:
            with pytest.raises(UnsupportedError):
                source.log.split_points(part, [0])
            return
        records = [source.log.record(index) for index in range(part.start, part.end)]
        positions = [at for record in records for at in (record.position, record.position + 1, record.end_position - 1)]
        expected = [index for at in range(part.start, part.end) for index in (at, at, at + 1)]
        assert list(source.log.split_points(part, [-1, 0, *positions, 1 << 60])) == [
            part.start,
            part.start,
            *expected,
            part.end,
        ]

    def test_index_at_time_is_found_or_rejected(self, source: Source) -> None:
        bounds = source.log.bounds()
        if not source.has_times:
            with pytest.raises(OptionError):
                source.log.index_at_time(0, bounds)
            return
        assert source.log.index_at_time(0, bounds) == bounds.first_index
        assert source.log.index_at_time(4_000_000_000_000, bounds) == bounds.end
        row = read(source.log, bounds.first_index, bounds.end)[-1]
        found = source.log.index_at_time(int(row["timestamp"].timestamp() * 1000), bounds)
        assert bounds.first_index <= found <= row["index"]

    def test_wait_ends_with_new_entries_or_timeout(self, source: Source) -> None:
        known = source.log.bounds()
        assert source.log.wait(known, 50) is False
        adding = threading.Timer(0.1, source.append)
        adding.start()
        try:
            assert source.log.wait(known, 20_000)
        finally:
            adding.join()

    def test_pin_is_accepted(self, source: Source) -> None:
        source.log.pin("reader", source.log.bounds().first_index, 1.0)
        source.log.pin("reader", 0, 0.0)


def of_servers(peers: str, group: str, **options: str) -> Iterator[Source]:
    with Client(peers, group) as client:
        client.append([b"body-%d" % number for number in range(COUNT)])
        log = log_of(peers=peers, groups=group, **options)
        is_native = "protocol" not in options
        yield Source(log, lambda: client.append([b"new"]), has_times=is_native, has_split_points=is_native)


class TestServers(LogContract):
    @pytest.fixture
    def source(self, cluster: LocalCluster) -> Iterator[Source]:
        yield from of_servers(cluster.peers, "native")


class TestJavaProtocol(LogContract):
    @pytest.fixture
    def source(self, cluster: LocalCluster) -> Iterator[Source]:
        yield from of_servers(cluster.peers, "java", protocol="dledger-java", safetyLag="200ms")


class TestNativeStore(LogContract):
    @pytest.fixture
    def source(self, tmp_path: Path) -> Iterator[Source]:
        with StoreWriter(tmp_path, segment_bytes=1 << 12) as writer:
            writer.append([b"body" * 100] * 2 * COUNT)
            yield Source(log_of(path=str(writer.path)), lambda: writer.append([b"new"]), delete=writer.trim)


class TestJavaB(LogContract):
    kind: ClassVar[type[Store]] = JavaB

    @pytest.fixture
    def source(self, tmp_path: Path) -> Source:
        stored = copy_of(self.kind, tmp_path / "complete").path
        store = GrowingStore(stored, tmp_path / stored.name, with_index=True)
        counts = iter(range(3 * len(store.rows) // 4, len(store.rows)))
        store.hold(next(counts))
        log = log_of(path=str(store.path), isolation="read_uncommitted")
        delete = partial(self.kind().delete_first, store.path)
        return Source(log, lambda: store.hold(next(counts)), has_times=False, delete=delete)


class TestJavaA(TestJavaB):
    kind = JavaA


class TestBroker(TestJavaB):
    kind = Broker

"""Planned entries are protected against retention until they are read."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from dledger_core import Client, LocalCluster
from dledger_core.errors import UnreachableError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.logs import Pin
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader
from tests.spark_connector.reading_as_executor import indexes


class PinnedLog:
    """Records its calls."""

    def __init__(self, group: str = "g", error: Exception | None = None) -> None:
        self.group = group
        self.asked: list[tuple[int, float]] = []
        self.names: set[str] = set()
        self._error = error

    def pin(self, name: str, start: int, seconds: float) -> None:
        self.asked.append((start, seconds))
        self.names.add(name)
        if self._error is not None:
            raise self._error


def test_pin_is_renewed_before_it_ends_and_not_with_each_chunk() -> None:
    now = [1000.0]
    log: Any = PinnedLog()
    pin = Pin(90_000, clock=lambda: now[0])
    pin.set(log, 5)
    for now[0], start in ((1029.0, 6), (1030.0, 7), (1059.9, 8), (1060.0, 9)):
        pin.renew(log, start)
    assert log.asked == [(5, 90.0), (7, 90.0), (9, 90.0)]
    assert len(log.names) == 1


def test_task_pins_only_when_pin_of_driver_is_due() -> None:
    now = [1000.0]
    early: Any = PinnedLog()
    pin = Pin(90_000, pinned_at=980.0, clock=lambda: now[0])
    pin.renew(early, 5)
    pin.release(early)
    assert early.asked == []
    late: Any = PinnedLog()
    pin = Pin(90_000, pinned_at=970.0, clock=lambda: now[0])
    pin.renew(late, 5)
    pin.release(late)
    assert late.asked == [(5, 90.0), (0, 0.0)]


def test_pin_without_duration_sends_no_request() -> None:
    now = [1000.0]
    log: Any = PinnedLog()
    pin = Pin(0, clock=lambda: now[0])
    pin.set(log, 5)
    pin.renew(log, 5)
    pin.release(log)
    assert log.asked == []


def test_servers_that_refuse_pin_are_warning(caplog: pytest.LogCaptureFixture) -> None:
    log: Any = PinnedLog(error=UnreachableError("no response"))
    Pin(90_000).set(log, 5)
    assert "group=g" in caplog.text
    assert "UNREACHABLE" in caplog.text


@pytest.mark.parametrize(
    ("options", "batch_ms", "stream_ms"),
    [({}, 0, 600_000), ({"pinFor": "1h"}, 3_600_000, 3_600_000), ({"pinFor": "0"}, 0, 0)],
)
def test_streams_pin_by_default_and_batches_on_request(
    options: dict[str, str], batch_ms: int, stream_ms: int, cluster: LocalCluster
) -> None:
    with Client(cluster.peers, "planned") as client:
        client.append([b"x"])
    chosen = DLedgerOptions.for_reading({"peers": cluster.peers, "groups": "planned", **options})
    assert {part.pin_ms for part in DLedgerBatchReader(chosen).partitions()} == {batch_ms}  # type: ignore[attr-defined]
    stream, start = planned_stream(
        {"peers": cluster.peers, "groups": "planned", "startingOffsets": "earliest", **options}
    )
    parts = stream.partitions(start, stream.latestOffset(start, ReadAllAvailable()))
    assert {part.pin_ms for part in parts} == {stream_ms}  # type: ignore[attr-defined]
    stream.stop()


def planned_stream(options: dict[str, str]) -> tuple[DLedgerStreamReader, dict[str, Any]]:
    """A stream that is past its pin batch."""
    reader = DLedgerStreamReader(DLedgerOptions.for_reading(options))
    start = reader.initialOffset()
    assert reader.latestOffset(start, ReadAllAvailable()) == start
    return reader, start


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    small: dict[str, Any] = {"data_segment_bytes": 64 << 10, "index_segment_bytes": 32 << 10, "retain_bytes": 256 << 10}
    with LocalCluster(1, groups=("kept", "other", "planned"), **small) as running:
        yield running


def first_index(cluster: LocalCluster, group: str) -> int:
    with Client(cluster.peers, group) as client:
        return min(node.first_index for node in client.metadata().nodes)


def await_retention(cluster: LocalCluster, group: str) -> None:
    before = first_index(cluster, group)
    deadline = time.monotonic() + 120
    while first_index(cluster, group) == before:
        assert time.monotonic() < deadline, f"retention has deleted nothing of {group}"
        time.sleep(0.2)


@pytest.mark.integration
@pytest.mark.slow
def test_retention_waits_for_planned_entries_only(cluster: LocalCluster) -> None:
    """Both logs are far above the retained size; one of them has planned entries."""

    def fill(group: str) -> None:
        with Client(cluster.peers, group) as client:
            client.append([b"x" * 1000] * 1000)

    fill("kept")
    options = {"peers": cluster.peers, "groups": "kept", "startingOffsets": "earliest"}
    reader, start = planned_stream(options)
    end = reader.latestOffset(start, ReadAllAvailable())
    parts = reader.partitions(start, end)
    first, last = start["groups"]["kept"]["next"], end["groups"]["kept"]["next"]
    fill("other")
    await_retention(cluster, "other")
    assert first_index(cluster, "kept") <= first
    assert indexes(reader, list(parts)) == list(range(max(first, 1), last))
    reader.stop()
    await_retention(cluster, "kept")

"""The requests of an idle stream, and its delay for new entries; the reader alone, without Spark."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from pyspark.sql.streaming.datasource import ReadAllAvailable

from dledger_core import Client
from dledger_core.client.routing.channel import Channel
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerStreamReader
from tests.support.slow_elections import SLOW_ELECTIONS

pytestmark = pytest.mark.integration
ALL = ReadAllAvailable()
SEEN_WITHIN_S = 0.2


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from dledger_core import LocalCluster

    with LocalCluster(3, groups=("a", "b", "c"), **SLOW_ELECTIONS) as running:
        for group in "abc":
            with Client(running.peers, group) as client:
                client.append([b"first"])
        yield running


def idle_reader(cluster: Any, groups: str) -> tuple[DLedgerStreamReader, dict[str, Any]]:
    """A reader that has read everything, and its offset."""
    options = {"peers": cluster.peers, "groups": groups, "startingOffsets": "earliest"}
    reader = DLedgerStreamReader(DLedgerOptions.for_reading(options))
    at, before = reader.latestOffset(reader.initialOffset(), ALL), None
    while at != before:
        at, before = reader.latestOffset(at, ALL), at
    return reader, at


def count_requests(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Return a list that gets the time of each request from now on."""
    asked: list[float] = []
    request = Channel.request

    async def counting(self: Channel, *arguments: Any, **options: Any) -> Any:
        asked.append(time.monotonic())
        return await request(self, *arguments, **options)

    monkeypatch.setattr(Channel, "request", counting)
    return asked


@pytest.mark.parametrize("groups", ["a", "a,b,c"])
def test_idle_stream_sends_two_requests_per_second_for_any_groups(
    cluster: Any, groups: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader, at = idle_reader(cluster, groups)
    asked = count_requests(monkeypatch)
    began = time.monotonic()
    while time.monotonic() - began < 3.2:
        assert reader.latestOffset(at, ALL) == at
        assert reader.reportLatestOffset() is not None
    assert len(asked) <= 2 * 3.2 + 1


def test_stream_of_many_groups_sends_few_requests_and_sees_each(monkeypatch: pytest.MonkeyPatch) -> None:
    from dledger_core import LocalCluster

    groups = [f"g{number:02}" for number in range(80)]
    with LocalCluster(1, groups=tuple(groups), **SLOW_ELECTIONS) as cluster:
        reader, at = idle_reader(cluster, ",".join(groups))
        asked = count_requests(monkeypatch)
        began = time.monotonic()
        while time.monotonic() - began < 3.2:
            assert reader.latestOffset(at, ALL) == at
        assert len(asked) <= 2 * 3.2 + 1
        for group in (groups[0], groups[-1]):
            with Client(cluster.peers, group) as client:
                index = client.append([b"new"]).last_index
            while at["groups"][group]["next"] <= index:
                at = reader.latestOffset(at, ALL)


@pytest.mark.parametrize("groups", ["a", "a,b,c"])
def test_new_entries_are_seen_immediately(cluster: Any, groups: str) -> None:
    reader, at = idle_reader(cluster, groups)
    took, appended = [], [0.0]
    with Client(cluster.peers, "a") as client:

        def append() -> None:
            client.append([b"new"])
            appended[0] = time.monotonic()

        for _ in range(3):
            timer = threading.Timer(0.25, append)
            timer.start()
            before = at
            while at == before:
                at = reader.latestOffset(at, ALL)
            seen = time.monotonic()
            timer.join()
            took.append(seen - appended[0])
    assert min(took) < SEEN_WITHIN_S


def test_idle_stream_survives_loss_of_node(cluster: Any) -> None:
    reader, at = idle_reader(cluster, "a")
    leader = cluster.leader("a")
    cluster.kill(leader)
    try:
        with Client(cluster.peers, "a") as client:
            index = client.append([b"after"]).last_index
        deadline = time.monotonic() + 120
        while at["groups"]["a"]["next"] <= index and time.monotonic() < deadline:
            at = reader.latestOffset(at, ALL)
        assert at["groups"]["a"]["next"] == index + 1
    finally:
        cluster.restart(leader)

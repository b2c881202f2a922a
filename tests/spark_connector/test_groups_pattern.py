"""Groups by pattern, against a real node: existing ones, and new ones while a query runs."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.client.routing.channel import Channel
from spark_connector.errors import GroupGoneError, OptionError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader, DLedgerStreamReader
from tests.spark_connector.engine import ALL, Engine, next_of
from tests.spark_connector.reading_as_executor import indexes

pytestmark = pytest.mark.integration
OLD = ("orders-a", "orders-b", "other")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with LocalCluster(1, groups=OLD) as running:
        for count, group in enumerate(OLD, 1):
            append(running, group, count)
        yield running


def append(cluster: Any, group: str, count: int) -> None:
    with Client(cluster.peers, group) as client:
        client.append([group.encode()] * count)


def options(cluster: Any, pattern: str, **more: str) -> DLedgerOptions:
    return DLedgerOptions.for_reading({"peers": cluster.peers, "groupsPattern": pattern, **more})


def test_batch_reads_groups_whose_complete_name_matches(cluster: Any) -> None:
    reader = DLedgerBatchReader(options(cluster, "orders-."))
    ranges = [part for partition in reader.partitions() for part in partition.ranges]
    assert [(part.group, part.end) for part in ranges] == [("orders-a", 2), ("orders-b", 3)]
    with pytest.raises(OptionError, match=r"groupsPattern 'orders'.*orders-a, orders-b, other"):
        DLedgerBatchReader(options(cluster, "orders")).partitions()


def test_starting_timestamp_for_all_or_each_group(cluster: Any) -> None:
    with Client(cluster.peers, "orders-b") as client:
        last = client.read(0, 100).column("timestamp")[-1].as_py()
        while time.time() <= last.timestamp() + 0.002:
            time.sleep(0.001)
        first = client.append([b"later"]).first_index
        when = round(client.get(first).timestamp.timestamp() * 1000)

    def starts(spec: str, **more: str) -> dict[str, list[int]]:
        reader = DLedgerBatchReader(options(cluster, "orders-.", startingTimestamp=spec, **more))
        ranges = [part for partition in reader.partitions() for part in partition.ranges]
        return {part.group: [part.start, part.end] for part in ranges}

    assert starts(json.dumps({"orders-b": when})) == {"orders-a": [0, 2], "orders-b": [first, first + 1]}
    with pytest.raises(OptionError, match=r"startingTimestamp: group 'orders-a'"):
        starts(str(when))
    assert starts(str(when), startingOffsetsByTimestampStrategy="latest") == {"orders-b": [first, first + 1]}
    assert starts("0", endingTimestamp=json.dumps({"orders-b": when})) == {"orders-a": [0, 2], "orders-b": [0, first]}


def test_index_for_other_group_is_rejected(cluster: Any) -> None:
    with pytest.raises(OptionError, match="'other'"):
        options(cluster, "orders-.", startingOffsets='{"other": 1}')


def test_group_search_keeps_idle_query_at_two_requests_per_second(
    cluster: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = DLedgerStreamReader(options(cluster, "orders-.", startingOffsets="earliest", discoveryInterval="1s"))
    at = reader.latestOffset(reader.latestOffset(reader.initialOffset(), ALL), ALL)
    asked: list[int] = []
    request = Channel.request

    async def counting(self: Channel, *arguments: Any, **settings: Any) -> Any:
        asked.append(1)
        return await request(self, *arguments, **settings)

    monkeypatch.setattr(Channel, "request", counting)
    began = time.monotonic()
    while time.monotonic() - began < 3:
        assert reader.latestOffset(at, ALL) == at
    assert len(asked) <= 2 * 3 + 5  # the node is asked for groups ten times as often as by default


def test_new_group_is_read_from_first_entry(cluster: Any) -> None:
    more = {"discoveryInterval": "1ms", "startingOffsets": "latest"}
    reader = DLedgerStreamReader(options(cluster, "(orders|late)-.", **more))
    engine = Engine()
    engine.start(reader)
    cluster._groups = (*OLD, "late-c")
    cluster.restart("n0")
    cluster.leader("late-c")
    append(cluster, "late-c", 4)
    append(cluster, "orders-a", 1)
    deadline = time.monotonic() + 120
    while len(engine.read) < 5 and time.monotonic() < deadline:
        engine.start(reader)
    assert sorted(engine.read) == [1, 2, 3, 3, 4]  # 2 of orders-a is a control entry of the new term
    found = [next_of(offset, "late-c") for offset in map(json.loads, engine.offsets) if "late-c" in offset["groups"]]
    assert found[0] == 0, "its start is recorded before its first entry is read"
    again = Engine()
    again.offsets, again.commits = engine.offsets[:], len(engine.offsets) - 1
    again.start(DLedgerStreamReader(options(cluster, "(orders|late)-.", **more)))
    assert again.read == engine.read[-len(again.read) :], "the replay of the last micro-batch reads the same"
    narrower = DLedgerStreamReader(options(cluster, "late-.", **more))
    with pytest.raises(GroupGoneError, match="groupsPattern"):
        narrower.latestOffset(json.loads(engine.offsets[-1]), ALL)


def test_stream_waits_for_first_group(cluster: Any, caplog: pytest.LogCaptureFixture) -> None:
    reader = DLedgerStreamReader(options(cluster, "nothing", pollMs="1"))
    at = reader.initialOffset()
    assert at["groups"] == {}
    assert "'nothing'" in caplog.text
    assert reader.latestOffset(at, ALL) == at
    assert reader.latestOffset(at, ALL) == at
    assert indexes(reader, reader.partitions(at, at)) == []

"""The executor's side against real servers: whichever replica is preferred, a dead or stuck one is passed over."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.client.routing.channel import Channel
from dledger_core.errors import DLedgerError, UnreachableError
from spark_connector.options import DLedgerOptions
from spark_connector.reading.readers import DLedgerBatchReader
from spark_connector.reading.tables import TableReader
from tests.spark_connector.reading_as_executor import indexes
from tests.support.slow_elections import SLOW_ELECTIONS

pytestmark = pytest.mark.integration
COUNT = 5000
written: list[int] = []
"""Start of the entries: after one control entry per earlier leader."""


def everything() -> list[int]:
    return list(range(written[-1], written[-1] + COUNT))


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    with LocalCluster(3, groups=("default", "large"), **SLOW_ELECTIONS) as running:
        with Client(running.peers) as client:
            written.append(client.append([b"x" * 100] * COUNT).first_index)
        with Client(running.peers, "large") as client:
            for _ in range(8):
                client.append([b"x" * 1000] * 1000)
        yield running


def settle(cluster: Any) -> None:
    """Wait until every node has all that is committed."""
    for group in ("default", "large"):
        with Client(cluster.peers, group) as client:
            deadline = time.monotonic() + 120
            while len({(node.reachable, node.commit_index) for node in client.metadata().nodes}) > 1:
                assert time.monotonic() < deadline
                time.sleep(0.05)


def planned(cluster: Any, read_from: str, **more: str) -> tuple[DLedgerBatchReader, list[Any]]:
    options = {"peers": cluster.peers, "readFrom": read_from, "minPartitions": "3", "fetchMaxBytes": "50000", **more}
    reader = DLedgerBatchReader(DLedgerOptions.for_reading(options))
    return reader, reader.partitions()


@pytest.mark.parametrize("read_from", ["any", "leader", "follower", "node:n1"])
def test_every_preference_reads_all(cluster: Any, read_from: str) -> None:
    assert indexes(*planned(cluster, read_from)) == everything()


def test_tasks_of_one_process_keep_their_connections(cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, partitions = planned(cluster, "any", minPartitions="6")
    assert indexes(reader, partitions[:3]) != []
    opened: list[str] = []
    open_channel = Channel.open

    async def counting(self: Channel, timeout_s: float) -> None:
        opened.append(str(self.peer.node_id))
        await open_channel(self, timeout_s)

    monkeypatch.setattr(Channel, "open", counting)
    again = planned(cluster, "any", minPartitions="6")
    assert indexes(again[0], [*partitions[3:], *again[1]]) != []
    assert opened == []


@pytest.mark.parametrize("read_from", ["any", "leader", "follower"])
def test_replica_killed_or_paused_after_planning_is_passed_over(cluster: Any, read_from: str) -> None:
    reader, partitions = planned(cluster, read_from)
    leader = cluster.leader()
    victim = leader if read_from == "leader" else next(node for node in cluster.node_ids if node != leader)
    cluster.pause(victim)
    try:
        began = time.monotonic()
        assert indexes(reader, partitions) == everything()
        assert time.monotonic() - began < 10  # the request's whole timeout
    finally:
        cluster.resume(victim)
    cluster.kill(victim)
    try:
        assert indexes(reader, partitions) == everything()
        assert indexes(*planned(cluster, read_from)) == everything()
    finally:
        cluster.restart(victim)


@pytest.mark.parametrize("read_from", ["any", "leader", "follower"])
def test_task_reads_through_kills_restarts_and_transfer(cluster: Any, read_from: str) -> None:
    reader, partitions = planned(cluster, read_from, groups="large", fetchMaxBytes="100000")
    batches = (batch for partition in partitions for batch in reader.read(partition))
    leader = cluster.leader("large")
    other = next(node for node in cluster.node_ids if node != leader)

    def transfer_leadership() -> None:
        with Client(cluster.peers, "large") as client:
            client.transfer_leadership(other)

    events = [
        lambda: cluster.kill(leader),
        lambda: cluster.restart(leader),
        transfer_leadership,
        lambda: cluster.kill(other),
        lambda: cluster.restart(other),
    ]
    found: list[int] = []
    for batch in batches:
        found += batch.column("index").to_pylist()
        if events:
            events.pop(0)()
    assert not events, "all that had to happen happened while it read"
    assert found == sorted(set(found))
    assert len(found) == 8000
    settle(cluster)


def test_read_from_node_uses_no_other_node(cluster: Any) -> None:
    reader, partitions = planned(cluster, "node:n2", fetchRetryMs="500", fetchTimeoutMs="500")
    cluster.kill("n2")
    try:
        with pytest.raises(UnreachableError):
            indexes(reader, partitions)
    finally:
        cluster.restart("n2")


def test_unknown_group_fails_immediately(cluster: Any) -> None:
    began = time.monotonic()
    with pytest.raises(DLedgerError, match="'orders'"):
        planned(cluster, "any", groups="orders")
    assert time.monotonic() - began < 5


def test_loss_of_all_nodes_is_error_after_retry_timeout(cluster: Any) -> None:
    settle(cluster)
    reader, partitions = planned(cluster, "any", fetchRetryMs="300", fetchTimeoutMs="500")
    for node in cluster.node_ids:
        cluster.kill(node)
    try:
        with pytest.raises(UnreachableError):
            indexes(reader, partitions)
    finally:
        for node in cluster.node_ids:
            cluster.restart(node)
        cluster.leader()


@pytest.mark.parametrize("more", [{}, {"groupsPattern": "a.*"}, {"table": "groups"}])
def test_unreachable_peers_are_named_when_query_is_planned(more: dict[str, str]) -> None:
    options = DLedgerOptions.for_reading({"peers": "n0-127.0.0.1:1", "fetchRetryMs": "200", **more})
    reader = TableReader(options) if options.table else DLedgerBatchReader(options)
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1"):
        reader.partitions()

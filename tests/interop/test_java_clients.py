"""Java's own ``DLedgerClient``, of both generations, against a real cluster of ours.

The remoting side of each node stands in this process and asks the cluster as its client does.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from dledger_core import AsyncClient, Client, LocalCluster, NotLeaderError
from dledger_core.config import parse_peers
from dledger_core.errors import IndexOutOfRangeError
from dledger_core.net.transport import Hello, Server, serve
from dledger_core.remoting.connection import RemotingConnection
from dledger_core.remoting.responses import WireEntry
from dledger_core.remoting.session import Appended, GroupState
from tests.interop.java_dledger import JavaDLedger
from tests.support.patience import PATIENT

pytestmark = [pytest.mark.integration, pytest.mark.slow]

GROUP = "default"


@dataclass
class ThroughClient:
    """One node of the cluster, asked through a client."""

    node_id: str
    client: AsyncClient
    peers: dict[str, str]

    def group(self, name: str) -> ThroughClient | None:
        return self if name == GROUP else None

    async def state(self) -> GroupState:
        metadata = await self.client.metadata()
        return GroupState(metadata.leader_id, metadata.term, self.peers)

    async def _lead(self) -> None:
        leader = (await self.client.metadata()).leader_id
        if leader != self.node_id:
            raise NotLeaderError("not here", "", "", {"leader_id": leader})

    async def append(self, bodies: Sequence[bytes]) -> Appended:
        await self._lead()
        result = await self.client.append(list(bodies))
        entry = await self.client.get(result.last_index)
        return Appended(result.last_index, entry.position, result.term)

    async def get(self, index: int) -> WireEntry:
        await self._lead()
        found = await self.client.records(index, index + 1, max_bytes=1) if index >= 0 else None
        for row in found.batch.to_pylist() if found is not None else ():
            return WireEntry(row["index"], row["term"], row["magic"], row["position"], row["body"])
        raise IndexOutOfRangeError("x", "", "", {"index": index, "first_index": 0, "last_index": -1})

    async def transfer(self, node_id: str) -> None:
        await self._lead()
        await self.client.transfer_leadership(node_id)


@dataclass
class Ports:
    """The remoting ports of all nodes, served by a thread."""

    cluster_peers: str
    peers: dict[str, str] = field(default_factory=dict)

    async def serve(self, ready: threading.Event, stop: asyncio.Event) -> None:
        servers: list[Server] = []
        async with AsyncClient(self.cluster_peers, GROUP) as client:
            for peer in parse_peers(self.cluster_peers):
                node = ThroughClient(str(peer.node_id), client, self.peers)
                hello = Hello(role="peer", node_id=peer.node_id)
                server = await serve(
                    "127.0.0.1",
                    0,
                    accept=lambda _, hello=hello: hello,  # type: ignore[misc]
                    handler_for=lambda _: pytest.fail("only remoting is spoken here"),
                    foreign=lambda node=node: RemotingConnection(node),  # type: ignore[misc]
                )
                servers.append(server)
                self.peers[str(peer.node_id)] = f"127.0.0.1:{server.port}"
            ready.set()
            await stop.wait()
            for server in servers:
                await server.close()

    @property
    def string(self) -> str:
        return ";".join(f"{node}-{address}" for node, address in self.peers.items())


@pytest.fixture(scope="module")
def cluster() -> Iterator[LocalCluster]:
    with LocalCluster(**PATIENT) as running:
        yield running


@pytest.fixture(scope="module")
def ports(cluster: LocalCluster) -> Iterator[Ports]:
    found = Ports(cluster.peers)
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=loop.run_until_complete, args=(found.serve(ready, stop),))
    thread.start()
    try:
        assert ready.wait(120)
        yield found
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(120)
        loop.close()


@pytest.fixture(params=["A", "B"])
def java(request: pytest.FixtureRequest) -> JavaDLedger:
    found: JavaDLedger = request.getfixturevalue(f"java_{request.param.lower()}")
    return found


@pytest.fixture
def java_client(java: JavaDLedger, ports: Ports) -> Iterator[Any]:
    client = java.classes.client.DLedgerClient(GROUP, ports.string)
    client.startup()
    try:
        yield client
    finally:
        client.shutdown()


def test_java_appends_and_gets(java_client: Any, cluster: LocalCluster) -> None:
    bodies = [b"from java", b"", bytes(range(256)) * 40, bytes(4_194_304 - 48)]
    responses = [java_client.append(body) for body in bodies]
    assert [response.getCode() for response in responses] == [200] * 4
    assert {response.getLeaderId() for response in responses} == {cluster.leader()}
    indexes = [response.getIndex() for response in responses]
    assert indexes == sorted(indexes)
    with Client(cluster.peers, GROUP) as ours:
        held = [ours.get(index) for index in indexes]
    assert [entry.body for entry in held] == bodies
    assert [response.getPos() for response in responses] == [entry.position for entry in held]
    assert [response.getTerm() for response in responses] == [entry.term for entry in held]
    for entry in held:
        answer = java_client.get(entry.index)
        assert answer.getCode() == 200
        [got] = answer.getEntries()
        facts = (got.getIndex(), got.getTerm(), got.getPos(), got.getMagic(), got.getSize())
        assert facts == (entry.index, entry.term, entry.position, 1, len(entry.body) + 48)
        assert bytes(got.getBody()) == entry.body


def test_java_is_told_of_an_index_that_is_not_there(java_client: Any) -> None:
    assert java_client.get(1 << 40).getCode() == 410


def test_java_transfers_leadership_and_is_redirected(
    java: JavaDLedger, java_client: Any, ports: Ports, cluster: LocalCluster
) -> None:
    first = java_client.append(b"before")
    leader = cluster.leader()
    target = next(node for node in ports.peers if node != leader)
    wrong = java_client.leadershipTransfer(leader, target, first.getTerm() + 5)
    assert wrong.getCode() == 407
    assert java_client.leadershipTransfer(leader, target, first.getTerm()).getCode() == 200
    assert cluster.leader() == target
    after = java_client.append(b"after")  # it still believes in the old leader, whose answer names the new one
    assert (after.getCode(), after.getLeaderId()) == (200, target)
    assert after.getTerm() > first.getTerm()
    fresh = java.classes.client.DLedgerClient(GROUP, ports.string)
    fresh.startup()
    try:
        [got] = fresh.get(after.getIndex()).getEntries()
        assert bytes(got.getBody()) == b"after"
    finally:
        fresh.shutdown()


def test_java_of_another_group_gets_nothing(java: JavaDLedger, ports: Ports) -> None:
    client = java.classes.client.DLedgerClient("other", ports.string)
    client.startup()
    try:
        assert client.append(b"x").getCode() in (301, 400)  # no metadata, or refused by the node it tries first
    finally:
        client.shutdown()

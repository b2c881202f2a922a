"""An orderly stop: leadership is handed over and clients leave first, so that no append is lost, plain ones too."""

from __future__ import annotations

import asyncio
from collections import Counter
from functools import partial

import pytest

from dledger_core.client.routing.channel import Channel, ConnectionLostError
from dledger_core.cluster import LocalCluster
from dledger_core.config import Peer, format_peers
from dledger_core.connect import AsyncClient, Client
from dledger_core.errors import DLedgerError, TransferringError, UnreachableError
from dledger_core.net.connection import Connection
from dledger_core.net.frame import Frame
from dledger_core.net.hello import Hello
from dledger_core.net.listening import serve
from dledger_core.net.protocol import Type
from tests.support.server_group import ServerGroup, eventually, run, stall
from tests.support.soon import soon


def are_all_reachable(peers: str) -> bool:
    with Client(peers) as client:
        return all(node.reachable for node in client.metadata().nodes)


class Load:
    """Plain appends of one client, each retried by the client alone; a context manager.

    Attributes:
        outcomes: how many appends ended how.
    """

    def __init__(self, client: AsyncClient, tasks: int) -> None:
        self.outcomes: Counter[str] = Counter()
        self._client = client
        self._ending = False
        self._tasks = [asyncio.create_task(self._append()) for _ in range(tasks)]

    async def _append(self) -> None:
        while not self._ending:
            try:
                await self._client.append([b"x" * 100])
                self.outcomes["appended"] += 1
            except DLedgerError as error:
                self.outcomes[error.name] += 1

    async def progress(self) -> None:
        before = self.outcomes["appended"]
        await eventually(lambda: self.outcomes["appended"] > before + 100)

    async def end(self) -> dict[str, int]:
        self._ending = True
        await asyncio.gather(*self._tasks)
        return dict(self.outcomes)


def test_stop_of_leader_fails_no_plain_append_in_flight(tmp_path):
    async def scenario() -> None:
        async with ServerGroup(tmp_path) as group, AsyncClient(format_peers(group.peers)) as client:
            load = Load(client, 64)
            for _ in range(2):
                await load.progress()
                leader = await group.leader()
                await group.nodes[leader].drain()
                assert await group.leader() != leader
                await group.stop(leader)
                await load.progress()
                await group.start(leader)
            assert set(await load.end()) == {"appended"}

    run(scenario())


def test_leader_that_stops_refuses_appends_after_those_in_flight(tmp_path):
    async def scenario() -> None:
        async with ServerGroup(tmp_path, 1) as group:
            client, late = await group.client(), await group.client()
            replica = group.hosted("n0").replica
            free = stall(replica.store.run)
            append = asyncio.create_task(client.append([b"in flight"]))
            await eventually(lambda: replica.raft.last_index > replica.commit_index)
            stopping = asyncio.create_task(group.nodes["n0"].drain())
            for _ in range(4):  # the tasks of the groups begin
                await asyncio.sleep(0)
            with pytest.raises(TransferringError):
                await late.append([b"too late"])
            free.set()
            first, last, _ = await append
            assert first == last
            await stopping

    run(scenario())


def test_node_that_stops_ends_long_polls_and_lets_its_clients_leave(tmp_path):
    async def scenario() -> None:
        async with ServerGroup(tmp_path, 1) as group:
            client = await group.client()
            _, last, _ = await client.append([b"x"])
            waiting = asyncio.create_task(client.read(last + 1, last + 2, wait=30_000))
            await eventually(lambda: any(flow.tasks for flow in group.nodes["n0"].service.flows.values()))
            await group.nodes["n0"].drain()
            assert not client.channel.in_flight
            with pytest.raises(UnreachableError) as caught:
                await waiting
            assert not isinstance(caught.value, ConnectionLostError), "it has a response"
            assert not client.channel.is_open

    run(scenario())


class Leaving:
    """A node that asks its clients to leave before it responds."""

    def __init__(self) -> None:
        self.requests: list[tuple[Connection, Frame]] = []

    def on_frame(self, connection: Connection, frame: Frame) -> None:
        self.requests.append((connection, frame))
        connection.send({"t": Type.GOAWAY})

    def on_close(self, connection: Connection, error: Exception | None) -> None:
        pass

    def respond(self) -> None:
        for connection, frame in self.requests:
            connection.send({"t": frame.header["t"] + 1, "r": frame.header["r"]})


def test_client_leaves_once_it_has_all_responses():
    async def scenario() -> None:
        hello, node = Hello("peer", "n0", "uuid-0", (1, 1), "127.0.0.1:1"), Leaving()
        server = await serve("127.0.0.1", 0, accept=lambda _: hello, handler_for=lambda _: node)
        channel = Channel(Peer("n0", "127.0.0.1", server.port))
        await channel.open(60)
        request = asyncio.create_task(channel.request({"t": int(Type.APPEND)}, timeout_s=60))
        await eventually(lambda: node.requests and not channel.is_open)
        assert channel.in_flight == 1
        node.respond()
        assert (await request).header["t"] == Type.APPEND + 1
        await eventually(lambda: not server.connections)
        await channel.close()
        await server.close()

    run(scenario())


def test_node_that_stops_serves_no_read_that_another_node_can(tmp_path):
    async def scenario() -> None:
        async with ServerGroup(tmp_path, 1) as group:
            client = await group.client()
            group.nodes["n0"].service.drain()
            with pytest.raises(UnreachableError):
                await client.read(0, 1, wait=30_000)

    run(scenario())


@pytest.mark.integration
def test_rolling_restart_of_processes_fails_no_append(tmp_path):
    async def scenario(cluster: LocalCluster) -> None:
        async with AsyncClient(cluster.peers) as client:
            load = Load(client, 32)
            for node in cluster.node_ids:
                await load.progress()
                await asyncio.to_thread(cluster.restart, node)
                await asyncio.to_thread(soon, partial(are_all_reachable, cluster.peers))
            assert set(await load.end()) == {"appended"}

    with LocalCluster(3, tmp_path) as cluster:
        run(scenario(cluster))

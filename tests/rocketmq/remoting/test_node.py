"""Java's protocol on a node's own port, used by the client for Java groups; needs no Java."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from dledger_core.client.routing.retry import Timeouts
from dledger_core.config import ListenAddress
from dledger_core.connect import AsyncClient, JavaOptions
from dledger_core.errors import IndexOutOfRangeError, NotLeaderError, ProtocolError, UnknownGroupError, UnreachableError
from dledger_core.rocketmq.client import JavaClient
from dledger_core.rocketmq.remoting.messages import AppendRequest, AppendResponse, GetRequest, GetResponse
from dledger_core.server.monitoring.site import Site
from tests.rocketmq.node_group import rocketmq_group
from tests.support.server_group import STORAGE, ServerGroup, eventually

NOW = JavaOptions(safety_lag_ms=0)


@contextlib.asynccontextmanager
async def raw_client(group: ServerGroup) -> AsyncIterator[JavaClient]:
    """A client whose single requests a test sends itself."""
    client = JavaClient(tuple(group.peers), "default", Timeouts(20.0))
    yield client
    await client.close()


def java_client(group: ServerGroup, name: str = "default", timeout_ms: int = 20_000) -> AsyncClient:
    return AsyncClient(group.peers, name, protocol="dledger-java", java=NOW, timeout_ms=timeout_ms)


async def test_both_protocols_read_the_same_log(tmp_path: Path) -> None:
    async with rocketmq_group(tmp_path) as group, java_client(group) as java, AsyncClient(group.peers) as native:
        await group.leader()
        bodies = [b"%d" % number * 100 for number in range(200)] + [b""]
        result = await java.append(bodies)
        indexes = result.indexes or range(result.first_index, result.last_index + 1)
        assert [(await native.get(index)).body for index in indexes] == bodies
        index = (await native.append([b"native"])).last_index
        entry = await java.get(index)
        assert (entry.body, entry.position) == (b"native", (await native.get(index)).position)
        records = (await java.records(0, index + 1)).batch.to_pylist()
        assert [row["magic"] for row in records][:1] == [2]  # the leader's no-op
        assert [row["index"] for row in records] == list(range(index + 1))


async def test_acknowledged_entries_are_readable_at_once(tmp_path: Path) -> None:
    """Two followers are a majority, so the leader's own files may not contain the entries yet."""
    async with rocketmq_group(tmp_path) as group, raw_client(group) as java:
        leader = await group.leader()
        log, base = group.hosted(leader).replica.log, {"group": "default", "remote_id": leader}
        for number in range(300):
            bodies = (b"a%d" % number, b"%d" % number)
            response = await java.nodes.ask(AppendRequest(**base, bodies=bodies, is_batch=True), AppendResponse, 10)
            found = [
                (await java.nodes.ask(GetRequest(**base, index=index), GetResponse, 10)).entries[0]
                for index in (response.index - 1, response.index)
            ]
            assert tuple(entry.body for entry in found) == bodies
            assert response.position == found[1].position == log.position_of(response.index)
        assert (response.term, response.leader_id) == (group.hosted(leader).replica.raft.status().term, leader)


async def test_large_entries_are_encoded_off_loop(tmp_path: Path) -> None:
    async with rocketmq_group(tmp_path, nodes=1) as group, java_client(group) as java:
        await group.leader()
        body = bytes(range(256)) * 8192
        results = await asyncio.gather(*(java.append([body + b"%d" % number]) for number in range(6)))
        entries = await asyncio.gather(*(java.get(result.last_index) for result in results))
        assert [entry.body for entry in entries] == [body + b"%d" % number for number in range(6)]


async def test_redirect_transfer_and_missing_index(tmp_path: Path) -> None:
    async with rocketmq_group(tmp_path) as group, java_client(group) as java, raw_client(group) as raw:
        leader = await group.leader()
        [follower, _] = await group.followers()
        get = GetRequest(group="default", remote_id=follower, index=0)
        with pytest.raises(NotLeaderError) as caught:
            await raw.nodes.ask(get, GetResponse, 10)
        assert caught.value.leader_id == leader
        for index in (-1, 1 << 40):
            with pytest.raises(IndexOutOfRangeError):
                await raw.nodes.ask(replace(get, remote_id=leader, index=index), GetResponse, 10)
        await java.append([b"x"])
        await java.transfer_leadership(follower)
        assert await eventually(lambda: group.hosted(follower).replica.is_leader)
        await java.append([b"y"])
        assert (await java.metadata()).leader_id == follower


async def test_other_group_is_unknown(tmp_path: Path) -> None:
    async with rocketmq_group(tmp_path, nodes=1) as group, java_client(group, "other") as java:
        await group.leader()
        with pytest.raises(UnknownGroupError):
            await java.append([b"x"])


async def test_starting_node_knows_no_leader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It listens before it opens its stores; between the two it starts its second port."""
    listens, may_open, start = asyncio.Event(), asyncio.Event(), Site.start

    async def held(site: Site, address: ListenAddress) -> None:
        listens.set()
        await may_open.wait()
        await start(site, address)

    async with rocketmq_group(tmp_path, nodes=1, http=ListenAddress("127.0.0.1", 0)) as group:
        await group.stop("n0")
        monkeypatch.setattr(Site, "start", held)
        starting = asyncio.create_task(group.start("n0"))
        await listens.wait()
        async with java_client(group, timeout_ms=300) as java:
            assert (await java.metadata()).leader_id is None
        may_open.set()
        await starting
        async with java_client(group) as java:
            await java.append([b"x"])


async def test_port_without_remoting_rejects_java_client(tmp_path: Path) -> None:
    off = rocketmq_group(tmp_path, nodes=1, foreign_port=None)
    async with off as group, java_client(group, timeout_ms=300) as java:
        await group.leader()
        with pytest.raises((UnreachableError, ProtocolError)):
            await java.append([b"x"])


async def test_profile_a_serves_java_client(tmp_path: Path) -> None:
    options = {"storage": replace(STORAGE, profile="A")}
    async with rocketmq_group(tmp_path, nodes=1, **options) as group, java_client(group) as java:
        await group.leader()
        assert (await java.append([b"x"])).first_index == 0

"""Retention in a group: each node trims its own log, and a node that needs trimmed entries gets a snapshot."""

from __future__ import annotations

import asyncio
import shutil

import pytest

from dledger_core.config import StorageConfig
from dledger_core.errors import IndexOutOfRangeError
from dledger_core.net.protocol import Type
from dledger_core.server.maintenance.retention import RetentionPolicy
from dledger_core.storage import open_store
from tests.support.server_group import ServerGroup, eventually

SEGMENT = 1 << 18
STORAGE = StorageConfig(data_segment_bytes=SEGMENT, index_segment_bytes=3200, preallocate_bytes=0)
POLICY = RetentionPolicy(retain_bytes=2 * SEGMENT)
QUERY = {"q": "query", "b": 0, "r": "run"}


def group_of(tmp_path) -> ServerGroup:
    return ServerGroup(tmp_path, storage=STORAGE, retention=POLICY)


async def delete(group: ServerGroup) -> int:
    """Run retention on every node; return the lowest first index."""
    for node_id, node in group.nodes.items():
        log = group.hosted(node_id).replica.log
        await node.disk_rounds.retain()
        await eventually(lambda log=log: len(log.segment_summaries()) <= 4)
    return min(group.hosted(node_id).replica.log.first_index() for node_id in group.nodes)


async def fill(group: ServerGroup, batches: int = 60) -> None:
    client = await group.client()
    for _ in range(batches):
        await client.append([bytes(3000)] * 10)


async def everywhere(group: ServerGroup, index: int) -> None:
    await eventually(lambda: all(group.hosted(n).replica.readable_end > index for n in group.nodes))


@pytest.mark.parametrize("wiped", [False, True], ids=["a node that was away", "a node that lost its disk"])
async def test_node_that_needs_trimmed_entries_gets_snapshot(tmp_path, wiped) -> None:
    async with group_of(tmp_path) as group:
        client = await group.client()
        produced = await client.append([b"first"], p="producer", pe=0, ps=0)
        last = (await client.append([b"second"], p="producer", pe=0, ps=1))[1]
        await everywhere(group, last)
        away = (await group.followers())[0]
        path = group.config(away).store_path("default")
        await group.stop(away)
        if wiped:
            shutil.rmtree(path)
        await fill(group)
        begin = await delete(group)
        assert begin > last
        last = (await client.append([b"last"]))[1]
        await group.start(away)
        await everywhere(group, last)
        replica = group.hosted(away).replica
        assert replica.log.first_index() >= begin
        reader = await read_client(group, away)
        first = replica.log.first_index()
        with pytest.raises(IndexOutOfRangeError) as caught:
            await reader.read(0, 10)
        assert caught.value.values["first_index"] == first
        (_, rows) = await reader.read(last, last + 1)
        assert [body for _, _, body in rows] == [b"last"]
        # A repeat of what is deleted is still known, also by the node that never saw it.
        await group.stop(next(n for n in await group.followers() if n != away))
        await (await group.client()).ask(Type.TRANSFER, node=away)
        leader = await group.client()
        assert (await leader.append([b"first"], p="producer", pe=0, ps=0))[:2] == produced[:2]
    report = open_store(path).verify()
    assert (report.findings, report.first_index) == ((), first)


async def read_client(group: ServerGroup, node_id: str):
    client = await group.client()
    return type(client)(await group.channel(node_id))


@pytest.mark.integration
async def test_open_transaction_holds_back_retention_on_every_node(tmp_path) -> None:
    async with group_of(tmp_path) as group:
        client = await group.client()
        part = await client.attempt([b"row"] * 3, QUERY)
        await fill(group)
        for node in group.nodes.values():
            await node.disk_rounds.retain()
        await asyncio.sleep(0)
        assert all(group.hosted(n).replica.log.first_index() < part.first for n in group.nodes)
        parts = [list(part)]
        await client.ask(Type.TRANSACTION, op="commit", x=QUERY, parts=parts)
        _, rows = await client.read(part.first, part.last + 1)
        assert [body for _, _, body in rows] == [b"row"] * 3
        assert await delete(group) > part.last

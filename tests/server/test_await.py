"""AWAIT: one request that waits for new entries of many groups."""

from __future__ import annotations

import asyncio

import pytest

from dledger_core.client.routing.channel import ConnectionLostError
from dledger_core.errors import NoLeaderError
from dledger_core.net.protocol import Type
from tests.support.server_group import RawClient, ServerGroup, eventually, run

KEY = {"q": "query", "b": 1, "r": "run"}


def ends(cluster, node_id="n0"):
    """Return the visible end of each group of a node."""
    return {group: hosted.replica.visible_end for group, hosted in cluster.nodes[node_id].hosted.items()}


async def grown(client, seen, wait=30_000, **fields):
    return (await client.ask(Type.AWAIT, seen=seen, wait=wait, **fields)).header["grown"]


def test_await_returns_grown_groups_of_many(tmp_path):
    groups = tuple(f"g{number:03}" for number in range(70))

    async def main():
        async with ServerGroup(tmp_path, 1, groups=groups) as cluster:
            for group in groups:
                await cluster.leader(group)
            client = RawClient(await cluster.channel("n0"), "no such group")
            seen = ends(cluster)
            assert await grown(client, seen | {"g005": seen["g005"] - 1, "g006": 0}) == ["g005", "g006"]
            assert await grown(client, seen, wait=20) == [], "the wait timed out"
            waiting = asyncio.ensure_future(grown(client, seen))
            await eventually(lambda: len(cluster.hosted("n0", "g069").replica.changes) == 1)
            await RawClient(client.channel, "g042").append([b"new"])
            assert await waiting == ["g042"]
            await eventually(lambda: not any(len(h.replica.changes) for h in cluster.nodes["n0"].hosted.values()))

    run(main())


def test_await_counts_open_attempts_only_without_isolation(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, 1) as cluster:
            client = await cluster.client()
            seen = ends(cluster)
            part = await client.attempt([b"open"], KEY)
            assert await grown(client, seen, wait=20) == []
            assert await grown(client, seen, iso="uncommitted") == ["default"]
            waiting = asyncio.ensure_future(grown(client, seen))
            await client.ask(Type.TRANSACTION, op="commit", x=KEY, parts=[list(part)])
            assert await waiting == ["default"]

    run(main())


def test_await_fails_at_once_when_node_knows_no_leader(tmp_path):
    async def main():
        async with ServerGroup(tmp_path) as cluster:
            leader, (left, other) = await cluster.leader(), await cluster.followers()
            await eventually(lambda: cluster.hosted(left).replica.visible_end)
            client = RawClient(await cluster.channel(left))
            waiting = asyncio.ensure_future(grown(client, {"default": ends(cluster, left)["default"] + 1}))
            await eventually(lambda: len(cluster.hosted(left).replica.changes) == 1)
            for node in (leader, other):
                await cluster.stop(node)
            with pytest.raises(NoLeaderError):
                await waiting
            assert await grown(client, {"default": 0}) == ["default"], "present entries need no leader"

    run(main())


def test_await_ends_when_client_disconnects(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, 1) as cluster:
            await cluster.leader()
            changes = cluster.hosted("n0").replica.changes
            channel = await cluster.channel("n0")
            waiting = asyncio.ensure_future(grown(RawClient(channel), ends(cluster)))
            await eventually(lambda: len(changes) == 1)
            await channel.close()
            with pytest.raises(ConnectionLostError):
                await waiting
            await eventually(lambda: len(changes) == 0)

    run(main())

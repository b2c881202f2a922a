"""One request that waits for many groups: answered by growth, by time, or by a node that would not hear of it."""

from __future__ import annotations

import asyncio

import pytest

from dledger_core.client.routing.channel import ConnectionLostError
from dledger_core.errors import BadRequestError, NoLeaderError, ProtocolError, UnknownGroupError
from dledger_core.net.protocol import Type
from dledger_core.server.services.new_entries import GROUPS_MAX, AwaitRequest
from tests.support.server_group import RawClient, ServerGroup, eventually, run

KEY = {"q": "query", "b": 1, "r": "run"}
LONG_MS = 30_000


async def ends(cluster, node_id="n0"):
    """Returns the readable end of each group that a node hosts."""
    return {group: hosted.replica.visible_end for group, hosted in cluster.nodes[node_id].hosted.items()}


async def grown(client, seen, wait=LONG_MS, **fields):
    return (await client.ask(Type.AWAIT, seen=seen, wait=wait, **fields)).header["grown"]


def test_growth_of_one_of_many_groups_is_the_answer(tmp_path):
    groups = tuple(f"g{number:03}" for number in range(70))

    async def main():
        async with ServerGroup(tmp_path, 1, groups=groups) as cluster:
            for group in groups:
                await cluster.leader(group)
            client = RawClient(await cluster.channel("n0"), "no such group")
            seen = await ends(cluster)
            assert await grown(client, seen | {"g005": seen["g005"] - 1, "g006": 0}) == ["g005", "g006"]
            assert await grown(client, seen, wait=20) == [], "time was over"
            waiting = asyncio.ensure_future(grown(client, seen))
            await eventually(lambda: len(cluster.hosted("n0", "g069").replica.progress) == 1)
            await RawClient(client.channel, "g042").append([b"new"])
            assert await waiting == ["g042"]
            await eventually(lambda: not any(len(h.replica.progress) for h in cluster.nodes["n0"].hosted.values()))

    run(main())


def test_what_is_not_visible_counts_for_who_asks_for_it(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, 1) as cluster:
            client = await cluster.client()
            seen = await ends(cluster)
            part = await client.attempt([b"open"], KEY)
            assert await grown(client, seen, wait=20) == []
            assert await grown(client, seen, iso="uncommitted") == ["default"]
            waiting = asyncio.ensure_future(grown(client, seen))
            await client.ask(Type.TRANSACTION, op="commit", x=KEY, parts=[list(part)])
            assert await waiting == ["default"]

    run(main())


def test_a_node_that_knows_no_leader_says_so_at_once(tmp_path):
    async def main():
        async with ServerGroup(tmp_path) as cluster:
            leader, (left, other) = await cluster.leader(), await cluster.followers()
            await eventually(lambda: cluster.hosted(left).replica.visible_end)
            client = RawClient(await cluster.channel(left))
            seen = await ends(cluster, left)
            waiting = asyncio.ensure_future(grown(client, {"default": seen["default"] + 1}))
            await eventually(lambda: len(cluster.hosted(left).replica.progress) == 1)
            for node in (leader, other):
                await cluster.stop(node)
            with pytest.raises(NoLeaderError, match="no leader is known here"):
                await waiting
            assert await grown(client, {"default": 0}) == ["default"], "what is here already needs no leader"

    run(main())


def test_who_goes_leaves_nothing_behind(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, 1) as cluster:
            await cluster.leader()
            progress = cluster.hosted("n0").replica.progress
            channel = await cluster.channel("n0")
            waiting = asyncio.ensure_future(grown(RawClient(channel), await ends(cluster)))
            await eventually(lambda: len(progress) == 1)
            await channel.close()
            with pytest.raises(ConnectionLostError):
                await waiting
            await eventually(lambda: len(progress) == 0)

    run(main())


def test_wrong_requests_are_refused_and_the_node_goes_on(tmp_path):
    async def main():
        async with ServerGroup(tmp_path, 1) as cluster:
            client = await cluster.client()
            with pytest.raises(UnknownGroupError, match="does not host group 'other'"):
                await grown(client, {"default": 0, "other": 0})
            for seen in (
                None,
                [],
                {},
                {"default": "1"},
                {"default": True},
                dict.fromkeys(map(str, range(5000)), 0),
            ):
                with pytest.raises(BadRequestError):
                    await grown(client, seen)
            with pytest.raises(BadRequestError):
                await grown(client, {"default": 0}, iso="all")
            assert await grown(client, {"default": 0}) == ["default"]
            with pytest.raises(ProtocolError):
                await grown(client, {"default": 0}, wait="long")
            assert await grown(client, {"default": 0}) == ["default"]

    run(main())


def test_a_request_is_bounded():
    header = {"seen": dict.fromkeys(map(str, range(GROUPS_MAX)), 1), "wait": (1 << 63) - 1}
    assert AwaitRequest.parse(header).wait_s == 30
    with pytest.raises(BadRequestError):
        AwaitRequest.parse(header | {"seen": header["seen"] | {"one more": 1}})
    with pytest.raises(ProtocolError):
        AwaitRequest.parse({"seen": {"g": 1}})

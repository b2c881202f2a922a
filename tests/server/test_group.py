"""A group's life on a node: hosted, quarantined alone, the node's end with its last group; changing members."""

from __future__ import annotations

import asyncio

import pytest

from dledger_core.config import format_peers
from dledger_core.connect import AsyncClient
from dledger_core.errors import DiskFailedError, InvariantViolationError, UnreachableError
from dledger_core.net.protocol import Type
from dledger_core.server.group import GroupState
from dledger_core.server.members import Members
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import verification_reason
from tests.support.replica_group import BrokenObserver
from tests.support.server_group import RawClient, ServerGroup, eventually, free_peers

GROUPS = ("a", "b")


def break_invariant(cluster, node_id, group):
    replica = cluster.hosted(node_id, group).replica
    replica.observe(BrokenObserver())
    replica.schedule()


async def quarantined(cluster, node_id, group):
    await eventually(lambda: cluster.nodes[node_id].groups[group].state is GroupState.QUARANTINED)


async def test_broken_invariant_quarantines_its_group_and_others_continue(tmp_path):
    async with ServerGroup(tmp_path, groups=GROUPS) as cluster:
        node_id = await cluster.leader("a")
        waiting = RawClient(await cluster.channel(node_id), "a")
        watch = asyncio.ensure_future(waiting.ask(Type.WATCH, wait=60_000, seen=None))
        await watch
        break_invariant(cluster, node_id, "a")
        await quarantined(cluster, node_id, "a")
        with pytest.raises(UnreachableError) as refused:
            await waiting.ask(Type.METADATA)
        assert refused.value.values["state"] == "quarantined"
        for group in GROUPS:  # the two other nodes continue with "a"
            async with AsyncClient(format_peers(cluster.peers), group) as client:
                assert (await client.append([b"x"])).last_index > 0
        assert set(cluster.nodes[node_id].hosted) == {"b"}
        assert cluster.hosted(node_id, "b").replica.readable_end > 0


@pytest.mark.parametrize("role", ["leader", "follower"])
async def test_clients_of_quarantined_group_get_response(tmp_path, role):
    async with ServerGroup(tmp_path, groups=GROUPS) as cluster:
        leader = await cluster.leader("a")
        node_id = leader if role == "leader" else (await cluster.followers("a"))[0]
        client = RawClient(await cluster.channel(node_id), "a")
        roles = cluster.hosted(node_id, "a").roles
        watch = asyncio.ensure_future(client.ask(Type.WATCH, wait=60_000, seen=roles.current.state))
        await eventually(lambda: len(roles.changes))
        break_invariant(cluster, node_id, "a")
        header = (await watch).header
        assert (header["role"], header["leader"], header["broker"]) == ("follower", None, "slave")
        assert cluster.nodes[node_id].budget.taken_bytes == 0


async def test_store_of_quarantined_group_is_verified_at_next_start(tmp_path):
    async with ServerGroup(tmp_path, 1, groups=GROUPS) as cluster:
        await cluster.leader("a")
        await RawClient(await cluster.channel("n0"), "a").append([b"kept"])
        break_invariant(cluster, "n0", "a")
        await quarantined(cluster, "n0", "a")
        layout = Layout(cluster.config("n0").store_path("a"))
        await eventually(lambda: verification_reason(OsFiles(), layout))
        await cluster.stop("n0")
        await cluster.start("n0")
        await eventually(lambda: "a" in cluster.nodes["n0"].hosted)
        assert verification_reason(OsFiles(), layout) is None
        await cluster.leader("a")
        _, rows = await RawClient(await cluster.channel("n0"), "a").read(0, 9)
        assert b"kept" in [body for _, _, body in rows]


async def test_node_ends_when_its_last_group_is_quarantined(tmp_path):
    async with ServerGroup(tmp_path, 1, groups=GROUPS) as cluster:
        node = cluster.nodes["n0"]
        for group in GROUPS:
            await cluster.leader(group)
        break_invariant(cluster, "n0", "a")
        await quarantined(cluster, "n0", "a")
        break_invariant(cluster, "n0", "b")
        with pytest.raises(InvariantViolationError):
            await node.wait()


async def test_node_ends_when_its_disk_fails(tmp_path):
    async with ServerGroup(tmp_path, 1, groups=GROUPS) as cluster:
        node = cluster.nodes["n0"]
        await cluster.leader("a")

        def fail():
            raise DiskFailedError("no disk")

        cluster.hosted("n0", "a").replica.run_on_disk(fail)
        with pytest.raises(DiskFailedError):
            await node.wait()


async def test_error_in_checkpoint_concerns_its_group_only(tmp_path):
    async with ServerGroup(tmp_path, 1, groups=GROUPS) as cluster:
        for group in GROUPS:
            await cluster.leader(group)

        def broken():
            raise RuntimeError("broken on purpose")

        cluster.hosted("n0", "a").replica.save_checkpoint = broken
        await quarantined(cluster, "n0", "a")
        await RawClient(await cluster.channel("n0"), "b").append([b"x"])


async def test_links_follow_change_of_members(tmp_path):
    async with ServerGroup(tmp_path) as cluster:
        node = cluster.nodes["n0"]
        await eventually(lambda: sorted(node.links.connected()) == ["n1", "n2"])
        node.members.replace(cluster.peers[:2])
        node.links.update()
        assert node.links.connected() == ["n1"]
        header = (await RawClient(await cluster.channel("n0")).ask(Type.METADATA)).header
        assert header["peers"] == format_peers(cluster.peers[:2])
        node.members.replace(cluster.peers)
        node.links.update()
        await eventually(lambda: sorted(node.links.connected()) == ["n1", "n2"])


def test_members_reject_node_that_is_listed_twice():
    peers = free_peers(2)
    members = Members(peers[0].node_id, peers)
    assert members.others == peers[1:]
    with pytest.raises(InvariantViolationError):
        members.replace((*peers, peers[0]))

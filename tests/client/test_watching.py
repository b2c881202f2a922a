"""Role changes of a group's nodes: real servers in this process, and unresponsive nodes."""

from __future__ import annotations

import asyncio
import shutil
from concurrent.futures import ThreadPoolExecutor

import pytest

from dledger_core.client import AsyncLogClient, RoleChange, SyncLogClient
from dledger_core.client.routing.cluster_view import ClusterView
from dledger_core.client.status import RoleWatch
from dledger_core.config import format_peers, parse_peers
from dledger_core.connect import AsyncClient
from dledger_core.errors import ConfigError
from dledger_core.net.protocol import Type
from tests.client.fake_group import FakeGroup, answering, node_client, on_group, running_group
from tests.support.server_group import ServerGroup
from tests.support.soon import soon


class Seen:
    """Takes changes in until a condition holds; the newest of each node is kept."""

    def __init__(self, changes):
        self.changes = changes
        self.nodes = {}
        self.all = []

    async def until(self, condition):
        async with asyncio.timeout(120):
            while not condition(self.nodes):
                change = await anext(self.changes)
                assert self.nodes.get(change.node_id) != change, "a change is a change"
                self.nodes[change.node_id] = change
                self.all.append(change)


def leads(node):
    return lambda nodes: node in nodes and nodes[node].broker_role == "master"


async def test_role_changes_yield_roles_and_changes(tmp_path):
    async with ServerGroup(tmp_path) as cluster, AsyncClient(format_peers(cluster.peers)) as client:
        leader = await cluster.leader()
        target, other = (node for node in cluster.nodes if node != leader)
        seen = Seen(client.role_changes())
        await seen.until(lambda nodes: len(nodes) == 3 and all(n.leader_id == leader for n in nodes.values()))
        assert seen.nodes[leader].role == "leader"
        assert (seen.nodes[other].role, seen.nodes[other].broker_role) == ("follower", "slave")
        term = seen.nodes[leader].term
        await client.transfer_leadership(target)
        await seen.until(lambda nodes: all(n.leader_id == target for n in nodes.values()))
        assert leads(target)(seen.nodes)
        assert seen.nodes[target].term > term
        await cluster.stop(other)
        await seen.until(lambda nodes: nodes[other].role == "unreachable")
        assert (seen.nodes[other].broker_role, seen.nodes[other].term) == (None, -1)
        assert seen.nodes[other].reason
        await cluster.start(other)
        await seen.until(lambda nodes: nodes[other].leader_id is not None)
        await cluster.stop(other)
        shutil.rmtree(tmp_path / "default" / f"dledger-{other}")
        await cluster.start(other)
        await seen.until(lambda nodes: nodes[other].role == "waiting")
        await seen.changes.aclose()
        assert [task for task in asyncio.all_tasks() if task.get_name().startswith("watch-")] == []


async def test_slow_consumer_gets_latest_roles_only(tmp_path):
    async with ServerGroup(tmp_path) as cluster, AsyncClient(format_peers(cluster.peers)) as client:
        seen = Seen(client.role_changes())
        await seen.until(lambda nodes: any(n.broker_role == "master" for n in nodes.values()))
        for _ in range(3):
            followers = await cluster.followers()
            await client.transfer_leadership(followers[0])
        leader = await cluster.leader()
        await asyncio.sleep(0.5)  # time for the watch to learn of each change
        seen.all.clear()
        await seen.until(leads(leader))
        assert len(seen.all) <= 3, "one change per node, no queue"
        await seen.changes.aclose()


async def test_unresponsive_node_is_unreachable():
    async with FakeGroup() as group:
        group.always(Type.WATCH, "ignore")
        view = ClusterView(parse_peers(group.peers), "default")
        seen = Seen(RoleWatch(view, wait_s=0.1, response_s=0.2).changes())
        await seen.until(lambda nodes: len(nodes) == 3)
        assert {change.role for change in seen.all} == {"unreachable"}
        assert "[TIMED_OUT]" in seen.all[0].reason
        await seen.changes.aclose()
        await view.close()


@pytest.mark.parametrize("wrong", [{"leader": 5, "broker": "master"}, {"leader": None, "broker": "king"}], ids=str)
@on_group()
async def test_malformed_role_response_is_unreachable(group, client, wrong):
    group.always(Type.WATCH, answering(role="leader", term=1, **wrong))
    seen = Seen(client.role_changes())
    await seen.until(lambda nodes: len(nodes) == 3)
    assert {change.role for change in seen.all} == {"unreachable"}
    await seen.changes.aclose()


@on_group()
async def test_close_cancels_role_watch(group, client):
    group.always(Type.WATCH, "ignore")
    waiting = asyncio.ensure_future(anext(client.role_changes()))
    await group.until(lambda: len(group.asked(Type.WATCH)) == 3)
    await client.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ConfigError):
        await anext(client.role_changes())


@pytest.mark.slow
def test_sync_client_yields_role_changes_until_closed():
    with running_group() as group, ThreadPoolExecutor(1) as pool:
        for node in group:
            response = answering(role="follower", leader="n1", term=1, broker="slave")
            node.script[Type.WATCH] = [response, *["ignore"] * 1000] * 2
        client = SyncLogClient(AsyncLogClient(log := node_client(group.peers)))
        changes = client.role_changes()
        first = [next(changes) for _ in range(3)]
        assert {change.node_id for change in first} == {"n0", "n1", "n2"}
        assert RoleChange("n0", "follower", "slave", 1, "n1") in first
        waiting = client.role_changes()
        changes.close()
        soon(lambda: log.in_flight == 0)  # the client may be looking for the members still
        for node in group:
            node.script[Type.WATCH] = ["ignore"] * 1000
        call = pool.submit(next, waiting)
        soon(lambda: len(group.asked(Type.WATCH)) >= 6)
        client.close()
        assert call.exception(20) is not None

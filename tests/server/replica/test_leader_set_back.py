"""The disk of a leader is set back by seconds, with real nodes: a machine restored from a snapshot."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dledger_core.cluster import LocalCluster
from dledger_core.connect import Client
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon

# A voter that starts waits for the others for one election timeout: on a busy machine they may connect later.
OPTIONS = {"data_segment_bytes": 1 << 18, "index_segment_bytes": 1 << 15, "preallocate_bytes": 0, **SLOW_ELECTIONS}
pytestmark = pytest.mark.integration


def bodies_of(client: Client, node: str) -> list[bytes]:
    """Return the committed bodies that a node serves."""
    found, at = [], 0
    while True:
        fetched = client.fetch(at, 1 << 20, isolation="read_uncommitted", node=node)
        if fetched.next_index <= at:
            return found
        found += fetched.batch.column("body").to_pylist()
        at = fetched.next_index


@pytest.mark.parametrize("leader_returns_first", [True, False], ids=["before the other one", "after the other one"])
def test_set_back_leader_and_lagging_node_lose_no_acknowledged_entry(
    tmp_path: Path, leader_returns_first: bool
) -> None:
    with LocalCluster(3, tmp_path / "nodes", **OPTIONS) as cluster, Client(cluster.peers, timeout_ms=60_000) as client:
        leader = cluster.leader()
        late = next(node for node in cluster.node_ids if node != leader)
        client.append([b"base"] * 100)
        soon(lambda: len({node.commit_index for node in client.metadata().nodes}) == 1)
        store = cluster.store_path(leader)
        shutil.copytree(store, tmp_path / "earlier")
        cluster.kill(late)
        client.append([b"acknowledged"] * 10)
        cluster.kill(leader)
        shutil.rmtree(store)
        (tmp_path / "earlier").rename(store)
        for node in (leader, late) if leader_returns_first else (late, leader):
            cluster.restart(node)
        last = client.append([b"after"]).last_index
        soon(lambda: all((node.commit_index or 0) >= last for node in client.metadata().nodes))
        for node in cluster.node_ids:
            bodies = bodies_of(client, node)
            assert (bodies.count(b"acknowledged"), bodies.count(b"after")) == (10, 1), node
            assert "quarantined" not in cluster.log_path(node).read_text()
        text = cluster.log_path(leader).read_text()
        assert "END_LOST" in text, "the node that has all of it"
        assert "recovering voter" not in text, "it keeps its vote"

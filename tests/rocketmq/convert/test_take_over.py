"""Real nodes serve what Java's nodes wrote: they elect a leader, append, and read converted and new entries."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from dledger_core import Client, LocalCluster, open_store
from tests.rocketmq.convert.stores import converted, entries, manifest, store_of, unpacked
from tests.support.slow_elections import SLOW_ELECTIONS
from tests.support.soon import soon

pytestmark = pytest.mark.integration


def wait_for_all(client: Client, end: int, timeout_s: float = 180.0) -> None:
    """Waits until all three nodes have committed up to ``end``."""
    soon(
        lambda: all(node.reachable and node.commit_index >= end for node in client.metadata().nodes),
        timeout_s,
        every_s=0.1,
    )


@pytest.mark.parametrize(
    ("name", "profile"),
    [
        pytest.param("dledger-0.3.1.2-three", "B", marks=pytest.mark.soak),
        ("dledger-0.3.1.2-three", "A"),
        pytest.param("dledger-0.4.0-three", "B", marks=pytest.mark.soak),
        pytest.param("dledger-0.3.1.2-diverged", "B", marks=pytest.mark.soak),
        ("dledger-0.4.0-diverged", "B"),
    ],
)
def test_three_converted_copies_form_a_group(tmp_path: Path, name: str, profile: str) -> None:
    folder = unpacked(name, tmp_path)
    cluster = LocalCluster(3, tmp_path / "nodes", groups=("g",), profile=profile, **SLOW_ELECTIONS)
    logs, terms = [], []
    for node in cluster.node_ids:
        source, _ = store_of(folder, node)
        report = converted(source, cluster.store_path(node, "g"), self_id=node, peers=cluster.peers, profile=profile)
        terms.append(report.term)
        logs.append(manifest(folder, node))
    # What Java may have acknowledged is what two of the three had.
    kept = sorted(entry for entry, count in Counter(entry for log in logs for entry in log).items() if count >= 2)
    with cluster, Client(cluster.peers, "g") as client:
        result = client.append([b"first", b"second"])
        assert result.term > max(terms)
        wait_for_all(client, result.last_index)
        assert client.get(result.last_index).body == b"second"
        old = client.get(len(kept) // 2)
        assert (old.index, old.term, old.timestamp) == (len(kept) // 2, kept[len(kept) // 2][1], None)
        leader = cluster.leader("g")
        cluster.kill(leader)
        again = client.append([b"third"])
        cluster.restart(leader)
        wait_for_all(client, again.last_index)
    found = [entries(cluster.store_path(node, "g")) for node in cluster.node_ids]
    assert found[0][: again.last_index] == found[1][: again.last_index] == found[2][: again.last_index]
    assert found[0][: len(kept)] == kept


def test_node_without_store_joins_converted_group(tmp_path: Path) -> None:
    folder = unpacked("dledger-0.3.1.2-three", tmp_path)
    sizes = {"data_segment_bytes": 65536, "index_segment_bytes": 4096}
    cluster = LocalCluster(3, tmp_path / "nodes", groups=("g",), **sizes, **SLOW_ELECTIONS)
    for node in ("n0", "n1"):
        source, _ = store_of(folder, node)
        converted(source, cluster.store_path(node, "g"), self_id=node, peers=cluster.peers)
    with cluster, Client(cluster.peers, "g") as client:
        result = client.append([b"new"])
        wait_for_all(client, result.last_index)
    assert entries(cluster.store_path("n2", "g")) == entries(cluster.store_path("n0", "g"))
    with open_store(cluster.store_path("n2", "g")) as reader, open_store(cluster.store_path("n0", "g")) as other:
        assert reader.log_uuid == other.log_uuid is not None

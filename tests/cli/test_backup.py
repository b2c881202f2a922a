"""``dledger backup`` and ``dledger restore``: all disks are lost, and the log continues after the last backup."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.config import parse_peers
from tests.cli.command import error_of, result_of, run
from tests.support.soon import soon

SMALL = {"data_segment_bytes": 4096, "index_segment_bytes": 4096}


def written(count: int, name: str = "entry") -> list[bytes]:
    return [f"{name} {number}".encode() for number in range(count)]


def append(client: Client, bodies: list[bytes]) -> None:
    for start in range(0, len(bodies), 10):
        client.append(bodies[start : start + 10])


def stop_all(cluster: LocalCluster) -> None:
    """Stop all nodes once all of them have all entries."""
    with Client(cluster.peers) as client:
        soon(lambda: len({(node.commit_index, node.last_index) for node in client.metadata().nodes}) == 1)
    for node in cluster.node_ids:
        cluster.stop(node)


def place(restored: Path, cluster: LocalCluster, *nodes: str) -> None:
    """Move a node's restored store into the directory that all nodes of the cluster share."""
    for node in nodes:
        shutil.move(restored / "default" / f"dledger-{node}", cluster.store_path(node))


def lose_all_disks(cluster: LocalCluster) -> None:
    for node in cluster.node_ids:
        shutil.rmtree(cluster.store_path(node))


def succeeds(*arguments: object) -> None:
    """Run a command until its nodes have started."""
    soon(lambda: run(*arguments, code=None).exit_code == 0)


def addresses(cluster: LocalCluster) -> dict[str, str]:
    return {str(peer.node_id): peer.address for peer in parse_peers(cluster.peers)}


@pytest.mark.integration
def test_all_disks_are_lost_and_restored_store_continues_the_log(tmp_path: Path) -> None:
    backup, bodies = tmp_path / "backup", written(400)
    with LocalCluster(3, tmp_path / "nodes", **SMALL) as cluster:
        with Client(cluster.peers) as client:
            append(client, bodies)
        stop_all(cluster)
        (report,) = result_of("backup", cluster.store_path("n1"), "--to", backup)
        assert (report["end_index"], report["kept_files"]) == (401, 0)
        assert report["copied_files"] > 3
        lose_all_disks(cluster)

        (restored,) = result_of("restore", backup, "--dir", tmp_path / "new")
        assert restored["end_index"] == 401
        assert run("verify", restored["store"]).exit_code == 0
        place(tmp_path / "new", cluster, "n1")
        for node in cluster.node_ids:
            cluster.restart(node)
        succeeds("recover", "--peers", cluster.peers, "--lost", "n0,n2")
        for node in ("n0", "n2"):
            succeeds("member", "add", node, "--address", addresses(cluster)[node], "--wait", "--peers", cluster.peers)
        with Client(cluster.peers, timeout_ms=60_000) as client:
            client.append([b"after"])
            assert client.read(0, client.bounds().end)["body"].to_pylist() == [*bodies, b"after"]
            assert [member.role for member in client.members().members] == ["voter"] * 3

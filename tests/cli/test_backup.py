"""``dledger backup`` and ``dledger restore``: all disks are lost, and the log continues after the last backup."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from dledger_core import Client, LocalCluster
from dledger_core.client import TransactionId
from dledger_core.config import parse_peers
from dledger_core.errors import TransactionError
from dledger_core.storage import open_store
from tests.cli.command import DLEDGER, error_of, result_of, run
from tests.support.logs import visible
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
        assert (report["end_index"] > 400, report["kept_files"]) == (True, 0)
        assert report["copied_files"] > 3
        lose_all_disks(cluster)

        (restored,) = result_of("restore", backup, "--dir", tmp_path / "new")
        assert restored["end_index"] == report["end_index"]
        assert run("verify", restored["store"]).exit_code == 0
        place(tmp_path / "new", cluster, "n1")
        for node in cluster.node_ids:
            cluster.restart(node)
        succeeds("recover", "--peers", cluster.peers, "--lost", "n0,n2", "--yes")
        for node in ("n0", "n2"):
            succeeds("member", "add", node, "--address", addresses(cluster)[node], "--wait", "--peers", cluster.peers)
        with Client(cluster.peers, timeout_ms=60_000) as client:
            last = client.append([b"after"]).last_index
            assert client.read(0, last + 1)["body"].to_pylist() == [*bodies, b"after"]
            assert [member.role for member in client.members().members] == ["voter"] * 3
        (again,) = result_of("backup", "--peers", cluster.peers, "--to", backup)
        assert again["log"] != report["log"], "the new log continues the old one, and so does its backup"
        assert again["kept_files"] >= report["copied_files"] - 1


@pytest.mark.integration
def test_restored_stores_change_nothing_while_a_majority_is_alive(tmp_path: Path) -> None:
    with LocalCluster(3, tmp_path / "nodes") as cluster, Client(cluster.peers, timeout_ms=60_000) as client:
        append(client, written(20))
        soon(lambda: all(node.commit_index >= 20 for node in client.metadata().nodes))
        cluster.stop("n2")
        run("backup", cluster.store_path("n2"), "--to", tmp_path / "backup")
        last = client.append(written(5, "later")).last_index
        shutil.rmtree(cluster.store_path("n2"))
        run("restore", tmp_path / "backup", "--dir", tmp_path / "new")
        place(tmp_path / "new", cluster, "n2")
        cluster.restart("n2")
        before = (client.metadata().log_uuid, client.metadata().term)
        soon(lambda: run("recover", "--dry-run", "--peers", cluster.peers, code=None).exit_code == 3)  # n2 answers
        (waiting,) = [node for node in client.metadata().nodes if node.node_id == "n2"]
        assert (waiting.role, bool(waiting.reason)) == ("waiting", True)
        for lost in ((), ("--lost", "n2")):
            refused = error_of("recover", "--peers", cluster.peers, *lost, "--yes")
            assert (refused.code, "n2" in refused) == ("RECOVERY_REFUSED", True)
        assert (client.metadata().log_uuid, client.metadata().term) == before
        cluster.stop("n2")
        shutil.rmtree(cluster.store_path("n2"))
        cluster.restart("n2")
        succeeds("member", "replace", "n2", "--wait", "--peers", cluster.peers)
        assert client.read(0, last + 1)["body"].to_pylist() == [*written(20), *written(5, "later")]


@pytest.mark.integration
def test_groups_producers_and_transactions_survive_on_two_restored_nodes(tmp_path: Path) -> None:
    groups, key = ("orders", "paid"), TransactionId("query", 0, "run")
    appended, won = {}, {}
    with LocalCluster(3, tmp_path / "nodes", groups=groups) as cluster:
        for group in groups:
            with Client(cluster.peers, group) as client:
                appended[group] = client.append([b"once"], producer_id="p", sequence=0)
                won[group] = client.append_attempt([b"won"], transaction=key, attempt="a1")
                client.append_attempt([b"orphaned"], transaction=key, attempt="a2")
                soon(lambda client=client: len({node.last_index for node in client.metadata().nodes}) == 1)
        for node in cluster.node_ids:
            cluster.stop(node)
        for group in groups:
            (tmp_path / "n0" / group).mkdir(parents=True)
            shutil.move(cluster.store_path("n0", group), tmp_path / "n0" / group / "dledger-n0")
        reports = result_of("backup", tmp_path / "n0", "--to", tmp_path / "backup")
        assert [report["group"] for report in reports] == list(groups)
        for node in ("n1", "n2"):
            for group in groups:
                shutil.rmtree(cluster.store_path(node, group))
            run("restore", tmp_path / "backup", "--dir", tmp_path / node, "--self-id", node)
            for group in groups:
                shutil.move(tmp_path / node / group / f"dledger-{node}", cluster.store_path(node, group))
            cluster.restart(node)
        for group in groups:
            succeeds("recover", "--peers", cluster.peers, "--lost", "n0", "--group", group, "--yes")
            with Client(cluster.peers, group, timeout_ms=60_000) as client:
                assert client.append([b"once"], producer_id="p", sequence=0).first_index == appended[group].first_index
                part = won[group]
                last = client.append([b"last"]).last_index
                client.commit_transaction(key, [(part.first_index, part.last_index, part.rows, part.crc)])
                with pytest.raises(TransactionError):
                    client.append_attempt([b"late"], transaction=key, attempt="a3")
                soon(lambda client=client: len([m for m in client.members().members if m.role == "voter"]) == 2)
                assert client.read(0, last + 1)["body"].to_pylist() == [b"once", b"won", b"last"]


@pytest.mark.integration
def test_running_nodes_are_backed_up_again_and_again_and_restored(tmp_path: Path) -> None:
    groups, backup = ("orders", "paid"), tmp_path / "backup"
    with LocalCluster(3, tmp_path / "nodes", groups=groups, tls=True, **SMALL) as cluster:
        access = ["--peers", cluster.peers, "--tls-ca", cluster.tls.ca, "--token-file", cluster.token]
        for group in groups:
            with cluster.client(group) as client:
                append(client, written(100))
                client.append([b"once"], producer_id="p", sequence=0)
        first = result_of("backup", *access, "--to", backup)
        assert [(report["group"], report["kept_files"]) for report in first] == [("orders", 0), ("paid", 0)]
        with cluster.client("paid") as client:
            append(client, written(50, "later"))
        second = result_of("backup", *access, "--to", backup, "--group", "paid")
        assert second[0]["kept_files"] == first[1]["copied_files"] - 1
        assert second[0]["end_index"] >= first[1]["end_index"] + 50
    run("restore", backup, "--dir", tmp_path / "new", "--self-id", "n2")
    for group, count in (("orders", 0), ("paid", 50)):
        store = tmp_path / "new" / group / "dledger-n2"
        assert run("verify", store).exit_code == 0
        with open_store(store) as reader:
            bodies = visible(reader)["body"].to_pylist()
            assert bodies == [*written(100), b"once", *written(count, "later")]
            assert reader.describe("producers")["producer_id"].to_pylist() == ["p"]


@pytest.mark.integration
def test_killed_backup_is_continued(tmp_path: Path) -> None:
    backup = tmp_path / "backup"
    with LocalCluster(1, tmp_path / "nodes", **SMALL) as cluster:
        with Client(cluster.peers) as client:
            append(client, written(3000))
        command = [*DLEDGER, "backup", "--peers", cluster.peers, "--to", str(backup)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            started = backup / "default" / "unfinished.json"
            soon(lambda: started.exists() or process.poll() is not None)
            process.kill()
        (report,) = result_of("backup", "--peers", cluster.peers, "--to", backup)
        assert report["kept_files"] > 0
        assert report["end_index"] > 3000
        assert not started.exists()
    (restored,) = result_of("restore", backup, "--dir", tmp_path / "new")
    assert restored["end_index"] == report["end_index"]

"""Damaged stores of real nodes: repaired offline, at start and while they run; the group never stops."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from dledger_core.client import Producer
from dledger_core.cluster import LocalCluster, free_ports
from dledger_core.config import format_peers, parse_peers
from dledger_core.connect import Client
from dledger_core.storage import open_store
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import mark_needs_verification, verification_reason
from tests.support.damage import flip, overwrite
from tests.support.soon import soon

OPTIONS = {"data_segment_bytes": 1 << 18, "index_segment_bytes": 1 << 15, "preallocate_bytes": 0}
pytestmark = pytest.mark.integration


def dledger(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dledger_core.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)


def fill(cluster: LocalCluster, batches: int = 150) -> None:
    with Client(cluster.peers) as client:
        producer = Producer(client, "filler")  # repeats what a busy machine leaves unknown
        for number in range(batches):
            producer.append([b"%d:" % number + b"q" * (number % 50) * 10 for _ in range(7)])


def flip_body(path: Path, after: int = 5000, body: bytes = b"qqqq") -> None:
    """Flip a byte of a body: a header has bytes without a CRC, and a record's place depends on the log time before."""
    flip(path, path.read_bytes().index(body, after))


def data_files(store: Path) -> list[Path]:
    return sorted((store / "data").iterdir())


def bytes_of(store: Path) -> list[bytes]:
    return [path.read_bytes() for path in data_files(store)]


def settled(cluster: LocalCluster) -> bool:
    """Whether all nodes hold and have committed the same."""
    with Client(cluster.peers) as client:
        nodes = client.metadata().nodes
        return len(nodes) == 3 and len({(node.last_index, node.commit_index) for node in nodes}) == 1


@contextmanager
def filled(directory: Path, **options: object) -> Iterator[LocalCluster]:
    """Start three nodes with the same entries."""
    with LocalCluster(3, directory, **(OPTIONS | options)) as cluster:
        fill(cluster)
        soon(lambda: settled(cluster))
        yield cluster


def log_of(cluster: LocalCluster, node: str) -> str:
    return cluster.log_path(node).read_text()


def await_log(cluster: LocalCluster, node: str, text: str) -> None:
    soon(lambda: text in log_of(cluster, node))


def stop_settled(cluster: LocalCluster) -> None:
    """Stop all nodes once they have the same entries."""
    soon(lambda: settled(cluster))
    leader = cluster.leader()  # the last to stop: the others would elect another at once, which appends a NOOP
    for node in sorted(cluster.node_ids, key=lambda node: node == leader):
        cluster.stop(node)


def check_identical(cluster: LocalCluster) -> None:
    """Stops all nodes and compares their data files, byte by byte."""
    stores = [cluster.store_path(node) for node in cluster.node_ids]
    stop_settled(cluster)
    if not bytes_of(stores[0]) == bytes_of(stores[1]) == bytes_of(stores[2]):
        # On a slow machine an election while they stop appends a NOOP to some of them, which the others get now.
        for node in cluster.node_ids:
            cluster.restart(node)
        cluster.leader()
        stop_settled(cluster)
    assert bytes_of(stores[0]) == bytes_of(stores[1]) == bytes_of(stores[2])
    for store in stores:
        with open_store(store) as reader:
            assert reader.verify().findings == ()


def damage_some(store: Path) -> None:
    """Flip a byte of a body, zero a sector, and flip the index of the first record of a file."""
    files = data_files(store)
    flip_body(files[0])
    overwrite(files[0], 64 << 10, bytes(512))
    flip(files[1], 12)


def test_repair_command_repairs_stopped_store(tmp_path: Path) -> None:
    with filled(tmp_path) as cluster:
        cluster.stop("n2")
        store = cluster.store_path("n2")
        intact = bytes_of(store)
        damage_some(store)
        damaged = bytes_of(store)

        def run(*arguments: str):
            return dledger("repair", "--dir", str(store), "--format", "json", *arguments)

        look = run("--dry-run")
        assert look.returncode == 1, look.stderr
        found = json.loads(look.stdout)
        assert len(found) == 3
        assert all(one["state"] == "damaged" and one["start"] < one["end"] for one in found)
        assert bytes_of(store) == damaged
        assert run().returncode == 3, "no peers are named"
        refused = run("--peers", "n0-127.0.0.1:1;n1-127.0.0.1:2")
        assert refused.returncode == 2, refused.stderr
        assert bytes_of(store) == damaged
        done = run("--peers", cluster.peers)
        assert done.returncode == 0, done.stderr
        assert {one["state"] for one in json.loads(done.stdout)} == {"repaired"}
        assert bytes_of(store) == intact
        again = run("--peers", cluster.peers)
        assert (again.returncode, json.loads(again.stdout)) == (0, [])
        cluster.restart("n2")
        check_identical(cluster)


# --- at start -------------------------------------------------------------------------------------------------------


def test_damaged_store_is_repaired_at_start_while_group_continues(tmp_path: Path) -> None:
    with filled(tmp_path) as cluster, Client(cluster.peers) as client:
        cluster.stop("n2")
        store = cluster.store_path("n2")
        damage_some(store)
        cluster.restart("n2")
        for number in range(30):
            client.append([b"meanwhile %d" % number])
        await_log(cluster, "n2", "entries repaired: ")
        assert "group offline until its store is repaired" in log_of(cluster, "n2")
        check_identical(cluster)


def test_damaged_store_asks_members_that_the_list_does_not_lead_to(tmp_path: Path) -> None:
    class Moved(LocalCluster):
        """n1 starts again with a list from before the others moved."""

        is_old = False

        @property
        def peers(self) -> str:
            if not self.is_old:
                return super().peers
            old = (
                replace(peer, port=port) for peer, port in zip(parse_peers(super().peers), free_ports(3), strict=True)
            )
            own = next(peer for peer in parse_peers(super().peers) if peer.node_id == "n1")
            return format_peers(tuple(own if peer.node_id == "n1" else peer for peer in old))

    with Moved(3, tmp_path, **OPTIONS) as cluster:
        fill(cluster)
        soon(lambda: settled(cluster))
        cluster.stop("n1")
        flip_body(data_files(cluster.store_path("n1"))[0])
        cluster.is_old = True
        cluster.restart("n1")
        cluster.is_old = False
        soon(lambda: "store verified" in log_of(cluster, "n1"))
        soon(lambda: settled(cluster))


def test_marked_store_is_verified_before_its_group_participates(tmp_path: Path) -> None:
    with LocalCluster(3, tmp_path, **OPTIONS) as cluster:
        fill(cluster, 20)
        cluster.kill("n1")
        layout = Layout(cluster.store_path("n1"))
        mark_needs_verification(OsFiles(), layout, "Input/output error")
        fill(cluster, 20)
        cluster.restart("n1")
        await_log(cluster, "n1", "store verified")
        assert "Input/output error" in log_of(cluster, "n1")
        assert verification_reason(OsFiles(), layout) is None
        check_identical(cluster)


def test_two_damaged_stores_of_three_wait_for_third(tmp_path: Path) -> None:
    with filled(tmp_path) as cluster:
        for node in cluster.node_ids:
            cluster.stop(node)
        damage_some(cluster.store_path("n1"))
        flip_body(data_files(cluster.store_path("n2"))[0], 90_000)
        cluster.restart("n1")
        await_log(cluster, "n1", "no intact copy")
        damaged = bytes_of(cluster.store_path("n1"))
        cluster.restart("n2")
        await_log(cluster, "n2", "no intact copy")
        assert bytes_of(cluster.store_path("n1")) == damaged
        cluster.restart("n0")
        cluster.leader()
        fill(cluster, 5)
        check_identical(cluster)


# --- the end of a log is lost -----------------------------------------------------------------------------------------


def cut_end(store: Path) -> None:
    """Cut the last data file, and all rows of the index after half of the first file."""
    last = [path for path in data_files(store) if any(path.read_bytes())][-1]
    os.truncate(last, min(64 << 10, last.stat().st_size) // 2)
    overwrite(min((store / "index").iterdir()), 16 << 10, bytes(16 << 10))


def mark_of(cluster: LocalCluster, node: str) -> Path:
    return cluster.store_path(node) / "meta" / "recovering"


def test_recovering_voter_votes_again_after_leader_elected_without_it(tmp_path: Path) -> None:
    with filled(tmp_path) as cluster:
        cluster.stop("n2")
        cut_end(cluster.store_path("n2"))
        cluster.restart("n2")
        await_log(cluster, "n2", "voting resumed")
        said = log_of(cluster, "n2")
        assert said.index("entries repaired: ") < said.index("end of the log lost") < said.index("voting resumed")
        assert not mark_of(cluster, "n2").exists()
        fill(cluster, 5)
        check_identical(cluster)


def test_two_recovering_voters_of_three_wait_until_recover(tmp_path: Path) -> None:
    with filled(tmp_path) as cluster:
        for node in cluster.node_ids:
            cluster.stop(node)
        for node in ("n1", "n2"):
            for path in (cluster.store_path(node) / "meta").glob("checkpoint*"):
                path.unlink()
        cluster.restart("n0")
        cluster.restart("n2")
        await_log(cluster, "n2", "end of the log lost")
        recover = ["recover", "--yes", "--peers", cluster.peers]
        assert dledger(*recover).returncode == 2, "a voter does not answer"
        others = ";".join(peer for peer in cluster.peers.split(";") if not peer.startswith("n1-"))
        assert dledger("recover", "--yes", "--peers", others).returncode == 2, (
            "the log names the voter that is missing there"
        )
        assert mark_of(cluster, "n2").exists()
        cluster.restart("n1")
        with Client(cluster.peers) as client:
            soon(lambda: [node.is_recovering for node in client.metadata().nodes] == [False, True, True])
        told, checked = dledger("status", "--peers", cluster.peers), dledger("doctor", "--peers", cluster.peers)
        assert (told.returncode, checked.returncode) == (1, 1)
        assert "dledger recover" in told.stderr
        assert "dledger recover --group default" in checked.stdout
        assert dledger(*recover, "--dry-run").returncode == 1
        assert all(mark_of(cluster, node).exists() for node in ("n1", "n2"))
        assert dledger("recover", "--yes", "--peers", others).returncode == 0, "the other nodes name the third one"
        cluster.leader()
        fill(cluster, 5)
        soon(lambda: not any(mark_of(cluster, node).exists() for node in ("n1", "n2")))
        assert dledger(*recover).returncode == 0, "nothing to do"
        check_identical(cluster)


def test_repair_of_one_group_does_not_stop_another(tmp_path: Path) -> None:
    with (
        LocalCluster(3, tmp_path, groups=("a", "b"), **OPTIONS) as cluster,
        Client(cluster.peers, "a") as a,
        Client(cluster.peers, "b") as b,
    ):
        a.append([b"x" * 100] * 50)
        b.append([b"y"])
        soon(lambda: len({node.last_index for node in a.metadata().nodes}) == 1)
        for node in cluster.node_ids:
            cluster.stop(node)
        for node in ("n0", "n1", "n2"):
            flip_body(data_files(cluster.store_path(node, "a"))[0], 1000, b"xxxx")
        for node in cluster.node_ids:
            cluster.restart(node)
        b.append([b"continues"])
        soon(lambda: all("no intact copy" in log_of(cluster, node) for node in cluster.node_ids))
        assert b.append([b"still"]).last_index >= 2


# --- while it runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("leads", [False, True], ids=["a follower", "the leader"])
def test_scrub_repairs_damage_while_group_continues(tmp_path: Path, leads: bool) -> None:
    options = {"scrub_pause_s": 0.2, "scrub_bytes_per_second": "64MiB"}
    with filled(tmp_path, **options) as cluster, Client(cluster.peers) as client:
        leader = cluster.leader()
        victim = leader if leads else next(node for node in cluster.node_ids if node != leader)
        pids = [cluster.pid(node) for node in cluster.node_ids]
        damage_some(cluster.store_path(victim))
        rows = next(iter(sorted((cluster.store_path(victim) / "index").iterdir())))
        flip(rows, 20 * 32 + 10)  # where entry 20 lies
        number = 0

        def repaired() -> bool:
            nonlocal number
            number += 1
            client.append([b"meanwhile %d" % number])
            log = log_of(cluster, victim)
            return log.count("entries repaired: ") >= 3 and "index rows rewritten" in log

        soon(repaired)
        assert [cluster.pid(node) for node in cluster.node_ids] == pids
        led = log_of(cluster, victim).split("entries repaired: ")[0].split(f"node={victim} role=leader")
        assert len(led) == 1 or f"node={victim} role=follower" in led[-1], "it was repaired while it led the group"
        assert len(led) > 1 or not leads
        check_identical(cluster)


def test_leader_transfers_leadership_when_follower_needs_damaged_entries(tmp_path: Path) -> None:
    options = OPTIONS | {"scrub_bytes_per_second": 0}
    with LocalCluster(3, tmp_path, **options) as cluster:
        leader = cluster.leader()
        behind = next(node for node in cluster.node_ids if node != leader)
        cluster.stop(behind)
        fill(cluster)
        for node in cluster.node_ids:  # so that no node has the entries in memory
            if node != behind:
                cluster.restart(node)
        leader = cluster.leader()
        pid = cluster.pid(leader)
        flip_body(data_files(cluster.store_path(leader))[0])
        cluster.restart(behind)
        await_log(cluster, leader, "entries repaired: ")
        soon(lambda: settled(cluster))
        assert cluster.pid(leader) == pid
        check_identical(cluster)

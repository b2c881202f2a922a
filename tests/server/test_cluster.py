"""Three real processes on loopback: replication, failover, restart, what a node refuses."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from dledger_core.client import Producer
from dledger_core.cluster import LocalCluster, free_ports
from dledger_core.connect import Client
from dledger_core.control import TransactionId
from dledger_core.errors import ConfigError, DLedgerError, TransactionError
from dledger_core.storage import open_store

pytestmark = pytest.mark.integration
SMALL = {"data_segment_bytes": 1 << 20, "index_segment_bytes": 1 << 15}


@pytest.fixture(scope="module")
def cluster():
    with LocalCluster(3, **SMALL) as running:
        yield running


@pytest.fixture
def client(cluster):
    with Client(cluster.peers) as connected:
        yield connected


def eventually(condition, timeout_s=120.0):
    """Waits for what other processes are about to do."""
    deadline = time.monotonic() + timeout_s
    while True:
        value = condition()
        if value or time.monotonic() > deadline:
            return value
        time.sleep(0.05)


def bodies_of(client, start, end, **options):
    found = []
    while start < end:
        fetch = client.fetch(start, end, **options)
        found += list(zip(fetch.batch["index"].to_pylist(), fetch.batch["body"].to_pylist(), strict=True))
        assert fetch.next_index > start
        start = fetch.next_index
    return found


def test_append_is_readable_from_every_node(cluster, client):
    bodies = [f"entry {i}".encode() for i in range(1000)]
    result = client.append(bodies)
    assert result.last_index - result.first_index == 999
    expected = list(zip(range(result.first_index, result.last_index + 1), bodies, strict=True))
    for node in cluster.node_ids:
        assert bodies_of(client, result.first_index, result.last_index + 1, node=node, wait_ms=2000) == expected
    entry = client.get(result.first_index + 7)
    assert (entry.body, entry.term) == (b"entry 7", result.term)
    assert client.read(result.first_index, result.last_index + 1, consistency="linearizable").num_rows == 1000


def test_transaction_shows_committed_attempts_at_once(client):
    key = TransactionId("query-1", 0, "run-1")
    won = client.append_attempt([b"w1", b"w2"], transaction=key, attempt="a1")
    client.append_attempt([b"l1"], transaction=key, attempt="a2")
    after = client.append([b"later"])
    assert client.fetch(won.first_index, after.last_index + 1).batch.num_rows == 0
    part = (won.first_index, won.last_index, won.rows, won.crc)
    client.commit_transaction(key, [part])
    client.commit_transaction(key, [part])
    read = bodies_of(client, won.first_index, after.last_index + 1)
    assert [body for _, body in read] == [b"w1", b"w2", b"later"]
    raw = bodies_of(client, won.first_index, after.last_index + 1, isolation="read_uncommitted")
    assert [body for _, body in raw] == [b"w1", b"w2", b"l1", b"later"]
    with pytest.raises(TransactionError):
        client.append_attempt([b"zombie"], transaction=key, attempt="a3")


def test_killed_leaders_lose_no_acknowledged_entry(cluster, client):
    producer = Producer(client, "survivor")
    acknowledged = []
    for number in range(30):
        if number in (10, 20):
            leader = cluster.leader()
            cluster.kill(leader)
            result = producer.append([f"{number}".encode()])
            cluster.restart(leader)
        else:
            result = producer.append([f"{number}".encode()])
        acknowledged.append((result.first_index, f"{number}".encode()))
    found = dict(bodies_of(client, acknowledged[0][0], acknowledged[-1][0] + 1))
    assert [(index, found[index]) for index, _ in acknowledged] == acknowledged
    ours = [body for body in found.values() if body.isdigit()]
    assert len(ours) == 30
    end = acknowledged[-1][0] + 1
    assert eventually(lambda: all(n.commit_index >= end - 1 for n in client.metadata().nodes))
    digests = {
        tuple(r.content for r in client.digest(0, end, span=1024, node=node).ranges) for node in cluster.node_ids
    }
    assert len(digests) == 1


def test_frozen_leader_is_replaced_and_returns_as_follower(cluster, client):
    leader = cluster.leader()
    cluster.pause(leader)
    try:
        assert eventually(lambda: client.metadata().leader_id not in (None, leader))
        result = Producer(client, "while-frozen").append([b"x"])
    finally:
        cluster.resume(leader)

    def caught_up():
        node = next(n for n in client.metadata().nodes if n.node_id == leader)
        return node.role == "follower" and node.commit_index >= result.last_index

    assert eventually(caught_up)


def test_all_nodes_killed_at_once_keep_all_entries(cluster, client):
    result = client.append([b"before the power cut"] * 100)
    for node in cluster.node_ids:
        cluster.kill(node)
    for node in cluster.node_ids:
        cluster.restart(node)
    cluster.leader()
    read = bodies_of(client, result.first_index, result.last_index + 1, wait_ms=5000)
    assert [body for _, body in read] == [b"before the power cut"] * 100


def test_node_without_its_disk_receives_all_entries_again(cluster, client, tmp_path):
    victim = next(node for node in cluster.node_ids if node != cluster.leader())
    cluster.stop(victim)
    cluster.store_path(victim).rename(tmp_path / "lost")
    cluster.restart(victim)
    last = client.append([b"after"]).last_index

    def caught_up():
        node = next(n for n in client.metadata().nodes if n.node_id == victim)
        return node.reachable and node.commit_index >= last

    assert eventually(caught_up)
    assert client.digest(0, last + 1, span=1024, node=victim).ranges == client.digest(0, last + 1, span=1024).ranges


def test_damage_below_durable_index_stops_single_node():
    with LocalCluster(1, **SMALL) as cluster, Client(cluster.peers) as client:
        client.append([b"to be damaged"] * 10)
        cluster.stop("n0")
        store = cluster.store_path("n0")
        last = open_store(store).last_index
        body = open_store(store).read(last - 5, last - 4)
        position = body["position"][0].as_py()
        segment = sorted((store / "data").iterdir())[-1]
        offset = position - int(segment.name)
        original = segment.read_bytes()
        with segment.open("r+b") as file:
            file.seek(offset)
            file.write(b"\xff\xff\xff\xfe")
        cluster.restart("n0")
        assert eventually(lambda: "CORRUPT" in cluster.log_path("n0").read_text())
        assert str(segment) in cluster.log_path("n0").read_text()
        assert eventually(lambda: _ended(cluster, "n0")) == 4
        segment.write_bytes(original)
        cluster.restart("n0")
        cluster.leader()
        assert client.get(last).body == b"to be damaged"


def _ended(cluster, node):
    return cluster._processes[node].poll()


def test_two_groups_have_separate_logs():
    with LocalCluster(3, groups=("orders", "events"), **SMALL) as cluster:
        with Client(cluster.peers, "orders") as orders, Client(cluster.peers, "events") as events:
            first = orders.append([b"o"]).first_index
            last = events.append([b"e", b"e2"]).last_index
            assert [body for _, body in bodies_of(orders, 0, first + 1)] == [b"o"]
            assert [body for _, body in bodies_of(events, 0, last + 1)] == [b"e", b"e2"]
        with Client(cluster.peers, "unknown") as unknown, pytest.raises(DLedgerError, match="orders"):
            unknown.append([b"x"])


def test_single_node_group_survives_kill():
    with LocalCluster(1, **SMALL) as cluster, Client(cluster.peers) as client:
        result = client.append([b"alone"])
        cluster.kill("n0")
        cluster.restart("n0")
        cluster.leader()
        assert client.get(result.first_index).body == b"alone"


def test_sigterm_stops_node_with_intact_store(cluster, client):
    victim = next(node for node in cluster.node_ids if node != cluster.leader())
    pid = cluster.pid(victim)
    os.kill(pid, signal.SIGTERM)
    assert eventually(lambda: _ended(cluster, victim) is not None)
    assert _ended(cluster, victim) == 0
    assert open_store(cluster.store_path(victim)).verify().findings == ()
    cluster.restart(victim)
    assert eventually(lambda: all(n.reachable for n in client.metadata().nodes))


# --- what a node refuses: one line, an exit code, nothing written -------------------------------------------------


def serve(*arguments, timeout=120):
    command = [sys.executable, "-m", "dledger_core.cli", "serve", *map(str, arguments)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL, check=False
    )


def one_line(done):
    lines = done.stderr.strip().splitlines()
    assert len([line for line in lines if line.startswith("error:")]) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return lines[-1]


def test_start_with_port_in_use_writes_nothing(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = serve("--peers", f"n0-127.0.0.1:{port}", "--self-id", "n0", "--dir", tmp_path / "d")
    assert done.returncode == 3
    assert str(port) in one_line(done)
    assert not (tmp_path / "d").exists()


def test_free_ports_are_distinct_and_not_ephemeral():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_ports(1)[0]))
        found = free_ports(500)
        assert len(set(found)) == 500
        assert taken.getsockname()[1] not in found
    assert max(found) < 32_768  # where Linux begins with outgoing connections


def test_start_rejects_store_in_use(cluster):
    peers = cluster.peers
    moved = f"n0-127.0.0.1:{free_ports(1)[0]};{peers.split(';', 1)[1]}"
    done = serve("--peers", moved, "--self-id", "n0", "--dir", cluster.directory)
    assert done.returncode == 3
    assert "another process" in one_line(done)


@pytest.mark.parametrize("case", ["foreign", "group", "node"])
def test_start_rejects_foreign_directory_and_leaves_it_unchanged(tmp_path, case):
    peers = f"n0-127.0.0.1:{free_ports(1)[0]}"
    store = tmp_path / "default" / "dledger-n0"
    if case == "foreign":
        store.mkdir(parents=True)
        (store / "holiday.jpg").write_bytes(b"x")
    else:
        with LocalCluster(1, tmp_path / "other", groups=("elsewhere",), **SMALL):
            pass
        store.parent.mkdir()
        source = tmp_path / "other" / "elsewhere" / "dledger-n0"
        if case == "node":
            peers = peers.replace("n0-", "n7-")
            store = tmp_path / "elsewhere" / "dledger-n7"
            store.parent.mkdir()
        source.rename(store)
    before = sorted(str(path) for path in store.rglob("*"))
    group, self_id = store.parent.name, store.name.removeprefix("dledger-")
    done = serve("--peers", peers, "--self-id", self_id, "--dir", tmp_path, "--group", group)
    assert done.returncode == 3, done.stderr
    assert str(store) in one_line(done)
    assert sorted(str(path) for path in store.rglob("*")) == before


def test_cluster_start_reports_reason_of_failure():
    with pytest.raises(ConfigError, match="segment"):
        LocalCluster(1, data_segment_bytes=17).start()

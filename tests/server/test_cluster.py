"""Real processes on loopback: replication, failover, restart, how a node ends, and what it refuses."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from dledger_core.client import Producer
from dledger_core.cluster import LocalCluster, free_ports
from dledger_core.config import format_peers
from dledger_core.connect import Client
from dledger_core.control import TransactionId
from dledger_core.errors import ConfigError, DLedgerError, TransactionError
from dledger_core.storage import CommitLog, open_store
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import load_checkpoint
from tests.cli.command import ErrorLine
from tests.support.server_group import free_peers
from tests.support.soon import soon

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
    acknowledged, stop = {}, threading.Event()

    def append(number):
        producer, step = Producer(client, f"survivor-{number}"), 0
        while not stop.is_set():
            body = f"{number}/{step}".encode()
            acknowledged[producer.append([body]).last_index] = body
            step += 1

    with ThreadPoolExecutor(8) as pool:
        appending = [pool.submit(append, number) for number in range(8)]
        try:
            for _ in range(3):
                wanted = len(acknowledged) + 200
                soon(lambda wanted=wanted: len(acknowledged) >= wanted or any(each.done() for each in appending))
                leader = cluster.leader()
                cluster.kill(leader)
                cluster.leader()
                cluster.restart(leader)
        finally:
            stop.set()
        for each in appending:
            each.result(60)
    end = max(acknowledged) + 1
    found = dict(bodies_of(client, min(acknowledged), end))
    assert {index: found.get(index) for index in acknowledged} == acknowledged
    assert len(set(found.values())) == len(found), "nothing is there twice"
    soon(lambda: all(n.commit_index >= end - 1 for n in client.metadata().nodes))
    digests = {
        tuple(r.content for r in client.digest(0, end, span=1024, node=node).ranges) for node in cluster.node_ids
    }
    assert len(digests) == 1


def caught_up(client, node_id, index):
    node = next(node for node in client.metadata().nodes if node.node_id == node_id)
    return node.reachable and node.role == "follower" and node.commit_index >= index


def test_frozen_leader_is_replaced_and_returns_as_follower(cluster, client):
    leader = cluster.leader()
    cluster.pause(leader)
    try:
        soon(lambda: client.metadata().leader_id not in (None, leader))
        result = Producer(client, "while-frozen").append([b"x"])
    finally:
        cluster.resume(leader)
    soon(lambda: caught_up(client, leader, result.last_index))


def test_node_without_its_disk_waits_until_it_is_admitted(cluster, client):
    victim = next(node for node in cluster.node_ids if node != cluster.leader())
    cluster.stop(victim)
    store = cluster.store_path(victim)
    shutil.rmtree(store)
    cluster.restart(victim)
    soon(lambda: f"member replace {victim}" in next(n for n in client.metadata().nodes if n.node_id == victim).reason)
    last = client.append([b"after"]).last_index
    assert not (store / "data").exists()
    client.replace_member(victim)
    soon(lambda: {each.role for each in client.members().members} == {"voter"})
    soon(lambda: caught_up(client, victim, last))
    assert client.digest(0, last + 1, span=1024, node=victim).ranges == client.digest(0, last + 1, span=1024).ranges


def test_damage_below_durable_index_stops_single_node():
    with LocalCluster(1, **SMALL) as cluster, Client(cluster.peers) as client:
        client.append([b"to be damaged"] * 10)
        cluster.stop("n0")
        store = cluster.store_path("n0")
        last = open_store(store).last_index
        position = open_store(store).read(last - 5, last - 4)["position"][0].as_py()
        segment = sorted((store / "data").iterdir())[-1]
        original = segment.read_bytes()
        with segment.open("r+b") as file:
            file.seek(position - int(segment.name))
            file.write(b"\xff\xff\xff\xfe")
        cluster.restart("n0")
        assert soon(lambda: cluster.ended) == {"n0": 4}
        printed = cluster.log_path("n0").read_text()
        assert "CORRUPT" in printed
        assert str(segment) in printed
        segment.write_bytes(original)
        cluster.restart("n0")
        cluster.leader()
        assert client.get(last).body == b"to be damaged"


def test_sigterm_stops_node_with_intact_store(cluster, client):
    victim = next(node for node in cluster.node_ids if node != cluster.leader())
    os.kill(cluster.pid(victim), signal.SIGTERM)
    assert soon(lambda: victim in cluster.ended)
    assert cluster.ended == {victim: 0}
    assert open_store(cluster.store_path(victim)).verify().findings == ()
    cluster.restart(victim)
    soon(lambda: all(n.reachable for n in client.metadata().nodes))


@pytest.mark.parametrize("nodes", [1, 3])
def test_cluster_that_starts_again_at_other_ports_serves_what_it_had(tmp_path, nodes):
    """All nodes move at once, so that every address that a log recorded is wrong."""
    with LocalCluster(nodes, tmp_path, **SMALL) as cluster, Client(cluster.peers) as client:
        kept = client.append([b"kept"]).last_index
    with LocalCluster(nodes, tmp_path, **SMALL) as again, Client(again.peers) as client:
        assert again.peers != cluster.peers
        assert client.get(kept).body == b"kept"
        appended = client.append([b"after the move"]).last_index
        assert {f"{n.node_id}-{n.address}" for n in client.metadata().nodes} == set(again.peers.split(";"))
        assert dict(bodies_of(client, kept, appended + 1)) == {kept: b"kept", appended: b"after the move"}


def test_frozen_node_stops_cleanly():
    with LocalCluster(1, **SMALL) as cluster, Client(cluster.peers) as client:
        last = client.append([b"x"]).last_index
        cluster.pause("n0")
        cluster.stop("n0")
        checkpoint = load_checkpoint(OsFiles(), Layout(cluster.store_path("n0")).checkpoint)
        assert checkpoint.commit_index == last, "the last thing that a node does before it ends"


@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit")
def test_failed_write_ends_node_with_exit_code_4():
    with LocalCluster(1, **SMALL) as cluster, Client(cluster.peers, timeout_ms=2000) as client:
        kept = client.append([b"kept"]).last_index
        resource.prlimit(cluster.pid("n0"), resource.RLIMIT_FSIZE, (200_000, 200_000))
        with pytest.raises(DLedgerError):
            client.append([b"x" * 100_000] * 4)
        assert soon(lambda: cluster.ended) == {"n0": 4}
        printed = cluster.log_path("n0").read_text()
        assert "DISK_FAILED" in printed
        assert "Traceback" not in printed
        cluster.stop("n0")
        assert open_store(cluster.store_path("n0")).read(kept, kept + 1)["body"].to_pylist() == [b"kept"]


def test_store_of_another_log_does_not_join(tmp_path):
    with LocalCluster(1, tmp_path / "other", **SMALL) as other, Client(other.peers) as client:
        client.append([b"of another log"])
    foreign = other.store_path("n0")
    with LocalCluster(3, tmp_path / "ours", **SMALL) as cluster, Client(cluster.peers) as client:
        before = client.append([b"ours"]).last_index
        cluster.stop("n0")
        cluster.store_path("n0").rename(tmp_path / "away")
        foreign.rename(cluster.store_path("n0"))
        identity = (cluster.store_path("n0") / "meta" / "log.json").read_text()
        cluster.restart("n0")
        soon(lambda: "OTHER_LOG" in cluster.log_path("n0").read_text())
        cluster.leader()
        assert client.append([b"without it"]).last_index > before
        cluster.stop("n0")
        assert (cluster.store_path("n0") / "meta" / "log.json").read_text() == identity
        bodies = [row for row in open_store(cluster.store_path("n0")).read(0, 99)["body"].to_pylist() if row]
        assert b"of another log" in bodies
        assert b"ours" not in bodies


# --- start and signals ------------------------------------------------------------------------------------------------


def spawn(directory, peers, self_id="n0", groups=("default",)):
    command = [sys.executable, "-m", "dledger_core.cli", "serve", "--self-id", self_id, "--dir", str(directory)]
    command += ["--peers", peers, "--data-segment-bytes", "1MiB", "--index-segment-bytes", "32KiB"]
    for group in groups:
        command += ["--group", group]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL)


def ended(process):
    """Returns exit code and stderr of a process that is about to end."""
    try:
        _, stderr = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()  # tests that follow are not to blame
        process.communicate()
        raise
    return process.returncode, stderr.decode()


def test_sigterm_during_start_damages_nothing(tmp_path):
    groups = tuple(f"group-{number}" for number in range(60))
    peers = format_peers(free_peers(1))
    process = spawn(tmp_path, peers, groups=groups)
    locks = [tmp_path / group / "dledger-n0" / "meta" / "lock" for group in groups]
    soon(lambda: all((lock.parent / "checkpoint").exists() for lock in locks))
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0
    for lock in locks:
        lock.unlink()
    process = spawn(tmp_path, peers, groups=groups)
    soon(locks[2].exists, every_s=0.002)
    process.send_signal(signal.SIGTERM)
    code, stderr = ended(process)
    assert code == 0, stderr
    assert "Traceback" not in stderr
    assert not locks[-1].exists(), "it was not stopped during its start"
    for lock in locks:
        store = lock.parent.parent
        CommitLog.open(store, group=store.parent.name, node_id="n0").close()


def test_sigterm_right_after_spawn_leaves_usable_directory(tmp_path):
    peers = format_peers(free_peers(1))
    for delay_s in (0.0, 0.15, 0.3):
        process = spawn(tmp_path, peers)
        time.sleep(delay_s)  # wherever it has come to by then
        process.send_signal(signal.SIGTERM)
        code, stderr = ended(process)
        # -15: the interpreter was not up yet; 130: interrupted before the node began; -2, which a shell calls 130
        # too: interrupted within an exec() of an import, after which CPython ends so whatever was caught.
        assert code in (0, 130, -signal.SIGINT, -signal.SIGTERM), stderr
    process = spawn(tmp_path, peers)
    assert process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0


def refusal(*arguments, **options):
    """Return the one line with which a node refuses to start; it exits with code 3."""
    code, stderr = ended(spawn(*arguments, **options))
    lines = stderr.strip().splitlines()
    assert code == 3, stderr
    assert [line.startswith("error:") for line in lines].count(True) == 1, stderr
    assert "Traceback" not in stderr
    return ErrorLine(lines[-1])


def test_start_with_port_in_use_writes_nothing(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert str(port) in refusal(tmp_path / "d", f"n0-127.0.0.1:{port}")
    assert not (tmp_path / "d").exists()


def test_start_in_unwritable_directory_is_one_line(tmp_path):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in refusal(tmp_path / "file", format_peers(free_peers(1)))
    assert (tmp_path / "file").read_text() == ""


def test_start_with_foreign_store_writes_nothing_for_any_group(tmp_path):
    CommitLog.open(tmp_path / "b" / "dledger-n0", group="else", node_id="n0").close()
    line = refusal(tmp_path, format_peers(free_peers(1)), groups=["a", "b"])
    assert line.code == "STORE_MISMATCH"
    assert str(tmp_path / "b" / "dledger-n0") in line
    assert [path.name for path in tmp_path.iterdir()] == ["b"]


def test_start_rejects_store_in_use(cluster):
    moved = f"n0-127.0.0.1:{free_ports(1)[0]};{cluster.peers.split(';', 1)[1]}"
    assert refusal(cluster.directory, moved).code == "STORE_BUSY"


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
    assert str(store) in refusal(tmp_path, peers, self_id, groups=[group])
    assert sorted(str(path) for path in store.rglob("*")) == before


# --- LocalCluster -----------------------------------------------------------------------------------------------------


def test_free_ports_are_distinct_and_not_ephemeral():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", free_ports(1)[0]))
        found = free_ports(500)
        assert len(set(found)) == 500
        assert taken.getsockname()[1] not in found
    assert max(found) < 32_768  # where Linux begins with outgoing connections


def test_cluster_start_reports_reason_of_failure():
    with pytest.raises(ConfigError, match=r"\[CONFIG\] --data-segment-bytes"):
        LocalCluster(1, data_segment_bytes=17).start()

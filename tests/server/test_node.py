"""A node's life: start, signals, what ends it and how, in this process and as a real one."""

from __future__ import annotations

import gc
import logging
import resource
import signal
import subprocess
import sys
import time

import pytest

from dledger_core.cluster import LocalCluster
from dledger_core.config import Limits, format_peers
from dledger_core.connect import Client
from dledger_core.errors import ConfigError, DLedgerError, UnreachableError
from dledger_core.net.frame import encode_frame
from dledger_core.net.hello import Hello
from dledger_core.net.protocol import HELLO_BYTES_MAX
from dledger_core.net.transport import connect
from dledger_core.raft import even_group_warning
from dledger_core.server import node as node_module
from dledger_core.server.config import ServerConfig
from dledger_core.server.node import NodeServer
from dledger_core.storage import CommitLog, open_store
from tests.support.server_group import RAFT, STORAGE, ServerGroup, eventually, free_peers, run
from tests.support.soon import soon

SMALL = {"data_segment_bytes": 1 << 20, "index_segment_bytes": 1 << 15}


def config_of(directory, nodes=1, **options):
    peers = free_peers(nodes)
    settings = {"self_id": peers[0].node_id, "peers": peers, "directory": directory, "raft": RAFT, "storage": STORAGE}
    return ServerConfig(**(settings | options))


class Silent:
    """A handler for a connection on which the test only waits."""

    def on_frame(self, connection, frame):
        pass

    def on_close(self, connection, error):
        pass


# --- timers -------------------------------------------------------------------------------------------------------


async def test_error_in_timer_ends_node(tmp_path, caplog):
    node = NodeServer(config_of(tmp_path, limits=Limits(space_s=0.01)))

    def broken():
        raise RuntimeError("broken on purpose")

    node.disk_rounds.start_look = broken
    await node.start()
    try:
        with pytest.raises(RuntimeError, match="broken on purpose"):
            await node.wait()
    finally:
        await node.close()
    assert any("timer=space" in record.getMessage() and record.exc_info for record in caplog.records)


# --- start and close ----------------------------------------------------------------------------------------------


async def test_close_continues_after_failure(tmp_path):
    config = config_of(tmp_path, groups=("a", "b", "c"))
    node = NodeServer(config)
    await node.start()

    async def broken():
        raise RuntimeError("cannot close")

    real = node.service.close
    node.service.close = broken
    with pytest.raises(RuntimeError, match="cannot close"):
        await node.close()
    await real()
    for group in config.groups:  # each can be opened again, so each was closed
        CommitLog.open(config.store_path(group), group=group, node_id="n0", config=STORAGE).close()
    with pytest.raises(UnreachableError):
        await connect(config.me.host, config.me.port, Hello(), Silent(), timeout_s=1)


def test_error_after_start_closes_stores(tmp_path):
    config = config_of(tmp_path)

    def broken(_node):
        raise BrokenPipeError("stdout is closed")

    with pytest.raises(BrokenPipeError):
        node_module.run(config, broken)
    log = CommitLog.open(config.store_path("default"), group="default", node_id="n0", config=STORAGE)
    log.close()


async def test_node_in_library_does_not_freeze_garbage_collector(tmp_path):
    before = gc.get_freeze_count()
    async with ServerGroup(tmp_path, nodes=1) as group:
        await group.leader()
        assert gc.get_freeze_count() <= before  # fewer: what an earlier test froze has died


async def test_stop_during_start_ends_it(tmp_path):
    config = config_of(tmp_path, groups=("a", "b"))
    node = NodeServer(config)
    node.stop()
    await node.start()
    await node.wait()
    assert not node.is_started
    await node.close()
    assert config.store_path("a").exists()
    assert not config.store_path("b").exists()


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
def test_even_number_of_nodes_is_warned_about(tmp_path, caplog, count):
    async def main():
        node = NodeServer(config_of(tmp_path, nodes=count))
        await node.start()
        await node.close()

    with caplog.at_level(logging.WARNING, "dledger_core.server.node"):
        run(main())
    warnings = [record.getMessage() for record in caplog.records if "survives the failure" in record.getMessage()]
    assert warnings == {
        2: [
            "a group of 2 nodes survives the failure of none of them, no more than 1 node would; use 1 or 3",
        ],
        4: ["a group of 4 nodes survives the failure of 1 of them, no more than 3 nodes would; use 3 or 5"],
    }.get(count, [])
    assert (even_group_warning(count) is None) == (count % 2 == 1)


# --- many groups --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name_length", [4, 30, 127])
def test_hello_of_most_groups_is_within_its_limit(tmp_path, name_length):
    def config(count):
        return config_of(tmp_path, groups=tuple(f"{number:0{name_length}d}" for number in range(count)))

    def may_host(count):
        try:
            config(count)
        except ConfigError:
            return False
        return True

    most = next(count for count in range(200, 10_000, 10) if not may_host(count + 10))
    hello = Hello("peer", "n" * 64, dict.fromkeys(config(most).groups, "f" * 32))
    for header in (hello.to_header(), hello.to_response()):
        (frame,) = encode_frame(header)
        assert len(frame) <= HELLO_BYTES_MAX


@pytest.mark.integration
async def test_nodes_with_many_long_group_names_connect(tmp_path):
    names = tuple(f"{number:0120d}" for number in range(100))
    async with ServerGroup(tmp_path, nodes=2, groups=names) as cluster:
        await eventually(lambda: all(len(node.links.connected()) == 1 for node in cluster.nodes.values()))
        await cluster.leader(names[-1])
        channel = await cluster.channel("n1")  # a client gets that hello too
        assert channel.is_open


# --- real processes -----------------------------------------------------------------------------------------------


def spawn(directory, peers, self_id="n0", groups=("default",), **popen):
    command = [sys.executable, "-m", "dledger_core.cli", "serve", "--self-id", self_id, "--dir", str(directory)]
    command += ["--peers", format_peers(peers), "--data-segment-bytes", "1MiB", "--index-segment-bytes", "32KiB"]
    for group in groups:
        command += ["--group", group]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, **popen)


def ended(process):
    """Returns exit code and stderr of a process that is about to end."""
    try:
        _, stderr = process.communicate(timeout=120)
    except subprocess.TimeoutExpired:
        process.kill()  # tests that follow are not to blame
        process.communicate()
        raise
    return process.returncode, stderr.decode()


@pytest.mark.integration
def test_sigterm_during_start_damages_nothing(tmp_path):
    groups = tuple(f"group-{number}" for number in range(60))
    peers = free_peers(1)
    process = spawn(tmp_path, peers, groups=groups)
    stores = [tmp_path / group / "dledger-n0" for group in groups]
    soon(lambda: (stores[2] / "currterm").exists() or (stores[2] / "meta" / "log.json").exists(), every_s=0.002)
    process.send_signal(signal.SIGTERM)
    code, stderr = ended(process)
    assert code == 0, stderr
    assert "Traceback" not in stderr
    assert not stores[-1].exists(), "it was not stopped during its start"
    made = [store for store in stores if store.exists()]
    assert made
    for store in made:
        CommitLog.open(store, group=store.parent.name, node_id="n0").close()


@pytest.mark.integration
def test_sigterm_right_after_spawn_leaves_usable_directory(tmp_path):
    peers = free_peers(1)
    for delay_s in (0.0, 0.15, 0.3):
        process = spawn(tmp_path, peers)
        time.sleep(delay_s)  # wherever it has come to by then
        process.send_signal(signal.SIGTERM)
        code, stderr = ended(process)
        # -15: the interpreter was not up yet; 130: interrupted before the node began; -2, which a shell calls 130
        # too: interrupted within an exec() of an import, after which CPython ends so whatever was caught.
        assert code in (0, 130, -signal.SIGINT, -signal.SIGTERM), stderr
    process = spawn(tmp_path, peers)
    assert b"listening" in process.stdout.readline()
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 0


@pytest.mark.integration
def test_frozen_node_stops_cleanly():
    with LocalCluster(1, **SMALL) as cluster:
        process = cluster._processes["n0"]
        cluster.pause("n0")
        cluster.stop("n0")
        assert process.returncode == 0


@pytest.mark.integration
@pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs prlimit")
def test_failed_write_ends_node_with_exit_code_4():
    with LocalCluster(1, **SMALL) as cluster, Client(cluster.peers, timeout_ms=2000) as client:
        kept = client.append([b"kept"]).last_index
        process, store = cluster._processes["n0"], cluster.store_path("n0")
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (200_000, 200_000))
        with pytest.raises(DLedgerError):
            client.append([b"x" * 100_000] * 4)
        assert process.wait(120) == 4
        printed = cluster.log_path("n0").read_text()
        assert "DISK_FAILED" in printed
        assert "Traceback" not in printed
        cluster._reap("n0")
        assert open_store(store).read(kept, kept + 1)["body"].to_pylist() == [b"kept"]


@pytest.mark.integration
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
        soon(lambda: "STORE_MISMATCH" in cluster.log_path("n0").read_text())
        cluster.leader()
        assert client.append([b"without it"]).last_index > before
        cluster.stop("n0")
        assert (cluster.store_path("n0") / "meta" / "log.json").read_text() == identity
        bodies = [row for row in open_store(cluster.store_path("n0")).read(0, 99)["body"].to_pylist() if row]
        assert b"of another log" in bodies
        assert b"ours" not in bodies

"""A node in this process: start and close, its timers, its groups' lives, its members."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import sys
from dataclasses import replace

import pytest

from dledger_core.config import Limits, format_peers
from dledger_core.connect import AsyncClient
from dledger_core.errors import (
    CorruptRecordError,
    DiskFailedError,
    DLedgerError,
    InvariantViolationError,
    UnreachableError,
)
from dledger_core.net.protocol import Type
from dledger_core.raft import AppendEntries
from dledger_core.server.config import ServerConfig
from dledger_core.server.group_state import GroupState
from dledger_core.server.node import NodeServer
from dledger_core.server.node import run as run_node
from dledger_core.server.replica.members import Members
from dledger_core.storage import CommitLog
from dledger_core.storage.files.file_system import OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import verification_reason
from dledger_core.storage.files.quarantine import quarantine_reason
from tests.support import replica_group
from tests.support.server_group import RAFT, STORAGE, RawClient, ServerGroup, eventually, free_peers

GROUPS = ("a", "b")


def config_of(directory, nodes=1, **options):
    peers = free_peers(nodes)
    settings = {"self_id": peers[0].node_id, "peers": peers, "directory": directory, "raft": RAFT, "storage": STORAGE}
    return ServerConfig(**(settings | options))


def fails(error):
    """Return a function that raises ``error``."""

    def broken(*_):
        raise error

    return broken


# --- start and close ------------------------------------------------------------------------------------------------


async def test_error_in_timer_ends_node(tmp_path, caplog):
    node = NodeServer(config_of(tmp_path, limits=Limits(space_s=0.01)))
    node.disk_rounds.start_space_check = fails(RuntimeError("broken on purpose"))
    await node.start()
    try:
        with pytest.raises(RuntimeError, match="broken on purpose"):
            await node.wait()
    finally:
        await node.close()
    assert any("timer=space" in record.getMessage() and record.exc_info for record in caplog.records)


async def test_close_continues_after_failure(tmp_path):
    config = config_of(tmp_path, groups=("a", "b", "c"))
    node = NodeServer(config)
    await node.start()
    real, node.service.close = node.service.close, fails(RuntimeError("cannot close"))
    with pytest.raises(RuntimeError, match="cannot close"):
        await node.close()
    await real()
    for group in config.groups:  # each can be opened again, so each was closed
        CommitLog.open(config.store_path(group), group=group, node_id="n0", config=STORAGE).close()
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection(config.me.host, config.me.port)


def test_error_after_start_closes_stores(tmp_path):
    config = config_of(tmp_path)
    with pytest.raises(BrokenPipeError):
        run_node(config, fails(BrokenPipeError("stdout is closed")))
    CommitLog.open(config.store_path("default"), group="default", node_id="n0", config=STORAGE).close()


async def test_log_keeps_its_profile_whatever_the_option(tmp_path):
    storage = replace(STORAGE, profile="A")
    CommitLog.open(tmp_path / "default" / "dledger-n0", group="default", node_id="n0", config=storage).close()
    async with ServerGroup(tmp_path, 1) as cluster:
        assert (await (await cluster.client()).append([b"no no-op before it"]))[0] == 0


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


@pytest.mark.parametrize(("count", "advice"), [(1, ""), (2, "use 1 or 3"), (3, ""), (4, "use 3 or 5"), (5, "")])
async def test_even_number_of_nodes_is_warned_about(tmp_path, caplog, count, advice):
    node = NodeServer(config_of(tmp_path, nodes=count))
    with caplog.at_level(logging.WARNING, "dledger_core.server.node"):
        await node.start()
        await node.close()
    warnings = [record.getMessage() for record in caplog.records if "survives the failure" in record.getMessage()]
    assert len(warnings) == bool(advice)
    assert all(advice in warning for warning in warnings)


# --- a group's life -------------------------------------------------------------------------------------------------


def break_invariant(cluster, node_id, group):
    cluster.hosted(node_id, group).replica.propose_soon(replica_group.break_invariant)


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


async def test_quarantine_of_broken_invariant_lasts_until_repair(tmp_path):
    async with ServerGroup(tmp_path, groups=GROUPS) as cluster:
        node_id = (await cluster.followers("a"))[0]
        leader = RawClient(await cluster.channel(await cluster.leader("a")), "a")
        await leader.append([b"kept"])
        break_invariant(cluster, node_id, "a")
        await quarantined(cluster, node_id, "a")
        path = cluster.config(node_id).store_path("a")
        await eventually(lambda: quarantine_reason(OsFiles(), Layout(path)))
        await cluster.stop(node_id)
        node = await cluster.start(node_id)
        assert (node.groups["a"].state, set(node.hosted)) == (GroupState.QUARANTINED, {"b"})
        await leader.append([b"without it"])
        await cluster.stop(node_id)
        arguments = ("repair", "--dir", str(path), "--peers", format_peers(cluster.peers))
        repair = await asyncio.create_subprocess_exec(sys.executable, "-m", "dledger_core.cli", *arguments)
        assert (await repair.wait(), quarantine_reason(OsFiles(), Layout(path))) == (0, None)
        node = await cluster.start(node_id)
        assert node.hosted["a"].replica.raft.status().is_recovering, "no vote before a leader has compared its log"
        await eventually(lambda: not node.hosted["a"].replica.raft.status().is_recovering)
        assert node.hosted["a"].replica.readable_end > 2


async def test_entry_that_contradicts_committed_one_quarantines_replica(tmp_path):
    async with ServerGroup(tmp_path) as cluster:
        leader_id, (victim, _) = await cluster.leader(), await cluster.followers()
        client = await cluster.client()
        await client.append([b"committed"])
        replica = cluster.hosted(victim).replica
        await eventually(lambda: replica.commit_index >= 1)
        term = replica.soft_state.term
        forged = AppendEntries(
            sender=cluster.hosted(leader_id).replica.member,
            target=replica.member,
            term=term,
            prev_index=1,
            prev_term=0,
            commit_index=1,
            batches=(),
        )
        replica.step(forged)
        await quarantined(cluster, victim, "default")
        layout = Layout(cluster.config(victim).store_path("default"))
        reason = await eventually(lambda: quarantine_reason(OsFiles(), layout))
        assert f"index=1 term_here={term} term_of_leader=0" in reason
        await client.append([b"the others continue"])


async def test_invariant_that_breaks_at_start_quarantines_its_group(tmp_path, monkeypatch):
    starts, load_tables = iter((InvariantViolationError("broken on purpose"), None)), CommitLog.load_tables

    def load(log):
        if (broken := next(starts)) is not None:
            raise broken
        return load_tables(log)

    async with ServerGroup(tmp_path, 1, groups=GROUPS) as cluster:
        await cluster.stop("n0")
        monkeypatch.setattr(CommitLog, "load_tables", load)
        await cluster.start("n0")
        assert cluster.nodes["n0"].groups["a"].state is GroupState.QUARANTINED
        await cluster.leader("b")


async def test_store_of_quarantined_group_is_verified_at_next_start(tmp_path):
    async with ServerGroup(tmp_path, 1, groups=GROUPS) as cluster:
        await cluster.leader("a")
        await RawClient(await cluster.channel("n0"), "a").append([b"kept"])
        cluster.nodes["n0"].groups["a"].quarantine(CorruptRecordError("broken on purpose"))
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


def fail_files(monkeypatch, directory, number):
    """Let every read and write of the files below a directory fail from now on."""

    def failing(real):
        def call(fd, *arguments):
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(directory)):
                raise OSError(number, os.strerror(number), str(directory))
            return real(fd, *arguments)

        return call

    names = ("pread",) if number == errno.EIO else ("pwritev", "fdatasync")
    for name in names:
        monkeypatch.setattr(os, name, failing(getattr(os, name)))


@pytest.mark.parametrize("number", [errno.EIO, errno.EROFS], ids=["no reads", "read-only"])
async def test_failed_disk_ends_one_replica_and_its_leadership(tmp_path, monkeypatch, number):
    async with ServerGroup(tmp_path, groups=GROUPS) as cluster:
        leader, other = await cluster.leader("a"), await cluster.leader("b")
        client = RawClient(await cluster.channel(leader), "a")
        for _ in range(3):
            _, last, _ = await client.append([b"x" * 1000] * 9)
        fail_files(monkeypatch, cluster.config(leader).store_path("a") / "data", number)
        with contextlib.suppress(DLedgerError):
            await (client.read(0, last + 1) if number == errno.EIO else client.append([b"y"], timeout_s=5.0))
        await quarantined(cluster, leader, "a")
        rest = {node: server for node, server in cluster.nodes.items() if node != leader}
        successor = await eventually(lambda: next((n for n in rest if rest[n].hosted["a"].replica.leader_ready), None))
        _, rows = await RawClient(await cluster.channel(successor), "a").read(0, last + 1)
        assert [body for _, _, body in rows].count(b"x" * 1000) == 27
        await RawClient(await cluster.channel(other), "b").append([b"x"])
        assert "b" in cluster.nodes[leader].hosted


async def test_failed_disk_of_one_group_does_not_end_the_node(tmp_path):
    async with ServerGroup(tmp_path, 1, groups=GROUPS) as cluster:
        node = cluster.nodes["n0"]
        await cluster.leader("b")
        ended = asyncio.create_task(node.wait())
        cluster.hosted("n0", "a").replica.store.run(fails(DiskFailedError("no disk")))
        await eventually(lambda: ended.done() or node.groups["a"].state is GroupState.QUARANTINED)
        assert not ended.done()
        ended.cancel()
        await RawClient(await cluster.channel("n0"), "b").append([b"x"])


async def test_node_ends_when_disk_of_its_last_group_fails(tmp_path):
    async with ServerGroup(tmp_path, 1) as cluster:
        await cluster.leader()
        cluster.hosted("n0").replica.store.run(fails(DiskFailedError("no disk")))
        with pytest.raises(DiskFailedError):
            await cluster.nodes["n0"].wait()


async def test_error_in_checkpoint_concerns_its_group_only(tmp_path, monkeypatch):
    def save() -> None:
        raise RuntimeError("broken on purpose")

    async with ServerGroup(tmp_path, 1, groups=GROUPS) as cluster:
        for group in GROUPS:
            await cluster.leader(group)
        monkeypatch.setattr(cluster.hosted("n0", "a").replica.store, "save_checkpoint", save)
        await quarantined(cluster, "n0", "a")
        await RawClient(await cluster.channel("n0"), "b").append([b"x"])


# --- members --------------------------------------------------------------------------------------------------------


async def test_shorter_list_keeps_links_to_members_of_the_log(tmp_path):
    async with ServerGroup(tmp_path) as cluster:
        node = cluster.nodes["n0"]
        await eventually(lambda: sorted(node.links.connected()) == ["n1", "n2"])
        node.members.replace(cluster.peers[:2])
        node.links.update()
        assert sorted(node.links.connected()) == ["n1", "n2"]
        header = (await RawClient(await cluster.channel("n0")).ask(Type.METADATA)).header
        assert header["peers"] == format_peers(cluster.peers)
        assert sorted(row[0] for row in header["members"]) == ["n0", "n1", "n2"]
        node.members.replace(cluster.peers)
        node.links.update()
        await eventually(lambda: sorted(node.links.connected()) == ["n1", "n2"])


def test_members_reject_node_that_is_listed_twice():
    peers = free_peers(2)
    members = Members(peers[0].node_id, peers)
    assert members.others == peers[1:]
    with pytest.raises(InvariantViolationError):
        members.replace((*peers, peers[0]))

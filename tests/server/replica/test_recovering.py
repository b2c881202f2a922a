"""A recovering voter: the end of its log is lost, with entries that it acknowledged.

Replicas with disks in memory. Entries after the last checkpoint may be lost undetectably, so a repair from a peer's
committed entries is not enough, however complete it is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dledger_core.config import Peer
from dledger_core.errors import UnreachableError
from dledger_core.raft import AppendEntriesResponse, Role
from dledger_core.record import segment_name
from dledger_core.server.maintenance.repair import RepairReport, repair_store
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import load_checkpoint
from tests.support.group import NODES
from tests.support.replica_group import LEADER_TICKS_MAX, HandDriven, ReplicaGroup
from tests.support.server_group import STORAGE

SMALL = replace(STORAGE, data_segment_bytes=4096, index_segment_bytes=1024)
LAYOUT = Layout(Path("/store"))
PEERS = tuple(Peer(name, "hand", 1 + at) for at, name in enumerate(NODES[:3]))


class HandEnvironment:
    """A ``RepairEnvironment`` whose only peer is another replica of the test."""

    def __init__(self, giver: HandDriven) -> None:
        self.giver = giver
        self.peer: Any = None

    def now(self) -> float:
        return 0.0

    async def sleep(self, seconds: float) -> None:
        raise AssertionError(f"nothing to wait for {seconds} seconds")

    async def run_blocking(self, function: Callable[[], Any]) -> Any:
        return function()

    def source(self, peer: Peer) -> HandEnvironment:
        source = HandEnvironment(self.giver)
        source.peer = peer
        return source

    async def open(self, group: str, log_uuid: str | None) -> None:
        if self.peer.node_id != self.giver.node_id:
            raise UnreachableError("down", str(self.peer.node_id))

    async def read(self, group: str, start: int, end: int) -> Any:
        stop = min(end, self.giver.replica.readable_end)
        if start >= stop:
            return self.giver.log.inspect(0, 1, 1).slice(0, 0), stop - 1
        return self.giver.log.inspect(start, stop, 1 << 20), stop - 1

    async def close(self) -> None:
        pass


def repair(group: ReplicaGroup, victim: HandDriven, giver: HandDriven) -> RepairReport:
    files = group.files[victim.node_id]
    with StoreRepair.open(LAYOUT.root, files=files, config=SMALL) as store:
        return asyncio.run(repair_store(store, PEERS, "g", environment=HandEnvironment(giver)))


def lose_from(group: ReplicaGroup, victim: HandDriven, keep: float) -> None:
    """Keep a share of the entries that the checkpoint covers, and none after it, in data and index."""
    files = group.files[victim.node_id]
    checkpoint = load_checkpoint(files, LAYOUT.checkpoint)
    assert checkpoint is not None
    index = int(checkpoint.durable_index * keep)
    ends = {LAYOUT.data: int(victim.log.position_of(index)), LAYOUT.index: index * 32}
    files.kill()
    for names in (files.names, files.durable_names):
        for path in [path for path in names if path.parent in ends]:
            content, end = names[path].content, max(0, ends[path.parent] - int(path.name))
            content[end:] = bytes(len(content[end:]))
            names[path].durable[:] = content


def filled(count: int, repeat: int) -> tuple[ReplicaGroup, HandDriven, HandDriven, HandDriven]:
    """Return a group in which all nodes hold ``count`` entries, its leader, and the other two nodes."""
    group = ReplicaGroup(storage=SMALL)
    leader = group.leader()
    victim, late = (node for node in group.members.values() if node is not leader)
    for number in range(count):
        group.append(leader, b"%d" % number * repeat)
    group.tick(10)
    return group, leader, victim, late


def with_unrecorded_entries() -> tuple[ReplicaGroup, HandDriven, HandDriven, HandDriven]:
    """Return a group whose leader and a follower acknowledged entries that no checkpoint and no third node has."""
    group, leader, victim, late = filled(40, repeat=100)
    victim.replica.store.save_checkpoint()
    group.deliver()
    isolate(group, late)
    for number in range(7):
        group.append(leader, b"only two have this %d" % number)
    assert len(group.acknowledged) == 47
    assert not group.unknown
    return group, leader, victim, late


def isolate(group: ReplicaGroup, *nodes: HandDriven) -> None:
    names = {node.node_id for node in nodes}
    group.drop = lambda message: message.sender in names or message.target in names


def elects(group: ReplicaGroup, *nodes: HandDriven) -> bool:
    """Whether one of these nodes becomes leader."""
    for _ in range(LEADER_TICKS_MAX):
        if any(node.replica.soft_state.role is Role.LEADER for node in nodes):
            return True
        group.tick()
    return False


@pytest.mark.parametrize("keep", [0.0, 0.4, 0.9])
def test_repaired_node_does_not_elect_leader_without_acknowledged_entries(keep: float) -> None:
    group, leader, victim, late = with_unrecorded_entries()
    lose_from(group, victim, keep)
    report = repair(group, victim, leader)
    assert report.found
    assert not report.remaining
    victim = group.start(victim.node_id)
    isolate(group, leader)
    assert not elects(group, late, victim), "they lack acknowledged entries"
    group.drop = lambda _: False
    leader = group.leader()
    group.append(leader, b"after", ticks=5)
    assert [group.lost(node) for node in group.members.values()] == [[], [], []]
    isolate(group, leader)
    assert elects(group, late, victim), "it has all entries again"
    group.drop = lambda _: False
    group.tick(20)
    assert [group.lost(node) for node in group.members.values()] == [[], [], []]
    assert victim.log.floor is None


@pytest.mark.parametrize("byte", [20, 48], ids=["term", "body"])
def test_log_ends_before_damage_to_uncommitted_entries_for_now(byte: int) -> None:
    group, leader, victim, late = filled(8, repeat=50)
    group.drop = lambda message: isinstance(message, AppendEntriesResponse) or message.target == late.node_id
    for number in range(8):
        group.append(leader, b"uncommitted %d" % number)
    victim.replica.store.save_checkpoint()
    group.deliver()
    first = victim.replica.commit_index + 1
    files, position = group.files[victim.node_id], int(victim.log.position_of(first + 2))
    last = victim.log.last_index()
    group.drop = lambda _: True
    files.kill()
    for inode in [inode for path, inode in files.names.items() if path == LAYOUT.data / segment_name(0)]:
        inode.content[position + byte] ^= 1
        inode.durable[:] = inode.content
    before = {path: bytes(inode.content) for path, inode in files.names.items() if path.parent == LAYOUT.data}
    report = repair(group, victim, late)
    assert (len(report.found), report.remaining, [one.start for one in report.left_out]) == (1, (), [first + 2])
    victim = group.start(victim.node_id)
    assert first - 1 <= victim.log.last_index() <= first + 1 < last
    after = {path: bytes(inode.content) for path, inode in files.names.items() if path.parent == LAYOUT.data}
    assert after == before, "the damaged entries and those after them may be the only copies"
    assert victim.replica.raft.status().is_recovering
    group.drop = lambda _: False
    group.tick(LEADER_TICKS_MAX)  # its term deposes the leader once
    group.append(group.leader(), b"after", ticks=10)
    assert [group.lost(node) for node in group.members.values()] == [[], [], []]
    assert victim.log.floor is None
    victim.log.check_recent()

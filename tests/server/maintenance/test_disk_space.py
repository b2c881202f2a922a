"""The disk-full guard: appends are rejected before any write, and accepted again once space is free."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from dledger_core.config import LIMITS, Limits, format_peers
from dledger_core.connect import AsyncClient, Client
from dledger_core.control import TransactionId
from dledger_core.errors import DiskFullError
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft import AppendEntriesResponse, Heartbeat, HeartbeatResponse, RequestVote, TimeoutNow
from dledger_core.server.maintenance.disk_rounds import DiskRounds
from dledger_core.server.maintenance.disk_space import SpaceGuard
from dledger_core.server.maintenance.retention import RetentionPolicy
from dledger_core.storage.files.file_system import DiskSpace, OsFiles
from tests.chaos.cluster import SmallDisk
from tests.cli import command
from tests.support.faulty_files import FaultyFiles
from tests.support.replica_group import Asker, HandDriven, entries
from tests.support.server_group import ServerGroup, eventually, free_peers, run

RESERVE = 8 << 20
TRANSACTION = TransactionId("q", 0, "run")


class Node(HandDriven):
    """A hand-driven replica on a disk whose room the test sets."""

    def __init__(self, directory, voters=("n0",)):
        self.files = FaultyFiles()
        super().__init__(directory, voters=voters, files=self.files)
        self.replica.space = SpaceGuard("g", self.log, RESERVE)

    def room(self, nbytes, guards=()):
        self.files.room = DiskSpace(nbytes, 1 << 30)
        self.replica.space.observe(*self.log.space(), guards)


@contextmanager
def leading(directory):
    with Node(directory) as node:
        node.lead()
        node.room(1 << 29)
        yield node
        node.run()


@pytest.fixture
def leader(tmp_path):
    with leading(tmp_path / "n0") as node:
        yield node


@pytest.fixture
def follower(tmp_path):
    with Node(tmp_path, ("n0", "n1", "n2")) as node:
        for other in ("n1", "n2"):
            node.replica.peers.attached(NodeId(other))
        node.replica.tick()
        node.replica.tick()
        yield node
        node.run()


def test_appends_on_full_disk_are_rejected_before_any_write_and_reads_continue(leader):
    ask = Asker(leader)
    ask.plain(b"x")
    leader.run()
    leader.room(RESERVE - 1)
    end, operations = leader.log.staged_end, leader.files.operations
    for request in (
        lambda: ask.plain(b"x"),
        lambda: ask.produced("p", 0, 0, b"x"),
        lambda: ask.attempt(TRANSACTION, "a", b"x"),
    ):
        with pytest.raises(DiskFullError) as caught:
            request()
        assert (caught.value.code, caught.value.retriable) == (415, True)
        assert caught.value.values["retry_after_ms"] > 0
    leader.run()
    assert ask.ranges == [(1, 1)]
    assert (leader.log.staged_end, leader.files.operations) == (end, operations)
    assert leader.log.read(1, 2, 100).count == 1


def test_appends_are_accepted_again_above_reserve(leader):
    ask = Asker(leader)
    for room, is_full in ((RESERVE - 1, True), (RESERVE + 1, True), (RESERVE + RESERVE // 8, False)):
        leader.room(room)
        assert leader.replica.space.is_full is is_full
    ask.plain(b"x")
    leader.run()
    assert len(ask.ranges) == 1


def test_staged_bytes_count_as_written(leader):
    ask = Asker(leader)
    leader.room(RESERVE + (3 << 20))
    leader.stalled = True
    accepted = 0
    with pytest.raises(DiskFullError):  # noqa: PT012 - which of them is refused is the question
        for _ in range(10):
            ask.plain(bytes(1 << 20))
            leader.run()
            accepted += 1
    assert 1 <= accepted <= 3
    leader.stalled = False
    leader.run()
    assert len(ask.ranges) == accepted


def test_staged_bytes_of_other_groups_count(leader, tmp_path):
    with leading(tmp_path / "other") as other:
        leader.room(RESERVE + (3 << 20), guards=[leader.replica.space, other.replica.space])
        other.stalled = True
        assert not leader.replica.space.is_full
        ask = Asker(other)
        for _ in range(3):
            ask.plain(bytes(1 << 20))
            other.run()
        assert leader.replica.space.is_full
        assert not other.replica.space.is_full
        other.stalled = False


def test_control_entries_may_use_reserve(leader):
    ask = Asker(leader)
    ask.attempt(TRANSACTION, "a", b"row")
    leader.run()
    leader.room(RESERVE // 2)
    ask.transactions.abort(TRANSACTION, ask.answers.append)
    leader.run()
    assert not leader.replica.tables.transactions.open
    assert len(ask.ranges) == 2


def test_no_reserve_means_no_rejection(leader):
    leader.replica.space = SpaceGuard("g", leader.log, 0)
    leader.room(0)
    ask = Asker(leader)
    ask.plain(b"x")
    leader.run()
    assert len(ask.ranges) == 1


def responses(node, message):
    node.sent.clear()
    node.replica.step(message)
    node.run()
    return list(node.sent)


@pytest.mark.parametrize(
    ("room", "nbytes", "accepted"),
    [
        pytest.param(RESERVE * 2, 1 << 20, True, id="room"),
        pytest.param(RESERVE - 1, 1 << 20, True, id="large message on most of the reserve"),
        pytest.param(RESERVE // 2 - 1, 1 << 20, False, id="not a large one on half of the reserve"),
        pytest.param(RESERVE // 2 - 1, LIMITS.small_message_bytes, True, id="a small one"),
        pytest.param(RESERVE // 8, LIMITS.small_message_bytes, False, id="not on the last of it"),
    ],
)
def test_full_follower_accepts_small_messages_only(follower, room, nbytes, accepted):
    follower.room(room)
    found = responses(follower, entries(bytes(nbytes - 48)))
    assert [response.match_index for response in found] == ([0] if accepted else [])
    assert follower.log.last_index() == (0 if accepted else -1)
    assert not follower.failures


def test_full_follower_still_follows_and_recovers(follower):
    follower.room(RESERVE * 2)
    responses(follower, entries(bytes(52)))
    follower.room(RESERVE // 4)
    beat = Heartbeat(sender=NodeId("n1"), target=NodeId("n0"), term=Term(1), commit_index=Index(0), round=7)
    assert [type(response) for response in responses(follower, beat)] == [HeartbeatResponse]
    assert follower.replica.readable_end == 1
    large = entries(bytes((1 << 20) - 48), first=1, prev_term=1, position=100)
    assert responses(follower, large) == []
    probe = entries(first=2, prev_term=1)
    assert responses(follower, probe) == [], "else the leader would send the large one again and again"
    (known,) = responses(follower, entries(first=1, prev_term=1))
    assert isinstance(known, AppendEntriesResponse)
    assert known.accepted
    follower.room(RESERVE * 2)
    assert [response.accepted for response in responses(follower, probe)] == [False], "now it reports its gap"
    assert [response.match_index for response in responses(follower, large)] == [1]


def test_full_follower_takes_over_no_leadership(follower):
    hand_over = TimeoutNow(sender=NodeId("n1"), target=NodeId("n0"), term=Term(1))
    responses(follower, Heartbeat(sender=NodeId("n1"), target=NodeId("n0"), term=Term(1), commit_index=-1, round=1))
    follower.room(RESERVE - 1)
    assert responses(follower, hand_over) == []
    follower.room(RESERVE * 2)
    assert {type(message) for message in responses(follower, hand_over)} == {RequestVote}


@pytest.mark.parametrize(("room", "targets"), [(RESERVE * 2, []), (RESERVE - 1, ["n1", "n2"])])
def test_leader_with_full_disk_offers_leadership_to_each_voter(tmp_path, room, targets):
    with Node(tmp_path, ("n0", "n1", "n2")) as node:
        node.lead()
        node.room(RESERVE * 2)
        offered = []

        async def look():
            with ThreadPoolExecutor(1) as executor:
                rounds = DiskRounds(RetentionPolicy(), lambda: [node.replica], executor, lambda _: True)
                node.files.room = DiskSpace(room, 1 << 30)
                await rounds.check_space()
                while len(asyncio.all_tasks()) > 1:  # until no voter takes leadership
                    await asyncio.sleep(0.001)
                    node.run()
                    if (target := node.replica.raft.transferee) not in (None, *offered):
                        offered.append(target)
                    node.acknowledge()
                    node.replica.tick()
                await rounds.close()

        asyncio.run(look())
        assert sorted(offered) == targets
        assert node.replica.is_leader


def fill(replica, free_bytes):
    replica.log.space = lambda: (replica.log.staged_end, DiskSpace(free_bytes, 1 << 40))


def test_leader_with_full_disk_hands_over_to_node_with_space(tmp_path):
    async def scenario():
        options = {"limits": Limits(space_s=0.02), "disk_full_bytes": RESERVE}
        async with ServerGroup(tmp_path, **options) as group, AsyncClient(format_peers(group.peers)) as client:
            await client.append([b"x"])
            leader = await group.leader()
            full = next(node for node in group.nodes if node != leader)
            for node in (full, leader):
                fill(group.hosted(node).replica, RESERVE - 1)
            await client.append([b"y"])
            (third,) = set(group.nodes) - {leader, full}
            await eventually(lambda: group.hosted(third).replica.is_leader)
            metadata = await client.metadata()
            assert {node.node_id for node in metadata.nodes if node.is_disk_full} == {leader, full}
            assert {n.node_id for n in metadata.nodes if 0 < n.disk_free_bytes < RESERVE} == {leader, full}
            assert {n.node_id for n in metadata.nodes if n.disk_size_bytes == 1 << 40} == {leader, full}
            shown = await asyncio.to_thread(command.run_process, "status", "--peers", format_peers(group.peers), code=1)
            assert leader in shown.stderr

    run(scenario())


def test_leader_stays_while_all_disks_are_full(tmp_path):
    async def scenario():
        options = {"limits": Limits(space_s=0.02, disk_full_hand_over_s=0.1), "disk_full_bytes": RESERVE}
        async with ServerGroup(tmp_path, **options) as group:
            await group.leader()
            replicas = {node: group.hosted(node).replica for node in group.nodes}
            for replica in replicas.values():
                fill(replica, RESERVE - 1)
            await eventually(lambda: all(replica.space.is_full for replica in replicas.values()))
            # No node takes the offers; a busy machine may elect another leader meanwhile.
            await eventually(lambda: any(replica.raft.transferee is not None for replica in replicas.values()))
            await group.leader()
            client = await group.client()
            with pytest.raises(DiskFullError):
                await client.append([b"x"])
            for replica in replicas.values():
                fill(replica, 1 << 30)
            await eventually(lambda: not any(replica.space.is_full for replica in replicas.values()))
            async with AsyncClient(format_peers(group.peers)) as retrying:
                await retrying.append([b"x"])

    run(scenario())


def test_space_of_real_disk_is_plausible(tmp_path):
    found = OsFiles().space(tmp_path)
    assert 0 <= found.free_bytes <= found.total_bytes
    assert found.used_ratio(found.total_bytes) == 0
    assert DiskSpace(0, 0).used_ratio(0) == 0


# --- a real node on a small disk ------------------------------------------------------------------------------------


class Disk(SmallDisk):
    """One that is full soon."""

    SIZE = "48m"


@pytest.fixture
def disk(tmp_path):
    found = Disk(tmp_path / "small")
    if refusal := found.refusal() or found.mount():
        pytest.skip(refusal)
    yield found
    found.unmount()


@pytest.fixture
def client(disk):
    peers = format_peers(free_peers(1))
    settings = {
        "--peers": peers,
        "--self-id": "n0",
        "--dir": str(disk.path),
        "--data-segment-bytes": "4MiB",
        "--index-segment-bytes": "64KiB",
        "--preallocate-bytes": "0",
        "--disk-full-bytes": str(RESERVE),
        "--format": "json",
    }
    arguments = [word for pair in settings.items() for word in pair]
    command = [sys.executable, "-m", "dledger_core.cli", "serve", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as node:
        assert json.loads(node.stdout.readline())["node"] == "n0"
        try:
            with Client(peers, timeout_ms=2000) as connected:
                yield connected
            assert node.poll() is None, "the node ended"
        finally:
            node.terminate()
            node.wait(120)
    assert node.returncode == 0


def append_until_full(client):
    for count in range(100):
        try:
            client.append([bytes([count]) * (1 << 20)])
        except DiskFullError:
            return count
    raise AssertionError("it was never full")


@pytest.mark.integration
def test_full_disk_rejects_appends_serves_reads_and_recovers(disk, client):
    assert append_until_full(client) >= 10
    node = client.metadata().nodes[0]
    assert client.read(node.first_index, node.visible_end)["body"][0].as_py()[:1] == b"\0"
    with pytest.raises(DiskFullError) as caught:
        client.append([b"one more"])
    assert caught.value.values["free_bytes"] < RESERVE + RESERVE // 8
    disk.resize("96m").check_returncode()
    assert append_until_full(client) >= 10
    assert client.read(node.first_index, node.first_index + 2)["body"][0].as_py()[:1] == b"\0"

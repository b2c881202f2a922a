"""Changes of members: commands, the steps of any leader, refusals, the admin log."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dledger_core.client.members import GroupMembers
from dledger_core.config import LIMITS
from dledger_core.errors import MemberChangeRefusedError, NotLeaderError
from dledger_core.ids import Index, MemberId, NodeId
from dledger_core.raft import Configuration, ProgressState, ProgressStatus, Promote, Remove
from dledger_core.server.admin_log import FILE_NAME, AdminLog
from dledger_core.server.services.membership import Membership, next_step
from tests.support.faulty_files import FaultyFiles
from tests.support.replica_group import HandDriven, ReplicaGroup

N0, N1, N2, NEW = map(MemberId, ("n0", "n1", "n2", "n2/new"))
ADDRESS = "10.0.0.9:7000"


def progress(*, is_active: bool = True, is_caught_up: bool = True) -> ProgressStatus:
    return ProgressStatus(Index(9), Index(10), ProgressState.REPLICATE, is_active, is_caught_up, 0, 0)


REPLACING = Configuration(frozenset((N0, N1, N2)), frozenset((NEW,)), promote=frozenset((NEW,)), replaces={NEW: N2})
REMOVED = Configuration(frozenset((N0, N1)), frozenset((NEW,)), promote=frozenset((NEW,)), replaces={NEW: N2})
ADDED = Configuration(frozenset((N0, N1)), frozenset((NEW,)), promote=frozenset((NEW,)))
LEARNING = Configuration(frozenset((N0, N1)), frozenset((NEW,)))


@pytest.mark.parametrize(
    ("configuration", "old_is_active", "is_caught_up", "expected"),
    [
        (ADDED, False, False, None),
        (ADDED, False, True, Promote(NEW)),
        (LEARNING, False, True, None),
        (REPLACING, False, False, None),
        (REPLACING, False, True, Remove(N2)),
        (REPLACING, True, True, Remove(NEW)),
        (REPLACING, True, False, Remove(NEW)),
        (REMOVED, True, True, Promote(NEW)),
        (REMOVED, False, False, None),
    ],
)
def test_next_step_follows_from_the_configuration_alone(
    configuration: Configuration, old_is_active: bool, is_caught_up: bool, expected: object
) -> None:
    known = {N1: progress(), N2: progress(is_active=old_is_active), NEW: progress(is_caught_up=is_caught_up)}
    assert next_step(configuration, known) == expected


def test_replacement_ends_when_the_old_store_leads() -> None:
    assert next_step(REPLACING, {N0: progress(), N1: progress(), NEW: progress()}) == Remove(NEW)


class Cluster(ReplicaGroup):
    """A group with the membership service of each member.

    Attributes:
        waiting: node id → (store, address) that ``admit`` finds.
    """

    def __init__(self, directory: Path, voters: int = 3) -> None:
        super().__init__(voters)
        self.directory = directory
        self.ticks = 0
        self.waiting: dict[str, tuple[str, str]] = {}
        self.services = {node: self._service(member) for node, member in self.members.items()}

    def _service(self, member: HandDriven) -> Membership:
        async def admit(node: NodeId, address: str | None, configuration: Configuration) -> tuple[str, str]:
            del address, configuration
            store, reached = self.waiting[node]
            self.join(MemberId(f"{node}/{store}"))
            return store, reached

        async def transfer(target: NodeId) -> None:
            member.replica.leadership.transfer(target)
            for _ in range(20):
                await self.step()

        log = AdminLog(self.directory / member.node_id)
        return Membership(member.replica, admit, log, transfer, LIMITS, lambda: self.ticks * 0.05)

    def join(self, member: MemberId) -> None:
        """Start a store that knows nothing of its group."""
        self.files[NodeId(member)] = FaultyFiles()
        found = HandDriven(Path("/store"), voters=(), files=self.files[NodeId(member)], node_id=member)
        self.members[NodeId(member)] = found
        self.services[NodeId(member)] = self._service(found)

    async def step(self) -> None:
        """Let everything take its course for one tick."""
        self.ticks += 1
        self.tick()
        for service in self.services.values():
            service.take_next_step()
        for _ in range(3):
            await asyncio.sleep(0)
        self.deliver()

    async def when(self, condition: Callable[[], bool]) -> None:
        for _ in range(3000):
            if condition():
                return
            await self.step()
        raise AssertionError("this never became true")

    async def led(self) -> tuple[HandDriven, Membership]:
        await self.when(lambda: any(member.replica.leader_ready for member in self.running))
        found = max(self.running, key=lambda m: (m.replica.leader_ready, m.replica.soft_state.term))
        for _ in range(30):  # all others are heard
            await self.step()
        return found, self.services[found.node_id]

    async def done(self, change: Awaitable[GroupMembers]) -> GroupMembers:
        task = asyncio.ensure_future(change)
        await self.when(task.done)
        return task.result()

    async def refusal(self, change: Awaitable[GroupMembers]) -> str:
        """Return the reason for which a change is refused, with nothing changed."""
        before = self.configuration()
        with pytest.raises(MemberChangeRefusedError) as caught:
            await self.done(change)
        assert self.configuration() == before
        return caught.value.reason

    def follower(self, leader: HandDriven) -> NodeId:
        return NodeId(next(node for node in ("n0", "n1", "n2") if node != leader.node_id))

    async def lose(self, leader: HandDriven) -> NodeId:
        """Lose a follower's node, and wait until the leader knows."""
        lost = self.follower(leader)
        del self.members[lost], self.services[lost]
        await self.when(lambda: not self.is_active(leader, lost))
        return lost

    def is_active(self, leader: HandDriven, node: NodeId) -> bool:
        return leader.replica.raft.status().progress[MemberId(node)].is_active

    def actions(self) -> list[dict[str, Any]]:
        lines = [line for path in self.directory.rglob(FILE_NAME) for line in path.read_text().splitlines()]
        return sorted((json.loads(line) for line in lines), key=lambda action: action["time"])

    def configuration(self) -> Configuration:
        leader = max(self.running, key=lambda m: (m.replica.is_leader, m.replica.soft_state.term))
        return leader.replica.raft.configuration


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path)


async def test_added_node_becomes_voter_once_it_has_caught_up(cluster: Cluster) -> None:
    leader, service = await cluster.led()
    for number in range(20):
        cluster.append(leader, bytes([number]))
    cluster.waiting["n3"] = "store", ADDRESS
    report = await cluster.done(service.add(NodeId("n3"), ADDRESS, learner=False, who="someone"))
    new = MemberId("n3/store")
    assert report.warning is not None, "four voters survive no more failures than three"
    (added,) = [each for each in report.members if each.store_uuid == "store"]
    assert (added.role, added.is_promoted) == ("learner", True)
    await cluster.when(lambda: new in cluster.configuration().voters)
    await cluster.when(lambda: len(cluster.actions()) == 2)
    assert cluster.lost(cluster.members[NodeId(new)]) == []
    found = [(each["who"], each["command"], each["outcome"]) for each in cluster.actions()]
    assert found == [
        ("someone", f"add n3 --address {ADDRESS}", "committed"),
        ("leader", "promote n3/store", "committed"),
    ]


@pytest.mark.parametrize("leader_changes", [False, True])
async def test_dead_voter_is_replaced_in_three_entries_by_any_leader(cluster: Cluster, leader_changes: bool) -> None:
    leader, service = await cluster.led()
    dead = await cluster.lose(leader)
    cluster.waiting[dead] = "new", ADDRESS
    report = await cluster.done(service.replace(dead, None, who="someone"))
    new = MemberId(f"{dead}/new")
    assert [each.role for each in report.members if each.store_uuid == "new"] == ["learner"]
    assert cluster.configuration().replaces == {new: dead}
    if leader_changes:
        leader.replica.leadership.transfer(next(n for n in cluster.members if n not in (leader.node_id, new)))
    seen = []
    for _ in range(3000):
        configuration = cluster.configuration()
        if configuration not in seen:
            seen.append(configuration)
        if new in configuration.voters and not any(m.replica.raft.status().is_change_pending for m in cluster.running):
            break
        await cluster.step()
    changes = [len(before.voters ^ after.voters) for before, after in pairwise(seen)]
    assert max(changes) == 1, "no entry changes two voters"
    assert MemberId(dead) not in cluster.configuration().members
    assert cluster.configuration().addresses[new] == ADDRESS


async def test_replacement_is_called_off_when_the_old_store_answers(cluster: Cluster) -> None:
    leader, service = await cluster.led()
    cut = cluster.follower(leader)
    new = MemberId(f"{cut}/new")
    cluster.drop = lambda message: cut in (message.sender, message.target) or new in (message.sender, message.target)
    await cluster.when(lambda: not cluster.is_active(leader, cut))
    cluster.waiting[cut] = "new", ADDRESS
    await cluster.done(service.replace(cut, None, who="someone"))
    assert new in cluster.configuration().learners
    cluster.drop = lambda message: new in (message.sender, message.target)
    await cluster.when(lambda: new not in cluster.configuration().members)
    assert cluster.configuration().voters == {N0, N1, N2}


async def test_removed_leader_transfers_leadership_first(cluster: Cluster) -> None:
    leader, service = await cluster.led()
    with pytest.raises(NotLeaderError):
        await cluster.done(service.remove(NodeId(leader.node_id), who="someone"))
    successor, other = await cluster.led()
    assert successor is not leader
    report = await cluster.done(other.remove(NodeId(leader.node_id), who="someone"))
    assert leader.node_id not in [each.node_id for each in report.members]


Ask = Callable[[Membership, NodeId], Awaitable[GroupMembers]]
REFUSED: dict[str, tuple[Ask, str]] = {
    "add a member": (lambda service, node: service.add(node, ADDRESS, learner=False, who="x"), "already-member"),
    "replace a member that answers": (lambda service, node: service.replace(node, None, who="x"), "still-active"),
    "replace another node": (lambda service, _: service.replace(NodeId("n9"), None, who="x"), "unknown-member"),
    "remove another node": (lambda service, _: service.remove(NodeId("n9"), who="x"), "unknown-member"),
    "promote another node": (lambda service, _: service.promote(NodeId("n9"), who="x"), "unknown-member"),
    "promote a voter": (lambda service, node: service.promote(node, who="x"), "unknown-member"),
}
"""Refusals by the name of a node; the other reasons are those of the core, in ``tests/raft``."""


@pytest.mark.parametrize("asked", REFUSED)
async def test_refusals_name_their_reason_and_change_nothing(cluster: Cluster, asked: str) -> None:
    leader, service = await cluster.led()
    ask, reason = REFUSED[asked]
    assert await cluster.refusal(ask(service, cluster.follower(leader))) == reason


async def test_pending_change_refuses_another_and_shows_the_voters_before(cluster: Cluster) -> None:
    leader, service = await cluster.led()
    follower, before = cluster.follower(leader), cluster.configuration()
    with pytest.raises(NotLeaderError):
        cluster.services[follower].report()
    for node in cluster.members.keys() - {leader.node_id}:
        del cluster.members[node], cluster.services[node]
    leader.replica.propose_change(Remove(MemberId(follower)))
    assert await cluster.refusal(service.remove(follower, who="x")) == "change-pending"
    assert set(service.report().voters_before) == before.voters


@pytest.mark.parametrize("learner", [False, True], ids=["to be promoted", "learner"])
async def test_learner_that_lost_its_disk_is_replaced(cluster: Cluster, learner: bool) -> None:
    _, service = await cluster.led()
    cluster.waiting["n3"] = "lost", ADDRESS
    cluster.drop = lambda message: "n3/lost" in (message.sender, message.target)
    await cluster.done(service.add(NodeId("n3"), ADDRESS, learner=learner, who="someone"))
    again = service.add(NodeId("n3"), ADDRESS, learner=learner, who="someone")
    assert await cluster.refusal(again) == "already-member"
    assert await cluster.refusal(service.replace(NodeId("n3"), None, who="someone")) == "no-change"
    cluster.waiting["n3"] = "new", ADDRESS
    await cluster.done(service.replace(NodeId("n3"), None, who="someone"))
    assert MemberId("n3/lost") not in cluster.configuration().members
    new = MemberId("n3/new")
    if learner:
        assert new in cluster.configuration().learners - cluster.configuration().promote
    else:
        await cluster.when(lambda: cluster.configuration().is_voter(new))


async def test_replacement_that_lost_its_disk_is_replaced(cluster: Cluster) -> None:
    leader, service = await cluster.led()
    lost = await cluster.lose(leader)
    cluster.drop = lambda message: f"{lost}/lost" in (message.sender, message.target)
    for store in ("lost", "new"):
        cluster.waiting[lost] = store, ADDRESS
        await cluster.done(service.replace(lost, None, who="someone"))
    await cluster.when(lambda: cluster.configuration().is_voter(MemberId(f"{lost}/new")))
    assert len(cluster.configuration().members) == 3


async def test_change_that_a_majority_does_not_answer_is_refused_and_recorded(cluster: Cluster) -> None:
    leader, service = await cluster.led()
    cluster.waiting["n3"] = "store", ADDRESS
    followers = [node for node in ("n0", "n1", "n2") if node != leader.node_id]
    cluster.drop = lambda message: message.sender in followers
    await cluster.when(
        lambda: (
            not any(found.is_active for found in leader.replica.raft.status().progress.values())
            or not leader.replica.is_leader
        )
    )
    if leader.replica.is_leader:
        change = service.add(NodeId("n3"), ADDRESS, learner=True, who="someone")
        assert await cluster.refusal(change) == "majority-not-active"
        (action,) = cluster.actions()
        assert action["before"] == action["after"]
        assert "MEMBER_CHANGE_REFUSED" in action["outcome"]


async def test_leader_records_a_new_address_but_no_loopback_one(cluster: Cluster) -> None:
    leader, service = await cluster.led()
    follower = cluster.follower(leader)
    service.address_reported(follower, "127.0.0.1:1")
    service.address_reported(NodeId(leader.node_id), "[::1]:1")
    service.address_reported(follower, "localhost:1")
    for _ in range(100):
        await cluster.step()
    assert cluster.configuration().addresses == {}
    service.address_reported(follower, ADDRESS)
    await cluster.when(lambda: cluster.configuration().addresses == {follower: ADDRESS})
    index = leader.replica.raft.status().configuration_index
    service.address_reported(follower, ADDRESS)
    for _ in range(100):
        await cluster.step()
    assert leader.replica.raft.status().configuration_index == index


async def test_lag_and_time_left_of_a_learner_are_reported(cluster: Cluster) -> None:
    leader, service = await cluster.led()
    cluster.waiting["n3"] = "store", ADDRESS
    cluster.drop = lambda message: "n3/store" in (message.sender, message.target)
    cluster.append(leader, bytes(1000))
    report = await cluster.done(service.add(NodeId("n3"), ADDRESS, learner=False, who="someone"))
    (new,) = [each for each in report.members if each.store_uuid == "store"]
    assert (new.is_active, new.match_index) == (False, -1)
    assert new.lag_entries == leader.replica.raft.last_index + 1
    assert new.lag_bytes == leader.log.staged_end
    (own,) = [each for each in report.members if each.node_id == leader.node_id]
    assert (own.lag_entries, own.lag_bytes, own.seconds_left) == (0, 0, 0)

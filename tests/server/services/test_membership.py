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
from tests.support.server_group import run

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

    def configuration(self) -> Configuration:
        leader = max(self.running, key=lambda m: (m.replica.is_leader, m.replica.soft_state.term))
        return leader.replica.raft.configuration


def actions(directory: Path) -> list[dict[str, Any]]:
    lines = [line for path in directory.rglob(FILE_NAME) for line in path.read_text().splitlines()]
    return sorted((json.loads(line) for line in lines), key=lambda action: action["time"])


def reason_of(caught: pytest.ExceptionInfo[MemberChangeRefusedError]) -> str:
    return caught.value.reason


def test_added_node_becomes_voter_once_it_has_caught_up(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Cluster(tmp_path)
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
        await cluster.when(lambda: len(actions(tmp_path)) == 2)
        assert cluster.lost(cluster.members[NodeId(new)]) == []
        found = [(each["who"], each["command"], each["outcome"]) for each in actions(tmp_path)]
        assert found == [
            ("someone", f"add n3 --address {ADDRESS}", "committed"),
            ("leader", "promote n3/store", "committed"),
        ]

    run(work())


@pytest.mark.parametrize("leader_changes", [False, True])
def test_dead_voter_is_replaced_in_three_entries_by_any_leader(tmp_path: Path, leader_changes: bool) -> None:
    async def work() -> None:
        cluster = Cluster(tmp_path)
        leader, service = await cluster.led()
        dead = next(node for node in ("n0", "n1", "n2") if node != leader.node_id)
        del cluster.members[NodeId(dead)], cluster.services[NodeId(dead)]
        await cluster.when(lambda: not leader.replica.raft.status().progress[MemberId(dead)].is_active)
        cluster.waiting[dead] = "new", ADDRESS
        report = await cluster.done(service.replace(NodeId(dead), None, who="someone"))
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
            if new in configuration.voters and not any(
                m.replica.raft.status().is_change_pending for m in cluster.running
            ):
                break
            await cluster.step()
        changes = [len(before.voters ^ after.voters) for before, after in pairwise(seen)]
        assert max(changes) == 1, "no entry changes two voters"
        assert MemberId(dead) not in cluster.configuration().members
        assert cluster.configuration().addresses[new] == ADDRESS

    run(work())


def test_replacement_is_called_off_when_the_old_store_answers(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Cluster(tmp_path)
        leader, service = await cluster.led()
        cut = next(node for node in ("n0", "n1", "n2") if node != leader.node_id)
        new = MemberId(f"{cut}/new")
        cluster.drop = lambda message: (
            cut in (message.sender, message.target) or new in (message.sender, message.target)
        )
        await cluster.when(lambda: not leader.replica.raft.status().progress[MemberId(cut)].is_active)
        cluster.waiting[cut] = "new", ADDRESS
        await cluster.done(service.replace(NodeId(cut), None, who="someone"))
        assert new in cluster.configuration().learners
        cluster.drop = lambda message: new in (message.sender, message.target)
        await cluster.when(lambda: new not in cluster.configuration().members)
        assert cluster.configuration().voters == {N0, N1, N2}

    run(work())


def test_removed_leader_transfers_leadership_first(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Cluster(tmp_path)
        leader, service = await cluster.led()
        with pytest.raises(NotLeaderError):
            await cluster.done(service.remove(NodeId(leader.node_id), who="someone"))
        successor, other = await cluster.led()
        assert successor is not leader
        report = await cluster.done(other.remove(NodeId(leader.node_id), who="someone"))
        assert leader.node_id not in [each.node_id for each in report.members]

    run(work())


def test_refusals_name_their_reason_and_change_nothing(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Cluster(tmp_path)
        leader, service = await cluster.led()
        follower = NodeId(next(node for node in ("n0", "n1", "n2") if node != leader.node_id))
        before = cluster.configuration()
        refused = {
            "already-member": lambda: service.add(follower, ADDRESS, learner=False, who="x"),
            "still-active": lambda: service.replace(follower, None, who="x"),
            "unknown-member": lambda: service.remove(NodeId("n9"), who="x"),
        }
        for reason, change in refused.items():
            with pytest.raises(MemberChangeRefusedError) as caught:
                await cluster.done(change())
            assert reason_of(caught) == reason
        for change in (service.promote, lambda node, who: service.replace(node, None, who=who)):
            with pytest.raises(MemberChangeRefusedError) as caught:
                await cluster.done(change(NodeId("n9"), who="x"))
            assert reason_of(caught) == "unknown-member"
        with pytest.raises(NotLeaderError):
            cluster.services[follower].report()
        assert cluster.configuration() == before

        for node in ("n0", "n1", "n2"):
            if node != leader.node_id:
                del cluster.members[NodeId(node)], cluster.services[NodeId(node)]
        leader.replica.propose_change(Remove(MemberId(follower)))
        with pytest.raises(MemberChangeRefusedError) as caught:
            await service.remove(NodeId(follower), who="x")
        assert reason_of(caught) == "change-pending"
        assert set(service.report().voters_before) == before.voters

    run(work())


@pytest.mark.parametrize("learner", [False, True], ids=["to be promoted", "learner"])
def test_learner_that_lost_its_disk_is_replaced(tmp_path: Path, learner: bool) -> None:
    async def work() -> None:
        cluster = Cluster(tmp_path)
        _, service = await cluster.led()
        cluster.waiting["n3"] = "lost", ADDRESS
        cluster.drop = lambda message: "n3/lost" in (message.sender, message.target)
        await cluster.done(service.add(NodeId("n3"), ADDRESS, learner=learner, who="someone"))
        with pytest.raises(MemberChangeRefusedError):
            await cluster.done(service.add(NodeId("n3"), ADDRESS, learner=learner, who="someone"))
        with pytest.raises(MemberChangeRefusedError) as caught:
            await cluster.done(service.replace(NodeId("n3"), None, who="someone"))
        assert reason_of(caught) == "no-change"
        cluster.waiting["n3"] = "new", ADDRESS
        await cluster.done(service.replace(NodeId("n3"), None, who="someone"))
        assert MemberId("n3/lost") not in cluster.configuration().members
        new = MemberId("n3/new")
        if learner:
            assert new in cluster.configuration().learners - cluster.configuration().promote
        else:
            await cluster.when(lambda: cluster.configuration().is_voter(new))

    run(work())


def test_replacement_that_lost_its_disk_is_replaced(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Cluster(tmp_path)
        leader, service = await cluster.led()
        lost = NodeId(next(node for node in ("n0", "n1", "n2") if node != leader.node_id))
        del cluster.members[lost], cluster.services[lost]
        await cluster.when(lambda: not leader.replica.raft.status().progress[MemberId(lost)].is_active)
        cluster.drop = lambda message: f"{lost}/lost" in (message.sender, message.target)
        for store in ("lost", "new"):
            cluster.waiting[lost] = store, ADDRESS
            await cluster.done(service.replace(lost, None, who="someone"))
        await cluster.when(lambda: cluster.configuration().is_voter(MemberId(f"{lost}/new")))
        assert len(cluster.configuration().members) == 3

    run(work())


def test_change_that_a_majority_does_not_answer_is_refused_and_recorded(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Cluster(tmp_path)
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
            with pytest.raises(MemberChangeRefusedError) as caught:
                await cluster.done(service.add(NodeId("n3"), ADDRESS, learner=True, who="someone"))
            assert reason_of(caught) == "majority-not-active"
            (action,) = actions(tmp_path)
            assert action["before"] == action["after"]
            assert "MEMBER_CHANGE_REFUSED" in action["outcome"]

    run(work())


def test_leader_records_a_new_address_but_no_loopback_one(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Cluster(tmp_path)
        leader, service = await cluster.led()
        follower = NodeId(next(node for node in ("n0", "n1", "n2") if node != leader.node_id))
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

    run(work())


def test_lag_and_time_left_of_a_learner_are_reported(tmp_path: Path) -> None:
    async def work() -> None:
        cluster = Cluster(tmp_path)
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

    run(work())

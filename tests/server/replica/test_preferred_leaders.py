"""The policy of preferred leaders, on cores that the test drives."""

from __future__ import annotations

from typing import Any

from dledger_core.ids import NodeId
from dledger_core.raft import Role
from dledger_core.server.replica.preferred_leaders import PreferredLeaders
from tests.support.group import CONFIG, N0, N1, N2, NODES, Group


class PreferringGroup(Group):
    """Three members with the same preferred leaders, or with those that ``each`` has."""

    def __init__(self, *preferred: NodeId, each: dict[NodeId, tuple[NodeId, ...]] | None = None) -> None:
        super().__init__(3)
        found = each or dict.fromkeys(NODES[:3], preferred)
        self._policies = {
            node: PreferredLeaders(member.raw, node, found[node], CONFIG.election_ticks_min)
            for node, member in self.members.items()
        }
        self._led: dict[NodeId, int] = {}

    def tick_member(self, member: Any) -> None:
        super().tick_member(member)
        if member.role is Role.LEADER:
            policy = self._policies[member.node_id]
            if self._led.get(member.node_id) != member.term:
                self._led[member.node_id] = member.term
                policy.lead()
            if (successor := policy.tick()) is not None:
                member.raw.transfer_leadership(successor)


def test_best_reachable_preferred_node_gets_leadership() -> None:
    group = PreferringGroup(N2, N0, N1)
    group.elect(N1)
    group.drop = lambda message: N2 in (message.target, message.sender)
    group.tick(30 * CONFIG.election_ticks_min)
    assert group[N0].role is Role.LEADER
    group.drop = lambda message: False
    group.tick(60 * CONFIG.election_ticks_min)
    assert group[N2].role is Role.LEADER
    term = group[N2].term
    group.tick(10 * CONFIG.election_ticks_max)
    assert (group[N2].role, group[N2].term) == (Role.LEADER, term)


def test_preferred_node_gets_leadership_at_once_after_an_election() -> None:
    group = PreferringGroup(N2)
    group.elect(N0)
    group.tick(2 * CONFIG.election_ticks_min)
    assert group[N2].role is Role.LEADER


def test_preferred_node_waits_minutes_after_a_transfer_by_hand() -> None:
    group = PreferringGroup(N2)
    group.elect(N2).raw.transfer_leadership(N0)
    group.deliver()
    term = group[N0].term
    group.tick(500 * CONFIG.election_ticks_min)
    assert (group[N0].role, group[N0].term) == (Role.LEADER, term)
    group.tick(300 * CONFIG.election_ticks_min)
    assert group[N2].role is Role.LEADER


def test_different_preferences_do_not_transfer_leadership_in_a_circle() -> None:
    group = PreferringGroup(each={N0: (N1,), N1: (N2,), N2: (N0,)})
    group.elect(N0)
    group.tick(500 * CONFIG.election_ticks_min)
    assert (group[N1].role, group[N1].term) == (Role.LEADER, 2)

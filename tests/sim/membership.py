"""Changes of members in a simulated group: what people and the node's own driver ask leaders for, at random.

Half of the seeds have none. The others start with two to five voters and spare stores, and a store may be lost
permanently. All draws have a source of their own: a seed without changes has the same other faults as before.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dledger_core.errors import DLedgerError, MemberChangeRefusedError
from dledger_core.ids import NodeId
from dledger_core.raft import AddLearner, Configuration, MemberChange, Promote, Remove, SetAddress, Status

if TYPE_CHECKING:
    from tests.sim.simulator import Simulator

SPARES = 4
VOTERS_MAX = 6


@dataclass(frozen=True, slots=True)
class MembershipMix:
    """How the members of a run change.

    Attributes:
        voters: voters at the start.
        rate: probability of a request in each interval of the schedule.
        eager: requests to each new leader, as soon as it leads.
        loss: probability that a request loses the store of a voter instead.
    """

    voters: int
    rate: float
    eager: int
    loss: float


def draw_membership(seed: int) -> MembershipMix | None:
    """Draw whether and how the members of a run change."""
    source = random.Random(f"{seed}/membership")
    if source.random() < 0.5:
        return None
    return MembershipMix(
        voters=source.choice((2, 3, 4, 4, 5)),
        rate=source.choice((0.1, 0.4, 0.8)),
        eager=source.choice((0, 3, 6)),
        loss=source.choice((0.0, 0.05)),
    )


def next_step(status: Status) -> MemberChange | None:
    """Return the next step of what the configuration says: promotions, and removals before them."""
    configuration = status.configuration
    for learner in sorted(configuration.promote):
        progress = status.progress.get(learner)
        if progress is not None and progress.is_caught_up:
            replaced = configuration.replaces.get(learner)
            return Remove(replaced) if replaced in configuration.voters else Promote(learner)
    return None


class MemberChanges:
    """Asks leaders for changes; ``lost`` has the stores that never return."""

    def __init__(self, sim: Simulator, mix: MembershipMix) -> None:
        self._sim = sim
        self.mix = mix
        self.lost: set[NodeId] = set()

    def request(self, source: random.Random) -> None:
        """Ask some leader for a change, or lose a store."""
        leaders = [member for member in self._sim.members.values() if member.leads]
        if not leaders:
            return
        leader = source.choice(leaders)
        if source.random() < self.mix.loss and self._may_lose():
            self._lose(source.choice(sorted(leader.core.status().configuration.voters)))
        else:
            leader.input(lambda: self._ask(leader, source))

    def on_leader(self, leader: Any) -> None:
        """Ask a new leader at once, as the driver of a node does that continues what it finds."""
        for _ in range(self.mix.eager if self._sim.faults_on else 0):
            leader.later(self._sim.source.randrange(1, 60), lambda: self._ask_soon(leader))

    def _ask_soon(self, leader: Any) -> None:
        if leader.leads and self._sim.faults_on:
            leader.input(lambda: self._ask(leader, random.Random(self._sim.source.getrandbits(32))))

    def _ask(self, leader: Any, source: random.Random) -> None:
        status = leader.core.status()
        change = next_step(status) if source.random() < 0.5 else None
        change = change or self._draw(status, leader.node_id, source)
        if change is None:
            return
        kind = type(change).__name__
        try:
            leader.core.propose_change(change)
        except MemberChangeRefusedError as refused:
            self._sim.counters[f"changes refused: {refused.reason}"] += 1
        except DLedgerError:
            self._sim.counters["changes refused"] += 1
        else:
            self._sim.counters[f"changes: {kind}"] += 1
            self._sim.note("change", leader.node_id, change)
            if isinstance(change, AddLearner):
                self._admit(change.member)
            elif isinstance(change, Promote):
                self._sim.counters["voters replaced"] += change.member in status.configuration.replaces

    def _draw(self, status: Status, leader: NodeId, source: random.Random) -> MemberChange | None:
        configuration = status.configuration
        voters, learners = sorted(configuration.voters), sorted(configuration.learners)
        others = sorted(set(self._sim.names) - set(configuration.members) - self.lost)
        gone = sorted(self.lost & configuration.voters)
        if gone:
            # Until it is removed no other change is asked for: two voters less may be a majority less.
            waiting = gone[0] not in configuration.replaces.values() and others and source.random() < 0.7
            return AddLearner(source.choice(others), "a:1", replaces=gone[0]) if waiting else Remove(gone[0])
        draw = source.random()
        if draw < 0.4 and others and len(configuration.members) < VOTERS_MAX:
            replaced = source.choice(voters) if source.random() < 0.3 else None
            return AddLearner(source.choice(others), "a:1", promote=source.random() < 0.7, replaces=replaced)
        if draw < 0.85:
            return Remove(source.choice(voters if source.random() < 0.8 else configuration.members))
        if draw < 0.95 and learners:
            return Promote(source.choice(learners))
        return SetAddress(leader, f"a:{source.randrange(1, 9)}") if len(voters) > 1 else None

    def _admit(self, member: NodeId) -> None:
        """Start a store that has never been a member."""
        store = self._sim.members[member]
        if not store.life:
            self._sim.start(store)

    def _may_lose(self) -> bool:
        """Whether the group certainly survives the loss of one voter: no smaller configuration is about to count."""
        committed = self._sim.checker.configuration
        started = [member for member in self._sim.members.values() if member.life]
        newest = [member.disk.configurations()[-1] for member in started]
        newest += [member.core._state.log.configurations.in_force for member in started if member.up]
        settled = all(found.index <= committed.index for found in newest)
        return settled and len(committed.configuration.voters) >= 3 and not self.lost & committed.configuration.voters

    def _lose(self, member: NodeId) -> None:
        self.lost.add(member)
        store = self._sim.members[member]
        self._sim.counters["stores lost"] += 1
        if store.running:
            store.die("crashes")


def founded(names: list[NodeId], voters: int) -> Configuration:
    """Return the configuration of the founding."""
    return Configuration(frozenset(names[:voters]))

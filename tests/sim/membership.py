"""Changes of members in a simulated group: what people and the node's own driver ask leaders for, at random.

Half of the seeds have none. The others start with two to five voters and spare stores, and a store may be lost
permanently. All draws have a source of their own: a seed without changes has the same other faults as before.

A complete replica that is lost is a disk that was emptied: its node has a new store from then on, another member, which
waits until a change admits it.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dledger_core.bootstrap import GROUP_VERSION
from dledger_core.errors import DLedgerError, MemberChangeRefusedError
from dledger_core.ids import MemberId, node_of, store_of
from dledger_core.raft import (
    AddLearner,
    Configuration,
    ConfigurationInForce,
    MemberChange,
    Promote,
    Remove,
    SetAddress,
    Status,
)
from dledger_core.server.services import membership
from tests.sim.bootstrap import ADDRESS

if TYPE_CHECKING:
    from tests.sim.simulator import Simulator

SPARES = 4
MEMBERS_MAX = 7


@dataclass(frozen=True, slots=True)
class MembershipMix:
    """How the members of a run change.

    Attributes:
        voters: voters at the start.
        rate: probability of a request in each interval of the schedule.
        eager: requests to each new leader, as soon as it leads.
        loss: probability that a request loses the store of a voter instead.
        emptied: the same for complete replicas, whose new store the driver of leaders admits to the end.
        file_loss: probability that the file of members is lost, in each interval.
        split: probability that the network splits when a member becomes leader or appends a change, before the others
            receive it. Dangerous are the changes that some members have and others have not.
        lost_ends: probability that a member loses the end of its log, in each interval of the schedule.
    """

    voters: int
    rate: float
    eager: int
    loss: float
    emptied: float
    file_loss: float
    split: float
    lost_ends: float


STILL = MembershipMix(5, 0.0, 0, 0.0, 0.0, 0.0, 0.0, 0.0)
"""The members change only as an operator wants it, who replaces lost ones. Of five, more than one may survive."""


def draw_membership(seed: int) -> MembershipMix | None:
    """Draw whether and how the members of a run change."""
    source = random.Random(f"{seed}/membership")
    if source.random() < 0.5:
        return None
    return MembershipMix(
        voters=source.choice((2, 3, 4, 4, 4, 5)),
        rate=source.choice((0.1, 0.4, 0.8)),
        eager=source.choice((0, 6, 12)),
        loss=source.choice((0.0, 0.05)),
        emptied=source.choice((0.0, 0.1, 0.3)),
        file_loss=source.choice((0.0, 0.0, 0.05)),
        split=source.choice((0.0, 0.5, 0.9)),
        lost_ends=source.choice((0.0, 0.0, 0.05)),
    )


def next_step(status: Status) -> MemberChange | None:
    """Return the next step of a replacement that continues although the old store responds."""
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
        self.lost: set[MemberId] = set()

    def request(self, source: random.Random) -> None:
        """Ask some leader for a change, or lose a store."""
        leaders = [member for member in self._sim.members.values() if member.leads]
        if not leaders:
            return
        leader = source.choice(leaders)
        loss = self.mix.emptied if self._sim.member_type.drives_changes else self.mix.loss
        if source.random() < loss and self._may_lose():
            self.lose(source.choice(sorted(leader.core.status().configuration.voters)))
        else:
            leader.input(lambda: self._ask(leader, source))

    def on_leader(self, leader: Any) -> None:
        """Ask a new leader at once, as the driver of a node does that continues what it finds."""
        if self._sim.strikes("split"):
            self._split(leader, ("halves",))
        for _ in range(self.mix.eager if self._sim.faults_on else 0):
            leader.later(self._sim.source.randrange(1, 150), lambda: self._ask_soon(leader))

    def _ask_soon(self, leader: Any) -> None:
        if leader.leads and self._sim.faults_on:
            leader.input(lambda: self._ask(leader, random.Random(self._sim.source.getrandbits(32))))

    def drive(self, leader: Any) -> None:
        """Take the step that is due without a request, as the driver of a leader does."""
        if not leader.core.configuration.promote:
            return
        status = leader.core.status()
        change = None if status.is_change_pending else membership.next_step(status.configuration, status.progress)
        if change is not None:
            self._propose(leader, change, status)

    def _ask(self, leader: Any, source: random.Random) -> None:
        status = leader.core.status()
        # Until a lost store is removed no other change is asked for: two voters less may be a majority less.
        gone = sorted(self.lost & status.configuration.voters)
        change = next_step(status) if source.random() < 0.5 and not gone else None
        change = change or (self._replace(status, gone[0], source) if gone else self._draw(status, leader, source))
        if change is not None:
            self._propose(leader, change, status)

    def _propose(self, leader: Any, change: MemberChange, status: Status) -> None:
        kind = type(change).__name__
        try:
            leader.propose_change(change)
        except MemberChangeRefusedError as refused:
            self._sim.counters[f"changes refused: {refused.reason}"] += 1
        except DLedgerError:
            self._sim.counters["changes refused"] += 1
        else:
            self._sim.counters[f"changes: {kind}"] += 1
            self._sim.note("change", leader.node_id, change)
            if self._sim.chance(0.5) and self._sim.strikes("split"):
                self._split(leader, ("isolate", "cannot send"))
            if isinstance(change, AddLearner):
                self._admit(change.member)
            elif isinstance(change, Promote):
                self._sim.counters["voters replaced"] += change.member in status.configuration.replaces

    def _split(self, leader: Any, kinds: tuple[str, ...]) -> None:
        self._sim.network.partition(self._sim.source.choice(kinds), leader.node_id, self._sim.source)

    def _others(self, configuration: Configuration) -> list[MemberId]:
        return sorted(self._sim.members.keys() - set(configuration.members) - self.lost)

    def _replace(self, status: Status, gone: MemberId, source: random.Random) -> MemberChange:
        """Replace a lost store, by a new one of its node if there is one, or just remove it."""
        configuration = status.configuration
        others = self._others(configuration)
        same_node = [other for other in others if node_of(other) == node_of(gone)] or others
        waits = gone not in configuration.replaces.values() and others and source.random() < 0.7
        return AddLearner(source.choice(same_node), "a:1", replaces=gone) if waits else Remove(gone)

    def _draw(self, status: Status, leader: Any, source: random.Random) -> MemberChange | None:
        configuration = status.configuration
        voters, learners = sorted(configuration.voters), sorted(configuration.learners)
        others = self._others(configuration)
        # The size stays near that of the bootstrap: dangerous are even sizes, where a configuration with one voter more
        # or less and another such one may have majorities without a common member.
        few, draw = len(voters) < self.mix.voters, source.random()
        if draw < (0.6 if few else 0.3) and others and len(configuration.members) < MEMBERS_MAX:
            replaced = source.choice(voters) if source.random() < 0.3 else None
            return AddLearner(source.choice(others), "a:1", promote=source.random() < 0.8, replaces=replaced)
        if draw < (0.7 if few else 0.85):
            return Remove(source.choice(voters if source.random() < 0.8 else configuration.members))
        if draw < 0.95 and learners:
            return Promote(source.choice(learners))
        return SetAddress(leader.node_id, f"a:{source.randrange(1, 9)}") if len(voters) > 1 else None

    def may_lose_end(self, member: Any, known: list[ConfigurationInForce]) -> bool:
        """Whether the loss of a member's end loses nothing that is committed, if all goes well.

        Two lost ends at once may lose it, and so may that of the only voter, which continues without.
        """
        others = [other for other in self._sim.members.values() if other is not member]
        alone = known[-1].configuration.is_sole_voter(member.node_id)
        return not (alone or self.lost or any(other.floor is not None for other in others))

    @property
    def has_recovering(self) -> bool:
        """Whether a core alone is a recovering voter."""
        return any(member.floor is not None for member in self._sim.members.values())

    def _admit(self, member: MemberId) -> None:
        """Start a store that has never been a member; one that comes from another log starts once it is there."""
        store = self._sim.members[member]
        if not store.life and not store.comes_from_another_log:
            self._sim.start(store)

    def is_settled(self) -> bool:
        """Whether no configuration is about to count but the committed one, and none of its voters is lost."""
        committed = self._sim.checker.configuration
        started = [member for member in self._sim.members.values() if member.life]
        newest = [member.disk.configurations()[-1] for member in started]
        newest += [member.core.state.log.configurations.in_force for member in started if member.up]
        settled = all(found.index <= committed.index for found in newest)
        return settled and not self.lost & committed.configuration.voters

    def _may_lose(self) -> bool:
        """Whether the group certainly survives the loss of one voter, also once the replaced ones are removed."""
        configuration = self._sim.checker.configuration.configuration
        left = configuration.voters - set(configuration.replaces.values())
        enough = len(left) >= 3 and not self.has_recovering
        return enough and self.is_settled() and self._sim.member_type.may_lose(self._sim)

    def lose(self, member: MemberId) -> None:
        """Lose a store permanently; its node waits with another one."""
        self.lost.add(member)
        store = self._sim.members[member]
        self._sim.counters["stores lost"] += 1
        if store.running:
            store.die("crashes")
        if store_of(member):
            self._sim.empty_disk(node_of(member))


def bootstrapped(names: list[MemberId], voters: int) -> Configuration:
    """Return the configuration of the bootstrap."""
    of_stores = bool(store_of(names[0]))
    addresses = dict.fromkeys(names[:voters], ADDRESS) if of_stores else {}
    return Configuration(frozenset(names[:voters]), addresses=addresses, version=GROUP_VERSION if of_stores else 0)

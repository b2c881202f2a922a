"""One simulated node: the base of every member, and ``CoreMember``, the Raft core alone on a disk that is a list."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, ClassVar

from dledger_core.errors import DLedgerError
from dledger_core.ids import NO_INDEX, Index, MemberId, Term
from dledger_core.raft import (
    Batch,
    ConfigurationInForce,
    Floor,
    HardState,
    LogPointers,
    MemberChange,
    Message,
    RawNode,
    Ready,
    RequestVoteResponse,
    Role,
)
from dledger_core.raft.floor import higher
from tests.sim.lies import tell
from tests.sim.safety import check
from tests.support.group import Snapshots, configuration_entry
from tests.support.memory_store import MemoryStore, Proposal, writes_of

if TYPE_CHECKING:
    from tests.sim.simulator import Simulator

TICK = 10
"""Length of a tick in units of simulated time; a message needs at least one unit."""


class Member:
    """A machine: a disk and a clock that survive, a process that does not.

    Attributes:
        disk: the durable log, batch by batch; for a complete replica a shadow of its files.
        staged: the log in memory.
        up: whether the process participates in its group.
        running: whether there is a process; a complete replica may still repair its store.
        life: the number of starts and crashes; an event of an earlier life has no effect.
        returns: how often its disk was set back; what it sent before is lost.
        core: the Raft core of a member that is up.
    """

    drives_changes: ClassVar[bool] = False
    """Whether a leader takes the steps that a configuration asks for without a request."""
    fault_kinds: ClassVar[tuple[str, ...]] = ()
    """Faults of this kind of member, in addition to those of the simulator."""
    membership_faults: ClassVar[tuple[str, ...]] = ()
    """The same, in runs whose members change."""
    is_moved = waits = comes_from_another_log = False
    """Known to complete replicas only: see ``ReplicaMember``."""
    core: RawNode
    floor: Floor | None = None
    """The floor of a core alone that lost the end of its log; it survives the process."""

    def __init__(self, sim: Simulator, node_id: MemberId) -> None:
        self.sim = sim
        self.node_id = node_id
        self.disk = MemoryStore()
        self.staged = MemoryStore()
        self.life = 0
        self.stalled_until = 0
        self.returns = 0
        self.running = self.up = False

    @staticmethod
    def shared(sim: Simulator) -> object:
        """Return the state of a run that its members share."""
        return None

    @staticmethod
    def name_of(node: int, store: int = 1) -> MemberId:
        """Return the name of a store of a node; of a core alone, a node has only one."""
        del store
        return MemberId(f"n{node}")

    @staticmethod
    def may_lose(sim: Simulator) -> bool:
        """Whether no other fault has cost what only the lost store may have."""
        return True

    @property
    def leads(self) -> bool:
        return self.up and self.core.state.role is Role.LEADER

    def start(self) -> None:
        raise NotImplementedError

    def die(self, how: str) -> None:
        """End the process."""
        raise NotImplementedError

    def die_in_write(self) -> bool:
        """Perhaps let the process end in the middle of one of its next writes; return whether it will."""
        return False

    def calm(self) -> None:
        """Cancel the faults that are about to strike."""

    @property
    def is_damaged(self) -> bool:
        return False

    def check_end(self) -> None:
        """Check the state that a run leaves."""

    def pointers(self) -> LogPointers:
        return self.core.pointers()

    @property
    def readable_end(self) -> int:
        """End (exclusive) of the entries that are committed and durable here."""
        return min(self.core.pointers().commit_index, self.core.durable_index) + 1

    def tick(self) -> None:
        raise NotImplementedError

    def receive(self, message: object) -> None:
        raise NotImplementedError

    def unreachable(self, peer: MemberId) -> None:
        raise NotImplementedError

    def propose_change(self, change: MemberChange) -> None:
        raise NotImplementedError

    def later(self, delay: int, action: Callable[[], object]) -> None:
        """Run ``action`` after ``delay`` units unless the process has ended by then."""
        life = self.life
        self.sim.time.after(delay, lambda: action() if self.life == life else None)

    def input(self, action: Callable[[], object]) -> None:
        """Give the process one input, then check it."""
        if self.up:
            action()
            if self.up:
                self.sim.checker.on_step(self)

    def joined(self) -> None:
        """Participate from now on: check the start, and tick."""
        self.sim.checker.on_start(self)
        period = TICK + self.sim.source.randrange(-1, 2)

        def tick() -> None:
            self.input(self.tick)
            self.later(max(period, self.stalled_until - self.sim.time.now), tick)

        self.later(self.sim.source.randrange(1, TICK + 1), tick)


class CoreMember(Member):
    """The Raft core alone.

    A write takes time. Several Readys wait and become durable in order. A crash keeps a prefix of the waiting writes
    (hard state, truncation, batch, batch, ...), possibly none, and never a part of a batch. No confirmed write is lost.
    """

    fault_kinds = ("late_output", "campaign", "depose", "trim")
    membership_faults = ("lose_end",)

    def __init__(self, sim: Simulator, node_id: MemberId, seed: int) -> None:
        del seed
        super().__init__(sim, node_id)
        self._snapshots = Snapshots(Random(sim.seed).choice((0, 500, 5000)), sim.bootstrapped.voters)
        if node_id in sim.bootstrapped.voters:
            self.disk.in_force_before = ConfigurationInForce(NO_INDEX, sim.bootstrapped)
        self._checkpoint = NO_INDEX
        self.newest_configuration = self.disk.in_force_before.index
        """Index of the newest configuration entry that this disk had; lowered when the entry is truncated."""
        self._unpersisted: deque[Ready] = deque()
        self._proposed: dict[Index, Batch] = {}
        self._disk_free_at = 0

    @staticmethod
    def clients(sim: Simulator) -> list[CoreClient]:
        return [CoreClient(sim)]

    def start(self) -> None:
        self.life += 1
        self.running = self.up = True
        self.staged = self.disk.copy()
        self._unpersisted.clear()
        self._proposed.clear()
        self._disk_free_at = self.stalled_until = self.sim.time.now
        self.core = RawNode(
            member=self.node_id,
            configurations=self.disk.configurations(),
            config=self.sim.mix.raft,
            store=self.disk,
            hard_state=self.disk.hard_state,
            commit_index=self._checkpoint,
            random=self.sim.source,
            noop=lambda _: Proposal(f"noop{self.sim.number()}", 1, 0),
            configuration_entry=configuration_entry,
            snapshot_payloads=self._snapshots,
            floor=self.floor,
            ends_below_members=self.newest_configuration > self.disk.last_index(),
            start_ticks=self.sim.mix.raft.election_ticks_max,
        )
        self._reported_index = self.core.pointers().commit_index
        for other in self.sim.members.values():
            if other.up and other is not self:
                self.core.report_attached(other.node_id)
                other.core.report_attached(self.node_id)
        self.joined()

    def die(self, how: str) -> None:
        """End the process; a prefix of the waiting writes survives."""
        self.sim.counters[how] += 1
        writes = [write for ready in self._unpersisted for write in writes_of(ready)]
        kept = self.sim.source.randrange(len(writes) + 1)
        self.sim.counters["writes lost"] += len(writes) - kept
        for write in writes[:kept]:
            self.disk.write(write)
        self._record_configuration(any(not isinstance(write, HardState) for write in writes[:kept]))
        self.running = self.up = False
        self.life += 1
        self.sim.on_down(self)

    def _record_configuration(self, changed: bool) -> None:
        """Repeat on the disk which configuration is the newest one of its log, if the log changed."""
        if changed:
            self.newest_configuration = self.disk.configurations()[-1].index

    def tick(self) -> None:
        self.core.tick()

    def receive(self, message: object) -> None:
        self.core.step(message)

    def unreachable(self, peer: MemberId) -> None:
        self.core.report_unreachable(peer)

    def propose_change(self, change: MemberChange) -> None:
        self.core.propose_change(change)

    def input(self, action: Callable[[], object]) -> None:
        super().input(action)
        if not self.up or not self.core.has_ready():
            return
        if self.sim.strikes("late_output"):
            self.later(self.sim.source.randrange(1, 8), self._pump)
        else:
            self._pump()

    def _pump(self) -> None:
        while self.core.has_ready():
            ready = self.core.ready()
            self.staged.apply(ready)
            self.sim.on_ready(self, ready)
            self._report(ready)
            self._send(ready.messages)
            self._unpersisted.append(ready)
            if ready.must_persist:
                self._disk_free_at = max(self._disk_free_at, self.sim.time.now) + self.sim.disk_delay()
            self.later(max(0, self._disk_free_at - self.sim.time.now), self._persist)
            self.sim.checker.on_step(self)

    def _report(self, ready: Ready) -> None:
        if ready.floor_changed:
            self.floor = ready.floor
        if ready.soft_state is not None and ready.soft_state.role is not Role.LEADER:
            self._proposed.clear()
        if ready.soft_state is not None and ready.soft_state.role is Role.LEADER and self.sim.changes is not None:
            self.sim.changes.on_leader(self)
        if ready.restart is not None:
            self._reported_index = max(self._reported_index, ready.restart.first_index - 1)
        if ready.committed is None:
            return
        start, end = ready.committed
        self._reported_index = end - 1
        for first_index in [index for index in self._proposed if index < end]:
            batch = self._proposed.pop(first_index)
            check(batch.first_index >= start, "an append is reported twice", batch)
            self.sim.counters["acknowledged"] += 1
            self.sim.checker.on_acknowledged(batch)
        if self.sim.chance(0.2):
            # At most durable_index: above it this disk may have another leader's entries at these indexes.
            self._checkpoint = max(self._checkpoint, min(Index(end - 1), self.core.durable_index))

    def _persist(self) -> None:
        """Make the oldest Ready durable, sometimes several with one sync."""
        if not self._unpersisted:
            return
        number = 0
        for _ in range(self.sim.source.randrange(1, len(self._unpersisted) + 1) if self.sim.chance(0.3) else 1):
            ready = self._unpersisted.popleft()
            self.disk.apply(ready)
            self._record_configuration(bool(ready.batches or ready.restart or ready.truncate_from is not None))
            self._send(ready.persisted_messages)
            number = ready.number
        self.input(lambda: self.core.advance(number))

    def _send(self, messages: tuple[Message, ...]) -> None:
        for message in messages:
            self.sim.checker.on_send(self, message)
            self.sim.send(message, message)

    def propose(self) -> None:
        nbytes = self.sim.source.choice((3, 60, 270, 1200))
        batch = self.core.propose(Proposal(f"p{self.sim.number()}", self.sim.source.randrange(1, 5), nbytes))
        self._proposed[batch.first_index] = batch

    # Faults of the core alone.

    def lie(self, random: Random) -> None:
        """Receive a message that says what cannot be true."""
        self.input(lambda: tell(self, random, self.core.step))

    def campaign(self, random: Random) -> None:
        del random
        self.input(self.core.campaign)

    def depose(self, random: Random) -> None:
        """Receive a vote of another member that is a term ahead."""
        other = random.choice([node for node in self.sim.members if node != self.node_id])
        term = Term(self.core.status().term + 1)
        self.input(
            lambda: self.core.step(
                RequestVoteResponse(sender=other, target=self.node_id, term=term, granted=False, pre=False)
            )
        )

    def lose_end(self, random: Random) -> None:
        """Crash, and lose the end of the log, perhaps with the newest configuration; the hard state is kept."""
        self.die("crashes")
        batches = self.disk.batches
        count = min(random.choice((1, 2, 5, 20)), len(batches) - 1)
        if count < 1 or not self.sim.changes.may_lose_end(self, self.disk.configurations_without(count)):
            return
        self.sim.counters["ends lost"] += 1
        self.sim.checker.lost.append((self.node_id, self.disk.copy()))
        self.disk.write(batches[-count].first_index)
        self.sim.counters["ends lost below the members"] += self.newest_configuration > self.disk.last_index()
        self._checkpoint = min(self._checkpoint, random.choice((NO_INDEX, self.disk.last_index())))
        self.floor = higher(self.floor, Floor(self.disk.hard_state.term))

    def trim(self, random: Random) -> None:
        """Delete committed entries of the disk, also such that another member still needs."""
        # The Ready loop deletes only entries that a Ready reported as committed.
        reported = min(self._reported_index, self.core.durable_index)
        first_index = max(0, reported - random.choice((0, 20, 100)))
        if first_index > self.disk.first_index():
            self.sim.counters["trims"] += 1
            kept = self.disk.trim(Index(first_index))
            self.staged.trim(Index(first_index))
            self._checkpoint = max(self._checkpoint, Index(kept - 1))
            self.input(lambda: self.core.trim(kept))


class CoreClient:
    """Proposes, reads and transfers leadership, mostly at a leader."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim

    def start(self) -> None:
        self._sim.time.after(self._sim.source.randrange(1, 2 * self._sim.client_pause), self._work)

    def _work(self) -> None:
        sim = self._sim
        self.start()
        member = sim.some_member()
        if not member.up:
            return
        draw, target = sim.source.random(), sim.source.choice(tuple(sim.members))
        if draw < 0.8:
            self._call(member, member.propose)
        elif draw < 0.98:
            self._call(member, lambda: self._read(member, sim.number()))
        else:
            self._call(member, lambda: member.core.transfer_leadership(target))

    def _read(self, member: CoreMember, request_id: int) -> None:
        member.core.read_index(request_id)
        self._sim.checker.on_read_asked(request_id)
        self._sim.counters["reads"] += 1

    def _call(self, member: CoreMember, action: Callable[[], None]) -> None:
        def attempt() -> None:
            try:
                action()
            except DLedgerError:
                self._sim.counters["refused calls"] += 1

        member.input(attempt)

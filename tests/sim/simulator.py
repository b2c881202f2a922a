"""A whole group in one deterministic process: members, disks, network, clients and faults, all from one seed.

A run has two phases. First the faults of its schedule strike, with the safety checks after every step (``safety``).
Then all faults stop, and the group must commit something new and bring every member up to date within bounded time.

What a member is, is given: ``CoreMember`` (``member``) is the Raft core alone, fast; ``ReplicaMember``
(``replica_member``) is a complete replica with its store, its repairs and its clients.

The schedule is a list of ``Fault``s that the seed draws before the run. Each draws its details from a source of its
own, so that a run with a part of the schedule is a run of its own, and a failure can be shrunk (``runs``).
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from dledger_core.config import RaftConfig, StorageConfig
from dledger_core.ids import Index, MemberId, NodeId, node_of
from dledger_core.raft import Message, Ready
from tests.sim.bootstrap import LOG_UUID
from tests.sim.member import TICK, CoreMember, Member
from tests.sim.membership import SPARES, STILL, MemberChanges, MembershipMix, bootstrapped, draw_membership
from tests.sim.network import NO_FAULTS, Network, NetworkFaults
from tests.sim.operator import waits_for_operator
from tests.sim.recoveries import Recoveries, draw_recoveries, draw_recovery
from tests.sim.safety import SafetyChecker
from tests.sim.virtual_time import VirtualTime

FAULT_TIME = 5500
FAULT_INTERVAL = 50
LIVENESS_TICKS_MAX = 600
CALM_TICKS = 150
NETWORK_FAULTS = ("loss", "duplication", "spike")


def sometimes(source: random.Random, value: float) -> float:
    """Draw how often a fault strikes, up to ``value``; in three of ten runs never."""
    return value * source.random() if source.random() < 0.7 else 0.0


@dataclass(frozen=True, slots=True)
class Mix:
    """How hard a run is. Every fault is absent in some runs, so that the others get their chance.

    Attributes:
        rates: per kind of fault its probability: in each interval, or whenever it could strike.
        fetch_bytes: the most that a member returns to a member under repair at once.
    """

    nodes: int
    network: NetworkFaults
    disk_delay_max: int
    client_pause: int
    raft: RaftConfig
    preferred_leaders: tuple[NodeId, ...]
    storage: StorageConfig
    rates: dict[str, float]
    scrub_interval: int
    fetch_bytes: int


def draw_mix(source: random.Random, *, whole: bool) -> Mix:
    """Draw a mix; ``whole`` = for complete replicas."""
    choice = source.choice
    crash_interval = choice((400, 800, 2000)) if whole else choice((0, 600, 2000))
    partition_interval = choice((0, 500, 1500))
    network = NetworkFaults(
        loss=sometimes(source, 0.2),
        duplication=sometimes(source, 0.2),
        delay_max=choice((2, 8, 30)),
        spike=sometimes(source, 0.05),
        fifo=source.random() < 0.5,
    )
    return Mix(
        nodes=choice((3, 3, 5)),
        network=network,
        disk_delay_max=choice((1, 10, 40)),
        client_pause=choice((4, 15, 40)),
        raft=RaftConfig(
            election_ticks_min=10,
            election_ticks_max=choice((14, 20)),
            heartbeat_ticks=choice((1, 3)),
            append_bytes_max=choice((300, 3000)),
            inflight_bytes_max=choice((900, 20_000)),
            inflight_messages_max=choice((1, 3, 20)),
            recent_bytes_max=choice((0, 4000, 1 << 20)),
            noop_on_election=whole or source.random() < 0.8,
        ),
        preferred_leaders=(NodeId("n1"), NodeId("n0")) if source.random() < 0.2 else (),
        storage=StorageConfig(
            data_segment_bytes=choice((4096, 4096, 16_384, 1 << 17)),
            index_segment_bytes=choice((640, 4096)),
            preallocate_bytes=4096 if whole else 0,
            unsynced_bytes_max=choice((4096, 1 << 20)),
        ),
        rates={
            "crash": FAULT_INTERVAL / crash_interval if crash_interval else 0.0,
            "partition": FAULT_INTERVAL / partition_interval if partition_interval else 0.0,
            "heal": 0.05,
            "stall": 0.03,
            "unreachable": 0.06,
            "loss": network.loss,
            "duplication": network.duplication,
            "spike": network.spike,
            "disk_stall": sometimes(source, 0.02),
            "late_output": sometimes(source, 0.6),
            "campaign": 0.02,
            "depose": 0.01,
            "trim": (sometimes(source, 0.6) if whole else choice((0.0, 0.0, 0.12))),
            "transfer": 0.02,
            "clock_jump": choice((0.0, 0.05)),
            "write_crash": choice((0.0, 0.3, 0.6)),
            "disk_error": sometimes(source, 0.15),
            "damage": choice((0.0, 0.1, 0.3)),
            "lose_end": choice((0.0, 0.03, 0.08)),
            "lose_copy": choice((0.0, 0.1, 0.3)),
            "lose_checkpoint": choice((0.0, 0.0, 0.05)),
            "preallocate": choice((0.0, 0.1, 0.5)),
            "process_only": choice((0.0, 0.5, 1.0)),
            "mark_refused": choice((0.0, 0.0, 0.5)),
        },
        scrub_interval=choice((300, 800)),
        fetch_bytes=choice((400, 1 << 20)),
    )


CONTINUOUS = (
    *(*NETWORK_FAULTS, "disk_stall", "late_output", "write_crash", "process_only", "mark_refused"),
    *("preallocate", "split"),
)
"""Faults that strike with their rate all the time; the schedule turns each of them on as a whole."""
TIMED = ("crash", "partition", "heal", "stall", "unreachable")
"""Faults of every kind of member that the schedule places."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault of a schedule; ``seed`` draws its details, such as the member that it strikes."""

    at: int
    kind: str
    seed: int


def draw_schedule(source: random.Random, mix: Mix, kinds: Sequence[str], until: int) -> list[Fault]:
    """Draw the faults of a run, in order of their times."""
    faults = [Fault(0, kind, 0) for kind in CONTINUOUS if mix.rates[kind]]
    for at in range(FAULT_INTERVAL, until, FAULT_INTERVAL):
        struck = [kind for kind in (*TIMED, *kinds) if kind not in CONTINUOUS and source.random() < mix.rates[kind]]
        faults += [Fault(at + source.randrange(FAULT_INTERVAL), kind, source.getrandbits(32)) for kind in struck]
    return faults


def draw_lies(source: random.Random, until: int) -> list[Fault]:
    """Draw the lies that members receive; none in half of the runs. They have a source of their own: a lie changes
    nothing, so a seed has the same other faults with and without them."""
    if source.random() < 0.5:
        return []
    return [
        Fault(at + source.randrange(FAULT_INTERVAL), "lie", source.getrandbits(32))
        for at in range(FAULT_INTERVAL, until, FAULT_INTERVAL)
        if source.random() < 0.2
    ]


def draw_changes(seed: int, membership: MembershipMix, member_type: type[Any], until: int) -> list[Fault]:
    """Draw when a leader is asked for a change of members, and what befalls the ends of logs or the file of members;
    from a source of their own, like lies."""
    loss = membership.file_loss if member_type.drives_changes else membership.lost_ends
    rates = {"change": membership.rate} | dict.fromkeys(member_type.membership_faults, loss)
    source = random.Random(f"{seed}/changes")
    return [
        Fault(at + source.randrange(FAULT_INTERVAL), kind, source.getrandbits(32))
        for kind, rate in rates.items()
        for at in range(FAULT_INTERVAL, until, FAULT_INTERVAL)
        if source.random() < rate
    ]


class LivenessError(AssertionError):
    """The group does not recover although all faults have stopped; ``what`` names the goal it missed."""

    def __init__(self, what: str, detail: object) -> None:
        super().__init__(f"{what} {LIVENESS_TICKS_MAX} ticks after the faults stopped: {detail}")
        self.what = what


class Simulator:
    """Runs one seed; ``run`` raises SafetyViolationError, LivenessError or the error that stopped a member.

    Args:
        seed: draws everything.
        member_type: the kind of its members.
        faults: the schedule; None = the seed's.
        traced: feed ``trace`` with every event.
    """

    def __init__(
        self,
        seed: int,
        member_type: type[Any] = CoreMember,
        *,
        faults: Sequence[Fault] | None = None,
        traced: bool = False,
    ) -> None:
        self.seed = seed
        self.member_type = member_type
        self.source = random.Random(seed)
        self.mix = mix = draw_mix(random.Random(f"{seed}/mix"), whole=member_type is not CoreMember)
        membership = draw_membership(seed)
        mix.rates["split"] = 0.0 if membership is None or member_type.drives_changes else membership.split
        drawn = draw_schedule(random.Random(f"{seed}/faults"), mix, member_type.fault_kinds, FAULT_TIME)
        drawn += draw_lies(random.Random(f"{seed}/lies"), FAULT_TIME)
        if membership is not None:
            drawn += draw_changes(seed, membership, member_type, FAULT_TIME)
        if member_type.drives_changes:
            drawn += draw_recoveries(seed, FAULT_TIME)
        self.faults = drawn if faults is None else list(faults)
        self._continuous = {fault.kind for fault in self.faults if fault.kind in CONTINUOUS}
        self.is_disturbed = False
        """Whether nodes were called lost: then there are no faults of single stores any longer."""
        self.log_uuid = LOG_UUID
        self.log_is_new = False
        """Whether the log continues another one."""
        self.groups = [self]
        """This group, and those of the logs that continue it."""
        self.trace = hashlib.blake2b(digest_size=16) if traced else None
        self.counters: Counter[str] = Counter()
        self.time = VirtualTime()
        self.faults_on = True
        self.client_pause = mix.client_pause
        recovery = draw_recovery(seed) if member_type.drives_changes else None
        if recovery is not None and membership is None:
            membership = STILL
        voters = mix.nodes if membership is None else membership.voters
        spares = 0 if membership in (None, STILL) else SPARES
        self.names: list[MemberId] = [member_type.name_of(at) for at in range(voters + spares)]
        self.bootstrapped = bootstrapped(self.names, voters)
        self.changes = None if membership is None else MemberChanges(self, membership)
        self.recoveries = Recoveries(self, recovery)
        off = {kind: 0.0 for kind in NETWORK_FAULTS if kind not in self._continuous}
        self.network = Network(self.names, replace(mix.network, **off), self.source, self.counters)
        self.members: dict[MemberId, Any] = {}
        for name in self.names:
            self.members[name] = member_type(self, name, self.source.getrandbits(32))
        self.checker = SafetyChecker(self.members, self.bootstrapped)
        self.shared: Any = member_type.shared(self)
        self._numbers = itertools.count(1)

    def run(self) -> Counter[str]:
        """Run both phases and return the counts of what happened."""
        for name in sorted(self.bootstrapped.voters):
            self.start(self.members[name])
        self.clients = self.member_type.clients(self)
        for client in self.clients:
            client.start()
        for fault in self.faults:
            if fault.kind not in CONTINUOUS:
                self.time.after(fault.at, lambda fault=fault: self._strike(fault))
        self.time.run_until(lambda: self.time.now >= FAULT_TIME)
        self._stop_faults()
        if self.is_disturbed:
            self._demand("a recovery does not end", FAULT_TIME, self.recoveries.are_over)
        for group in self.groups:
            if not self.recoveries.has_ended(group):
                group._demand_end()
        self.counters["events"] = self.time.events
        self.counters["elections"] = sum(len(group.checker.leaders) for group in self.groups)
        self.counters["committed batches"] = sum(len(group.checker.committed) for group in self.groups)
        return self.counters

    def _demand_end(self) -> None:
        try:
            self._demand_progress()
        except LivenessError:
            running = {name: member for name, member in self.members.items() if member.up}
            if self.recoveries.has_ended(self):
                return
            if not waits_for_operator({name: member.core for name, member in running.items()}):
                raise
            self.counters["groups that wait for an operator"] += 1
            return
        self.checker.check_disks()
        for member in self.current:
            member.check_end()

    # For members and clients.

    @property
    def current(self) -> list[Any]:
        """The members by the newest committed configuration, without those that are lost."""
        lost = set() if self.changes is None else self.changes.lost
        members = self.checker.configuration.configuration.members
        return [self.members[name] for name in members if name not in lost]

    def store_of(self, node: NodeId) -> Any:
        """Return the newest store of a node."""
        return [member for name, member in self.members.items() if node_of(name) == node][-1]

    def empty_disk(self, node: NodeId) -> None:
        """Give a node a new store, another member, which does not start before it is admitted."""
        stores = sum(node_of(name) == node for name in self.members)
        name = self.member_type.name_of(int(node.removeprefix("n")), stores + 1)
        self.names.append(name)
        self.members[name] = self.member_type(self, name, self.source.getrandbits(32))

    def number(self) -> int:
        """Return a new number."""
        return next(self._numbers)

    def chance(self, probability: float) -> bool:
        return probability > 0 and self.source.random() < probability

    def strikes(self, kind: str) -> bool:
        """Draw whether a continuous fault strikes now."""
        return self.faults_on and kind in self._continuous and self.source.random() < self.mix.rates[kind]

    def disk_delay(self) -> int:
        """Draw how long the next write takes."""
        if not self.faults_on:
            return 1
        if self.strikes("disk_stall"):
            self.counters["disk stalls"] += 1
            return self.source.randrange(100, 400)
        return 1 + int(self.source.random() * self.mix.disk_delay_max)

    def some_member(self) -> Any:
        """Draw the member that a client asks, mostly a leader."""
        members = [member for member in self.members.values() if member.life]
        leaders = [member for member in members if member.leads]
        return self.source.choice(leaders if leaders and self.chance(0.9) else members)

    def note(self, *event: object) -> None:
        """Add an event to the trace."""
        if self.trace is not None:
            self.trace.update(repr((self.time.now, *event)).encode())

    def send(self, message: Message, data: object) -> None:
        """Put a message on the network; ``data`` is what arrives."""
        self.counters["messages"] += 1
        self.note("send", data)
        for arrival in self.network.arrivals(message, self.time.now):
            self.time.after(arrival - self.time.now, self._delivery((message.sender, message.target), data))

    def _delivery(self, link: tuple[MemberId, MemberId], data: object) -> Callable[[], None]:
        member, sender = self.members[link[1]], self.members[link[0]]
        sent_since = sender.returns

        def deliver() -> None:
            if not member.up or link in self.network.isolated or sender.returns != sent_since:
                return
            if member.stalled_until > self.time.now:
                self.time.after(member.stalled_until - self.time.now, deliver)
            else:
                self.note("deliver", link)
                member.input(lambda: member.receive(data))

        return deliver

    def on_ready(self, member: Member, ready: Ready) -> None:
        """Check a Ready that a member handles."""
        self.counters["readys"] += 1
        self.counters["truncations"] += ready.truncate_from is not None
        self.counters["snapshots installed"] += ready.restart is not None
        if ready.configuration is not None:
            self.counters["changes undone"] += ready.configuration.index < (ready.truncate_from or 0)
            self.counters["groups of one"] += len(ready.configuration.configuration.voters) == 1
        start = ready.restart and ready.restart.first_index
        self.note("ready", member.node_id, ready.number, start, ready.truncate_from, ready.committed, ready.soft_state)
        self.checker.on_ready(member, ready)

    def start(self, member: Member) -> None:
        is_lost = self.changes is not None and member.node_id in self.changes.lost
        if member.is_moved or self.recoveries.keeps_away(member) or (is_lost and not member.waits):
            return
        self.counters["starts"] += 1
        self.note("start", member.node_id)
        member.start()

    def on_down(self, member: Member) -> None:
        """Start a process again some time after it ended; sometimes late, when others have trimmed what it needs."""
        life = member.life
        away = 1500 if self.chance(self.mix.rates["trim"]) else 300
        delay = self.source.randrange(1, away) if self.faults_on else 1
        self.time.after(delay, lambda: self.start(member) if member.life == life else None)

    # Faults.

    def _strike(self, fault: Fault) -> None:
        self.note("fault", fault)
        source = random.Random(fault.seed)
        if fault.kind == "recover":
            self.recoveries.strike(source)
            return
        group = source.choice(self.groups) if len(self.groups) > 1 else self
        group._struck(fault, source)

    def _struck(self, fault: Fault, source: random.Random) -> None:
        alive = [member for member in self.members.values() if member.up]
        if fault.kind == "crash":
            self._crash(source)
        elif fault.kind == "partition":
            self.network.partition_some([member.node_id for member in alive if member.leads], source)
        elif fault.kind == "heal":
            self.network.heal()
        elif fault.kind == "change" and self.changes is not None:
            self.changes.request(source)
        elif alive:
            member = source.choice(alive)
            if fault.kind == "stall":
                self.counters["stalls"] += 1
                member.stalled_until = self.time.now + source.randrange(50, 300)
            elif fault.kind == "unreachable":
                other = source.choice(tuple(self.members))
                member.input(lambda: member.unreachable(other))
            else:
                getattr(member, fault.kind)(source)

    def _crash(self, source: random.Random) -> None:
        running = [member for member in self.members.values() if member.running]
        count = len(running) if source.random() < 0.1 else min(1, len(running))
        for member in source.sample(running, count):
            if count > 1 or not member.die_in_write():
                member.die("crashes")

    def _stop_faults(self) -> None:
        self.recoveries.let_return()
        for group in self.groups:
            group._calm()

    def _calm(self) -> None:
        self.faults_on = False
        self.network.heal()
        self.network.faults = NO_FAULTS
        for member in list(self.members.values()):
            member.stalled_until = self.time.now
            member.calm()
            if member.life and not member.running:
                self.start(member)

    # Liveness.

    def _demand_progress(self) -> None:
        start = self.time.now
        ends = (member.core.last_index for member in self.members.values() if member.up)
        last_index = max(ends, default=self.checker.commit_index)  # all may be repairing their stores
        # Writes on stalled disks and messages in flight when the faults stopped still need their time.
        slack = 400 + self.mix.network.spike_max
        self._demand("no new commit", slack, lambda: self.checker.commit_index > last_index)
        self.counters["ticks to recover"] += (self.time.now - start) // TICK
        # Members get time to catch up. Without a no-op at elections, a new leader needs an append to commit.
        self.client_pause = 60 * TICK
        goal = self.checker.commit_index
        slack += len(self.checker.committed) * TICK
        self._demand("damage is left", slack, lambda: not any(member.is_damaged for member in self.current))
        self._demand("a member lags", slack, lambda: self._everywhere(goal))
        self._demand("a learner is not promoted", slack, lambda: not self._promotes())
        calm = self.time.now + CALM_TICKS * TICK
        self._demand("members differ", slack, lambda: self.time.now > calm and self._everywhere(None))

    def _demand(self, what: str, slack: int, done: Callable[[], bool]) -> None:
        deadline = self.time.now + slack + LIVENESS_TICKS_MAX * TICK

        def in_time() -> bool:
            if self.time.now > deadline:
                raise LivenessError(what, {m.node_id: m.core.status() for m in self.members.values() if m.up})
            return done()

        self.time.run_until(in_time)

    def _promotes(self) -> bool:
        """Whether a learner that is not lost waits for the step that leaders take without a request."""
        if self.changes is None or not self.member_type.drives_changes:
            return False
        return bool(self.checker.configuration.configuration.promote - self.changes.lost)

    def _everywhere(self, goal: Index | None) -> bool:
        last_index = self.checker.commit_index if goal is None else goal
        return all(member.up and member.readable_end > last_index for member in self.current)


def replay_command(seed: int, member_type: type[Any]) -> str:
    """Return the command that runs one seed again."""
    return f"python -m tests.sim {'--core ' if member_type is CoreMember else ''}--seeds {seed}..{seed}"


def run_seed(seed: int, member_type: type[Any] = CoreMember, faults: Sequence[Fault] | None = None) -> Counter[str]:
    """Run one seed; a failure names the command that replays it."""
    sim = Simulator(seed, member_type, faults=faults)
    try:
        return sim.run()
    except Exception as error:
        replay = replay_command(seed, member_type)
        error.add_note(f"at time {sim.time.now}, after {sim.time.events} events; replay: {replay}")
        raise

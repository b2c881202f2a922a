"""A whole group in one deterministic process: RawNodes, disks, network, clients and a nemesis, all from one seed.

Fault model. Network: see ``network.py``. Disk: a write takes time; several Readys wait in line and become durable in
order; a crash keeps a prefix of the writes in line (hard state, cut, batch, batch, ...), possibly none, never a part of
a batch (the store cuts a torn batch back when it opens). What was confirmed is never lost. Nodes: crash and restart at
any event, stall, tick at different speeds, take Readys late. Not injected: a disk that forgets or damages what it
confirmed (the store's own tests do that).

A run has two phases: faults of a mix that the seed draws, with the safety checks after every step; then all faults stop
and the group must elect a leader and commit something new on every node within a bounded number of ticks.
"""

from __future__ import annotations

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass

from dledger_core.config import RaftConfig
from dledger_core.errors import DLedgerError
from dledger_core.ids import NO_INDEX, Index, NodeId
from dledger_core.raft import Batch, Configuration, Message, RawNode, Ready, Role, Status
from tests.support.checkers import SafetyChecker, check
from tests.support.group import Snapshots
from tests.support.memory_store import MemoryStore, Proposal, writes_of
from tests.support.network import Network, NetworkFaults, sometimes
from tests.support.virtual_time import VirtualTime

TICK = 10
"""Length of a tick in units of simulated time; a message needs at least one unit."""

LIVENESS_TICKS_MAX = 400


@dataclass(frozen=True, slots=True)
class FaultMix:
    """How hard a run is; drawn from the seed by ``draw_mix``."""

    nodes: int
    network: NetworkFaults
    disk_delay_max: int
    disk_stall: float
    lazy_ready: float
    crash_interval: int
    partition_interval: int
    propose_interval: int
    raft: RaftConfig
    compaction: bool


def draw_mix(source: random.Random) -> FaultMix:
    """Draws a mix: every fault is sometimes absent, so that the others get their chance."""
    return FaultMix(
        nodes=source.choice((3, 3, 5)),
        network=NetworkFaults(
            loss=sometimes(source, 0.25),
            duplication=sometimes(source, 0.2),
            delay_max=source.choice((2, 8, 30)),
            spike=sometimes(source, 0.05),
            fifo=source.random() < 0.4,
        ),
        disk_delay_max=source.choice((1, 10, 40)),
        disk_stall=sometimes(source, 0.02),
        lazy_ready=sometimes(source, 0.6),
        crash_interval=source.choice((0, 600, 2000)),
        partition_interval=source.choice((0, 500, 1500)),
        propose_interval=source.choice((4, 15, 60)),
        raft=RaftConfig(
            election_ticks_min=10,
            election_ticks_max=source.choice((14, 20)),
            heartbeat_ticks=source.choice((1, 3)),
            append_bytes_max=source.choice((100, 1000)),
            inflight_bytes_max=source.choice((300, 5000)),
            inflight_messages_max=source.choice((1, 3, 20)),
            recent_bytes_max=source.choice((0, 4000, 1 << 20)),
            noop_on_election=source.random() < 0.8,
            preferred_leaders=(NodeId("n1"), NodeId("n0")) if source.random() < 0.2 else (),
        ),
        compaction=source.random() < 0.3,
    )


class SimNode:
    """One replica: a disk that survives, and a core that does not."""

    def __init__(self, node_id: NodeId) -> None:
        self.node_id = node_id
        self.disk = MemoryStore()
        self.staged = MemoryStore()
        self.checkpoint = NO_INDEX
        self.raw: RawNode | None = None
        self.life = 0
        self.in_line: deque[Ready] = deque()
        self.disk_free_at = 0
        self.stalled_until = 0
        self.proposed: dict[Index, Batch] = {}

    @property
    def core(self) -> RawNode:
        assert self.raw is not None
        return self.raw

    @property
    def status(self) -> Status:
        return self.core.status()

    @property
    def leads(self) -> bool:
        return self.raw is not None and self.raw._state.role is Role.LEADER


class ClusterSim:
    """Runs one seed; ``run`` raises SafetyViolationError, InvariantViolationError or LivenessError."""

    def __init__(self, seed: int, *, mix: FaultMix | None = None, fault_time: int = 6000) -> None:
        self.seed = seed
        self.source = random.Random(seed)
        self.mix = mix or draw_mix(self.source)
        self.fault_time = fault_time
        self.counters: Counter[str] = Counter()
        self.time = VirtualTime()
        self.faults_on = True
        self.propose_interval = self.mix.propose_interval
        self.nodes = {node_id: SimNode(node_id) for node_id in (NodeId(f"n{at}") for at in range(self.mix.nodes))}
        self.network = Network(tuple(self.nodes), self.mix.network, self.source, self.counters)
        self.checker = SafetyChecker(self.nodes)
        self.resets = Snapshots(self.source.choice((0, 500, 5000)))
        self._payloads = 0
        self._requests = 0

    def run(self) -> Counter[str]:
        """Runs both phases and returns what happened."""
        for node in self.nodes.values():
            self._start(node)
        self.time.after(1, self._client)
        self.time.after(50, self._nemesis)
        self.time.run_until(lambda: self.time.now >= self.fault_time)
        self._stop_faults()
        self._demand_progress()
        self.counters["events"] = self.time.events
        self.counters["terms"] = max((int(term) for term in self.checker.leaders), default=0)
        self.counters["elections"] = len(self.checker.leaders)
        self.counters["committed batches"] = len(self.checker.committed)
        self.counters["acknowledged"] = len(self.checker.acknowledged)
        return self.counters

    def _chance(self, probability: float) -> bool:
        return probability > 0 and self.source.random() < probability

    # Nodes

    def _start(self, node: SimNode) -> None:
        node.life += 1
        node.staged = node.disk.copy()
        node.in_line.clear()
        node.proposed.clear()
        node.disk_free_at = node.stalled_until = self.time.now
        node.raw = RawNode(
            member=node.node_id,
            configuration=Configuration(frozenset(self.nodes)),
            config=self.mix.raft,
            store=node.disk,
            hard_state=node.disk.hard_state,
            commit_index=node.checkpoint,
            random=self.source,
            noop=self._noop,
            snapshot_payloads=self.resets,
        )
        self.checker.on_start(node)
        self.time.after(self.source.randrange(1, TICK + 1), self._ticker(node, node.life))

    def _crash(self, node: SimNode) -> None:
        """Loses the core; of the writes in line a prefix survives."""
        self.counters["crashes"] += 1
        writes = [write for ready in node.in_line for write in writes_of(ready)]
        kept = self.source.randrange(0, len(writes) + 1)
        self.counters["writes lost"] += len(writes) - kept
        for write in writes[:kept]:
            node.disk.write(write)
        node.raw = None
        node.life += 1

    def _ticker(self, node: SimNode, life: int) -> Callable[[], None]:
        period = TICK + self.source.randrange(-1, 2)

        def tick() -> None:
            if node.life == life:
                self._input(node, node.core.tick)
                self.time.after(max(period, node.stalled_until - self.time.now), tick)

        return tick

    def _input(self, node: SimNode, action: Callable[[], object]) -> None:
        """Gives a node one input, checks it, and takes its output now or a little later."""
        action()
        self.checker.on_step(node)
        if not node.core.has_ready():
            return
        if self.faults_on and self._chance(self.mix.lazy_ready):
            self.time.after(self.source.randrange(1, 8), self._pump_later(node, node.life))
        else:
            self._pump(node)

    def _pump_later(self, node: SimNode, life: int) -> Callable[[], None]:
        return lambda: self._pump(node) if node.life == life else None

    def _pump(self, node: SimNode) -> None:
        while node.core.has_ready():
            ready = node.core.ready()
            self.counters["readys"] += 1
            self.counters["cuts"] += ready.truncate_from is not None
            self.counters["resets"] += ready.restart is not None
            node.staged.apply(ready)
            self.checker.on_ready(node, ready)
            self._take_results(node, ready)
            self._send(node, ready.messages)
            node.in_line.append(ready)
            if ready.must_persist:
                node.disk_free_at = max(node.disk_free_at, self.time.now) + self._disk_delay()
            self.time.after(max(0, node.disk_free_at - self.time.now), self._disk_done(node, node.life))
            self.checker.on_step(node)

    def _take_results(self, node: SimNode, ready: Ready) -> None:
        if ready.soft_state is not None and ready.soft_state.role is not Role.LEADER:
            node.proposed.clear()
        if ready.committed is not None:
            start, end = ready.committed
            for first_index in [at for at in node.proposed if at < end]:
                batch = node.proposed.pop(first_index)
                check(batch.first_index >= start, "an append is reported twice", batch)
                self.checker.on_acknowledged(batch)
            if self._chance(0.2):
                # Only what is durable here: the disk may still hold another leader's entries at these places.
                node.checkpoint = max(node.checkpoint, min(Index(end - 1), node.status.durable_index))

    def _disk_delay(self) -> int:
        if not self.faults_on:
            return 1
        if self._chance(self.mix.disk_stall):
            self.counters["disk stalls"] += 1
            return self.source.randrange(100, 400)
        return 1 + int(self.source.random() * self.mix.disk_delay_max)

    def _disk_done(self, node: SimNode, life: int) -> Callable[[], None]:
        """One event per Ready: at least the oldest is durable, sometimes several with one sync."""

        def done() -> None:
            if node.life != life or not node.in_line:
                return
            count = self.source.randrange(1, len(node.in_line) + 1) if self._chance(0.3) else 1
            number = 0
            for _ in range(count):
                ready = node.in_line.popleft()
                node.disk.apply(ready)
                self._send(node, ready.persisted_messages)
                number = ready.number
            self._input(node, lambda: node.core.advance(number))

        return done

    # Messages

    def _send(self, node: SimNode, messages: tuple[Message, ...]) -> None:
        for message in messages:
            self.counters["messages"] += 1
            self.checker.on_send(node, message)
            for arrival in self.network.arrivals(message, self.time.now):
                self.time.after(arrival - self.time.now, self._delivery(message))

    def _delivery(self, message: Message) -> Callable[[], None]:
        node = self.nodes[message.target]

        def deliver() -> None:
            if node.raw is None or (message.sender, message.target) in self.network.cut:
                return
            if node.stalled_until > self.time.now:
                self.time.after(node.stalled_until - self.time.now, deliver)
            else:
                self._input(node, lambda: node.core.step(message))

        return deliver

    # Clients

    def _client(self) -> None:
        self.time.after(self.source.randrange(1, 2 * self.propose_interval), self._client)
        alive = [node for node in self.nodes.values() if node.raw is not None]
        leaders = [node for node in alive if node.leads]
        if not alive:
            return
        node = self.source.choice(leaders or alive)
        draw = self.source.random()
        if draw < 0.8:
            self._propose(node)
        elif draw < 0.98:
            self._requests += 1
            self._call(node, lambda: self._read(node, self._requests))
        else:
            target = self.source.choice(tuple(self.nodes))
            self._call(node, lambda: node.core.transfer_leadership(target))

    def _propose(self, node: SimNode) -> None:
        def propose() -> None:
            self._payloads += 1
            nbytes = self.source.choice((1, 20, 90, 400))
            batch = node.core.propose(Proposal(f"p{self._payloads}", self.source.randrange(1, 5), nbytes))
            node.proposed[batch.first_index] = batch

        self._call(node, propose)

    def _read(self, node: SimNode, request_id: int) -> None:
        node.core.read_index(request_id)
        self.checker.on_read_asked(request_id)
        self.counters["reads"] += 1

    def _call(self, node: SimNode, action: Callable[[], None]) -> None:
        def attempt() -> None:
            try:
                action()
            except DLedgerError:
                self.counters["refused calls"] += 1

        self._input(node, attempt)

    def _noop(self, index: Index) -> Proposal:
        self._payloads += 1
        return Proposal(f"noop{self._payloads}", 1, 0)

    # Faults

    def _nemesis(self) -> None:
        if not self.faults_on:
            return
        self.time.after(50, self._nemesis)
        mix, source = self.mix, self.source
        if mix.crash_interval and self._chance(50 / mix.crash_interval):
            self._crash_some()
        if mix.partition_interval and self._chance(50 / mix.partition_interval):
            self.network.partition_some(self._leaders())
        if self._chance(0.05):
            self.network.heal()
        alive = [node for node in self.nodes.values() if node.raw is not None]
        if not alive:
            return
        node, other = source.choice(alive), source.choice(tuple(self.nodes))
        draw = source.random()
        if draw < 0.03:
            self.counters["stalls"] += 1
            node.stalled_until = self.time.now + source.randrange(50, 300)
        elif draw < 0.10:
            self._input(node, lambda: node.core.report_unreachable(other))
        elif draw < 0.12:
            self._input(node, node.core.campaign)
        elif draw < 0.13:
            self._input(node, node.core.step_down)
        elif draw < 0.25 and mix.compaction:
            self._compact(node)

    def _crash_some(self) -> None:
        alive = [node for node in self.nodes.values() if node.raw is not None]
        count = len(alive) if self._chance(0.1) else 1
        for node in self.source.sample(alive, min(count, len(alive))):
            self._crash(node)
            self.time.after(self.source.randrange(1, 600), self._restart(node, node.life))

    def _restart(self, node: SimNode, life: int) -> Callable[[], None]:
        return lambda: self._start(node) if node.raw is None and node.life == life else None

    def _leaders(self) -> list[NodeId]:
        return [node.node_id for node in self.nodes.values() if node.leads]

    def _compact(self, node: SimNode) -> None:
        """Deletes what a node has on disk and knows to be committed, whoever still needs it."""
        # What a node has not reported as committed its driver does not know, and so would not delete.
        first_index = min(node.core._emitted_commit_index, node.status.durable_index)
        first_index = max(Index(0), Index(first_index - self.source.choice((0, 20, 100))))
        if first_index > node.disk.first_index():
            self.counters["compactions"] += 1
            kept = node.disk.trim(Index(first_index))
            node.staged.trim(Index(first_index))
            node.checkpoint = max(node.checkpoint, Index(kept - 1))
            self._input(node, lambda: node.core.trim(kept))

    def _stop_faults(self) -> None:
        self.faults_on = False
        self.network.heal()
        self.network.faults = NetworkFaults()
        for node in self.nodes.values():
            node.stalled_until = self.time.now
            if node.raw is None:
                self._start(node)

    # Liveness

    def _demand_progress(self) -> None:
        """A leader and a new commit in bounded time, then everything on every node, in time for what they miss."""
        start, fresh = self.time.now, self._payloads
        # What nodes had in line on stalled disks and links when the faults stopped still needs its time.
        slack = max(0, *(node.disk_free_at - start for node in self.nodes.values())) + self.mix.network.spike_max
        self._demand("no new commit", slack, lambda: self._is_fresh(fresh))
        self.counters["ticks to recover"] += (self.time.now - start) // TICK
        # Stragglers get time to catch up; in profile A a new leader still needs an append to commit.
        self.propose_interval = 30 * TICK
        missing = len(self.checker.batches)
        self._demand("a node stays behind", slack + missing * TICK, self._is_everywhere)
        self.checker.check_disks()

    def _demand(self, what: str, slack: int, done: Callable[[], bool]) -> None:
        deadline = self.time.now + slack + LIVENESS_TICKS_MAX * TICK

        def in_time() -> bool:
            if self.time.now > deadline:
                roles = {node.node_id: (node.status.role, node.status.term) for node in self.nodes.values()}
                raise LivenessError(f"{what} {LIVENESS_TICKS_MAX} ticks after the faults stopped: {roles}")
            return done()

        self.time.run_until(in_time)

    def _is_fresh(self, fresh: int) -> bool:
        payload = str(self.checker.committed[-1].payload) if self.checker.committed else ""
        return payload.startswith("p") and int(payload[1:]) > fresh

    def _is_everywhere(self) -> bool:
        last_index = self.checker.commit_index
        return all(
            node.status.commit_index >= last_index and node.status.durable_index >= last_index
            for node in self.nodes.values()
        )


class LivenessError(AssertionError):
    """The group does not come back although all faults have stopped."""


def replay_command(seed: int) -> str:
    """Returns the command that runs one seed again."""
    return f"python -m tests.sim --core --seeds {seed}..{seed}"


def run_seed(seed: int) -> Counter[str]:
    """Runs one seed; a failure names the command that replays it."""
    sim = ClusterSim(seed)
    try:
        return sim.run()
    except Exception as error:
        error.add_note(f"at time {sim.time.now}, after {sim.time.events} events; replay: {replay_command(seed)}")
        raise

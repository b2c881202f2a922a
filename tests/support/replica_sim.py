"""A whole group in one deterministic process: real replicas, real stores on simulated disks, clients and a nemesis.

Fault model. Network: see ``network.py``; messages travel as the bytes of their frames. Disk: see ``faulty_files.py``;
what was written and not synced survives a power loss in any subset of its 512-byte sectors; a process may die in the
middle of any operation on a file; a write or sync may fail, and then what it should have made durable is gone, or lies
in the page cache of a machine whose process alone died. What is durable goes bad (``sim_damage.py``) and is repaired
(``sim_repair.py``). Writes take time, and the report that they are done comes later still. Nodes: killed or without
power at any event, stalled, ticking at different speeds, clocks that jump. Clients: see ``sim_clients.py``; requests
and answers get lost, come twice and late.

Checked after every step: ``checkers.py`` (the Raft paper's properties and ours), at every start: the recovered log
against what was durable, the tables against those of other nodes at the same index. In the end the faults stop: the
group must commit again and every node must catch up within a bounded time; then what clients were told is held
against the log (``sim_history.py``).
"""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace

from dledger_core.checksum import crc32
from dledger_core.config import RaftConfig, StorageConfig
from dledger_core.errors import ConfigError, CorruptRecordError, DiskFailedError, NotLeaderError
from dledger_core.ids import Index, NodeId
from dledger_core.net import codec
from dledger_core.net.frame import FrameDecoder
from dledger_core.net.protocol import FRAME_BYTES_MAX
from dledger_core.raft import AppendEntries, Message, Ready, Role
from dledger_core.record import HEADER_BYTES, Records
from dledger_core.server.services.appends import Appended
from dledger_core.storage import CommitLog
from tests.support.checkers import SafetyChecker, check
from tests.support.cluster_sim import LivenessError
from tests.support.network import Network, NetworkFaults, sometimes
from tests.support.sim_clients import History, PlainClient, ProducerClient, QueryClient, ReadClient, SimClient
from tests.support.sim_damage import DamageMix, Damages, draw_damage_mix
from tests.support.sim_history import check_history
from tests.support.sim_lost_end import LostEnds
from tests.support.sim_member import GROUP, SimMember, fingerprint, shadow_of
from tests.support.sim_repair import check_sound
from tests.support.virtual_time import VirtualTime

TICK = 10
LIVENESS_TICKS_MAX = 600
CHECKPOINT_TICKS = 100


@dataclass(frozen=True, slots=True)
class WholeMix:
    """How hard a run is; drawn from the seed by ``draw_whole_mix``."""

    nodes: int
    network: NetworkFaults
    disk_delay_max: int
    disk_stall: float
    crash_interval: int
    write_crash: float
    disk_error: float
    partition_interval: int
    clock_jumps: bool
    client_pause: int
    raft: RaftConfig
    storage: StorageConfig
    retention: float


def draw_whole_mix(source: random.Random) -> WholeMix:
    """Draws a mix: every fault is sometimes absent, so that the others get their chance."""
    return WholeMix(
        nodes=source.choice((3, 3, 5)),
        network=NetworkFaults(
            loss=sometimes(source, 0.2),
            duplication=sometimes(source, 0.2),
            delay_max=source.choice((2, 8, 30)),
            spike=sometimes(source, 0.05),
            fifo=source.random() < 0.5,
        ),
        disk_delay_max=source.choice((1, 10, 40)),
        disk_stall=sometimes(source, 0.02),
        crash_interval=source.choice((400, 800, 2000)),
        write_crash=source.choice((0.0, 0.3, 0.6)),
        disk_error=sometimes(source, 0.15),
        partition_interval=source.choice((0, 500, 1500)),
        clock_jumps=source.random() < 0.5,
        client_pause=source.choice((4, 15, 40)),
        raft=RaftConfig(
            election_ticks_min=10,
            election_ticks_max=source.choice((14, 20)),
            heartbeat_ticks=source.choice((1, 3)),
            append_bytes_max=source.choice((300, 3000)),
            inflight_bytes_max=source.choice((2000, 20_000)),
            inflight_messages_max=source.choice((1, 3, 20)),
            recent_bytes_max=source.choice((0, 4000, 1 << 20)),
        ),
        storage=StorageConfig(
            data_segment_bytes=source.choice((4096, 4096, 16_384, 1 << 17)),
            index_segment_bytes=source.choice((640, 4096)),
            preallocate_bytes=0,
            unsynced_bytes_max=source.choice((4096, 1 << 20)),
        ),
        retention=sometimes(source, 0.6),
    )


class ReplicaSim:
    """Runs one seed; ``run`` raises SafetyViolationError, LivenessError or the error of a replica that stopped."""

    def __init__(
        self, seed: int, *, mix: WholeMix | None = None, damage: DamageMix | None = None, fault_time: int = 5000
    ) -> None:
        self.seed = seed
        self.source = random.Random(seed)
        self.mix = mix or draw_whole_mix(self.source)
        self.damage_source = random.Random(f"{seed}/damage")  # its own, so that without damage a seed runs as before
        self.damage_mix = damage or draw_damage_mix(self.damage_source)
        self.damages = Damages(self, self.damage_source)
        self.fault_time = fault_time
        self.counters: Counter[str] = Counter()
        self.time = VirtualTime()
        self.faults_on = True
        self.client_pause = self.mix.client_pause
        names = [NodeId(f"n{at}") for at in range(self.mix.nodes)]
        self.members = {name: SimMember(self, name, self.source.getrandbits(32)) for name in names}
        self.network = Network(tuple(names), self.mix.network, self.source, self.counters)
        self.checker = SafetyChecker(self.members)  # type: ignore[arg-type]
        self.history = History()
        self._decoder = FrameDecoder(FRAME_BYTES_MAX)
        self._tables: dict[Index, int] = {}
        self.deleted: dict[int, tuple[int, bytes]] = {}
        self._turn_delay = self.source.choice((0, 0, 1, 5))
        self.lost_ends = LostEnds(self, self.damages, random.Random(f"{seed}/end"))

    def run(self) -> Counter[str]:
        """Runs both phases and returns what happened."""
        for member in self.members.values():
            self._start(member)
        for client in self._clients():
            client.start()
        self.time.after(50, self._nemesis)
        self.time.run_until(lambda: self.time.now >= self.fault_time)
        self._stop_faults()
        self._demand_progress()
        self._check_end()
        self.counters["events"] = self.time.events
        self.counters["elections"] = len(self.checker.leaders)
        self.counters["committed batches"] = len(self.checker.committed)
        return self.counters

    def _clients(self) -> list[SimClient]:
        plain = [PlainClient(self, f"c{at}") for at in range(2)]
        producers = [ProducerClient(self, f"p{at}") for at in range(2)]
        queries = [QueryClient(self, f"q{at}") for at in range(2)]
        return [*plain, *producers, *queries, ReadClient(self, "r0")]

    # What members and clients ask.

    def chance(self, probability: float) -> bool:
        """Draws."""
        return probability > 0 and self.source.random() < probability

    def damage_chance(self, probability: float) -> bool:
        """Draws what concerns damage and repairs."""
        return probability > 0 and self.damage_source.random() < probability

    def disk_delay(self) -> int:
        """How long the next write takes."""
        if not self.faults_on:
            return 1
        if self.chance(self.mix.disk_stall):
            self.counters["disk stalls"] += 1
            return self.source.randrange(100, 400)
        return 1 + int(self.source.random() * self.mix.disk_delay_max)

    def report_delay(self) -> int:
        """How long the loop takes to hear of a finished write."""
        return self.source.choice((0, 0, 1, 5)) if self.faults_on else 0

    def some_member(self) -> SimMember:
        """The node that a client asks: mostly one that leads."""
        members = list(self.members.values())
        leaders = [member for member in members if member.up and member.replica.is_leader]
        return self.source.choice(leaders if leaders and self.chance(0.9) else members)

    def turn_delay(self) -> int:
        """How long a node's loop takes to begin its next turn; a constant, so that turns keep their order."""
        return self._turn_delay if self.faults_on else 0

    def send(self, message: Message) -> None:
        """Puts a message on the network, as the bytes of its frame."""
        member = self.members[message.sender]
        self.counters["messages"] += 1
        shown = message
        if isinstance(message, AppendEntries):
            shown = replace(message, batches=tuple(map(shadow_of, message.batches)))
        self.checker.on_send(member, shown)  # type: ignore[arg-type]
        frame = b"".join(codec.message_to_frame(GROUP, message))
        for arrival in self.network.arrivals(message, self.time.now):
            self.time.after(arrival - self.time.now, self._delivery((message.sender, message.target), frame))

    def _delivery(self, link: tuple[NodeId, NodeId], frame: bytes) -> Callable[[], None]:
        member = self.members[link[1]]

        def deliver() -> None:
            if not member.up or link in self.network.cut:
                return
            if member.stalled_until > self.time.now:
                self.time.after(member.stalled_until - self.time.now, deliver)
                return
            self._decoder.receive_data(frame)
            received = self._decoder.next_frame()
            assert received is not None
            _, message = codec.frame_to_message(received)
            member.input(lambda: member.replica.step(message))

        return deliver

    def on_ready(self, member: SimMember, ready: Ready) -> None:
        """A member has handled a Ready."""
        self.counters["readys"] += 1
        self.counters["cuts"] += ready.truncate_from is not None
        if ready.restart is not None:
            self.counters["resets"] += 1
            self._crash_soon(member)
        self.checker.on_ready(member, ready)  # type: ignore[arg-type]
        if ready.committed is not None and self.chance(0.1):
            self._compare_tables(member)

    def on_step(self, member: SimMember) -> None:
        """A member has taken an input."""
        self.checker.on_step(member)  # type: ignore[arg-type]

    def on_down(self, member: SimMember) -> None:
        """A member's process is gone; it comes back."""
        self.lost_ends.perhaps(member)
        life = member.life
        away = 1500 if self.chance(self.mix.retention) else 300  # so long that others may delete what it needs
        delay = self.source.randrange(1, away) if self.faults_on else 1
        self.time.after(delay, lambda: self._start(member) if member.life == life else None)

    def on_failed(self, member: SimMember, error: BaseException) -> None:
        """A process stopped by itself: right after a disk error, or on damage; wrong for any other reason."""
        if isinstance(error, CorruptRecordError) and self.damages.on(member):
            member.die("stops on damage", power=False)
        elif isinstance(error, DiskFailedError | ConfigError):
            # Mostly the machine goes too; else what a failed sync left in the page cache is read and yet not durable.
            member.die("disk errors", power=not self.damage_chance(self.damage_mix.process_only))
        else:
            raise error

    def check_served(self, member: SimMember, start: int, records: Records) -> None:
        """A read handed out records: those that are committed must be the ones that were committed."""
        end = min(start + records.count, member.replica.readable_end)
        if start < end:
            found = fingerprint(records.slice(0, end - start))
            known = self.checker.payloads(start, end)
            check(found == known, "a read served what was never committed", member.node_id, start, found, known)

    def _compare_tables(self, member: SimMember) -> None:
        self.counters["tables compared"] += 1
        tables = member.replica.tables
        found = crc32(tables.snapshot())
        known = self._tables.setdefault(tables.applied_index, found)
        check(found == known, "tables differ at the same index", member.node_id, tables.applied_index)

    def keep(self, log: CommitLog, end: int) -> None:
        """Remembers entries that a member is about to delete, magic and body, for the judgement in the end."""
        self.counters["deletions"] += 1
        at = log.first_index()
        while at < end:
            records = log.read(at, end, 1 << 20)
            data = memoryview(records.data)
            for row in range(records.count):
                start = int(records.starts[row])
                body = bytes(data[start + HEADER_BYTES : start + int(records.sizes[row])])
                entry = (int(records.headers["magic"][row]), body)
                known = self.deleted.setdefault(at + row, entry)
                check(known == entry, "two nodes delete different entries", at + row, known, entry)
            at = Index(at + records.count)

    # Members.

    def _start(self, member: SimMember) -> None:
        member.start()
        self.counters["starts"] += 1

    def on_hosted(self, member: SimMember) -> None:
        """A member takes part from now on."""
        self.checker.on_start(member)  # type: ignore[arg-type]
        self._compare_tables(member)
        life = member.life
        period = TICK + self.source.randrange(-1, 2)

        def tick() -> None:
            if member.life == life:
                member.input(member.replica.tick)
                self.time.after(max(period, member.stalled_until - self.time.now), tick)

        def checkpoint() -> None:
            if member.life == life:
                member.input(member.replica.save_checkpoint)
                self.time.after(CHECKPOINT_TICKS * TICK, checkpoint)

        self.time.after(self.source.randrange(1, TICK + 1), tick)
        self.time.after(self.source.randrange(1, CHECKPOINT_TICKS * TICK), checkpoint)

    # Faults.

    def _nemesis(self) -> None:
        if not self.faults_on:
            return
        self.time.after(50, self._nemesis)
        mix, source = self.mix, self.source
        if self.chance(50 / mix.crash_interval):
            self._crash_some()
        if mix.partition_interval and self.chance(50 / mix.partition_interval):
            self.network.partition_some(self._leaders())
        if self.chance(0.05):
            self.network.heal()
        self.damages.strike()
        alive = [member for member in self.members.values() if member.up]
        if not alive:
            return
        member, other = source.choice(alive), source.choice(tuple(self.members))
        if self.chance(mix.retention):
            self._delete_some(member)
        draw = source.random()
        if draw < 0.03:
            self.counters["stalls"] += 1
            member.stalled_until = self.time.now + source.randrange(50, 300)
        elif draw < 0.08:
            member.input(lambda: member.replica.report_unreachable(other))
        elif draw < 0.10:
            self._transfer(member, other)
        elif draw < 0.15 and mix.clock_jumps:
            self.counters["clock jumps"] += 1
            member.clock_offset += source.choice((-3_600_000, -500, 500, 3_600_000))
        elif draw < 0.15 + mix.disk_error and member.files.fail_at is None:
            self._fail_soon(member)

    def _fail_soon(self, member: SimMember) -> None:
        """Lets one of the next writes or syncs fail; perhaps the disk then takes nothing more, not even a mark."""
        member.files.fail_at = member.files.operations + self.source.randrange(1, 30)
        if self.damage_chance(self.damage_mix.mark_refused):
            self.counters["marks refused"] += 1
            member.files.fail_more = 10

    def _delete_some(self, member: SimMember) -> None:
        """Deletes as much as retention ever might, whoever still needs it."""
        end = self.damages.deletable_end(min(member.replica.visible_end, member.replica.readable_end))
        heads = [facts.first_index for facts in member.log.segment_facts() if facts.first_index <= end]
        if len(heads) > 1:
            index = self.source.choice((heads[-1], self.source.choice(heads[1:])))
            member.input(lambda: member.replica.delete_prefix(index))
            self._crash_soon(member)

    def _crash_soon(self, member: SimMember) -> None:
        """Perhaps lets a member die in the middle of what it is about to do to its files."""
        if self.faults_on and member.up and self.chance(self.mix.write_crash):
            member.files.crash_at = member.files.operations + self.source.randrange(1, 24)

    def _transfer(self, member: SimMember, target: NodeId) -> None:
        if member.replica.is_leader:
            self.counters["transfers"] += 1

            def transfer() -> None:
                with contextlib.suppress(NotLeaderError):  # it stepped down, and has not told yet
                    member.replica.transfer_leadership(target)

            member.input(transfer)

    def _crash_some(self) -> None:
        alive = [member for member in self.members.values() if member.running]
        if not alive:
            return
        count = len(alive) if self.chance(0.1) else 1
        for member in self.source.sample(alive, count):
            if count == 1 and self.chance(self.mix.write_crash):
                member.files.crash_at = member.files.operations + self.source.randrange(1, 12)
            else:
                member.die("crashes")

    def _leaders(self) -> list[NodeId]:
        return [m.node_id for m in self.members.values() if m.up and m.replica.raft.status().role is Role.LEADER]

    def _stop_faults(self) -> None:
        self.faults_on = False
        self.network.heal()
        self.network.faults = NetworkFaults()
        for member in self.members.values():
            member.stalled_until = self.time.now
            member.calm()
            if not member.running:
                self._start(member)

    # The end.

    def _demand_progress(self) -> None:
        start, before = self.time.now, self.checker.commit_index
        self._demand("no new commit", lambda: self.checker.commit_index > before + 20)
        self.counters["ticks to recover"] += (self.time.now - start) // TICK
        self.client_pause = 60 * TICK
        goal = self.checker.commit_index
        self._demand("damage is left", lambda: not self.damages.any)
        self._demand("a node stays behind", lambda: self._everywhere(goal))
        calm = self.time.now + 150 * TICK
        self._demand("members do not agree", lambda: self.time.now > calm and self._everywhere(None))

    def _demand(self, what: str, done: Callable[[], bool]) -> None:
        deadline = self.time.now + LIVENESS_TICKS_MAX * TICK

        def in_time() -> bool:
            if self.time.now > deadline:
                roles = {m.node_id: m.status for m in self.members.values() if m.up}
                raise LivenessError(f"{what} {LIVENESS_TICKS_MAX} ticks after the faults stopped: {roles}")
            return done()

        self.time.run_until(in_time)

    def _everywhere(self, goal: Index | None) -> bool:
        last_index = self.checker.commit_index if goal is None else goal
        return all(m.up and m.replica.readable_end > last_index for m in self.members.values())

    def _check_end(self) -> None:
        self.checker.check_disks()
        for member in self.members.values():
            self._compare_tables(member)
            check_sound(member)
        # A leader may have reset others to where it was about to delete, and died before it did.
        longest = min(self.members.values(), key=lambda member: member.log.first_index())
        check_history(self.history, longest, self.deleted)
        self.counters["operations"] = len(self.history.operations)
        self.counters["acknowledged"] = sum(isinstance(o.outcome, Appended) for o in self.history.operations)
        damaged = [m.node_id for m in self.members.values() if isinstance(m.log.failure, CorruptRecordError)]
        check(not damaged, "a store is damaged", damaged)


def replay_whole_command(seed: int) -> str:
    """Returns the command that runs one seed again."""
    return f"python -m tests.sim --seeds {seed}..{seed}"


def run_whole_seed(seed: int) -> Counter[str]:
    """Runs one seed; a failure names the command that replays it."""
    sim = ReplicaSim(seed)
    try:
        return sim.run()
    except Exception as error:
        error.add_note(f"at time {sim.time.now}, after {sim.time.events} events; replay: {replay_whole_command(seed)}")
        raise

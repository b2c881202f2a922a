"""One node of the whole simulation: the real Replica, Appends and CommitLog over a disk in memory.

Beside the real log each member keeps a shadow of it: what was staged and what was made durable, batch by batch. The
checkers judge the shadow; at every restart the recovered log is held against it, so that a log that forgets, invents
or changes anything is noticed the moment it opens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dledger_core.checksum import crc32
from dledger_core.errors import DLedgerError
from dledger_core.ids import Index, NodeId, Term
from dledger_core.raft import Batch, Configuration, HardState, LogRestart, Proposal, Ready, Status
from dledger_core.record import Records, records_of
from dledger_core.server.replica.environment import Environment
from dledger_core.server.replica.group_commit import persist
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.appends import Appends
from dledger_core.server.services.budget import Budget
from dledger_core.storage import CommitLog
from dledger_core.storage.write.trim import LogStart, TablesSnapshot
from tests.support.checkers import check
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.memory_store import MemoryStore
from tests.support.sim_repair import MemberRepairs

if TYPE_CHECKING:
    from tests.support.replica_sim import ReplicaSim

GROUP = "g"
INFLIGHT_BYTES_MAX = 20_000


def fingerprint(records: Records) -> tuple[int, ...]:
    """Identifies the bytes of records, entry by entry."""
    data = memoryview(records.data)
    ends = [*accumulate(records.sizes.tolist(), initial=0)]
    return tuple(crc32(data[start:stop]) for start, stop in pairwise(ends))


def shadow_of(batch: Batch) -> Batch:
    """Returns the batch with its fingerprint in the place of its bytes."""
    return replace(batch, payload=fingerprint(records_of(batch)), nbytes=0)


class WatchedLog(CommitLog):
    """A CommitLog whose writes are repeated on the member's shadow."""

    member: SimMember

    def place(self, proposal: Proposal, first_index: Index, term: Term, now_ms: int | None = None) -> Batch:
        batch = super().place(proposal, first_index, term, now_ms)
        self.member.staged.write(shadow_of(batch))
        return batch

    def stage(self, batch: Batch) -> None:
        super().stage(batch)
        self.member.staged.write(shadow_of(batch))

    def stage_truncate(self, index: Index) -> None:
        super().stage_truncate(index)
        self.member.staged.write(Index(index))

    def stage_restart(self, start: LogStart) -> None:
        super().stage_restart(start)
        self.member.staged.write(_new_start(start))

    def persist(
        self,
        hard_state: HardState | None,
        truncate_from: Index | None,
        batches: Sequence[Batch],
        reset: LogStart | None = None,
    ) -> None:
        member = self.member
        member.writing = Writing(hard_state, reset, truncate_from, batches)
        super().persist(hard_state, truncate_from, batches, reset)
        member.writing = Writing()
        new_start = _new_start(reset) if reset is not None else None
        for write in (hard_state, new_start, truncate_from, *map(shadow_of, batches)):
            if write is not None:
                member.disk.write(write)

    def read(self, start: int, end: int, max_bytes: int) -> Records:
        return self._served(start, super().read(start, end, max_bytes))

    def inspect(self, start: int, end: int, max_bytes: int) -> Records:
        return self._served(start, super().inspect(start, end, max_bytes))

    def _served(self, start: int, records: Records) -> Records:
        if "member" in vars(self) and self.member.up:
            self.member.sim.check_served(self.member, start, records)
        return records

    def rewrite_rows(self, records: Records, first_index: int) -> None:
        self.member.sim.counters["rows mended"] += not self.rows_fit(records, first_index)
        super().rewrite_rows(records, first_index)

    def delete_prefix(self, index: int, tables: TablesSnapshot, commit_index: int) -> Index:
        member = self.member
        member.sim.keep(self, index)
        member.writing = Writing(deleted_to=index)
        first_index = super().delete_prefix(index, tables, commit_index)
        member.writing = Writing()
        member.disk.delete_before(first_index)
        return first_index


def _new_start(start: LogStart) -> LogRestart:
    return LogRestart(start.first_index, start.previous_term, None)


@dataclass(frozen=True, slots=True)
class Writing:
    """What a member's disk is doing, so that a crash leaves any of it done or not."""

    hard_state: HardState | None = None
    reset: LogStart | None = None
    cut: Index | None = None
    batches: Sequence[Batch] = ()
    deleted_to: int = 0


class SimDisk:
    """``DiskWriter`` in simulated time: jobs wait in line, several are written with one sync, reports come later."""

    def __init__(
        self,
        member: SimMember,
        log: CommitLog,
        on_persisted: Callable[[list[Ready]], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._member = member
        self._log = log
        self._on_persisted = on_persisted
        self._on_failed = on_failed
        self._life = member.life
        self._jobs: deque[Ready | Callable[[], None]] = deque()
        self._unfinished = 0
        self._working = False

    @property
    def busy(self) -> bool:
        """Whether a submitted Ready has not been reported yet."""
        return self._unfinished > 0

    def submit(self, ready: Ready) -> None:
        """Queues a Ready."""
        self._unfinished += 1
        self._queue(ready)

    def run(self, job: Callable[[], None]) -> None:
        """Queues other work on the store."""
        self._queue(job)

    def _queue(self, job: Ready | Callable[[], None]) -> None:
        self._jobs.append(job)
        if not self._working:
            self._working = True
            self._later(self._member.sim.disk_delay(), self._turn)

    def close(self) -> None:
        """Members do not end in an orderly way."""

    def _later(self, delay: int, action: Callable[[], None]) -> None:
        def act() -> None:
            if self._member.life == self._life:
                action()

        self._member.sim.time.after(delay, act)

    def _turn(self) -> None:
        member, sim = self._member, self._member.sim
        count = len(self._jobs) if sim.chance(0.7) else sim.source.randrange(1, len(self._jobs) + 1)
        jobs = [self._jobs.popleft() for _ in range(count)]
        readys = [job for job in jobs if isinstance(job, Ready)]
        try:
            persist(self._log, readys)
            for job in jobs:
                if not isinstance(job, Ready):
                    job()
        except Crash:
            member.die("crashes in a write")
            return
        except DLedgerError as error:
            self._log.refuse_writes(error)
            member.input(partial(self._on_failed, error))
            return
        self._later(sim.report_delay(), lambda: self._report(readys))

    def _report(self, readys: list[Ready]) -> None:
        member = self._member
        self._unfinished -= len(readys)
        member.input(lambda: self._on_persisted(readys))
        self._working = False
        if self._jobs:
            self._working = True
            self._later(member.sim.disk_delay(), self._turn)


class SimReplica(Replica):
    """A Replica that shows each Ready to the checker once it was handled."""

    member: SimMember

    def delete_prefix(self, index: Index) -> None:
        super().delete_prefix(index)
        if not self._failed:
            self.member.staged.delete_before(self.raft.status().first_index)

    def _handle(self, ready: Ready) -> None:
        member = self.member
        super()._handle(ready)
        if not self._failed:
            member.sim.on_ready(member, replace(ready, batches=tuple(map(shadow_of, ready.batches)), reads=()))


class SimMember:
    """A machine: a disk and a clock that survive, a process that does not."""

    def __init__(self, sim: ReplicaSim, node_id: NodeId, seed: int) -> None:
        self.sim = sim
        self.node_id = node_id
        self.files = FaultyFiles(seed)
        self.disk = MemoryStore()
        self.staged = MemoryStore()
        self.writing = Writing()
        self.clock_offset = 0
        self.life = 0
        self.stalled_until = 0
        self.lost_behind: Index | None = None
        """The end of its log is lost, all that lay behind this entry for good; until that was seen at a start."""
        self.running = False
        """Whether the process is there; ``up`` only once its store is sound and hosted."""
        self.up = False
        self.repairs: MemberRepairs
        self.log: WatchedLog
        self.replica: SimReplica
        self.appends: Appends

    @property
    def path(self) -> Path:
        """Where its store lies."""
        return Path("/store") / GROUP / f"dledger-{self.node_id}"

    @property
    def first_index_max(self) -> int:
        """The log begins here at most, whatever was done of what is under way."""
        reset = self.writing.reset
        begins = (self.disk.first_index(), self.staged.first_index(), self.writing.deleted_to)
        return max(*begins, reset.first_index if reset is not None else 0)

    @property
    def core(self) -> Any:
        """The Raft core, for the checkers."""
        return self.replica.raft

    @property
    def status(self) -> Status:
        """The core's status."""
        return self.replica.raft.status()

    def now_ms(self) -> int:
        """The machine's own clock."""
        return 1_700_000_000_000 + self.sim.time.now + self.clock_offset

    def start(self) -> None:
        """Starts the process; the store is repaired first where that is needed."""
        self.life += 1
        self.stalled_until = self.sim.time.now
        self.running = True
        self.repairs = MemberRepairs(self, WatchedLog)
        self.repairs.open(self.host)

    def host(self, log: CommitLog) -> None:
        """Holds an opened store against the shadow, and starts the replica."""
        assert isinstance(log, WatchedLog)
        self.log = log
        log.member = self
        self._compare_recovered()
        self.staged = self.disk.copy()
        self.up = True
        self.replica = SimReplica(
            group=GROUP,
            node_id=self.node_id,
            configuration=Configuration(frozenset(self.sim.members)),
            config=self.sim.mix.raft,
            log=log,
            send=lambda _, message: self.sim.send(message),
            on_failed=self.failed,
            environment=self._environment(),
        )
        self.replica.member = self
        self.appends = Appends(self.replica, Budget(INFLIGHT_BYTES_MAX))
        self.repairs.watch()
        self.sim.on_hosted(self)

    def _environment(self) -> Environment:
        def call_soon(action: Callable[[], None]) -> None:
            life = self.life
            self.sim.time.after(self.sim.turn_delay(), lambda: self.input(action) if self.life == life else None)

        return Environment(
            now_ms=self.now_ms,
            call_soon=call_soon,
            open_disk=lambda log, on_persisted, on_failed: SimDisk(self, log, on_persisted, on_failed),
            random=self.sim.source,
        )

    def _compare_recovered(self) -> None:
        log, before = self.log, self.disk
        found: list[Batch] = []
        at = log.first_index()
        while at <= log.last_index():
            batches = log.read_batches(at, 1 << 20)
            check(bool(batches), "a log hides what it holds", self.node_id, at)
            for batch in batches:
                found.append(shadow_of(batch))
                at = Index(batch.last_index + 1)
        writing, first_index = self.writing, log.first_index()
        hard_state, cut, unsure = writing.hard_state, writing.cut, writing.batches
        allowed = {before.hard_state} | ({hard_state} if hard_state is not None else set())
        check(log.hard_state in allowed, "a hard state was lost or invented", self.node_id, log.hard_state, allowed)
        prev_term = self._compare_start(first_index)
        kept = [b for b in before.batches if cut is None or b.first_index < cut]
        if self.lost_behind is not None:
            vouched = [b for b in kept if b.last_index <= self.lost_behind]
            check(len(found) >= len(vouched), "a repair brought back too little", self.node_id, found, vouched)
            check(log.recovering_mark.above is not None, "a node votes that lost the end of its log", self.node_id)
            kept, self.lost_behind = kept[: len(found)], None
            self.sim.lost_ends.repaired()
        check(found[: len(kept)] == kept, "the log lost what was durable", self.node_id, found, kept)
        rest = found[len(kept) :]
        cut_away = [b for b in before.batches if cut is not None and b.first_index >= cut]
        new = list(map(shadow_of, unsure))
        known = rest == cut_away[: len(rest)] or rest == new[: len(rest)]
        check(known, "the log holds what was never written", self.node_id, rest, cut_away, new)
        self.writing = Writing()
        self.disk = MemoryStore(found, hard_state=log.hard_state, first_index=first_index, prev_term=prev_term)

    def _compare_start(self, first_index: Index) -> Term:
        """Holds the log's beginning against the shadow, which begins there afterwards; returns the term before."""
        before, reset = self.disk, self.writing.reset
        if reset is not None and first_index == reset.first_index:
            self.sim.counters["resets survived"] += 1
            before.write(_new_start(reset))
        known = before.first_index() <= first_index <= max(before.first_index(), self.writing.deleted_to)
        check(known, "the log begins elsewhere", self.node_id, before.first_index(), first_index, self.writing)
        before.delete_before(first_index)
        return before.term_at(Index(first_index - 1))

    def die(self, how: str, *, power: bool | None = None) -> None:
        """Ends the process; with ``power`` the machine too, so that unsynced writes survive in any subset."""
        self.sim.counters[how] += 1
        self.sim.counters["repairs interrupted"] += self.repairs.busy
        self.up = self.running = False
        self.life += 1
        self.calm()
        if self.sim.chance(0.7) if power is None else power:
            self.sim.counters["power losses"] += 1
            self.files.crash(self.sim.source.choice((0.0, 0.5, 0.9, 1.0)))
        else:
            self.files.kill()
        self.sim.on_down(self)

    def calm(self) -> None:
        """Nothing is about to happen to its disk."""
        self.files.crash_at = self.files.fail_at = None
        self.files.fail_more = 0

    def crash_soon(self) -> None:
        """Perhaps lets the process die in the middle of what a repair is about to do to its files."""
        sim = self.sim
        if sim.faults_on and sim.damage_chance(sim.mix.write_crash):
            self.files.crash_at = self.files.operations + sim.damage_source.randrange(1, 24)

    def fail_soon(self) -> None:
        """Perhaps lets the disk fail in the middle of what a repair is about to do."""
        sim = self.sim
        if sim.faults_on and sim.damage_chance(sim.mix.disk_error):
            self.files.fail_at = self.files.operations + sim.damage_source.randrange(1, 24)

    def failed(self, error: BaseException) -> None:
        """The replica or its disk gave up."""
        if not self.up:
            return
        self.sim.on_failed(self, error)

    def input(self, action: Callable[[], object]) -> None:
        """Gives the process one input and lets the checker look."""
        if not self.up:
            return
        action()
        if self.up:
            self.sim.on_step(self)

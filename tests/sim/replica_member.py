"""A complete replica as a member of the simulation: the real Replica, Appends, CommitLog and repairs.

Next to the real log each member keeps a shadow of it: the batches that were staged and those that were made durable.
The safety checker judges the shadow. At every start the recovered log is compared with it, so a log that loses, invents
or changes anything fails the moment it opens.

Messages travel as the bytes of their frames. The disk is ``FaultyFiles``: after a power loss, any subset of the sectors
of unsynced writes survives; a process may end in the middle of any file operation; a write or sync may fail, and then
its data is lost, or stays in the page cache of a machine whose process alone ended.
"""

from __future__ import annotations

import contextlib
import errno
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, ClassVar, cast

from dledger_core import control
from dledger_core.checksum import crc32
from dledger_core.config import Limits
from dledger_core.errors import (
    ConfigError,
    CorruptRecordError,
    DiskFailedError,
    DLedgerError,
    NotLeaderError,
    RecoveryRefusedError,
)
from dledger_core.ids import NO_INDEX, NUMBER_MAX, Index, MemberId, NodeId, Term, member_id, node_of
from dledger_core.lineage import LogEnd, RecoveryRecord
from dledger_core.net import codec
from dledger_core.net.frame import FrameDecoder
from dledger_core.net.limits.budget import Budget
from dledger_core.net.protocol import FRAME_BYTES_MAX
from dledger_core.raft import (
    UNKNOWN,
    AppendEntries,
    AppendEntriesResponse,
    Batch,
    Configuration,
    ConfigurationInForce,
    HardState,
    LogPointers,
    LogRestart,
    MemberChange,
    Message,
    Proposal,
    RawNode,
    Ready,
    Role,
)
from dledger_core.record import Records, merge_ranges, records_of
from dledger_core.server.bootstrap.store import GroupStore, configuration_of
from dledger_core.server.hosted import store_claim
from dledger_core.server.maintenance.archive_guard import ArchiveGuard
from dledger_core.server.replica.attachments import StoreClaim
from dledger_core.server.replica.environment import Environment
from dledger_core.server.replica.group_commit import persist
from dledger_core.server.replica.ready_loop import ReadyLoop
from dledger_core.server.replica.replica import Replica, ReplicaSettings
from dledger_core.server.services.appends import Appends
from dledger_core.server.services.archive import Archive
from dledger_core.server.services.membership import Membership
from dledger_core.server.services.transactions import Transactions
from dledger_core.storage import CommitLog
from dledger_core.storage.files.members_file import ConfigurationEntry
from dledger_core.storage.tables.tables import LogTables, TableChanges
from dledger_core.storage.write.trim import LogStart
from tests.sim.archives import Archives, Print
from tests.sim.bootstrap import is_waiting, prepare, store_at_start
from tests.sim.clients import History, SimClient, all_clients, check_history
from tests.sim.damage import Damages
from tests.sim.lies import tell
from tests.sim.member import TICK, Member
from tests.sim.repairs import MemberRepairs, check_intact
from tests.sim.safety import check
from tests.sim.set_back import SetBacks
from tests.support.faulty_files import Crash, FaultyFiles
from tests.support.frames import receive
from tests.support.logs import Row, rows_between
from tests.support.memory_store import MemoryStore, configurations_of

if TYPE_CHECKING:
    from tests.sim.simulator import Simulator

GROUP = "g"
INFLIGHT_BYTES_MAX = 20_000
DAY_MS = 24 * 3_600_000
CHECKPOINT_TICKS = 100
TRANSACTION_TIMEOUT_MS = 2500
LIMITS = Limits(log_time_s=0.5)
"""A unit of simulated time is a ms of all clocks; members tick every 10 ms."""


def fingerprint(records: Records) -> tuple[Print, ...]:
    """Return a checksum of each record."""
    data = bytes(records.data)
    pieces = (data[start:stop] for start, stop in pairwise(accumulate(records.sizes.tolist(), initial=0)))
    return tuple(Print.of(crc32(piece), piece) for piece in pieces)


class Fingerprint(tuple[Print, ...]):  # noqa: SLOT001 - no tuple has slots with values
    """Payload of a shadow's batch: a checksum of each record, and the body of a configuration."""

    configuration: bytes | None


def shadow_of(batch: Batch) -> Batch:
    """Return the batch with its fingerprint as payload."""
    payload = Fingerprint(fingerprint(records_of(batch)))
    payload.configuration = batch.configuration
    return replace(batch, payload=payload, nbytes=0)


def restart_of(start: LogStart) -> LogRestart:
    return LogRestart(start.first_index, start.previous_term, None, in_force_of(start.members))


def in_force_of(found: ConfigurationEntry) -> ConfigurationInForce:
    return ConfigurationInForce(found.index, Configuration.from_bytes(found.body))


@dataclass(frozen=True, slots=True)
class Writing:
    """The writes of a member's disk in progress: a crash leaves any part of them done."""

    hard_state: HardState | None = None
    restart: LogStart | None = None
    truncate_from: Index | None = None
    batches: Sequence[Batch] = ()
    trimmed_to: int = 0


class WatchedLog(CommitLog):
    """A CommitLog whose writes are repeated on the member's shadow."""

    member: ReplicaMember
    truncates = False
    """Whether it is removing the end of its files, during which the thread of preallocation waits."""

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
        self.member.staged.write(restart_of(start))

    def persist(
        self,
        hard_state: HardState | None,
        truncate_from: Index | None,
        batches: Sequence[Batch],
        reset: LogStart | None = None,
    ) -> None:
        member = self.member
        member.writing = Writing(hard_state, reset, truncate_from, batches)
        # Below its floor a store may keep the tail that it found, which the first append removes.
        self.truncates = truncate_from is not None or self.floor is not None
        super().persist(hard_state, truncate_from, batches, reset)
        self.truncates = False
        member.writing = Writing()
        restart = restart_of(reset) if reset is not None else None
        for write in (hard_state, restart, truncate_from, *map(shadow_of, batches)):
            if write is not None:
                member.disk.write(write)

    def remove_floor(self, commit_index: int) -> None:
        self.truncates = True
        super().remove_floor(commit_index)
        self.truncates = False

    def read(self, start: int, end: int, max_bytes: int) -> Records:
        return self._served(start, super().read(start, end, max_bytes))

    def inspect(self, start: int, end: int, max_bytes: int) -> Records:
        return self._served(start, super().inspect(start, end, max_bytes))

    def _served(self, start: int, records: Records) -> Records:
        """Check that the committed ones of the records that a read returned are the ones that were committed."""
        if "member" in vars(self) and self.member.up:
            end = min(start + records.count, self.member.replica.readable_end)
            if start < end:
                found = fingerprint(records.slice(0, end - start))
                known = self.member.sim.checker.payloads(start, end)
                check(found == known, "a read served uncommitted content", self.member.node_id, start, found, known)
        return records

    def rewrite_rows(self, records: Records, first_index: int) -> None:
        self.member.sim.counters["rows rewritten"] += not self.rows_fit(records, first_index)
        super().rewrite_rows(records, first_index)

    def trim(self, index: int, tables: TableChanges, commit_index: int) -> Index:
        member = self.member
        member.sim.shared.keep_deleted(self, index)
        member.writing = Writing(trimmed_to=index)
        first_index = super().trim(index, tables, commit_index)
        member.writing = Writing()
        member.disk.delete_before(first_index)
        return first_index


class SimDisk:
    """``DiskWriter`` in simulated time: jobs wait, several are written with one sync, their report comes later."""

    def __init__(
        self,
        member: ReplicaMember,
        log: CommitLog,
        on_persisted: Callable[[list[Ready]], None],
        on_failed: Callable[[BaseException], None],
    ) -> None:
        self._member = member
        self._log = log
        self._on_persisted = on_persisted
        self._on_failed = on_failed
        self._jobs: deque[Ready | Callable[[], None]] = deque()
        self._unreported = 0
        self._working = False

    @property
    def busy(self) -> bool:
        return self._unreported > 0

    def submit(self, ready: Ready) -> None:
        self._unreported += 1
        self.run(ready)

    def run(self, job: Ready | Callable[[], None]) -> None:
        self._jobs.append(job)
        if not self._working:
            self._work_later()

    def close(self) -> None:
        """Finish the queue, as a process does that retires its log; no other one stops in an orderly way."""
        jobs = list(self._jobs)
        self._jobs.clear()
        persist(self._log, [job for job in jobs if isinstance(job, Ready)])
        for job in jobs:
            if not isinstance(job, Ready):
                job()

    def _work_later(self) -> None:
        self._working = True
        self._member.later(self._member.sim.disk_delay(), self._work)

    def _work(self) -> None:
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
        except DLedgerError as error:
            self._log.reject_writes(error)
            member.input(partial(self._on_failed, error))
        else:
            delay = sim.source.choice((0, 0, 1, 5)) if sim.faults_on else 0
            member.later(delay, lambda: self._report(readys))

    def _report(self, readys: list[Ready]) -> None:
        self._unreported -= len(readys)
        self._member.input(lambda: self._on_persisted(readys))
        self._working = False
        if self._jobs:
            self._work_later()


class ShownLoop(ReadyLoop):
    """A ReadyLoop that shows each Ready to the checker after it was executed."""

    shown_to: ReplicaMember

    def execute(self, ready: Ready) -> None:
        super().execute(ready)
        if not self.has_failed:
            self.shown_to.handled(ready)


class SimReplica(Replica):
    loop: ShownLoop
    loop_type = ShownLoop


class ReplicaMember(Member):
    """See the module. ``log``, ``replica`` and ``appends`` are those of the current process."""

    fault_kinds: ClassVar = (
        *("transfer", "clock_jump", "disk_error", "trim", "damage", "lose_end"),
        *("lose_copy", "lose_checkpoint"),
    )
    membership_faults: ClassVar = ("lose_members", "set_back")
    drives_changes = True
    log: WatchedLog
    replica: SimReplica
    appends: Appends
    repairs: MemberRepairs
    store: GroupStore
    waits = False
    """Whether its process runs with a store that has retired its log."""
    is_moved = False
    """Whether its store belongs to another log now, as another member."""
    was_cut = False
    """Whether its log was ended before a hole."""
    cut_start: int | None = None
    """Start of an interrupted cut."""
    continues: RecoveryRecord | None = None
    """The record by which its store came to this log."""

    @property
    def comes_from_another_log(self) -> bool:
        """Whether its store belongs to another log until a recovery completes it."""
        return self.continues is not None

    def __init__(self, sim: Simulator, node_id: MemberId, seed: int) -> None:
        super().__init__(sim, node_id)
        self.node: NodeId = node_of(node_id)
        bootstrapped = sim.bootstrapped if node_id in sim.bootstrapped.voters else UNKNOWN
        self.disk.in_force_before = ConfigurationInForce(NO_INDEX, bootstrapped)
        self.files = FaultyFiles(seed)
        self.files.before_sync = self.preallocate_at_sync
        self.writing = Writing()
        self.clock_offset = 0
        self.lost_after: Index | None = None
        """The last entry that survived the loss of the end of this log; None again once a start has shown it."""
        self.checkpoint_lost = False
        """Whether both copies of the checkpoint are lost, until a start has shown it."""
        self.members_lost = False
        """Whether both copies of the members file are lost, until a start has shown it."""
        self.members_once_lost = False
        self.was_set_back = False
        """Whether its disk was set back to an earlier time, and no other member has looked at it since."""
        self.was_hurt = False
        """Whether its files ever lost something or a write failed, which is more than crashes and power cuts."""
        self.lose_end_next: Callable[[], None] | None = None
        self.path = Path("/store") / GROUP / f"dledger-{self.node}"

    @staticmethod
    def shared(sim: Simulator) -> Shared:
        return Shared(sim)

    @staticmethod
    def clients(sim: Simulator) -> list[SimClient]:
        return all_clients(sim, sim.shared.history)

    @staticmethod
    def name_of(node: int, store: int = 1) -> MemberId:
        return member_id(NodeId(f"n{node}"), f"{node}.{store}")

    @staticmethod
    def may_lose(sim: Simulator) -> bool:
        return bool(sim.shared.damages.is_calm())

    @property
    def core(self) -> RawNode:
        return self.replica.raft

    @property
    def is_damaged(self) -> bool:
        return self.sim.shared.damages.on(self)

    @property
    def first_index_max(self) -> int:
        """The highest index at which the log may start, whatever part of the writes in progress is done."""
        restart = self.writing.restart
        starts = (self.disk.first_index(), self.staged.first_index(), self.writing.trimmed_to)
        return max(*starts, restart.first_index if restart is not None else 0)

    def pointers(self) -> LogPointers:
        replica = self.replica
        pointers = self.log.pointers(replica.raft.pointers())
        return replace(pointers, readable_end=replica.readable_end, visible_end=replica.visible_end)

    @property
    def readable_end(self) -> int:
        return self.replica.readable_end

    def tick(self) -> None:
        self.replica.tick()
        if self.leads and self.sim.changes is not None:
            self.sim.changes.drive(self)

    def input(self, action: Callable[[], object]) -> None:
        if not self.up:
            return
        before, readable_end = self.core.first_index, self.readable_end
        known = max(self.replica.commit_index, self.replica.tables.applied_index)
        super().input(action)
        if self.up and before < self.core.first_index <= readable_end:  # otherwise a snapshot install begins
            self.sim.shared.archives.check_trim(self, known)

    def receive(self, message: object) -> None:
        for frame in receive(self.sim.shared.decoder, message):
            for _, decoded in codec.frame_to_messages(frame, self.sim.shared.ends.__getitem__, self.sim.shared.beats):
                if self.attaches(self.sim.members[decoded.sender]):
                    self.replica.step(decoded)

    def attaches(self, other: ReplicaMember) -> bool:
        """Attach the process of another store, once; return whether its messages may be taken."""
        if not other.up or (other.node_id, other.life) in self._attached:
            return True
        self._attached.add((other.node_id, other.life))
        try:
            self.replica.peers.check_attach(other.shown)
        except DLedgerError as error:
            self.sim.shared.set_backs.refused(other, error)
            if not other.up:
                return False
            self.replica.peers.check_attach(other.shown)  # it shows the floor that it needs
        other.replica.peers.attached(self.node_id)
        return True

    @property
    def shown(self) -> StoreClaim:
        """The store as its node shows it to others."""
        return store_claim(self.replica)

    def unreachable(self, peer: MemberId) -> None:
        self.replica.peers.unreachable(node_of(peer))

    def propose_change(self, change: MemberChange) -> None:
        self.replica.propose_change(change)

    def wall_ms(self) -> int:
        """Return the machine's own clock."""
        return 1_700_000_000_000 + self.sim.time.now + self.clock_offset

    # The process.

    def start(self) -> None:
        """Start the process; it repairs its store first where that is needed."""
        self.life += 1
        self.stalled_until = self.sim.time.now
        self.running = True
        self.repairs = MemberRepairs(self, WatchedLog)
        try:
            self._open()
        except Crash:
            self.die("crashes at a start")

    def _open(self) -> None:
        if not self.files.names:
            check(is_waiting(self.files, self.path, self.node), "an empty store belongs to a log", self.node_id)
            voters = sorted(self.sim.bootstrapped.voters)
            prepare(self.files, self.path, self.node_id, voters, self.sim.mix.storage, self.sim.log_uuid)
        draw = Random(f"{self.sim.seed}/{self.node_id}/{self.life}")
        self.store = store_at_start(self.files, self.path, self.node_id, draw)
        identity = self.store.identity
        if self.waits or identity.recovery is not None:
            self.waits = not identity.is_member and identity.recovery is not None
            if self.waits:
                return
            if self.store.member != self.node_id:
                self.sim.recoveries.move(self)
                return
        check(identity.is_member and self.store.member == self.node_id, "a store is another member", self.node_id)
        self.repairs.open(self.host)

    def host(self, log: CommitLog) -> None:
        """Compare an opened store with the shadow, and start the replica."""
        assert isinstance(log, WatchedLog)
        self.log = log
        log.member = self
        self.was_hurt |= self.is_damaged or self.lost_after is not None or self.checkpoint_lost
        self.was_hurt |= self.members_lost or self.was_set_back
        if not self.was_hurt:
            self.sim.counters["starts after crashes only"] += 1
            check(log.floor is None or not log.floor.is_open, "a crash alone takes a vote", self.node_id, log.floor)
        ended = log.recovered.written_end and log.floor is not None
        if ended and self.is_damaged and self.lost_after is None:
            # A repair, perhaps of an earlier life, ended the log before damage to entries that no peer had committed.
            self.sim.counters["logs ended before damage"] += 1
            self.sim.checker.lost.append((self.node_id, self.disk.copy()))
            self.lost_after = log.last_index()
        self._compare_recovered()
        self.staged = self.disk.copy()
        self.up = True
        self._attached: set[tuple[MemberId, int]] = set()
        iteration_delay = self.sim.shared.iteration_delay
        self.replica = SimReplica(
            ReplicaSettings(
                group=GROUP,
                member=self.node_id,
                bootstrapped=configuration_of(self.store.identity),
                raft=self.sim.mix.raft,
                preferred_leaders=self.sim.mix.preferred_leaders,
                limits=LIMITS,
            ),
            log,
            Environment(
                monotonic_ms=lambda: self.sim.time.now,
                running_ms=lambda: self.sim.time.now,
                call_soon=lambda action: self.later(
                    iteration_delay if self.sim.faults_on else 0, lambda: self.input(action)
                ),
                send=lambda _, message: self._send(message),
                open_disk=lambda log, on_persisted, on_failed: SimDisk(self, log, on_persisted, on_failed),
                random=self.sim.source,
                background=lambda work: work(),
            ),
            self.failed,
        )
        self.replica.loop.shown_to = self
        self.appends = Appends(self.replica, Budget(INFLIGHT_BYTES_MAX))
        self.transactions = Transactions(self.appends)
        self.archive = Archive(self.appends, cast("Membership", None), None, LIMITS)
        self.guard = ArchiveGuard(self.replica, int(LIMITS.log_time_s * 1000))
        self.replica.loop.observe(self.appends, self.transactions)
        self.repairs.watch()
        self.joined()
        others = (other for other in self.sim.members.values() if other.up and other is not self)
        for other in others:  # as links do that are there at once
            self.replica.peers.attached(other.node_id)
            other.replica.peers.attached(self.node_id)
        if self.was_set_back:
            self.sim.shared.set_backs.returned(self)
        if not self.up:
            return  # one of these calls wrote, and a fault struck
        self.sim.shared.compare_tables(self)
        self.later(self.sim.source.randrange(1, CHECKPOINT_TICKS * TICK), self._checkpoint)

    def _checkpoint(self) -> None:
        self.sim.shared.keep_orphaned(self)
        self.input(self.replica.store.save_checkpoint)
        self.input(lambda: self.transactions.abort_inactive(TRANSACTION_TIMEOUT_MS))
        self.later(CHECKPOINT_TICKS * TICK, self._checkpoint)

    def _compare_recovered(self) -> None:
        log, before, writing = self.log, self.disk, self.writing
        found: list[Batch] = []
        at = log.first_index()
        while at <= log.last_index():
            batches = log.read_batches(at, 1 << 20)
            check(bool(batches), "a log does not return its entries", self.node_id, at)
            found += map(shadow_of, batches)
            at = Index(found[-1].last_index + 1)
        allowed = {before.hard_state, writing.hard_state} - {None}
        check(log.hard_state in allowed, "a hard state was lost or invented", self.node_id, log.hard_state, allowed)
        first_index = log.first_index()
        prev_term = self._compare_start(first_index)
        truncated = [
            b for b in before.batches if writing.truncate_from is not None and b.first_index >= writing.truncate_from
        ]
        kept = before.batches[: len(before.batches) - len(truncated)]
        newest = [before.in_force_before, *configurations_of(kept)][-1].index
        if self.lost_after is not None:
            covered = [batch for batch in kept if batch.last_index <= self.lost_after]
            check(len(found) >= len(covered), "a repair restored too little", self.node_id, found, covered)
            check(log.floor is not None, "a node votes that lost the end of its log", self.node_id)
            kept, self.lost_after = kept[: len(found)], None
            self.sim.shared.isolate_leader()
        if self.checkpoint_lost:
            check(log.floor is not None, "a node votes that lost its checkpoint", self.node_id)
            self.checkpoint_lost = False
            self.sim.shared.isolate_leader()
        if self.members_lost:
            check(log.floor is not None, "a node votes that lost its members", self.node_id)
            self.sim.shared.isolate_leader()
        check(found[: len(kept)] == kept, "the log lost durable entries", self.node_id, found, kept)
        rest, new = found[len(kept) :], list(map(shadow_of, writing.batches))
        known = rest in (truncated[: len(rest)], new[: len(rest)])
        check(known, "the log contains entries that were never written", self.node_id, rest, truncated, new)
        self.writing = Writing()
        self.disk = MemoryStore(found, hard_state=log.hard_state, first_index=first_index, prev_term=prev_term)
        self.disk.in_force_before = before.in_force_before
        self._compare_configurations(newest)

    def _compare_configurations(self, newest: Index) -> None:
        """Compare what the store knows of its members with the shadow; ``newest`` is the last durable change."""
        log, unknown_group = self.log, ConfigurationInForce(NO_INDEX, UNKNOWN)
        found = [in_force_of(entry) for entry in log.configurations]
        self.members_once_lost |= self.members_lost
        trimmed_later = self.members_once_lost and found[:1] == [unknown_group]
        if log.first_index() > 0 and (self.members_lost or trimmed_later):
            self.disk.in_force_before = unknown_group
        expected = self.disk.configurations()
        if self.continues is not None:  # of the retired log, a store keeps some configurations, which count no longer
            found = [each for each in found if self._is_new(each.index)]
            expected = [each for each in expected if self._is_new(each.index)]
            newest = newest if newest > self.continues.point.index else NO_INDEX
        elif expected[0].index == NO_INDEX and (not found or found[0].index != NO_INDEX):
            del expected[0]  # the bootstrap; the store gets it at each start
        check(found == expected, "a store knows other members than its log", self.node_id, found, expected)
        unknown = newest > log.last_index() or self.members_lost
        check(log.ends_below_members or not unknown, "a store does not notice that it lost its members", self.node_id)
        self.members_lost = False

    def _is_new(self, index: Index) -> bool:
        """Whether an entry was written in this log, not in one that it continues."""
        assert self.continues is not None
        return index >= self.disk.first_index() and self.disk.term_at(index) > self.continues.term

    def _compare_start(self, first_index: Index) -> Term:
        """Compare the start of the log with the shadow, which starts there afterwards; return the term before it."""
        before, restart = self.disk, self.writing.restart
        if restart is not None and first_index == restart.first_index:
            self.sim.counters["snapshots survived"] += 1
            before.write(restart_of(restart))
        known = before.first_index() <= first_index <= max(before.first_index(), self.writing.trimmed_to)
        check(known, "the log starts elsewhere", self.node_id, before.first_index(), first_index, self.writing)
        before.delete_before(first_index)
        return before.term_at(Index(first_index - 1))

    def die(self, how: str, *, power: bool | None = None) -> None:
        """End the process; with ``power`` the machine too, so that unsynced writes survive in any subset."""
        self.sim.counters[how] += 1
        self.sim.counters["repairs interrupted"] += self.repairs.busy
        self.sim.note("die", self.node_id, how)
        self.up = self.running = False
        self.life += 1
        self.calm()
        if self.sim.chance(0.7) if power is None else power:
            self.sim.counters["power losses"] += 1
            self.files.crash(self.sim.source.choice((0.0, 0.5, 0.9, 1.0)))
        else:
            self.files.kill()
        if self.lose_end_next is not None:
            self.lose_end_next()
            self.lose_end_next = None
        self.sim.on_down(self)

    def leave(self) -> LogEnd:
        """End the replica, which retires its log; return its final end. The process stays."""
        self.calm()
        self.up = False
        self.life += 1
        try:
            return self.replica.store.close_with_end()
        finally:
            self.replica.loop.stop(RecoveryRefusedError("it has retired its log", self.node_id))

    def die_in_write(self) -> bool:
        strikes = self.up and self.sim.strikes("write_crash")
        if strikes:
            self.files.crash_at = self.files.operations + self.sim.source.randrange(1, 12)
        return strikes

    def crash_soon(self) -> None:
        """Perhaps let the process end in the middle of the file operations that it is about to do."""
        if self.sim.strikes("write_crash"):
            self.files.crash_at = self.files.operations + self.sim.source.randrange(1, 24)

    def calm(self) -> None:
        self.files.crash_at = self.files.fail_at = None
        self.files.fail_more = 0

    def failed(self, error: BaseException) -> None:
        """End a process that gave up: after a disk error, or on damage; wrong for any other reason."""
        if not self.running:
            return
        if isinstance(error, CorruptRecordError) and self.sim.shared.damages.on(self):
            self.die("stops on damage", power=False)
        elif isinstance(error, DiskFailedError | ConfigError):
            # Mostly the machine ends too; otherwise the page cache has data that a failed sync left not durable.
            self.was_hurt = True
            self.die("disk errors", power=not self.sim.strikes("process_only"))
        else:
            raise error

    def handled(self, ready: Ready) -> None:
        """Check a Ready after the replica handled it."""
        if ready.restart is not None:
            self.crash_soon()
        log_time_ms = self.replica.log_time.now_ms
        check(log_time_ms <= self.sim.time.now, "log time is ahead of real time", self.node_id, log_time_ms)
        self.sim.on_ready(self, replace(ready, batches=tuple(map(shadow_of, ready.batches)), reads=()))
        self.sim.shared.archives.observe(self)
        if ready.restart is not None:
            self.sim.shared.archives.check_install(self, ready.restart.first_index)
            self.sim.recoveries.on_install(self)
        if ready.committed is not None and self.sim.chance(0.1):
            self.sim.shared.compare_tables(self)
        if ready.soft_state is not None and ready.soft_state.role is Role.LEADER and self.sim.changes is not None:
            self.sim.changes.on_leader(self)

    def _send(self, message: Message) -> None:
        shown = message
        if isinstance(message, AppendEntries):
            shown = replace(message, batches=tuple(map(shadow_of, message.batches)))
        self.sim.checker.on_send(self, shown)
        if isinstance(message, AppendEntriesResponse) and message.accepted:
            self.sim.shared.archives.check_format(self)
        self.sim.send(message, b"".join(codec.message_to_frame(self.sim.shared.number_of(message), message)))

    # Faults of complete replicas.

    def transfer(self, random: Random) -> None:
        target = node_of(random.choice(sorted(self.sim.bootstrapped.voters)))
        if self.replica.is_leader and self.sim.store_of(target).node_id in self.core.configuration.voters:
            self.sim.counters["transfers"] += 1

            def transfer() -> None:
                with contextlib.suppress(NotLeaderError):  # it stepped down, and has not reported it yet
                    self.replica.leadership.transfer(target)

            self.input(transfer)

    def clock_jump(self, random: Random) -> None:
        self.sim.counters["clock jumps"] += 1
        self.clock_offset += random.choice((-30 * DAY_MS, -3_600_000, -500, 500, 3_600_000, 30 * DAY_MS))

    def disk_error(self, random: Random) -> None:
        """Let one of the next writes or syncs fail; perhaps the disk then rejects all others, also a marker file."""
        if self.files.fail_at is None:
            self.files.fail_errno = random.choice((errno.EIO, errno.EIO, errno.ENOSPC, errno.EDQUOT))
            self.files.fail_at = self.files.operations + random.randrange(1, 30)
            if self.sim.strikes("mark_refused"):
                self.sim.counters["marks refused"] += 1
                self.files.fail_more = 10

    def trim(self, random: Random) -> None:
        """Delete as much as retention ever might, also entries that another member still needs."""
        self._trim(random, min(self.replica.visible_end, self.readable_end))

    def retain(self, random: Random) -> None:
        """Delete what the archive allows, as a round of retention that has compared its records with the log."""
        replica, end = self.replica, self.replica.store.archived_end
        if end is None:
            return
        if replica.tables.archive.is_active:
            end = min(end, self.guard.deletable_end(self.log.first_index(), end))
        check(not replica.measures.archive_differs, "a member differs from what is archived", self.node_id)
        self._trim(random, min(replica.visible_end, self.readable_end, end, *replica.pins.starts(replica.pin_time_ms)))

    def _trim(self, random: Random, end: int) -> None:
        replica, end = self.replica, self.sim.shared.damages.deletable_end(end)

        def trim(index: Index) -> None:
            before, is_active = replica.raft.first_index, replica.tables.archive.is_active
            applied = replica.tables.applied_index
            found = () if self.is_damaged else self.log.control_entries(applied + 1, NUMBER_MAX)
            waiting = [body for _, _, body in found]
            replica.store.trim(index)
            if (first := replica.raft.first_index) > before and not replica.loop.has_failed:
                hasty = not is_active and any(control.unpack(body).get("k") == "archived" for body in waiting)
                check(not hasty, "a trim does not wait for an archive that begins", self.node_id, first)
                self.staged.delete_before(first)

        starts = [segment.first_index for segment in self.log.segment_summaries() if segment.first_index <= end]
        if len(starts) > 1:
            index = random.choice((starts[-1], random.choice(starts[1:])))
            self.input(lambda: trim(index))
            self.crash_soon()

    def lie(self, random: Random) -> None:
        """Receive a message that says what cannot be true."""
        self.input(lambda: tell(self, random, self.replica.step, contradict=False))

    def damage(self, random: Random) -> None:
        self.sim.shared.damages.strike(random)

    def lose_end(self, random: Random) -> None:
        """Crash, and lose the end of the log."""
        self.lose_end_next = partial(self.sim.shared.damages.lose_end, self, random)
        if not self.die_in_write():
            self.die("crashes")

    def lose_copy(self, random: Random) -> None:
        """Lose one copy of hard state or checkpoint, while the process runs."""
        self.sim.shared.damages.lose_copy(self, random)

    def lose_checkpoint(self, random: Random) -> None:
        """Crash, and lose both copies of the checkpoint."""
        self.lose_end_next = partial(self.sim.shared.damages.lose_checkpoint, self, random)
        if not self.die_in_write():
            self.die("crashes")

    def lose_members(self, random: Random) -> None:
        """Crash, and lose both copies of the members file."""
        self.lose_end_next = partial(self.sim.shared.damages.lose_members, self, random)
        if not self.die_in_write():
            self.die("crashes")

    def set_back(self, random: Random) -> None:
        """Copy the disk now, and return to that copy later."""
        self.sim.shared.set_backs.copy(self, random)

    def preallocate_at_sync(self, path: Path) -> None:
        """Preallocate as another thread might at the start of a sync: its own sync may be the one that fails."""
        if self.up and not self.log.truncates and path.parent.name == "data" and self.sim.strikes("preallocate"):
            self.sim.counters["preallocations"] += 1
            self.files.before_sync = None
            try:
                self.log.preallocate()
            finally:
                self.files.before_sync = self.preallocate_at_sync

    def check_end(self) -> None:
        self.sim.shared.compare_tables(self)
        check_intact(self)
        check(self.log.failure is None, "a store is damaged", self.node_id, self.log.failure)
        if self is self.sim.shared.longest():
            check_history(self.sim.shared.history, self, self.sim.shared.deleted, self.sim.shared.orphaned)
            calls = self.sim.shared.history.calls
            self.sim.counters["acknowledged"] = sum(call.status == "ok" for call in calls)


class Shared:
    """The state of a run that its complete replicas share."""

    def __init__(self, sim: Simulator) -> None:
        self._sim = sim
        self.damages = Damages(sim)
        self.set_backs = SetBacks(sim)
        self.archives = Archives(sim)
        self.history = History(sim)
        self.decoder = FrameDecoder(FRAME_BYTES_MAX)
        self._numbers: dict[codec.Ends, int] = {}
        self.ends: list[codec.Ends] = []
        """Group, sender and target of the messages with each number, as attached links know them."""
        self.beats: codec.Beats = {}
        self.deleted: dict[int, Row] = {}
        """Trimmed entries by index."""
        self.orphaned: list[tuple[int, int]] = []
        """Orphaned ranges, also those that members have forgotten."""
        # One delay for all iterations of a run, so that they keep their order.
        self.iteration_delay = sim.source.choice((0, 0, 1, 5))
        self._tables: dict[Index, tuple[int, Index, tuple[tuple[int, int], ...]]] = {}

    def number_of(self, message: Message) -> int:
        ends = codec.Ends(GROUP, message.sender, message.target)
        if ends not in self._numbers:
            self._numbers[ends] = len(self.ends)
            self.ends.append(ends)
        return self._numbers[ends]

    def compare_tables(self, member: ReplicaMember) -> None:
        self._sim.counters["tables compared"] += 1
        applied, first = member.replica.tables.applied_index, member.replica.raft.first_index
        orphaned = tuple(member.replica.tables.transactions.orphaned.ranges)
        rest = LogTables.restore(member.replica.tables.snapshot())
        rest.transactions.orphaned.trim(NUMBER_MAX)
        rest.archive.trim(NUMBER_MAX)
        self.archives.check_tables(member)
        found = crc32(rest.snapshot()), first, orphaned
        known = self._tables.setdefault(applied, found)
        # Each member forgets the orphaned ranges that it has trimmed.
        since = max(first, known[1])
        same = found[0] == known[0] and _since(since, orphaned) == _since(since, known[2])
        check(same, "tables differ at the same index", member.node_id, applied)

    def keep_deleted(self, log: CommitLog, end: int) -> None:
        """Record the entries that a member is about to delete."""
        self._sim.counters["deletions"] += 1
        for row in rows_between(log, log.first_index(), end):
            known = self.deleted.setdefault(row.index, row)
            check(known == row, "two members delete different entries", row, known)

    def keep_orphaned(self, member: ReplicaMember) -> None:
        """Record the orphaned ranges of a member, which forgets those that it has trimmed."""
        self.orphaned = merge_ranges([*self.orphaned, *member.replica.tables.transactions.orphaned.ranges])

    def isolate_leader(self) -> None:
        """Perhaps isolate the leader, so that a member that lost the end of its log would have to elect another."""
        if self._sim.faults_on and self._sim.chance(0.6):
            for leader in [member.node_id for member in self._sim.members.values() if member.leads]:
                self._sim.counters["leaders isolated"] += 1
                self._sim.network.partition("isolate", leader, self._sim.source)

    def longest(self) -> ReplicaMember:
        """Return a member whose log starts first: a leader may have sent others to where it was about to trim."""
        return min(self._sim.current, key=lambda member: member.log.first_index())


def _since(first: int, ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return the ranges from an index on."""
    return [(max(start, first), end) for start, end in ranges if end > first]

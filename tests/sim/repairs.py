"""Repairs in the simulation: the server's own ones, in simulated time over simulated disks and links.

A quarantined store is repaired before its member participates (``StoreRepairs``), damage that a read finds in a
running member is repaired at the same time as its other work (``LiveRepairs``), and every log is read from time to time
(``Scrub``). A member's response to a repair comes late, and not at all while that member is down, stalled or isolated.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from dledger_core.config import Peer
from dledger_core.errors import CorruptRecordError, DLedgerError, IndexOutOfRangeError, UnreachableError
from dledger_core.ids import node_of
from dledger_core.record import Records
from dledger_core.server.config import ServerConfig
from dledger_core.server.maintenance.repair import StoreRepairs, open_checked
from dledger_core.server.maintenance.scrub import LiveRepairs, Scrub
from dledger_core.server.replica.members import Members
from dledger_core.server.replica.replica import Replica
from dledger_core.storage import CommitLog
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import verification_reason
from dledger_core.storage.write.append_clock import AppendClock
from dledger_core.storage.write.log_writer import LogHooks
from tests.sim.safety import check
from tests.sim.virtual_time import Resume, Wait, run_task
from tests.support.faulty_files import Crash
from tests.support.logs import PreallocationByHand

if TYPE_CHECKING:
    from tests.sim.replica_member import ReplicaMember

T = TypeVar("T")


UNITS_PER_S = 100
RESPONSE_UNITS = 100
SCRUB_BYTES_PER_S = 20_000


class SimSource:
    """Another member as a source of records; see ``PeerRecordSource``."""

    def __init__(self, member: ReplicaMember, peer: Peer) -> None:
        self.peer = peer
        self._member = member

    @property
    def _other(self) -> ReplicaMember:
        found: ReplicaMember = self._member.sim.store_of(self.peer.node_id)
        return found

    def _serves(self) -> bool:
        return self._other.up

    async def open(self, group: str, log_uuid: str | None) -> None:
        del group, log_uuid
        await self._ask(lambda: None)

    async def read(self, group: str, start: int, end: int) -> tuple[Records, int]:
        """Respond as ``Reads`` does for isolation ``records``."""
        del group

        def respond() -> tuple[Records, int]:
            log, readable_end = self._other.log, self._other.replica.readable_end
            stop = min(end, readable_end)
            if start < log.first_index():
                raise IndexOutOfRangeError(f"{start} is below the first index", "", "")
            if start >= stop:
                return log.inspect(log.first_index(), log.first_index() + 1, 1).slice(0, 0), stop - 1
            return log.inspect(start, stop, self._member.sim.mix.fetch_bytes), readable_end - 1

        return await self._ask(respond)

    async def close(self) -> None:
        """Nothing."""

    async def _ask(self, respond: Callable[[], T]) -> T:
        """Ask the other member; its response comes late, or not at all."""
        sim, other = self._member.sim, self._other
        link = (self._member.node_id, other.node_id)

        def begin(resume: Resume) -> None:
            def arrive() -> None:
                if other.stalled_until > sim.time.now:
                    sim.time.after(other.stalled_until - sim.time.now, arrive)
                    return
                lost = {link, link[::-1]} & sim.network.isolated or sim.chance(sim.network.faults.loss)
                if not self._serves() or lost:
                    sim.counters["fetches failed"] += 1
                    error = UnreachableError("no response in time", other.node_id)
                    sim.time.after(RESPONSE_UNITS, lambda: resume(None, error))
                    return
                outcome: tuple[object, BaseException | None]
                try:
                    outcome = (respond(), None)
                except DLedgerError as error:
                    sim.counters["fetches refused"] += 1
                    outcome = (None, error)
                sim.time.after(1 + delay, lambda: resume(*outcome))

            delay = sim.source.randrange(1 + sim.network.faults.delay_max)
            sim.time.after(1 + delay, arrive)

        found: T = await Wait(begin)
        return found


class SimSurvivor(SimSource):
    """Another store that has retired its log too."""

    _log_uuid: str | None = None

    def _serves(self) -> bool:
        return self._other.running and self._other.waits

    async def open(self, group: str, log_uuid: str | None) -> None:
        self._log_uuid = log_uuid
        await super().open(group, log_uuid)

    async def read(self, group: str, start: int, end: int) -> tuple[Records, int]:
        """Respond as ``Group.read_retired`` does."""
        del group
        fetch_bytes = self._member.sim.mix.fetch_bytes
        return await self._ask(lambda: self._other.store.read_retired(self._log_uuid, start, end, fetch_bytes))


class SimRepairEnvironment:
    """``RepairEnvironment`` of one life of a member."""

    def __init__(self, member: ReplicaMember) -> None:
        self.member = member
        self._sim = member.sim

    def now(self) -> float:
        return self._sim.time.now / UNITS_PER_S

    async def sleep(self, seconds: float) -> None:
        await self._pause(max(1, int(seconds * UNITS_PER_S)))

    async def run_blocking(self, function: Callable[[], T]) -> T:
        await self._pause(self._sim.source.randrange(1, 10))
        return function()

    async def on_disk(self, replica: Replica, job: Callable[[], T]) -> T:
        def begin(resume: Resume) -> None:
            def work() -> None:
                outcome: tuple[T | None, BaseException | None]
                try:
                    outcome = (job(), None)
                except CorruptRecordError as error:
                    outcome = (None, error)
                self._sim.time.after(1, lambda: resume(*outcome))

            self.member.crash_soon()
            replica.store.run(work)

        result: T = await Wait(begin)
        return result

    async def wait_change(self, replica: Replica, timeout_s: float) -> None:
        del replica
        await self.sleep(min(timeout_s, 0.05))

    def source(self, peer: Peer) -> SimSource:
        return SimSource(self.member, peer)

    def survivor(self, peer: Peer) -> SimSurvivor:
        return SimSurvivor(self.member, peer)

    async def _pause(self, units: int) -> None:
        await Wait(lambda resume: self._sim.time.after(units, lambda: resume(None, None)))


class MemberRepairs:
    """All repairs of one life of a member; ``busy`` while one is in progress."""

    def __init__(self, member: ReplicaMember, log_type: type[CommitLog]) -> None:
        self.busy = False
        self._member = member
        self._sim = member.sim
        self._life = member.life
        self._log_type = log_type
        self._environment = SimRepairEnvironment(member)
        self._damaged: set[int] = set()
        self._begin: Callable[[], None] | None = None

    def open(self, host: Callable[[CommitLog], None]) -> None:
        """Pass the store's log to ``host``: at once if it is intact, otherwise after its repair."""
        member, sim, files = self._member, self._sim, self._member.files
        config = self._config()
        (group,) = config.groups
        hooks = LogHooks(
            AppendClock(member.wall_ms, lambda: sim.time.now),
            on_damage=self._found,
            preallocation=PreallocationByHand,
        )
        open_log = partial(open_checked, config, group, hooks, files, self._log_type)
        was_damaged = member.is_damaged  # drops the pages of a failed sync now, and not between the open and its checks
        try:
            log = open_log()
        except CorruptRecordError as error:
            stores = StoreRepairs(config, self._members(), self._environment, files)
            marked = verification_reason(files, Layout(member.path)) is not None
            repairable = stores.can_help(group, error) and (marked or was_damaged)
            check(repairable, "a store is damaged without a fault", member.node_id, error)
            member.was_hurt = True
            sim.counters["quarantined starts" if marked else "damaged starts"] += 1
            self.busy = True
            member.crash_soon()
            if sim.chance(sim.mix.rates["disk_error"]) and sim.faults_on:
                member.files.fail_at = member.files.operations + sim.source.randrange(1, 24)
            self._run(stores.repaired(group, error, open_log), partial(self._opened, host))
        else:
            host(log)

    def watch(self) -> None:
        """Repair the damage that reads find from now on, and start to read in the background."""
        replica, sim = self._member.replica, self._sim
        scrub = Scrub(lambda: (), SCRUB_BYTES_PER_S, 0.0, self._environment)
        led = [False]

        def repaired(_: object) -> None:
            self.busy = False
            sim.counters["leaders replaced"] += led[0] and not replica.is_leader

        def begin() -> None:
            if self._member.life == self._life and not self.busy:
                self.busy, led[0] = True, replica.is_leader
                sim.counters["live repairs"] += 1
                # The members of now: the others of a new log may have come to it later.
                repairs = LiveRepairs(self._members(), self._environment)
                self._run(repairs.repair(replica, self._damaged), repaired)

        def read_all() -> None:
            self._run(scrub.read_all(replica), lambda _: self._member.later(sim.mix.scrub_interval, read_all))

        self._begin = begin
        self._member.later(sim.source.randrange(1, sim.mix.scrub_interval), read_all)

    def _found(self, index: int) -> None:
        if self._begin is not None:
            self._damaged.add(index)
            self._sim.time.after(0, self._begin)

    def _members(self) -> Members:
        config = self._config()
        return Members(config.self_id, config.peers)

    def _config(self) -> ServerConfig:
        member, sim = self._member, self._sim
        lost = set() if sim.changes is None else sim.changes.lost
        known = [name for name, other in sim.members.items() if other.life and name not in lost]
        nodes = dict.fromkeys([*map(node_of, known), *map(node_of, sorted(sim.bootstrapped.voters))])
        peers = tuple(Peer(node, "sim", 1 + at) for at, node in enumerate(nodes))
        groups, root = (member.path.parent.name,), member.path.parents[1]
        return ServerConfig(self_id=member.node, peers=peers, groups=groups, directory=root, storage=sim.mix.storage)

    def _run(self, work: object, on_end: Callable[[object], None]) -> None:
        def end(result: object, error: BaseException | None) -> None:
            if error is None:
                on_end(result)
            elif isinstance(error, Crash):
                self._member.die("crashes in a repair")
            else:
                self._member.failed(error)

        run_task(work, lambda: self._member.life == self._life, end)  # type: ignore[arg-type]

    def _opened(self, host: Callable[[CommitLog], None], log: object) -> None:
        self.busy = False
        assert isinstance(log, CommitLog)
        self._sim.counters["repaired starts"] += 1
        host(log)


def check_intact(member: ReplicaMember) -> None:
    """Check that a member's store has no damage and needs no verification."""
    with StoreRepair.open(member.path, files=member.files, config=member.sim.mix.storage, write=False) as store:
        check(store.verification_reason is None, "a store needs verification in the end", member.node_id)
        check(store.find() == [], "a store is damaged in the end", member.node_id, store.find())

"""Repairs in the whole simulation: the server's own ones, run in simulated time over simulated disks and links.

A store that is suspect or damaged is repaired before its member takes part (``QuarantinedStores``), damage that a read
meets while a member runs is repaired beside everything else (``LiveRepairs``), and every log is read from time to time
(``Scrub``). What a peer gives comes late, and not at all while it is down, stalled, under repair itself or cut off.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, TypeVar

from dledger_core.config import Peer
from dledger_core.errors import CorruptRecordError, DLedgerError, IndexOutOfRangeError, UnreachableError
from dledger_core.record import Records
from dledger_core.server.config import ServerConfig
from dledger_core.server.maintenance.repair import QuarantinedStores, open_sound
from dledger_core.server.maintenance.scrub import LiveRepairs, Scrub
from dledger_core.server.replica.replica import Replica
from dledger_core.storage import CommitLog
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.verification import verification_reason
from tests.support.checkers import check
from tests.support.faulty_files import Crash
from tests.support.virtual_time import Resume, Wait, run_task

if TYPE_CHECKING:
    from tests.support.sim_member import SimMember

T = TypeVar("T")

UNITS_PER_S = 100
ANSWER_UNITS = 100
SCRUB_BYTES_PER_S = 20_000


def server_config(member: SimMember) -> ServerConfig:
    """Returns the settings that the server's own code asks for."""
    sim = member.sim
    peers = tuple(Peer(node_id, "sim", 1 + at) for at, node_id in enumerate(sim.members))
    root = member.path.parents[1]
    return ServerConfig(
        self_id=member.node_id, peers=peers, groups=(member.path.parent.name,), directory=root, storage=sim.mix.storage
    )


class SimSource:
    """Another member, asked for records; see ``Source``."""

    def __init__(self, member: SimMember, peer: Peer) -> None:
        self.peer = peer
        self._member = member
        self._other = member.sim.members[peer.node_id]

    async def open(self, group: str, log_uuid: str | None) -> None:
        """See ``Source``."""
        del group, log_uuid
        await self._ask(lambda: None)

    async def read(self, group: str, start: int, end: int) -> tuple[Records, int]:
        """See ``Source``; answers as ``Reads`` does for isolation ``records``."""
        del group
        other, sim = self._other, self._member.sim

        def answer() -> tuple[Records, int]:
            log, stop = other.log, min(end, other.replica.readable_end)
            if start < log.first_index():
                raise IndexOutOfRangeError(f"{start} is below the first index", "", "")
            if start >= stop:
                return log.inspect(log.first_index(), log.first_index() + 1, 1).slice(0, 0), stop - 1
            return log.inspect(start, stop, sim.damage_mix.fetch_bytes), other.replica.readable_end - 1

        return await self._ask(answer)

    async def close(self) -> None:
        """See ``Source``."""

    async def _ask(self, answer: Callable[[], T]) -> T:
        """Asks the other member something; the answer comes late, or none does."""
        sim, other = self._member.sim, self._other
        link = (self._member.node_id, other.node_id)

        def lost(*links: tuple[object, object]) -> bool:
            return any(one in sim.network.cut for one in links) or sim.damage_chance(sim.network.faults.loss)

        def begin(resume: Resume) -> None:
            def arrive() -> None:
                if other.stalled_until > sim.time.now:
                    sim.time.after(other.stalled_until - sim.time.now, arrive)
                    return
                unreachable = UnreachableError("no answer in time", other.node_id)
                if not other.up or lost(link, link[::-1]):
                    sim.counters["fetches failed"] += 1
                    sim.time.after(ANSWER_UNITS, lambda: resume(None, unreachable))
                    return
                try:
                    outcome = (answer(), None)
                except DLedgerError as error:
                    sim.counters["fetches refused"] += 1
                    outcome = (None, error)
                sim.time.after(1 + delay, lambda: resume(*outcome))

            delay = sim.damage_source.randrange(1 + sim.network.faults.delay_max)
            sim.time.after(1 + delay, arrive)

        found: T = await Wait(begin)
        return found


class SimRepairEnvironment:
    """``RepairEnvironment`` of one life of a member."""

    def __init__(self, member: SimMember) -> None:
        self._member = member
        self._sim = member.sim

    def now(self) -> float:
        """See ``RepairEnvironment``."""
        return self._sim.time.now / UNITS_PER_S

    async def sleep(self, seconds: float) -> None:
        """See ``RepairEnvironment``."""
        await self._pause(max(1, int(seconds * UNITS_PER_S)))

    async def beside(self, function: Callable[[], T]) -> T:
        """See ``RepairEnvironment``."""
        await self._pause(self._sim.damage_source.randrange(1, 10))
        return function()

    async def on_disk(self, replica: Replica, job: Callable[[], T]) -> T:
        """See ``RepairEnvironment``."""

        def begin(resume: Resume) -> None:
            def work() -> None:
                outcome: tuple[T | None, BaseException | None]
                try:
                    outcome = (job(), None)
                except CorruptRecordError as error:
                    outcome = (None, error)
                self._sim.time.after(1, lambda: resume(*outcome))

            self._member.crash_soon()
            replica.run_on_disk(work)

        result: T = await Wait(begin)
        return result

    async def progress(self, replica: Replica, timeout_s: float) -> None:
        """See ``RepairEnvironment``."""
        del replica
        await self.sleep(min(timeout_s, 0.05))

    def source(self, peer: Peer) -> SimSource:
        """See ``RepairEnvironment``."""
        return SimSource(self._member, peer)

    async def _pause(self, units: int) -> None:
        await Wait(lambda resume: self._sim.time.after(units, lambda: resume(None, None)))


class CountedRepairs(LiveRepairs):
    """``LiveRepairs`` that tells of hand-overs."""

    member: SimMember

    async def _transfer_leadership(self, replica: Replica) -> None:
        led = replica.is_leader
        await super()._transfer_leadership(replica)
        self.member.sim.counters["hand-overs"] += led and not replica.is_leader


class MemberRepairs:
    """All repairs of one life of a member."""

    def __init__(self, member: SimMember, log_type: type[CommitLog]) -> None:
        self._member = member
        self._sim = member.sim
        self._life = member.life
        self._log_type = log_type
        self._environment = SimRepairEnvironment(member)
        self._met: set[int] = set()
        self.busy = False
        """Whether something is being repaired."""

    def open(self, host: Callable[[CommitLog], None]) -> None:
        """Has the store's log hosted, at once if it is sound, else once it is repaired."""
        member, sim = self._member, self._sim
        config, files = server_config(member), member.files
        (group,) = config.groups
        try:
            log = open_sound(config, group, files, self._log_type)
        except CorruptRecordError as error:
            suspects = QuarantinedStores(config, _never, _never, self._environment, files, self._log_type)
            suspect = verification_reason(files, Layout(member.path)) is not None
            repairable = suspects.can_help(group, error) and (suspect or sim.damages.on(member))
            check(repairable, "a store is damaged that nobody damaged", member.node_id, error)
            sim.counters["suspect starts" if suspect else "damaged starts"] += 1
            self.busy = True
            member.crash_soon()
            member.fail_soon()
            run_task(suspects.repaired(group, error), self._alive, partial(self._repaired, host))
        else:
            host(log)

    def _alive(self) -> bool:
        return self._member.life == self._life

    def _repaired(self, host: Callable[[CommitLog], None], log: object, error: BaseException | None) -> None:
        self.busy = False
        if error is None:
            assert isinstance(log, CommitLog)
            self._sim.counters["repaired starts"] += 1
            host(log)
        else:
            self._ended(error)

    def _ended(self, error: BaseException) -> None:
        """A repair came to an early end: of the process, or of the disk."""
        if isinstance(error, Crash):
            self._member.die("crashes in a repair")
        else:
            self._sim.on_failed(self._member, error)

    def watch(self) -> None:
        """Takes care of whatever damage reads meet from now on, and begins to read."""
        member = self._member
        replica = member.replica
        peers = [peer for peer in server_config(member).peers if peer.node_id != member.node_id]
        repairs = CountedRepairs(peers, self._environment)
        repairs.member = member
        scrub = Scrub(lambda: (), SCRUB_BYTES_PER_S, 0.0, self._environment)

        def mended(_: object, error: BaseException | None) -> None:
            self.busy = False
            if error is not None:
                self._ended(error)

        def begin() -> None:
            if self._alive() and not self.busy:
                self.busy = True
                self._sim.counters["live repairs"] += 1
                run_task(repairs.mend(replica, self._met), self._alive, mended)

        def met(index: int) -> None:
            self._met.add(index)
            self._sim.time.after(0, begin)

        def round_ended(_: object, error: BaseException | None) -> None:
            if error is not None:
                raise error
            self._sim.counters["scrub rounds"] += 1
            self._sim.time.after(self._sim.damage_mix.scrub_interval, read_all)

        def read_all() -> None:
            run_task(scrub.read_all(replica), self._alive, round_ended)

        replica.log.on_damage = met
        self._sim.time.after(self._sim.damage_source.randrange(1, self._sim.damage_mix.scrub_interval), read_all)


def _never(*_: object) -> None:
    raise AssertionError("the simulation hosts logs itself")


def check_sound(member: SimMember) -> None:
    """Nothing of a member's store is damaged or suspect."""
    with StoreRepair.open(member.path, files=member.files, config=member.sim.mix.storage, write=False) as store:
        check(store.verification_reason is None, "a store is suspect in the end", member.node_id)
        check(store.find() == [], "a store is damaged in the end", member.node_id, store.find())

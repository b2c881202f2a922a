"""Repair of open logs: a background scrub of all entries, and the repair of every damaged range that a read finds."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from dledger_core.config import LIMITS, Limits
from dledger_core.errors import CorruptRecordError, DLedgerError
from dledger_core.record import Records
from dledger_core.server.maintenance.repair import EventLoopRepairs, PeerRecords, RepairEnvironment
from dledger_core.server.replica.members import Members
from dledger_core.server.replica.replica import Replica
from dledger_core.storage.check.damage import Damage
from dledger_core.storage.files.segments import read_failure

_LOG = logging.getLogger(__name__)
_READ_BYTES: Final = 1 << 20
"""Bytes that are read at once: a longer read would delay the reads of clients on the same disk."""
_TRANSFER_S: Final = 2.0
"""How long a damaged replica that leads waits for another leader before it asks again."""


class LiveRepairs:
    """Repairs damaged ranges of open logs from peers, in tasks of the node's event loop.

    Args:
        members: the nodes that may have the records.
        environment: time, threads and connections; by default those of the running event loop.
        limits: the node's limits.

    Attributes:
        repaired: number of damaged ranges that were repaired, by group.
    """

    def __init__(self, members: Members, environment: RepairEnvironment | None = None, limits: Limits = LIMITS) -> None:
        self._members = members
        self._environment = environment or EventLoopRepairs(limits=limits)
        self._limits = limits
        self._indexes_to_repair: dict[str, set[int]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._logged_at: dict[str, float] = {}
        self.repaired: Counter[str] = Counter()

    def reporter(self, replica: Callable[[], Replica | None]) -> Callable[[int], None]:
        """Return the function that repairs the damage which a read finds near an index; any thread may call it.

        Args:
            replica: returns the replica of the damaged log, None while it is not hosted: a start repairs it then.
        """
        loop = asyncio.get_running_loop()

        def start(index: int) -> None:
            if (found := replica()) is not None:
                self._start(found, index)

        def report(index: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(start, index)

        return report

    def damaged(self, group: str) -> int:
        """Return the number of places with damage that wait for their repair."""
        return len(self._indexes_to_repair.get(group, ()))

    async def close(self) -> None:
        """Cancel repairs in progress."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _start(self, replica: Replica, index: int) -> None:
        indexes = self._indexes_to_repair.setdefault(replica.group, set())
        indexes.add(index)
        task = self._tasks.get(replica.group)
        if task is None or task.done():
            self._tasks[replica.group] = asyncio.create_task(
                self.repair(replica, indexes), name=f"repair-{replica.group}"
            )

    async def repair(self, replica: Replica, indexes: set[int]) -> None:
        """Repair the damage near the entries of ``indexes``, which may grow meanwhile, until none is left."""
        environment, log = self._environment, replica.log
        records = PeerRecords(self._members.others, replica.group, replica.log_uuid, environment.source)

        async def write(damage: Damage, fetched: Records | None, commit_index: int) -> Damage | None:
            return await environment.on_disk(replica, partial(log.write_back, damage, fetched, commit_index))

        while indexes and log.failure is None:
            index = min(indexes)
            try:
                damage = await environment.run_blocking(partial(log.damage_near, index))
                if damage is None:
                    indexes.discard(index)
                    continue
                # Not a condition: the damage itself may prevent all others from catching up.
                await self._transfer_leadership(replica)
                if (left := await records.repair(damage, write)) is not None:
                    await self._wait(replica, left, "; ".join(f"{n}: {why}" for n, why in records.failures.items()))
                else:
                    self.repaired[replica.group] += 1
                    _LOG.warning(
                        "entries repaired: group=%s start=%d end=%d path=%s position=%d",
                        replica.group,
                        damage.start,
                        damage.end,
                        damage.path,
                        damage.position,
                    )
            except DLedgerError as error:
                _LOG.error("repair failed: group=%s index=%d error=%s", replica.group, index, error)
                if isinstance(error, CorruptRecordError) and (failure := read_failure(error)) is not None:
                    replica.store.run(partial(log.stop_on, failure))
                    return
                await environment.sleep(self._limits.repair_retry_s)

    async def _transfer_leadership(self, replica: Replica) -> None:
        """Try to transfer leadership while this replica is repaired."""
        environment = self._environment
        for peer in self._members.others if replica.is_leader else ():
            with contextlib.suppress(DLedgerError):
                replica.leadership.transfer(peer.node_id)
            deadline = environment.now() + _TRANSFER_S
            while replica.is_leader and environment.now() < deadline:
                await environment.wait_change(replica, deadline - environment.now())
            if not replica.is_leader:
                return

    async def _wait(self, replica: Replica, damage: Damage, why: str) -> None:
        now, before = self._environment.now(), self._logged_at.get(replica.group)
        if before is None or now - before >= self._limits.repair_log_s:
            self._logged_at[replica.group] = now
            _LOG.error(
                "damaged entries not repaired: group=%s start=%d end=%d path=%s position=%d error=%s",
                replica.group,
                damage.start,
                damage.end,
                damage.path,
                damage.position,
                why or "the group has no other node",
            )
        await self._environment.sleep(self._limits.repair_retry_s)


class Scrub:
    """Background scrub: reads all committed entries of a node's groups repeatedly, at a limited rate.

    ``LiveRepairs`` repairs the damage that its reads find; the scrub itself rewrites index rows that do not match
    their record.

    Args:
        replicas: returns the node's replicas.
        bytes_per_second: rate; 0 = never.
        pause_s: pause between two rounds, in seconds.
        environment: time and the thread that reads; by default the running event loop's time and a thread of its own.
        limits: the node's limits.

    Attributes:
        position: index of the next entry to read, by group.
        rounds: complete readings, by group.
    """

    def __init__(
        self,
        replicas: Callable[[], Sequence[Replica]],
        bytes_per_second: int,
        pause_s: float,
        environment: RepairEnvironment | None = None,
        limits: Limits = LIMITS,
    ) -> None:
        self._limits = limits
        self._replicas = replicas
        self._rate = bytes_per_second
        self._pause_s = pause_s
        self._executor = ThreadPoolExecutor(1, "scrub")
        self._environment = environment or EventLoopRepairs(self._executor)
        self._task: asyncio.Task[None] | None = None
        self.position: dict[str, int] = {}
        self.rounds: Counter[str] = Counter()

    def start(self) -> None:
        """Start reading."""
        if self._rate > 0:
            self._task = asyncio.create_task(self._run(), name="scrub")

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._executor.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            for replica in self._replicas():
                try:
                    await self.read_all(replica)
                except Exception:  # noqa: BLE001 - the scrub continues with the other groups
                    _LOG.exception("scrub failed: group=%s", replica.group)
            await asyncio.sleep(self._pause_s)

    async def read_all(self, replica: Replica) -> None:
        """Read all committed entries of a replica once."""
        environment = self._environment
        at = int(replica.log.first_index())
        while at < (end := replica.readable_end):
            began = environment.now()
            at = self.position[replica.group] = max(at, int(replica.log.first_index()))
            try:
                records, fit = await environment.run_blocking(partial(self._read, replica, at, end))
            except CorruptRecordError as error:
                damaged = error.values.get("index")
                at = max(at, damaged if isinstance(damaged, int) else at) + 1
                await environment.sleep(min(_READ_BYTES / self._rate, 1.0))
                continue
            except DLedgerError:  # trimmed or truncated meanwhile
                return
            if not fit:
                _LOG.warning("index rows rewritten: group=%s start=%d", replica.group, at)
                replica.store.run(partial(replica.log.rewrite_rows, records, at))
            at += records.count
            await environment.sleep(max(records.nbytes / self._rate - (environment.now() - began), 0.0))
        self.position[replica.group] = at
        self.rounds[replica.group] += 1

    def _read(self, replica: Replica, start: int, end: int) -> tuple[Records, bool]:
        records = replica.log.read(start, end, min(_READ_BYTES, max(self._rate, 1)))
        replica.log.check_blanks(records, start)
        return records, replica.log.rows_fit(records, start)

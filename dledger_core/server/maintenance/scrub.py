"""While a node runs: a background read of everything it holds, and the repair of what any read finds damaged."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final

from dledger_core.config import Peer
from dledger_core.errors import CorruptRecordError, DLedgerError
from dledger_core.record import Records
from dledger_core.server.maintenance.peer_records import PeerRecords
from dledger_core.server.maintenance.repair_environment import EventLoopRepairs, RepairEnvironment
from dledger_core.server.replica.replica import Replica
from dledger_core.storage.check.damage import Damage

__all__ = ["LiveRepairs", "Scrub"]

_LOG = logging.getLogger(__name__)

RETRY_S: Final = 2.0
TOLD_S: Final = 60.0
TRANSFER_S: Final = 2.0
READ_BYTES: Final = 1 << 20


class LiveRepairs:
    """Repairs damaged ranges of open logs from the peers, beside everything else; lives on the node's event loop.

    Args:
        peers: the other nodes.
        environment: time, threads and connections; by default those of the running event loop.

    Attributes:
        repaired: ranges repaired since the start.
    """

    def __init__(self, peers: Sequence[Peer], environment: RepairEnvironment | None = None) -> None:
        self._peers = tuple(peers)
        self._environment = environment or EventLoopRepairs()
        self._met: dict[str, set[int]] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._told: dict[str, float] = {}
        self.repaired = 0

    def watch(self, replica: Replica) -> None:
        """Takes care of whatever damage a read of this replica's log meets, in any thread."""
        loop = asyncio.get_running_loop()

        def met(index: int) -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(self._begin, replica, index)

        replica.log.on_damage = met

    async def close(self) -> None:
        """Ends what is under way."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _begin(self, replica: Replica, index: int) -> None:
        met = self._met.setdefault(replica.group, set())
        met.add(index)
        task = self._tasks.get(replica.group)
        if task is None or task.done():
            self._tasks[replica.group] = asyncio.create_task(self.mend(replica, met), name=f"mend-{replica.group}")

    async def mend(self, replica: Replica, met: set[int]) -> None:
        """Repairs what is damaged near the entries of ``met``, which may grow meanwhile, until none is left."""
        environment, log = self._environment, replica.log
        records = PeerRecords(self._peers, replica.group, replica.log_uuid, environment.source)

        async def write(damage: Damage, fetched: Records | None, commit_index: int) -> Damage | None:
            return await environment.on_disk(replica, partial(log.write_back, damage, fetched, commit_index))

        while met and log.failure is None:
            index = min(met)
            try:
                damage = await environment.beside(partial(log.damage_near, index))
                if damage is None:
                    met.discard(index)
                    continue
                # Not a condition: the damage itself may be what keeps all others from catching up.
                await self._transfer_leadership(replica)
                if (left := await records.mend(damage, write)) is not None:
                    await self._wait(replica, left, "; ".join(f"{n}: {why}" for n, why in records.failures.items()))
                else:
                    self.repaired += 1
                    start, end, place = damage.start, damage.end, f"{damage.path}, position {damage.position}"
                    _LOG.warning("group %s: entries [%d, %d) are repaired at %s", replica.group, start, end, place)
            except DLedgerError as error:
                _LOG.error("group %s: damage near entry %d cannot be repaired: %s", replica.group, index, error)
                await environment.sleep(RETRY_S)

    async def _transfer_leadership(self, replica: Replica) -> None:
        """Tries to have another node lead the group while this one is repaired."""
        environment = self._environment
        for peer in self._peers if replica.is_leader else ():
            with contextlib.suppress(DLedgerError):
                replica.transfer_leadership(peer.node_id)
            deadline = environment.now() + TRANSFER_S
            while replica.is_leader and environment.now() < deadline:
                await environment.progress(replica, deadline - environment.now())
            if not replica.is_leader:
                return

    async def _wait(self, replica: Replica, damage: Damage, why: str) -> None:
        now = self._environment.now()
        if now - self._told.get(replica.group, -TOLD_S) >= TOLD_S:
            self._told[replica.group] = now
            _LOG.error(
                "group %s: entries [%d, %d) at %s, position %d, are damaged and not repaired so far: %s",
                replica.group,
                damage.start,
                damage.end,
                damage.path,
                damage.position,
                why or "there is no other node",
            )
        await self._environment.sleep(RETRY_S)


class Scrub:
    """Reads all committed entries of a node's groups again and again, at a bounded rate.

    A read that meets damage has it repaired, see ``LiveRepairs``; rows of the index that do not know their record are
    corrected here.

    Args:
        replicas: returns the node's replicas.
        bytes_per_second: how fast to read; 0 = never.
        pause_s: rest between two rounds.
        environment: time and the thread that reads; by default the running event loop's time and a thread of its own.

    Attributes:
        rounds: how often everything was read.
    """

    def __init__(
        self,
        replicas: Callable[[], Sequence[Replica]],
        bytes_per_second: int,
        pause_s: float,
        environment: RepairEnvironment | None = None,
    ) -> None:
        self._replicas = replicas
        self._rate = bytes_per_second
        self._pause_s = pause_s
        self._executor = ThreadPoolExecutor(1, "scrub")
        self._environment = environment or EventLoopRepairs(self._executor)
        self._task: asyncio.Task[None] | None = None
        self.rounds = 0

    def start(self) -> None:
        """Begins to read."""
        if self._rate > 0:
            self._task = asyncio.create_task(self._run(), name="scrub")

    async def close(self) -> None:
        """Ends it."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        self._executor.shutdown(wait=False)

    async def _run(self) -> None:
        while True:
            for replica in self._replicas():
                try:
                    await self.read_all(replica)
                except Exception:  # noqa: BLE001 - the other groups are still to be read
                    _LOG.exception("reading group %s in the background failed", replica.group)
            self.rounds += 1
            await asyncio.sleep(self._pause_s)

    async def read_all(self, replica: Replica) -> None:
        """Reads all committed entries of a replica once."""
        environment = self._environment
        at = int(replica.log.first_index())
        while at < (end := replica.readable_end):
            began = environment.now()
            at = max(at, int(replica.log.first_index()))
            try:
                records, fit = await environment.beside(partial(self._read, replica, at, end))
            except CorruptRecordError as error:
                damaged = error.values.get("index")
                at = max(at, damaged if isinstance(damaged, int) else at) + 1
                await environment.sleep(min(READ_BYTES / self._rate, 1.0))
                continue
            except DLedgerError:  # deleted or cut meanwhile
                return
            if not fit:
                _LOG.warning("group %s: rows of the index behind entry %d are corrected", replica.group, at)
                replica.run_on_disk(partial(replica.log.rewrite_rows, records, at))
            at += records.count
            await environment.sleep(max(records.nbytes / self._rate - (environment.now() - began), 0.0))

    def _read(self, replica: Replica, start: int, end: int) -> tuple[Records, bool]:
        records = replica.log.read(start, end, min(READ_BYTES, max(self._rate, 1)))
        replica.log.check_blanks(records, start)
        return records, replica.log.rows_fit(records, start)

"""Repair of damaged records from peers: of a store before its group participates, and what open logs need for it.

``PeerRecords`` takes committed records of a group from any peer with an intact copy.
``RepairEnvironment`` is what repairs take from a node or a simulation; ``scrub`` repairs open logs with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from dledger_core.client.routing.channel import Channel
from dledger_core.config import LIMITS, Limits, Peer
from dledger_core.errors import CorruptRecordError, DLedgerError, RequestTimedOutError, UnreachableError
from dledger_core.net import codec, messages
from dledger_core.net.credentials import PLAINTEXT, Credentials
from dledger_core.net.protocol import Type
from dledger_core.record import Records
from dledger_core.server.config import ServerConfig
from dledger_core.server.replica.members import Members
from dledger_core.storage import CommitLog
from dledger_core.storage.check.damage import Damage
from dledger_core.storage.check.repair import StoreRepair
from dledger_core.storage.files.file_system import Files, OsFiles
from dledger_core.storage.files.layout import Layout
from dledger_core.storage.files.meta_files import verification_reason
from dledger_core.storage.files.quarantine import check_not_quarantined
from dledger_core.storage.write.log_writer import LogHooks

if TYPE_CHECKING:
    from dledger_core.server.replica.replica import Replica

_LOG = logging.getLogger(__name__)
T = TypeVar("T")
_RESPONSE_S: Final = 10.0
"""How long a peer's records are waited for."""

Write = Callable[[Damage, Records | None, int], Awaitable[Damage | None]]
"""Writes records over a damaged range; gets the peer's commit index with them, returns the remaining damage."""


class PeerRecordSource(Protocol):
    """Another node that may have records of a group; takes one request at a time."""

    @property
    def peer(self) -> Peer:
        """The node."""

    async def open(self, group: str, log_uuid: str | None) -> None:
        """Connect, unless connected; reads then ask for this log and no other."""

    async def read(self, group: str, start: int, end: int) -> tuple[Records, int]:
        """Return committed records from ``start`` on and the commit index; raise the peer's error."""

    async def close(self) -> None:
        """Close the connection."""


class PeerConnection:
    """One connection to one peer; see ``PeerRecordSource``."""

    def __init__(self, peer: Peer, limits: Limits = LIMITS, credentials: Credentials = PLAINTEXT) -> None:
        self.peer = peer
        self._limits = limits
        self._channel = Channel(peer, credentials=credentials)
        self._log: dict[str, Any] = {}

    async def open(self, group: str, log_uuid: str | None) -> None:
        """See ``PeerRecordSource``."""
        self._log = {} if log_uuid is None else {"lu": log_uuid}
        if not self._channel.is_open:
            await self._channel.open(self._limits.peer_connect_s)

    async def read(self, group: str, start: int, end: int) -> tuple[Records, int]:
        """See ``PeerRecordSource``."""
        header = self._request(group, start, end)
        try:
            frame = await self._channel.request(header, timeout_s=_RESPONSE_S, response_type=Type.READ_OK)
        except RequestTimedOutError:
            raise UnreachableError("no response in time", self.peer.address) from None
        response = messages.READ_OK.decode(frame.header)
        return codec.parse_records(frame.payload, response.count), response.commit_index

    def _request(self, group: str, start: int, end: int) -> dict[str, Any]:
        request = messages.ReadRequest(
            start=start, end=end, max_bytes=self._limits.repair_fetch_bytes, isolation="records"
        )
        return messages.READ.encode(request, g=group, **self._log)

    async def close(self) -> None:
        """See ``PeerRecordSource``."""
        await self._channel.close()


Agreed = Callable[[int, Records, Records | None, int], int]
"""See ``StoreRepair.agreed_end``."""


class SurvivorConnection(PeerConnection):
    """A connection to another store that has retired its log too; see ``PeerRecordSource``."""

    def _request(self, group: str, start: int, end: int) -> dict[str, Any]:
        log = self._log.get("lu")
        request = messages.RecoverLogRequest(operation="read", log=log, start=start, end=end)
        return messages.CONTINUE.encode(request, g=group)


class SurvivorRecords:
    """Records of another store that has retired its log too; see ``PeerRecordSource``.

    Instead of the commit index, a read returns the last entry that is known to be the same one here.

    Args:
        source: the access to the other store.
        agreed: compares its records with the store here.
        environment: runs that.
    """

    def __init__(self, source: PeerRecordSource, agreed: Agreed, environment: RepairEnvironment) -> None:
        self._source = source
        self._agreed = agreed
        self._environment = environment
        self._behind: tuple[Records | None] | None = None

    @property
    def peer(self) -> Peer:
        """See ``PeerRecordSource``."""
        return self._source.peer

    async def open(self, group: str, log_uuid: str | None) -> None:
        """See ``PeerRecordSource``."""
        await self._source.open(group, log_uuid)

    async def read(self, group: str, start: int, end: int) -> tuple[Records, int]:
        """See ``PeerRecordSource``."""
        if self._behind is None:  # the first read names the end of the hole
            self._behind = (await self._record_behind(group, end),)
        records, commit_index = await self._source.read(group, start, end)
        if not records.count:
            return records, commit_index
        agreed = partial(self._agreed, start, records, self._behind[0], commit_index)
        return records, await self._environment.run_blocking(agreed)

    async def _record_behind(self, group: str, at: int) -> Records | None:
        try:
            found = (await self._source.read(group, at, at + 1))[0]
        except CorruptRecordError:
            return None
        return found if found.count and found.first_bad_body() is None else None

    async def close(self) -> None:
        """See ``PeerRecordSource``."""
        await self._source.close()


class PeerRecords:
    """Repair of damaged ranges of one group's store.

    Args:
        peers: the other nodes.
        group: the group.
        log_uuid: identity of the log, if it is known here.
        source: creates the access to a node.

    Attributes:
        failures: each peer's reason for not helping, as of its last request, by node id.
        not_committed: peers that answered that they have not committed the entries of a request.
    """

    def __init__(
        self,
        peers: Sequence[Peer],
        group: str,
        log_uuid: str | None,
        source: Callable[[Peer], PeerRecordSource] = PeerConnection,
    ) -> None:
        self._source = source
        self._peers = tuple(peers)
        self._group = group
        self._log_uuid = log_uuid
        self.failures: dict[str, str] = {}
        self.not_committed: set[str] = set()

    async def repair(self, damage: Damage, write: Write) -> Damage | None:
        """Fetch a range and write it, chunk by chunk; return the damage for which no peer has records, or None.

        Raises:
            DiskFailedError: a write here failed.
        """
        left: Damage | None = damage
        if damage.start == damage.end:
            return await write(damage, None, -1)
        while left is not None:
            before = left
            for peer in self._peers:
                left = await self._repair_from(peer, before, write)
                if left != before:
                    break
            if left == before:
                return left
        return None

    async def _repair_from(self, peer: Peer, damage: Damage, write: Write) -> Damage | None:
        """Repair from one peer as far as it has records; return the remaining damage."""
        source = self._source(peer)
        left: Damage | None = damage
        try:
            while left is not None:
                fetched = await self._fetch(source, left)
                if fetched is None:
                    break
                try:
                    left = await write(left, *fetched)
                except CorruptRecordError as error:  # the records do not fit this log
                    self.failures[str(peer.node_id)] = str(error)
                    break
        finally:
            await source.close()
        return left

    async def _fetch(self, source: PeerRecordSource, damage: Damage) -> tuple[Records, int] | None:
        """Return the peer's records of the range, up to its own damage, and its commit index; None if it has none."""
        end = int(damage.end)
        try:
            await source.open(self._group, self._log_uuid)
            try:
                found = await source.read(self._group, damage.start, end)
            except CorruptRecordError as error:
                theirs = error.values.get("index")
                if not isinstance(theirs, int) or not damage.start < theirs < end:
                    raise
                found = await source.read(self._group, damage.start, theirs)
            if found[0].count:
                return found
            reason = "the peer has not committed these entries"
            self.not_committed.add(str(source.peer.node_id))
        except DLedgerError as error:
            reason = str(error)
        self.failures[str(source.peer.node_id)] = reason
        return None


Retry = Callable[[Sequence[Damage], Mapping[str, str]], Awaitable[bool]]
"""Gets the remaining damage and each peer's reason for not helping; returns whether to ask them again."""


class RepairEnvironment(Protocol):
    """The parts of repairs that differ between a node and a simulation: time, threads, writes, other nodes."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock."""

    async def sleep(self, seconds: float) -> None:
        """Wait."""

    async def run_blocking(self, function: Callable[[], T]) -> T:
        """Run a blocking function off the event loop and return its result."""

    async def on_disk(self, replica: Replica, job: Callable[[], T]) -> T:
        """Run a job that writes to an open log, in order with the log's other writes, and return its result.

        A failed write stops the replica; then this never returns.

        Raises:
            CorruptRecordError: the job raised it.
        """

    async def wait_change(self, replica: Replica, timeout_s: float) -> None:
        """Wait until a replica changed or the timeout expires."""

    def source(self, peer: Peer) -> PeerRecordSource:
        """Return access to another node, not connected yet."""

    def survivor(self, peer: Peer) -> PeerRecordSource:
        """Return access to the store of another node that has retired its log, not connected yet."""


class EventLoopRepairs:
    """The running event loop, its threads, real connections.

    Args:
        executor: threads for blocking work; None = the loop's own.
        limits: the node's limits.
    """

    def __init__(
        self, executor: Executor | None = None, limits: Limits = LIMITS, credentials: Credentials = PLAINTEXT
    ) -> None:
        self._credentials = credentials
        self._executor = executor
        self._limits = limits

    def now(self) -> float:
        """See ``RepairEnvironment``."""
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        """See ``RepairEnvironment``."""
        await asyncio.sleep(seconds)

    async def run_blocking(self, function: Callable[[], T]) -> T:
        """See ``RepairEnvironment``."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, function)

    async def on_disk(self, replica: Replica, job: Callable[[], T]) -> T:
        """See ``RepairEnvironment``."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def complete(function: Callable[[], None]) -> None:
            if not done.done():
                function()

        def work() -> None:
            outcome: Callable[[], None]
            try:
                outcome = partial(done.set_result, job())
            except CorruptRecordError as error:
                outcome = partial(done.set_exception, error)
            with contextlib.suppress(RuntimeError):  # the loop is closed
                loop.call_soon_threadsafe(complete, outcome)

        replica.store.run(work)
        return await done

    async def wait_change(self, replica: Replica, timeout_s: float) -> None:
        """See ``RepairEnvironment``."""
        await replica.wait_change(timeout_s)

    def source(self, peer: Peer) -> PeerRecordSource:
        """See ``RepairEnvironment``."""
        return PeerConnection(peer, self._limits, self._credentials)

    def survivor(self, peer: Peer) -> PeerRecordSource:
        """See ``RepairEnvironment``."""
        return SurvivorConnection(peer, self._limits, self._credentials)


@dataclass(frozen=True, slots=True)
class RepairReport:
    """Result of a repair.

    Attributes:
        found: the damage before the repair.
        remaining: the damage for which no peer has records.
        left_out: the damage to uncommitted entries, before which the log ends now.
        failures: each peer's reason for not helping, by node id.
    """

    found: tuple[Damage, ...]
    remaining: tuple[Damage, ...]
    failures: Mapping[str, str]
    left_out: tuple[Damage, ...] = ()

    @property
    def repaired(self) -> tuple[Damage, ...]:
        """The damage of which all entries are intact now."""
        left = [damage.start for damage in (*self.remaining, *self.left_out)]
        return tuple(damage for damage in self.found if not any(damage.start <= at < damage.end for at in left))


async def _give_up(_remaining: Sequence[Damage], _failures: Mapping[str, str]) -> bool:
    return False


async def repair_store(
    store: StoreRepair,
    peers: Sequence[Peer],
    group: str,
    retry: Retry = _give_up,
    environment: RepairEnvironment | None = None,
) -> RepairReport:
    """Verify a complete store, replace damaged records by those of peers, verify again and clear its marker.

    Args:
        store: opened for repair; closed by the caller.
        peers: nodes that may have the records; the store's own node is skipped.
        group: the group's name.
        retry: decides about another attempt while damage remains.
        environment: time, threads and connections; by default those of the running event loop.

    Raises:
        DiskFailedError: a write failed.
    """
    environment = environment or EventLoopRepairs()
    await environment.run_blocking(store.prepare)
    found = left = await environment.run_blocking(partial(store.find, rewrite_rows=True))
    others = tuple(peer for peer in peers if peer.node_id != store.meta.node_id)
    records = PeerRecords(others, group, store.meta.log_uuid, environment.source)
    if others:
        await environment.run_blocking(partial(store.set_floor_if_end_is_lost, found))

    async def write(damage: Damage, fetched: Records | None, commit_index: int) -> Damage | None:
        return await environment.run_blocking(partial(store.write_back, damage, fetched, commit_index))

    left_out: list[Damage] = []
    while left:
        rests = [await records.repair(damage, write) for damage in left]
        left = [rest for rest in rests if rest is not None]
        if records.not_committed:
            left_out += [damage for damage in left if damage.start > store.commit_index]
            left = [damage for damage in left if damage.start <= store.commit_index]
        if left and not await retry(left, records.failures):
            break
    if left_out and not left:
        await environment.run_blocking(store.end_before_uncommitted)
    if found and not left:
        left = await environment.run_blocking(partial(store.find, rewrite_rows=True))
    if not left:
        await environment.run_blocking(store.settle)
    return RepairReport(tuple(found), tuple(left), dict(records.failures), tuple(left_out))


async def fill_holes(
    store: StoreRepair, survivors: Sequence[Peer], group: str, environment: RepairEnvironment
) -> RepairReport:
    """Fill the holes of a store that has retired its log with the records of other survivors.

    Args:
        store: opened for repair; closed by the caller.
        survivors: the nodes whose stores have retired the same log.
        group: the group's name.
        environment: threads and connections.

    Raises:
        DiskFailedError: a write failed.
    """
    await environment.run_blocking(store.prepare)
    found = (await environment.run_blocking(store.inspect)).holes
    others = tuple(peer for peer in survivors if peer.node_id != store.meta.node_id)
    records = PeerRecords(
        others,
        group,
        store.meta.log_uuid,
        lambda peer: SurvivorRecords(environment.survivor(peer), store.agreed_end, environment),
    )

    async def write(hole: Damage, fetched: Records | None, agreed: int) -> Damage | None:
        return await environment.run_blocking(partial(store.write_back, hole, fetched, agreed))

    rests = [await records.repair(hole, write) for hole in reversed(found)]  # a filled hole confirms entries before it
    left = tuple(rest for rest in rests if rest is not None)
    return RepairReport(found, left, dict(records.failures))


def open_checked(
    config: ServerConfig,
    group: str,
    hooks: LogHooks,
    files: Files | None = None,
    log_type: type[CommitLog] = CommitLog,
) -> CommitLog:
    """Open a group's log and check its newest records.

    Args:
        config: the node's settings.
        group: the group.
        hooks: clock and callbacks of the owner.
        files: the file system.
        log_type: class of the log.

    Raises:
        QuarantinedError: the replica is quarantined.
        CorruptRecordError: the store is damaged, or marked for verification.
        StorageError: the store is foreign or in use.
    """
    files = files or OsFiles()
    path = config.store_path(group)
    check_not_quarantined(files, Layout(path))
    why = verification_reason(files, Layout(path))
    if why is not None:
        raise CorruptRecordError(
            f"the store needs verification ({why})", str(path), "it is verified and repaired from its peers"
        )
    log = log_type.open(
        path, group=group, node_id=config.self_id, config=config.storage, files=files, hooks=hooks
    ).checked()
    if log.recovered.written_end and len(config.peers) == 1:
        log.close()
        raise CorruptRecordError(
            "bytes after the last good record may be damaged entries, and the group has no other node",
            str(path),
            "restore the store, or save its entries with dledger export and start with an empty directory",
            {"last_index": log.recovered.last_index, "position": log.recovered.position},
        )
    return log


class StoreRepairs:
    """Repair of stores that cannot be opened as they are.

    Args:
        config: the node's settings.
        members: the nodes that may have the records.
        environment: time, threads and connections; by default those of the running event loop.
        files: the file system.
    """

    def __init__(
        self,
        config: ServerConfig,
        members: Members,
        environment: RepairEnvironment | None = None,
        files: Files | None = None,
    ) -> None:
        self._config = config
        self._members = members
        self._environment = environment or EventLoopRepairs(limits=config.limits)
        self._files = files or OsFiles()
        self._logged_at: float | None = None

    def can_help(self, group: str, error: CorruptRecordError) -> bool:
        """Whether a repair may fix the damage that ``error`` names."""
        path = self._config.store_path(group)
        in_data = Path(error.where).parent == path / "data"
        marked = verification_reason(self._files, Layout(path)) is not None
        return marked or (in_data and bool(self._members.others))

    async def repaired(self, group: str, error: CorruptRecordError, open_log: Callable[[], CommitLog]) -> CommitLog:
        """Repair the store that ``error`` is about, and return its log, which ``open_log`` opens.

        Raises:
            CorruptRecordError: no peer has the records, and none is asked again.
            DiskFailedError: a write failed.
        """
        config, environment, files = self._config, self._environment, self._files

        async def retry(remaining: Sequence[Damage], failures: Mapping[str, str]) -> bool:
            if not self._members.others:
                return False
            self._log_remaining(group, remaining, failures)
            await environment.sleep(config.limits.repair_retry_s)
            return True

        path, node_id = config.store_path(group), config.self_id
        store = await environment.run_blocking(
            partial(StoreRepair.open, path, group=group, node_id=node_id, files=files, config=config.storage)
        )
        try:
            report = await repair_store(store, self._members.peers, group, retry, environment)
        finally:
            store.close()
        if report.remaining:
            raise error
        for damage in report.repaired:
            _LOG.warning("entries repaired: group=%s start=%d end=%d", group, damage.start, damage.end)
        for damage in report.left_out:
            _LOG.warning(
                "uncommitted entries damaged, the log ends before them: group=%s start=%d path=%s position=%d",
                group,
                damage.start,
                damage.path,
                damage.position,
            )
        log = await environment.run_blocking(open_log)
        _LOG.info("store verified: group=%s", group)
        return log

    def _log_remaining(self, group: str, remaining: Sequence[Damage], failures: Mapping[str, str]) -> None:
        now = self._environment.now()
        if self._logged_at is None or now - self._logged_at >= self._config.limits.repair_log_s:
            self._logged_at = now
            first = remaining[0]
            reasons = "; ".join(f"{node}: {why}" for node, why in failures.items())
            _LOG.error(
                "no intact copy of damaged entries: group=%s start=%d end=%d error=%s",
                group,
                first.start,
                first.end,
                reasons,
            )

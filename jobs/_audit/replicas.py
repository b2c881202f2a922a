"""The replicas of an audit: what each one contains when the audit begins, and how its digests and entries are read.

The driver takes a snapshot of all replicas once. A live node computes digests from its own files, so only digests cross
the network. A store that is given by its path is read where the task runs, and so is a classic CommitLog. A CommitLog
has no indexes: the audit counts blocks, position = index x block. All that two copies of a CommitLog contain counts as
committed, because a slave only receives what its master has stored. A source belongs to one task.
"""

from __future__ import annotations

import contextlib
import errno
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
from blake3 import blake3

from dledger_core import (
    Client,
    ConfigError,
    CorruptRecordError,
    DLedgerError,
    IndexOutOfRangeError,
    NodeStatus,
    RangeDigest,
    StorageError,
    StoreMismatchError,
    StoreReader,
    open_store,
)
from dledger_core.cli import Access
from dledger_core.config import parse_groups, parse_peers
from dledger_core.digest import RangeHasher
from dledger_core.record import HEADER_BYTES
from dledger_core.rocketmq import ClassicCommitLog, Location, decode_messages, end_of, locate, open_log_directory
from spark_connector.connections import store_for

from .model import OTHER, AuditedReplica, Options, Snapshot, aligned, consecutive

STORE_GROUP: Final = "store"
"""Group of stores that do not record theirs, as all Java stores."""
CLASSIC_GROUP: Final = "commitlog"
BLOCK_BYTES: Final = 1024
"""Maximum bytes of a CommitLog that the audit counts as one index."""
_CATCH_UP_S: Final = 10.0
_PAUSE_S: Final = 0.1

NO_ACCESS: Final = Access()


def take_snapshot(options: Options) -> Snapshot:
    """Return the replicas that the options name, by group, as they are now.

    Raises:
        ConfigError: the options do not name the replicas of one log.
        UnreachableError: no node responds.
    """
    peers, against = options.peers, options.against
    if (peers is None) == (not options.replicas):
        raise ConfigError("give exactly one of --peers and --replica", "", "--peers names servers, --replica stores")
    for given in filter(None, (peers, against)):
        parse_peers(given, needs_ids=False)
    if peers is not None:
        if against == peers:
            raise ConfigError("--against names the same nodes as --peers", "", "name the peers of another cluster")
        groups = parse_groups(options.groups or "default", "--groups")
        found: Snapshot = {group: node_replicas(peers, group, access=options.access) for group in groups}
    else:
        if options.groups is not None:
            raise ConfigError("--groups has no effect with --replica: a store contains one group", "", "leave it out")
        found = stored_logs(parse_replicas(options.replicas))
    if options.opaque:
        found = {group: tuple(replace(each, opaque=True) for each in replicas) for group, replicas in found.items()}
    if against is None:
        return found
    if peers is None and {STORE_GROUP, CLASSIC_GROUP} & set(found):
        raise ConfigError("these stores do not record their group", "", "give --peers and --groups")
    return {
        group: (*here, *node_replicas(against, group, prefix=OTHER, access=options.access))
        for group, here in found.items()
    }


def parse_replicas(texts: Sequence[str]) -> dict[str, Path]:
    """Parse ``--replica NAME=DIR``.

    Raises:
        ConfigError: malformed, or a name or directory twice.
    """
    found: dict[str, Path] = {}
    for text in texts:
        name, equals, directory = text.partition("=")
        if not (name and equals and directory) or "," in name:
            raise ConfigError(f"malformed --replica {text!r}", "", "use NAME=DIR")
        if name in found:
            raise ConfigError(f"duplicate --replica name {name}", "", "use different names")
        found[name] = Path(directory)
    resolved = [path.resolve() for path in found.values()]
    twice = next((path for path in resolved if resolved.count(path) > 1), None)
    if twice is not None:
        raise ConfigError("two replicas are the same directory", str(twice), "name different directories")
    return found


def stored_logs(directories: dict[str, Path]) -> dict[str, tuple[AuditedReplica, ...]]:
    """Return the replicas by group: of stores, of CommitLogs, or of broker directories, which may contain one of each.

    Raises:
        ConfigError: as ``store_replicas``.
    """
    parts = {name: _parts_of_broker(path) for name, path in directories.items()}
    if not any(parts.values()):
        replicas = store_replicas(directories)
        return {replicas[0].group: replicas}
    gaps = {name: _gap(path) for name, path in directories.items() if len(parts[name]) > 1}
    found: dict[str, tuple[AuditedReplica, ...]] = {}
    for kind in ("commitlog", "store"):
        kept = {name: part[kind] for name, part in parts.items() if kind in part}
        if kept:
            replicas = store_replicas(kept)
            group = replicas[0].group
            missing = [
                AuditedReplica(
                    group=group, name=name, path=str(directories[name]), reachable=False, error=f"missing {kind}"
                )
                for name in directories
                if name not in kept
            ]
            if kind == "store":
                replicas = tuple(
                    replace(each, reachable=False, error=gaps[each.name]) if gaps.get(each.name) else each
                    for each in replicas
                )
            found[group] = (*replicas, *missing)
    return found


def _gap(broker: Path) -> str:
    """Return the error of lost files between a broker's CommitLog and its store; empty if there is none."""
    try:
        with open_log_directory(broker) as opened:
            return "" if opened.gap is None else str(opened.gap.error)
    except StorageError:
        return ""  # the part that cannot be opened is reported itself


def _parts_of_broker(path: Path) -> dict[str, Path]:
    """Return the logs in a broker's storePathRootDir: a CommitLog, a DLedger store, or, after an upgrade, both."""
    location = locate(path) if path.is_dir() else Location(path)
    if location.is_store or location.is_commitlog:
        return {}
    if location.several:
        raise ConfigError(f"--replica {path} contains several stores", "", "name one of them")
    parts = {"commitlog": location.commitlog, "store": location.store}
    return {kind: found for kind, found in parts.items() if found is not None}


def store_replicas(stores: dict[str, Path]) -> tuple[AuditedReplica, ...]:
    """Open stores, or classic CommitLogs, and return their ranges.

    Raises:
        ConfigError: a directory is not a store, or the stores belong to different logs.
    """
    kinds = {name: path.is_dir() and locate(path).is_commitlog for name, path in stores.items()}
    _check_kinds(kinds)
    if all(kinds.values()):
        return _classic_replicas(stores)
    replicas = tuple(_store_replica(name, path) for name, path in stores.items())
    for kind, values in (
        ("groups", {r.name: r.group for r in replicas if r.group != STORE_GROUP}),
        ("logs", {r.name: r.log_uuid for r in replicas if r.log_uuid is not None}),
    ):
        if len(set(values.values())) > 1:
            shown = {name: str(value) for name, value in values.items()}
            raise ConfigError(f"the replicas belong to different {kind}", "", "name copies of one log", shown)
    group = next((r.group for r in replicas if r.group != STORE_GROUP), STORE_GROUP)
    return tuple(replace(replica, group=group) for replica in replicas)


def _check_kinds(kinds: Mapping[str, bool]) -> None:
    if len(set(kinds.values())) > 1:
        shown = {name: "CommitLog" if classic else "store" for name, classic in kinds.items()}
        raise ConfigError("a CommitLog can be compared with CommitLogs only", "", "audit each kind separately", shown)


def _classic_replicas(directories: Mapping[str, Path]) -> tuple[AuditedReplica, ...]:
    """Return the CommitLogs with their present ends; later messages are left to the next audit."""
    logs = {name: _classic_log(path) for name, path in directories.items()}
    # If a file size is not a multiple of a block, blocks are smaller, so that each file starts with one.
    block = math.gcd(BLOCK_BYTES, *(file.position for log in logs.values() for file in log.files))
    ends = {name: log.end() for name, log in logs.items()}
    same_end = len(set(ends.values())) == 1
    found = []
    for name, log in logs.items():
        first = log.files[0].position // block
        # A block that only one of them has completed would look like a difference.
        end = max(first, -(-ends[name] // block) if same_end else ends[name] // block)
        found.append(
            AuditedReplica(
                group=CLASSIC_GROUP,
                name=name,
                path=str(directories[name].resolve()),
                first_index=first,
                last_index=end - 1,
                commit_index=end - 1,
                end=end,
                data_bytes=ends[name] - log.files[0].position,
                block_bytes=block,
                end_position=ends[name],
            )
        )
    return tuple(found)


def _classic_log(path: Path) -> ClassicCommitLog:
    """Open a CommitLog; a store next to it, of the same broker, continues it."""
    return ClassicCommitLog(path, closed=locate(path.resolve().parent).store is not None)


def _store_replica(name: str, path: Path) -> AuditedReplica:
    try:
        with open_store(path) as reader:
            log_end = end_of(reader)
            committed = log_end.committed_end
            # Damage before other entries is found by reading; only damage at the end looks like a shorter log.
            damaged = None if reader.damaged else log_end.damaged
            last = int(reader.last_index) if damaged is None else min(int(reader.last_index), damaged[0] - 1)
            return AuditedReplica(
                group=reader.group or STORE_GROUP,
                name=name,
                path=str(path.resolve()),
                first_index=reader.first_index,
                last_index=last,
                commit_index=None if committed is None else committed - 1,
                end=last + 1,
                log_uuid=reader.log_uuid,
                data_bytes=_disk_bytes(path / "data"),
                damaged=damaged,
                missing=log_end.missing,
            )
    except StoreMismatchError as error:
        raise ConfigError(f"--replica {name} is not a store: {error.what}", error.where, error.remedy) from None
    except StorageError as error:
        return AuditedReplica(group=STORE_GROUP, name=name, path=str(path.resolve()), reachable=False, error=str(error))


def _disk_bytes(directory: Path) -> int:
    total = 0
    for file in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):  # deleted meanwhile
            total += file.stat().st_blocks * 512
    return total


def node_replicas(
    peers: str, group: str, *, prefix: str = "", timeout_ms: int = 10_000, access: Access = NO_ACCESS
) -> tuple[AuditedReplica, ...]:
    """Ask the nodes of a group; wait shortly for nodes that are starting or a heartbeat behind.

    Args:
        peers: the servers.
        group: the group's name.
        prefix: of the nodes' names.
        timeout_ms: timeout of the search for a node that responds.
        access: names of the files with which the nodes are read.

    Raises:
        UnreachableError: no node responds.
    """
    with Client(peers, group, timeout_ms=timeout_ms, **access.of_client) as client:
        metadata = client.metadata()
        wanted = max(node.commit_index for node in metadata.nodes)
        deadline = time.monotonic() + _CATCH_UP_S
        while _is_behind(metadata.nodes, wanted) and time.monotonic() < deadline:
            time.sleep(_PAUSE_S)
            metadata = client.metadata()
        found = tuple(
            replace(_node_replica(node, peers, group, metadata.log_uuid, prefix), access=access)
            for node in metadata.nodes
        )
        # Entries appended meanwhile are left to the next audit; otherwise busy replicas would never have equal ends.
        return tuple(replace(replica, end=min(replica.end, max(wanted + 1, replica.first_index))) for replica in found)


def _is_behind(nodes: Sequence[NodeStatus], commit_index: int) -> bool:
    return any(not node.reachable or node.commit_index < commit_index for node in nodes)


def _node_replica(node: NodeStatus, peers: str, group: str, log_uuid: str | None, prefix: str) -> AuditedReplica:
    name = prefix + node.node_id
    if not node.reachable:
        error = f"node {node.node_id} at {node.address} does not respond for group {group}"
        return AuditedReplica(group=group, name=name, peers=peers, reachable=False, error=error)
    return AuditedReplica(
        group=group,
        name=name,
        peers=peers,
        first_index=max(0, node.first_index),
        last_index=node.last_index,
        commit_index=node.commit_index,
        end=max(0, node.first_index, min(node.commit_index, node.last_index) + 1),
        log_uuid=log_uuid,
        role=node.role,
        data_bytes=max(0, node.data_bytes),
    )


READ_BYTES: Final = 5 << 19
RANGES_AT_ONCE: Final = 16
"""Number of ranges that become one gap if they cannot be read, because one was deleted during the audit."""
CLIENT_TIMEOUT_MS: Final = 20_000
RETRY_TIMEOUT_MS: Final = 10_000
"""A node that just restarted serves less until the leader sends it the commit index."""
BURST_S: Final = 1.0
"""Limit of the unused time that later reads may use."""
_BLOCKS_PER_BATCH: Final = 4096

_Item = TypeVar("_Item")
_MESSAGE: Final = ["topic", "queue_id", "queue_offset", "msg_id", "error"]


class RateLimiter:
    """Delays its caller after each read, so that the average stays below the rate. Not thread-safe.

    Args:
        bytes_per_second: the rate; None = no limit.
        clock: monotonic seconds.
        sleep: waits that many seconds.
    """

    def __init__(
        self,
        bytes_per_second: int | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.rate = bytes_per_second
        self._clock = clock
        self._sleep = sleep
        self._paid_until = clock()

    def take(self, nbytes: int) -> None:
        """Count bytes that were read, and wait until the rate allows more."""
        if self.rate is None:
            return
        now = self._clock()
        self._paid_until = max(self._paid_until, now - BURST_S) + nbytes / self.rate
        if self._paid_until > now:
            self._sleep(self._paid_until - now)


@dataclass(frozen=True, slots=True)
class Gap:
    """Entries [start, end) that could not be read.

    Attributes:
        start: first index.
        end: end index (exclusive).
        kind: ``damaged`` bytes, ``deleted`` meanwhile, or ``unread`` (the replica did not respond).
        reason: one line, for reports.
    """

    start: int
    end: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class RangeSeen:
    """A range on one replica.

    Attributes:
        digest: its digest.
        damaged: indexes of damaged bodies.
        index_wrong: ranges of entries whose index rows do not match the data.
    """

    digest: RangeDigest
    damaged: tuple[int, ...] = ()
    index_wrong: tuple[tuple[int, int], ...] = ()


class Source(ABC):
    """One replica.

    Attributes:
        header_bytes: of each record, in addition to its body.
    """

    header_bytes = HEADER_BYTES

    @abstractmethod
    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        """Yield the aligned ranges of [start, end), in order and without holes."""

    def entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        """Yield the entries of [start, end) with the columns of RECORD_SCHEMA, in order and without holes."""
        return read_past_damage(self.read, start, end)

    def read(self, start: int, end: int) -> tuple[list[pa.RecordBatch], int]:
        """Read entries from ``start`` to at most ``end``; returns batches and the next index."""
        raise NotImplementedError

    def locate(self, index: int) -> dict[str, Any]:
        """Return file and offset of an entry, if known."""
        del index
        return {}


def read_past_damage(
    fetch: Callable[[int, int], tuple[list[_Item], int]], start: int, end: int, span: int = 1
) -> Iterator[_Item | Gap]:
    """Read [start, end), around damage in units of ``span`` entries, so that damage costs one unit only.

    Args:
        fetch: reads from a start to at most an end; returns items and the next index. Raises if any entry is
            damaged.
        start: first index.
        end: end index (exclusive).
        span: entries of a unit, a power of two.
    """
    at, limit = start, end
    while at < end:
        unit_end = min(end, at - at % span + span)
        try:
            items, next_index = fetch(at, limit)
        except CorruptRecordError as error:
            if limit <= unit_end:
                yield Gap(at, limit, "damaged", error.what)
                at, limit = limit, end
                continue
            named = error.values.get("index")
            # The entries before the damaged unit are read first, then that unit alone.
            before = named - named % span if isinstance(named, int) else at
            limit = before if at < before < limit else unit_end
            continue
        except IndexOutOfRangeError as error:
            yield Gap(at, end, "deleted", str(error))
            return
        except DLedgerError as error:
            yield Gap(at, end, "unread", str(error))
            return
        if next_index <= at:
            yield Gap(at, end, "unread", "the replica returned nothing")
            return
        yield from items
        at, limit = next_index, end


@contextmanager
def open_source(
    replica: AuditedReplica, limiter: RateLimiter | None = None, read_bytes: int = READ_BYTES
) -> Iterator[Source]:
    """Open a replica for one task; ``limiter`` counts all bytes read, ``read_bytes`` limits one read.

    A process keeps its view of a store, because opening a Java store scans its last files, which may be gigabytes.
    """
    limiter = limiter or RateLimiter()
    if replica.live:
        client = Client(
            replica.peers,
            replica.group,
            timeout_ms=CLIENT_TIMEOUT_MS,
            retry_timeout_ms=RETRY_TIMEOUT_MS,
            **replica.access.of_client,
        )
        with client:
            yield _NodeSource(client, replica.node, limiter, read_bytes)
    elif replica.block_bytes:
        yield _ClassicSource(replica, limiter)
    else:
        yield _StoreSource(store_for(replica.path, opaque=replica.opaque), limiter, read_bytes)


class _NodeSource(Source):
    def __init__(self, client: Client, node: str, limiter: RateLimiter, read_bytes: int) -> None:
        self._read_bytes = read_bytes
        self._client = client
        self._node = node
        self._limiter = limiter

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        return read_past_damage(lambda at, limit: self._digest(at, limit, span), start, end, span)

    def _digest(self, start: int, end: int, span: int) -> tuple[list[RangeSeen], int]:
        if self._limiter.rate is not None:  # a range at a time: the node reads all requested ranges at once
            end = min(end, start - start % span + span)
        report = self._client.digest(start, end, span=span, node=self._node, min_end=end)
        self._limiter.take(sum(r.nbytes + HEADER_BYTES * (r.end - r.start) for r in report.ranges))
        seen = [
            RangeSeen(digest, tuple(i for i in report.damaged if digest.start <= i < digest.end))
            for digest in report.ranges
        ]
        return seen, report.next_index

    def read(self, start: int, end: int) -> tuple[list[pa.RecordBatch], int]:
        fetched = self._client.records(start, end, node=self._node, max_bytes=self._read_bytes, min_end=end)
        self._limiter.take(fetched.batch.nbytes)
        return [fetched.batch], fetched.next_index


class _StoreSource(Source):
    def __init__(self, reader: StoreReader, limiter: RateLimiter, read_bytes: int) -> None:
        self._read_bytes = read_bytes
        self._reader = reader
        self._limiter = limiter

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        at_once = 1 if self._limiter.rate is not None else RANGES_AT_ONCE
        for first, stop in aligned(start, end, span * at_once):
            yield from read_past_damage(lambda at, limit: self._digest(at, limit, span), first, stop, span)

    def _digest(self, start: int, end: int, span: int) -> tuple[list[RangeSeen], int]:
        """Digest complete ranges, of about the size of one read."""
        seen, wrong = list[RangeSeen](), list[int]()
        hasher, at = RangeHasher(start), start
        while at < end:
            records = self._reader.raw(at, end, self._read_bytes)  # raises where a CRC is wrong
            wrong += self._reader.index_mismatches(records)
            self._limiter.take(records.nbytes)
            for first, stop in aligned(at, at + records.count, span):
                hasher.update(records, first - at, stop - at)
                if stop == end or stop % span == 0:
                    in_range = [index for index in wrong if index < stop]
                    seen.append(RangeSeen(hasher.digest(), index_wrong=tuple(consecutive(in_range))))
                    hasher, wrong = RangeHasher(stop), wrong[len(in_range) :]
            at += records.count
            end = min(end, at + -at % span)  # the started range is finished, and no other is started
        return seen, at

    def read(self, start: int, end: int) -> tuple[list[pa.RecordBatch], int]:
        batch = self._reader.read(start, end, max_bytes=self._read_bytes)
        self._limiter.take(batch.nbytes)
        return [batch], start + batch.num_rows


class _ClassicSource(Source):
    header_bytes = 0

    def __init__(self, replica: AuditedReplica, limiter: RateLimiter) -> None:
        self._log = _classic_log(Path(replica.path))
        self._block = replica.block_bytes
        self._end = replica.end_position
        self._limiter = limiter

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        for first, stop in aligned(start, end, span):
            try:
                yield self._digest(first, stop)
            except FileNotFoundError as error:
                yield Gap(first, stop, "deleted", f"deleted meanwhile: {error.filename}")

    def _digest(self, start: int, end: int) -> RangeSeen:
        low, high = self._positions(start, end)
        hasher = blake3()
        for chunk in self._bytes(low, high):
            hasher.update(chunk)
            self._limiter.take(len(chunk))
        damaged = tuple(sorted(self._damaged(start, end)))
        return RangeSeen(RangeDigest(start, end, high - low, hasher.digest(), b""), damaged)

    def entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        at = start
        try:
            for found in self._entries(start, end):
                yield found
                at = found.end if isinstance(found, Gap) else at + found.num_rows
        except FileNotFoundError as error:
            yield Gap(at, end, "deleted", f"deleted meanwhile: {error.filename}")

    def _entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        damaged = self._damaged(start, end)
        at = start
        for index in [*sorted(damaged), end]:
            for first in range(at, index, _BLOCKS_PER_BATCH):
                yield self._batch(first, min(index, first + _BLOCKS_PER_BATCH))
            if index < end:
                yield Gap(index, index + 1, "damaged", damaged[index])
            at = index + 1

    def locate(self, index: int) -> dict[str, Any]:
        """Return file and offset of a block, and the message in it."""
        low, high = self._positions(index, index + 1)
        file = self._log.file_at(low)
        shown: dict[str, Any] = {"file": Path(file.path).name, "offset": low - file.position}
        for batch in self._log.messages(low, high):
            fields = decode_messages(batch.column("body").slice(0, 1), _MESSAGE).to_pylist()[0]
            named = {name: value for name, value in fields.items() if value is not None}
            shown["message"] = {"position": batch.column("position")[0].as_py()} | named
        return shown

    def _positions(self, start: int, end: int) -> tuple[int, int]:
        return start * self._block, min(end * self._block, self._end)

    def _bytes(self, low: int, high: int) -> Iterator[bytes]:
        first = self._log.files[0]
        if low < first.position:  # the broker has deleted files since the snapshot of the replicas
            raise FileNotFoundError(errno.ENOENT, "deleted meanwhile", f"positions {low} to {first.position - 1}")
        yield from self._log.read(low, high)

    def _damaged(self, start: int, end: int) -> dict[int, str]:
        """Return the blocks of damaged messages with the reason."""
        found: dict[int, str] = {}
        for low, high, reason in self._log.damage(*self._positions(start, end)):
            for block in range(max(start, low // self._block), min(end, -(-high // self._block))):
                found[block] = reason
        return found

    def _batch(self, start: int, end: int) -> pa.RecordBatch:
        low, high = self._positions(start, end)
        data = b"".join(self._bytes(low, high))
        self._limiter.take(len(data))
        bodies = [data[at : at + self._block] for at in range(0, len(data), self._block)]
        zeros = pa.array([0] * len(bodies), pa.int64())
        columns = {"index": pa.array(range(start, end), pa.int64()), "term": zeros, "magic": zeros}
        columns |= {"position": pa.array(range(low, low + len(bodies) * self._block, self._block), pa.int64())}
        return pa.RecordBatch.from_pydict({**columns, "body": pa.array(bodies, pa.binary())})

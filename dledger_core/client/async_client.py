"""AsyncClient: one group's log for asyncio programs."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, Final, NoReturn, TypeVar

import pyarrow as pa

from dledger_core.client import reading
from dledger_core.client.appending import AppendBatcher, Bodies, check_columns, columns_of
from dledger_core.client.describing import (
    agreed,
    bounds_of,
    groups_of,
    metadata_of,
    transaction_map,
)
from dledger_core.client.positions import PositionReads
from dledger_core.client.protocols import client_class
from dledger_core.client.reading import END_OF_LOG, READ_BYTES, Consistency
from dledger_core.client.results import (
    AppendResult,
    AttemptResult,
    DigestReport,
    Entry,
    LogBounds,
    Metadata,
    RoleChange,
)
from dledger_core.client.routing.cluster_view import ClusterView, ReadFrom, ReplicaChoice
from dledger_core.client.routing.replica_reads import Reader
from dledger_core.client.routing.requests import Requests
from dledger_core.client.routing.retry import Deadline, Timeouts, with_retries
from dledger_core.client.transactions import TransactionCalls
from dledger_core.config import Peer, check_group_name, parse_peers
from dledger_core.control import TransactionId, column_crc
from dledger_core.errors import BadRequestError, ConfigError, DLedgerError, ProtocolError
from dledger_core.net.codec import columns_payload, int_field, str_field
from dledger_core.net.frame import Frame
from dledger_core.net.protocol import Type
from dledger_core.record import Columns, Fetch, Isolation
from dledger_core.rocketmq.client.options import JavaOptions

__all__ = ["TAIL_WAIT_MS", "AsyncClient"]

_T = TypeVar("_T")

TAIL_WAIT_MS: Final = 5_000
LOOK_AGAIN_S: Final = 0.1
BEHIND_WAIT_MS: Final = 1_000
"""How long a replica may wait until it has entries that are known to be readable."""


class AsyncClient(TransactionCalls, PositionReads):
    """A client of one group; finds the leader, follows it, retries what is safe to retry.

    All its use belongs to one event loop. Reads are monotonic: none shows less of the log than an earlier answer
    proved committed, unless one replica is named with ``node``.

    Args:
        peers: DLedger's peers string, ``n0-host:port;n1-host:port``, or the parsed peers.
        group: the group's name.
        timeout_ms: limit of one request; also of a whole call without ``retry_timeout_ms``.
        retry_timeout_ms: limit of a call with its retries on all nodes: reads, appends that are safe to repeat,
            questions to one node or to all nodes. Default: retries within ``timeout_ms``, and a question to one named
            node or to all nodes is asked once.
        connect_timeout_ms: limit of a call until a first node has responded, so that wrong peers are reported soon.
        protocol: ``dledger``, or ``dledger-java`` for a Java group.
        java: settings for a Java group.

    Raises:
        ConfigError: an argument is wrong or not supported.
    """

    def __new__(cls, *_: Any, protocol: str = "dledger", **__: Any) -> AsyncClient:
        """Makes the client that speaks the protocol."""
        return super().__new__(client_class(cls, AsyncClient, protocol))

    def __init__(
        self,
        peers: str | Sequence[Peer],
        group: str = "default",
        *,
        timeout_ms: int = 10_000,
        retry_timeout_ms: int | None = None,
        connect_timeout_ms: int | None = None,
        protocol: str = "dledger",
        java: JavaOptions | None = None,
    ) -> None:
        self.peers = parse_peers(peers) if isinstance(peers, str) else tuple(peers)
        self.group = check_group_name(group)
        self.timeout_ms = timeout_ms
        if not self.peers:
            raise ConfigError("there are no peers", "peers", "name at least one node: n0-127.0.0.1:40911")
        self._timeouts = Timeouts.of(timeout_ms, retry_timeout_ms, connect_timeout_ms)
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._closed = False
        self._set_up(java or JavaOptions())

    def _set_up(self, java: JavaOptions) -> None:
        del java
        self._view = ClusterView(self.peers, self.group)
        self._requests = Requests(self._view, self._timeouts)
        self._reader = Reader(self._view, self._requests, self._timeouts)
        self._batcher = AppendBatcher(self.append_columns)

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __reduce__(self) -> NoReturn:
        raise ConfigError("a client cannot be pickled", "", "send the peers string and make a client there")

    async def close(self) -> None:
        """Closes all connections; calls under way are cancelled. Repeatable."""
        if not self._closed:
            self._closed = True
            await self._batcher.close()
            await self._view.close()

    def _check_usable(self) -> None:
        if self._closed:
            raise ConfigError("the client is closed", "", "make a new one")
        if os.getpid() != self._pid:
            raise ConfigError("a client cannot be used after fork", "", "make a new one in the child process")
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        elif self._loop is not loop:
            raise ConfigError("the client belongs to another event loop", "", "make one per event loop, or use Client")

    # --- appending ------------------------------------------------------------------------------------------------

    async def append(
        self, bodies: Bodies, *, producer_id: str | None = None, epoch: int = 0, sequence: int | None = None
    ) -> AppendResult:
        """Appends bodies as one batch: all of them or none.

        Args:
            bodies: a sequence of bytes, or an Arrow array; at most 8 MiB of records, a record at most 4 MiB.
            producer_id: makes a retry safe: a repeat of ``sequence`` returns the first result.
            epoch: the producer's epoch; a higher one shuts out the lower ones.
            sequence: counts the producer's appends from 0.

        Raises:
            BadRequestError: nothing was sent.
            RequestTimedOutError, LeadershipLostError: the outcome is unknown.
            ProducerError: refused.
        """
        columns = columns_of(bodies)
        self._check_usable()
        if producer_id is None:
            return await self._batcher.append(columns)
        return await self.append_columns(columns, producer_id=producer_id, epoch=epoch, sequence=sequence)

    async def append_columns(
        self, columns: Columns, *, producer_id: str | None = None, epoch: int = 0, sequence: int | None = None
    ) -> AppendResult:
        """Appends columns that are made already, always as a request of their own; otherwise as ``append``."""
        self._check_usable()
        request: dict[str, Any] = {"t": Type.APPEND, "g": self.group, "n": columns.count}
        if producer_id is not None:
            if sequence is None:
                raise BadRequestError("a producer id without a sequence", "sequence", "pass it, or use Producer")
            request |= {"p": producer_id, "pe": epoch, "ps": sequence}
        return await self._append(request, columns, idempotent=producer_id is not None)

    async def append_attempt(self, bodies: Bodies, *, transaction: TransactionId, attempt: str) -> AttemptResult:
        """Appends bodies as part of a transaction's attempt; visible only once its commit lists them.

        Args:
            bodies: as for ``append``.
            transaction: the transaction.
            attempt: uuid of the attempt.

        Raises:
            TransactionError: the transaction is committed or aborted.
            FencedError: a newer run of the query exists.
        """
        columns = columns_of(bodies)
        self._check_usable()
        part = {**transaction_map(transaction), "a": attempt}
        request = {"t": Type.APPEND, "g": self.group, "n": columns.count, "x": part}
        # Idempotent: a first copy that took effect is not listed by the commit, and so it is orphaned.
        result = await self._append(request, columns, idempotent=True)
        places = result.first_index, result.last_index, result.term
        return AttemptResult(*places, columns.count, column_crc(columns.crcs))

    async def _append(self, request: dict[str, Any], columns: Columns, *, idempotent: bool) -> AppendResult:
        check_columns(columns)
        payload = columns_payload(columns)
        frame = await self._requests.to_leader(request, *payload, idempotent=idempotent)
        first, last = int_field(frame.header, "first", 0), int_field(frame.header, "last", 0)
        if last - first + 1 != columns.count:
            raise ProtocolError("an append answers another number of entries", "", "", {"first": first, "last": last})
        self._view.saw_commit(last)
        return AppendResult(first, last, int_field(frame.header, "term"))

    # --- reading --------------------------------------------------------------------------------------------------

    async def fetch(
        self,
        start: int,
        end: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        consistency: Consistency = "committed",
        isolation: Isolation = "read_committed",
        wait_ms: int = 0,
        min_commit: int = -1,
        min_end: int = -1,
        read_from: ReadFrom = "any",
        spread: int | None = None,
    ) -> Fetch:
        """Reads committed data entries of [start, end).

        Args:
            start: first index.
            end: index behind the last.
            max_bytes: bound on the records looked at; at least one is.
            node: read from this node only.
            consistency: ``linearizable`` asks the leader, which proves first that it still leads.
            isolation: ``read_committed`` leaves out losing attempts and stops at the oldest open transaction.
            wait_ms: if there is nothing at ``start`` yet, wait so long for it.
            min_commit: the replica must have reached this commit index.
            min_end: the log is known to be readable up to here: a replica that shows nothing of [start, min_end)
                is given a moment, then another one is asked.
            read_from: ask the ``leader`` or the ``follower`` replicas first, then the others.
            spread: readers with different numbers begin at different replicas.

        Raises:
            IndexOutOfRangeError: ``start`` is below the log's first index.
            BehindError: the replicas have not reached ``min_commit`` or ``start``.
        """
        if min(end, min_end) > start:
            wait_ms = max(wait_ms, BEHIND_WAIT_MS)
        request = reading.read_request(
            self.group,
            start,
            end,
            max_bytes=max_bytes,
            consistency=consistency,
            isolation=isolation,
            wait_ms=wait_ms,
            min_commit=min_commit if node is not None else max(min_commit, self._view.commit_seen),
        )
        self._check_usable()
        return await self._reader.fetch(request, node, choice=ReplicaChoice(read_from, spread), min_end=min_end)

    async def read(
        self,
        start: int,
        end: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        consistency: Consistency = "committed",
        isolation: Isolation = "read_committed",
    ) -> pa.RecordBatch:
        """Returns ``fetch(...).batch``; it may end before ``end`` when ``max_bytes`` is reached."""
        how: dict[str, Any] = {"node": node, "consistency": consistency, "isolation": isolation}
        return (await self.fetch(start, end, max_bytes=max_bytes, **how)).batch

    async def records(
        self,
        start: int,
        end: int,
        *,
        node: str | None = None,
        max_bytes: int = READ_BYTES,
        min_commit: int = -1,
        min_end: int = -1,
    ) -> Fetch:
        """Read everything committed in [start, end), control entries and orphaned attempts too.

        The batch has the column ``magic``; arguments as for ``fetch``.
        """
        request = reading.read_request(
            self.group,
            start,
            end,
            max_bytes=max_bytes,
            isolation="records",
            wait_ms=BEHIND_WAIT_MS if min(end, min_end) > start else 0,
            min_commit=min_commit if node is not None else max(min_commit, self._view.commit_seen),
        )
        self._check_usable()
        return await self._reader.fetch(request, node, min_end=min_end)

    async def get(self, index: int) -> Entry:
        """Returns the data entry at ``index``.

        Raises:
            IndexOutOfRangeError: it is not committed, no longer held, or no data entry.
        """
        found = await self.fetch(index, index + 1, max_bytes=1)
        if found.next_index <= index:
            found = await self._reader.fetch_newest(index, found)
        if found.batch.num_rows:
            return reading.entry_of(found.batch, 0)
        raise reading.not_found(index, found, self.group)

    async def tail(
        self, start: int, *, max_bytes: int = READ_BYTES, isolation: Isolation = "read_committed"
    ) -> AsyncIterator[pa.RecordBatch]:
        """Yields committed entries from ``start`` on, for ever, as they come; no batch is empty."""
        while True:
            found = await self.fetch(start, END_OF_LOG, max_bytes=max_bytes, isolation=isolation, wait_ms=TAIL_WAIT_MS)
            start = max(start, found.next_index)
            if found.batch.num_rows:
                yield found.batch

    async def offset_for_time(self, timestamp: datetime | int, *, min_commit: int = -1) -> int:
        """Returns the index of the first entry appended at or after a time; the visible end if there is none.

        Args:
            timestamp: milliseconds since the epoch, or a datetime with a time zone.
            min_commit: the replica must have reached this commit index.
        """
        request = {"t": Type.TIME, "ms": reading.millis(timestamp)}
        request["min_commit"] = max(int(min_commit), self._view.commit_seen)
        return await self._ask_replica(request, reading.decode_index, None)

    async def pin(self, name: str, start: int, seconds: float) -> tuple[str, ...]:
        """Keeps entries from ``start`` on out of retention for a reader, at most a day; returns who agreed."""
        self._check_usable()
        return agreed(await self._view.ask_all({"pin": [name, int(seconds * 1000)], "start": int(start)}))

    async def digest(
        self, start: int, end: int, *, span: int, node: str | None = None, min_end: int = -1
    ) -> DigestReport:
        """Asks a replica for digests of its own files.

        Args:
            start: first index.
            end: index behind the last.
            span: entries per range, a power of two; ranges are aligned to it.
            node: the replica; any by default.
            min_end: the log is known to be committed up to here; a replica that digests nothing of it is behind.
        """

        def decode(frame: Frame) -> DigestReport:
            report = reading.decode_digests(frame)
            reading.check_progress(report.next_index, start, min(end, min_end))
            return report

        request = {"t": Type.DIGEST, "start": int(start), "end": int(end), "span": int(span)}
        return await self._ask_replica(request, decode, node)

    async def _ask_replica(self, request: dict[str, Any], decode: Callable[[Frame], _T], node: str | None) -> _T:
        self._check_usable()
        request["g"] = self.group
        if node is not None:
            return await self._requests.to_node(node, request, decode)
        return await self._requests.to_any(request, decode)

    # --- the group ------------------------------------------------------------------------------------------------

    async def _ask_leader(self, request: dict[str, Any]) -> Frame:
        self._check_usable()
        request["g"] = self.group
        return await self._requests.to_leader(request, idempotent=True)

    async def _ask_all(self, fields: Mapping[str, Any] | None) -> Mapping[str, Frame | DLedgerError]:
        """Ask every node, in parallel and for at most a second each; again where none responds."""
        self._check_usable()
        connected = self._view.pool.connected
        return await with_retries(lambda: self._view.ask_all(fields), self._timeouts, connected=connected)

    async def metadata(self, *, space: bool = False) -> Metadata:
        """Asks every node, in parallel and for at most a second, what it knows of the group and of itself.

        With ``space`` also what losing attempts take. Raises UnreachableError if no node answered.
        """
        found = metadata_of(self.peers, await self._ask_all({"space": True} if space else None))
        if found.leader_id is not None:
            self._view.leader_is(found.leader_id)
        return found

    async def bounds(
        self, *, isolation: Isolation = "read_committed", min_end: int = -1, wait_ms: int = 0
    ) -> LogBounds:
        """Returns the widest view of the log among the nodes that respond.

        Args:
            isolation: ``read_uncommitted`` includes what open transactions hide.
            min_end: wait for an end of at least this; after an election replicas may show less for a moment.
            wait_ms: how long to wait for it.
        """
        deadline = Deadline(wait_ms / 1000)
        while True:
            found = bounds_of(await self.metadata(), isolation)
            if found.end >= min_end or deadline.is_over:
                return found
            await asyncio.sleep(LOOK_AGAIN_S)

    async def groups(self) -> dict[str, str | None]:
        """Asks every node which groups it hosts; returns the uuid of each group's log, None where it has none yet."""
        return groups_of(await self._ask_all({"t": Type.GROUPS}))

    async def wait_for_entries(
        self, seen: Mapping[str, int], *, wait_ms: int, isolation: Isolation = "read_committed"
    ) -> frozenset[str]:
        """Waits at one node until a group has more to read than was seen: one request, however many groups.

        Args:
            seen: the end (exclusive) that is known of each group, 1 to 4,096 groups that one node hosts.
            wait_ms: how long to wait, at most 30,000.
            isolation: as for ``fetch``.

        Returns:
            The groups that have grown; none if the time was over first.

        Raises:
            NoLeaderError: no node knows a leader of each of them, so none would hear of what is committed.
            UnknownGroupError: no node hosts all of them.
        """
        self._check_usable()
        return await self._reader.wait_for_entries(seen, wait_ms, isolation)

    async def describe(self, table: str, node: str | None = None) -> pa.RecordBatch:
        """Returns what a replica, any by default, says about the log: ``terms``, ``segments`` or ``producers``."""
        self._check_usable()
        return await self._reader.describe(table, node)

    def role_changes(self) -> AsyncGenerator[RoleChange, None]:
        """Yields what each node is, then every change of it, for ever; to be unreachable is one."""
        return self._view.role_changes(self._check_usable)

    async def transfer_leadership(self, node_id: str) -> None:
        """Hands leadership over to a node; returns when it leads.

        Raises:
            TransferringError: it did not take over in time.
        """
        self._view.check_node(node_id)
        frame = await self._ask_leader({"t": Type.TRANSFER, "node": node_id})
        self._view.leader_is(str_field(frame.header, "leader"))

"""The operations on a group's log, as protocols that every client implements, and their results.

``AsyncLogClient`` and ``SyncLogClient`` take the signatures and docstrings of their coroutine methods from here; they
add ``read``, ``read_at`` and ``tail``.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from datetime import datetime
from typing import Final, Literal, Protocol, TypeAlias

import pyarrow as pa

from dledger_core.checksum import Buffer
from dledger_core.client.members import GroupMembers
from dledger_core.client.signatures import takes
from dledger_core.config import Peer
from dledger_core.control import ArchivedRange, Part, TransactionId
from dledger_core.digest import RangeDigest, RowsDigest
from dledger_core.lineage import Ancestors
from dledger_core.record import Columns, Fetch, Isolation


@dataclass(frozen=True, slots=True)
class AppendResult:
    """Indexes of an append: [first_index, last_index], all of one term.

    ``indexes`` is empty except for a Java group, where other entries may be in between: then each body's index.
    """

    first_index: int
    last_index: int
    term: int
    indexes: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class AttemptResult:
    """Indexes of an append of a transaction's attempt, with the row count and CRC that its commit lists."""

    first_index: int
    last_index: int
    term: int
    rows: int
    crc: int


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry; ``timestamp`` is None where the append time is unknown (written by Java)."""

    index: int
    term: int
    position: int
    timestamp: datetime | None
    body: bytes


@dataclass(frozen=True, slots=True)
class PositionFetch:
    """One read by position: entries of the log, or messages of the commitlog prefix.

    Attributes:
        batch: columns as ``Fetch.batch``; messages of the prefix have no index, term or timestamp.
        next_position: position to continue at in the prefix; None in the log.
        next_index: index to continue at with ``fetch``; None in the prefix.
    """

    batch: pa.RecordBatch
    next_position: int | None
    next_index: int | None


@dataclass(frozen=True, slots=True)
class LogRange:
    """Entries that can be read now: [first_index, end).

    Attributes:
        first_index: first stored index.
        end: index after the last readable entry.
        commit_index: commit index of the replica with that end; -1 where none is known.
        log_uuid: identity of the log; None if it has none.
        chain: the logs that it continues, oldest first.
    """

    first_index: int
    end: int
    commit_index: int
    log_uuid: str | None = None
    chain: Ancestors = ()


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """State that one node reports; numbers are -1 and role is ``unreachable`` if it did not respond.

    The size of orphaned attempts (``lost_entries``, ``lost_bytes``) is -1 also if it was not queried. A node that
    ``is_recovering`` does not vote, because the end of its log, with entries it acknowledged, may be lost. A node
    that ``is_disk_full`` rejects appends. The free bytes and the size of the disk with its store are -1 also if it does
    not report them (0.2, or a Java group). ``accepts_entries`` is whether its disk has space for a leader's entries,
    None if it does not report it. ``reason`` is the error of a node that did not respond or does not serve the group;
    of one that responds and does not serve it, ``role`` is the state of the group there, such as ``waiting`` or
    ``quarantined``. ``is_member`` is whether the newest members of the log name the node, None if no node reports them.
    """

    node_id: str
    address: str
    role: str = "unreachable"
    first_index: int = -1
    last_index: int = -1
    commit_index: int = -1
    visible_end: int = -1
    data_bytes: int = -1
    reachable: bool = False
    lost_entries: int = -1
    lost_bytes: int = -1
    is_recovering: bool = False
    is_disk_full: bool = False
    reason: str = ""
    disk_free_bytes: int = -1
    disk_size_bytes: int = -1
    accepts_entries: bool | None = None
    is_member: bool | None = None


NEARLY_FULL_PERCENT: Final = 80


@dataclass(frozen=True, slots=True)
class TableUsage:
    """Rows of a table about the log's writers, and the limit on them."""

    table: str
    rows: int
    limit: int

    @property
    def is_nearly_full(self) -> bool:
        """Whether 80 % of the rows are in use: at the limit new writers are rejected."""
        return self.rows * 100 >= self.limit * NEARLY_FULL_PERCENT


@dataclass(frozen=True, slots=True)
class ArchiveState:
    """The archive of a log: entries [start, end) were proved to be in a table, so retention may delete those here.

    Attributes:
        start: first index that was proved.
        end: index after the last one.
        table: URI of the table as the newest proof named it: a hint, the table may have been moved.
        missing_bytes: bytes of the log from ``end`` to the visible end; -1 where this is not known.
        missing_ms: age of the first of these entries in log time, in ms; -1 where this is not known.
    """

    start: int
    end: int
    table: str
    missing_bytes: int = -1
    missing_ms: int = -1


@dataclass(frozen=True, slots=True)
class LogSlice:
    """A range [start, end) of a log as its leader cuts it for the archive, and its bytes."""

    start: int
    end: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class ArchivableRanges:
    """The entries that the archive lacks, as the leader cuts them.

    Attributes:
        ranges: consecutive ranges that are full or closed, at most 1,000.
        start: start of the first range, also of one that is neither full nor closed yet.
        visible_end: end of the entries that ``read_committed`` shows.
    """

    ranges: tuple[LogSlice, ...]
    start: int
    visible_end: int


@dataclass(frozen=True, slots=True)
class ArchivedRanges:
    """Recorded ranges of an archive.

    Attributes:
        ranges: consecutive ranges, at most 1,000; continue at the ``end`` of the last one, until there are none.
        archive: what they belong to; None if the log has no archive.
    """

    ranges: tuple[ArchivedRange, ...]
    archive: ArchiveState | None


@dataclass(frozen=True, slots=True)
class Proof:
    """Result of a comparison of the archive's rows with the log's.

    Attributes:
        equal: whether they are equal; then the log has recorded the range.
        rows: number of the log's rows.
    """

    equal: bool
    rows: int


@dataclass(frozen=True, slots=True)
class Metadata:
    """State of a group as its nodes report it.

    Attributes:
        leader_id: the leader, None if no node knows one.
        term: highest term any node knows.
        nodes: each node of the peers string, in its order.
        log_uuid: identity of the log, None before its first leader.
        preferred_leaders: nodes that should lead once caught up, best first, as configured.
        chain: the logs that the log continues, oldest first.
        tables: the tables about the log's writers; none of a Java group.
        archive: the log's archive, None if it has none.
    """

    leader_id: str | None
    term: int
    nodes: tuple[NodeStatus, ...]
    log_uuid: str | None = None
    preferred_leaders: tuple[str, ...] = ()
    chain: Ancestors = ()
    tables: tuple[TableUsage, ...] = ()
    archive: ArchiveState | None = None

    @property
    def lacks_votes(self) -> bool:
        """Whether so many nodes are recovering that the others cannot elect a leader."""
        recovering = sum(node.is_recovering for node in self.nodes)
        return self.leader_id is None and recovering > 0 and 2 * (len(self.nodes) - recovering) <= len(self.nodes)


@dataclass(frozen=True, slots=True)
class RoleChange:
    """The new role of a node in its group.

    Attributes:
        node_id: the node.
        role: leader, follower, learner, candidate or pre-candidate; ``unreachable``, or the state of a group that the
            node does not serve, such as ``waiting``.
        broker_role: in RocketMQ's words ``master`` for a leader, else ``slave``; None if the node does not serve it.
        term: its term, -1 if the node does not serve the group.
        leader_id: the leader that it follows, None without one.
        reason: why the node does not serve the group.
    """

    node_id: str
    role: str
    broker_role: str | None = None
    term: int = -1
    leader_id: str | None = None
    reason: str = field(default="", compare=False)


@dataclass(frozen=True, slots=True)
class ProducerState:
    """State of a producer in the log.

    Attributes:
        known: whether the log contains appends of it.
        epoch: its epoch.
        next_sequence: the sequence its next append must have.
        last_range: (first, last) index of its newest append, None if there is none.
    """

    known: bool
    epoch: int
    next_sequence: int
    last_range: tuple[int, int] | None


@dataclass(frozen=True, slots=True)
class TransactionState:
    """A transaction.

    Attributes:
        state: ``unknown``, ``open``, ``committed`` or ``aborted``.
        index: the leader's commit index.
        newest: the newest micro-batch that the query has committed, -1 if none.
        rows: number of rows of a committed one.
        fingerprint: of the rows of a committed one (``fingerprint_of``); a replay has the same rows at other indexes.
    """

    state: str
    index: int
    newest: int = -1
    rows: int = 0
    fingerprint: int = 0


@dataclass(frozen=True, slots=True)
class DigestReport:
    """Digests of aligned ranges as one replica computed them from its files.

    Attributes:
        ranges: consecutive, from the requested start on.
        next_index: index to continue at.
        commit_index: commit index of the replica.
        damaged: indexes of records whose body does not match its CRC.
    """

    ranges: tuple[RangeDigest, ...]
    next_index: int
    commit_index: int
    damaged: tuple[int, ...]


Bodies: TypeAlias = Sequence[Buffer] | pa.Array | pa.ChunkedArray
Consistency: TypeAlias = Literal["committed", "linearizable"]
ReadFrom: TypeAlias = Literal["any", "leader", "follower"]
"""The nodes that a client reads from."""

READ_BYTES: Final = 8 << 20
END_OF_LOG: Final = 1 << 62


@dataclass(frozen=True, slots=True)
class RecordsRequest:
    """The arguments of ``LogClient.records``."""

    start: int
    end: int
    _: KW_ONLY
    max_bytes: int = READ_BYTES
    node: str | None = None
    min_commit: int = -1
    min_end: int = -1
    columns: Sequence[str] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest(RecordsRequest):
    """The arguments of ``LogClient.fetch``, which says what they mean."""

    consistency: Consistency = "committed"
    isolation: Isolation = "read_committed"
    wait_ms: int = 0
    read_from: ReadFrom = "any"
    spread: int | None = None


class LogClient(Protocol):
    """The operations that every log offers."""

    @property
    def protocol(self) -> str:
        """Name of the wire protocol, as ``connect`` takes it."""
        ...

    @property
    def peers(self) -> tuple[Peer, ...]:
        """The group's nodes."""
        ...

    @property
    def group(self) -> str:
        """The group's name."""
        ...

    async def append(
        self,
        bodies: Bodies,
        *,
        producer_id: str | None = None,
        epoch: int = 0,
        sequence: int | None = None,
        once: bool = False,
    ) -> AppendResult:
        """Append bodies as one batch: all of them or none. A Java group takes them one by one.

        Args:
            bodies: a sequence of bytes, or an Arrow array; at most 8 MiB of records, a record at most 4 MiB.
            producer_id: makes a retry safe: a repeat of ``sequence`` returns the first result.
            epoch: the producer's epoch; a higher one fences the lower ones.
            sequence: number of the producer's append, from 0.
            once: the producer id is used once, for a job that never runs again: the log remembers it for a day instead
                of seven, and such ids fill at most half of its table.

        Raises:
            BadRequestError: nothing was sent.
            OverloadedError: the client appends faster than the log commits; nothing was sent.
            RequestTimedOutError, LeadershipLostError: the outcome is unknown.
            ProducerError: the producer table rejects the append.
        """
        ...

    @takes(ReadRequest)
    async def fetch(self, request: ReadRequest) -> Fetch:  # noqa: D417  (the caller passes those of ReadRequest)
        """Read committed data entries of [start, end).

        Args:
            start: first index.
            end: end index, exclusive.
            max_bytes: limit on the records that are read; at least one record is.
            node: read from this node only.
            consistency: ``linearizable`` asks the leader, which first proves that it still leads.
            isolation: ``read_committed`` skips orphaned attempts and stops at the oldest open transaction.
            wait_ms: how long to wait for an entry if there is none at ``start`` yet.
            min_commit: the replica must have reached this commit index.
            min_end: the log is known to be readable up to here: a replica that returns no entry of [start, min_end)
                is given a second, then another one is asked.
            read_from: ask the ``leader`` or the ``follower`` replicas first, then the others.
            spread: readers with different numbers start at different replicas.
            columns: names of the columns to return instead: of entries ``index``, ``term``, ``position``,
                ``timestamp``, ``body``, and ``length`` and ``crc`` of the body; of RocketMQ messages in the bodies
                those of MESSAGE_SCHEMA, with a row for each message. Without ``body`` only these travel; ``max_bytes``
                still counts the records, which the node reads and checks. A node of 0.2 sends the records.

        Raises:
            BadRequestError: an argument is wrong, or there is no such column.
            IndexOutOfRangeError: ``start`` is below the log's first index.
            BehindError: the replicas have not reached ``min_commit`` or ``start``.
        """
        ...

    @takes(RecordsRequest)
    async def records(self, request: RecordsRequest) -> Fetch:
        """Read all committed entries of [start, end), control entries and orphaned attempts too.

        The batch has the column ``magic``, if ``columns`` does not leave it out; arguments as for ``fetch``.
        """
        ...

    async def get(self, index: int) -> Entry:
        """Return the data entry at ``index``.

        Raises:
            IndexOutOfRangeError: the entry is not committed, is deleted, or is not a data entry.
        """
        ...

    async def bounds(self, *, isolation: Isolation = "read_committed", min_end: int = -1, wait_ms: int = 0) -> LogRange:
        """Return the widest view of the log among the nodes that respond.

        Args:
            isolation: ``read_uncommitted`` includes the entries of open transactions.
            min_end: wait for an end of at least this; after an election replicas may show less for a moment.
            wait_ms: how long to wait for it.
        """
        ...

    async def metadata(self, *, space: bool = False) -> Metadata:
        """Query every node, in parallel and for at most a second, about the group and its own log.

        Args:
            space: also query the space that orphaned attempts take.

        Raises:
            UnreachableError: no node responded.
        """
        ...

    async def groups(self) -> dict[str, str | None]:
        """Return the groups that the nodes host: name -> log uuid, None where the log has none yet."""
        ...

    async def transfer_leadership(self, node_id: str) -> None:
        """Transfer leadership to a node; return when it leads.

        Raises:
            TransferringError: the node did not become leader in time.
        """
        ...

    async def close(self) -> None:
        """Close all connections and cancel calls in progress."""
        ...


class OptionalOperations(Protocol):
    """The operations that a log may lack; calling a missing one raises UnsupportedError."""

    async def append_columns(
        self,
        columns: Columns,
        *,
        producer_id: str | None = None,
        epoch: int = 0,
        sequence: int | None = None,
        once: bool = False,
    ) -> AppendResult:
        """Append columns; plain ones in a request of their own; otherwise as ``append``."""
        ...

    async def append_attempt(
        self, bodies: Bodies, *, transaction: TransactionId, attempt: str, once: bool = False, elsewhere: int = -1
    ) -> AttemptResult:
        """Append bodies as part of a transaction's attempt; visible only once its commit lists them.

        Args:
            bodies: as for ``append``.
            transaction: the transaction.
            attempt: uuid of the attempt.
            once: the query id is used for this transaction only: it is forgotten after a day without activity.
            elsewhere: the newest micro-batch that the query has committed in other groups. It admits a query that this
                group does not know and that does not start at micro-batch 0.

        Raises:
            TransactionError: the transaction is committed or aborted, or has too many parts.
            FencedError: a newer run of the query exists, or the query is past this micro-batch.
            QueryUnknownError: an unknown query starts at a micro-batch above 0.
            QueriesFullError: the log knows as many queries as it may.
            OpenTransactionsError: too many transactions are open.
        """
        ...

    async def fetch_at(
        self,
        position: int,
        *,
        max_bytes: int = READ_BYTES,
        node: str | None = None,
        isolation: Isolation = "read_committed",
    ) -> PositionFetch:
        """Read from a position: entries of the log, or messages of the commitlog prefix.

        Args:
            position: a byte of the log, also inside an entry, as RocketMQ's offsets are (position + 48); in the
                commitlog prefix the start of a message.
            max_bytes: limit on the records that are read; at least one record is.
            node: read from this node only.
            isolation: as for ``fetch``.

        Returns:
            The entries or messages, and where to continue; none where nothing is committed yet.

        Raises:
            IndexOutOfRangeError: the position is deleted, or no message of the prefix starts there.
            CorruptRecordError: the message is damaged.
        """
        ...

    async def offset_for_time(self, timestamp: datetime | int, *, min_commit: int = -1) -> int:
        """Return the index of the first entry appended at or after a time; the visible end if there is none.

        Args:
            timestamp: milliseconds since the epoch, or a datetime with a time zone.
            min_commit: the replica must have reached this commit index.
        """
        ...

    async def split_points(self, start: int, end: int, positions: Sequence[int]) -> list[int]:
        """Return where to divide the entries [start, end) so that the parts end near the given positions.

        Args:
            start: first index.
            end: end index, exclusive; must be committed.
            positions: bytes of the log, ascending.

        Returns:
            For each position the index in [start, end] whose record starts nearest to it.

        Raises:
            UnsupportedError: a node of 0.2 was asked, which cannot do this.
            IndexOutOfRangeError: ``start`` is deleted.
        """
        ...

    async def pin(self, name: str, start: int, seconds: float) -> tuple[str, ...]:
        """Pin entries from ``start`` on against retention, for at most a day; return the nodes that agreed.

        Raises:
            BusyError: a node has too many pins; others may have agreed.
        """
        ...

    async def digest(
        self, start: int, end: int, *, span: int, node: str | None = None, min_end: int = -1
    ) -> DigestReport:
        """Ask a replica for digests of its own files.

        Args:
            start: first index.
            end: end index, exclusive.
            span: entries per range, a power of two; ranges are aligned to it.
            node: the replica; any by default.
            min_end: the log is known to be committed up to here: a replica without digests of it is behind.
        """
        ...

    async def producer(self, producer_id: str) -> ProducerState:
        """Return the state of a producer."""
        ...

    async def expire_producer(self, producer_id: str) -> ProducerState:
        """Remove a producer from the log's table: its id is unknown from now on. Idempotent."""
        ...

    async def transaction(self, transaction: TransactionId) -> TransactionState:
        """Return the state of a transaction. A request of its own run counts as activity of an open one."""
        ...

    async def commit_transaction(
        self, transaction: TransactionId, parts: Sequence[Part], *, once: bool = False, elsewhere: int = -1
    ) -> TransactionState:
        """Commit a transaction: make the named ranges visible. Idempotent.

        Args:
            transaction: the transaction.
            parts: the ranges of its winning attempts, at most 16,000; none makes the query known to the log.
            once: as for ``append_attempt``.
            elsewhere: as for ``append_attempt``.

        Raises:
            TransactionError: aborted, or committed with other parts.
            FencedError: a newer run of the query exists.
            QueryUnknownError: an unknown query starts at a micro-batch above 0.
            QueriesFullError: the log knows as many queries as it may.
            BadRequestError: too many parts.
        """
        ...

    async def abort_transaction(self, transaction: TransactionId, *, once: bool = False) -> TransactionState:
        """Abort a transaction: its entries stay invisible. Idempotent.

        It is final for its run: an append of the run that arrives later is refused, also if none came before. Without a
        query id, it is the only one with this batch id whose run id starts as the given one. Without a run id, it is
        aborted whatever run writes it, which with security needs the permission ``admin``.

        Args:
            transaction: the transaction.
            once: as for ``append_attempt``; counts if the log does not know the query.

        Raises:
            FencedError: a newer run of the query exists.
            QueriesFullError: the log does not know the query, and knows as many as it may.
        """
        ...

    async def wait_for_entries(
        self,
        seen: Mapping[str, int],
        *,
        wait_ms: int,
        isolation: Isolation = "read_committed",
        logs: Mapping[str, str | None] | None = None,
    ) -> frozenset[str]:
        """Wait at one node until a group has new entries: one request for any number of groups.

        Args:
            seen: the known end (exclusive) of each group, 1 to 4,096 groups that one node hosts.
            wait_ms: how long to wait, at most 30,000.
            isolation: as for ``fetch``.
            logs: uuid of the log of each group, where it is known.

        Returns:
            The groups with new entries; none if the wait timed out.

        Raises:
            NoLeaderError: no node knows a leader of each group, so none would learn of new commits.
            UnknownGroupError: no node hosts all of them.
        """
        ...

    async def describe(self, table: str, node: str | None = None) -> pa.RecordBatch:
        """Return a replica's table about the log: ``terms``, ``segments`` or ``producers``; any replica by default."""
        ...

    async def archivable_ranges(self, start: int | None = None, *, until: int | None = None) -> ArchivableRanges:
        """Return the entries that the archive lacks, in ranges as the leader cuts them.

        A range is cut when it is full (64 MiB of the log, or 2^20 indexes), when its first entry is an hour of log time
        old, or with ``until``. A range may have no rows: it is proved like any other. Before the first proof the caller
        pins the entries (``pin``): retention does not wait for it yet.

        Args:
            start: first index; None = where the archive ends, or the leader's first index if the log has none.
            until: end, exclusive, up to which the ranges reach, closed or not.

        Raises:
            ArchiveRefusedError: the log cannot have an archive, or the leader lacks entries; ``reason`` says why.
            UnsupportedError: the leader's node is of 0.2.
        """
        ...

    async def prove_archived(self, start: int, end: int, digest: RowsDigest, *, table: str) -> Proof:
        """Let the leader compare rows of the archive with the log, and record the range if they are equal.

        The leader computes the digest from its own files. The range must start where the archive ends, the first one at
        the leader's first index. A repeated call returns the same.

        Args:
            start: first index.
            end: end index, exclusive.
            digest: of the archive's rows in the range (``digest.rows_digest``).
            table: URI of the archive, at most 2,000 bytes, without credentials.

        Raises:
            ArchiveRefusedError: nothing was recorded; ``reason`` says why: ``not-next``, ``not-visible``,
                ``too-large``, ``trimmed``, ``older-nodes``, ``profile`` or ``table``.
            MemberChangeRefusedError: the first proof raises the version of the group, and that was refused now.
            LeadershipLostError: the outcome is unknown; call again.
            UnsupportedError: the leader's node is of 0.2.
        """
        ...

    async def archived_ranges(self, start: int = 0) -> ArchivedRanges:
        """Return recorded ranges of the archive, from the one that contains ``start`` on.

        Raises:
            UnsupportedError: the leader's node is of 0.2.
        """
        ...

    async def end_archive(self) -> None:
        """End the archive: the ranges are forgotten, and retention does not wait for it any longer. Idempotent.

        Raises:
            UnsupportedError: the leader's node is of 0.2.
        """
        ...

    async def members(self) -> GroupMembers:
        """Return the members of the group, as its leader knows them."""
        ...

    async def add_member(self, node_id: str, address: str, *, learner: bool = False) -> GroupMembers:
        """Add a waiting node to the group; return when that is committed.

        Args:
            node_id: the node.
            address: its HOST:PORT.
            learner: it stays a learner; otherwise it becomes a voter once it has caught up.

        Raises:
            MemberChangeRefusedError: the leader refuses it; ``reason`` says why.
            LeadershipLostError: the outcome is unknown; look at ``members``.
        """
        ...

    async def remove_member(self, node_id: str) -> GroupMembers:
        """Remove a node's member, of a voter and its replacement the latter; raises as ``add_member``."""
        ...

    async def promote_member(self, node_id: str) -> GroupMembers:
        """Make a learner that has caught up a voter; raises as ``add_member``."""
        ...

    async def replace_member(self, node_id: str, address: str | None = None) -> GroupMembers:
        """Let the waiting store of a node take the place of the store that the group has of that node.

        Args:
            node_id: the node; its present store must not respond.
            address: HOST:PORT of the waiting node; None = the address that the group knows.

        Raises:
            MemberChangeRefusedError: the leader refuses it; ``reason`` says why.
        """
        ...

    def role_changes(self) -> AsyncGenerator[RoleChange, None]:
        """Yield the role of each node, then every change of it, without end; unreachable is a role too."""
        ...

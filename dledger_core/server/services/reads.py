"""Reads on any replica: committed records by index range or position, times, digests, and tables about the log.

Served entries are committed, durable here, and checked against their CRCs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np
import numpy.typing as npt

from dledger_core.config import LIMITS, ClientLimits
from dledger_core.digest import RangeDigest, RangeHasher, damaged_indexes
from dledger_core.errors import (
    BadRequestError,
    BehindError,
    CorruptRecordError,
    IndexOutOfRangeError,
    NoLeaderError,
    invariant,
)
from dledger_core.ids import Index
from dledger_core.net.codec import fields_payload
from dledger_core.net.messages import AwaitRequest, DigestRequest, Isolation, ReadRequest
from dledger_core.record import DESCRIPTIONS, Chosen, MessageFields, Records, data_entries, key_of, to_arrow
from dledger_core.server.replica.replica import Replica
from dledger_core.server.services.growth import GrowthWatch, wait_grown
from dledger_core.storage.read.log_queries import segment_rows, stored_producer_rows, term_rows, transaction_rows
from dledger_core.storage.read.visibility import Visibility
from dledger_core.storage.tables import producers
from dledger_core.storage.tables.queries import QUERIES_END

_READ_INDEX_S: Final = 5.0
"""Wait for the heartbeats that confirm a linearizable read (dissertation, 6.4)."""
_ALONE_WAIT_S: Final = 0.25
"""Longest long poll of READ on a replica that knows no leader: others may have more."""
_DIGEST_BYTES: Final = 64 << 20
"""Bytes read for one DIGEST; the rest is another request, so that other readers are served in between."""
_DIGEST_DAMAGED: Final = 1000
"""Damaged entries after which one DIGEST stops."""
_KEY_KINDS: Final = {"terms": [int], "segments": [int], "producers": [bytes], "transactions": [str, int]}


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """Records from the requested start on, and the index to continue from.

    Attributes:
        records: the records; None if there is none.
        columns: the requested columns of them, as they are sent, which replace them in the response.
    """

    records: Records | None
    next_index: int
    commit_index: int
    visible_end: int
    first_index: int
    skip: list[tuple[int, int]]
    columns: memoryview | None = None


class Reads:
    """The read service of one replica; coroutines run on the node's event loop, disk work in ``executor``.

    Args:
        replica: the group's replica.
        executor: threads that read; None = the loop's own.
        limits: the node's limits.
        messages: decodes messages for requests of their columns.

    Attributes:
        growth: the requests that wait for entries.
    """

    def __init__(
        self,
        replica: Replica,
        executor: Executor | None,
        limits: ClientLimits = LIMITS,
        messages: MessageFields | None = None,
    ) -> None:
        self.growth = GrowthWatch(replica)
        self._messages = messages
        self._replica = replica
        self._executor = executor
        self._limits = limits

    async def read(self, request: ReadRequest) -> ReadResult:
        """Return the records of a range without waiting: for a request that asks to wait, call ``ready`` first.

        Raises:
            BadRequestError: there is no such column.
            IndexOutOfRangeError: the start is below the log's first index.
            CorruptRecordError: the records are damaged here.
        """
        chosen = None if request.fields is None else Chosen.of(request.fields, self._messages)
        # Of entries before it, which files may still contain, the tables know no more which are orphaned.
        first = self._replica.raft.first_index
        if request.start < first:
            raise self._out_of_range(request.start, "is below the first index of the log")
        visibility = self._visibility(request.isolation)
        start, stop, skip = visibility.span(request.start, request.end, ranges_max=self._limits.read_ranges)
        records = columns = None
        if start < stop:
            log, loop = self._replica.log, asyncio.get_running_loop()
            # An audit, which reads all records, reads a damaged one again before it reports it.
            read = log.inspect if request.isolation == "records" else log.read
            max_bytes = max(1, min(request.max_bytes, self._limits.read_bytes))
            records = await loop.run_in_executor(self._executor, read, Index(start), Index(stop), max_bytes)
            if chosen is not None:
                select = partial(_columns_of, records, start, None if request.isolation == "records" else skip, chosen)
                columns = await loop.run_in_executor(self._executor, select)
        count, nbytes = (records.count, records.nbytes) if records is not None else (0, 0)
        self._replica.measures.read(count, nbytes)
        next_index = start + count
        # A reader that gets entries after ``stop`` would see uncommitted or hidden ones.
        invariant(next_index <= max(start, stop), "a read exceeds its range", next=next_index, start=start, stop=stop)
        return ReadResult(
            records=records,
            next_index=next_index,
            commit_index=self._replica.readable_end - 1,
            visible_end=self._replica.visible_end,
            first_index=first,
            skip=[pair for pair in skip if pair[0] < next_index],
            columns=columns,
        )

    async def ready(self, request: ReadRequest) -> None:
        """Wait as the request asks.

        Raises:
            BehindError: ``min_commit`` was not reached in time.
            NotLeaderError: linearizable, and not the leader.
        """
        min_commit, now = request.min_commit, asyncio.get_running_loop().time()
        wait_ms = min(request.wait_ms, self._limits.read_wait_ms)
        if request.consistency == "linearizable":
            min_commit = max(min_commit, await self._replica.read_index(_READ_INDEX_S))
        await self._wait_commit(min_commit, now + max(wait_ms, self._limits.behind_wait_ms) / 1000)
        await self._wait_readable(request, now + wait_ms / 1000)

    async def _wait_commit(self, min_commit: int, deadline: float) -> None:
        while self._replica.readable_end <= min_commit:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise BehindError(
                    f"{self._replica.node_id} has not reached the requested commit index",
                    f"group {self._replica.group}",
                    "ask another replica",
                    {"min_commit": min_commit, "commit_index": self._replica.commit_index},
                )
            await wait_grown({self.growth: min_commit}, "uncommitted", left)

    async def _wait_readable(self, request: ReadRequest, deadline: float) -> None:
        """Wait until ``deadline`` for an entry at or after ``start``; not for long without a leader."""
        loop = asyncio.get_running_loop()
        alone_since: float | None = None
        while request.start < request.end and self._readable_end(request) <= request.start:
            now = loop.time()
            if self._replica.soft_state.leader_id is not None:
                alone_since = None
            elif alone_since is None:
                alone_since = now
            until = deadline if alone_since is None else min(deadline, alone_since + _ALONE_WAIT_S)
            if until <= now:
                return
            await wait_grown({self.growth: request.start}, request.isolation, until - now)

    def _readable_end(self, request: ReadRequest) -> int:
        """Return the end (exclusive) of the part of the request's range that is readable now."""
        return min(request.end, self._visibility(request.isolation).end)

    def _visibility(self, isolation: Isolation) -> Visibility:
        return self._replica.visibility if isolation == "committed" else Visibility(self._replica.readable_end)

    def _out_of_range(self, index: int, why: str) -> IndexOutOfRangeError:
        first, last = self._replica.raft.first_index, self._replica.readable_end - 1
        values: dict[str, Any] = {"index": index, "first_index": first, "last_index": last}
        archive = self._replica.tables.archive
        remedy = f"read from {first} on"
        if archive.start <= index < archive.end:
            remedy += f"; the archive {archive.table} has the entry"
            values["archive"] = archive.table
        return IndexOutOfRangeError(
            f"index {index} {why}", f"group {self._replica.group} on {self._replica.node_id}", remedy, values
        )

    async def index_at_time(self, time_ms: int, min_commit: int = -1) -> int:
        """Return the first index appended at or after ``time_ms``, at most the visible end.

        Raises:
            BehindError: ``min_commit`` was not reached in time.
        """
        loop = asyncio.get_running_loop()
        await self._wait_commit(min_commit, loop.time() + self._limits.behind_wait_ms / 1000)
        index = await loop.run_in_executor(self._executor, self._replica.log.index_at_time, time_ms)
        return min(index, self._replica.visible_end)

    async def split_points(self, start: int, end: int, positions: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return for each of ascending positions the index in [start, end] whose record starts nearest to it.

        Does not wait: call ``ready`` first.

        Raises:
            IndexOutOfRangeError: the start is below the log's first index.
        """
        if start < self._replica.raft.first_index:
            raise self._out_of_range(start, "is below the first index of the log")
        split = self._replica.log.split_points
        return await asyncio.get_running_loop().run_in_executor(self._executor, split, start, end, positions)

    async def describe(self, table: str, after: Any) -> tuple[list[list[Any]], list[Any] | None]:
        """Return rows of a table of DESCRIPTIONS after ``after``, and where to continue, None at the end."""
        if table not in DESCRIPTIONS:
            raise BadRequestError(f"no table {str(table)[:80]!r}", "", f"use {', '.join(DESCRIPTIONS)}")
        kinds = _KEY_KINDS[table]
        if after is not None and (not isinstance(after, list) or [type(part) for part in after] != kinds):
            raise BadRequestError("field 'after' is not a key of this table", "", "send what the last response named")
        rows_max = self._limits.describe_rows
        if table == "producers":
            return await self._describe_producers(b"" if after is None else after[0], rows_max)
        if table == "transactions":
            rows = transaction_rows(self._replica.tables, self._replica.log_time.now_ms, after, rows_max + 1)
        else:
            loop = asyncio.get_running_loop()
            rows = await loop.run_in_executor(self._executor, self._log_rows, table)
            rows = [row for row in rows if after is None or key_of(table, row) > after]
        more = len(rows) > rows_max
        return rows[:rows_max], key_of(table, rows[rows_max - 1]) if more else None

    async def _describe_producers(self, after: bytes, rows_max: int) -> tuple[list[list[Any]], list[Any] | None]:
        """Read a page from the stored tables, in a thread: a table in memory of a million rows would take seconds."""
        await self._replica.store.store_tables(_READ_INDEX_S)
        begin, end = max(after, producers.PREFIX), QUERIES_END
        loop = asyncio.get_running_loop()
        stored = await loop.run_in_executor(self._executor, self._replica.log.scan_tables, begin, end, rows_max)
        return stored_producer_rows(stored), [stored[-1][0]] if len(stored) == rows_max else None

    def _log_rows(self, table: str) -> list[list[Any]]:
        log, end = self._replica.log, self._replica.readable_end
        if table == "terms":
            return term_rows(log.term_ranges(), log.first_index(), end)
        return segment_rows(log.segment_summaries(), log.position_of, end)

    async def orphaned_space(self) -> list[int]:
        """Return the number of entries of orphaned attempts that are stored, and their bytes."""
        log, loop = self._replica.log, asyncio.get_running_loop()
        while True:
            first = log.first_index()
            orphaned = self._replica.visibility.orphaned(first, self._replica.readable_end)
            stored = [(max(low, first), high) for low, high in orphaned]
            try:
                nbytes = await loop.run_in_executor(self._executor, _bytes_between, log.position_of, stored)
            except IndexOutOfRangeError:
                if first == log.first_index():
                    raise
                continue  # retention has deleted some of them meanwhile
            return [sum(high - low for low, high in stored), nbytes]

    async def digest(self, request: DigestRequest) -> tuple[list[RangeDigest], int, list[int]]:
        """Compute digests of ranges from the files, also of records with a wrong CRC.

        Returns:
            The digests of complete aligned ranges, the index to continue from, and the indexes of damaged records in
            these ranges; after many damaged records the next request continues.
        """
        first = self._replica.log.first_index()
        if request.start < first:
            raise self._out_of_range(request.start, "is below the first index of the log")
        entries_max = self._limits.digest_entries
        if request.span < 1 or request.span & (request.span - 1):
            raise BadRequestError("span must be a power of two", "", "", {"span": request.span})
        if request.span > entries_max:
            raise BadRequestError(
                f"span must be at most {entries_max}", "", "ask for smaller ranges", {"span": request.span}
            )
        end = min(request.end, self._replica.readable_end, request.start + entries_max)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._digest, request.start, end, request.span)

    def _digest(self, start: int, end: int, span: int) -> tuple[list[RangeDigest], int, list[int]]:
        ranges: list[RangeDigest] = []
        damaged: list[int] = []
        nbytes = 0
        limits = self._limits
        while (
            start < end
            and nbytes < _DIGEST_BYTES
            and len(ranges) < limits.read_ranges
            and len(damaged) < _DIGEST_DAMAGED
        ):
            stop = min(end, start - start % span + span)
            hasher = RangeHasher(start)
            while start < stop:
                records = self._replica.log.read_raw(Index(start), Index(stop), 4 << 20)
                hasher.update(records)
                damaged += damaged_indexes(records)
                start += records.count
            ranges.append(hasher.digest())
            nbytes += ranges[-1].nbytes
        return ranges, start, damaged


def _columns_of(
    records: Records, first_index: int, skip: Sequence[tuple[int, int]] | None, chosen: Chosen
) -> memoryview | None:
    """Return columns of checked records, of the visible ones unless ``skip`` is None; None unless they are smaller.

    An inner batch of messages may have more columns than bytes: as records it costs the node no more than it stores.
    """
    if skip is None:
        entries = to_arrow(records, schema=chosen.stored)
    else:
        entries = data_entries(records, first_index, skip, chosen.stored)
    found, count = chosen.select(entries, records.nbytes)
    if count < entries.num_rows or found.nbytes > records.nbytes:
        return None
    return fields_payload(found)


def _bytes_between(position_of: Callable[[int], int], ranges: Sequence[tuple[int, int]]) -> int:
    return sum(position_of(high) - position_of(low) for low, high in ranges)


async def grown_groups(
    seen: Mapping[GrowthWatch, int], request: AwaitRequest, limits: ClientLimits = LIMITS
) -> list[str]:
    """Return the groups that have more entries than the client has seen; none if the wait times out.

    Args:
        seen: the end that the client has seen of each group, by the requests that wait for it.
        request: which entries count, and how long to wait.
        limits: the node's limits.

    Raises:
        NoLeaderError: a replica here knows no leader, so it would not learn of new commits.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + min(request.wait_ms, limits.read_wait_ms) / 1000
    while True:
        grown = [watch.replica.group for watch, end in seen.items() if watch.end(request.isolation) > end]
        left = deadline - loop.time()
        if grown or left <= 0:
            return grown
        for watch in seen:
            if watch.replica.soft_state.leader_id is None:
                raise NoLeaderError("this node knows no leader", f"group {watch.replica.group}", "ask another node")
        await wait_grown(seen, request.isolation, left)


# --- by position ------------------------------------------------------------------------------------------------------


class PrefixMessages(Protocol):
    """Consecutive messages of a ``LogPrefix``."""

    @property
    def sizes(self) -> npt.NDArray[np.uint32]:
        """Bytes of each message; empty where the file's messages end."""

    @property
    def data(self) -> memoryview:
        """The messages."""

    @property
    def count(self) -> int:
        """Number of messages."""

    @property
    def next_position(self) -> int:
        """Position to continue from."""


class LogPrefix(Protocol):
    """The CommitLog that precedes a log: its messages by position. Thread-safe."""

    @property
    def end(self) -> int:
        """Position after its last file, where the log may start."""

    def read(self, position: int, max_bytes: int) -> PrefixMessages | None:
        """Return messages from ``position`` on, up to ``max_bytes`` but at least one; None if no file contains it.

        Raises:
            IndexOutOfRangeError: no message starts at ``position``.
            CorruptRecordError: the message is damaged, or its file cannot be read.
            BadRequestError: the message is too large.
        """


OpenLogPrefix = Callable[[Path, str], LogPrefix]
"""Opens the CommitLog that precedes a store, given the store's directory and the fingerprint of the CommitLog."""


class Positions:
    """Reads by position from one replica; coroutines run on the node's event loop, disk work in ``executor``.

    Args:
        replica: the group's replica.
        executor: threads that read; None = the loop's own.
        open_prefix: opens the CommitLog that precedes the log; None = a preceding CommitLog is not served.
    """

    def __init__(self, replica: Replica, executor: Executor | None, open_prefix: OpenLogPrefix | None = None) -> None:
        self._replica = replica
        self._executor = executor
        self._open_prefix = open_prefix
        self._prefix: LogPrefix | None = None

    def _log_prefix(self) -> LogPrefix | None:
        """Return the CommitLog that precedes the log; a snapshot install may have brought its fingerprint."""
        fingerprint = self._replica.log.commitlog_prefix
        if self._prefix is None and fingerprint is not None and self._open_prefix is not None:
            self._prefix = self._open_prefix(self._replica.log.directory, fingerprint)
        return self._prefix

    async def at(self, position: int, max_bytes: int) -> PrefixMessages | int:
        """Return the messages or the entry at a position.

        Returns:
            At least one message of the preceding CommitLog; or, in the log, the index of the entry at or after the
            position, at most the end of the entries that are committed here.

        Raises:
            IndexOutOfRangeError: ``position`` was deleted, or no message of the CommitLog starts there.
            CorruptRecordError: the message is damaged here.
            BehindError: a snapshot install has just restarted the log, and it contains no entry yet.
        """
        return await asyncio.get_running_loop().run_in_executor(self._executor, self._at, position, max_bytes)

    def _at(self, position: int, max_bytes: int) -> PrefixMessages | int:
        log = self._replica.log
        while True:
            first = log.first_index()
            try:
                found = self._find(position, max_bytes, first)
            except (IndexOutOfRangeError, CorruptRecordError):
                if first == log.first_index():
                    raise
                continue  # retention has deleted the log's first segment meanwhile
            if first == log.first_index():
                return found

    def _find(self, position: int, max_bytes: int, first: int) -> PrefixMessages | int:
        log = self._replica.log
        if log.last_index() < first and first > 0:
            raise BehindError(
                "the log was just restarted by a snapshot install",
                f"group {self._replica.group}",
                "ask another replica",
            )
        begin = log.position_of(first)
        while position < begin:
            prefix = self._log_prefix()
            found = prefix.read(position, max_bytes) if prefix is not None and position < prefix.end else None
            if found is None:
                raise self._out_of_range(position, begin)
            if found.count:
                return found
            position = found.next_position
        return min(int(log.index_at_position(position)), int(self._replica.readable_end))

    def _out_of_range(self, position: int, begin: int) -> IndexOutOfRangeError:
        return IndexOutOfRangeError(
            f"position {position} is before the log's first entry",
            f"group {self._replica.group} on {self._replica.node_id}",
            f"read from position {begin} on"
            + ("; older messages need the CommitLog next to the store" if self._log_prefix() is not None else ""),
            {"position": position, "first_position": begin},
        )

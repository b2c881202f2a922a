"""Reads on any replica: committed records by index range, times, digests, and what the log says about itself.

What is served is committed, durable here, and checked against its CRCs on the way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeVar

from dledger_core.digest import RangeDigest, RangeHasher, damaged_indexes
from dledger_core.errors import BadRequestError, BehindError, IndexOutOfRangeError
from dledger_core.ids import Index
from dledger_core.record import DESCRIPTIONS, Records, key_of
from dledger_core.server.replica.replica import Replica
from dledger_core.storage.read.log_queries import producer_rows, segment_rows, term_rows
from dledger_core.storage.read.visibility import Visibility

__all__ = [
    "READ_BYTES_MAX",
    "WAIT_MS_MAX",
    "DigestRequest",
    "Isolation",
    "ReadRequest",
    "ReadResult",
    "Reads",
    "isolation_of",
]

READ_BYTES_MAX: Final = 16 << 20
WAIT_MS_MAX: Final = 30_000
BEHIND_WAIT_MS: Final = 200
READ_INDEX_S: Final = 5.0
DIGEST_ENTRIES_MAX: Final = 1 << 20
DIGEST_BYTES_MAX: Final = 64 << 20
DIGEST_DAMAGED_MAX: Final = 1000

RANGES_MAX: Final = 4096
"""Ranges in one answer, well below what a header may hold."""

ROWS_MAX: Final = 1000
"""Rows in one answer: those of producers with the longest names fit a header too."""
_KEY_KINDS: Final = {"terms": [int], "segments": [int], "producers": [str, str]}

_INT64_MAX: Final = (1 << 63) - 1
_Choice = TypeVar("_Choice", bound=str)
Isolation = Literal["committed", "uncommitted", "records"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadRequest:
    """A READ frame's fields; ``isolation`` records = everything committed, damaged or not marked."""

    start: int
    end: int
    max_bytes: int
    min_commit: int
    wait_ms: int
    isolation: Isolation
    linearizable: bool

    @classmethod
    def parse(cls, header: dict[str, Any]) -> ReadRequest:
        """Checks a READ header; raises BadRequestError."""
        return cls(
            start=_int(header, "start"),
            end=_int(header, "end"),
            max_bytes=max(1, min(_int(header, "max", default=8 << 20), READ_BYTES_MAX)),
            min_commit=_int(header, "min_commit", -1, default=-1),
            wait_ms=min(_int(header, "wait", default=0), WAIT_MS_MAX),
            isolation=isolation_of(header),
            linearizable=_one_of(header, "cons", ("committed", "linearizable")) == "linearizable",
        )


def isolation_of(header: Mapping[str, Any]) -> Isolation:
    """Returns the field ``iso``; raises BadRequestError."""
    return _one_of(header, "iso", ("committed", "uncommitted", "records"))


def _int(header: dict[str, Any], key: str, minimum: int = 0, *, default: int | None = None) -> int:
    value = header.get(key, default)
    if type(value) is not int or not minimum <= value <= _INT64_MAX:
        raise BadRequestError(f"field {key!r} is not an integer in range", "", "", {"value": repr(value)[:80]})
    return value


def _one_of(header: Mapping[str, Any], key: str, choices: tuple[_Choice, ...]) -> _Choice:
    """Returns a field that is one of ``choices``; the first one where it is missing."""
    value = header.get(key, choices[0])
    for choice in choices:
        if value == choice:
            return choice
    raise BadRequestError(
        f"field {key!r} has no such value", "", f"use {', '.join(choices)}", {"value": repr(value)[:80]}
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadResult:
    """Records from the asked start on, and where to go on."""

    records: Records | None
    next_index: int
    commit_index: int
    visible_end: int
    first_index: int
    skip: list[tuple[int, int]]


@dataclass(frozen=True, slots=True)
class DigestRequest:
    """Digests of the ranges of ``span`` entries that cover [start, end)."""

    start: int
    end: int
    span: int


class Reads:
    """The read service of one replica; coroutines run on the node's event loop, disk work in ``executor``."""

    def __init__(self, replica: Replica, executor: Executor) -> None:
        self._replica = replica
        self._executor = executor

    async def read(self, request: ReadRequest) -> ReadResult:
        """Answers a READ.

        Raises:
            IndexOutOfRangeError: the start is below the log's first index.
            BehindError: ``min_commit`` was not reached in time.
            NotLeaderError: linearizable, and not the leader.
            CorruptRecordError: the records are damaged here.
        """
        request = await self.ready(request)
        first = self._replica.log.first_index()
        if request.start < first:
            raise self._out_of_range(request.start, "is below the first index of the log")
        visibility = self._visibility(request.isolation)
        start, stop, skip = visibility.span(request.start, request.end, ranges_max=RANGES_MAX)
        records = None
        if start < stop:
            log = self._replica.log
            read = log.inspect if request.isolation == "records" else log.read  # an audit reads what it suspects twice
            records = await asyncio.get_running_loop().run_in_executor(
                self._executor, read, Index(start), Index(stop), request.max_bytes
            )
        next_index = start + (records.count if records is not None else 0)
        return ReadResult(
            records=records,
            next_index=next_index,
            commit_index=self._replica.readable_end - 1,
            visible_end=self._replica.visible_end,
            first_index=first,
            skip=[pair for pair in skip if pair[0] < next_index],
        )

    async def ready(self, request: ReadRequest) -> ReadRequest:
        """Waits as long as the request asks for; returns it as one that ``read`` answers without waiting.

        Raises:
            BehindError: as ``read``.
            NotLeaderError: as ``read``.
        """
        min_commit, now = request.min_commit, asyncio.get_running_loop().time()
        if request.linearizable:
            min_commit = max(min_commit, await self._replica.read_index(READ_INDEX_S))
        await self._wait_commit(min_commit, now + max(request.wait_ms, BEHIND_WAIT_MS) / 1000)
        await self._wait_readable(request, now + request.wait_ms / 1000)
        return replace(request, min_commit=-1, wait_ms=0, linearizable=False)

    async def _wait_commit(self, min_commit: int, deadline: float) -> None:
        while self._replica.readable_end <= min_commit:
            left = deadline - asyncio.get_running_loop().time()
            if left <= 0:
                raise BehindError(
                    f"{self._replica.node_id} has not reached the asked commit index",
                    f"group {self._replica.group}",
                    "ask another replica",
                    {"min_commit": min_commit, "commit_index": self._replica.commit_index},
                )
            await self._replica.wait_progress(left)

    async def _wait_readable(self, request: ReadRequest, deadline: float) -> None:
        """Waits until ``deadline`` for something at ``start``."""
        loop = asyncio.get_running_loop()
        while request.start < request.end and self._readable_end(request) <= request.start:
            left = deadline - loop.time()
            if left <= 0:
                return
            await self._replica.wait_progress(left)

    def _readable_end(self, request: ReadRequest) -> int:
        """Return the end (exclusive) of the part of the request's range that can be read now."""
        return min(request.end, self._visibility(request.isolation).end)

    def _visibility(self, isolation: Isolation) -> Visibility:
        return self._replica.visibility if isolation == "committed" else Visibility(self._replica.readable_end)

    def _out_of_range(self, index: int, why: str) -> IndexOutOfRangeError:
        first, last = self._replica.log.first_index(), self._replica.readable_end - 1
        return IndexOutOfRangeError(
            f"index {index} {why}",
            f"group {self._replica.group} on {self._replica.node_id}",
            f"read from {first} on",
            {"index": index, "first_index": first, "last_index": last},
        )

    async def index_at_time(self, time_ms: int, min_commit: int = -1) -> int:
        """Returns the first index appended at or after ``time_ms``, at most the visible end.

        Raises:
            BehindError: ``min_commit`` was not reached in time.
        """
        loop = asyncio.get_running_loop()
        await self._wait_commit(min_commit, loop.time() + BEHIND_WAIT_MS / 1000)
        index = await loop.run_in_executor(self._executor, self._replica.log.index_at_time, time_ms)
        return min(index, self._replica.visible_end)

    async def describe(self, table: str, after: Any) -> tuple[list[list[Any]], bool]:
        """Returns rows of a table of DESCRIPTIONS behind the key ``after``, and whether there are more behind them."""
        if table not in DESCRIPTIONS:
            raise BadRequestError(f"no table {str(table)[:80]!r}", "", f"use {', '.join(DESCRIPTIONS)}")
        kinds = _KEY_KINDS[table]
        if after is not None and (not isinstance(after, list) or [type(part) for part in after] != kinds):
            raise BadRequestError("field 'after' is no key of this table", "", "use the key of the last row")
        if table == "producers":
            rows = producer_rows(self._replica.tables, after, ROWS_MAX + 1)
        else:
            loop = asyncio.get_running_loop()
            rows = await loop.run_in_executor(self._executor, self._log_rows, table)
            rows = [row for row in rows if after is None or key_of(table, row) > after]
        return rows[:ROWS_MAX], len(rows) > ROWS_MAX

    def _log_rows(self, table: str) -> list[list[Any]]:
        log, end = self._replica.log, self._replica.readable_end
        if table == "terms":
            return term_rows(log.term_ranges(), log.first_index(), end)
        return segment_rows(log.segment_summaries(), log.position_of, end)

    async def orphaned_space(self) -> list[int]:
        """Returns how many entries that lost are still stored, and how many bytes they take."""
        log, loop = self._replica.log, asyncio.get_running_loop()
        while True:
            first = log.first_index()
            losers = self._replica.visibility.orphaned(first, self._replica.readable_end)
            stored = [(max(low, first), high) for low, high in losers]
            try:
                nbytes = await loop.run_in_executor(self._executor, _bytes_between, log.position_of, stored)
            except IndexOutOfRangeError:
                if first == log.first_index():
                    raise
                continue  # retention took some of them meanwhile
            return [sum(high - low for low, high in stored), nbytes]

    async def digest(self, request: DigestRequest) -> tuple[list[RangeDigest], int, list[int]]:
        """Digests ranges from the files, whatever the CRCs say.

        Returns:
            The digests of whole aligned ranges, the index to go on from, and the indexes of damaged records in them;
            ranges behind many damaged records are left to the next request.
        """
        first = self._replica.log.first_index()
        if request.start < first:
            raise self._out_of_range(request.start, "is below the first index of the log")
        if request.span < 1 or request.span & (request.span - 1):
            raise BadRequestError("span must be a power of two", "", "", {"span": request.span})
        if request.span > DIGEST_ENTRIES_MAX:
            raise BadRequestError(
                "span is above the bound", "", f"use at most {DIGEST_ENTRIES_MAX}", {"span": request.span}
            )
        end = min(request.end, self._replica.readable_end, request.start + DIGEST_ENTRIES_MAX)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._digest, request.start, end, request.span)

    def _digest(self, start: int, end: int, span: int) -> tuple[list[RangeDigest], int, list[int]]:
        ranges: list[RangeDigest] = []
        damaged: list[int] = []
        nbytes = 0
        while (
            start < end and nbytes < DIGEST_BYTES_MAX and len(ranges) < RANGES_MAX and len(damaged) < DIGEST_DAMAGED_MAX
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


def _bytes_between(position_of: Callable[[int], int], ranges: Sequence[tuple[int, int]]) -> int:
    return sum(position_of(high) - position_of(low) for low, high in ranges)

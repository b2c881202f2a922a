"""Reads on any replica: committed records by index range, times, digests.

What is served is committed, durable here, and checked against its CRCs on the way out.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import Any, Final, Literal

from dledger_core.digest import RangeDigest, RangeHasher, damaged_indexes
from dledger_core.errors import BadRequestError, BehindError, IndexOutOfRangeError
from dledger_core.ids import Index
from dledger_core.record import Records
from dledger_core.server.replica import Replica

__all__ = ["DigestRequest", "ReadRequest", "ReadResult", "Reads"]

READ_BYTES_MAX: Final = 16 << 20
WAIT_MS_MAX: Final = 30_000
BEHIND_WAIT_MS: Final = 200
DIGEST_ENTRIES_MAX: Final = 1 << 20
DIGEST_BYTES_MAX: Final = 64 << 20

RANGES_MAX: Final = 4096
"""Ranges in one answer, well below what a header may hold."""

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
        isolation = header.get("iso", "committed")
        try:
            request = cls(
                start=int(header["start"]),
                end=int(header["end"]),
                max_bytes=max(1, min(int(header.get("max", 8 << 20)), READ_BYTES_MAX)),
                min_commit=int(header.get("min_commit", -1)),
                wait_ms=max(0, min(int(header.get("wait", 0)), WAIT_MS_MAX)),
                isolation=isolation,
                linearizable=header.get("cons", "committed") == "linearizable",
            )
        except (KeyError, TypeError, ValueError) as error:
            raise BadRequestError(f"malformed read: {error!r}") from None
        if isolation not in ("committed", "uncommitted", "records") or request.start < 0:
            raise BadRequestError("malformed read", "", "", {"iso": isolation, "start": request.start})
        return request


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
        min_commit = request.min_commit
        if request.linearizable:
            min_commit = max(min_commit, await self._replica.read_index(5.0))
        await self._wait_commit(min_commit, max(request.wait_ms, BEHIND_WAIT_MS))
        end = await self._wait_readable(request)
        first = self._replica.log.first_index()
        if request.start < first:
            raise self._out_of_range(request.start, "is below the first index of the log")
        start, losers = request.start, self._replica.tables.transactions.losers(request.start, end)
        if request.isolation != "committed":
            losers = []
        while losers and losers[0][0] <= start:
            start = max(start, losers.pop(0)[1])
        if len(losers) > RANGES_MAX:
            end, losers = losers[RANGES_MAX][0], losers[:RANGES_MAX]
        records = None
        if start < end:
            read = self._replica.log.read
            stop = losers[0][0] if losers and losers[0][1] - losers[0][0] > 1024 else end
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
            skip=[pair for pair in losers if pair[0] < next_index],
        )

    async def _wait_commit(self, min_commit: int, wait_ms: int) -> None:
        deadline = asyncio.get_running_loop().time() + wait_ms / 1000
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

    async def _wait_readable(self, request: ReadRequest) -> int:
        """Waits up to ``wait_ms`` for something at ``start``; returns the end of what may be read."""
        deadline = asyncio.get_running_loop().time() + request.wait_ms / 1000
        while True:
            limit = self._replica.visible_end if request.isolation == "committed" else self._replica.readable_end
            end = min(request.end, limit)
            left = deadline - asyncio.get_running_loop().time()
            if end > request.start or left <= 0 or request.end <= request.start:
                return end
            await self._replica.wait_progress(left)

    def _out_of_range(self, index: int, why: str) -> IndexOutOfRangeError:
        first, last = self._replica.log.first_index(), self._replica.readable_end - 1
        return IndexOutOfRangeError(
            f"index {index} {why}",
            f"group {self._replica.group} on {self._replica.node_id}",
            f"read from {first} on",
            {"index": index, "first_index": first, "last_index": last},
        )

    async def index_at_time(self, time_ms: int) -> int:
        """Returns the first index appended at or after ``time_ms``, at most the visible end."""
        loop = asyncio.get_running_loop()
        index = await loop.run_in_executor(self._executor, self._replica.log.index_at_time, time_ms)
        return min(index, self._replica.visible_end)

    async def digest(self, request: DigestRequest) -> tuple[list[RangeDigest], int, list[int]]:
        """Digests ranges from the files, whatever the CRCs say.

        Returns:
            The digests of whole aligned ranges, the index to go on from, and the indexes of damaged records.
        """
        first = self._replica.log.first_index()
        if request.start < first:
            raise self._out_of_range(request.start, "is below the first index of the log")
        if request.span < 1 or request.span & (request.span - 1):
            raise BadRequestError("span must be a power of two", "", "", {"span": request.span})
        end = min(request.end, self._replica.readable_end, request.start + max(DIGEST_ENTRIES_MAX, request.span))
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._executor, self._digest, request.start, end, request.span)

    def _digest(self, start: int, end: int, span: int) -> tuple[list[RangeDigest], int, list[int]]:
        ranges: list[RangeDigest] = []
        damaged: list[int] = []
        nbytes = 0
        while start < end and nbytes < DIGEST_BYTES_MAX and len(ranges) < RANGES_MAX:
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

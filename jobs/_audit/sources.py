"""Reads one replica for the audit: digests of ranges, and entries one by one, past damage.

A live node answers from its own files, so only digests cross the network; a store given by its path is read where the
task runs, and so is a classic CommitLog. A CommitLog has no indexes: what the audit calls one is the number of a block,
position = index x block. Runs on executors; a source belongs to one task.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import pyarrow as pa
from blake3 import blake3

from dledger_core import (
    HEADER_BYTES,
    Client,
    CorruptRecordError,
    DLedgerError,
    IndexOutOfRangeError,
    RangeDigest,
    RangeHasher,
    StoreReader,
)
from dledger_core.rocketmq import ClassicCommitLog, decode_messages
from jobs._audit.judge import runs_of
from jobs._audit.model import Replica
from jobs._audit.plan import aligned
from spark_connector.connections import store_for

__all__ = ["Gap", "RangeSeen", "RateLimiter", "Source", "open_source", "read_past_damage"]

READ_BYTES: Final = 5 << 19
RANGES_AT_ONCE: Final = 16
"""That many ranges are one gap if they cannot be read at all, because one was deleted during the audit."""
CLIENT_TIMEOUT_MS: Final = 20_000
RETRY_TIMEOUT_MS: Final = 10_000
"""A node that just restarted serves less until the leader sends it the commit index."""
BURST_S: Final = 1.0
"""How much unused time may be made up for later."""
_BLOCKS_PER_BATCH: Final = 4096

_Item = TypeVar("_Item")
_MESSAGE: Final = ["topic", "queue_id", "queue_offset", "msg_id", "error"]


class RateLimiter:
    """Makes its caller wait after each read so long that the average stays below the rate. Not thread-safe.

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
        """Counts bytes that were just read, and waits until the next ones are due."""
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
        kind: ``damaged`` bytes, ``gone`` (deleted meanwhile) or ``unread`` (the replica did not answer).
        reason: one line, for reports.
    """

    start: int
    end: int
    kind: str
    reason: str


@dataclass(frozen=True, slots=True)
class RangeSeen:
    """A range as one replica has it.

    Attributes:
        digest: its digest.
        damaged: indexes of damaged bodies.
        index_wrong: ranges of entries about which the index file says something else than the data.
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
        """Yields the aligned ranges of [start, end), in order and without holes."""

    def entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        """Yields the entries of [start, end) with the columns of RECORD_SCHEMA, in order and without holes."""
        return read_past_damage(self.read, start, end)

    def read(self, start: int, end: int) -> tuple[list[pa.RecordBatch], int]:
        """Reads entries from ``start`` to at most ``end``; returns batches and the next index."""
        raise NotImplementedError

    def place(self, index: int) -> dict[str, Any]:
        """Returns further facts that help to find an entry."""
        del index
        return {}


def read_past_damage(
    fetch: Callable[[int, int], tuple[list[_Item], int]], start: int, end: int, span: int = 1
) -> Iterator[_Item | Gap]:
    """Reads [start, end) unit by unit of ``span`` entries where it must, so that damage costs one unit only.

    Args:
        fetch: reads from a start to at most an end; returns items and where to go on. Fails as a whole if any of it
            is damaged.
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
            # The entries before the damaged unit are read first, then that unit by itself.
            before = named - named % span if isinstance(named, int) else at
            limit = before if at < before < limit else unit_end
            continue
        except IndexOutOfRangeError as error:
            yield Gap(at, end, "gone", str(error))
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
def open_source(replica: Replica, limiter: RateLimiter | None = None) -> Iterator[Source]:
    """Opens a replica for one task; ``limiter`` counts all bytes read.

    A process keeps its view of a store: to open one that Java wrote means to scan its last files, gigabytes.
    """
    limiter = limiter or RateLimiter()
    if replica.live:
        client = Client(replica.peers, replica.group, timeout_ms=CLIENT_TIMEOUT_MS, retry_timeout_ms=RETRY_TIMEOUT_MS)
        with client:
            yield _NodeSource(client, replica.node, limiter)
    elif replica.block_bytes:
        yield _ClassicSource(replica, limiter)
    else:
        yield _StoreSource(store_for(replica.path), limiter)


class _NodeSource(Source):
    def __init__(self, client: Client, node: str, limiter: RateLimiter) -> None:
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
        fetched = self._client.records(start, end, node=self._node, max_bytes=READ_BYTES, min_end=end)
        self._limiter.take(fetched.batch.nbytes)
        return [fetched.batch], fetched.next_index


class _StoreSource(Source):
    def __init__(self, reader: StoreReader, limiter: RateLimiter) -> None:
        self._reader = reader
        self._limiter = limiter

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        at_once = 1 if self._limiter.rate is not None else RANGES_AT_ONCE
        for first, stop in aligned(start, end, span * at_once):
            yield from read_past_damage(lambda at, limit: self._digest(at, limit, span), first, stop, span)

    def _digest(self, start: int, end: int, span: int) -> tuple[list[RangeSeen], int]:
        """Digests complete ranges, of about as many bytes as one read returns."""
        seen, wrong = list[RangeSeen](), list[int]()
        hasher, at = RangeHasher(start), start
        while at < end:
            records = self._reader.records(at, end, READ_BYTES)  # raises where a CRC is wrong
            wrong += self._reader.index_mismatches(records)
            self._limiter.take(records.nbytes)
            for first, stop in aligned(at, at + records.count, span):
                hasher.update(records, first - at, stop - at)
                if stop == end or stop % span == 0:
                    mine = [index for index in wrong if index < stop]
                    seen.append(RangeSeen(hasher.digest(), index_wrong=tuple(runs_of(mine))))
                    hasher, wrong = RangeHasher(stop), wrong[len(mine) :]
            at += records.count
            end = min(end, at + -at % span)  # a range that was started is finished, and none started after it
        return seen, at

    def read(self, start: int, end: int) -> tuple[list[pa.RecordBatch], int]:
        batch = self._reader.read(start, end, max_bytes=READ_BYTES)
        self._limiter.take(batch.nbytes)
        return [batch], start + batch.num_rows


class _ClassicSource(Source):
    header_bytes = 0

    def __init__(self, replica: Replica, limiter: RateLimiter) -> None:
        self._log = ClassicCommitLog(replica.path)
        self._block = replica.block_bytes
        self._end = replica.end_position
        self._limiter = limiter

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        for first, stop in aligned(start, end, span):
            low, high = self._positions(first, stop)
            hasher = blake3()
            for piece in self._log.read(low, high):
                hasher.update(piece)
                self._limiter.take(len(piece))
            damaged = tuple(sorted(self._damaged(first, stop)))
            yield RangeSeen(RangeDigest(first, stop, high - low, hasher.digest(), b""), damaged)

    def entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        damaged = self._damaged(start, end)
        at = start
        for index in [*sorted(damaged), end]:
            for first in range(at, index, _BLOCKS_PER_BATCH):
                yield self._batch(first, min(index, first + _BLOCKS_PER_BATCH))
            if index < end:
                yield Gap(index, index + 1, "damaged", damaged[index])
            at = index + 1

    def place(self, index: int) -> dict[str, Any]:
        """Returns file and offset of a block, and the message in it."""
        low, high = self._positions(index, index + 1)
        file = self._log.file_at(low)
        shown: dict[str, Any] = {"file": Path(file.path).name, "offset": low - file.position}
        for batch in self._log.messages(low, high):
            facts = decode_messages(batch.column("body").slice(0, 1), _MESSAGE).to_pylist()[0]
            named = {name: value for name, value in facts.items() if value is not None}
            shown["message"] = {"position": batch.column("position")[0].as_py()} | named
        return shown

    def _positions(self, start: int, end: int) -> tuple[int, int]:
        return start * self._block, min(end * self._block, self._end)

    def _damaged(self, start: int, end: int) -> dict[int, str]:
        """Returns the blocks of damaged messages, and why."""
        found: dict[int, str] = {}
        for low, high, why in self._log.damage(*self._positions(start, end)):
            for block in range(max(start, low // self._block), min(end, -(-high // self._block))):
                found[block] = why
        return found

    def _batch(self, start: int, end: int) -> pa.RecordBatch:
        low, high = self._positions(start, end)
        data = b"".join(self._log.read(low, high))
        self._limiter.take(len(data))
        bodies = [data[at : at + self._block] for at in range(0, len(data), self._block)]
        zeros = pa.array([0] * len(bodies), pa.int64())
        columns = {"index": pa.array(range(start, end), pa.int64()), "term": zeros, "magic": zeros}
        columns |= {"position": pa.array(range(low, low + len(bodies) * self._block, self._block), pa.int64())}
        return pa.RecordBatch.from_pydict({**columns, "body": pa.array(bodies, pa.binary())})

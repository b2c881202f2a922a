"""Reads one replica for the audit: digests of ranges, and entries one by one, past whatever is damaged.

A live node answers from its own files, so only digests cross the network; a store given by its path is read where the
task runs. Runs on executors; a source belongs to one task.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeVar

from dledger_core.digest import RangeDigest, RangeHasher
from dledger_core.errors import CorruptRecordError, DLedgerError, IndexOutOfRangeError
from dledger_core.record import HEADER_BYTES
from jobs._audit.model import Replica
from jobs._audit.plan import aligned, runs_of

if TYPE_CHECKING:
    import pyarrow as pa

    from dledger_core import Client, StoreReader
    from jobs._audit.limiter import RateLimiter

__all__ = ["Gap", "RangeSeen", "Source", "open_source", "read_past_damage"]

READ_BYTES: Final = 5 << 19
RANGES_AT_ONCE: Final = 16
"""So many ranges that cannot be read at all, as one was deleted meanwhile, count as one gap."""
CLIENT_TIMEOUT_MS: Final = 20_000
_PATIENCE_S: Final = 10.0
_PAUSE_S: Final = 0.1

_Item = TypeVar("_Item")


@dataclass(frozen=True, slots=True)
class Gap:
    """Entries [start, end) that could not be read.

    Attributes:
        start: first index.
        end: the index behind the last one.
        kind: ``damaged`` bytes, ``gone`` (deleted meanwhile) or ``unread`` (the replica did not answer).
        reason: for people.
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


class Source(Protocol):
    """One replica.

    Attributes:
        header_bytes: of each record, beside its body.
    """

    header_bytes: int

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        """Yields the aligned ranges of [start, end), in order and without holes."""

    def entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        """Yields the entries of [start, end) with the columns of RECORD_SCHEMA, in order and without holes."""

    def place(self, index: int) -> dict[str, Any]:
        """Returns what else helps people to find an entry."""


def read_past_damage(
    fetch: Callable[[int, int], tuple[list[_Item], int]], start: int, end: int, span: int = 1
) -> Iterator[_Item | Gap]:
    """Reads [start, end) unit by unit of ``span`` entries where it must, so that damage costs one unit only.

    Args:
        fetch: reads from a start to at most an end; returns items and where to go on. Fails as a whole if any of it
            is damaged.
        start: first index.
        end: the index behind the last one.
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
            # What lies before the damaged unit is read first, then that unit by itself.
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
    """Opens a replica for one task; ``limiter`` is told of all bytes read.

    A process keeps its view of a store: to open one that Java wrote means to walk through its last files, gigabytes.
    """
    from dledger_core import Client
    from spark_connector.connections import store_for

    with ExitStack() as stack:
        if replica.live:
            client = Client(replica.peers, replica.group, timeout_ms=CLIENT_TIMEOUT_MS)
            yield _NodeSource(stack.enter_context(client), replica.node, limiter)
        elif replica.block_bytes:
            from jobs._audit.classic import ClassicSource

            yield ClassicSource(replica, limiter)
        else:
            yield _StoreSource(store_for(replica.path), limiter)


class _NodeSource:
    header_bytes = HEADER_BYTES

    def __init__(self, client: Client, node: str, limiter: RateLimiter | None) -> None:
        self._client = client
        self._node = node
        self._limiter = limiter

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        return read_past_damage(lambda at, limit: self._digest(at, limit, span), start, end, span)

    def _digest(self, start: int, end: int, span: int) -> tuple[list[RangeSeen], int]:
        if self._limiter is not None:  # a range at a time: the node reads all that it is asked for at once
            end = min(end, start - start % span + span)
        report = _patiently(
            lambda: self._client.digest(start, end, span=span, node=self._node), lambda r: r.next_index > start
        )
        if self._limiter is not None:
            self._limiter.take(sum(r.nbytes + HEADER_BYTES * (r.end - r.start) for r in report.ranges))
        seen = [
            RangeSeen(digest, tuple(i for i in report.damaged if digest.start <= i < digest.end))
            for digest in report.ranges
        ]
        return seen, report.next_index

    def entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        return read_past_damage(self._read, start, end)

    def place(self, index: int) -> dict[str, Any]:
        return {}

    def _read(self, start: int, end: int) -> tuple[list[pa.RecordBatch], int]:
        fetched = _patiently(
            lambda: self._client.records(start, end, node=self._node, max_bytes=READ_BYTES),
            lambda fetch: fetch.next_index > start,
        )
        if self._limiter is not None:
            self._limiter.take(fetched.batch.nbytes)
        return [fetched.batch], fetched.next_index


class _StoreSource:
    header_bytes = HEADER_BYTES

    def __init__(self, reader: StoreReader, limiter: RateLimiter | None) -> None:
        self._reader = reader
        self._limiter = limiter

    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        for first, stop in aligned(start, end, span * (1 if self._limiter else RANGES_AT_ONCE)):
            yield from read_past_damage(lambda at, limit: self._digest(at, limit, span), first, stop, span)

    def _digest(self, start: int, end: int, span: int) -> tuple[list[RangeSeen], int]:
        """Digests whole ranges, of about as many bytes as one read returns."""
        seen, wrong = list[RangeSeen](), list[int]()
        hasher, at = RangeHasher(start), start
        while at < end:
            records = self._reader.records(at, end, READ_BYTES)  # raises where a CRC is wrong
            wrong += self._reader.index_mismatches(records)
            if self._limiter is not None:
                self._limiter.take(records.nbytes)
            for first, stop in aligned(at, at + records.count, span):
                hasher.update(records, first - at, stop - at)
                if stop == end or stop % span == 0:
                    mine = [index for index in wrong if index < stop]
                    seen.append(RangeSeen(hasher.digest(), index_wrong=tuple(runs_of(mine))))
                    hasher, wrong = RangeHasher(stop), wrong[len(mine) :]
            at += records.count
            end = min(end, at + -at % span)  # what is begun is finished, and nothing begun after that
        return seen, at

    def entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        return read_past_damage(self._read, start, end)

    def place(self, index: int) -> dict[str, Any]:
        return {}

    def _read(self, start: int, end: int) -> tuple[list[pa.RecordBatch], int]:
        batch = self._reader.read(start, end, max_bytes=READ_BYTES)
        if self._limiter is not None:
            self._limiter.take(batch.nbytes)
        return [batch], start + batch.num_rows


def _patiently(call: Callable[[], _Item], done: Callable[[_Item], bool]) -> _Item:
    """Calls until the answer gets on: a node that just restarted serves less until it hears the leader."""
    deadline = time.monotonic() + _PATIENCE_S
    while True:
        late = time.monotonic() >= deadline
        try:
            answer = call()
            if done(answer) or late:
                return answer
        except DLedgerError as error:
            if late or not (error.retriable or error.outcome_unknown):
                raise
        time.sleep(_PAUSE_S)

"""A replica as the tasks of an audit read it: digests and entries, around damage, at a limited rate."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeVar

import pyarrow as pa

from dledger_core import (
    CorruptRecordError,
    DLedgerError,
    IndexOutOfRangeError,
    RangeDigest,
)
from dledger_core.record import HEADER_BYTES

_Item = TypeVar("_Item")
READ_BYTES: Final = 5 << 19
BURST_S: Final = 1.0
"""Limit of the unused time that later reads may use."""


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
        is_partial: whether it may lack entries that the others have, without being damaged.
    """

    header_bytes = HEADER_BYTES
    is_partial = False

    @abstractmethod
    def digests(self, start: int, end: int, span: int) -> Iterator[RangeSeen | Gap]:
        """Yield the aligned ranges of [start, end), in order and without holes."""

    def entries(self, start: int, end: int) -> Iterator[pa.RecordBatch | Gap]:
        """Yield the entries of [start, end) with the columns of RECORD_SCHEMA, in order and without holes."""
        return read_past_damage(self.read, start, end)

    def read(self, start: int, end: int) -> tuple[list[pa.RecordBatch], int]:
        """Read entries from ``start`` to at most ``end``; returns batches and the next index."""
        raise NotImplementedError

    def shown(self, start: int, end: int) -> tuple[pa.RecordBatch, int]:
        """Read rows of [start, end) that read_committed shows, with READ_SCHEMA; returns them and the next index."""
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

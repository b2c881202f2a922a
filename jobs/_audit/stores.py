"""Replicas that are stores, read where the task runs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from dledger_core import (
    ConfigError,
    StorageError,
    StoreMismatchError,
    StoreReader,
    open_store,
)
from dledger_core.digest import RangeHasher
from dledger_core.rocketmq import end_of

from .model import AuditedReplica, aligned, consecutive
from .source import Gap, RangeSeen, RateLimiter, Source, read_past_damage

STORE_GROUP: Final = "store"
"""Group of stores that do not record theirs, as all Java stores."""
RANGES_AT_ONCE: Final = 16
"""Number of ranges that become one gap if they cannot be read, because one was deleted during the audit."""


def store_replica(name: str, path: Path) -> AuditedReplica:
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


class StoreSource(Source):
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

    def shown(self, start: int, end: int) -> tuple[pa.RecordBatch, int]:
        fetched = self._reader.fetch(start, end, max_bytes=self._read_bytes)
        self._limiter.take(fetched.batch.nbytes)
        return fetched.batch, fetched.next_index

    def read(self, start: int, end: int) -> tuple[list[pa.RecordBatch], int]:
        batch = self._reader.read(start, end, max_bytes=self._read_bytes)
        self._limiter.take(batch.nbytes)
        return [batch], start + batch.num_rows

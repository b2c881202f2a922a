"""Replicas that are classic CommitLogs, read where the task runs.

A CommitLog has no indexes: the audit counts blocks, position = index x block. All that two copies of a CommitLog
contain counts as committed, because a slave only receives what its master has stored.
"""

from __future__ import annotations

import errno
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
from blake3 import blake3

from dledger_core import (
    RangeDigest,
)
from dledger_core.rocketmq import ClassicCommitLog, decode_messages, locate

from .model import AuditedReplica, aligned
from .source import Gap, RangeSeen, RateLimiter, Source

CLASSIC_GROUP: Final = "commitlog"
BLOCK_BYTES: Final = 1024
"""Maximum bytes of a CommitLog that the audit counts as one index."""
_BLOCKS_PER_BATCH: Final = 4096
_MESSAGE: Final = ["topic", "queue_id", "queue_offset", "msg_id", "error"]


def classic_replicas(directories: Mapping[str, Path]) -> tuple[AuditedReplica, ...]:
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


class ClassicSource(Source):
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

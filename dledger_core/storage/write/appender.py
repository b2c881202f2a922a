"""The writer's side of the data and index files: whole batches in as few writes as possible, then one sync.

Also zeroes the data file ahead of the tail, because overwriting real zeros makes a sync twice as fast as growing a
sparse file does.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Final

import numpy as np

from dledger_core.checksum import Buffer
from dledger_core.errors import invariant
from dledger_core.raft.batch import Batch
from dledger_core.record import INDEX_RECORD_BYTES, MAGIC_BLANK, PREFIX, Records, index_records, place, records_of
from dledger_core.storage.check.recovery import cut_tail
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.segments import Segments

__all__ = ["Appender", "bounded"]

_ZERO_CHUNK_MIN: Final = 64 << 10
_ZERO_CHUNK_MAX: Final = 1 << 20
_LARGE_SYNC_BYTES: Final = 512 << 10


def bounded(batches: Sequence[Batch], bytes_max: int) -> Iterator[Sequence[Batch]]:
    """Yields ``batches`` in order, in shares of at most ``bytes_max``; a larger one alone."""
    first, size = 0, 0
    for at, batch in enumerate(batches):
        if at > first and size + batch.nbytes > bytes_max:
            yield batches[first:at]
            first, size = at, 0
        size += batch.nbytes
    yield batches[first:]


class Appender:
    """Owned by the writer thread, but for ``preallocate``."""

    def __init__(self, data: Segments, index: IndexFile, position: int, preallocate_bytes: int) -> None:
        self.data = data
        self.index = index
        self.position = position
        self._opened_at = position
        self._synced_bytes = 0
        self._preallocate_bytes = preallocate_bytes
        self._zeroed_to = position
        self._zero_lock = threading.Lock()
        self._unsynced: set[int] = set()
        self._unsynced_index: set[int] = set()
        self.unsynced_bytes = 0

    def append(self, batches: Sequence[Batch]) -> bool:
        """Writes batches behind the tail, index rows too; returns whether a data segment was begun."""
        writes: list[tuple[int, list[Buffer]]] = []
        for batch in batches:
            self._plan(records_of(batch), writes)
        rolled = self._open_segments([at for at, _ in writes])
        self._claim(self.position)
        for at, buffers in writes:
            self.data.write(at, buffers)
            self._unsynced.add(self.data.base_of(at))
        self._write_index(batches)
        return rolled

    def _plan(self, records: Records, writes: list[tuple[int, list[Buffer]]]) -> None:
        """Adds the writes of one batch, joined to the last one where they continue it, and moves the tail."""
        positions = records.headers["position"].astype(np.int64)
        places = place(records.sizes, self.position, self.data.segment_bytes)
        invariant(bool((positions == places).all()), "a batch is not where the log ends", position=self.position)
        sizes = records.sizes.astype(np.int64)
        breaks = np.flatnonzero(positions[1:] != positions[:-1] + sizes[:-1]) + 1
        edges = [0, *breaks.tolist(), records.count]
        view, offset = memoryview(records.data), 0
        for first, stop in itertools.pairwise(edges):
            at = int(positions[first])
            length = int(positions[stop - 1] + sizes[stop - 1]) - at
            if at != self.position:
                blank = PREFIX.pack(MAGIC_BLANK, at - self.position)
                self._join(writes, self.position, blank)
            self._join(writes, at, view[offset : offset + length])
            offset += length
            self.position = at + length
            self.unsynced_bytes += length

    def _join(self, writes: list[tuple[int, list[Buffer]]], at: int, buffer: Buffer) -> None:
        if writes:
            begin, buffers = writes[-1]
            same_segment = self.data.base_of(begin) == self.data.base_of(at)
            if same_segment:
                buffers.append(buffer)
                return
        writes.append((at, [buffer]))

    def _open_segments(self, positions: Sequence[int]) -> bool:
        made = False
        for at in positions:
            base = self.data.base_of(at)
            if base not in self.data.bases:
                self.data.create(base)
                made = True
        if made:
            self.data.sync_dir()
        return made

    def _write_index(self, batches: Sequence[Batch]) -> None:
        if not batches:
            return
        rows: list[Any] = [index_records(records_of(batch)) for batch in batches]
        joined = rows[0] if len(rows) == 1 else np.concatenate(rows)
        first = batches[0].first_index
        self.index.write(first, joined)
        segments = self.index.segments
        begin, stop = first * INDEX_RECORD_BYTES, (first + len(joined)) * INDEX_RECORD_BYTES
        self._unsynced_index.update(range(segments.base_of(begin), stop, segments.segment_bytes))

    def sync(self) -> None:
        """Makes all data written so far durable."""
        self.data.sync(sorted(self._unsynced))
        self._unsynced.clear()
        self._synced_bytes, self.unsynced_bytes = self.unsynced_bytes, 0

    def sync_index(self) -> None:
        """Makes all index rows written so far durable."""
        self.index.segments.sync(sorted(self._unsynced_index.intersection(self.index.segments.bases)))
        self._unsynced_index.clear()

    def cut(self, position: int, first_index: int, end_index: int) -> None:
        """Removes everything from ``position`` on, durably, and the rows [first_index, end_index)."""
        written_end = self.position
        self.position = position
        with self._zero_lock:
            cut_tail(self.data, position, written_end)
            self._zeroed_to = min(self._zeroed_to, self._segment_end(position))
        self._unsynced.intersection_update(self.data.bases)
        self.index.cut(first_index, end_index)

    def restart(self, position: int) -> None:
        """Goes on at ``position``, in files that are still to be made."""
        with self._zero_lock:
            self.data.forget()
            self.index.segments.forget()
            self.position = self._opened_at = self._zeroed_to = position
        self._unsynced.clear()
        self._unsynced_index.clear()
        self.unsynced_bytes = 0

    def _segment_end(self, position: int) -> int:
        return self.data.base_of(position) + self.data.segment_bytes

    def _claim(self, position: int) -> None:
        """Keeps ``preallocate`` off what is about to be written; waits only for a chunk that is in the way."""
        if position > self._zeroed_to:
            with self._zero_lock:
                self._zeroed_to = max(self._zeroed_to, position)

    def preallocate(self) -> bool:
        """Writes and syncs one chunk of zeros behind the tail; returns whether there is more to do.

        Safe beside ``append``: below ``_zeroed_to`` nothing is ever zeroed, and a writer that goes beyond it moves it
        first.
        """
        with self._zero_lock:
            start, tail = self._zeroed_to, self.position
            stop = self._zero_stop(start)
            if stop <= start or start < tail or not self.data.holds(start):
                return False
            self.data.zero(start, stop)
            self._zeroed_to = stop
        try:
            self.data.sync([self.data.base_of(start)])
        except FileNotFoundError:
            if self.data.holds(start):
                raise
            return False  # it was removed meanwhile
        return stop < self._segment_end(start) and self._zero_stop(stop) > stop

    def _zero_stop(self, start: int) -> int:
        """Returns where the next chunk of zeros ends; ``start`` if it is not time for it yet.

        No more than was appended since the start, but for two small chunks: zeros are for a log that is busy, and would
        be most of what the disk gets from very many that are not. None while syncs are large: they gain little, and
        zeros would be half of what is written where the log is as fast as it can be.
        """
        if self._synced_bytes > _LARGE_SYNC_BYTES:
            return start
        appended = self.position - self._opened_at
        chunk = min(max(_ZERO_CHUNK_MIN, appended // 2), _ZERO_CHUNK_MAX, self._preallocate_bytes // 4)
        stop = min(start + chunk, self._segment_end(start))
        return stop if stop <= self.position + min(self._preallocate_bytes, max(2 * chunk, appended)) else start

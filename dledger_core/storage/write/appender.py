"""The writer's side of the data and index files: complete batches in as few writes as possible, then one sync.

Also preallocates the data file after the end of the log with zeros, because a sync of overwritten zeros is twice as
fast as one that allocates the blocks of a sparse file.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np

from dledger_core.checksum import Buffer
from dledger_core.errors import invariant
from dledger_core.raft.batch import Batch
from dledger_core.record import (
    INDEX_RECORD_BYTES,
    MAGIC_BLANK,
    PREFIX,
    Records,
    contiguous,
    index_rows,
    place,
    records_of,
)
from dledger_core.storage.check.recovery import RecoveredEnd, truncate_rows, truncate_tail
from dledger_core.storage.files.index_file import IndexFile
from dledger_core.storage.files.segments import Segments

_ZERO_CHUNK_MIN: Final = 64 << 10
_ZERO_CHUNK_MAX: Final = 1 << 20
_LARGE_SYNC_BYTES: Final = 512 << 10
_IDLE_S: Final = 5.0


def bounded(batches: Sequence[Batch], bytes_max: int) -> Iterator[Sequence[Batch]]:
    """Yield ``batches`` in order, in shares of at most ``bytes_max``; a larger one alone."""
    first, size = 0, 0
    for at, batch in enumerate(batches):
        if at > first and size + batch.nbytes > bytes_max:
            yield batches[first:at]
            first, size = at, 0
        size += batch.nbytes
    yield batches[first:]


class Appender:
    """Owned by the writer thread, except for ``preallocate``."""

    def __init__(self, data: Segments, index: IndexFile, end: RecoveredEnd, preallocate_bytes: int) -> None:
        self.data = data
        self.index = index
        self.position = position = end.position
        self._kept_end = end.written_end
        self._opened_at = position
        self._synced_bytes = 0
        self._preallocate_bytes = preallocate_bytes
        self._zeroed_to = position
        self._zero_lock = threading.Lock()
        self._unsynced: set[int] = set()
        self._unsynced_index: set[int] = set()
        self.unsynced_bytes = 0

    def append(self, batches: Sequence[Batch]) -> bool:
        """Write batches at the end of the log, and their index rows; return whether a data segment was created."""
        self.remove_kept_tail(batches[0].first_index)  # its records could look like the next ones of a shorter log
        writes: list[tuple[int, list[Buffer]]] = []
        for batch in batches:
            self._plan(records_of(batch), writes)
        # The file's name is durable before its content: after a crash a synced record is found only by its file's name.
        rolled = self._open_segments([at for at, _ in writes])
        # Without the claim the thread of preallocation could write zeros over a record
        # (test_preallocation_during_appends_changes_no_entry).
        self._claim(self.position)
        for at, buffers in writes:
            self.data.write(at, buffers)
            self._unsynced.add(self.data.base_of(at))
        # Rows are not synced with each batch: recovery rebuilds them from the data.
        self._write_index(batches)
        return rolled

    def _plan(self, records: Records, writes: list[tuple[int, list[Buffer]]]) -> None:
        """Add the writes of one batch, joined to the last one where they continue it, and move the end of the log."""
        # An entry has one position on all replicas: consume queues contain positions, and a repair copies records by
        # them (test_follower_writes_the_leaders_bytes). Staging has compared each one with its place; a batch that
        # starts here and spans no more than its own bytes is in one piece.
        last = records.last
        if records.first.position == self.position == last.position + last.size - records.nbytes:
            self._join(writes, self.position, records.data)
            self.position += records.nbytes
            self.unsynced_bytes += records.nbytes
            return
        positions = records.headers["position"].astype(np.int64)
        expected = place(records.sizes, self.position, self.data.segment_bytes)
        invariant(bool((positions == expected).all()), "a batch is not at the end of the log", position=self.position)
        view, offset = memoryview(records.data), 0
        for at, length in contiguous(positions, records.sizes):
            # No record spans two segments, because a trim deletes whole files.
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
        rows = [index_rows(records_of(batch)) for batch in batches]
        first = batches[0].first_index
        self.index.write_parts(first, rows)
        segments = self.index.segments
        begin, stop = first * INDEX_RECORD_BYTES, (batches[-1].last_index + 1) * INDEX_RECORD_BYTES
        self._unsynced_index.update(range(segments.base_of(begin), stop, segments.segment_bytes))

    def sync(self) -> None:
        """Make all data written so far durable."""
        # Entries are durable, and count for a majority, only after this; a leader too counts itself only then
        # (dissertation 10.2.1; mutation "entries count as durable before the sync").
        self.data.sync(sorted(self._unsynced))
        self._unsynced.clear()
        # Only after every sync succeeded: a failed one leaves the log unusable, with the bytes still counted.
        self._synced_bytes, self.unsynced_bytes = self.unsynced_bytes, 0

    def sync_index(self) -> None:
        """Make all index rows written so far durable."""
        self.index.segments.sync(sorted(self._unsynced_index.intersection(self.index.segments.bases)))
        self._unsynced_index.clear()

    def remove_kept_tail(self, first_index: int) -> None:
        """Remove a tail that recovery kept after the last entry, durably, and the rows from ``first_index`` on."""
        if self._kept_end:
            self.truncate(self.position, first_index)

    def truncate(self, position: int, first_index: int) -> None:
        """Remove everything from ``position`` on, durably, a kept tail too, and the rows from ``first_index`` on."""
        invariant(position <= self.position, "truncation past the end", position=position, end=self.position)
        written_end = max(self.position, self._kept_end)
        self.position = position
        # Under the lock, because the thread of preallocation goes by ``_zeroed_to`` too. Zeros up to the last written
        # byte: old records after a shorter log would look like its next ones
        # (test_truncation_and_restart_remove_a_kept_tail).
        with self._zero_lock:
            truncate_tail(self.data, position, written_end)
            self._zeroed_to = min(self._zeroed_to, self._segment_end(position))
            self._kept_end = 0
        self._unsynced.intersection_update(self.data.bases)
        truncate_rows(self.index, first_index - 1)
        # The next checkpoint syncs the zeros: an old row that returns would contradict the record that replaces its own
        # (test_no_file_is_closed_with_unsynced_writes).
        self._unsynced_index.update(self.index.segments.bases[-1:])

    def restart(self, position: int) -> None:
        """Continue at ``position``, in files that do not exist yet."""
        with self._zero_lock:
            self.data.forget()
            self.index.segments.forget()
            self.position = self._opened_at = self._zeroed_to = position
            self._kept_end = 0
        self._unsynced.clear()
        self._unsynced_index.clear()
        self.unsynced_bytes = 0

    def _segment_end(self, position: int) -> int:
        return self.data.base_of(position) + self.data.segment_bytes

    def _claim(self, position: int) -> None:
        """Keep ``preallocate`` off the bytes about to be written; wait only for a chunk that overlaps them."""
        if position > self._zeroed_to:
            with self._zero_lock:
                self._zeroed_to = max(self._zeroed_to, position)

    @property
    def needs_zeros(self) -> bool:
        """Whether ``preallocate`` has work, as far as the writer thread knows."""
        start = self._zeroed_to
        return self._zero_stop(start) > start and start >= self.position and self.data.covers(start)

    def preallocate(self) -> bool:
        """Write and sync one chunk of zeros after the end of the log; return whether there is more to do.

        Safe during ``append``: nothing before ``_zeroed_to`` is ever zeroed, and a writer that writes past it moves
        it first. A full disk is no error until a sync fails: zeros only make syncs faster, and entries may still fit.
        """
        with self._zero_lock:
            start, tail = self._zeroed_to, self.position
            stop = self._zero_stop(start)
            if stop <= start or start < tail or self._kept_end or not self.data.covers(start):
                return False
            file, complete = self.data.preallocate(start, stop)
            if complete:
                self._zeroed_to = stop
        # Also after ENOSPC: this sync may get the kernel's report of a lost write of the log.
        file.datasync()
        file.close()
        return complete and stop < self._segment_end(start) and self._zero_stop(stop) > stop

    def _zero_stop(self, start: int) -> int:
        """Return the end of the next chunk of zeros; ``start`` if none is due.

        No more than was appended since the start, except for two small chunks: only a busy log gains, and zeros would
        be most of the bytes that many idle logs write. None while syncs are large: they gain little, and zeros would
        be half of the bytes written when the log is fastest.
        """
        if self._synced_bytes > _LARGE_SYNC_BYTES:
            return start
        appended = self.position - self._opened_at
        chunk = min(max(_ZERO_CHUNK_MIN, appended // 2), _ZERO_CHUNK_MAX, self._preallocate_bytes // 4)
        stop = min(start + chunk, self._segment_end(start))
        return stop if stop <= self.position + min(self._preallocate_bytes, max(2 * chunk, appended)) else start


class Preallocation:
    """A thread that runs ``step`` while there is work; starts with the first ``poke``, ends when the log is idle."""

    def __init__(self, step: Callable[[], bool]) -> None:
        self._step = step
        self._wanted = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._closing = threading.Event()

    def poke(self) -> None:
        """Report that the end of the log has moved."""
        if self._wanted.is_set():
            return
        with self._lock:
            self._wanted.set()
            if self._thread is None and not self._closing.is_set():
                self._thread = threading.Thread(target=self._run, name="dledger-preallocate", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            woken = self._wanted.wait(_IDLE_S)
            with self._lock:
                if self._closing.is_set() or (not woken and not self._wanted.is_set()):
                    self._thread = None
                    return
            self._wanted.clear()
            while not self._closing.is_set() and self._step():
                pass

    def close(self) -> None:
        """End the thread and wait for it."""
        with self._lock:
            self._closing.set()
            self._wanted.set()
            thread = self._thread
        if thread is not None:
            thread.join()
